//! The façade: files and batches for the callers of the API and for the dispatcher.
//!
//! One thread owns the store and does one operation after the other. It also deletes
//! blobs, so that a reader that begins and a delete cannot pass each other.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio_util::sync::CancellationToken;
use tollgate_domain::{TenantId, UtcDay, UtcTime};
use tollgate_sql::ServerAddress;

use crate::batch::{BatchPage, BatchRow, NewBatch, SpentByBatches};
use crate::blobs::{Blobs, at};
use crate::claim::{Claim, ClaimNumber};
use crate::content::Content;
use crate::disk::{Disk, HostDisk};
use crate::dispatch::InFlightLines;
use crate::error::{JobError, StorageError};
use crate::figures::{JobFigures, LineOutcome};
use crate::file::{FilePage, FileRow, Page};
use crate::ids::{BatchId, BlobId, FileId};
use crate::quota::{QuotaScope, QuotaUse, ScopedQuotas};
use crate::rows::{BeforeOpen, SqlStore};
use crate::shared_folder;
use crate::store::{GatewayStored, Released, Store};
use crate::upload::{NewUpload, Upload};

/// The clock that dates rows.
pub type UtcClock = Arc<dyn Fn() -> UtcTime + Send + Sync>;

/// The inputs of [`Jobs::open`].
pub struct JobsOptions {
    /// The place of rows and bytes.
    pub place: JobsPlace,
    /// The limits of the gateway.
    pub limits: JobLimits,
    /// The clock. Gateways that share a store have one clock.
    pub utc: UtcClock,
}

/// The place of the rows and bytes of files and batches.
pub enum JobsPlace {
    /// A folder of this gateway alone.
    Own {
        /// The folder of the database and of the bytes; made if there is none. The caller holds
        /// the lock of the data folder: no other process uses the folder.
        folder: PathBuf,
        /// Runs before the database is opened.
        before_open: BeforeOpen,
    },
    /// A server and a folder that several gateways share.
    Shared {
        /// The server of the rows.
        server: Box<ServerAddress>,
        /// The id of this gateway's data folder.
        home: String,
        /// The folder of the bytes; made if there is none.
        folder: PathBuf,
        /// The folder that this gateway had of its own, if it had one. Its files and batches are
        /// moved.
        own: PathBuf,
    },
}

/// The limits of the gateway on files, whatever the plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobLimits {
    /// Bytes of one input.
    pub file: u64,
    /// Bytes of one line of an input.
    pub line: u64,
    /// Lines of one input.
    pub lines: u64,
    /// Bytes of all inputs together.
    pub stored: u64,
    /// Bytes of the disk that stay free.
    pub spare: u64,
}

impl Default for JobLimits {
    fn default() -> Self {
        Self { file: 200 << 20, line: 1 << 20, lines: 50_000, stored: 50 << 30, spare: 2 << 30 }
    }
}

/// Files and batches; clones share them.
#[derive(Clone)]
pub struct Jobs {
    shared: Arc<Shared>,
}

pub(crate) struct Shared {
    lane: Lane,
    pub(crate) blobs: Blobs,
    readers: Mutex<Readers>,
    /// Uploads that were given up while the store took no operation. Bounded, because each
    /// holds a place of its quota until its row is deleted.
    unfinished: Mutex<HashSet<BlobId>>,
    pub(crate) limits: JobLimits,
    pub(crate) utc: UtcClock,
    /// Notified when a batch is created or cancelled.
    pub(crate) changed: Notify,
    /// Changed when batches and lines that wait should try again.
    pub(crate) waits_ended: watch::Sender<()>,
    dispatch: Mutex<DispatchState>,
}

/// The state that dispatchers of this process share with callers of the API. Bounded by
/// the batches that dispatchers hold or have parked.
#[derive(Default)]
struct DispatchState {
    /// Cancelled when the batch of the claim is cancelled.
    held: BTreeMap<(BatchId, ClaimNumber), CancellationToken>,
    waits: BTreeMap<BatchId, BatchWait>,
    lines: BTreeMap<LineOutcome, u64>,
    in_flight: u64,
}

