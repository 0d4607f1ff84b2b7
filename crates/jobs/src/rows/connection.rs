//! The store's connection. A failed write may stand on the disk all the same, so the
//! connection is opened anew after each failure, and the caller reads again.

use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::{Connection, TransactionBehavior};

use super::{Tables, damaged, schema};
use crate::error::JobError;

/// A hook that runs with the database's path before each opening. The product writes the
/// write-ahead log again here, because pages of acknowledged commits may be in the page
/// cache only.
pub type BeforeOpen = Arc<dyn Fn(&Path) -> std::io::Result<()> + Send + Sync>;

/// The store in a SQLite file, `jobs.db`.
pub struct SqliteStore {
    path: PathBuf,
    before_open: BeforeOpen,
    /// `None` after a failure.
    connection: Option<Connection>,
}

/// Longest wait for another connection's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
// FULL: a commit is on the disk when it returns.
const SETTINGS: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";

/// Makes the tables of the present format in a new database.
fn make_tables(connection: &Connection) -> rusqlite::Result<()> {
    change(connection, &[schema::DEFINITION, schema::SPENT, schema::REASONING])
}

/// Runs statements that change the tables, in one transaction.
fn change(connection: &Connection, statements: &[&str]) -> rusqlite::Result<()> {
    connection.execute_batch(&format!("BEGIN IMMEDIATE;{}COMMIT;", statements.concat()))
}

/// Returns true if the database has any table.
fn has_tables(connection: &Connection) -> rusqlite::Result<bool> {
    connection.query_row("SELECT EXISTS (SELECT 1 FROM sqlite_schema)", [], |row| row.get(0))
}

impl SqliteStore {
    /// Opens the database at `path`, and makes it with mode 0600 if there is none.
    ///
    /// # Errors
    /// The file cannot be opened, or has an unknown format.
    pub fn open(path: PathBuf, before_open: BeforeOpen) -> Result<Self, JobError> {
        let mut store = Self { path, before_open, connection: None };
        store.connection()?;
        Ok(store)
    }

    fn connection(&mut self) -> Result<&mut Connection, JobError> {
        // Taken out first, because a returned borrow would last to the end of the function.
        let connection = match self.connection.take() {
            Some(open) => open,
            None => self.connect()?,
        };
        Ok(self.connection.insert(connection))
    }

    fn connect(&self) -> Result<Connection, JobError> {
        self.connect_unnamed().map_err(|error| match error {
            JobError::Storage(cause) => damaged(format!("{}: {cause}", self.path.display())),
            error => error,
        })
    }

    /// Connects. The errors of SQLite do not name the file.
    fn connect_unnamed(&self) -> Result<Connection, JobError> {
        let file = |source| JobError::File { path: self.path.clone(), source: Arc::new(source) };
        // To open a pipe would wait for its other end.
        if std::fs::metadata(&self.path).is_ok_and(|found| !found.is_file()) {
            return Err(file(std::io::Error::other("it is no regular file")));
        }
        // SQLite would give a new file the mode of the umask.
        OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path).map_err(file)?;
        (self.before_open)(&self.path).map_err(file)?;
        let connection = Connection::open(&self.path)?;
        connection.busy_timeout(LOCK_TIMEOUT)?;
        connection.execute_batch(SETTINGS)?;
        match connection.query_row("PRAGMA user_version", [], |row| row.get(0))? {
            schema::FORMAT => {}
            // Also the version of a file whose making was cut off: tables and version are one
            // transaction. A file of another program has tables, and is not written.
            0 if !has_tables(&connection)? => make_tables(&connection)?,
            schema::WITHOUT_SPENT => change(&connection, &[schema::SPENT, schema::REASONING])?,
            schema::WITHOUT_REASONING => change(&connection, &[schema::REASONING])?,
            other => {
                return Err(damaged(format!(
                    "format {other}, this version reads format {}",
                    schema::FORMAT
                )));
            }
        }
        Ok(connection)
    }

    /// Opens a store that is lost when it is dropped, and after a failure.
    #[cfg(test)]
    pub(crate) fn in_memory() -> Result<Self, JobError> {
        let connection = Connection::open_in_memory()?;
        make_tables(&connection)?;
        let before_open: BeforeOpen = Arc::new(|_| Ok(()));
        Ok(Self { path: PathBuf::new(), before_open, connection: Some(connection) })
    }

    /// Runs `act` in a transaction and commits.
    pub(super) fn write<T>(
        &mut self,
        act: impl FnOnce(Tables<'_>) -> Result<T, JobError>,
    ) -> Result<T, JobError> {
        let connection = self.connection()?;
        let done = (|| {
            let transaction =
                // Immediate: a lock that is wanted only after a read is refused without the wait.
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let done = act(Tables { connection: &transaction })?;
            transaction.commit()?;
            Ok(done)
        })();
        if matches!(done, Err(JobError::Storage(_))) {
            self.connection = None;
        }
        done
    }

    /// Runs `act` over one state of the tables.
    pub(super) fn read<T>(
        &mut self,
        act: impl FnOnce(Tables<'_>) -> Result<T, JobError>,
    ) -> Result<T, JobError> {
        let connection = self.connection()?;
        let done = (|| {
            // One transaction, so that all reads see one state.
            let transaction = connection.transaction()?;
            act(Tables { connection: &transaction })
        })();
        if matches!(done, Err(JobError::Storage(_))) {
            self.connection = None;
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn write_that_panics_is_rolled_back() {
        let mut store = SqliteStore::in_memory().expect("memory");
        let panics = AssertUnwindSafe(|| {
            store.write(|tables| -> Result<(), JobError> {
                tables.connection.execute("CREATE TABLE half_done (a)", [])?;
                panic!("of the test")
            })
        });
        assert!(catch_unwind(panics).is_err());
        let sql = "SELECT count(*) FROM sqlite_master WHERE name = 'half_done'";
        let found = store.write(|tables| {
            Ok(tables.connection.query_row(sql, [], |row| row.get::<_, u64>(0))?)
        });
        assert_eq!(found.expect("the connection can be used"), 0);
    }
}
