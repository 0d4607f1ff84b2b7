//! Writing frames: the open file, the open block, and how far the records
//! reach. Nothing here locks or syncs; frames gather in memory until
//! [`Writer::write`], and what fails is taken back with [`Writer::restore`].

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tollgate_domain::{
    Attempt, DeviceNanos, FinishedAttempt, Millijoules, MonotonicTime, SequenceId, Stages, UtcTime,
};
use tollgate_engine::{Owner, RequestFigures, StepRecord};

use super::disk::{Disk, DiskFile};
use super::frame::{self, Frame, Head, Step};
use super::store::{self, Place, Segment};

/// The file that is written.
pub(super) struct Writer<F> {
    pub(super) head: Head,
    pub(super) place: Place,
    pub(super) file: Arc<F>,
    /// Bytes written, all of them whole frames.
    pub(super) length: u64,
    /// Bytes that are on the disk; 0 while its name is not.
    pub(super) synced: u64,
    /// How far the records reach.
    pub(super) clock: MonotonicTime,
    /// Where the open block began.
    pub(super) block_began: MonotonicTime,
    /// The device's energy counter there; `None` where it did not tell.
    pub(super) counter: Option<Millijoules>,
    /// The counter where the records end, as it was when they came to reach there.
    pub(super) reading: Option<Millijoules>,
    /// The open block's number.
    pub(super) block: u64,
    pub(super) open: Open,
    /// Sequences whose owner stands in this file.
    pub(super) introduced: HashMap<SequenceId, Attempt>,
    /// When the step began that the engine is in: what passes from there until
    /// it is recorded is the step's.
    pub(super) in_step: Option<MonotonicTime>,
    /// Something was written since the last look of the syncing thread.
    pub(super) stirred: bool,
    pub(super) frames: Vec<u8>,
}

/// What the open block holds.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) steps: bool,
    pub(super) finished: usize,
    pub(super) idled: bool,
}

/// What an append changes besides the file.
pub(super) struct Figures {
    pub(super) clock: MonotonicTime,
    pub(super) block_began: MonotonicTime,
    pub(super) counter: Option<Millijoules>,
    pub(super) reading: Option<Millijoules>,
    pub(super) block: u64,
    pub(super) open: Open,
}

impl<F: DiskFile> Writer<F> {
    /// A new file, not synced yet.
    pub(super) fn create<D: Disk<File = F>>(
        disk: &D,
        folder: &Path,
        place: Place,
        head: Head,
        segments: &mut Vec<Segment>,
    ) -> io::Result<Self> {
        let (segment, file, length) = store::create(disk, folder, place, &head)?;
        segments.push(segment);
        Ok(Self {
            place,
            file: Arc::new(file),
            length,
            synced: 0,
            clock: head.clock,
            block_began: head.clock,
            counter: None,
            reading: None,
            block: head.block,
            head,
            open: Open::default(),
            introduced: HashMap::new(),
            in_step: None,
            stirred: false,
            frames: Vec::new(),
        })
    }

