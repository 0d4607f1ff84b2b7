//! The conversion of frames to blocks. The same code reads recent frames and
//! recovers a crashed journal, so both give the same blocks.

use std::collections::{BTreeMap, HashMap};

use tollgate_domain::{
    Attempt, Block, BlockError, BlockParts, Caller, DeviceNanos, FinishedAttempt, Millijoules,
    MonotonicTime, SequenceId, Share, Tier, UtcTime,
};

use super::frame::{Frame, Header, Step};

/// An error in a sequence of frames: the file or its writer is faulty.
#[derive(Debug, thiserror::Error)]
pub(super) enum BuildError {
    /// A share of a sequence without an owner frame.
    #[error("sequence {0} has no owner")]
    NoOwner(SequenceId),
    /// A sum that overflows.
    #[error("times overflow")]
    Overflow,
    /// A header that is not the first frame, or a first frame that is no header.
    #[error("a header is out of place")]
    Header,
    /// The block violates an invariant.
    #[error(transparent)]
    Block(#[from] BlockError),
}

/// A builder of the blocks of one file.
pub(super) struct Builder {
    header: Header,
    owners: HashMap<SequenceId, (Caller, Attempt, Tier)>,
    number: u64,
    started: UtcTime,
    /// The beginning of the block on the monotonic clock.
    origin: MonotonicTime,
    span: Span,
    ended: bool,
    alive: MonotonicTime,
}

/// The sums of the open block.
#[derive(Default)]
struct Span {
    first_step: u64,
    last_step: u64,
    wall: DeviceNanos,
    overhead: DeviceNanos,
    idle: DeviceNanos,
    loss: DeviceNanos,
    // Sorted, so that the same frames always give the same block.
    shares: BTreeMap<SequenceId, DeviceNanos>,
    finished: Vec<FinishedAttempt>,
}

impl Builder {
    /// Creates the builder of the file with this header.
    pub(super) fn new(header: Header) -> Self {
        Self {
            owners: HashMap::new(),
            number: header.block,
            started: header.utc,
            origin: header.clock,
            span: Span::default(),
            ended: false,
            // Before any mark, so nothing counts as lost.
            alive: MonotonicTime(0),
            header,
        }
    }

    /// Returns the file's header.
    pub(super) fn header(&self) -> &Header {
        &self.header
    }

    /// Adds the next frame. Returns a block if the frame closes one.
    pub(super) fn apply(&mut self, frame: Frame) -> Result<Option<Block>, BuildError> {
        match frame {
            Frame::Header(_) => return Err(BuildError::Header),
            Frame::Owner { sequence, caller, attempt, tier } => {
                self.owners.insert(sequence, (caller, attempt, tier));
            }
            Frame::Step(step) => self.span.step(step)?,
            Frame::Gap { idle, loss } => self.span.gap(idle, loss)?,
            Frame::Finished(finished) => {
                // The frame holds monotonic time, because the host's clock may jump
                // while a block is open.
                let at = MonotonicTime(finished.finished.0);
                let finished = FinishedAttempt { finished: self.utc_of(at), ..finished };
                self.span.finished.push(finished);
            }
            Frame::CloseBlock { next, last, energy } => {
                return self.close_block(next, last, energy).map(Some);
            }
            Frame::Alive { at } => self.alive = at,
        }
        Ok(None)
    }

    /// Returns true if the epoch was closed in this file.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Returns the number of the open block.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Returns true if the open block has no records.
    pub(super) fn is_between_blocks(&self) -> bool {
        let Span { first_step, last_step: _, wall, finished, .. } = &self.span;
        *first_step == 0 && *wall == DeviceNanos::ZERO && finished.is_empty()
    }

    /// Returns the end of the last record on the monotonic clock.
    pub(super) fn clock(&self) -> MonotonicTime {
        MonotonicTime(self.origin.0.saturating_add(self.span.wall.nanos()))
    }

    /// Returns the time for which the process is known to have been in a step after
    /// the last record. The work of that step is lost.
    pub(super) fn lost(&self) -> DeviceNanos {
        DeviceNanos(self.alive.0.saturating_sub(self.clock().0))
    }

    /// Returns the host's time at `at`.
    pub(super) fn utc_of(&self, at: MonotonicTime) -> UtcTime {
        UtcTime(self.started.0.saturating_add(at.0.saturating_sub(self.origin.0)))
    }

    fn close_block(
        &mut self,
        next: UtcTime,
        last: bool,
        energy: Option<Millijoules>,
    ) -> Result<Block, BuildError> {
        // The end depends on the sums, so it is computed before the sums are reset.
        let end = self.clock();
        let span = std::mem::take(&mut self.span);
        let mut shares = Vec::with_capacity(span.shares.len());
        for (sequence, attributed) in span.shares {
            let (caller, attempt, tier) =
                self.owners.get(&sequence).cloned().ok_or(BuildError::NoOwner(sequence))?;
            shares.push(Share { sequence, caller, attempt, attributed, tier });
        }
        // The conversion checks that the parts sum to the wall time, so a faulty file
        // cannot reach the ledger.
        let block = Block::try_from(BlockParts {
            epoch: self.header.epoch,
            number: self.number,
            worker: self.header.worker.clone(),
            device: self.header.device.clone(),
            model: self.header.model.clone(),
            calibration: self.header.calibration.clone(),
            first_step: span.first_step,
            last_step: span.last_step,
            started: self.started,
            wall: span.wall,
            overhead: span.overhead,
            idle: span.idle,
            loss: span.loss,
            shares,
            finished: span.finished,
            last_of_epoch: last,
            energy,
        })?;
        self.number += 1;
        self.started = next;
        // The next block starts where this one ends, so that no time falls between
        // two blocks.
        self.origin = end;
        self.ended = last;
        Ok(block)
    }
}

impl Span {
    fn step(&mut self, step: Step) -> Result<(), BuildError> {
        let Step { step, idle, overhead, shares } = step;
        if step != 0 {
            // Steps are numbered from 1, so 0 means that the block has no step yet.
            if self.first_step == 0 {
                self.first_step = step;
            }
            self.last_step = step;
        }
        self.gap(idle, DeviceNanos::ZERO)?;
        add(&mut self.overhead, overhead)?;
        add(&mut self.wall, overhead)?;
        for (sequence, share) in shares {
            add(self.shares.entry(sequence).or_default(), share)?;
            add(&mut self.wall, share)?;
        }
        Ok(())
    }

    fn gap(&mut self, idle: DeviceNanos, loss: DeviceNanos) -> Result<(), BuildError> {
        add(&mut self.idle, idle)?;
        add(&mut self.loss, loss)?;
        add(&mut self.wall, idle)?;
        add(&mut self.wall, loss)
    }
}

fn add(sum: &mut DeviceNanos, more: DeviceNanos) -> Result<(), BuildError> {
    // A wrapped sum would bill a wrong time, so an overflow makes the file invalid.
    *sum = sum.checked_add(more).ok_or(BuildError::Overflow)?;
    Ok(())
}
