//! One row of a result.

use rusqlite::types::ValueRef;

use crate::error::SqlError;
use crate::server::value_at;
use crate::value::{FromSql, SqlValue, ValueError};

/// One row of a result.
pub struct Row<'r>(Source<'r>);

enum Source<'r> {
    Sqlite(&'r rusqlite::Row<'r>),
    Server(&'r tokio_postgres::Row),
}

impl<'r> Row<'r> {
    pub(crate) fn of_sqlite(row: &'r rusqlite::Row<'r>) -> Self {
        Self(Source::Sqlite(row))
    }

    pub(crate) fn of_server(row: &'r tokio_postgres::Row) -> Self {
        Self(Source::Server(row))
    }

    /// Returns the value of the column `index`, from 0.
    ///
    /// # Errors
    /// The column holds another type, or there is none.
    pub fn get<T: FromSql>(&self, index: usize) -> Result<T, SqlError> {
        T::from_sql(self.value(index)?).map_err(|source| SqlError::Value { index, source })
    }

    /// Returns the value of the column `index`, from 0, as it is.
    ///
    /// # Errors
    /// There is no such column, or its text is not UTF-8.
    pub fn value(&self, index: usize) -> Result<SqlValue<'_>, SqlError> {
        match self.0 {
            Source::Sqlite(row) => match row.get_ref(index)? {
                ValueRef::Null => Ok(SqlValue::Null),
                ValueRef::Integer(number) => Ok(SqlValue::Integer(number)),
                ValueRef::Real(_) => Ok(SqlValue::Other("a fraction")),
                ValueRef::Text(text) => std::str::from_utf8(text)
                    .map(SqlValue::Text)
                    .map_err(|_| SqlError::Value { index, source: ValueError::Encoding }),
                ValueRef::Blob(bytes) => Ok(SqlValue::Blob(bytes)),
            },
            Source::Server(row) => value_at(row, index),
        }
    }
}
