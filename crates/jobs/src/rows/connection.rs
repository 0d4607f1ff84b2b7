//! The store's connection. A failed write may stand on the disk all the same, so the
//! connection is opened anew after each failure, and the caller reads again.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tollgate_sql::{Begin, Connection, Server, ServerAddress};

use super::{Tables, damaged, schema, server_schema};
use crate::error::JobError;

/// A hook that runs with the database's path before each opening. The product writes the
/// write-ahead log again here, because pages of acknowledged commits may be in the page
/// cache only.
pub type BeforeOpen = Arc<dyn Fn(&Path) -> std::io::Result<()> + Send + Sync>;

/// The store in tables: in a SQLite file, `jobs.db`, or on a PostgreSQL server.
pub struct SqlStore {
    source: Source,
    /// `None` after a failure.
    connection: Option<Connection>,
}

enum Source {
    File { path: PathBuf, before_open: BeforeOpen },
    Server { address: Box<ServerAddress>, home: String },
}

/// Longest wait for another connection's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// The time within which a server must answer.
const SERVER_LIMIT: Duration = Duration::from_secs(5);
// FULL: a commit is on the disk when it returns.
const SETTINGS: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";

/// Makes the tables of the present format in a new file.
fn make_tables(connection: &rusqlite::Connection) -> rusqlite::Result<()> {
    change(connection, &[schema::DEFINITION, schema::SPENT, schema::REASONING])
}

/// Runs statements that change the tables, in one transaction.
fn change(connection: &rusqlite::Connection, statements: &[&str]) -> rusqlite::Result<()> {
    connection.execute_batch(&format!("BEGIN IMMEDIATE;{}COMMIT;", statements.concat()))
}

/// Returns true if the file has any table.
fn has_tables(connection: &rusqlite::Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT EXISTS (SELECT 1 FROM sqlite_schema)", [], |row| row.get(0))
}

impl SqlStore {
    /// Opens the database at `path`, and makes it with mode 0600 if there is none.
    ///
    /// # Errors
    /// The file cannot be opened, or has an unknown format.
    pub fn open(path: PathBuf, before_open: BeforeOpen) -> Result<Self, JobError> {
        Self::over(Source::File { path, before_open })
    }

    /// Opens the store on a server, and makes its tables if there are none. `home` is the id of
    /// this gateway's data folder.
    ///
    /// # Errors
    /// The server cannot be used, or its tables have an unknown format.
    pub fn on_server(address: ServerAddress, home: String) -> Result<Self, JobError> {
        Self::over(Source::Server { address: Box::new(address), home })
    }

    fn over(source: Source) -> Result<Self, JobError> {
        let mut store = Self { source, connection: None };
        store.connection()?;
        Ok(store)
    }

    /// Opens a store that is lost when it is dropped, and after a failure.
    #[cfg(test)]
    pub(crate) fn in_memory() -> Result<Self, JobError> {
        let connection = rusqlite::Connection::open_in_memory().map_err(from_sqlite)?;
        make_tables(&connection).map_err(from_sqlite)?;
        let source = Source::File { path: PathBuf::new(), before_open: Arc::new(|_| Ok(())) };
        Ok(Self { source, connection: Some(connection.into()) })
    }

    /// Connects if there is no connection, or if the server has closed it.
    fn connection(&mut self) -> Result<(), JobError> {
        let is_open =
            |connection: &Connection| connection.server().is_none_or(Server::is_connected);
        if !self.connection.as_ref().is_some_and(is_open) {
            // Before the new one: the old one may hold locks.
            self.connection = None;
            self.connection = Some(self.source.connect()?);
        }
        Ok(())
    }