/// The reason why no line of a batch runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchWait {
    /// A short word: `no_worker`, `cap_spent`, `no_room`, ...
    pub reason: &'static str,
    /// The time at which the batch tries again.
    pub until: UtcTime,
}

/// A batch that a dispatcher of this process holds, until this is dropped.
pub(crate) struct HeldBatch {
    jobs: Jobs,
    claim: Claim,
    ending: CancellationToken,
}

impl HeldBatch {
    /// Returns the token that is cancelled when the batch is cancelled.
    pub(crate) fn ending(&self) -> CancellationToken {
        self.ending.clone()
    }
}

impl Drop for HeldBatch {
    fn drop(&mut self) {
        let Claim { batch, number, .. } = self.claim;
        // The key has the number of the claim: another dispatcher of this process may hold the same
        // batch under a later one.
        lock(&self.jobs.shared.dispatch).held.remove(&(batch, number));
    }
}

/// Blobs that are being read. Bounded by the open downloads.
#[derive(Default)]
struct Readers {
    open: HashMap<BlobId, usize>,
    /// Those of the open blobs that no row needs any more.
    released: HashSet<BlobId>,
}

type Command = Box<dyn FnOnce(&mut dyn Store) + Send>;

/// The way to the store.
enum Lane {
    /// A thread that owns the store.
    Thread(SyncSender<Command>),
    /// The caller's thread: under played time no other thread may decide when something
    /// happens.
    #[cfg(test)]
    Caller(Mutex<Box<dyn Store>>),
}

/// Operations that wait for the store.
const QUEUE: usize = 1_024;

impl Jobs {
    /// Opens the store and deletes what no row names. Waits for the database, so it must not be
    /// called from async code.
    ///
    /// # Errors
    /// The database or the folder cannot be used.
    pub fn open(options: JobsOptions) -> Result<Self, JobError> {
        let JobsOptions { place, limits, utc } = options;
        let (mut store, folder, others) = match place {
            JobsPlace::Own { folder, before_open } => {
                HostDisk.create_folder(&folder).map_err(|source| at(&folder, source))?;
                (SqlStore::open(folder.join("jobs.db"), before_open)?, folder, Others::None)
            }
            JobsPlace::Shared { server, home, folder, own } => {
                let mut store = SqlStore::on_server(*server, home)?;
                store.join_folder(|place| shared_folder::join(&folder, place))?;
                adopt(&mut store, own, &folder)?;
                (store, folder, Others::Possible)
            }
        };
        let blobs = Blobs::open(Arc::new(HostDisk), &folder.join("blobs"))?;
        // Before the first operation: what is unfinished now was left by an earlier process.
        prepare(&mut store, &blobs, others)?;
        // Bounded: if the disk is slow, callers get `Busy` and the memory does not fill up.
        let (commands, inbox) = sync_channel(QUEUE);
        let run = move || serve(Box::new(store), &inbox);
        std::thread::Builder::new()
            .name("jobs".to_owned())
            .spawn(run)
            .map_err(|source| at(&folder, source))?;
        Ok(Self::new(Lane::Thread(commands), blobs, limits, utc))
    }

    /// Opens files and batches over a store and a disk of a test, on the caller's thread.
    #[cfg(test)]
    pub(crate) fn open_played(
        mut store: Box<dyn Store>,
        disk: Arc<dyn Disk>,
        limits: JobLimits,
        utc: UtcClock,
    ) -> Result<Self, JobError> {
        let blobs = Blobs::open(disk, Path::new("/blobs"))?;
        prepare(&mut *store, &blobs, Others::None)?;
        Ok(Self::new(Lane::Caller(Mutex::new(store)), blobs, limits, utc))
    }

