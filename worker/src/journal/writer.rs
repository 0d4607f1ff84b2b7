//! The writer of frames: the open file, the open block, and the end of the records.
//! Nothing here locks or syncs. Frames collect in memory until [`Writer::write`];
//! after an error [`Writer::restore`] takes them back.

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
use super::frame::{self, Frame, Header, Step};
use super::store::{self, Segment, SegmentId};

/// The state of the file that is being written.
pub(super) struct Writer<F> {
    pub(super) header: Header,
    pub(super) id: SegmentId,
    // Shared with the syncing thread, which must not hold the journal's lock during a sync.
    pub(super) file: Arc<F>,
    /// Bytes written, all of them whole frames.
    pub(super) length: u64,
    /// Bytes that are synced; 0 while the file's name is not synced.
    pub(super) synced: u64,
    /// The end of the last record.
    pub(super) clock: MonotonicTime,
    /// The beginning of the open block.
    pub(super) block_began: MonotonicTime,
    /// The device's energy counter at the beginning of the block; `None` if it was
    /// not known.
    pub(super) counter: Option<Millijoules>,
    /// The device's energy counter at the end of the last record.
    pub(super) reading: Option<Millijoules>,
    /// The number of the open block.
    pub(super) block: u64,
    pub(super) open: OpenBlock,
    /// Sequences whose owner frame is in this file.
    pub(super) introduced: HashMap<SequenceId, Attempt>,
    /// The beginning of the step that the engine is in. The time from there until
    /// the step is recorded belongs to the step.
    pub(super) in_step: Option<MonotonicTime>,
    /// True if something was written since the syncing thread's last round.
    pub(super) wrote: bool,
    pub(super) frames: Vec<u8>,
}

/// The kinds of records in the open block.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct OpenBlock {
    pub(super) steps: bool,
    pub(super) finished: usize,
    pub(super) idled: bool,
}

/// The state that an append changes besides the file.
pub(super) struct WriterSnapshot {
    pub(super) clock: MonotonicTime,
    pub(super) block_began: MonotonicTime,
    pub(super) counter: Option<Millijoules>,
    pub(super) reading: Option<Millijoules>,
    pub(super) block: u64,
    pub(super) open: OpenBlock,
}

