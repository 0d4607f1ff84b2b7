//! The end of a batch: no try stays open, each line goes to one of the two files, and the
//! files come into being.

use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};

use super::answers::NewAnswer;
use super::now;
use super::run::{BatchRun, room};
use super::source::NextTry;
use super::takeover::cap_all;
use super::try_run::{LineEvent, RanTry, SILENCE};
use crate::batch::{CancelReason, Cause, TryUsage};
use crate::error::JobError;
use crate::figures::LineOutcome;
use crate::ids::FileId;
use crate::line::{LineReader, custom_id_of, error_line};
use crate::rules::ROOM_OF_A_LINE;
use crate::service::TryOutcome;
use crate::store::Store;
use crate::upload::{blocking, random};

/// Time for answers that are about to come when the window of a batch is over. The
/// other tries are not billed, so that their figures are not waited for.
const LAST_ANSWERS: Duration = Duration::from_secs(1);
/// Lines of the rest of the error file that are in memory at once.
const REST: usize = 1_000;

impl BatchRun {
    /// Ends the batch.
    pub(super) async fn finish(&mut self, cause: Cause) -> Result<(), JobError> {
        self.withdraw();
        self.context.jobs.shared().set_wait(self.claim.batch, None);
        self.cancel.cancel();
        let grace = match cause {
            // The work of cancelled lines is billed, so their figures are waited for.
            Cause::Cancelled(_) => SILENCE,
            Cause::Done | Cause::Expired | Cause::Failed(_) => LAST_ANSWERS,
        };
        let until = now() + grace;
        while !self.events.is_empty() {
            tokio::select! {
                biased;
                Some(event) = self.events.next() => self.ends(event, cause),
                () = tokio::time::sleep_until(until) => break,
            }
        }
        // Caps first: after them no try of a line without an answer is billed.
        self.events = FuturesUnordered::new();
        let caps = self.open.values().cloned().collect();
        cap_all(&self.context.service, caps).await;
        self.open.clear();
        self.write_answers().await?;
        self.write_rest(cause).await?;
        let (output, error) = (FileId::from_random(random()?), FileId::from_random(random()?));
        let (now, claim) = (self.context.jobs.now(), self.claim);
        let end = move |store: &mut dyn Store| store.end(now, &claim, output, error);
        self.batch = self.context.store(end).await?;
        Ok(())
    }

    /// Acts on an event of a line while the batch ends.
    fn ends(&mut self, event: LineEvent, cause: Cause) {
        // A cap that has come stays in `open` and is put again with the others: the ledger takes it
        // once.
        let LineEvent::Ran(next, ran) = event else { return };
        let outcome = match ran {
            RanTry::InTime(outcome) => outcome,
            RanTry::Late(Some(outcome)) => outcome,
            RanTry::Late(None) => return,
        };
        match outcome {
            TryOutcome::Answered(answer) => self.answered(&next, answer),
            TryOutcome::Cancelled { is_paid: true, usage }
                if matches!(cause, Cause::Cancelled(_)) =>
            {
                self.keep_cancelled(&next, usage, cause);
            }
            TryOutcome::NotPlaced(_)
            | TryOutcome::HeldBack { .. }
            | TryOutcome::IdKnown
            | TryOutcome::RefusedByWorker(_)
            | TryOutcome::Cancelled { is_paid: false, .. } => {
                self.open.remove(&next.line.number);
            }
            // The cap follows.
            TryOutcome::Cancelled { is_paid: true, .. } | TryOutcome::Lost => {}
        }
    }

    /// Keeps the row of a line that was cancelled on a worker: its try is paid for what was
    /// done.
    pub(super) fn keep_cancelled(&mut self, next: &NextTry, usage: TryUsage, cause: Cause) {
        self.open.remove(&next.line.number);
        let request = self.claim.request_id(next.line.number, next.number);
        let (outcome, code, message) = words(cause);
        self.keep(NewAnswer {
            line: next.line.number,
            outcome,
            bytes: error_line(&next.line.custom_id, &request, (code, message)),
            paid: Some(self.claim.try_name(next.line.number, next.number)),
            usage,
            model: next.line.model.clone(),
            room: room(&next.line),
        });
    }

