//! `tollgate migrate`: moves ledger and keys from their files to a database server.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::json;
use tollgate_ledger::keys::KeyDatabase;
use tollgate_ledger::{AdminAction, Checked, DatabasePlace, Finding, Ledger, Manifest, Moved};
use tollgate_sql::ServerAddress;

use crate::common::{Place, now, say};
use crate::{audit, data, databases};

/// Move ledger and keys from the data folder to the server of [cluster.postgres].
///
/// The gateway must not run. Every row is copied unchanged, with the audit log; an
/// interrupted move can be run again. The files are then kept as ledger.db.moved and
/// keys.db.moved, and not used any more. The file `pepper` stays in the data folder;
/// other gateways with the same keys need a copy of it.
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

/// Moves ledger and keys.
pub fn run(arguments: MigrateArguments) -> Result<()> {
    let Store::Postgres = arguments.to;
    let config = arguments.place.load()?;
    let folder = config.data();
    let DatabasePlace::Server(address) = databases::ledger(&config)? else {
        bail!("the config names no server: write its URL under [cluster.postgres]");
    };
    let (ledger, keys) = (folder.join("ledger.db"), folder.join("keys.db"));
    if !ledger.is_file() && !keys.is_file() {
        bail!("there is no ledger at {}, and no keys beside it", ledger.display());
    }
    // A running gateway would write to the files while they are copied.
    let _lock = data::lock(folder)?;
    // The ledger first: a server with another ledger is not given these keys.
    if ledger.is_file() {
        move_ledger(folder, &ledger, &address)?;
    }
    if keys.is_file() {
        move_keys(&keys, &address)?;
    }
    let place = DatabasePlace::Server(address);
    // The manifest names the keys of the server, so there must be tables, also without any key.
    KeyDatabase::open(place.clone())?;
    Manifest::refresh(folder, &place).context("the databases are moved, but not the manifest")
}

fn move_keys(path: &Path, address: &ServerAddress) -> Result<()> {
    let mut file = KeyDatabase::open(DatabasePlace::File(path.to_owned()))?;
    let count = file.snapshot()?.count()?;
    let is_new = file
        .copy_to_server(DatabasePlace::Server(address.clone()))
        .with_context(|| format!("cannot move the keys to {address}"))?;
    // The close copies the write-ahead log into the file.
    drop(file);
    let kept = keep(path)?;
    let when = if is_new { "" } else { " by an earlier run" };
    say(format!(
        "moved{when}: {address}: {count} keys; the old file is kept as {}\n",
        kept.display()
    ))
}

fn move_ledger(folder: &Path, path: &Path, address: &ServerAddress) -> Result<()> {
    let before = Ledger::check_file(path)
        .with_context(|| format!("cannot check the ledger {}", path.display()))?;
    refuse_damage(&before, &path.display().to_string())?;
    let key = audit::signing_key(folder, &DatabasePlace::File(path.to_owned()))?;
    let action = AdminAction {
        // The same id each time, so that a repeated move is recorded once.
        id: format!("moved-to-{address}"),
        at: now(),
        operation: "ledger.moved".to_owned(),
        actor: format!("uid {}", rustix::process::getuid().as_raw()),
        user: None,
        detail: json!({ "to": address.to_string() }),
    };
    let moved = Ledger::move_to_server(path, address, &action, &key)
        .with_context(|| format!("cannot move the ledger to {address}"))?;
    let place = DatabasePlace::Server(address.clone());
    let after = Ledger::check(&place).with_context(|| format!("cannot check {place}"))?;
    refuse_damage(&after, &place.to_string())?;
    // Renamed last: until the server's copy is checked, the file is the ledger.
    let kept = keep(path)?;
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

/// Renames a file that is not used any more, and returns its new path.
fn keep(path: &Path) -> Result<PathBuf> {
    let kept = path.with_extension("db.moved");
    fs::rename(path, &kept).with_context(|| path.display().to_string())?;
    File::open(path.parent().unwrap_or(Path::new(".")))?.sync_all()?;
    Ok(kept)
}

fn refuse_damage(checked: &Checked, shown: &str) -> Result<()> {
    match checked.findings.iter().find(|finding| !finding.is_remark()) {
        Some(Finding { message, .. }) => bail!("{shown} is damaged: {message}"),
        None => Ok(()),
    }
}
