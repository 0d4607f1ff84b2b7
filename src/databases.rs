//! The places of the databases that the config names: ledger and keys are files of the data
//! folder, or on one database server. Rates may be on a server of their own.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use tollgate_config::{Config, Postgres, Redis};
use tollgate_ledger::{DatabasePlace, Ledger, LedgerReader};
use tollgate_rates::RedisAddress;
use tollgate_sql::ServerAddress;

/// Returns the place of the ledger.
///
/// # Errors
/// The server's address is invalid, or the file with its password cannot be read.
pub fn ledger(config: &Config) -> Result<DatabasePlace> {
    ledger_in(config, config.data())
}

/// Returns the place of the ledger, as [`ledger`], with `data` for the data folder's path.
///
/// # Errors
/// As [`ledger`].
pub fn ledger_in(config: &Config, data: &Path) -> Result<DatabasePlace> {
    place(config, &data.join("ledger.db"))
}

/// Returns the place of the keys, with `data` for the data folder's path.
///
/// # Errors
/// As [`ledger`], or the config names a server and the folder has keys in a file, which the
/// gateway would not accept any more.
pub fn keys_in(config: &Config, data: &Path) -> Result<DatabasePlace> {
    let file = data.join("keys.db");
    let place = place(config, &file)?;
    if matches!(place, DatabasePlace::Server(_)) && file.exists() {
        bail!(
            "{} has keys, and [cluster.postgres] names a server for them: move them with `tollgate migrate --to postgres`",
            file.display()
        );
    }
    Ok(place)
}

fn place(config: &Config, file: &Path) -> Result<DatabasePlace> {
    match config.postgres() {
        None => Ok(DatabasePlace::File(file.to_owned())),
        Some(server) => address(server).map(DatabasePlace::Server).context("[cluster.postgres]"),
    }
}

/// Opens the ledger for reading; `None` if there is none yet.
///
/// # Errors
/// The ledger cannot be read.
pub fn open_ledger(place: &DatabasePlace) -> Result<Option<LedgerReader>> {
    let failed = || format!("cannot read the ledger {place}");
    if !place.has_ledger().with_context(failed)? {
        return Ok(None);
    }
    Ledger::open_read_only(place.clone()).map(Some).with_context(failed)
}

/// Returns the address of the server on which gateways share rates; `None` if the config names
/// none.
///
/// # Errors
/// The address is invalid, or the file with the password cannot be read.
pub fn redis(config: &Config) -> Result<Option<RedisAddress>> {
    let Some(Redis { url, password, ca }) = config.redis() else { return Ok(None) };
    let address = || {
        let (password, ca) = secrets(password.as_deref(), ca.as_deref())?;
        anyhow::Ok(RedisAddress::new(url, password.as_deref(), ca.as_deref())?)
    };
    address().map(Some).context("[cluster.redis]")
}

fn address(server: &Postgres) -> Result<ServerAddress> {
    let Postgres { url, password, ca } = server;
    let (password, ca) = secrets(password.as_deref(), ca.as_deref())?;
    Ok(ServerAddress::new(url, password.as_deref(), ca.as_deref())?)
}

/// Reads the password of a server, and the authority of its certificate.
fn secrets(
    password: Option<&Path>,
    ca: Option<&Path>,
) -> Result<(Option<String>, Option<Vec<u8>>)> {
    let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
    let password = password.map(read).transpose()?;
    let password = password.map(String::from_utf8).transpose().context("the password")?;
    // An editor ends the file with a newline.
    let password = password.map(|text| text.trim_end_matches(['\r', '\n']).to_owned());
    Ok((password, ca.map(read).transpose()?))
}
