//! From frames to blocks. The same code reads what was written a second ago
//! and what a crash left behind, so a block is the same both times.

use std::collections::{BTreeMap, HashMap};

use tollgate_domain::{
    Attempt, Block, BlockError, BlockParts, Caller, DeviceNanos, FinishedAttempt, Millijoules,
    MonotonicTime, SequenceId, Share, UtcTime,
};

use super::frame::{Frame, Head, Step};

/// Why frames make no block: the file is damaged, or the writer is.
#[derive(Debug, thiserror::Error)]
pub(super) enum BuildError {
    /// A share of a sequence that nobody introduced.
    #[error("sequence {0} has no owner")]
    NoOwner(SequenceId),
    /// A sum that does not fit.
    #[error("times overflow")]
    Overflow,
    /// A second head, or none at the beginning.
    #[error("a head out of place")]
    Head,
    /// The block that was made does not hold.
    #[error(transparent)]
    Block(#[from] BlockError),
}

/// Puts together the blocks of one file.
pub(super) struct Builder {
    head: Head,
    owners: HashMap<SequenceId, (Caller, Attempt)>,
    number: u64,
    started: UtcTime,
    /// Where the block began on the monotonic clock.
    origin: MonotonicTime,
    span: Span,
    ended: bool,
    alive: MonotonicTime,
}

/// What the open block holds so far.
#[derive(Default)]
struct Span {
    first_step: u64,
    last_step: u64,
    wall: DeviceNanos,
    overhead: DeviceNanos,
    idle: DeviceNanos,
    loss: DeviceNanos,
    shares: BTreeMap<SequenceId, DeviceNanos>,
    finished: Vec<FinishedAttempt>,
}

impl Builder {
    /// For the file that begins with `head`.
    pub(super) fn new(head: Head) -> Self {
        Self {
            owners: HashMap::new(),
            number: head.block,
            started: head.utc,
            origin: head.clock,
            span: Span::default(),
            ended: false,
            alive: MonotonicTime(0),
            head,
        }
    }

    /// What holds for the file.
    pub(super) fn head(&self) -> &Head {
        &self.head
    }

    /// Takes the next frame; a block when it ends one.
    pub(super) fn apply(&mut self, frame: Frame) -> Result<Option<Block>, BuildError> {
        match frame {
            Frame::Head(_) => return Err(BuildError::Head),
            Frame::Owner { sequence, caller, attempt } => {
                self.owners.insert(sequence, (caller, attempt));
            }
            Frame::Step(step) => self.span.step(step)?,
            Frame::Gap { idle, loss } => self.span.gap(idle, loss)?,
            Frame::Finished(finished) => {
                let at = MonotonicTime(finished.finished.0);
                let finished = FinishedAttempt { finished: self.utc_of(at), ..finished };
                self.span.finished.push(finished);
            }
            Frame::Cut { next, last, energy } => return self.cut(next, last, energy).map(Some),
            Frame::Alive { at } => self.alive = at,
        }
        Ok(None)
    }

    /// Whether the epoch was closed in this file.
    pub(super) fn ended(&self) -> bool {
        self.ended
    }

    /// Number of the next block that a cut will end.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Whether nothing was said since the last cut.
    pub(super) fn is_between_blocks(&self) -> bool {
        let Span { first_step, last_step: _, wall, finished, .. } = &self.span;
        *first_step == 0 && *wall == DeviceNanos::ZERO && finished.is_empty()
    }

    /// How far the records reach on the monotonic clock.
    pub(super) fn clock(&self) -> MonotonicTime {
        MonotonicTime(self.origin.0.saturating_add(self.span.wall.nanos()))
    }

    /// How long the process is known to have lived in a step after the last
    /// record: what that step did is lost.
    pub(super) fn lost(&self) -> DeviceNanos {
        DeviceNanos(self.alive.0.saturating_sub(self.clock().0))
    }

    /// The host's clock at `at`.
    pub(super) fn utc_of(&self, at: MonotonicTime) -> UtcTime {
        UtcTime(self.started.0.saturating_add(at.0.saturating_sub(self.origin.0)))
    }

    fn cut(
        &mut self,
        next: UtcTime,
        last: bool,
        energy: Option<Millijoules>,
    ) -> Result<Block, BuildError> {
        let end = self.clock();
        let span = std::mem::take(&mut self.span);
        let mut shares = Vec::with_capacity(span.shares.len());
        for (sequence, attributed) in span.shares {
            let (caller, attempt) =
                self.owners.get(&sequence).cloned().ok_or(BuildError::NoOwner(sequence))?;
            shares.push(Share { sequence, caller, attempt, attributed });
        }
        let block = Block::try_from(BlockParts {
            epoch: self.head.epoch,
            number: self.number,
            worker: self.head.worker.clone(),
            device: self.head.device.clone(),
            model: self.head.model.clone(),
            calibration: self.head.calibration.clone(),
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
        self.origin = end;
        self.ended = last;
        Ok(block)
    }
}

impl Span {
    fn step(&mut self, step: Step) -> Result<(), BuildError> {
        let Step { step, idle, overhead, shares } = step;
        if step != 0 {
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
    *sum = sum.checked_add(more).ok_or(BuildError::Overflow)?;
    Ok(())
}