    /// Writes all answers that are in memory.
    async fn write_answers(&mut self) -> Result<(), JobError> {
        while !self.answers.is_empty() {
            self.batch = self.answers.write(&self.context, &self.claim).await?;
        }
        Ok(())
    }

    /// Answers each line without an answer with the batch's cause.
    async fn write_rest(&mut self, cause: Cause) -> Result<(), JobError> {
        if self.batch.times.running.is_none() {
            // The input was never found valid: there are no lines.
            return Ok(());
        }
        let (outcome, code, message) = words(cause);
        let reader = self.context.jobs.shared().blobs.reader(self.ranges.clone());
        let mut rest =
            Rest { reader: Some(LineReader::new(reader)), next: 0, total: self.batch.counts.total };
        loop {
            let (answered, mut taken) = (self.answered.clone(), rest);
            let (lines, back) = blocking(move || {
                let lines = taken.take(REST, |line| !answered.contains(line));
                Ok((lines, taken))
            })
            .await?;
            rest = back;
            if lines.is_empty() {
                return Ok(());
            }
            for (line, custom_id) in lines {
                // No try of the line is paid, so this id is in no bill. It is unique for the line.
                let request = self.claim.request_id(line, 0);
                self.keep(NewAnswer {
                    line,
                    outcome,
                    bytes: error_line(&custom_id, &request, (code, message)),
                    paid: None,
                    usage: TryUsage::default(),
                    model: None,
                    // The end of the batch frees what a begun line has reserved beyond this.
                    room: ROOM_OF_A_LINE,
                });
            }
            self.write_answers().await?;
        }
    }
}

/// The lines of an input that have no answer, with their `custom_id`.
struct Rest<R> {
    /// `None` at the end of the input, and after it could not be read.
    reader: Option<LineReader<R>>,
    next: u64,
    total: u64,
}

impl<R: std::io::BufRead> Rest<R> {
    /// Takes up to `most` lines that are wanted. Lines that cannot be read have no
    /// `custom_id`: the batch must end all the same.
    fn take(&mut self, most: usize, is_wanted: impl Fn(u64) -> bool) -> Vec<(u64, String)> {
        let mut lines = Vec::new();
        while self.next < self.total && lines.len() < most {
            let line = self.next;
            self.next += 1;
            let custom_id = match self.reader.as_mut().map(LineReader::next) {
                Some(Ok(Some(read))) if read.number == line => custom_id_of(&read),
                end => {
                    if let Some(Err(error)) = end {
                        tracing::error!(%error, line, "an input cannot be read; the lines from here on end without their custom_id");
                    }
                    // After an error the next line may be any line, so no later custom_id is
                    // trusted.
                    self.reader = None;
                    "null".to_owned()
                }
            };
            if is_wanted(line) {
                lines.push((line, custom_id));
            }
        }
        lines
    }
}

/// Returns the outcome, the code and the message of lines that end with their batch.
fn words(cause: Cause) -> (LineOutcome, &'static str, &'static str) {
    match cause {
        Cause::Cancelled(CancelReason::Asked) => (
            LineOutcome::Cancelled,
            "batch_cancelled",
            "The batch was cancelled before this line had an answer.",
        ),
        Cause::Cancelled(CancelReason::KeyRevoked) => (
            LineOutcome::Cancelled,
            "batch_cancelled",
            "The API key that made the batch was revoked before this line had an answer.",
        ),
        Cause::Cancelled(CancelReason::TenantGone) => (
            LineOutcome::Cancelled,
            "batch_cancelled",
            "The tenant was removed before this line had an answer.",
        ),
        Cause::Expired => (
            LineOutcome::Expired,
            "batch_expired",
            "The completion window was over before this line had an answer.",
        ),
        // A batch that is done has no line left, so these words tell of failures only.
        Cause::Failed(_) | Cause::Done => (
            LineOutcome::Failed,
            "batch_failed",
            "The batch failed before this line had an answer.",
        ),
    }
}
