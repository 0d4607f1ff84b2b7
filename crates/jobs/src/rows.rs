//! The store of jobs in tables: every SQL statement of the crate, one file a table. The
//! tables are in a SQLite file, or on a PostgreSQL server that several gateways share. The
//! statements use what both understand.

mod adopt;
mod answers;
mod batches;
mod claims;
mod connection;
mod files;
mod locks;
mod operations;
mod place;
mod schema;
mod server_schema;
mod spent;

use tollgate_domain::{InvalidName, UtcTime};
use tollgate_sql::{Connection, FromSql, SqlError, SqlValue, ToSql, ValueError};

pub use self::connection::{BeforeOpen, SqlStore};
pub(crate) use self::place::StorePlace;
use crate::error::{JobError, StorageError};
use crate::ids::{BatchId, BlobId, FileId};

/// The tables as one transaction sees them.
#[derive(Clone, Copy)]
struct Tables<'c> {
    connection: &'c Connection,
    /// The data folder of this gateway, on a server that several gateways write to.
    home: Option<&'c str>,
    /// True in a transaction that writes.
    is_writing: bool,
}

impl From<SqlError> for JobError {
    fn from(error: SqlError) -> Self {
        Self::Storage(match error.is_unreadable_file() {
            true => StorageError::new(Unreadable(error.to_string())),
            false => StorageError::new(error),
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
struct Bits([u8; 16]);

impl Bits {
    fn new(bits: u128) -> Self {
        Self(bits.to_be_bytes())
    }

    fn number(self) -> u128 {
        u128::from_be_bytes(self.0)
    }
}

impl ToSql for Bits {
    fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
        Ok(SqlValue::Blob(&self.0))
    }
}

impl FromSql for Bits {
    fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
        let found = value.type_name();
        let SqlValue::Blob(bytes) = value else {
            return Err(ValueError::Type { expected: "16 bytes", found });
        };
        let bytes = bytes.try_into();
        bytes.map(Self).map_err(|_| ValueError::Type { expected: "16 bytes", found })
    }
}

macro_rules! id_columns {
    ($($type:ident),*) => {$(
        impl ToSql for $type {
            fn to_sql(&self) -> Result<SqlValue<'_>, ValueError> {
                Ok(SqlValue::Blob(self.as_bytes()))
            }
        }

        impl FromSql for $type {
            fn from_sql(value: SqlValue<'_>) -> Result<Self, ValueError> {
                Bits::from_sql(value).map(|bits| Self::from_random(bits.number()))
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
