//! Answers on their way to the disk: kept in memory, appended to the claim's segments and
//! synced each 100 ms, and then committed as rows.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::DispatchContext;
use crate::batch::{BatchRow, TryUsage};
use crate::claim::{Claim, TryName};
use crate::error::JobError;
use crate::figures::LineOutcome;
use crate::ids::BlobId;
use crate::segment::Segments;
use crate::store::{Answer, AnswerKind, Released};
use crate::upload::{blocking, random};
use tollgate_domain::ModelName;

/// Time in which answers are collected for one commit.
const COLLECT: Duration = Duration::from_millis(100);
/// Shortest and longest waits before answers that the disk did not take are written again.
const DISK_WAITS: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// Bytes of answers beyond which a batch sends nothing more.
const MOST_BYTES: usize = 8 << 20;
/// Bytes of the answers of all batches beyond which no batch sends anything more.
const MOST_BYTES_OF_ALL: usize = 64 << 20;

/// An answer that is in memory only.
pub(super) struct NewAnswer {
    pub(super) line: u64,
    pub(super) outcome: LineOutcome,
    pub(super) bytes: Vec<u8>,
    /// The try that is paid.
    pub(super) paid: Option<TryName>,
    pub(super) usage: TryUsage,
    pub(super) model: Option<ModelName>,
    /// Bytes that were reserved for the answer.
    pub(super) room: u64,
}

impl NewAnswer {
    fn kind(&self) -> AnswerKind {
        match self.outcome {
            LineOutcome::Completed => AnswerKind::Output,
            _ => AnswerKind::Error,
        }
    }
}

/// The answers of a batch that are not committed.
pub(super) struct Answers {
    pending: Vec<NewAnswer>,
    /// Bytes of all answers in memory, with those that are being written.
    bytes: usize,
    /// Bytes of the answers of all batches.
    bytes_of_all: Arc<AtomicUsize>,
    writing: Option<Writing>,
    segments: Segments,
    /// The time of the next write; `None` if there is nothing to write.
    due: Option<Instant>,
    /// The wait after the next failure of the disk.
    disk_wait: Duration,
}

type Writing = Pin<Box<dyn Future<Output = Written> + Send>>;

/// The end of a write. The answers come back if the disk did not take them.
struct Written {
    segments: Segments,
    result: Result<BatchRow, WriteError>,
    bytes: usize,
}

/// The reason why answers are not committed.
enum WriteError {
    /// The segments failed, and no row was written. A new segment takes the answers.
    Segment(JobError, Vec<NewAnswer>),
    /// The store failed: the rows may stand, so the claim must be dropped.
    Store(JobError),
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.bytes_of_all.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Answers {
    pub(super) fn new(bytes_of_all: Arc<AtomicUsize>) -> Self {
        Self {
            pending: Vec::new(),
            bytes: 0,
            bytes_of_all,
            writing: None,
            segments: Segments::default(),
            due: None,
            disk_wait: DISK_WAITS.0,
        }
    }

    pub(super) fn push(&mut self, now: Instant, answer: NewAnswer) {
        self.bytes += answer.bytes.len();
        self.bytes_of_all.fetch_add(answer.bytes.len(), Ordering::Relaxed);
        self.pending.push(answer);
        // The first answer sets the time: a steady stream of answers must not put off the write.
        self.due.get_or_insert(now + COLLECT);
    }

    /// Returns true if too many answers wait for the disk.
    pub(super) fn is_full(&self) -> bool {
        // Relaxed: the bound is on memory, and a count that is a little late does no harm.
        self.bytes >= MOST_BYTES || self.bytes_of_all.load(Ordering::Relaxed) >= MOST_BYTES_OF_ALL
    }

    /// Returns true if every answer is committed.
    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty() && self.writing.is_none()
    }

    /// Writes answers when they are due, and returns after one write. Without answers it
    /// never returns. A caller may drop the future and call again.
    ///
    /// # Errors
    /// [`JobError::StaleClaim`], or the store failed.
    pub(super) async fn write(
        &mut self,
        context: &DispatchContext,
        claim: &Claim,
    ) -> Result<BatchRow, JobError> {
        loop {
            // Only borrowed, so that a write goes on if the caller drops this future.
            let Some(writing) = &mut self.writing else {
                match self.due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
                self.start(context.clone(), *claim);
                continue;
            };
            let written = writing.await;
            self.writing = None;
            self.segments = written.segments;
            match written.result {
                Ok(row) => {
                    // Only now: until the commit the answers are still in memory.
                    self.bytes = self.bytes.saturating_sub(written.bytes);
                    self.bytes_of_all.fetch_sub(written.bytes, Ordering::Relaxed);
                    self.disk_wait = DISK_WAITS.0;
                    return Ok(row);
                }
                Err(WriteError::Store(error)) => return Err(error),
                Err(WriteError::Segment(error, answers)) => {
                    let error = crate::error::with_causes(&error);
                    tracing::warn!(batch = %claim.batch, error, "a segment failed; its answers go to a new one");
                    self.pending.splice(0..0, answers);
                    self.due = Some(super::now() + self.disk_wait);
                    self.disk_wait = (self.disk_wait * 2).min(DISK_WAITS.1);
                }
            }
        }
    }

