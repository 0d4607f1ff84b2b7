//! The store of jobs in SQLite: every SQL statement of the crate, one file a table.

mod answers;
mod batches;
mod claims;
mod connection;
mod files;
mod schema;
mod spent;
mod sqlite;

use rusqlite::ErrorCode;
use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ToSql, ToSqlOutput, ValueRef};
use tollgate_domain::{InvalidName, UtcTime};

pub use self::connection::{BeforeOpen, SqliteStore};
use crate::error::{JobError, StorageError};
use crate::ids::{BatchId, BlobId, FileId};

/// The tables as one transaction sees them.
#[derive(Clone, Copy)]
struct Tables<'c> {
    connection: &'c rusqlite::Connection,
}

impl From<rusqlite::Error> for JobError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Storage(match error.sqlite_error_code() {
            Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt) => {
                StorageError::new(Unreadable(error.to_string()))
            }
            _ => StorageError::new(error),
        })
    }
}

/// A file that SQLite cannot read. The cause of SQLite's own error only repeats its text, so
/// this error has none.
#[derive(Debug, thiserror::Error)]
#[error("{0}; restore the file from a backup")]
struct Unreadable(String);

/// Bits of an id in a column of 16 bytes.
#[derive(Clone, Copy)]
struct Bits(u128);

impl ToSql for Bits {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(self.0.to_be_bytes().to_vec().into())
    }
}

impl FromSql for Bits {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let bytes = value.as_blob()?;
        let bytes: [u8; 16] = bytes.try_into().map_err(|_| FromSqlError::InvalidBlobSize {
            expected_size: 16,
            blob_size: bytes.len(),
        })?;
        Ok(Self(u128::from_be_bytes(bytes)))
    }
}

macro_rules! id_columns {
    ($($type:ident),*) => {$(
        impl ToSql for $type {
            fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
                Ok(self.bits().to_be_bytes().to_vec().into())
            }
        }

        impl FromSql for $type {
            fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
                Bits::column_result(value).map(|bits| Self::from_random(bits.0))
            }
        }
    )*};
}

id_columns!(BatchId, BlobId, FileId);

/// Converts a time to a column. Times after the year 2262 are cut to it.
fn nanos(time: UtcTime) -> i64 {
    i64::try_from(time.0).unwrap_or(i64::MAX)
}

/// Converts a column to a time.
fn time(nanos: i64) -> UtcTime {
    // No version writes a negative time.
    UtcTime(u64::try_from(nanos).unwrap_or(0))
}

/// Converts a name that was read. Names are checked before they are written, so an
/// invalid one means a damaged file.
fn name<T>(name: Result<T, InvalidName>) -> Result<T, JobError> {
    name.map_err(|error| damaged(error.to_string()))
}

fn damaged(what: impl Into<String>) -> JobError {
    JobError::Storage(StorageError::damaged(what.into()))
}
