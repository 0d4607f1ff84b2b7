//! The account of device time.
//!
//! Every step is booked once with its exact length, split over its sequences. Time between
//! two steps is idle. Billed, overhead and idle time therefore sum to the time since the
//! meter started, to the nanosecond.

use tollgate_domain::{CostTable, DeviceNanos, MonotonicTime, SequenceWork, StepCounts};

/// Meter of one engine: splits and sums the time of its steps.
#[derive(Debug)]
pub struct Meter {
    table: CostTable,
    /// Time up to which everything is booked.
    booked: MonotonicTime,
    totals: Totals,
    counts: StepCounts,
}

/// Totals since the meter started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Number of booked steps.
    pub steps: u64,
    /// Device time of requests.
    pub billed: DeviceNanos,
    /// Device time of the platform's own work.
    pub overhead: DeviceNanos,
    /// Time between steps.
    pub idle: DeviceNanos,
}

impl Totals {
    /// Returns the device time of all steps.
    pub fn busy(&self) -> DeviceNanos {
        self.billed + self.overhead
    }
}

/// The account that pays for a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Payer {
    /// The request that the work belongs to.
    Request,
    /// The platform: the work was done before and was lost by a preemption.
    Overhead,
}

/// A booked step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BookedStep {
    /// Number of the step, from 1 without gaps.
    pub step: u64,
    /// Start of the step; never before the end of the step before.
    pub started: MonotonicTime,
    /// Duration of the step.
    pub busy: DeviceNanos,
    /// The duration split over the works, in their order.
    pub shares: Vec<DeviceNanos>,
}

impl Meter {
    /// Creates a meter that starts at `start`.
    pub fn new(table: CostTable, start: MonotonicTime) -> Self {
        Self { table, booked: start, totals: Totals::default(), counts: StepCounts::default() }
    }

    /// Returns the cost table.
    pub fn table(&self) -> &CostTable {
        &self.table
    }

    /// Returns the time up to which everything is booked. No step starts before it.
    pub fn booked(&self) -> MonotonicTime {
        self.booked
    }

    /// Returns the totals so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Returns the booked steps by length and by sequences.
    pub fn counts(&self) -> StepCounts {
        self.counts
    }

    /// Books the step that ran `works` from `started` to `ended`. Each work has a payer at
    /// the same index. At least one work is required.
    pub fn book(
        &mut self,
        started: MonotonicTime,
        ended: MonotonicTime,
        works: &[SequenceWork],
        payers: &[Payer],
    ) -> BookedStep {
        assert!(!works.is_empty(), "a step has work");
        assert_eq!(works.len(), payers.len(), "every work has a payer");
        // Steps never overlap, even if the clock is inconsistent.
        let started = started.max(self.booked);
        // A clock that went back gives an empty step instead of an overflow.
        let ended = ended.max(started);
        let busy = DeviceNanos(ended.0 - started.0);
        let shares = self.table.attribute(busy, works);
        // Idle is derived from the same two numbers as busy, so no nanosecond is lost
        // between them.
        self.totals.idle += DeviceNanos(started.0 - self.booked.0);
        self.totals.steps += 1;
        self.counts.add(busy, works.len());
        self.booked = ended;
        for (share, payer) in shares.iter().zip(payers) {
            match payer {
                Payer::Request => self.totals.billed += *share,
                Payer::Overhead => self.totals.overhead += *share,
            }
        }
        BookedStep { step: self.totals.steps, started, busy, shares }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tollgate_domain::SequenceId;

    use super::*;
    use crate::testing::table;

    proptest! {
        #[test]
        fn booked_time_is_the_elapsed_time(
            steps in prop::collection::vec(
                // A gap that may be negative, a length, a number of works, and their payers
                // as bits.
                (-50i64..1_000, -10i64..1_000_000, 1usize..20, any::<u32>()),
                0..60,
            ),
        ) {
            let start = MonotonicTime(1_000);
            let mut meter = Meter::new(table(), start);
            let mut end = start;
            let mut busy = DeviceNanos::ZERO;
            for (number, (gap, length, count, payers)) in (1u64..).zip(steps) {
                let works: Vec<SequenceWork> = (0..count as u64)
                    .map(|id| SequenceWork {
                        sequence: SequenceId(id), new_tokens: 1 + id as u32, logit_rows: 1, context: 7,
                    })
                    .collect();
                let payers: Vec<Payer> = (0..count)
                    .map(|i| if payers >> i & 1 == 0 { Payer::Request } else { Payer::Overhead })
                    .collect();
                let started = MonotonicTime(end.0.saturating_add_signed(gap));
                let ended = MonotonicTime(started.0.saturating_add_signed(length));
                let booked = meter.book(started, ended, &works, &payers);
                prop_assert_eq!(booked.step, number);
                prop_assert!(booked.started >= end);
                prop_assert_eq!(booked.shares.iter().copied().sum::<DeviceNanos>(), booked.busy);
                end = MonotonicTime(booked.started.0 + booked.busy.nanos());
                busy += booked.busy;
            }
            let totals = meter.totals();
            prop_assert_eq!(totals.busy(), busy);
            prop_assert_eq!(meter.counts().steps(), totals.steps);
            prop_assert_eq!(totals.busy() + totals.idle, DeviceNanos(end.0 - start.0));
        }
    }
}
