//! Opening a ledger for writing: makes the tables of a new one, and migrates a
//! file of an older format.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tollgate_sql::ServerAddress;

use super::chain::Chain;
use super::wal_rewrite::WalRewriter;
use crate::error::LedgerError;
use crate::hex::hex;
use crate::rows::database::Database;
use crate::rows::records::UnrecordedCounts;
use crate::rows::schema::{self, FORMAT, FoundFormat, WITHOUT_RECORDS};
use crate::rows::{Tables, faults, gateway_days, records, server_schema};
use crate::rules::record::Before;

/// Opens the ledger at `path` for writing. `log` first rewrites the write-ahead
/// log, because SQLite would append to it.
pub(crate) fn open_writer(
    path: &Path,
    max_pages: Option<u32>,
    log: &WalRewriter,
) -> Result<Database, LedgerError> {
    log.rewrite(path)
        .map_err(|source| LedgerError::Log { path: path.to_owned(), source: Arc::new(source) })?;
    let mut database = Database::open_writer(path, max_pages)?;
    let failed = |error| at(path, error);
    match schema::find_format(database.tables()).map_err(failed)? {
        FoundFormat::Empty => migrate(&mut database, None).map_err(failed)?,
        FoundFormat::Older(found) => {
            let path = path.display();
            tracing::info!(
                %path,
                found,
                format = FORMAT,
                "migrating the ledger to the current format; this may take several seconds"
            );
            migrate(&mut database, Some(found)).map_err(failed)?;
        }
        // The test below refuses every format but the current one.
        FoundFormat::Other(_) => {}
    }
    // After the migration every accepted file has the current format.
    schema::refuse_other_formats(path, database.tables())?;
    schema::add_unnumbered(database.tables()).map_err(failed)?;
    Ok(database)
}

/// Opens the ledger on a server for writing. `limit` is the time within which the server
/// must answer, and `home` the data folder for which charges are counted.
pub(crate) fn open_server(
    address: &ServerAddress,
    limit: Duration,
    home: Option<&str>,
) -> Result<Database, LedgerError> {
    let mut database = Database::connect_writer(address, limit, home)?;
    if server_schema::find_format(database.tables())?.is_none() {
        let transaction = database.begin()?;
        let tables = transaction.tables();
        // Under the writers' lock: another gateway may have made the tables meanwhile.
        if server_schema::find_format(tables)?.is_none() {
            server_schema::make_tables(tables)?;
            Chain::begin(tables, None)?;
            transaction.commit()?;
        }
    }
    server_schema::refuse_other_formats(address, database.tables())?;
    if let Some(home) = home {
        let transaction = database.begin()?;
        gateway_days::prepare(transaction.tables(), home)?;
        faults::prepare(transaction.tables())?;
        transaction.commit()?;
    }
    Ok(database)
}

/// Makes the tables of a new file, or adds what a file of format `found` lacks. One
/// transaction: a start that is killed leaves the file as it was.
fn migrate(database: &mut Database, found: Option<u32>) -> Result<(), LedgerError> {
    let transaction = database.begin()?;
    let tables = transaction.tables();
    // Older files have these tables.
    if found.is_none() {
        schema::make_tables(tables)?;
    }
    match found {
        None => {
            schema::add_audit_tables(tables)?;
            Chain::begin(tables, None)?;
        }
        Some(WITHOUT_RECORDS) => {
            schema::add_audit_tables(tables)?;
            // The first record vouches for the rows that are older than the log.
            let before = describe_unrecorded(tables, WITHOUT_RECORDS)?;
            Chain::begin(tables, Some(&before))?;
        }
        Some(_) => {}
    }
    // Writes the format number last, in the same transaction.
    schema::bring_up_to_date(tables, found)?;
    transaction.commit()
}

/// Describes the rows that have no audit record.
pub(crate) fn describe_unrecorded(tables: Tables<'_>, format: u32) -> Result<Before, LedgerError> {
    let UnrecordedCounts { blocks, attempts, fault_caps, refused_blocks } =
        records::count_unrecorded(tables)?;
    let mut blocks_sha256 = LinesSha256::new();
    records::each_unrecorded_block(tables, |digest| blocks_sha256.add(digest))?;
    let mut fault_caps_sha256 = LinesSha256::new();
    records::each_unrecorded_cap(tables, |cap| fault_caps_sha256.add(cap))?;
    Ok(Before {
        attempts,
        blocks,
        blocks_sha256: blocks_sha256.finish(),
        fault_caps,
        fault_caps_sha256: fault_caps_sha256.finish(),
        format,
        refused_blocks,
    })
}

/// SHA-256 over lines of text, with a newline after each.
pub(crate) struct LinesSha256(aws_lc_rs::digest::Context);

impl LinesSha256 {
    /// Returns the hash of no lines.
    pub(crate) fn new() -> Self {
        Self(aws_lc_rs::digest::Context::new(&aws_lc_rs::digest::SHA256))
    }

    /// Adds a line.
    pub(crate) fn add(&mut self, line: &str) {
        self.0.update(line.as_bytes());
        self.0.update(b"\n");
    }

    /// Returns the hash in hex.
    pub(crate) fn finish(self) -> String {
        hex(self.0.finish().as_ref())
    }
}

/// Names the file in a storage error.
fn at(path: &Path, error: LedgerError) -> LedgerError {
    match error {
        LedgerError::Storage(source) => LedgerError::Open { path: path.to_owned(), source },
        error => error,
    }
}