impl<F: DiskFile> Writer<F> {
    /// Creates a new file, which is not synced yet.
    pub(super) fn create<D: Disk<File = F>>(
        disk: &D,
        folder: &Path,
        id: SegmentId,
        header: Header,
        segments: &mut Vec<Segment>,
    ) -> io::Result<Self> {
        let (segment, file, length) = store::create(disk, folder, id, &header)?;
        segments.push(segment);
        Ok(Self {
            id,
            file: Arc::new(file),
            length,
            synced: 0,
            clock: header.clock,
            block_began: header.clock,
            counter: None,
            reading: None,
            block: header.block,
            header,
            open: OpenBlock::default(),
            introduced: HashMap::new(),
            in_step: None,
            wrote: false,
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
                Owner::Request { caller, request, attempt, tier } => {
                    let attempt = Attempt { request: request.clone(), attempt: *attempt };
                    if !self.introduced.contains_key(&share.sequence) {
                        let sequence = share.sequence;
                        let frame = Frame::Owner {
                            sequence,
                            caller: caller.clone(),
                            attempt: attempt.clone(),
                            tier: *tier,
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
        // The split must be exact. A wrong sum would bill time that the device did
        // not spend.
        if sum != busy {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("the shares of step {step} sum to {sum}, but the step took {busy}"),
            ));
        }
        let idle = self.idle_before(started)?;
        self.in_step = None;
        self.put_step(Step { step, idle, overhead, shares: tenants }, busy);
        Ok(())
    }

    /// Returns the time between the last record and `started`. Two clock readings
    /// may disagree by [`CLOCK_GRAIN`]; a larger overlap is an error.
    pub(super) fn idle_before(&self, started: MonotonicTime) -> io::Result<DeviceNanos> {
        let overlap = self.clock.since(started);
        if overlap > CLOCK_GRAIN {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("a step began {overlap:?} before the one before it ended"),
            ));
        }
        // An overlap within the grain of the clock counts as no idle time.
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

    /// Records the time before the current step as idle, so that a crash loses the
    /// step alone.
    pub(super) fn put_idle_before_step(&mut self) {
        if let Some(began) = self.in_step {
            let idle = began.0.saturating_sub(self.clock.0);
            self.put_gap(DeviceNanos(idle), DeviceNanos::ZERO);
        }
    }

    /// Closes the block at the end of the last record.
    pub(super) fn close_block(&mut self, next: UtcTime, last: bool) {
        let energy = self.energy();
        frame::write(&Frame::CloseBlock { next, last, energy }, &mut self.frames);
        self.block += 1;
        self.block_began = self.clock;
        self.open = OpenBlock::default();
    }

    /// Returns the energy drawn in the open block. A block without duration has
    /// none; the counter's change then belongs to the next block. An implausible
    /// change counts as unknown.
    fn energy(&mut self) -> Option<Millijoules> {
        if self.clock == self.block_began && self.counter.is_some() {
            return None;
        }
        // The counter moves on even if the change is unknown, so that one bad reading
        // spoils one block only.
        let before = std::mem::replace(&mut self.counter, self.reading)?;
        let wall = DeviceNanos(self.clock.0 - self.block_began.0);
        self.reading?.since(before).filter(|energy| energy.is_drawn_in(wall))
    }

    pub(super) fn finished(&mut self, at: MonotonicTime, request: &RequestFigures) {
        let RequestFigures { request, attempt, caller, usage, stages, reason, tier } = request;
        let attempt = Attempt { request: request.clone(), attempt: *attempt };
        // An ended attempt needs no owner frame again, so the map holds running
        // sequences only.
        self.introduced.retain(|_, owner| *owner != attempt);
        // Transfers are part of the other stages and only reported in the answer.
        let tollgate_engine::Stages { queue_ns, prefill_ns, decode_ns, transfers: _ } = *stages;
        let finished = FinishedAttempt {
            caller: caller.clone(),
            attempt,
            usage: *usage,
            stages: Stages { queue_ns, prefill_ns, decode_ns },
            reason: *reason,
            finished: UtcTime(at.0), // monotonic in the file; the builder converts
            tier: *tier,
        };
        frame::write(&Frame::Finished(finished), &mut self.frames);
        self.open.finished += 1;
    }

    /// Returns the host's time at the end of the last record, given both clocks
    /// now.
    pub(super) fn utc_at_end(&self, now: MonotonicTime, utc: UtcTime) -> UtcTime {
        UtcTime(utc.0.saturating_sub(now.0.saturating_sub(self.clock.0)))
    }

    pub(super) fn is_close_due(&self, now: MonotonicTime) -> bool {
        let OpenBlock { steps, finished, idled } = self.open;
        finished > 0 || idled || (steps && now.since(self.block_began) >= LONGEST_OPEN)
    }

    pub(super) fn write(&mut self) -> io::Result<()> {
        if self.frames.is_empty() {
            return Ok(());
        }
        // One write at a known offset can be undone by cutting the file.
        self.file.write_all_at(&self.frames, self.length)?;
        self.length += self.frames.len() as u64;
        self.wrote = true;
        Ok(())
    }

    pub(super) fn figures(&self) -> WriterSnapshot {
        WriterSnapshot {
            clock: self.clock,
            block_began: self.block_began,
            counter: self.counter,
            reading: self.reading,
            block: self.block,
            open: self.open,
        }
    }

    pub(super) fn restore(&mut self, before: WriterSnapshot) {
        let WriterSnapshot { clock, block_began, counter, reading, block, open } = before;
        (self.clock, self.block_began, self.block, self.open) = (clock, block_began, block, open);
        (self.counter, self.reading) = (counter, reading);
        // The discarded frames may have held owner frames: write all owners again.
        self.introduced.clear();
    }
}

/// Time that a block with steps stays open at most while no request finishes.
pub(super) const LONGEST_OPEN: Duration = Duration::from_secs(1);
/// Difference that two readings of the engine's clocks may have.
const CLOCK_GRAIN: Duration = Duration::from_millis(1);
