//! What can go wrong with the ledger. Cloneable, because one failed commit
//! answers every caller of its group.

use std::path::PathBuf;
use std::sync::Arc;

use rusqlite::ErrorCode;
use tollgate_domain::WorkerEpoch;

/// Why the ledger did not do what it was asked.
#[derive(Clone, Debug, thiserror::Error)]
pub enum LedgerError {
    /// The file cannot be opened or prepared.
    #[error("the ledger {} cannot be opened", path.display())]
    Open {
        /// The database file.
        path: PathBuf,
        /// What SQLite said.
        source: Arc<rusqlite::Error>,
    },
    /// Its write-ahead log cannot be written once more.
    #[error("the log of the ledger {} cannot be written", path.display())]
    Log {
        /// The database file.
        path: PathBuf,
        /// What the system said.
        source: Arc<std::io::Error>,
    },
    /// Written by another version, or not a ledger at all.
    #[error("the ledger {} has format {found:?}, this version reads format {expected}; `tollgate up` takes an older one on", path.display())]
    Format {
        /// The database file.
        path: PathBuf,
        /// What its `meta` table says.
        found: String,
        /// What this version writes.
        expected: u32,
    },
    /// Nothing of the group was written: disk full, input/output error.
    /// The caller keeps what it has and tries again later.
    #[error("the ledger cannot be written or read")]
    Storage(#[source] Arc<rusqlite::Error>),
    /// The writer's queue is full: try again when an answer has come back.
    #[error("the ledger's queue is full")]
    Busy,
    /// The writer has stopped.
    #[error("the ledger is closed")]
    Closed,
    /// The block contradicts what is in the ledger. It will never be posted.
    #[error("block {number} of epoch {epoch} refused: {refusal}")]
    Refused {
        /// The epoch it names.
        epoch: WorkerEpoch,
        /// Its number.
        number: u64,
        /// Why.
        refusal: BlockRefusal,
    },
    /// The attempt was settled with other figures before.
    #[error("the attempt is already settled otherwise")]
    AlreadySettled,
    /// A row holds what this version never writes.
    #[error("the ledger is damaged: {0}")]
    Damaged(String),
}

impl LedgerError {
    /// Whether the disk is what failed: nothing was written, and the same may
    /// well go through later. Whoever has something to post keeps it till then.
    pub fn is_of_the_disk(&self) -> bool {
        matches!(self, Self::Storage(_) | Self::Log { .. } | Self::Open { .. })
    }
}

/// Why a balanced block is refused all the same. Each is an alarm: an honest
/// worker writes none of them.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BlockRefusal {
    /// A block with this id and other content is posted already.
    #[error("another block with this number is posted already")]
    Conflict,
    /// Blocks before it are missing.
    #[error("expected block {expected} next")]
    Gap {
        /// The number that must come next.
        expected: u64,
    },
    /// The epoch has ended.
    #[error("its epoch has ended")]
    Ended,
    /// It names another worker or device than the epoch's first block.
    #[error("its worker or device changed within the epoch")]
    Identity,
    /// Its steps are not after those of the block before.
    #[error("its steps begin before step {after} ended")]
    Steps {
        /// The last step of the block before.
        after: u64,
    },
    /// It finishes an attempt that is finished already.
    #[error("attempt {attempt} of {request} is finished already")]
    Replayed {
        /// The request.
        request: String,
        /// The attempt.
        attempt: u32,
    },
    /// The ledger's own constraints refuse it: a sum that does not fit.
    #[error("it does not fit the ledger: {reason}")]
    Unfit {
        /// What SQLite said.
        reason: String,
    },
    /// It is in an archive: it was posted long ago.
    #[error("it was posted, and is archived")]
    Archived,
    /// The block was refused before and skipped.
    #[error("it was refused before")]
    Skipped,
}

/// Whether SQLite refuses what it was given, rather than that the disk fails:
/// trying again would change nothing.
pub(crate) fn is_about_content(error: &rusqlite::Error) -> bool {
    match error {
        rusqlite::Error::SqliteFailure(failure, message) => match failure.code {
            ErrorCode::ConstraintViolation | ErrorCode::TypeMismatch | ErrorCode::TooBig => true,
            // What `sum` says, under the most general of codes.
            ErrorCode::Unknown => message.as_deref() == Some("integer overflow"),
            _ => false,
        },
        rusqlite::Error::IntegralValueOutOfRange(..)
        | rusqlite::Error::InvalidColumnType(..)
        | rusqlite::Error::FromSqlConversionFailure(..) => true,
        _ => false,
    }
}

impl From<rusqlite::Error> for LedgerError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Storage(Arc::new(error))
    }
}
