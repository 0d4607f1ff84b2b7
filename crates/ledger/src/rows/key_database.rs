//! The key database: a file of its own beside the ledger, with the tables `keys`,
//! `actions` and `admins`. Several processes may have the file open and write it.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior};

use super::database::write_ahead;
use super::{admins, key_actions, keys};
use crate::error::StorageError;

/// The format that this version reads and writes.
pub(crate) const FORMAT: i64 = 2;
/// Longest wait for another connection's lock. A commit takes far less time.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);

/// A number that differs after another connection has changed the database.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataVersion(i64);

/// The tables of the key database as one connection or one transaction sees them.
#[derive(Clone, Copy)]
pub(crate) struct KeyTables<'c> {
    pub(super) connection: &'c Connection,
}

/// One connection to the key database.
pub(crate) struct KeyConnection {
    connection: Connection,
}

/// A transaction of the key database. Dropping it rolls it back.
pub(crate) struct KeyTransaction<'c>(rusqlite::Transaction<'c>);

impl KeyConnection {
    /// Opens the file at `path`, and makes it if there is none. The tables are not
    /// touched.
    pub(crate) fn open(path: &Path) -> Result<Self, StorageError> {
        let connection = Connection::open(path)?;
        connection.busy_timeout(LOCK_TIMEOUT)?;
        // Other processes read during a commit only with a write-ahead log.
        write_ahead(&connection)?;
        // A revocation must outlive a power cut.
        connection.pragma_update(None, "synchronous", "FULL")?;
        Ok(Self { connection })
    }

    /// Makes the tables that are missing, and migrates an older format. Returns the
    /// format of the file if this version cannot read it; the file stays as it is.
    pub(crate) fn prepare(&mut self) -> Result<Option<i64>, StorageError> {
        // Asked without a lock first, because nearly every start finds all tables.
        let tables = self.tables();
        if format(tables)? == FORMAT && key_actions::exist(tables)? && admins::exist(tables)? {
            return Ok(None);
        }
        // Several processes may be here at the same time; the first makes the tables.
        let transaction = self.begin()?;
        let tables = transaction.tables();
        match format(tables)? {
            FORMAT => {}
            // A file of another program has tables, and is not written.
            0 if !any_exist(tables)? => tables.connection.execute_batch(keys::DEFINITION)?,
            1 => tables.connection.execute_batch(keys::FROM_1)?,
            other => return Ok(Some(other)),
        }
        // No format number tells of these tables: the first builds of format 2 lacked them.
        if !key_actions::exist(tables)? {
            tables.connection.execute_batch(key_actions::DEFINITION)?;
        }
        if !admins::exist(tables)? {
            tables.connection.execute_batch(admins::DEFINITION)?;
        }
        transaction.commit()?;
        Ok(None)
    }

    /// The tables outside of any transaction: each statement commits by itself.
    pub(crate) fn tables(&self) -> KeyTables<'_> {
        KeyTables { connection: &self.connection }
    }

    /// Begins to write. The lock is taken at once, so that two processes cannot draw
    /// the same change number.
    pub(crate) fn begin(&mut self) -> Result<KeyTransaction<'_>, StorageError> {
        let behavior = TransactionBehavior::Immediate;
        Ok(KeyTransaction(self.connection.transaction_with_behavior(behavior)?))
    }

    /// Begins to read: all reads see the keys as they are at the first of them.
    pub(crate) fn snapshot(&mut self) -> Result<KeyTransaction<'_>, StorageError> {
        Ok(KeyTransaction(self.connection.transaction()?))
    }

    /// Returns the version of the data.
    pub(crate) fn data_version(&self) -> Result<DataVersion, StorageError> {
        let version = self.connection.query_row("PRAGMA data_version", [], |row| row.get(0))?;
        Ok(DataVersion(version))
    }
}

impl KeyTransaction<'_> {
    /// The tables within the transaction.
    pub(crate) fn tables(&self) -> KeyTables<'_> {
        KeyTables { connection: &self.0 }
    }

    /// Commits: when this returns, the writes are on the disk.
    pub(crate) fn commit(self) -> Result<(), StorageError> {
        Ok(self.0.commit()?)
    }
}

/// Returns true if the database has any table.
fn any_exist(tables: KeyTables<'_>) -> Result<bool, StorageError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM sqlite_schema)";
    Ok(tables.connection.query_row(sql, [], |row| row.get(0))?)
}

fn format(tables: KeyTables<'_>) -> Result<i64, StorageError> {
    Ok(tables.connection.query_row("PRAGMA user_version", [], |row| row.get(0))?)
}
