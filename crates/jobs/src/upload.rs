//! Uploads: bytes are reserved before they are written, and a file exists only once it
//! is whole and on the disk.

use std::time::Duration;

use tollgate_domain::{PoolName, TenantId};

use crate::disk::DiskFile;
use crate::error::JobError;
use crate::file::{FileRow, FinishedFile, NewFile};
use crate::hash::Sha256;
use crate::ids::{BlobId, FileId};
use crate::jobs::Jobs;
use crate::line::LineCounter;
use crate::quota::ScopedQuotas;

/// An upload that a client begins.
#[derive(Clone, Debug)]
pub struct NewUpload {
    /// The id of the file, if the caller has drawn it already.
    pub id: Option<FileId>,
    /// The owner.
    pub tenant: TenantId,
    /// The owner's pool.
    pub pool: Option<PoolName>,
    /// The size that the client declares: that of the whole body is good enough. Without
    /// one, bytes are reserved in steps of 8 MiB.
    pub declared: Option<u64>,
    /// The quotas of the owner, narrowest first.
    pub quotas: Vec<ScopedQuotas>,
}

/// A running upload. A drop gives it up and its reservation back.
pub struct Upload {
    jobs: Jobs,
    new: NewFile,
    quotas: Vec<ScopedQuotas>,
    reserved: u64,
    /// `None` while a write runs on another thread, and after a failure.
    file: Option<PartFile>,
    is_finished: bool,
}

/// The bytes so far.
struct PartFile {
    file: Box<dyn DiskFile>,
    hash: Sha256,
    lines: LineCounter,
    bytes: u64,
}

/// Bytes by which a reservation without a declared size grows.
const STEP: u64 = 8 << 20;

impl Upload {
    pub(crate) async fn begin(jobs: Jobs, new: NewUpload) -> Result<Self, JobError> {
        let NewUpload { id, tenant, pool, declared, quotas } = new;
        let limit = jobs.limits().file;
        // The declared size is that of the body, whose other parts are small.
        let reserved = declared.unwrap_or(STEP);
        if declared.is_some_and(|declared| declared > limit + LARGEST_FRAME) {
            return Err(too_large(limit));
        }
        check_spare(&jobs, reserved).await?;
        let id = id.map_or_else(|| random().map(FileId::from_random), Ok)?;
        let new = NewFile { id, blob: BlobId::from_random(random()?), tenant, pool, reserved };
        let (all, row, scoped) = (jobs.all_stored(), new.clone(), quotas.clone());
        jobs.call(move |store| store.reserve(&row, &scoped, all)).await?;
        // From here on the drop gives the reservation back.
        let mut upload = Self { jobs, new, quotas, reserved, file: None, is_finished: false };
        let (blobs, blob) = (upload.jobs.shared().blobs.clone(), upload.new.blob);
        let file = blocking(move || blobs.create_part(blob)).await?;
        upload.file =
            Some(PartFile { file, hash: Sha256::new(), lines: LineCounter::default(), bytes: 0 });
        Ok(upload)
    }

    /// Returns the id that the file will have.
    pub fn id(&self) -> FileId {
        self.new.id
    }