    fn start(&mut self, context: DispatchContext, claim: Claim) {
        self.due = None;
        let answers = std::mem::take(&mut self.pending);
        // The write owns its segments, because callers drop the future of `write` at any point.
        let segments = std::mem::take(&mut self.segments);
        self.writing = Some(Box::pin(write(context, claim, segments, answers)));
    }
}

async fn write(
    context: DispatchContext,
    claim: Claim,
    mut segments: Segments,
    answers: Vec<NewAnswer>,
) -> Written {
    let bytes = answers.iter().map(|answer| answer.bytes.len()).sum();
    for kind in [AnswerKind::Output, AnswerKind::Error] {
        // Only for a kind with answers: each segment costs a row and a synced file.
        if !segments.lacks(kind) || !answers.iter().any(|answer| answer.kind() == kind) {
            continue;
        }
        match open(&context, claim, &mut segments, kind).await {
            Ok(()) => {}
            // `open` has deleted the row of the segment, so that a new segment can take its place.
            Err(error @ JobError::File { .. }) => {
                let result = Err(WriteError::Segment(error, answers));
                return Written { segments, result, bytes };
            }
            Err(error) => {
                return Written { segments, result: Err(WriteError::Store(error)), bytes };
            }
        }
    }
    let appended = blocking(move || {
        let lines = answers.iter().map(|answer| (answer.kind(), &*answer.bytes));
        let ranges = segments.append(lines);
        // The answers come back: if the segment has failed, they go to another one.
        Ok((segments, answers, ranges))
    });
    let (segments, answers, ranges) = match appended.await {
        Ok(done) => done,
        Err(error) => {
            let result = Err(WriteError::Store(error));
            return Written { segments: Segments::default(), result, bytes };
        }
    };
    let result = match ranges {
        Ok(ranges) => commit(&context, claim, &answers, ranges).await.map_err(WriteError::Store),
        Err((error, unused)) => {
            let error = crate::blobs::at(std::path::Path::new("segment"), error);
            match discard(&context, unused).await {
                Ok(()) => Err(WriteError::Segment(error, answers)),
                Err(error) => Err(WriteError::Store(error)),
            }
        }
    };
    Written { segments, result, bytes }
}

/// Deletes segments without an answer that counts: a disk that fails for hours must not
/// gather them.
async fn discard(context: &DispatchContext, unused: Vec<BlobId>) -> Result<(), JobError> {
    let shared = Arc::clone(context.jobs.shared());
    let released: Vec<Released> = unused.into_iter().map(Released).collect();
    let discard = move |store: &mut dyn crate::Store| {
        shared.dispose(store, &released);
        Ok(())
    };
    context.store(discard).await
}

/// Makes the segment of a kind, its row first.
async fn open(
    context: &DispatchContext,
    claim: Claim,
    segments: &mut Segments,
    kind: AnswerKind,
) -> Result<(), JobError> {
    let id = BlobId::from_random(random()?);
    context.store(move |store| store.add_segment(&claim, id)).await?;
    let blobs = context.jobs.shared().blobs.clone();
    match blocking(move || blobs.create(id)).await {
        Ok(file) => {
            segments.insert(kind, id, file);
            Ok(())
        }
        Err(error) => {
            // The row names no file. Without this each failure of the disk would leave one behind.
            discard(context, vec![id]).await?;
            Err(error)
        }
    }
}

async fn commit(
    context: &DispatchContext,
    claim: Claim,
    answers: &[NewAnswer],
    ranges: Vec<crate::file::BlobRange>,
) -> Result<BatchRow, JobError> {
    let room = answers.iter().map(|answer| answer.room).sum();
    let rows: Vec<Answer> = answers
        .iter()
        .zip(ranges)
        .map(|(answer, range)| Answer {
            line: answer.line,
            kind: answer.kind(),
            range,
            paid: answer.paid,
            usage: answer.usage.clone(),
            model: answer.model.clone(),
        })
        .collect();
    let row = context.store(move |store| store.commit(&claim, &rows, room)).await?;
    // After the commit: without it the lines run again, and would count twice.
    context.jobs.shared().tally(answers.iter().map(|answer| answer.outcome));
    Ok(row)
}
