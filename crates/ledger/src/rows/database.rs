//! The open database, in a file or on a server: connections, transactions, and what is
//! done to a file as a whole. The tables' definitions are in [`super::schema`] and
//! [`super::server_schema`].

use std::path::Path;
use std::time::Duration;

use rusqlite::backup::{Backup, StepResult};
use rusqlite::config::DbConfig;
use rusqlite::{ErrorCode, OpenFlags};
use tollgate_sql::{Begin, Connection, Server, ServerAddress, SqlError, take_server_lock};

use super::{Tables, schema};
use crate::error::{LedgerError, StorageError};

/// Memory in KiB that the writer's page cache may use.
const WRITER_CACHE_KIB: i64 = 4 * 1_024;
/// Pages of 4 KiB in the write-ahead log after which SQLite copies the log into
/// the file: 16 MiB.
const LONGEST_LOG_PAGES: u32 = 4_096;
/// Longest wait for another connection's lock.
const LOCK_TIMEOUT: Duration = Duration::from_secs(5);
/// Prepared statements that a connection keeps.
const KEPT_STATEMENTS: usize = 64;
/// The oldest version of PostgreSQL that is used, as PostgreSQL numbers it.
const OLDEST_SERVER: u32 = 140_000;
/// The number of the lock that a writer holds for the length of its transaction. One
/// writer at a time appends to the audit log, whatever gateway it is of.
const WRITER_LOCK: i64 = 0x746f_6c6c_6761_7465;

/// One connection to the database.
pub(crate) struct Database {
    connection: Connection,
    /// The data folder of this gateway, on a server that several gateways write to.
    home: Option<String>,
}

/// Switches the database to a write-ahead log. SQLite does not wait for another process that
/// opens the same file at this moment, so the wait is here.
pub(super) fn write_ahead(connection: &rusqlite::Connection) -> rusqlite::Result<()> {
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
pub(crate) struct Transaction<'c> {
    inner: tollgate_sql::Transaction<'c>,
    home: Option<&'c str>,
}

/// A server that cannot hold a ledger.
#[derive(Debug, thiserror::Error)]
enum UnusableServer {
    #[error("it is PostgreSQL {}; version {} or newer is needed", .0 / 10_000, OLDEST_SERVER / 10_000)]
    TooOld(u32),
    #[error("it is a standby, which accepts no writes; name the primary")]
    Standby,
}