    /// Writes the next bytes.
    ///
    /// # Errors
    /// [`JobError::TooLarge`] for the file, a line or the number of lines;
    /// [`JobError::Quota`]; or the disk failed. The upload cannot go on then.
    pub async fn write(&mut self, bytes: Vec<u8>) -> Result<(), JobError> {
        let limits = self.jobs.limits();
        let mut part = self.file.take().ok_or(JobError::NoSuchFile)?;
        let total = part.bytes + bytes.len() as u64;
        if total > limits.file {
            return Err(too_large(limits.file));
        }
        part.lines.count(&bytes);
        if part.lines.longest() > limits.line {
            return Err(JobError::TooLarge(format!(
                "A line of the file has more than {} bytes.",
                limits.line
            )));
        }
        if part.lines.lines() > limits.lines {
            return Err(JobError::TooLarge(format!(
                "The file has more than {} lines.",
                limits.lines
            )));
        }
        if total > self.reserved {
            self.grow(total).await?;
        }
        part.bytes = total;
        let part = blocking(move || {
            part.hash.update(&bytes);
            match part.file.write_all(&bytes) {
                Ok(()) => Ok(part),
                // Other files can fill the disk after the check of the spare bytes.
                Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                    Err(JobError::NoSpace)
                }
                Err(error) => Err(crate::blobs::at(std::path::Path::new("upload"), error)),
            }
        });
        self.file = Some(part.await?);
        Ok(())
    }

    /// Makes the file, or returns the one that another upload has made from the same bytes
    /// with this id. When this returns, the file survives a power cut.
    ///
    /// # Errors
    /// [`JobError::FileExists`] if the other one has other bytes; or the disk or the store
    /// failed.
    pub async fn finish(
        mut self,
        filename: String,
        life: Option<Duration>,
    ) -> Result<FileRow, JobError> {
        let mut part = self.file.take().ok_or(JobError::NoSuchFile)?;
        let (blobs, blob) = (self.jobs.shared().blobs.clone(), self.new.blob);
        let finished = blocking(move || {
            blobs.keep(blob, &mut *part.file)?;
            Ok(FinishedFile {
                bytes: part.bytes,
                lines: part.lines.lines(),
                sha256: part.hash.finish(),
                filename,
                life,
            })
        })
        .await?;
        let (now, new, quotas) = (self.jobs.now(), self.new.clone(), self.quotas.clone());
        let (row, sha256) = (new.clone(), finished.sha256);
        let file = match self.jobs.call(move |s| s.finish(now, &row, &finished, &quotas)).await {
            // This upload is not finished: the drop gives its bytes back.
            Err(JobError::FileExists(file)) if file.sha256 == Some(sha256) => return Ok(*file),
            // A failed commit may stand all the same, and only the store knows.
            Err(error @ JobError::Storage(_)) => {
                let found = self.jobs.call(move |s| s.file(now, &new.tenant, new.id)).await;
                found.map_err(|_| error)
            }
            finished => finished,
        }?;
        self.is_finished = true;
        Ok(file)
    }

    /// Raises the reservation so that `total` bytes fit.
    async fn grow(&mut self, total: u64) -> Result<(), JobError> {
        // Whole steps, because each growth is a synced commit of the store.
        let wanted = total.div_ceil(STEP).saturating_mul(STEP);
        check_spare(&self.jobs, wanted - self.reserved).await?;
        let (all, new, quotas) = (self.jobs.all_stored(), self.new.clone(), self.quotas.clone());
        self.jobs.call(move |store| store.grow(&new, wanted, &quotas, all)).await?;
        self.reserved = wanted;
        Ok(())
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let (shared, blob) = (self.jobs.shared().clone(), self.new.blob);
        let unfinished = shared.clone();
        // The list is for a full queue and for a store that fails: the sweep goes through it.
        if self.jobs.shared().post(move |store| shared.give_up(store, blob)).is_err() {
            unfinished.note_unfinished(blob);
        }
    }
}

/// Checks that the disk keeps its spare bytes after `more` are written.
async fn check_spare(jobs: &Jobs, more: u64) -> Result<(), JobError> {
    let (blobs, spare) = (jobs.shared().blobs.clone(), jobs.limits().spare);
    // Bytes that other uploads have reserved but not written look free here. The quotas of inputs
    // bound those.
    let free = blocking(move || blobs.free()).await?;
    (free >= spare.saturating_add(more)).then_some(()).ok_or(JobError::NoSpace)
}

fn too_large(limit: u64) -> JobError {
    JobError::TooLarge(format!("The file has more than {limit} bytes."))
}

/// Runs work that waits for the disk on another thread.
pub(crate) async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, JobError> + Send + 'static,
) -> Result<T, JobError> {
    // A panic of the work ends the operation only.
    tokio::task::spawn_blocking(work).await.map_err(|_| JobError::Busy)?
}

/// Draws 128 random bits.
pub(crate) fn random() -> Result<u128, JobError> {
    let mut bytes = [0; 16];
    aws_lc_rs::rand::fill(&mut bytes).map_err(|_| JobError::Busy)?;
    Ok(u128::from_be_bytes(bytes))
}

/// Bytes of a multipart body beside the file itself.
const LARGEST_FRAME: u64 = 64 * 1024;
