//! The worker's process in a simulation: the real journal, and an engine that only
//! lets time pass.

use std::cell::Cell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tollgate_domain::block::Attempt;
use tollgate_domain::{
    Caller, CostTable, Device, DeviceClass, DeviceNanos, FinishReason, ModelName, MonotonicTime,
    PromptWork, SequenceId, Tier, Usage, UtcTime, WorkerEpoch, WorkerName,
};
use tollgate_worker::test_harness::{
    Clock, HarnessOptions, JournalHarness, Owner, RequestFigures, Stages, StepRecord, StepShare,
};

use super::chance::Chance;
use super::disk::SimDisk;

pub(super) const MS: u64 = 1_000_000;
/// The calendar time at which a run begins.
pub(super) const DAWN: UtcTime = UtcTime(1_795_176_000_000_000_000);

/// The host's clocks, which the simulation advances.
#[derive(Clone, Default)]
pub(super) struct SimulatedClock(Arc<AtomicU64>);

impl SimulatedClock {
    pub(super) fn turn(&self, ms: u64) {
        self.0.store(ms * MS, Ordering::Relaxed);
        UTC.with(|utc| utc.set(DAWN.0 + ms * MS));
    }
}

impl Clock for SimulatedClock {
    fn now(&self) -> MonotonicTime {
        MonotonicTime(self.0.load(Ordering::Relaxed))
    }
}

thread_local! {
    static UTC: Cell<u64> = const { Cell::new(0) };
}

fn utc() -> UtcTime {
    UtcTime(UTC.with(Cell::get))
}

/// A running worker.
pub(super) struct Working {
    pub(super) process: u64,
    pub(super) epoch: WorkerEpoch,
    pub(super) rig: JournalHarness<SimDisk>,
    pub(super) runs: Vec<Run>,
    steps: u64,
    sequences: u64,
}

/// An attempt on the device.
pub(super) struct Run {
    pub(super) caller: Caller,
    pub(super) attempt: Attempt,
    pub(super) connection: u64,
    pub(super) cancelled: Option<FinishReason>,
    pub(super) order: Wanted,
    sequence: SequenceId,
    /// The arrival time. A step that began before does not include the attempt.
    came: u64,
    tokens: u64,
    attributed: u64,
}

/// The order of an attempt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    pub(super) prompt: u64,
    /// Tokens after which the attempt stops by itself, and its limit.
    pub(super) stops_after: u64,
    pub(super) most: u64,
    pub(super) budget: Option<u64>,
}

/// The result of a step.
pub(super) struct Stepped {
    /// Tokens and figures of the attempts in the step.
    pub(super) reported: Vec<(Attempt, u64, Usage)>,
    /// The attempts that have ended.
    pub(super) ended: Vec<(u64, RequestFigures)>,
}

impl Working {
    pub(super) fn start(
        disk: SimDisk,
        process: u64,
        epoch: WorkerEpoch,
        clock: &SimulatedClock,
    ) -> io::Result<Self> {
        let rig = JournalHarness::open(
            disk,
            HarnessOptions {
                folder: "/journal".into(),
                epoch,
                worker: worker_name(),
                device: device(),
                model: model_name(),
                calibration: "v1".to_owned(),
                clock: Arc::new(clock.clone()),
                utc,
            },
        )?;
        Ok(Self { process, epoch, rig, runs: Vec::new(), steps: 0, sequences: 0 })
    }

    pub(super) fn order(&mut self, run: (Caller, Attempt, u64), order: Wanted, now: u64) {
        let (caller, attempt, connection) = run;
        self.sequences += 1;
        let sequence = SequenceId(self.sequences);
        self.runs.push(Run {
            caller,
            attempt,
            connection,
            cancelled: None,
            order,
            sequence,
            came: now,
            tokens: 0,
            attributed: 0,
        });
    }

    /// True if no attempt is running.
    pub(super) fn idle(&mut self, now: MonotonicTime) -> io::Result<()> {
        self.rig.engine().idle(now)
    }

    /// Begins a step.
    pub(super) fn began(&mut self, now: u64) -> io::Result<()> {
        self.rig.engine().began(MonotonicTime(now * MS))
    }

