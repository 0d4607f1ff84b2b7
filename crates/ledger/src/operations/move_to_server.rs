//! The move of a ledger from its file to a server: every row unchanged, with the audit log,
//! in one transaction of the server. A move that is interrupted has changed nothing there,
//! and can be run again at any time.

use std::path::Path;
use std::time::Duration;

use tollgate_sql::ServerAddress;

use super::chain::Chain;
use super::migrate::open_writer;
use super::post;
use super::wal_rewrite::WalRewriter;
use crate::act::AdminAction;
use crate::audit_key::AuditKey;
use crate::error::LedgerError;
use crate::rows::database::Database;
use crate::rows::{copies, records, server_schema};

/// The time within which the server must answer. Each statement has a bounded number of rows.
const LIMIT: Duration = Duration::from_secs(60);

/// The result of a move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moved {
    /// The rows were copied.
    Now,
    /// The server has the ledger already: an earlier move copied it.
    Before,
}

/// Copies the ledger at `path` to the server at `address`. Before that it records `action`, and
/// signs the log with `key`.
///
/// # Errors
/// The file or the server cannot be read or written, or the server has another ledger.
pub(crate) fn run(
    path: &Path,
    address: &ServerAddress,
    action: &AdminAction,
    key: &AuditKey,
) -> Result<Moved, LedgerError> {
    let mut file = open_writer(path, None, &WalRewriter::default())?;
    let mut chain = Chain::load(file.tables())?;
    let transaction = file.begin()?;
    // The record is copied, so it ends the log here and is in the log there.
    post::record_action(transaction.tables(), &mut chain, action)?;
    if chain.unsigned() > 0 {
        chain.sign(transaction.tables(), key)?;
    }
    transaction.commit()?;
    let moved = copy(&file, address)?;
    // The file is renamed next, so no commit may stay in a log beside it.
    file.leave_one_file()?;
    Ok(moved)
}

fn copy(file: &Database, address: &ServerAddress) -> Result<Moved, LedgerError> {
    let mut server = Database::connect_writer(address, LIMIT, None)?;
    let transaction = server.begin()?;
    let (from, to) = (file.tables(), transaction.tables());
    if server_schema::find_format(to)?.is_some() {
        server_schema::refuse_other_formats(address, to)?;
        // A gateway may have gone on there, so the server may have more records.
        let (size, last) = records::end(from)?;
        let (there, _) = records::end(to)?;
        if there < size || records::hash_of(to, size - 1)? != last {
            return Err(LedgerError::OtherLedger { address: address.to_string() });
        }
        return Ok(Moved::Before);
    }
    server_schema::make_tables(to)?;
    copies::run(from, to)?;
    transaction.commit()?;
    Ok(Moved::Now)
}
