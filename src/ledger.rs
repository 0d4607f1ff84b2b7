//! `tollgate ledger`: checks, backs up, restores and archives the ledger.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tollgate_domain::UtcMonth;
use tollgate_ledger::{
    AdminAction, Archivable, Checked, DatabasePlace, Finding, Ledger, Manifest, Range,
};

use crate::common::{self, Place, now, say};
use crate::{audit, data, databases};

/// Check, back up, restore and archive the ledger.
#[derive(clap::Args)]
pub struct LedgerArguments {
    #[command(subcommand)]
    action: LedgerAction,
}

#[derive(clap::Subcommand)]
enum LedgerAction {
    /// Check the whole ledger for damage. The gateway may be running.
    ///
    /// Exit code 0: sound; 1: damaged; 2: it could not be read.
    Check(Check),
    /// Write a consistent, checked copy. The gateway may be running.
    Backup(Backup),
    /// Replace the ledger by a backup. The gateway must not run.
    ///
    /// The old ledger is kept beside it.
    Restore(Restore),
    /// Move the records of old months to a folder. The gateway must not run.
    ///
    /// Usage, caps and statements do not change.
    Archive(Archive),
}

#[derive(clap::Args)]
struct Check {
    #[command(flatten)]
    place: Place,
    /// A file to check, such as a backup, instead of the data folder's ledger.
    #[arg(value_name = "FILE")]
    file: Option<PathBuf>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

#[derive(clap::Args)]
struct Backup {
    #[command(flatten)]
    place: Place,
    /// The file to write, which replaces an existing one; or a folder, in which the
    /// file is named by the time.
    #[arg(value_name = "FILE|DIR")]
    to: PathBuf,
}

#[derive(clap::Args)]
struct Restore {
    #[command(flatten)]
    place: Place,
    /// A file that `tollgate ledger backup` wrote.
    #[arg(value_name = "FILE")]
    from: PathBuf,
}

#[derive(clap::Args)]
struct Archive {
    #[command(flatten)]
    place: Place,
    /// Archive the months before this one, such as 2026-11.
    #[arg(long, value_name = "MONTH")]
    before: UtcMonth,
    /// The folder to create. It is a data folder that can be read with `--data
    /// DIR`.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

/// Runs the subcommand.
pub fn run(arguments: LedgerArguments) -> ExitCode {
    match arguments.action {
        LedgerAction::Check(arguments) => match check(&arguments) {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                // Exit code 1 means damage, so a failure of the check itself has
                // another code.
                common::exit(Err(error));
                ExitCode::from(2)
            }
        },
        LedgerAction::Backup(arguments) => common::exit(backup(&arguments)),
        LedgerAction::Restore(arguments) => common::exit(restore(&arguments)),
        LedgerAction::Archive(arguments) => common::exit(archive(&arguments)),
    }
}

fn check(arguments: &Check) -> Result<bool> {
    let place = match &arguments.file {
        Some(file) => DatabasePlace::File(file.clone()),
        None => databases::ledger(&arguments.place.load()?)?,
    };
    if let DatabasePlace::File(path) = &place
        && !path.is_file()
    {
        bail!("there is no ledger at {place}");
    }
    let checked =
        Ledger::check(&place).with_context(|| format!("cannot check the ledger {place}"))?;
    if arguments.json {
        say(format!("{:#}\n", as_json(&place, &checked)))?;
    } else {
        say(text(&place, &checked))?;
    }
    Ok(checked.is_sound())
}

fn as_json(place: &DatabasePlace, checked: &Checked) -> serde_json::Value {
    let Checked { blocks, entries, charges, records, signed, findings } = checked;
    let (remarks, damage): (Vec<&Finding>, Vec<&Finding>) =
        findings.iter().partition(|finding| finding.is_remark());
    json!({
        "object": "ledger.check",
        "path": place.to_string(),
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

fn text(place: &DatabasePlace, checked: &Checked) -> String {
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
        "{verdict}: {place}: {blocks} blocks, {entries} entries, {charges} charges, \
         {records} records, {signed} of them signed\n"
    )
}

fn backup(arguments: &Backup) -> Result<()> {
    let from = file_of(&arguments.place, "copy")?;
    if !from.is_file() {
        bail!("there is no ledger at {}", from.display());
    }
    let to = if arguments.to.is_dir() {
        arguments.to.join(format!("ledger-{}.db", stamp()))
    } else {
        arguments.to.clone()
    };
    // The database would only report that it cannot open a file. A path that ends with a
    // slash names a folder.
    let is_folder = arguments.to.as_os_str().as_encoded_bytes().ends_with(b"/");
    let folder = if is_folder { Some(to.as_path()) } else { to.parent() };
    if let Some(folder) = folder.filter(|folder| !folder.as_os_str().is_empty())
        && !folder.is_dir()
    {
        bail!("there is no folder {}; create it first", folder.display());
    }
    // A backup over the ledger itself would destroy it.
    if to == from {
        bail!("{} is the ledger itself", to.display());
    }
    let checked =
        Ledger::backup(&from, &to).with_context(|| format!("cannot back up {}", from.display()))?;
    let Checked { entries, records, .. } = checked;
    say(format!("{}: {entries} entries, {records} records, sound\n", to.display()))
}

/// Returns the current UTC time in the form `20261120T120000Z`.
fn stamp() -> String {
    let now = now();
    let of_day = now.unix_seconds() % 86_400;
    let (hours, minutes, seconds) = (of_day / 3_600, of_day / 60 % 60, of_day % 60);
    let day = now.day().to_string().replace('-', "");
    format!("{day}T{hours:02}{minutes:02}{seconds:02}Z")
}

fn restore(arguments: &Restore) -> Result<()> {
    let path = file_of(&arguments.place, "restore")?;
    let folder = path.parent().context("a data folder")?;
    // A running gateway would write to the file that is replaced.
    let _lock = data::lock(folder)?;
    // The audit record is read later, from other working folders.
    let from = std::path::absolute(&arguments.from)?;
    let action = done("restored", json!({ "from": from.display().to_string() }));
    let aside = Ledger::restore(&from, &path, &action)
        .with_context(|| format!("cannot restore {}", path.display()))?;
    Manifest::replace_ledger(folder).context("the ledger is restored, but not the manifest")?;
    let kept = match aside {
        Some(aside) => format!("; the old ledger is {}", aside.display()),
        None => String::new(),
    };
    say(format!("{} is restored{kept}\n", path.display()))
}

/// Copies the old records, syncs the copy, and only then removes the records from
/// the ledger.
fn archive(arguments: &Archive) -> Result<()> {
    let Archive { place, before, out } = arguments;
    let path = file_of(place, "archive")?;
    let folder = path.parent().context("a data folder")?;
    if !path.is_file() {
        bail!("there is no ledger at {}", path.display());
    }
    if out.exists() {
        bail!("{} exists already", out.display());
    }
    // No record may be added between the copy and the removal.
    let _lock = data::lock(folder)?;
    let reader = Ledger::open_read_only(&path)
        .with_context(|| format!("cannot read the ledger {}", path.display()))?;
    let Archivable { from, to } = reader.archivable(*before, now())?;
    // Only a complete archive gets the final name.
    let unfinished = audit::unfinished(out)?;
    Ledger::backup(&path, &unfinished.join("ledger.db"))
        .with_context(|| format!("cannot copy {}", path.display()))?;
    // A range names the last record to include; `to` is the first one that stays.
    let range = Range { from, to: Some(to - 1) };
    audit::write_folder(&reader, range, folder, &unfinished)?;
    // The ledger is rewritten below, so no reader may be open.
    drop(reader);
    // The copy must be durable before the ledger forgets the records.
    File::open(&unfinished)?.sync_all()?;
    fs::rename(&unfinished, out).with_context(|| out.display().to_string())?;
    let shown = std::path::absolute(out)?;
    // The rename is durable only after a sync of the parent folder.
    File::open(shown.parent().unwrap_or(&shown))?.sync_all()?;
    let detail = json!({
        "before": before.to_string(), "from": from, "folder": shown.display().to_string(),
    });
    Ledger::compact(&path, to, done("archived", detail)).with_context(|| {
        format!(
            "the archive {} is complete, but its records are still in the ledger",
            out.display()
        )
    })?;
    Manifest::replace_ledger(folder)?;
    // The ledger was rewritten, so it is checked before the success is reported.
    let checked = Ledger::check_file(&path)?;
    if !checked.is_sound() {
        bail!("the ledger is damaged:\n{}", text(&DatabasePlace::from(&path), &checked));
    }
    say(format!(
        "{}: records {from} to {}\n{}",
        out.display(),
        to - 1,
        text(&DatabasePlace::from(&path), &checked)
    ))
}

/// Returns the audit record of an operation that is done now.
fn done(what: &str, detail: serde_json::Value) -> AdminAction {
    let at = now();
    AdminAction {
        // With the time in nanoseconds: an action of a known id would not be recorded again.
        id: format!("{what}-{}", at.0),
        at,
        operation: format!("ledger.{what}"),
        actor: format!("uid {}", rustix::process::getuid().as_raw()),
        user: None,
        detail,
    }
}

/// Returns the file of the ledger.
///
/// # Errors
/// The ledger is on a database server, which has tools of its own for `what`.
fn file_of(place: &Place, what: &str) -> Result<PathBuf> {
    match databases::ledger(&place.load()?)? {
        DatabasePlace::File(path) => Ok(path),
        DatabasePlace::Server(address) => bail!(
            "the ledger is on the database server {address}: {what} it with PostgreSQL's own tools"
        ),
    }
}
