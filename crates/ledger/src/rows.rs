//! The tables of the ledger, of the idempotency records and of the API keys: every SQL
//! statement of the product, one file a table. A function here takes and returns plain
//! rows; it decides nothing. The layers above know no SQL.
//!
//! The tables of ledger and keys are in SQLite files or on a PostgreSQL server, so their
//! statements use what both understand. The idempotency records are a file.

pub(crate) mod actions;
pub(crate) mod admins;
pub(crate) mod archive_moves;
pub(crate) mod archives;
pub(crate) mod attempts;
pub(crate) mod blocks;
pub(crate) mod callers;
pub(crate) mod charges;
pub(crate) mod checkpoints;
pub(crate) mod consistency;
pub(crate) mod copies;
pub(crate) mod daily;
pub(crate) mod database;
pub(crate) mod entries;
pub(crate) mod epochs;
pub(crate) mod fault_caps;
pub(crate) mod faults;
pub(crate) mod gateway_days;
pub(crate) mod gateways;
pub(crate) mod homes;
pub(crate) mod idempotency;
pub(crate) mod identity;
pub(crate) mod intents;
pub(crate) mod key_actions;
pub(crate) mod key_database;
pub(crate) mod key_server_schema;
pub(crate) mod keys;
pub(crate) mod meta;
pub(crate) mod partly_rejected_blocks;
pub(crate) mod plans;
pub(crate) mod records;
pub(crate) mod refused_blocks;
pub(crate) mod requests;
pub(crate) mod schema;
pub(crate) mod server_schema;
pub(crate) mod slices;

use tollgate_domain::{Attempt, Caller, InvalidName, KeyId, TenantId, Tier};
use tollgate_sql::{Connection, FromSql, Row, SqlError, SqlValue, ToSql, ValueError};

use crate::error::{LedgerError, StorageError};

/// The tables as one connection or one transaction sees them.
#[derive(Clone, Copy)]
pub(crate) struct Tables<'c> {
    connection: &'c Connection,
    /// The data folder for which charges are counted, on a server that several gateways write
    /// to.
    home: Option<&'c str>,
}

impl Tables<'_> {
    /// Returns true if the tables are in a file, and false if they are on a server.
    pub(crate) fn are_in_file(&self) -> bool {
        self.connection.file().is_some()
    }

    /// Waits for the results of all statements so far.
    pub(crate) fn flush(&self) -> Result<(), LedgerError> {
        Ok(self.connection.flush()?)
    }
}

/// The ledger's own number of a worker's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EpochId(i64);

/// The ledger's own number of a caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct CallerId(i64);

/// A tier as the columns `tier` have it: 0 is interactive, 1 is batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TierColumn(pub(crate) Tier);

/// A block's primary key.
#[derive(Clone, Copy)]
pub(crate) struct BlockKey {
    pub(crate) epoch: EpochId,
    /// The block's number within the epoch, from 1.
    pub(crate) block: i64,
}

/// An attempt's key in `attempts`, `requests` and `fault_caps`.
#[derive(Clone, Copy)]
pub(crate) struct AttemptKey<'a> {
    pub(crate) caller: CallerId,
    pub(crate) attempt: &'a Attempt,
}

#[cfg(test)]
impl EpochId {
    pub(crate) fn for_test(id: i64) -> Self {
        Self(id)
    }
}

impl std::fmt::Display for EpochId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::fmt::Display for CallerId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl ToSql for EpochId {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        self.0.to_sql()
    }
}

impl FromSql for EpochId {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        i64::from_sql(value).map(Self)
    }
}

impl ToSql for CallerId {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        self.0.to_sql()
    }
}

impl FromSql for CallerId {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        i64::from_sql(value).map(Self)
    }
}

impl ToSql for TierColumn {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Integer(match self.0 {
            // The numbers stand in the file and in archives, so they never change.
            Tier::Interactive => 0,
            Tier::Batch => 1,
        }))
    }
}

impl FromSql for TierColumn {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        Ok(Self(match i64::from_sql(value)? {
            0 => Tier::Interactive,
            1 => Tier::Batch,
            other => return Err(ValueError::Range(other.into())),
        }))
    }
}

impl From<SqlError> for LedgerError {
    fn from(error: SqlError) -> Self {
        Self::Storage(error.into())
    }
}

impl From<SqlError> for StorageError {
    fn from(error: SqlError) -> Self {
        if error.is_unreadable_file() {
            return Self::new(Unreadable(error.to_string()), false);
        }
        let is_about_content = error.is_about_content();
        Self::new(error, is_about_content)
    }
}

// The database of idempotency records is a file, and uses SQLite's library.
impl From<rusqlite::Error> for StorageError {
    fn from(error: rusqlite::Error) -> Self {
        SqlError::from(error).into()
    }
}

/// A file that SQLite cannot read. The cause of SQLite's own error only repeats its text, so
/// this error has none.
#[derive(Debug, thiserror::Error)]
#[error("{0}; restore the file from a backup")]
struct Unreadable(String);

/// Reads tenant and key from two columns, the first of them `column`.
fn caller_at(row: &Row<'_>, column: usize) -> Result<Caller, LedgerError> {
    Ok(Caller {
        tenant: name(TenantId::new(&row.get::<String>(column)?))?,
        key: name(KeyId::new(&row.get::<String>(column + 1)?))?,
    })
}

/// Converts a name that was read. Names are checked before they are written, so
/// an invalid one means a damaged file.
pub(crate) fn name<T>(name: Result<T, InvalidName>) -> Result<T, LedgerError> {
    name.map_err(|error| LedgerError::Damaged(error.to_string()))
}
