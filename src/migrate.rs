//! `tollgate migrate`: moves the ledger from its file to a database server.

use std::fs::{self, File};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tollgate_ledger::{AdminAction, Checked, Finding, Ledger, LedgerPlace, Manifest, Moved};

use crate::common::{Place, now, say};
use crate::{audit, data, ledger_place};

/// Move the ledger from the data folder to the server of [cluster.postgres].
///
/// The gateway must not run. Every row is copied unchanged, with the audit log, in
/// one transaction; an interrupted move can be run again. The file is then kept
/// as ledger.db.moved and not used any more.
#[derive(clap::Args)]
pub struct MigrateArguments {
    #[command(flatten)]
    place: Place,
    /// The store to move to.
    #[arg(long, value_name = "STORE")]
    to: Store,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Store {
    /// The PostgreSQL server of [cluster.postgres] in the config.
    Postgres,
}

/// Moves the ledger.
pub fn run(arguments: MigrateArguments) -> Result<()> {
    let Store::Postgres = arguments.to;
    let config = arguments.place.load()?;
    let folder = config.data();
    let LedgerPlace::Server(address) = ledger_place::of(&config)? else {
        bail!("the config names no server: write its URL under [cluster.postgres]");
    };
    let path = folder.join("ledger.db");
    if !path.is_file() {
        bail!("there is no ledger at {}", path.display());
    }
    // A running gateway would write to the file while it is copied.
    let _lock = data::lock(folder)?;
    let before = Ledger::check_file(&path)
        .with_context(|| format!("cannot check the ledger {}", path.display()))?;
    refuse_damage(&before, &path.display().to_string())?;
    let key = audit::signing_key(folder, &LedgerPlace::File(path.clone()))?;
    let action = AdminAction {
        // The same id each time, so that a repeated move is recorded once.
        id: format!("moved-to-{address}"),
        at: now(),
        operation: "ledger.moved".to_owned(),
        actor: format!("uid {}", rustix::process::getuid().as_raw()),
        user: None,
        detail: json!({ "to": address.to_string() }),
    };
    let moved = Ledger::move_to_server(&path, &address, &action, &key)
        .with_context(|| format!("cannot move the ledger to {address}"))?;
    let place = LedgerPlace::Server(address);
    let after = Ledger::check(&place).with_context(|| format!("cannot check {place}"))?;
    refuse_damage(&after, &place.to_string())?;
    // Renamed last: until the server's copy is checked, the file is the ledger.
    let kept = path.with_extension("db.moved");
    fs::rename(&path, &kept).with_context(|| path.display().to_string())?;
    File::open(folder)?.sync_all()?;
    Manifest::refresh(folder, &place).context("the ledger is moved, but not the manifest")?;
    let Checked { entries, records, signed, .. } = after;
    let when = match moved {
        Moved::Now => "",
        Moved::Before => " by an earlier run",
    };
    say(format!(
        "moved{when}: {place}: {entries} entries, {records} records, {signed} of them signed, sound\n\
         the old file is kept as {}\n",
        kept.display()
    ))
}

fn refuse_damage(checked: &Checked, shown: &str) -> Result<()> {
    match checked.findings.iter().find(|finding| !finding.is_remark()) {
        Some(Finding { message, .. }) => bail!("{shown} is damaged: {message}"),
        None => Ok(()),
    }
}
