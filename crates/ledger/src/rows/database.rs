//! The open database file: connections, transactions and whole-file commands.
//! The tables' definitions are in [`super::schema`].

use std::path::Path;
use std::time::Duration;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::config::DbConfig;
use rusqlite::{Connection, ErrorCode, OpenFlags, TransactionBehavior};

use super::{Tables, schema, storage_error};
use crate::error::LedgerError;

/// Memory in KiB that the writer's page cache may use.
const WRITER_CACHE_KIB: i64 = 4 * 1_024;
/// Pages of 4 KiB in the write-ahead log after which SQLite copies the log into
/// the file: 16 MiB.
const LONGEST_LOG_PAGES: u32 = 4_096;
/// Longest wait for another connection's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Prepared statements that a connection keeps.
const KEPT_STATEMENTS: usize = 64;

/// One connection to the database file.
pub(crate) struct Database {
    connection: Connection,
}

/// Switches the database to a write-ahead log. SQLite does not wait for another process that
/// opens the same file at this moment, so the wait is here.
pub(super) fn write_ahead(connection: &Connection) -> rusqlite::Result<()> {
    for _ in 1..SWITCH_ATTEMPTS {
        match connection.pragma_update(None, "journal_mode", "WAL") {
            Err(error) if error.sqlite_error_code() == Some(ErrorCode::DatabaseBusy) => {
                std::thread::sleep(SWITCH_PAUSE);
            }
            switched => return switched,
        }
    }
    // The last attempt stands apart, so that its error is returned.
    connection.pragma_update(None, "journal_mode", "WAL")
}

/// Attempts to switch to a write-ahead log, over two seconds.
const SWITCH_ATTEMPTS: u32 = 100;
/// Time between two of them.
const SWITCH_PAUSE: Duration = Duration::from_millis(20);

/// A transaction. Dropping it rolls it back.
pub(crate) struct Transaction<'c>(rusqlite::Transaction<'c>);

impl Database {
    /// Opens the file at `path` for writing and makes it if there is none. The
    /// tables are not touched. `max_pages` bounds the file, in pages of 4 KiB.
    pub(crate) fn open_writer(path: &Path, max_pages: Option<u32>) -> Result<Self, LedgerError> {
        let open = || -> rusqlite::Result<Connection> {
            let connection = Connection::open(path)?;
            prepare(&connection)?;
            // Readers read a snapshot beside the writer only with a write-ahead log.
            write_ahead(&connection)?;
            // A commit is acknowledged only once it is on the disk.
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.pragma_update(None, "foreign_keys", true)?;
            // A large cache: new rows are read again soon by neighbouring ids, and
            // a page that changes often goes into the file only once.
            connection.pragma_update(None, "cache_size", -WRITER_CACHE_KIB)?;
            // The log must not grow without a bound between two stops.
            connection.pragma_update(None, "wal_autocheckpoint", LONGEST_LOG_PAGES)?;
            if let Some(pages) = max_pages {
                connection.pragma_update(None, "max_page_count", pages)?;
            }
            Ok(connection)
        };
        Ok(Self { connection: open().map_err(at(path))? })
    }

    /// Opens an existing file for reading, beside a writer in this or another
    /// process. A ledger of an older format that is read as it is gets views that
    /// add the missing columns.
    ///
    /// The last connection that closes a database usually copies the log into
    /// the file and deletes the log. This connection does not: it cannot know
    /// whether the pages that it sees in the log are on the disk.
    pub(crate) fn open_reader(path: &Path) -> Result<Self, LedgerError> {
        let open = || -> rusqlite::Result<(Connection, bool)> {
            // Read-write without create: a reader of a WAL database keeps its index
            // in the -shm file. `query_only` forbids writing.
            let connection = Connection::open_with_flags(
                path,
                // URI as for the writer, which names its file in the same words.
                OpenFlags::SQLITE_OPEN_READ_WRITE
                    | OpenFlags::SQLITE_OPEN_NO_MUTEX
                    | OpenFlags::SQLITE_OPEN_URI,
            )?;
            prepare(&connection)?;
            connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
            let views = schema::views_of_older(Tables { connection: &connection })?;
            for views in views.unwrap_or_default() {
                // Before `query_only`, because making a view is a write, although a temporary one.
                connection.execute_batch(views)?;
            }
            Ok((connection, views.is_some()))
        };
        let (connection, is_older) = open().map_err(at(path))?;
        // An older format that is read as it is passed above, with its views.
        if !is_older {
            schema::refuse_other_formats(path, Tables { connection: &connection })?;
        }
        connection.pragma_update(None, "query_only", true).map_err(at(path))?;
        Ok(Self { connection })
    }