impl Database {
    /// Opens the file at `path` for writing and makes it if there is none. The
    /// tables are not touched. `max_pages` bounds the file, in pages of 4 KiB.
    pub(crate) fn open_writer(path: &Path, max_pages: Option<u32>) -> Result<Self, LedgerError> {
        let open = || -> rusqlite::Result<rusqlite::Connection> {
            let connection = rusqlite::Connection::open(path)?;
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
        Ok(open().map_err(|error| at(path, error.into()))?.into())
    }

    /// Opens an existing file for reading, beside a writer in this or another
    /// process. A ledger of an older format that is read as it is gets views that
    /// add the missing columns.
    ///
    /// The last connection that closes a database usually copies the log into
    /// the file and deletes the log. This connection does not: it cannot know
    /// whether the pages that it sees in the log are on the disk.
    pub(crate) fn open_reader(path: &Path) -> Result<Self, LedgerError> {
        let open = || -> Result<(Connection, bool), SqlError> {
            // Read-write without create: a reader of a WAL database keeps its index
            // in the -shm file. `query_only` forbids writing.
            let file = rusqlite::Connection::open_with_flags(
                path,
                // URI as for the writer, which names its file in the same words.
                OpenFlags::SQLITE_OPEN_READ_WRITE
                    | OpenFlags::SQLITE_OPEN_NO_MUTEX
                    | OpenFlags::SQLITE_OPEN_URI,
            )?;
            prepare(&file)?;
            file.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
            let connection = Connection::from(file);
            let views = schema::views_of_older(Tables { connection: &connection, home: None })?;
            for views in views.unwrap_or_default() {
                // Before `query_only`, because making a view is a write, although a temporary one.
                connection.execute_batch(views)?;
            }
            Ok((connection, views.is_some()))
        };
        let (connection, is_older) = open().map_err(|error| at(path, error))?;
        // An older format that is read as it is passed above, with its views.
        if !is_older {
            schema::refuse_other_formats(path, Tables { connection: &connection, home: None })?;
        }
        connection.execute_batch("PRAGMA query_only = true").map_err(|error| at(path, error))?;
        Ok(Self { connection, home: None })
    }

    /// Connects to a server for writing. The tables are not touched. `limit` is the time
    /// within which the server must answer. What is charged is also counted for `home`, the
    /// data folder of this gateway.
    pub(crate) fn connect_writer(
        address: &ServerAddress,
        limit: Duration,
        home: Option<&str>,
    ) -> Result<Self, LedgerError> {
        let server = connect_primary(address, limit).map_err(|source| on(address, source))?;
        Ok(Self { connection: server.into(), home: home.map(str::to_owned) })
    }

    /// Connects to a server for reading. A standby is as good as the primary. `limit` is the
    /// time within which the server must answer.
    pub(crate) fn connect_reader(
        address: &ServerAddress,
        limit: Duration,
    ) -> Result<Self, LedgerError> {
        let server = connect(address, limit).map_err(|source| on(address, source))?;
        Ok(Self { connection: server.into(), home: None })
    }

    /// Makes empty tables in memory, as they are in `like`.
    pub(crate) fn in_memory(like: Tables<'_>) -> Result<Self, LedgerError> {
        let memory = rusqlite::Connection::open_in_memory().map_err(SqlError::from)?;
        let connection = Connection::from(memory);
        // The same statements as for the file, so that the definitions can be compared as text.
        for definitions in schema::definitions_of_format(like)? {
            connection.execute_batch(definitions)?;
        }
        Ok(Self { connection, home: None })
    }

    /// The tables outside of any transaction: each statement commits by itself.
    pub(crate) fn tables(&self) -> Tables<'_> {
        Tables { connection: &self.connection, home: self.home.as_deref() }
    }

    /// Returns true if writers in other processes may write beside this one.
    pub(crate) fn may_have_other_writers(&self) -> bool {
        self.connection.server().is_some()
    }

    /// Returns true if the database answers. A file always does.
    pub(crate) fn is_connected(&self) -> bool {
        self.connection.server().is_none_or(Server::is_connected)
    }

