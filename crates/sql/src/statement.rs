//! Prepared statements and their results.

use rusqlite::CachedStatement;
use rusqlite::types::{ToSqlOutput, ValueRef};

use crate::error::SqlError;
use crate::params::Params;
use crate::row::Row;
use crate::server::{Cursor, Server};
use crate::value::SqlValue;

/// A prepared statement.
pub struct Statement<'c>(Prepared<'c>);

enum Prepared<'c> {
    Sqlite(CachedStatement<'c>),
    Server { server: &'c Server, sql: String },
}

/// The rows of a result, one after the other.
pub struct Rows<'s>(Results<'s>);

enum Results<'s> {
    Sqlite(rusqlite::Rows<'s>),
    Server {
        part: std::vec::IntoIter<tokio_postgres::Row>,
        now: Option<tokio_postgres::Row>,
        more: Option<Cursor<'s>>,
    },
}

/// The rows of a result, converted.
pub struct MappedRows<'s, F> {
    rows: Rows<'s>,
    convert: F,
}

impl<'c> From<CachedStatement<'c>> for Statement<'c> {
    fn from(statement: CachedStatement<'c>) -> Self {
        Self(Prepared::Sqlite(statement))
    }
}

impl<'c> Statement<'c> {
    pub(crate) fn on_server(server: &'c Server, sql: &str) -> Self {
        Self(Prepared::Server { server, sql: sql.to_owned() })
    }

    /// Runs the statement and returns the number of rows that it changed.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn execute(&mut self, params: impl Params) -> Result<usize, SqlError> {
        match &mut self.0 {
            Prepared::Sqlite(statement) => {
                bind(statement, &params)?;
                Ok(statement.raw_execute()?)
            }
            Prepared::Server { server, sql } => Ok(server.execute(sql, &params)? as usize),
        }
    }

    /// Runs the statement. A server gets it together with later ones, which saves round trips:
    /// its error may come from a later call of the same transaction, at the latest from
    /// [`Connection::flush`](crate::Connection::flush) or the commit.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn send(&mut self, params: impl Params) -> Result<(), SqlError> {
        if let Prepared::Server { server, sql } = &self.0 {
            return server.send(sql, &params);
        }
        self.execute(params).map(drop)
    }

    /// Runs the query. A server sends all rows at once, so the result should be small.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn query(&mut self, params: impl Params) -> Result<Rows<'_>, SqlError> {
        match &mut self.0 {
            Prepared::Sqlite(statement) => {
                bind(statement, &params)?;
                Ok(Rows(Results::Sqlite(statement.raw_query())))
            }
            Prepared::Server { server, sql } => {
                let part = server.query(sql, &params)?.into_iter();
                Ok(Rows(Results::Server { part, now: None, more: None }))
            }
        }
    }

    /// Runs the query within a transaction. A server sends the rows in parts, so the result
    /// may have any size.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn stream(&mut self, params: impl Params) -> Result<Rows<'_>, SqlError> {
        if let Prepared::Server { server, sql } = &self.0 {
            let more = Some(server.open_cursor(sql, &params)?);
            let part = Vec::new().into_iter();
            return Ok(Rows(Results::Server { part, now: None, more }));
        }
        self.query(params)
    }

    /// Runs the query and converts its rows.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn query_map<T, F>(
        &mut self,
        params: impl Params,
        convert: F,
    ) -> Result<MappedRows<'_, F>, SqlError>
    where
        F: FnMut(&Row<'_>) -> Result<T, SqlError>,
    {
        Ok(MappedRows { rows: self.query(params)?, convert })
    }

    /// Runs the query and converts its first row.
    ///
    /// # Errors
    /// [`SqlError::NoRow`] where there is none, and every other [`SqlError`].
    pub fn query_row<T>(
        &mut self,
        params: impl Params,
        convert: impl FnOnce(&Row<'_>) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        let mut rows = self.query(params)?;
        let row = rows.next()?.ok_or(SqlError::NoRow)?;
        convert(&row)
    }

    /// Returns true if the query has a row.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn exists(&mut self, params: impl Params) -> Result<bool, SqlError> {
        Ok(self.query(params)?.next()?.is_some())
    }
}

impl Rows<'_> {
    /// Returns the next row; `None` after the last.
    ///
    /// # Errors
    /// [`SqlError`].
    #[expect(
        clippy::should_implement_trait,
        reason = "a row borrows from the result, which no iterator allows"
    )]
    pub fn next(&mut self) -> Result<Option<Row<'_>>, SqlError> {
        match &mut self.0 {
            Results::Sqlite(rows) => Ok(rows.next()?.map(Row::of_sqlite)),
            Results::Server { part, now, more } => {
                if part.len() == 0
                    && let Some(cursor) = more
                {
                    *part = cursor.fetch()?.into_iter();
                }
                *now = part.next();
                Ok(now.as_ref().map(Row::of_server))
            }
        }
    }
}

impl<T, F: FnMut(&Row<'_>) -> Result<T, SqlError>> Iterator for MappedRows<'_, F> {
    type Item = Result<T, SqlError>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = self.rows.next().transpose()?;
        Some(row.and_then(|row| (self.convert)(&row)))
    }
}

fn bind(statement: &mut rusqlite::Statement<'_>, params: &dyn Params) -> Result<(), SqlError> {
    let mut given = 0;
    params.try_each(&mut |value| {
        given += 1;
        Ok(statement.raw_bind_parameter(given, Bound(value))?)
    })?;
    let expected = statement.parameter_count();
    // SQLite takes a missing parameter as NULL, so the mistake would write wrong rows.
    if expected != given {
        return Err(SqlError::Parameters { expected, given });
    }
    Ok(())
}

struct Bound<'a>(SqlValue<'a>);

impl rusqlite::ToSql for Bound<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(ToSqlOutput::Borrowed(match self.0 {
            SqlValue::Null | SqlValue::Other(_) => ValueRef::Null,
            SqlValue::Integer(number) => ValueRef::Integer(number),
            SqlValue::Text(text) => ValueRef::Text(text.as_bytes()),
            SqlValue::Blob(bytes) => ValueRef::Blob(bytes),
        }))
    }
}
