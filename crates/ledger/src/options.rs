//! The options of an open ledger.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tollgate_sql::ServerAddress;

use crate::audit_key::AuditKey;
use crate::error::LedgerError;
use crate::operations::wal_rewrite::WalRewriter;
use crate::rows::database::Database;
use crate::rows::server_schema;

/// The time within which a server must answer, unless whole tables are read.
pub(crate) const SERVER_LIMIT: Duration = Duration::from_secs(10);

/// The place of a ledger or of a key database.
#[derive(Clone, Debug)]
pub enum DatabasePlace {
    /// A SQLite file. It is made if there is none.
    File(PathBuf),
    /// A database of a PostgreSQL server. Several gateways may write there. It may have both
    /// the ledger and the keys.
    Server(ServerAddress),
}

/// Options of an open ledger.
#[derive(Clone, Debug)]
pub struct LedgerOptions {
    /// The place of the ledger.
    pub place: DatabasePlace,
    /// The id of the gateway's data folder, for which charges on a server are counted beside
    /// the sums of all; see [`Home`](crate::caps::Home). `None` counts the sums alone.
    pub home: Option<String>,
    /// Most acts that wait for the writer.
    pub queue: usize,
    /// Most acts in one commit.
    pub group: usize,
    /// Time between two attempts while the disk refuses.
    pub retry: Duration,
    /// Largest size of a file in pages of 4 KiB; unbounded for `None`.
    pub max_pages: Option<u32>,
    /// The time within which a server must answer the writer and the handle's reader. A commit
    /// takes milliseconds, and so does a read for a caller of the gateway.
    pub server_limit: Duration,
    /// The rewrite of a file's write-ahead log before the file is opened.
    pub log: WalRewriter,
    /// The key that signs the audit log. Without a key records are written and not
    /// signed.
    pub key: Option<Arc<AuditKey>>,
    /// The longest time that a record waits for a checkpoint that covers it.
    pub checkpoint_every: Duration,
    /// Number of unsigned records at which a checkpoint is made at once.
    pub checkpoint_records: u64,
}

impl DatabasePlace {
    /// Returns true if a ledger was made there.
    ///
    /// # Errors
    /// The server cannot be asked.
    pub fn has_ledger(&self) -> Result<bool, LedgerError> {
        match self {
            Self::File(path) => Ok(path.exists()),
            Self::Server(address) => {
                let database = Database::connect_reader(address, SERVER_LIMIT)?;
                Ok(server_schema::find_format(database.tables())?.is_some())
            }
        }
    }
}

impl std::fmt::Display for DatabasePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(path) => path.display().fmt(f),
            Self::Server(address) => address.fmt(f),
        }
    }
}

impl From<&Path> for DatabasePlace {
    fn from(path: &Path) -> Self {
        Self::File(path.to_owned())
    }
}

impl From<&PathBuf> for DatabasePlace {
    fn from(path: &PathBuf) -> Self {
        path.as_path().into()
    }
}

impl LedgerOptions {
    /// Returns the defaults for a ledger in the file at `path`.
    pub fn new(path: &Path) -> Self {
        Self::at(path.into())
    }

    /// Returns the defaults for a ledger at `place`.
    pub fn at(place: DatabasePlace) -> Self {
        Self {
            place,
            home: None,
            queue: 1_024,
            group: 256,
            retry: Duration::from_secs(1),
            max_pages: None,
            server_limit: SERVER_LIMIT,
            log: WalRewriter::default(),
            key: None,
            checkpoint_every: Duration::from_secs(10),
            checkpoint_records: 10_000,
        }
    }
}