    /// Begins to write. The lock is taken at once: in a file, so that no later statement
    /// fails because another process writes; on a server, so that one writer at a time
    /// appends to the audit log.
    pub(crate) fn begin(&mut self) -> Result<Transaction<'_>, LedgerError> {
        let is_server = self.may_have_other_writers();
        let transaction = self.connection.begin(Begin::Write)?;
        if is_server {
            take_server_lock(transaction.connection(), WRITER_LOCK)?;
        }
        Ok(Transaction { inner: transaction, home: self.home.as_deref() })
    }

    /// Begins to read: all reads see the ledger as it is at the first of them.
    pub(crate) fn snapshot(&mut self) -> Result<Transaction<'_>, LedgerError> {
        Ok(Transaction { inner: self.connection.begin(Begin::Read)?, home: None })
    }

    /// Copies as much of a file's write-ahead log into the file as readers allow. A server
    /// does so by itself.
    pub(crate) fn checkpoint(&self) -> Result<(), LedgerError> {
        let Some(file) = self.connection.file() else { return Ok(()) };
        // The pragma returns a row, which `execute` would refuse; no caller needs the figures.
        let done = file.query_row("PRAGMA wal_checkpoint", [], |_| Ok(()));
        Ok(done.map_err(SqlError::from)?)
    }

    /// Makes the file as small as its contents and empties the log.
    pub(crate) fn shrink(&self) -> Result<(), LedgerError> {
        self.file()?;
        Ok(self.connection.execute_batch("VACUUM; PRAGMA wal_checkpoint(TRUNCATE);")?)
    }

    /// Gives up the write-ahead log, so that the file alone is the database. The
    /// next writer makes the log again.
    pub(crate) fn leave_one_file(&self) -> Result<(), LedgerError> {
        let left = self.file()?.pragma_update(None, "journal_mode", "DELETE");
        Ok(left.map_err(SqlError::from)?)
    }

    /// Writes what a block might need (64 KiB) and deletes it again: succeeds
    /// once the disk has room, or the server accepts writes.
    pub(crate) fn probe(&self) -> Result<(), LedgerError> {
        let filler = vec![0_u8; 65_536];
        self.connection.execute("INSERT INTO probe (filler) VALUES (?1)", [filler])?;
        self.connection.execute("DELETE FROM probe", ())?;
        Ok(())
    }

    /// Copies one snapshot of the file into a new file at `path`.
    pub(crate) fn copy_to(&self, path: &Path) -> Result<(), LedgerError> {
        let mut target = rusqlite::Connection::open(path).map_err(SqlError::from)?;
        // All pages in one step, so that the copy is one snapshot beside a writer.
        let copy = Backup::new(self.file()?, &mut target);
        let step = copy.and_then(|copy| copy.step(-1)).map_err(SqlError::from)?;
        if step != StepResult::Done {
            // A lock kept the copy from ending, so the target is incomplete.
            return Err(LedgerError::Busy);
        }
        Self::from(target).leave_one_file()
    }

    fn file(&self) -> Result<&rusqlite::Connection, LedgerError> {
        self.connection.file().ok_or(LedgerError::NoFile)
    }
}

impl From<rusqlite::Connection> for Database {
    fn from(file: rusqlite::Connection) -> Self {
        Self { connection: file.into(), home: None }
    }
}

impl Transaction<'_> {
    /// The tables within the transaction.
    pub(crate) fn tables(&self) -> Tables<'_> {
        Tables { connection: self.inner.connection(), home: self.home }
    }

    /// Runs `run` so that its writes can be undone without the writes before
    /// them. The outer result is the savepoint's own failure; where `run` fails,
    /// its writes are undone.
    pub(crate) fn run_apart<T, E: From<SqlError>>(
        &mut self,
        run: impl FnOnce(Tables<'_>) -> Result<T, E>,
    ) -> Result<Result<T, E>, LedgerError> {
        let home = self.home;
        Ok(self.inner.run_apart(|connection| run(Tables { connection, home }))?)
    }

    /// Commits: when this returns, the writes are on the disk.
    pub(crate) fn commit(self) -> Result<(), LedgerError> {
        Ok(self.inner.commit()?)
    }
}

fn prepare(connection: &rusqlite::Connection) -> rusqlite::Result<()> {
    // Without a timeout a read beside another connection's lock would fail at once.
    connection.busy_timeout(LOCK_TIMEOUT)?;
    connection.set_prepared_statement_cache_capacity(KEPT_STATEMENTS);
    Ok(())
}

/// Connects to a server that accepts writes. `limit` is the time within which it must answer.
pub(crate) fn connect_primary(
    address: &ServerAddress,
    limit: Duration,
) -> Result<Server, StorageError> {
    let server = connect(address, limit)?;
    match server.is_standby()? {
        true => Err(StorageError::new(UnusableServer::Standby, false)),
        false => Ok(server),
    }
}

fn connect(address: &ServerAddress, limit: Duration) -> Result<Server, StorageError> {
    let server = Server::connect(address, limit)?;
    let version = server.version()?;
    match version < OLDEST_SERVER {
        true => Err(StorageError::new(UnusableServer::TooOld(version), false)),
        false => Ok(server),
    }
}

/// Names the file in an error.
fn at(path: &Path, error: SqlError) -> LedgerError {
    LedgerError::Open { path: path.to_owned(), source: error.into() }
}

/// Names the server in an error.
fn on(address: &ServerAddress, source: StorageError) -> LedgerError {
    LedgerError::Server { address: address.to_string(), source }
}