    /// Makes empty tables in memory, as they are in `like`.
    pub(crate) fn in_memory(like: Tables<'_>) -> Result<Self, LedgerError> {
        let connection = Connection::open_in_memory()?;
        // The same statements as for the file, so that the definitions can be compared as text.
        for definitions in schema::definitions_of_format(like)? {
            connection.execute_batch(definitions)?;
        }
        Ok(Self { connection })
    }

    /// The tables outside of any transaction: each statement commits by itself.
    pub(crate) fn tables(&self) -> Tables<'_> {
        Tables { connection: &self.connection }
    }

    /// Begins to write. The lock is taken at once, so that no later statement
    /// fails because another process writes.
    pub(crate) fn begin(&mut self) -> Result<Transaction<'_>, LedgerError> {
        let behavior = TransactionBehavior::Immediate;
        Ok(Transaction(self.connection.transaction_with_behavior(behavior)?))
    }

    /// Begins to read: all reads see the ledger as it is at the first of them.
    pub(crate) fn snapshot(&mut self) -> Result<Transaction<'_>, LedgerError> {
        Ok(Transaction(self.connection.transaction()?))
    }

    /// Copies as much of the write-ahead log into the file as readers allow.
    pub(crate) fn checkpoint(&self) -> Result<(), LedgerError> {
        // The pragma returns a row, which `execute` would refuse; no caller needs the figures.
        Ok(self.connection.query_row("PRAGMA wal_checkpoint", [], |_| Ok(()))?)
    }

    /// Makes the file as small as its contents and empties the log.
    pub(crate) fn shrink(&self) -> Result<(), LedgerError> {
        Ok(self.connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE);")?)
    }

    /// Gives up the write-ahead log, so that the file alone is the database. The
    /// next writer makes the log again.
    pub(crate) fn leave_one_file(&self) -> Result<(), LedgerError> {
        Ok(self.connection.pragma_update(None, "journal_mode", "DELETE")?)
    }

    /// Writes what a block might need (64 KiB) and deletes it again: succeeds
    /// once the disk has room.
    pub(crate) fn probe(&self) -> Result<(), LedgerError> {
        let probe = "INSERT INTO probe VALUES (zeroblob(65536)); DELETE FROM probe;";
        Ok(self.connection.execute_batch(probe)?)
    }

    /// Copies one snapshot of the database into a new file at `path`.
    pub(crate) fn copy_to(&self, path: &Path) -> Result<(), LedgerError> {
        let mut target = Self { connection: Connection::open(path)? };
        // All pages in one step, so that the copy is one snapshot beside a writer.
        let step = Backup::new(&self.connection, &mut target.connection)?.step(-1)?;
        if step != StepResult::Done {
            // A lock kept the copy from ending, so the target is incomplete.
            return Err(LedgerError::Busy);
        }
        target.leave_one_file()
    }
}

impl Transaction<'_> {
    /// The tables within the transaction.
    pub(crate) fn tables(&self) -> Tables<'_> {
        Tables { connection: &self.0 }
    }

    /// Runs `run` so that its writes can be undone without the writes before
    /// them. The outer result is the savepoint's own failure; where `run` fails,
    /// its writes are undone.
    pub(crate) fn run_apart<T, E>(
        &mut self,
        run: impl FnOnce(Tables<'_>) -> Result<T, E>,
    ) -> Result<Result<T, E>, LedgerError> {
        let part = self.0.savepoint()?;
        let done = run(Tables { connection: &part });
        // A savepoint that is dropped rolls back.
        if done.is_ok() {
            part.commit()?;
        }
        Ok(done)
    }

    /// Commits: when this returns, the writes are on the disk.
    pub(crate) fn commit(self) -> Result<(), LedgerError> {
        Ok(self.0.commit()?)
    }
}

fn prepare(connection: &Connection) -> rusqlite::Result<()> {
    // Without a timeout a read beside another connection's lock would fail at once.
    connection.busy_timeout(LOCK_TIMEOUT)?;
    connection.set_prepared_statement_cache_capacity(KEPT_STATEMENTS);
    Ok(())
}

/// Names the file in an error.
fn at(path: &Path) -> impl Fn(rusqlite::Error) -> LedgerError {
    move |source| LedgerError::Open { path: path.to_owned(), source: storage_error(source) }
}