    /// Ends a step that began at `started`; both times are milliseconds.
    pub(super) fn step(
        &mut self,
        chance: &mut Chance,
        table: &CostTable,
        started: u64,
        now: u64,
    ) -> io::Result<Stepped> {
        let busy = (now - started) * MS;
        let there = |run: &&mut Run| run.came <= started;
        let mut weights: Vec<(SequenceId, Owner, u64)> = self
            .runs
            .iter_mut()
            .filter(there)
            .map(|run| (run.sequence, run.owner(), chance.between(1, 100)))
            .collect();
        if weights.is_empty() || chance.percent(10) {
            self.sequences += 1;
            weights.push((SequenceId(self.sequences), Owner::Overhead, chance.between(1, 50)));
        }
        let sum: u64 = weights.iter().map(|(_, _, weight)| weight).sum();
        let mut left = busy;
        let last = weights.len() - 1;
        let mut shares = Vec::with_capacity(weights.len());
        for (index, (sequence, owner, weight)) in weights.into_iter().enumerate() {
            let part = if index == last { left } else { left.min(busy * weight / sum) };
            left -= part;
            shares.push(StepShare { sequence, owner, attributed: DeviceNanos(part) });
        }
        self.steps += 1;
        self.rig.engine().step(&StepRecord {
            step: self.steps,
            started: MonotonicTime(started * MS),
            busy: DeviceNanos(busy),
            shares: &shares,
        })?;
        let mut stepped = Stepped { reported: Vec::new(), ended: Vec::new() };
        let mut going = Vec::with_capacity(self.runs.len());
        for mut run in std::mem::take(&mut self.runs) {
            let share = shares.iter().find(|share| share.sequence == run.sequence);
            if let Some(share) = share {
                run.tokens += 1;
                run.attributed += share.attributed.nanos();
                stepped.reported.push((run.attempt.clone(), run.connection, run.usage(table)));
            }
            match run.reason(table) {
                Some(reason) => stepped.ended.push((run.connection, run.figures(table, reason))),
                None => going.push(run),
            }
        }
        self.runs = going;
        if !stepped.ended.is_empty() {
            let figures: Vec<RequestFigures> =
                stepped.ended.iter().map(|(_, figures)| figures.clone()).collect();
            self.rig.engine().finished(MonotonicTime(now * MS), &figures)?;
        }
        Ok(stepped)
    }
}

impl Run {
    fn owner(&self) -> Owner {
        Owner::Request {
            caller: self.caller.clone(),
            request: self.attempt.request.clone(),
            attempt: self.attempt.attempt,
            tier: Tier::Interactive,
        }
    }

    fn reason(&self, table: &CostTable) -> Option<FinishReason> {
        let next = cost(table, self.order.prompt, self.tokens + 1);
        if self.cancelled.is_some() {
            self.cancelled
        } else if self.tokens >= self.order.stops_after {
            Some(FinishReason::Stop)
        } else if self.tokens >= self.order.most
            || self.order.budget.is_some_and(|budget| next > budget)
        {
            Some(FinishReason::Length)
        } else {
            None
        }
    }

    fn usage(&self, table: &CostTable) -> Usage {
        if self.tokens == 0 {
            return Usage::default();
        }
        Usage {
            prompt_tokens: self.order.prompt,
            cached_tokens: 0,
            completion_tokens: self.tokens,
            attributed: DeviceNanos(self.attributed),
            reference: DeviceNanos(cost(table, self.order.prompt, self.tokens)),
        }
    }

    fn figures(&self, table: &CostTable, reason: FinishReason) -> RequestFigures {
        RequestFigures {
            request: self.attempt.request.clone(),
            attempt: self.attempt.attempt,
            caller: self.caller.clone(),
            usage: self.usage(table),
            stages: Stages::default(),
            reason,
            tier: Tier::Interactive,
        }
    }
}

/// Returns the reference cost of an order.
pub(super) fn cost(table: &CostTable, prompt: u64, tokens: u64) -> u64 {
    table.request([PromptWork::of(prompt, false)], [(prompt, tokens)]).nanos()
}

pub(super) fn worker_name() -> WorkerName {
    WorkerName::new("w").expect("a name")
}

pub(super) fn model_name() -> ModelName {
    ModelName::new("m").expect("a name")
}

pub(super) fn device() -> Device {
    Device { class: DeviceClass::cpu(), name: "simulated".to_owned(), uuid: String::new() }
}