    pub(super) fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let StepRecord { step, started, busy, shares } = *record;
        let mut overhead = DeviceNanos::ZERO;
        let mut tenants = Vec::with_capacity(shares.len());
        for share in shares {
            match &share.owner {
                Owner::Overhead => overhead += share.attributed,
                Owner::Request { caller, request, attempt } => {
                    let attempt = Attempt { request: request.clone(), attempt: *attempt };
                    if !self.introduced.contains_key(&share.sequence) {
                        let sequence = share.sequence;
                        let frame = Frame::Owner {
                            sequence,
                            caller: caller.clone(),
                            attempt: attempt.clone(),
                        };
                        frame::write(&frame, &mut self.frames);
                        self.introduced.insert(sequence, attempt);
                    }
                    tenants.push((share.sequence, share.attributed));
                }
            }
        }
        let sum: DeviceNanos =
            tenants.iter().map(|&(_, share)| share).sum::<DeviceNanos>() + overhead;
        if sum != busy {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("shares of step {step} sum to {sum}, it took {busy}"),
            ));
        }
        let idle = self.idle_before(started)?;
        self.in_step = None;
        self.put_step(Step { step, idle, overhead, shares: tenants }, busy);
        Ok(())
    }

    /// The time between the last record and `started`. Steps may seem to
    /// overlap by the grain of two clocks, not by more.
    pub(super) fn idle_before(&self, started: MonotonicTime) -> io::Result<DeviceNanos> {
        let overlap = self.clock.since(started);
        if overlap > CLOCK_GRAIN {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a step began {overlap:?} before the one before it ended"),
            ));
        }
        Ok(DeviceNanos(started.0.saturating_sub(self.clock.0)))
    }

    pub(super) fn put_step(&mut self, step: Step, busy: DeviceNanos) {
        self.clock = MonotonicTime(self.clock.0 + step.idle.nanos() + busy.nanos());
        self.open.steps = true;
        frame::write(&Frame::Step(step), &mut self.frames);
    }

    pub(super) fn put_gap(&mut self, idle: DeviceNanos, loss: DeviceNanos) {
        if idle != DeviceNanos::ZERO || loss != DeviceNanos::ZERO {
            self.clock = MonotonicTime(self.clock.0 + idle.nanos() + loss.nanos());
            frame::write(&Frame::Gap { idle, loss }, &mut self.frames);
        }
    }

    /// Books the time up to the step that is under way as idle, so that what is
    /// lost with the step is the step alone.
    pub(super) fn put_idle_before_step(&mut self) {
        if let Some(began) = self.in_step {
            let idle = began.0.saturating_sub(self.clock.0);
            self.put_gap(DeviceNanos(idle), DeviceNanos::ZERO);
        }
    }

    /// Ends the block where the records end.
    pub(super) fn put_cut(&mut self, next: UtcTime, last: bool) {
        let energy = self.energy();
        frame::write(&Frame::Cut { next, last, energy }, &mut self.frames);
        self.block += 1;
        self.block_began = self.clock;
        self.open = Open::default();
    }

    /// What was drawn in the open block. In no time nobody draws anything: what
    /// the counter moved meanwhile is the next block's. One that leaps tells nothing.
    fn energy(&mut self) -> Option<Millijoules> {
        if self.clock == self.block_began && self.counter.is_some() {
            return None;
        }
        let before = std::mem::replace(&mut self.counter, self.reading)?;
        let wall = DeviceNanos(self.clock.0 - self.block_began.0);
        self.reading?.since(before).filter(|energy| energy.is_drawn_in(wall))
    }

    pub(super) fn finished(&mut self, at: MonotonicTime, request: &RequestFigures) {
        let RequestFigures { request, attempt, caller, usage, stages, reason } = request;
        let attempt = Attempt { request: request.clone(), attempt: *attempt };
        self.introduced.retain(|_, owner| *owner != attempt);
        // Transfers are within the others, and said in the answer alone.
        let tollgate_engine::Stages { queue_ns, prefill_ns, decode_ns, transfers: _ } = *stages;
        let finished = FinishedAttempt {
            caller: caller.clone(),
            attempt,
            usage: *usage,
            stages: Stages { queue_ns, prefill_ns, decode_ns },
            reason: *reason,
            finished: UtcTime(at.0), // monotonic in the file; the builder converts
        };
        frame::write(&Frame::Finished(finished), &mut self.frames);
        self.open.finished += 1;
    }

    /// The host's clock where the records end, given both clocks now.
    pub(super) fn utc_at_end(&self, now: MonotonicTime, utc: UtcTime) -> UtcTime {
        UtcTime(utc.0.saturating_sub(now.0.saturating_sub(self.clock.0)))
    }

    pub(super) fn is_cut_due(&self, now: MonotonicTime) -> bool {
        let Open { steps, finished, idled } = self.open;
        finished > 0 || idled || (steps && now.since(self.block_began) >= LONGEST_OPEN)
    }

    pub(super) fn write(&mut self) -> io::Result<()> {
        if self.frames.is_empty() {
            return Ok(());
        }
        self.file.write_all_at(&self.frames, self.length)?;
        self.length += self.frames.len() as u64;
        self.stirred = true;
        Ok(())
    }

    pub(super) fn figures(&self) -> Figures {
        Figures {
            clock: self.clock,
            block_began: self.block_began,
            counter: self.counter,
            reading: self.reading,
            block: self.block,
            open: self.open,
        }
    }

    pub(super) fn restore(&mut self, before: Figures) {
        let Figures { clock, block_began, counter, reading, block, open } = before;
        (self.clock, self.block_began, self.block, self.open) = (clock, block_began, block, open);
        (self.counter, self.reading) = (counter, reading);
        // Owners may stand in the frames that were not written: say them again.
        self.introduced.clear();
    }
}

/// How long a block with steps stays open while nothing finishes.
pub(super) const LONGEST_OPEN: Duration = Duration::from_secs(1);
/// By how much two readings of the engine's clocks may disagree.
const CLOCK_GRAIN: Duration = Duration::from_millis(1);
