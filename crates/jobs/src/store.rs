//! The store of rows. Each method is one transaction: it is done as a whole and on the
//! disk when the method returns, or not at all. The rules are the same for every
//! store, and one suite of tests checks them.

use tollgate_domain::{ModelName, TenantId, UtcDay, UtcTime};

use crate::batch::{BatchPage, BatchRow, Cause, InputError, NewBatch, SpentByBatches, TryUsage};
use crate::claim::{Claim, ClaimSeed, Claimed, TryName};
use crate::error::JobError;
use crate::file::{BlobRange, FilePage, FileRow, FinishedFile, NewFile, Page};
use crate::ids::{BatchId, BlobId, FileId};
use crate::quota::{QuotaScope, QuotaUse, ScopedQuotas};

/// The limit on inputs of all tenants together, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatewayStored(pub u64);

/// The kind of an answer, which decides the file that it goes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum AnswerKind {
    /// The output file: the line has an answer of status 200.
    Output,
    /// The error file.
    Error,
}

/// The answer of a line. Its bytes are synced in a segment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The line, from 0.
    pub line: u64,
    /// The file.
    pub kind: AnswerKind,
    /// The bytes, with the end of the line.
    pub range: BlobRange,
    /// The try that is paid; `None` if no try is.
    pub paid: Option<TryName>,
    /// The work of the try.
    pub usage: TryUsage,
    /// The model that answered; `None` if none did.
    pub model: Option<ModelName>,
}

/// A blob that no row needs any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Released(pub BlobId);

/// The most rows of a list, in all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Most(pub u32);

/// The tries that a claim leaves behind when it is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TriesLeft {
    /// Every try has its answer, its cap, or never ran.
    None,
    /// Some tries may have run: the next claim caps them.
    Open,
}

/// The figures of all files and batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoredFigures {
    /// Batches with an input that is checked or waits for that.
    pub validating: u64,
    /// Batches that run or wait to run.
    pub running: u64,
    /// Batches that end.
    pub ending: u64,
    /// Batches that have ended and are kept.
    pub ended: u64,
    /// Lines without an answer.
    pub lines: u64,
    /// Bytes of inputs, reserved ones included.
    pub stored: u64,
    /// Bytes of results, reserved ones included.
    pub results: u64,
    /// The creation of the oldest batch that has not ended.
    pub oldest: Option<UtcTime>,
}

/// Files, batches, claims and answers.
pub trait Store: Send {
    /// Reserves `new.reserved` bytes and a place among the uploads.
    ///
    /// # Errors
    /// [`JobError::Quota`], or the store failed.
    fn reserve(
        &mut self,
        new: &NewFile,
        quotas: &[ScopedQuotas],
        all: GatewayStored,
    ) -> Result<(), JobError>;

    /// Raises the reservation of an upload to `bytes` in all.
    ///
    /// # Errors
    /// [`JobError::Quota`], or the store failed.
    fn grow(
        &mut self,
        upload: &NewFile,
        bytes: u64,
        quotas: &[ScopedQuotas],
        all: GatewayStored,
    ) -> Result<(), JobError>;

    /// Turns an upload into a file. The bytes are on the disk already.
    ///
    /// # Errors
    /// The upload does not exist, [`JobError::FileExists`], or the store failed.
    fn finish(
        &mut self,
        now: UtcTime,
        upload: &NewFile,
        finished: &FinishedFile,
        quotas: &[ScopedQuotas],
    ) -> Result<FileRow, JobError>;

    /// Returns true if an upload exists and is not finished.
    ///
    /// # Errors
    /// The store failed.
    fn is_upload(&mut self, blob: BlobId) -> Result<bool, JobError>;

    /// Gives the reservation of an upload back. The bytes are deleted already.
    ///
    /// # Errors
    /// The store failed.
    fn abandon(&mut self, upload: BlobId) -> Result<(), JobError>;

    /// Returns a file of `tenant`.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`], or the store failed.
    fn file(&mut self, now: UtcTime, tenant: &TenantId, id: FileId) -> Result<FileRow, JobError>;

    /// Returns a page of the files of `tenant`.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`] for an unknown `after`, or the store failed.
    fn files(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        page: &FilePage,
    ) -> Result<Page<FileRow>, JobError>;

    /// Returns a file of `tenant` with the ranges that make it up.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`], or the store failed.
    fn ranges(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        id: FileId,
    ) -> Result<(FileRow, Vec<BlobRange>), JobError>;

