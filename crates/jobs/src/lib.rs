//! Files and batches of OpenAI's interface: what is kept on disk, which state a batch
//! is in, and which line of which batch runs next.
//!
//! Each line of a batch is answered once and paid once, also if processes die at any
//! point. Modules stand from the bottom up: rows as plain data, the [`Store`] that
//! keeps them in transactions, bytes on disk, the validator, and the dispatcher.
//! The crate knows no HTTP and no serving: [`LineService`] is its only way to a worker.

pub mod ids;

pub mod batch;
pub mod claim;
pub mod file;
pub mod quota;

pub mod error;
pub mod store;

mod blobs;
mod content;
mod disk;
mod hash;
mod jobs;
mod line;
mod rows;
mod rules;
mod segment;
mod shared_folder;
mod upload;
mod validate;

pub mod service;

mod dispatch;
pub mod figures;

pub mod fuzz;

#[cfg(test)]
mod tests;

pub use batch::{
    BatchPage, BatchRow, BatchState, BatchUsage, CancelReason, Cause, Counts, Endpoint,
    FailureCode, InputError, NewBatch, SpentByBatches, Times, TryCost, TryUsage,
};
pub use claim::{Claim, ClaimNumber, ClaimSeed, Claimed, TryName};
pub use content::Content;
pub use dispatch::{DispatchOptions, Dispatcher};
pub use error::{JobError, QuotaRefusal};
pub use figures::{JobFigures, LineOutcome};
pub use file::{FilePage, FileRow, NewFile, Order, Page, Purpose};
pub use ids::{BatchId, BlobId, FileId};
pub use jobs::{BatchWait, JobLimits, Jobs, JobsOptions, JobsPlace, UtcClock};
pub use quota::{QuotaScope, Quotas, ScopedQuotas};
pub use rows::{BeforeOpen, SqlStore};
pub use service::{
    CallerState, CapRequest, FailureReply, LineAnswer, LineFailure, LinePlace, LineRequest,
    LineService, ServiceFuture, TryOutcome, Waiting,
};
pub use store::Store;
pub use upload::{NewUpload, Upload};
