//! Failures of both databases, with the distinctions that callers make.

use rusqlite::ErrorCode;
use tokio_postgres::error::SqlState;

use crate::value::ValueError;

/// A failure of a database, or a value that does not fit.
#[derive(Debug, thiserror::Error)]
pub enum SqlError {
    /// SQLite failed.
    // The library's text names the cause, and its `source` would repeat the text.
    #[error("{0}")]
    Sqlite(rusqlite::Error),
    /// The server refused a statement, or the connection to it broke.
    #[error("{0}")]
    Server(ServerError),
    /// The server did not answer within the time limit. The connection is not used again.
    #[error("the database server has not answered for {seconds} s")]
    Silent {
        /// The limit in seconds.
        seconds: u64,
    },
    /// The connection was given up after an earlier failure.
    #[error("the connection to the database server is closed")]
    Closed,
    /// A column or a parameter holds a value of another type or range.
    #[error("column or parameter {index}: {source}")]
    Value {
        /// The place in the row, from 0, or the number of the parameter, from 1.
        index: usize,
        /// The mismatch.
        source: ValueError,
    },
    /// A statement got another number of parameters than it has.
    #[error("the statement takes {expected} parameters and got {given}")]
    Parameters {
        /// The number in the statement.
        expected: usize,
        /// The number that was given.
        given: usize,
    },
    /// A query that must return a row returned none.
    #[error("the query returned no row")]
    NoRow,
}

/// An error of the server or of the connection to it, in one sentence.
#[derive(Debug)]
pub struct ServerError(tokio_postgres::Error);

impl SqlError {
    /// Returns true if the database refused the values rather than failed: the same
    /// values would be refused again.
    pub fn is_about_content(&self) -> bool {
        match self {
            Self::Sqlite(error) => sqlite_refused_content(error),
            Self::Server(ServerError(error)) => error.code().is_some_and(server_refused_content),
            Self::Value { .. } => true,
            Self::Silent { .. } | Self::Closed | Self::Parameters { .. } | Self::NoRow => false,
        }
    }

    /// Returns true if the file is no database, or a damaged one.
    pub fn is_unreadable_file(&self) -> bool {
        let Self::Sqlite(error) = self else { return false };
        let code = error.sqlite_error_code();
        matches!(code, Some(ErrorCode::NotADatabase | ErrorCode::DatabaseCorrupt))
    }
}

fn sqlite_refused_content(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(failure, message) => match failure.code {
            ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig => true,
            // SQLite's `sum` reports an overflow under its most general code.
            ErrorCode::Unknown => message.as_deref() == Some("integer overflow"),
            // Any other failure may be the disk's.
            _ => false,
        },
        rusqlite::Error::IntegralValueOutOfRange(..)
        | rusqlite::Error::InvalidColumnType(..)
        | rusqlite::Error::FromSqlConversionFailure(..) => true,
        _ => false,
    }
}

fn server_refused_content(code: &SqlState) -> bool {
    // Class 22 are values that do not fit, class 23 broken constraints.
    code.code().starts_with("22") || code.code().starts_with("23")
}

impl ServerError {
    /// Returns true if the server itself answered with this error and goes on.
    pub(crate) fn is_answer(&self) -> bool {
        // Class 57 are ends of the session by an admin, class 08 broken connections.
        let code = self.0.code().map(SqlState::code);
        code.is_some_and(|code| !code.starts_with("57") && !code.starts_with("08"))
    }
}

impl std::fmt::Display for ServerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The library's own text is "db error"; the sentence is in the error below it.
        if let Some(said) = self.0.as_db_error() {
            return write!(f, "the database server says: {}", said.message());
        }
        let mut text = self.0.to_string();
        let mut source = std::error::Error::source(&self.0);
        while let Some(error) = source {
            text = error.to_string();
            source = error.source();
        }
        f.write_str(&text)
    }
}

impl From<rusqlite::Error> for SqlError {
    fn from(error: rusqlite::Error) -> Self {
        match error {
            rusqlite::Error::QueryReturnedNoRows => Self::NoRow,
            error => Self::Sqlite(error),
        }
    }
}

impl From<tokio_postgres::Error> for SqlError {
    fn from(error: tokio_postgres::Error) -> Self {
        Self::Server(ServerError(error))
    }
}

/// Turns the absence of a row into `None`.
pub trait OptionalRow<T> {
    /// Returns `None` where the query returned no row.
    ///
    /// # Errors
    /// Every other error.
    fn optional(self) -> Result<Option<T>, SqlError>;
}

impl<T> OptionalRow<T> for Result<T, SqlError> {
    fn optional(self) -> Result<Option<T>, SqlError> {
        match self {
            Err(SqlError::NoRow) => Ok(None),
            other => other.map(Some),
        }
    }
}
