//! Facts that tell one database file from another, read from a file of any format
//! and changed in none of its tables.

use std::path::Path;
use std::time::Duration;

use rusqlite::config::DbConfig;
use rusqlite::{Connection, OpenFlags, OptionalExtension};

use crate::error::StorageError;

/// One connection to a database file of the data folder.
pub(crate) struct IdentityRows {
    connection: Connection,
}

impl IdentityRows {
    /// Opens an existing file. A missing file is an error, because SQLite must not
    /// make an empty one.
    pub(crate) fn open(path: &Path) -> Result<Self, StorageError> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags)?;
        connection.busy_timeout(LOCK_TIMEOUT)?;
        // The pages in the log may not be on the disk, so the log must stay: the owner
        // of the file writes it again at its start.
        connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
        Ok(Self { connection })
    }

    /// Returns the file's `application_id`; 0 for a file without an identity.
    pub(crate) fn id(&self) -> Result<i32, StorageError> {
        Ok(self.connection.pragma_query_value(None, "application_id", |row| row.get(0))?)
    }

    /// Sets the file's `application_id`.
    pub(crate) fn set_id(&self, id: i32) -> Result<(), StorageError> {
        // The manifest names the id next. If a power cut took the id, the file would count as lost.
        self.connection.pragma_update(None, "synchronous", "FULL")?;
        Ok(self.connection.pragma_update(None, "application_id", id)?)
    }

    /// Returns the number of the newest change in a database of API keys; 0 for an
    /// empty file.
    pub(crate) fn newest_key_change(&self) -> Result<u64, StorageError> {
        if !self.has_table("keys")? {
            return Ok(0);
        }
        let query = "SELECT coalesce(max(changed), 0) FROM keys";
        Ok(self.connection.query_row(query, [], |row| row.get(0))?)
    }

    /// Returns the newest checkpoint of a ledger: its size and its note.
    pub(crate) fn newest_checkpoint(&self) -> Result<Option<(u64, String)>, StorageError> {
        if !self.has_table("checkpoints")? {
            return Ok(None);
        }
        let query = "SELECT size, note FROM checkpoints ORDER BY size DESC LIMIT 1";
        let row = self.connection.query_row(query, [], |row| Ok((row.get(0)?, row.get(1)?)));
        Ok(row.optional()?)
    }

    /// Returns true if a ledger has this checkpoint, or has archived its records.
    pub(crate) fn has_checkpoint(&self, size: u64, note: &str) -> Result<bool, StorageError> {
        let query = "SELECT 1 FROM checkpoints WHERE size = ?1 AND note = ?2";
        if self.has_table("checkpoints")?
            && self.connection.query_row(query, (size, note), |_| Ok(())).optional()?.is_some()
        {
            return Ok(true);
        }
        // An older copy has no archive of records that it did not have yet.
        let query = "SELECT 1 FROM archives WHERE size >= ?1";
        Ok(self.has_table("archives")?
            && self.connection.query_row(query, [size], |_| Ok(())).optional()?.is_some())
    }

    fn has_table(&self, name: &str) -> Result<bool, StorageError> {
        let query = "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?1";
        Ok(self.connection.query_row(query, [name], |_| Ok(())).optional()?.is_some())
    }
}

/// Longest wait for another connection's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
