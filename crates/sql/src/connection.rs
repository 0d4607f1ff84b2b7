//! A connection to either database, and its transactions.

use crate::error::SqlError;
use crate::params::Params;
use crate::row::Row;
use crate::server::Server;
use crate::statement::Statement;

/// One connection, to a SQLite file or to a PostgreSQL server.
pub struct Connection(Database);

enum Database {
    Sqlite(rusqlite::Connection),
    Server(Box<Server>),
}

/// The purpose of a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// To write. In a file the lock is taken at once, so that no later statement fails because
    /// another process writes. On a server each statement sees what is committed before it.
    Write,
    /// To read: all reads see the database as it is at the first of them.
    Read,
}

/// A transaction. Dropping it rolls it back.
pub struct Transaction<'c> {
    connection: &'c Connection,
    is_open: bool,
}

impl From<rusqlite::Connection> for Connection {
    fn from(connection: rusqlite::Connection) -> Self {
        Self(Database::Sqlite(connection))
    }
}

impl From<Server> for Connection {
    fn from(server: Server) -> Self {
        Self(Database::Server(Box::new(server)))
    }
}

impl Connection {
    /// Returns the connection to a file, for what only a file has; `None` for a server.
    pub fn file(&self) -> Option<&rusqlite::Connection> {
        match &self.0 {
            Database::Sqlite(connection) => Some(connection),
            Database::Server(_) => None,
        }
    }

    /// Returns the connection to a server, for what only a server has; `None` for a file.
    pub fn server(&self) -> Option<&Server> {
        match &self.0 {
            Database::Sqlite(_) => None,
            Database::Server(server) => Some(server),
        }
    }

    /// Prepares a statement. The connection keeps the newest statements, so that the same
    /// text costs little the second time.
    ///
    /// # Errors
    /// [`SqlError`]. A server checks the statement at its first call.
    pub fn prepare(&self, sql: &str) -> Result<Statement<'_>, SqlError> {
        match &self.0 {
            Database::Sqlite(connection) => Ok(connection.prepare_cached(sql)?.into()),
            Database::Server(server) => Ok(Statement::on_server(server, sql)),
        }
    }

    /// Runs a statement and returns the number of rows that it changed.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn execute(&self, sql: &str, params: impl Params) -> Result<usize, SqlError> {
        self.prepare(sql)?.execute(params)
    }

    /// Runs a query and converts its first row.
    ///
    /// # Errors
    /// [`SqlError::NoRow`] where there is none, and every other [`SqlError`].
    pub fn query_row<T>(
        &self,
        sql: &str,
        params: impl Params,
        convert: impl FnOnce(&Row<'_>) -> Result<T, SqlError>,
    ) -> Result<T, SqlError> {
        self.prepare(sql)?.query_row(params, convert)
    }

    /// Runs several statements without parameters.
    ///
    /// # Errors
    /// [`SqlError`]; the statements before the one that failed have run.
    pub fn execute_batch(&self, sql: &str) -> Result<(), SqlError> {
        match &self.0 {
            Database::Sqlite(connection) => Ok(connection.execute_batch(sql)?),
            Database::Server(server) => server.batch(sql),
        }
    }

    /// Waits for the results of all statements that were [sent](Statement::send).
    ///
    /// # Errors
    /// The error of the first one that failed.
    pub fn flush(&self) -> Result<(), SqlError> {
        match &self.0 {
            Database::Sqlite(_) => Ok(()),
            Database::Server(server) => server.flush(),
        }
    }

    /// Runs a rollback. What was not sent yet is forgotten.
    fn roll_back(&self, sql: &str) -> Result<(), SqlError> {
        if let Database::Server(server) = &self.0 {
            server.discard();
        }
        self.execute_batch(sql)
    }

    /// Begins a transaction.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn begin(&mut self, begin: Begin) -> Result<Transaction<'_>, SqlError> {
        let sql = match (&self.0, begin) {
            (Database::Sqlite(_), Begin::Write) => "BEGIN IMMEDIATE",
            (Database::Sqlite(_), Begin::Read) => "BEGIN",
            // A process that is stopped must not hold its locks for longer than others wait for
            // them: the server ends its session.
            (Database::Server(_), Begin::Write) => {
                "BEGIN ISOLATION LEVEL READ COMMITTED; \
                 SET LOCAL idle_in_transaction_session_timeout = '3s'"
            }
            (Database::Server(_), Begin::Read) => "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY",
        };
        self.execute_batch(sql)?;
        Ok(Transaction { connection: self, is_open: true })
    }
}

impl Transaction<'_> {
    /// Returns the connection, whose statements run within the transaction.
    pub fn connection(&self) -> &Connection {
        self.connection
    }

    /// Runs `run` so that its writes can be undone without the writes before them. The outer
    /// result is the failure of the transaction itself; where `run` fails, its writes are
    /// undone.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn run_apart<T, E: From<SqlError>>(
        &mut self,
        run: impl FnOnce(&Connection) -> Result<T, E>,
    ) -> Result<Result<T, E>, SqlError> {
        self.connection.execute_batch("SAVEPOINT part")?;
        let done = run(self.connection)
            .and_then(|done| self.connection.flush().map(|()| done).map_err(E::from));
        match done {
            Ok(_) => self.connection.execute_batch("RELEASE SAVEPOINT part")?,
            Err(_) => {
                self.connection.roll_back("ROLLBACK TO SAVEPOINT part; RELEASE SAVEPOINT part")?
            }
        }
        Ok(done)
    }

    /// Commits: when this returns, the writes are on the disk. After an error they may be
    /// there or not.
    ///
    /// # Errors
    /// [`SqlError`].
    pub fn commit(mut self) -> Result<(), SqlError> {
        // A server answers COMMIT of a failed transaction with a rollback and no error. The
        // statement before it fails there.
        let sql = match self.connection.0 {
            Database::Sqlite(_) => "COMMIT",
            Database::Server(_) => "SELECT 1; COMMIT",
        };
        self.connection.execute_batch(sql)?;
        self.is_open = false;
        Ok(())
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        if self.is_open {
            // A failure is harmless: SQLite has rolled back by itself after some errors, and a
            // server does so when the connection closes.
            let _ = self.connection.roll_back("ROLLBACK");
        }
    }
}
