//! The key database: the tables `keys`, `actions` and `admins`, in a file of its own beside
//! the ledger, or in the ledger's database on a server. Several processes may have it open
//! and write it.

use std::path::Path;
use std::time::Duration;

use tollgate_sql::{Begin, Connection, Server, ServerAddress, Transaction};

use super::database::{connect_primary, write_ahead};
use super::gateways::{self, GatewayRow};
use super::{admins, key_actions, key_server_schema, keys};
use crate::error::StorageError;

/// The format of a file that this version reads and writes.
pub(crate) const FORMAT: i64 = 2;
/// Longest wait for another connection's lock. A commit takes far less time.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// The time within which a server must answer. All statements have small results.
const SERVER_LIMIT: Duration = Duration::from_secs(5);

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
pub(crate) struct KeyTransaction<'c>(Transaction<'c>);

/// A format that this version cannot read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OtherFormat {
    /// The format of the database.
    pub(crate) found: i64,
    /// The format that this version reads.
    pub(crate) expected: i64,
}

impl KeyTables<'_> {
    /// Returns true if the tables are in a file, and false if they are on a server.
    pub(super) fn are_in_file(&self) -> bool {
        self.connection.file().is_some()
    }
}

impl KeyConnection {
    /// Opens the file at `path`, and makes it if there is none. The tables are not
    /// touched.
    pub(crate) fn open(path: &Path) -> Result<Self, StorageError> {
        let file = rusqlite::Connection::open(path)?;
        file.busy_timeout(LOCK_TIMEOUT)?;
        // Other processes read during a commit only with a write-ahead log.
        write_ahead(&file)?;
        // A revocation must outlive a power cut.
        file.pragma_update(None, "synchronous", "FULL")?;
        Ok(Self { connection: file.into() })
    }

    /// Connects to a server. The tables are not touched.
    pub(crate) fn connect(address: &ServerAddress) -> Result<Self, StorageError> {
        Ok(Self { connection: connect_primary(address, SERVER_LIMIT)?.into() })
    }

    /// Returns true if the database answers. A file always does.
    pub(crate) fn is_connected(&self) -> bool {
        self.connection.server().is_none_or(Server::is_connected)
    }

    /// Makes the tables that are missing, and migrates an older format. Returns the
    /// format of the database if this version cannot read it; the database stays as it is.
    pub(crate) fn prepare(&mut self) -> Result<Option<OtherFormat>, StorageError> {
        match self.connection.file() {
            Some(_) => self.prepare_file(),
            None => self.prepare_server(),
        }
    }

    fn prepare_file(&mut self) -> Result<Option<OtherFormat>, StorageError> {
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
            found => return Ok(Some(OtherFormat { found, expected: FORMAT })),
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

    fn prepare_server(&mut self) -> Result<Option<OtherFormat>, StorageError> {
        let found = match key_server_schema::find_format(self.tables())? {
            Some(found) => found,
            None => {
                // Several gateways may be here at the same time; the first makes the tables.
                let transaction = KeyTransaction(self.connection.begin(Begin::Write)?);
                key_server_schema::make_tables(transaction.tables())?;
                transaction.commit()?;
                key_server_schema::FORMAT
            }
        };
        let expected = key_server_schema::FORMAT;
        Ok((found != expected).then_some(OtherFormat { found, expected }))
    }

    /// The tables outside of any transaction: each statement commits by itself.
    pub(crate) fn tables(&self) -> KeyTables<'_> {
        KeyTables { connection: &self.connection }
    }

    /// Begins to write. The lock is taken at once, so that two processes cannot draw
    /// the same change number.
    pub(crate) fn begin(&mut self) -> Result<KeyTransaction<'_>, StorageError> {
        let transaction = KeyTransaction(self.connection.begin(Begin::Write)?);
        if !transaction.tables().are_in_file() {
            key_server_schema::lock(transaction.tables())?;
        }
        Ok(transaction)
    }

    /// Begins to read: all reads see the keys as they are at the first of them.
    pub(crate) fn snapshot(&mut self) -> Result<KeyTransaction<'_>, StorageError> {
        Ok(KeyTransaction(self.connection.begin(Begin::Read)?))
    }

    /// Returns the version of the data.
    pub(crate) fn data_version(&self) -> Result<DataVersion, StorageError> {
        let query = match self.connection.file() {
            Some(_) => "PRAGMA data_version",
            None => key_server_schema::GENERATION,
        };
        Ok(DataVersion(self.connection.query_row(query, (), |row| row.get(0))?))
    }

    /// Returns the gateways that share the keys of a server, each with whether it has read
    /// them up to `version`.
    pub(crate) fn gateways(&self, version: DataVersion) -> Result<Vec<GatewayRow>, StorageError> {
        Ok(gateways::list(&self.connection, version.0)?)
    }
}

impl DataVersion {
    /// Returns the number of the version. On a server it grows with each change.
    pub fn generation(self) -> i64 {
        self.0
    }
}

impl KeyTransaction<'_> {
    /// The tables within the transaction.
    pub(crate) fn tables(&self) -> KeyTables<'_> {
        KeyTables { connection: self.0.connection() }
    }

    /// Commits: when this returns, the writes are on the disk.
    pub(crate) fn commit(self) -> Result<(), StorageError> {
        Ok(self.0.commit()?)
    }
}

/// Returns true if the file has any table.
fn any_exist(tables: KeyTables<'_>) -> Result<bool, StorageError> {
    let sql = "SELECT EXISTS (SELECT 1 FROM sqlite_schema)";
    Ok(tables.connection.query_row(sql, (), |row| row.get(0))?)
}

fn format(tables: KeyTables<'_>) -> Result<i64, StorageError> {
    Ok(tables.connection.query_row("PRAGMA user_version", (), |row| row.get(0))?)
}