    fn new(lane: Lane, blobs: Blobs, limits: JobLimits, utc: UtcClock) -> Self {
        let shared = Shared {
            lane,
            blobs,
            readers: Mutex::default(),
            unfinished: Mutex::default(),
            limits,
            utc,
            changed: Notify::new(),
            waits_ended: watch::Sender::default(),
            dispatch: Mutex::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Returns the limits of the gateway.
    pub fn limits(&self) -> JobLimits {
        self.shared.limits
    }

    /// Begins an upload: reserves its bytes and a place among the uploads.
    ///
    /// # Errors
    /// [`JobError::Quota`], [`JobError::TooLarge`], [`JobError::NoSpace`], or the store
    /// failed.
    pub async fn upload(&self, new: NewUpload) -> Result<Upload, JobError> {
        Upload::begin(self.clone(), new).await
    }

    /// Returns a file of `tenant`.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`], or the store failed.
    pub async fn file(&self, tenant: TenantId, id: FileId) -> Result<FileRow, JobError> {
        let now = self.now();
        self.call(move |store| store.file(now, &tenant, id)).await
    }

    /// Returns a page of the files of `tenant`.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`] for an unknown `after`, or the store failed.
    pub async fn files(&self, tenant: TenantId, page: FilePage) -> Result<Page<FileRow>, JobError> {
        let now = self.now();
        self.call(move |store| store.files(now, &tenant, &page)).await
    }

    /// Deletes a file of `tenant`. Its bytes go when the last reader leaves.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`], [`JobError::FileInUse`], or the store failed.
    pub async fn delete_file(&self, tenant: TenantId, id: FileId) -> Result<(), JobError> {
        let (now, shared) = (self.now(), Arc::clone(&self.shared));
        self.call(move |store| {
            let released = store.delete_file(now, &tenant, id)?;
            shared.dispose(store, &released);
            Ok(())
        })
        .await
    }

    /// Opens a file of `tenant` for reading.
    ///
    /// # Errors
    /// [`JobError::NoSuchFile`], or the store failed.
    pub async fn read(&self, tenant: TenantId, id: FileId) -> Result<Content, JobError> {
        let (now, shared) = (self.now(), Arc::clone(&self.shared));
        let jobs = self.clone();
        self.call(move |store| {
            let (file, ranges) = store.ranges(now, &tenant, id)?;
            // Noted on the store's thread: a delete comes before or after, never between.
            let blobs: HashSet<BlobId> = ranges.iter().map(|range| range.blob).collect();
            shared.acquire(&blobs);
            Ok(Content::new(ReadGuard { jobs, blobs }, file, ranges))
        })
        .await
    }

    /// Creates a batch, or returns the tenant's batch that has this id already.
    ///
    /// # Errors
    /// [`JobError::Quota`], [`JobError::NoSuchFile`], [`JobError::WrongPurpose`], or the
    /// store failed.
    pub async fn create_batch(
        &self,
        new: NewBatch,
        quotas: Vec<ScopedQuotas>,
    ) -> Result<BatchRow, JobError> {
        let now = self.now();
        let created = self.call(move |store| store.create_batch(now, &new, &quotas)).await?;
        self.shared.changed.notify_waiters();
        Ok(created)
    }

    /// Returns a batch of `tenant`.
    ///
    /// # Errors
    /// [`JobError::NoSuchBatch`], or the store failed.
    pub async fn batch(&self, tenant: TenantId, id: BatchId) -> Result<BatchRow, JobError> {
        self.call(move |store| store.batch(&tenant, id)).await
    }

    /// Returns a page of the batches of `tenant`, newest first.
    ///
    /// # Errors
    /// [`JobError::NoSuchBatch`] for an unknown `after`, or the store failed.
    pub async fn batches(
        &self,
        tenant: TenantId,
        page: BatchPage,
    ) -> Result<Page<BatchRow>, JobError> {
        self.call(move |store| store.batches(&tenant, &page)).await
    }

    /// Cancels a batch of `tenant`. The cancel is on the disk when this returns; lines on
    /// workers end soon after.
    ///
    /// # Errors
    /// [`JobError::NoSuchBatch`], [`JobError::BatchEnded`], or the store failed.
    pub async fn cancel(&self, tenant: TenantId, id: BatchId) -> Result<BatchRow, JobError> {
        let now = self.now();
        let cancelled = self.call(move |store| store.cancel(now, &tenant, id)).await?;
        // After the commit: a run whose token is cancelled reads the state again, and must find the
        // cancel.
        let claims = (id, ClaimNumber(0))..=(id, ClaimNumber(u64::MAX));
        for (_, ending) in lock(&self.shared.dispatch).held.range(claims) {
            ending.cancel();
        }
        self.shared.changed.notify_waiters();
        Ok(cancelled)
    }

    /// Returns what the tenants of a scope have.
    ///
    /// # Errors
    /// The store failed.
    pub async fn quota_use(&self, scope: QuotaScope) -> Result<QuotaUse, JobError> {
        self.call(move |store| store.quota_use(&scope)).await
    }

    /// Returns the cost of the answers of all batches on `day`, by tenant and class of device.
    ///
    /// # Errors
    /// The store failed.
    pub async fn spent(&self, day: UtcDay) -> Result<Vec<SpentByBatches>, JobError> {
        self.call(move |store| store.spent(day)).await
    }

    /// Returns the reason why no line of a batch runs; `None` if lines run or none will.
    pub fn waiting(&self, id: BatchId) -> Option<BatchWait> {
        lock(&self.shared.dispatch).waits.get(&id).copied()
    }

    /// Lets all batches and lines that wait try again now. The caller has changed limits, so the
    /// reason of a wait may be gone.
    pub fn end_waits(&self) {
        // A batch that is not in the middle of a wait sees this before its next one.
        self.shared.waits_ended.send_replace(());
    }

    /// Returns the figures for metrics.
    ///
    /// # Errors
    /// The store failed.
    pub async fn figures(&self) -> Result<JobFigures, JobError> {
        let stored = self.call(|store| store.figures()).await?;
        let state = lock(&self.shared.dispatch);
        let mut waiting = BTreeMap::new();
        for wait in state.waits.values() {
            *waiting.entry(wait.reason).or_default() += 1;
        }
        Ok(JobFigures { stored, lines: state.lines.clone(), in_flight: state.in_flight, waiting })
    }

    /// Notes that a dispatcher holds a batch.
    pub(crate) fn hold(&self, claim: Claim) -> HeldBatch {
        let ending = CancellationToken::new();
        let key = (claim.batch, claim.number);
        lock(&self.shared.dispatch).held.insert(key, ending.clone());
        HeldBatch { jobs: self.clone(), claim, ending }
    }

    /// Deletes what has expired.
    pub(crate) async fn sweep(&self) -> Result<(), JobError> {
        let (now, shared) = (self.now(), Arc::clone(&self.shared));
        self.call(move |store| {
            // Taken first: a guard in the loop's head would be held through the loop.
            let unfinished = std::mem::take(&mut *lock(&shared.unfinished));
            for blob in unfinished {
                shared.give_up(store, blob);
            }
            let released = store.sweep(now)?;
            shared.dispose(store, &released);
            Ok(())
        })
        .await
    }

    pub(crate) fn now(&self) -> UtcTime {
        (self.shared.utc)()
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn all_stored(&self) -> GatewayStored {
        GatewayStored(self.shared.limits.stored)
    }

    /// Runs `act` on the store's thread.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut dyn Store) -> Result<T, JobError> + Send + 'static,
    ) -> Result<T, JobError> {
        let (answer, done) = oneshot::channel();
        let command: Command = Box::new(move |store| {
            // The caller may have left; the act is done all the same.
            let _ = answer.send(act(store));
        });
        self.shared.post(command)?;
        // No answer comes if the operation panicked: a part of it may have been done.
        done.await.map_err(|lost| JobError::Storage(StorageError::new(lost)))?
    }
}

impl Shared {
    /// Runs `act` on the store's thread without waiting.
    ///
    /// # Errors
    /// [`JobError::Busy`] or [`JobError::Closed`]: the act is not run.
    pub(crate) fn post(
        &self,
        act: impl FnOnce(&mut dyn Store) + Send + 'static,
    ) -> Result<(), JobError> {
        match &self.lane {
            // Never waits: the callers are async tasks.
            Lane::Thread(commands) => {
                commands.try_send(Box::new(act)).map_err(|refused| match refused {
                    TrySendError::Full(_) => JobError::Busy,
                    TrySendError::Disconnected(_) => JobError::Closed,
                })
            }
            #[cfg(test)]
            Lane::Caller(store) => {
                act(&mut **lock(store));
                Ok(())
            }
        }
    }

    /// Deletes an upload that was not finished, and its reservation after its bytes.
    pub(crate) fn give_up(&self, store: &mut dyn Store, blob: BlobId) {
        let gone = store.is_upload(blob).and_then(|is_upload| match is_upload {
            true => self.blobs.delete(blob).and_then(|()| store.abandon(blob)),
            // A commit that seemed to fail has made the file.
            false => Ok(()),
        });
        if let Err(error) = gone {
            let error = crate::error::with_causes(&error);
            tracing::warn!(%blob, error, "an upload that was given up keeps its reservation; the next sweep tries again");
            self.note_unfinished(blob);
        }
    }

    /// Keeps an upload in mind for the next sweep.
    pub(crate) fn note_unfinished(&self, blob: BlobId) {
        lock(&self.unfinished).insert(blob);
    }

    /// Notes the reason why no line of a batch runs; `None` if lines may run.
    pub(crate) fn set_wait(&self, batch: BatchId, wait: Option<BatchWait>) {
        let mut state = lock(&self.dispatch);
        match wait {
            Some(wait) => _ = state.waits.insert(batch, wait),
            None => _ = state.waits.remove(&batch),
        }
    }

    /// Counts lines that have ended.
    pub(crate) fn tally(&self, outcomes: impl Iterator<Item = LineOutcome>) {
        let mut state = lock(&self.dispatch);
        outcomes.for_each(|outcome| *state.lines.entry(outcome).or_default() += 1);
    }

    /// Notes the number of lines on workers.
    pub(crate) fn set_in_flight(&self, lines: InFlightLines) {
        lock(&self.dispatch).in_flight = lines.0;
    }

    fn acquire(&self, blobs: &HashSet<BlobId>) {
        let mut readers = self.readers();
        for blob in blobs {
            // Counted, because several downloads can read one blob at once.
            *readers.open.entry(*blob).or_default() += 1;
        }
    }

    /// Deletes blobs that no row needs. Those that a reader has open go when it leaves.
    pub(crate) fn dispose(&self, store: &mut dyn Store, released: &[Released]) {
        for Released(blob) in released {
            let mut readers = self.readers();
            if readers.open.contains_key(blob) {
                readers.released.insert(*blob);
                continue;
            }
            // Unlocked, because a delete can be slow. No reader comes in between: readers are noted
            // on this thread only.
            drop(readers);
            // The row goes last: while it stands, the next sweep finds the blob again.
            let gone = self.blobs.delete(*blob).and_then(|()| store.forget(*blob));
            if let Err(error) = gone {
                let error = crate::error::with_causes(&error);
                tracing::warn!(%blob, error, "a deleted file keeps its bytes; the next sweep tries again");
            }
        }
    }

    /// Ends the reading of blobs, and deletes those that were only kept for it.
    fn leave(self: &Arc<Self>, blobs: &HashSet<BlobId>) {
        let mut readers = self.readers();
        let mut released = Vec::new();
        for blob in blobs {
            let Some(count) = readers.open.get_mut(blob) else { continue };
            *count -= 1;
            if *count == 0 {
                readers.open.remove(blob);
                if readers.released.remove(blob) {
                    released.push(Released(*blob));
                }
            }
        }
        // Unlocked first: under played time the post runs `dispose` at once, which takes this lock.
        drop(readers);
        if !released.is_empty() {
            let shared = Arc::clone(self);
            // If the queue is full, the next sweep finds the blobs.
            let _ = self.post(move |store| shared.dispose(store, &released));
        }
    }

    fn readers(&self) -> MutexGuard<'_, Readers> {
        lock(&self.readers)
    }
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under a lock of this module is complete before a panic could happen.
    value.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The blobs of a file that is being read.
pub(crate) struct ReadGuard {
    jobs: Jobs,
    blobs: HashSet<BlobId>,
}

impl ReadGuard {
    pub(crate) fn blobs(&self) -> &Blobs {
        &self.jobs.shared.blobs
    }
}

impl Drop for ReadGuard {
    fn drop(&mut self) {
        self.jobs.shared.leave(&self.blobs);
    }
}

/// Moves the files and batches of a gateway's own folder to the shared store, if there are any.
fn adopt(store: &mut SqlStore, own: PathBuf, shared: &Path) -> Result<(), JobError> {
    let database = own.join("jobs.db");
    if !database.try_exists().map_err(|source| at(&database, source))? {
        return Ok(());
    }
    let from = Blobs::open(Arc::new(HostDisk), &own.join("blobs"))?;
    let to = Blobs::open(Arc::new(HostDisk), &shared.join("blobs"))?;
    let mut rows = SqlStore::open(database.clone(), Arc::new(|_| Ok(())))?;
    // Uploads end here, as at any start.
    for blob in rows.start()? {
        to.copy(blob, &from)?;
    }
    let is_new = store.adopt(&mut rows)?;
    drop(rows);
    // Kept under another name, for an admin who wants to look; a second start finds nothing to
    // move.
    let moved = own.join("jobs.db.moved");
    std::fs::rename(&database, &moved).map_err(|source| at(&moved, source))?;
    if is_new {
        tracing::info!(
            from = %own.display(),
            to = %shared.display(),
            "moved the files and batches of this gateway to the folder that all gateways share"
        );
    }
    Ok(())
}

/// The gateways beside this one that use the same store.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Others {
    None,
    Possible,
}

/// Age of a file without a row at which it is deleted where other gateways write: the row of a
/// file of theirs may have come after the rows were listed.
const OTHERS_AGE: Duration = Duration::from_secs(2 * 3_600);

/// Ends the claims of earlier processes and deletes what no row names.
fn prepare(store: &mut dyn Store, blobs: &Blobs, others: Others) -> Result<(), JobError> {
    if others == Others::None {
        // Without this the batches of a killed process would wait until their leases are over.
        store.end_leases()?;
    }
    // This also deletes the rows of unfinished uploads, so that their bytes are unknown below.
    let known: HashSet<BlobId> = store.start()?.into_iter().collect();
    let age = if others == Others::None { Duration::ZERO } else { OTHERS_AGE };
    let deleted = blobs.delete_unknown(&known, age)?;
    if deleted > 0 {
        tracing::info!(
            deleted,
            "deleted uploads and results that an earlier process left unfinished"
        );
    }
    Ok(())
}

/// Serves operations until the last handle is dropped.
fn serve(mut store: Box<dyn Store>, inbox: &Receiver<Command>) {
    while let Ok(command) = inbox.recv() {
        // A panic ends its operation only: without this thread no file and no batch could be used
        // until the next start. Its transaction was rolled back while the stack unwound.
        if catch_unwind(AssertUnwindSafe(|| command(&mut *store))).is_err() {
            tracing::error!("an operation on files and batches panicked; its caller gets an error");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn clock() -> UtcClock {
        Arc::new(|| UtcTime(0))
    }

    fn open(folder: &Path) -> Jobs {
        let place = JobsPlace::Own { folder: folder.to_owned(), before_open: Arc::new(|_| Ok(())) };
        let limits = JobLimits::default();
        let opened = Jobs::open(JobsOptions { place, limits, utc: clock() });
        opened.expect("opens")
    }

    #[tokio::test]
    async fn store_serves_on_after_panic_of_operation() {
        let folder = tempfile::tempdir().expect("a folder");
        let jobs = open(folder.path());
        let panicked = jobs.call(|_| -> Result<(), JobError> { panic!("of the test") }).await;
        assert!(matches!(panicked, Err(JobError::Storage(_))), "{panicked:?}");
        jobs.figures().await.expect("the thread goes on");
    }

    /// Callers repeat what a full queue did not take, and a repeat does not open a closed store.
    #[tokio::test]
    async fn closed_store_is_told_from_full_queue() {
        let folder = tempfile::tempdir().expect("a folder");
        let blobs = Blobs::open(Arc::new(HostDisk), folder.path()).expect("opens");
        let (commands, inbox) = sync_channel(1);
        let jobs = Jobs::new(Lane::Thread(commands), blobs, JobLimits::default(), clock());
        let mut first = Box::pin(jobs.figures());
        let waits = tokio::time::timeout(Duration::ZERO, &mut first).await;
        assert!(waits.is_err(), "the queue has taken the first operation");
        assert!(matches!(jobs.figures().await, Err(JobError::Busy)));
        drop(inbox);
        assert!(matches!(jobs.figures().await, Err(JobError::Closed)));
    }
}
