//! Files as rows: what a client uploaded, or what a batch answered.

use std::time::Duration;

use tollgate_domain::{PoolName, TenantId, UtcTime};

use crate::ids::{BlobId, FileId};

/// The use of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The input of batches.
    Batch,
    /// The answers or errors of a batch.
    BatchOutput,
}

/// A file that a client can read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileRow {
    /// The id.
    pub id: FileId,
    /// The owner.
    pub tenant: TenantId,
    /// The owner's pool when the file was made.
    pub pool: Option<PoolName>,
    /// The size in bytes.
    pub bytes: u64,
    /// The time of the upload, or of the end of the batch.
    pub created: UtcTime,
    /// The time from which the file does not exist.
    pub expires: UtcTime,
    /// The client's name for the file, for display only.
    pub filename: String,
    /// The use.
    pub purpose: Purpose,
    /// Lines that are not blank.
    pub lines: u64,
    /// The SHA-256 of the bytes of an input.
    pub sha256: Option<[u8; 32]>,
}

/// A file that is about to be uploaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewFile {
    /// The id of the file, drawn by the caller.
    pub id: FileId,
    /// The name on disk, drawn by the caller.
    pub blob: BlobId,
    /// The owner.
    pub tenant: TenantId,
    /// The owner's pool.
    pub pool: Option<PoolName>,
    /// Bytes to reserve at first: the declared size, or one step.
    pub reserved: u64,
}

/// A finished upload, as counted while it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FinishedFile {
    /// The size in bytes.
    pub bytes: u64,
    /// Lines that are not blank.
    pub lines: u64,
    /// The SHA-256 of the bytes.
    pub sha256: [u8; 32],
    /// The client's name for the file.
    pub filename: String,
    /// The life that the client asked for; the plan's `kept` bounds it.
    pub life: Option<Duration>,
}

/// Bytes of a blob that belong to a file. A file is a list of ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlobRange {
    /// The blob.
    pub blob: BlobId,
    /// The first byte.
    pub offset: u64,
    /// The number of bytes.
    pub length: u64,
}

/// The order of a list by time of creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Oldest first.
    Ascending,
    /// Newest first.
    Descending,
}

/// The part of a list of files that a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FilePage {
    /// The last file of the page before.
    pub after: Option<FileId>,
    /// Most files of the page.
    pub limit: u32,
    /// The order.
    pub order: Order,
    /// Only files of this purpose.
    pub purpose: Option<Purpose>,
}

/// One page of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// True if rows follow.
    pub has_more: bool,
}
