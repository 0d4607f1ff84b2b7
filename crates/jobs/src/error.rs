//! Reasons why an operation on files or batches is not done.

use std::path::PathBuf;
use std::sync::Arc;

use crate::file::FileRow;
use crate::quota::QuotaScope;

/// A quota that does not allow an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QuotaRefusal {
    /// The quota's name in the config: `queued`, `lines`, `stored`, ...
    pub quota: &'static str,
    /// A sentence that names the tenant, the figures and the plan.
    pub message: String,
    /// The tenants over which the quota counts; `None` for the quota of the gateway.
    pub scope: Option<QuotaScope>,
}

/// An operation that was not done.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JobError {
    /// A quota is used up.
    #[error("{}", .0.message)]
    Quota(Box<QuotaRefusal>),
    /// The tenant has no such file.
    #[error("the file does not exist")]
    NoSuchFile,
    /// The tenant has no such batch.
    #[error("the batch does not exist")]
    NoSuchBatch,
    /// A batch that has not ended needs the file.
    #[error("a batch that has not ended needs the file")]
    FileInUse,
    /// The file is no input of batches.
    #[error("the file's purpose is not 'batch'")]
    WrongPurpose,
    /// The batch has ended, or ends, for another cause.
    #[error("the batch has ended")]
    BatchEnded,
    /// The claim is not the batch's latest. Nothing was changed.
    #[error("another dispatcher has claimed the batch")]
    StaleClaim,
    /// The file is larger, or has more or longer lines, than the gateway takes.
    #[error("{0}")]
    TooLarge(String),
    /// The disk has too little room.
    #[error("the gateway has no room for files")]
    NoSpace,
    /// The bytes on disk are not those that were uploaded.
    #[error("the bytes of the file have changed on the disk")]
    Damaged,
    /// Another upload has made the file with this id. Nothing was changed.
    #[error("the file with this id exists")]
    FileExists(Box<FileRow>),
    /// The queue of operations is full.
    #[error("the store of jobs takes no more operations")]
    Busy,
    /// The store's thread has ended.
    #[error("the store of jobs is closed")]
    Closed,
    /// The database or the disk failed, or the operation panicked. It may have been done.
    #[error("the store of jobs failed")]
    Storage(#[source] StorageError),
    /// A folder does not belong to the store.
    #[error("{}: {problem}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The reason.
        problem: &'static str,
    },
    /// A file on disk cannot be read or written.
    #[error("{}: cannot be read or written", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Arc<std::io::Error>,
    },
}

/// A failure of the database.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{0}")]
pub struct StorageError(Arc<dyn std::error::Error + Send + Sync>);

impl StorageError {
    /// Wraps the database's own error.
    pub(crate) fn new(source: impl std::error::Error + Send + Sync + 'static) -> Self {
        Self(Arc::new(source))
    }

    /// Makes an error about a value that no version writes.
    pub(crate) fn damaged(what: String) -> Self {
        Self::new(std::io::Error::other(what))
    }
}

/// Returns an error with its causes, on one line.
pub(crate) fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}
