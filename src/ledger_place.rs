//! The place of the ledger that the config names: a file of the data folder, or a
//! database server.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use tollgate_config::{Config, Postgres};
use tollgate_ledger::{Ledger, LedgerPlace, LedgerReader};
use tollgate_sql::ServerAddress;

/// Returns the place of the ledger.
///
/// # Errors
/// The server's address is invalid, or the file with its password cannot be read.
pub fn of(config: &Config) -> Result<LedgerPlace> {
    in_folder(config, config.data())
}

/// Returns the place of the ledger, as [`of`], with `data` for the data folder's path.
///
/// # Errors
/// As [`of`].
pub fn in_folder(config: &Config, data: &Path) -> Result<LedgerPlace> {
    match config.postgres() {
        None => Ok(LedgerPlace::File(data.join("ledger.db"))),
        Some(server) => address(server).map(LedgerPlace::Server).context("[cluster.postgres]"),
    }
}

/// Opens the ledger for reading; `None` if there is none yet.
///
/// # Errors
/// The ledger cannot be read.
pub fn open(place: &LedgerPlace) -> Result<Option<LedgerReader>> {
    let failed = || format!("cannot read the ledger {place}");
    if !place.has_ledger().with_context(failed)? {
        return Ok(None);
    }
    Ledger::open_read_only(place.clone()).map(Some).with_context(failed)
}

fn address(server: &Postgres) -> Result<ServerAddress> {
    let Postgres { url, password, ca } = server;
    let read = |path: &PathBuf| fs::read(path).with_context(|| path.display().to_string());
    let password = password.as_ref().map(read).transpose()?;
    let password = password.map(String::from_utf8).transpose().context("the password")?;
    // An editor ends the file with a newline.
    let password = password.as_deref().map(|text| text.trim_end_matches(['\r', '\n']));
    let ca = ca.as_ref().map(read).transpose()?;
    Ok(ServerAddress::new(url, password, ca.as_deref())?)
}
