//! The lines of a claimed batch that have no answer yet: lines that are read ahead, lines
//! with committed tries, and lines that wait to run again.

use std::collections::VecDeque;
use std::io::BufReader;

use tokio::time::Instant;

use super::line_set::LineSet;
use crate::blobs::{Blobs, RangeReader};
use crate::error::JobError;
use crate::file::BlobRange;
use crate::line::{Line, LineReader};
use crate::upload::blocking;

/// First tries that are committed ahead of being sent.
const AHEAD: usize = 64;
/// Bytes of lines that are read ahead, beyond the first.
const AHEAD_BYTES: usize = 256 * 1024;
/// Lines that wait to run again, beyond which no line runs for the first time.
const MOST_RETRIES: usize = 64;

/// A line with its next try, which is committed or about to be.
pub(super) struct NextTry {
    pub(super) line: Line,
    /// The number of the try under the claim.
    pub(super) number: u32,
    /// Workers that were lost under tries of the line.
    pub(super) losses: u32,
}

/// The lines of a batch that are not on a worker and have no answer.
pub(super) struct Lines {
    reader: Option<LineReader<BufReader<RangeReader>>>,
    /// Read, and not committed as begun.
    ahead: VecDeque<Line>,
    /// Committed: these may be sent.
    ready: VecDeque<NextTry>,
    /// Committed: these run without others beside them.
    alone: VecDeque<NextTry>,
    /// Wait to run again.
    retries: Vec<(Instant, NextTry)>,
}

impl Lines {
    pub(super) fn new(blobs: &Blobs, ranges: Vec<BlobRange>) -> Self {
        Self {
            reader: Some(LineReader::new(blobs.reader(ranges))),
            ahead: VecDeque::new(),
            ready: VecDeque::new(),
            alone: VecDeque::new(),
            retries: Vec::new(),
        }
    }

    /// Reads ahead: up to 64 lines that have no answer.
    ///
    /// # Errors
    /// The input cannot be read, or is not what the validator has passed.
    pub(super) async fn read_ahead(&mut self, answered: &LineSet) -> Result<(), JobError> {
        if !self.ahead.is_empty() {
            return Ok(());
        }
        let Some(mut reader) = self.reader.take() else { return Ok(()) };
        let answered = answered.clone();
        let (reader, lines) = blocking(move || {
            let (mut lines, mut bytes) = (VecDeque::new(), 0);
            // By bytes, too, because a line may have megabytes.
            while lines.len() < AHEAD && bytes < AHEAD_BYTES {
                let next = reader.next().map_err(super::takeover::unreadable)?;
                // Without a reader `has_unbegun` is false once these lines are begun.
                let Some(next) = next else { return Ok((None, lines)) };
                if answered.contains(next.number) {
                    continue;
                }
                let line = Line::read(&next).ok_or(JobError::Damaged)?;
                bytes += next.bytes.len();
                lines.push_back(line);
            }
            Ok((Some(reader), lines))
        })
        .await?;
        (self.reader, self.ahead) = (reader, lines);
        Ok(())
    }

    /// Returns the lines that are read and not begun.
    pub(super) fn ahead(&self) -> impl Iterator<Item = &Line> {
        self.ahead.iter()
    }

    /// Marks the first `count` lines that were read as begun.
    pub(super) fn begun(&mut self, count: usize) {
        let begun = self.ahead.drain(..count);
        self.ready.extend(begun.map(|line| NextTry { line, number: 0, losses: 0 }));
    }

    /// Returns true if lines should be begun: none is ready, and few wait to run again.
    pub(super) fn wants_begin(&self) -> bool {
        self.ready.is_empty() && self.alone.is_empty() && self.retries.len() < MOST_RETRIES
    }

    /// Returns true if the input has more lines to read or to begin.
    pub(super) fn has_unbegun(&self) -> bool {
        self.reader.is_some() || !self.ahead.is_empty()
    }

    /// Lets a line run again at `due`.
    pub(super) fn retry(&mut self, due: Instant, next: NextTry) {
        self.retries.push((due, next));
    }

    /// Returns the tries that are due, for their commit.
    pub(super) fn due(&self, now: Instant) -> Vec<(u64, u32)> {
        let due = self.retries.iter().filter(|(due, _)| *due <= now);
        due.map(|(_, next)| (next.line.number, next.number)).collect()
    }

    /// Makes the tries that were due at `now` ready: their rows are committed.
    pub(super) fn retries_begun(&mut self, now: Instant) {
        let (due, later) =
            std::mem::take(&mut self.retries).into_iter().partition(|it| it.0 <= now);
        self.retries = later;
        let due: Vec<(Instant, NextTry)> = due;
        for (_, next) in due {
            match next.losses >= super::LOSSES_BEFORE_ALONE {
                true => self.alone.push_back(next),
                false => self.ready.push_back(next),
            }
        }
    }

    /// Makes every line that waits to run again due at `now`.
    pub(super) fn end_waits(&mut self, now: Instant) {
        self.retries.iter_mut().for_each(|(due, _)| *due = (*due).min(now));
    }

    /// Returns the time at which the next line may run again.
    pub(super) fn next_due(&self) -> Option<Instant> {
        self.retries.iter().map(|(due, _)| *due).min()
    }

    /// Returns true if a line may be sent.
    pub(super) fn has_ready(&self) -> bool {
        !self.ready.is_empty() || !self.alone.is_empty()
    }

    /// Returns true if the next line to send must run alone.
    pub(super) fn is_next_alone(&self) -> bool {
        // Lines that run beside others go first: they delay no other batch.
        self.ready.is_empty() && !self.alone.is_empty()
    }

    /// Takes the next line that may run beside others.
    pub(super) fn take_ready(&mut self) -> Option<NextTry> {
        self.ready.pop_front()
    }

    /// Takes the next line that runs alone, or one that could run beside others.
    pub(super) fn take_alone(&mut self) -> Option<NextTry> {
        self.alone.pop_front().or_else(|| self.ready.pop_front())
    }
}
