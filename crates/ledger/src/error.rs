//! Errors of the ledger. They can be cloned, because one failed commit answers every
//! act of its group.

use std::path::PathBuf;
use std::sync::Arc;

use tollgate_domain::WorkerEpoch;

/// A failure of the ledger.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be opened or prepared.
    #[error("the ledger {} cannot be opened", path.display())]
    Open {
        /// The database file.
        path: PathBuf,
        /// The cause.
        source: StorageError,
    },
    /// The ledger on a database server cannot be opened.
    #[error("the ledger on the database server {address} cannot be opened")]
    Server {
        /// User, host and database, without the password.
        address: String,
        /// The cause.
        source: StorageError,
    },
    /// The server's database has a ledger of another version, or another program's tables.
    #[error(
        "the ledger on the database server {address} has format {found:?}, this version reads format {expected}"
    )]
    ServerFormat {
        /// User, host and database, without the password.
        address: String,
        /// The format in its `meta` table.
        found: String,
        /// The format that this version writes.
        expected: u32,
    },
    /// A ledger was to be moved to a server that has another one.
    #[error("the database server {address} has another ledger already; name an empty database")]
    OtherLedger {
        /// User, host and database, without the password.
        address: String,
    },
    /// The operation exists only for a ledger in a file.
    #[error("this is done only to a ledger in a file; use the database server's own tools")]
    NoFile,
    /// The write-ahead log cannot be rewritten before the file is opened.
    #[error("the write-ahead log of the ledger {} cannot be rewritten", path.display())]
    Log {
        /// The database file.
        path: PathBuf,
        /// The cause.
        source: Arc<std::io::Error>,
    },
    /// The file was written by another version, or is no ledger.
    #[error("the ledger {} has format {found:?}, this version reads format {expected}; `tollgate up` migrates an older one", path.display())]
    Format {
        /// The database file.
        path: PathBuf,
        /// The format in its `meta` table.
        found: String,
        /// The format that this version writes.
        expected: u32,
    },
    /// The database failed, for instance on a full disk. No act of the group was
    /// written. The caller keeps its act and submits it again later.
    #[error("the ledger cannot be written or read")]
    Storage(#[source] StorageError),
    /// The writer's queue is full. Submit again when an answer has come back.
    #[error("the ledger's queue is full")]
    Busy,
    /// The writer has stopped.
    #[error("the ledger is closed")]
    Closed,
    /// The block contradicts the ledger and will never be posted.
    #[error("block {number} of epoch {epoch} refused: {refusal}")]
    Refused {
        /// The epoch that the block names.
        epoch: WorkerEpoch,
        /// The block's number.
        number: u64,
        /// The reason.
        refusal: BlockRefusal,
    },
    /// The attempt was settled with other figures before.
    #[error("the attempt is already settled with other figures")]
    AlreadySettled,
    /// A row holds a value that no version writes.
    #[error("the ledger is damaged: {0}")]
    Damaged(String),
}

impl LedgerError {
    /// Returns true if the disk failed: nothing was written, and the same act may
    /// succeed later. The caller keeps its act until then.
    pub fn is_of_the_disk(&self) -> bool {
        // After a disk error the writer opens the database anew, which may fail at that.
        matches!(
            self,
            Self::Storage(_) | Self::Log { .. } | Self::Open { .. } | Self::Server { .. }
        )
    }
}

/// The reason why a balanced block is refused. Each is an alarm: a sound worker
/// writes no such block.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockRefusal {
    /// Another block with this number is posted already.
    #[error("another block with this number is posted already")]
    Conflict,
    /// Blocks before this one are missing.
    #[error("expected block {expected} next")]
    Gap {
        /// The number that must come next.
        expected: u64,
    },
    /// The epoch has ended.
    #[error("its epoch has ended")]
    Ended,
    /// The block names another worker or device than the epoch's first block.
    #[error("its worker or device changed within the epoch")]
    Identity,
    /// The block's steps are not after those of the block before it.
    #[error("its steps begin before step {after} ended")]
    Steps {
        /// The last step of the block before.
        after: u64,
    },
    /// The block finishes an attempt that is finished already.
    #[error("attempt {attempt} of {request} is finished already")]
    Replayed {
        /// The request.
        request: String,
        /// The attempt.
        attempt: u32,
    },
    /// A figure or a sum does not fit the ledger.
    #[error("it does not fit the ledger: {reason}")]
    Unfit {
        /// The database's reason.
        reason: String,
    },
    /// The block was posted before and is archived.
    #[error("it was posted, and is archived")]
    Archived,
    /// The block was refused before and skipped.
    #[error("it was refused before")]
    Skipped,
}

/// A failure of the database below the ledger.
#[derive(Clone, Debug)]
pub struct StorageError {
    source: Arc<dyn std::error::Error + Send + Sync>,
    is_about_content: bool,
}

impl StorageError {
    /// Wraps the database's own error. `is_about_content` is true if the database
    /// refused the values rather than failed.
    pub(crate) fn new(
        source: impl std::error::Error + Send + Sync + 'static,
        is_about_content: bool,
    ) -> Self {
        // Shared, because one failed commit answers each act of its group with this error.
        Self { source: Arc::new(source), is_about_content }
    }

    /// Returns true if the database refused the values: a retry changes nothing.
    pub(crate) fn is_about_content(&self) -> bool {
        self.is_about_content
    }
}

impl std::fmt::Display for StorageError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.source.fmt(f)
    }
}

impl std::error::Error for StorageError {
    // The wrapper displays as its source, so the chain goes on behind the source.
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.source()
    }
}