    /// Deletes a file of `tenant` and returns the blobs that no row needs any more. Their
    /// bytes count until [`Store::forget`].
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`], [`JobError::FileInUse`], or the store failed.
    fn delete_file(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        id: FileId,
    ) -> Result<Vec<Released>, JobError>;

    /// Ends the count of a blob after its bytes are deleted.
    ///
    /// # Errors
    /// The store failed.
    fn forget(&mut self, blob: BlobId) -> Result<(), JobError>;

    /// Creates a batch if every quota allows it, or returns the tenant's batch that has this
    /// id already.
    ///
    /// # Errors
    /// [`JobError::Quota`], [`JobError::NoSuchFile`], [`JobError::WrongPurpose`], or the
    /// store failed.
    fn create_batch(
        &mut self,
        now: UtcTime,
        new: &NewBatch,
        quotas: &[ScopedQuotas],
    ) -> Result<BatchRow, JobError>;

    /// Returns a batch of `tenant`.
    ///
    /// # Errors
    /// [`JobError::NoSuchBatch`], or the store failed.
    fn batch(&mut self, tenant: &TenantId, id: BatchId) -> Result<BatchRow, JobError>;

    /// Returns a page of the batches of `tenant`, newest first.
    ///
    /// # Errors
    /// [`JobError::NoSuchBatch`] for an unknown `after`, or the store failed.
    fn batches(&mut self, tenant: &TenantId, page: &BatchPage) -> Result<Page<BatchRow>, JobError>;

    /// Cancels a batch of `tenant`. A second cancel changes nothing.
    ///
    /// # Errors
    /// [`JobError::NoSuchBatch`], [`JobError::BatchEnded`] if another cause stands, or
    /// the store failed.
    fn cancel(
        &mut self,
        now: UtcTime,
        tenant: &TenantId,
        id: BatchId,
    ) -> Result<BatchRow, JobError>;

    /// Returns what the tenants of `scope` have.
    ///
    /// # Errors
    /// The store failed.
    fn quota_use(&mut self, scope: &QuotaScope) -> Result<QuotaUse, JobError>;

    /// Returns the batches that have not ended and that no live claim holds. Batches that
    /// only have to be ended come first, then the batches of all tenants in turn, the
    /// earliest end of each tenant first.
    ///
    /// # Errors
    /// The store failed.
    fn claimable(&mut self, now: UtcTime, most: Most) -> Result<Vec<BatchRow>, JobError>;

    /// Claims a batch until `lease`. Returns `None` if a live claim holds the batch, or
    /// the batch has ended.
    ///
    /// # Errors
    /// The store failed.
    fn claim(
        &mut self,
        now: UtcTime,
        batch: BatchId,
        seed: ClaimSeed,
        lease: UtcTime,
    ) -> Result<Option<Claimed>, JobError>;

    /// Extends the lease of a claim, and returns the batch: another caller may have changed
    /// its state.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn renew(&mut self, claim: &Claim, lease: UtcTime) -> Result<BatchRow, JobError>;

    /// Returns the batch of a claim.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn claimed(&mut self, claim: &Claim) -> Result<BatchRow, JobError>;

    /// Gives a claim up: another dispatcher may claim the batch at once. The claim does not
    /// count as dead.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn release(&mut self, claim: &Claim, tries: TriesLeft) -> Result<(), JobError>;

    /// Ends the leases of all claims. A start calls this where no other gateway can live.
    ///
    /// # Errors
    /// The store failed.
    fn end_leases(&mut self) -> Result<(), JobError>;

    /// Notes that the tries of earlier claims have their caps in the ledger.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn capped(&mut self, claim: &Claim) -> Result<(), JobError>;

    /// Ends the check of the input: the batch runs, or fails with `errors`.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn validated(
        &mut self,
        now: UtcTime,
        claim: &Claim,
        errors: &[InputError],
    ) -> Result<BatchRow, JobError>;

    /// Notes that lines below `begun` may be sent for the first time under the claim, and
    /// reserves `room` bytes for results.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], [`JobError::Quota`], or the store failed.
    fn begin(
        &mut self,
        claim: &Claim,
        begun: u64,
        room: u64,
        quotas: &[ScopedQuotas],
    ) -> Result<(), JobError>;

    /// Notes that lines are about to be sent again, each with the number of its try.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn begin_again(&mut self, claim: &Claim, tries: &[(u64, u32)]) -> Result<(), JobError>;

    /// Registers a segment before the first byte is written to it.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn add_segment(&mut self, claim: &Claim, segment: BlobId) -> Result<(), JobError>;

    /// Commits answers and gives `room` bytes of the reservation back.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn commit(
        &mut self,
        claim: &Claim,
        answers: &[Answer],
        room: u64,
    ) -> Result<BatchRow, JobError>;

    /// Returns the cost of all answers of `day`, by tenant and class. Answers of batches that
    /// are not kept any more count, too.
    ///
    /// # Errors
    /// The store failed.
    fn spent(&mut self, day: UtcDay) -> Result<Vec<SpentByBatches>, JobError>;

    /// Begins to end a batch. The first cause stays.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn begin_end(
        &mut self,
        now: UtcTime,
        claim: &Claim,
        cause: Cause,
    ) -> Result<BatchRow, JobError>;

    /// Ends a batch whose lines all have an answer: its files come into being. A batch
    /// without a finished check of its input has no lines.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    fn end(
        &mut self,
        now: UtcTime,
        claim: &Claim,
        output: FileId,
        error: FileId,
    ) -> Result<BatchRow, JobError>;

    /// Returns the figures of all tenants.
    ///
    /// # Errors
    /// The store failed.
    fn figures(&mut self) -> Result<StoredFigures, JobError>;

    /// Deletes what has expired and returns the blobs that no row needs any more.
    ///
    /// # Errors
    /// The store failed.
    fn sweep(&mut self, now: UtcTime) -> Result<Vec<Released>, JobError>;

    /// Returns the blobs that rows name, for the sweep of the folder at the start. Uploads
    /// that an earlier process left are deleted first.
    ///
    /// # Errors
    /// The store failed.
    fn start(&mut self) -> Result<Vec<BlobId>, JobError>;
}
