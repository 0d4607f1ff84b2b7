//! `tollgate ledger`: whether the ledger holds, copies of it, and putting one
//! back.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tollgate_ledger::{AdminAction, Checked, Finding, Ledger};

use crate::common::{Place, now, say};
use crate::{cli, data};

/// Check, back up and restore the ledger.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Read everything and say whether it holds, also beside a running
    /// gateway. Exit code 0: it does; 1: it is damaged; 2: it could not be read.
    Check(Check),
    /// Write a checked copy of one moment, also beside a running gateway.
    Backup(Backup),
    /// Put a backup in the ledger's place; the gateway must not run. What was
    /// there is kept beside it.
    Restore(Restore),
}

#[derive(clap::Args)]
struct Check {
    #[command(flatten)]
    place: Place,
    /// This file, a backup for example, instead of the data folder's ledger.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// As JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Backup {
    #[command(flatten)]
    place: Place,
    /// The file to write, which replaces an older one; or a folder, in which it
    /// is named by the time.
    #[arg(value_name = "FILE|DIR")]
    to: PathBuf,
}

#[derive(clap::Args)]
struct Restore {
    #[command(flatten)]
    place: Place,
    /// What `tollgate ledger backup` wrote.
    #[arg(value_name = "FILE")]
    from: PathBuf,
}

/// Does what was asked.
pub fn run(arguments: Arguments) -> ExitCode {
    match arguments.action {
        Action::Check(arguments) => match check(&arguments) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                cli::exit(Err(error));
                ExitCode::from(2)
            }
        },
        Action::Backup(arguments) => cli::exit(backup(&arguments)),
        Action::Restore(arguments) => cli::exit(restore(&arguments)),
    }
}

fn check(arguments: &Check) -> Result<bool> {
    let path = match &arguments.file {
        Some(file) => file.clone(),
        None => ledger_of(&arguments.place)?,
    };
    if !path.is_file() {
        bail!("there is no ledger at {}", path.display());
    }
    let checked = Ledger::check_file(&path)
        .with_context(|| format!("cannot check the ledger {}", path.display()))?;
    if arguments.json {
        say(format!("{:#}\n", as_json(&path, &checked)))?;
    } else {
        say(text(&path, &checked))?;
    }
    Ok(checked.is_sound())
}

fn as_json(path: &Path, checked: &Checked) -> serde_json::Value {
    let Checked { blocks, entries, charges, records, signed, findings } = checked;
    let (remarks, damage): (Vec<&Finding>, Vec<&Finding>) =
        findings.iter().partition(|finding| finding.is_remark());
    json!({
        "object": "ledger.check",
        "path": path.display().to_string(),
        "sound": checked.is_sound(),
        "blocks": blocks,
        "entries": entries,
        "charges": charges,
        "records": records,
        "signed": signed,
        "damage": damage,
        "remarks": remarks,
    })
}

fn text(path: &Path, checked: &Checked) -> String {
    let Checked { blocks, entries, charges, records, signed, findings } = checked;
    let mut text = String::new();
    for Finding { kind, message } in findings.iter().filter(|finding| !finding.is_remark()) {
        text += &format!("damaged ({kind}): {message}\n");
    }
    for Finding { message, .. } in findings.iter().filter(|finding| finding.is_remark()) {
        text += &format!("remark: {message}\n");
    }
    let verdict = if checked.is_sound() { "sound" } else { "damaged" };
    text + &format!(
        "{verdict}: {}: {blocks} blocks, {entries} entries, {charges} charges, {records} records, \
         {signed} of them signed\n",
        path.display()
    )
}

fn backup(arguments: &Backup) -> Result<()> {
    let from = ledger_of(&arguments.place)?;
    if !from.is_file() {
        bail!("there is no ledger at {}", from.display());
    }
    let to = if arguments.to.is_dir() {
        arguments.to.join(format!("ledger-{}.db", stamp()))
    } else {
        arguments.to.clone()
    };
    if to == from {
        bail!("{} is the ledger itself", to.display());
    }
    let checked = Ledger::backup(&from, &to)
        .with_context(|| format!("no backup of {} was written", from.display()))?;
    let Checked { entries, records, .. } = checked;
    say(format!("{}: {entries} entries, {records} records, sound\n", to.display()))
}

/// `20261120T120000Z`
fn stamp() -> String {
    let now = now();
    let of_day = now.unix_seconds() % 86_400;
    let (hours, minutes, seconds) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    let day = now.day().to_string().replace('-', "");
    format!("{day}T{hours:02}{minutes:02}{seconds:02}Z")
}

fn restore(arguments: &Restore) -> Result<()> {
    let path = ledger_of(&arguments.place)?;
    let folder = path.parent().context("a data folder")?;
    let _lock = data::lock(folder)?;
    let from = std::path::absolute(&arguments.from)?;
    let at = now();
    let action = AdminAction {
        id: format!("restore-{}", at.0),
        at,
        operation: "ledger.restored".to_owned(),
        actor: format!("uid {}", rustix::process::getuid().as_raw()),
        user: None,
        detail: json!({ "from": from.display().to_string() }),
    };
    let aside = Ledger::restore(&from, &path, &action)
        .with_context(|| format!("{} is not restored", path.display()))?;
    let kept = match aside {
        Some(aside) => format!("; what was there is {}", aside.display()),
        None => String::new(),
    };
    say(format!("{} is restored{kept}\n", path.display()))
}

fn ledger_of(place: &Place) -> Result<PathBuf> {
    Ok(place.load()?.data().join("ledger.db"))
}
