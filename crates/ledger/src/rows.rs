//! The tables of the ledger, of the idempotency records and of the API keys: every SQL
//! statement of the product, one file a table. A function here takes and returns plain
//! rows; it decides nothing. The layers above know no SQL, so another database can
//! stand behind these functions.

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
pub(crate) mod daily;
pub(crate) mod database;
pub(crate) mod entries;
pub(crate) mod epochs;
pub(crate) mod fault_caps;
pub(crate) mod idempotency;
pub(crate) mod identity;
pub(crate) mod key_actions;
pub(crate) mod key_database;
pub(crate) mod keys;
pub(crate) mod meta;
pub(crate) mod partly_rejected_blocks;
pub(crate) mod plans;
pub(crate) mod records;
pub(crate) mod refused_blocks;
pub(crate) mod requests;
pub(crate) mod schema;

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use rusqlite::{ErrorCode, Row};
use tollgate_domain::{Attempt, Caller, InvalidName, KeyId, TenantId, Tier};

use crate::error::{LedgerError, StorageError};

/// The tables as one connection or one transaction sees them.
#[derive(Clone, Copy)]
pub(crate) struct Tables<'c> {
    connection: &'c rusqlite::Connection,
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
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        self.0.to_sql()
    }
}

impl FromSql for EpochId {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        i64::column_result(value).map(Self)
    }
}

impl ToSql for CallerId {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        self.0.to_sql()
    }
}

impl FromSql for CallerId {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        i64::column_result(value).map(Self)
    }
}

impl ToSql for TierColumn {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let number: i64 = match self.0 {
            // The numbers stand in the file and in archives, so they never change.
            Tier::Interactive => 0,
            Tier::Batch => 1,
        };
        Ok(number.into())
    }
}

impl FromSql for TierColumn {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        Ok(Self(match i64::column_result(value)? {
            0 => Tier::Interactive,
            1 => Tier::Batch,
            other => return Err(FromSqlError::OutOfRange(other)),
        }))
    }
}

impl From<rusqlite::Error> for LedgerError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Storage(storage_error(error))
    }
}

impl From<rusqlite::Error> for StorageError {
    fn from(error: rusqlite::Error) -> Self {
        storage_error(error)
    }
}

/// Converts an error of SQLite and notes whether a retry could succeed.
pub(crate) fn storage_error(error: rusqlite::Error) -> StorageError {
    if let Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) = error.sqlite_error_code() {
        return StorageError::new(Unreadable(error.to_string()), false);
    }
    let is_about_content = is_about_content(&error);
    StorageError::new(error, is_about_content)
}

/// A file that SQLite cannot read. The cause of SQLite's own error only repeats its text, so
/// this error has none.
#[derive(Debug, thiserror::Error)]
#[error("{0}; restore the file from a backup")]
struct Unreadable(String);

/// Returns true if SQLite refuses the values rather than the disk: the same
/// values would be refused again.
fn is_about_content(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(failure, message) => match failure.code {
            ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig => true,
            // SQLite's `sum` reports an overflow under its most general code.
            ErrorCode::Unknown => message.as_deref() == Some("integer overflow"),
            // Any other failure may be the disk's, and then the act must be kept.
            _ => false,
        },
        rusqlite::Error::IntegralValueOutOfRange(..)
        | rusqlite::Error::InvalidColumnType(..)
        | rusqlite::Error::FromSqlConversionFailure(..) => true,
        _ => false,
    }
}

/// Reads tenant and key from two columns, the first of them `column`.
fn caller_at(row: &Row<'_>, column: usize) -> Result<Caller, LedgerError> {
    Ok(Caller {
        tenant: name(TenantId::new(&row.get::<_, String>(column)?))?,
        key: name(KeyId::new(&row.get::<_, String>(column + 1)?))?,
    })
}

/// Converts a name that was read. Names are checked before they are written, so
/// an invalid one means a damaged file.
pub(crate) fn name<T>(name: Result<T, InvalidName>) -> Result<T, LedgerError> {
    name.map_err(|error| LedgerError::Damaged(error.to_string()))
}