    /// Runs `act` in a transaction and commits.
    pub(super) fn write<T>(
        &mut self,
        act: impl FnOnce(Tables<'_>) -> Result<T, JobError>,
    ) -> Result<T, JobError> {
        self.run(Begin::Write, act)
    }

    /// Runs `act` over one state of the tables.
    pub(super) fn read<T>(
        &mut self,
        act: impl FnOnce(Tables<'_>) -> Result<T, JobError>,
    ) -> Result<T, JobError> {
        self.run(Begin::Read, act)
    }

    fn run<T>(
        &mut self,
        begin: Begin,
        act: impl FnOnce(Tables<'_>) -> Result<T, JobError>,
    ) -> Result<T, JobError> {
        self.connection()?;
        let Some(connection) = &mut self.connection else { return Err(JobError::Closed) };
        let home = match &self.source {
            Source::File { .. } => None,
            Source::Server { home, .. } => Some(home.as_str()),
        };
        let done = (|| {
            let transaction = connection.begin(begin)?;
            let (connection, is_writing) = (transaction.connection(), begin == Begin::Write);
            let done = act(Tables { connection, home, is_writing })?;
            if is_writing {
                transaction.commit()?;
            }
            Ok(done)
        })();
        if matches!(done, Err(JobError::Storage(_))) {
            self.connection = None;
        }
        done
    }
}

impl Source {
    fn connect(&self) -> Result<Connection, JobError> {
        let (place, connected) = match self {
            Self::File { path, before_open } => {
                (path.display().to_string(), connect_to_file(path, before_open))
            }
            Self::Server { address, .. } => (address.to_string(), connect_to_server(address)),
        };
        // The errors of the databases do not name the file or the server.
        connected.map_err(|error| match error {
            JobError::Storage(cause) => damaged(format!("{place}: {cause}")),
            error => error,
        })
    }
}

fn connect_to_server(address: &ServerAddress) -> Result<Connection, JobError> {
    let mut connection = Connection::from(Server::connect(address, SERVER_LIMIT)?);
    server_schema::make_tables(&mut connection)?;
    Ok(connection)
}

fn connect_to_file(path: &Path, before_open: &BeforeOpen) -> Result<Connection, JobError> {
    let file = |source| JobError::File { path: path.to_owned(), source: Arc::new(source) };
    // To open a pipe would wait for its other end.
    if std::fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(file(std::io::Error::other("it is no regular file")));
    }
    // SQLite would give a new file the mode of the umask.
    OpenOptions::new().append(true).create(true).mode(0o600).open(path).map_err(file)?;
    before_open(path).map_err(file)?;
    let connection = rusqlite::Connection::open(path).map_err(from_sqlite)?;
    let format = (|| {
        connection.busy_timeout(LOCK_TIMEOUT)?;
        connection.execute_batch(SETTINGS)?;
        match connection.query_row("PRAGMA user_version", [], |row| row.get(0))? {
            schema::FORMAT => {}
            // Also the version of a file whose making was cut off: tables and version are one
            // transaction. A file of another program has tables, and is not written.
            0 if !has_tables(&connection)? => make_tables(&connection)?,
            schema::WITHOUT_SPENT => change(&connection, &[schema::SPENT, schema::REASONING])?,
            schema::WITHOUT_REASONING => change(&connection, &[schema::REASONING])?,
            other => return Ok(other),
        }
        Ok(schema::FORMAT)
    })();
    match format.map_err(from_sqlite)? {
        schema::FORMAT => Ok(connection.into()),
        other => {
            Err(damaged(format!("format {other}, this version reads format {}", schema::FORMAT)))
        }
    }
}

fn from_sqlite(error: rusqlite::Error) -> JobError {
    tollgate_sql::SqlError::from(error).into()
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn write_that_panics_is_rolled_back() {
        let mut store = SqlStore::in_memory().expect("memory");
        let panics = AssertUnwindSafe(|| {
            store.write(|tables| -> Result<(), JobError> {
                tables.connection.execute("CREATE TABLE half_done (a)", ())?;
                panic!("of the test")
            })
        });
        assert!(catch_unwind(panics).is_err());
        let sql = "SELECT count(*) FROM sqlite_master WHERE name = 'half_done'";
        let found = store
            .write(|tables| Ok(tables.connection.query_row(sql, (), |row| row.get::<u64>(0))?));
        assert_eq!(found.expect("the connection can be used"), 0);
    }
}
