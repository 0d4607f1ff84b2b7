//! Spend against a calendar cap. Settled and held together never exceed the
//! cap, because a hold never exceeds what remains and a settlement never
//! exceeds its hold: the worker stops before the budget.
//!
//! Spend belongs to the period in which it ends, as the ledger books it. So a
//! hold that is open when a period begins counts against that one from then on.

use tollgate_domain::DeviceNanos;

/// What has been spent and promised in one calendar period, by its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spend {
    period: u32,
    settled: DeviceNanos,
    held: DeviceNanos,
}

impl Spend {
    /// Moves on to `period`, in which nothing has been spent yet, with all that
    /// is held; a calendar that seems to go back changes nothing.
    pub(crate) fn roll(&mut self, period: u32) {
        if period > self.period {
            *self = Self { period, settled: DeviceNanos::ZERO, held: self.held };
        }
    }

    pub(crate) fn remaining(&self, cap: DeviceNanos) -> DeviceNanos {
        cap.saturating_sub(plus(self.settled, self.held))
    }

    pub(crate) fn hold(&mut self, amount: DeviceNanos) {
        self.held = plus(self.held, amount);
    }

    /// Ends a hold of `held`, whenever it was made, of which `spent` is charged
    /// to the period that was last moved on to.
    pub(crate) fn settle(&mut self, held: DeviceNanos, spent: DeviceNanos) {
        self.held = self.held.saturating_sub(held);
        self.settled = plus(self.settled, spent);
    }

    /// Adds what was spent in `period` before anything was held here; of an
    /// earlier period than is known it concerns no cap any more.
    pub(crate) fn restore(&mut self, period: u32, spent: DeviceNanos) {
        self.roll(period);
        if period == self.period {
            self.settled = plus(self.settled, spent);
        }
    }

    /// Whether nothing of it need be remembered once `period` has come.
    pub(crate) fn is_over(&self, period: u32) -> bool {
        self.held == DeviceNanos::ZERO
            && (self.period < period || self.settled == DeviceNanos::ZERO)
    }
}

/// Saturating: a lying report can fill a cap, and not empty it by wrapping.
fn plus(a: DeviceNanos, b: DeviceNanos) -> DeviceNanos {
    DeviceNanos(a.nanos().saturating_add(b.nanos()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_period_starts_with_what_is_held_and_bears_what_ends_in_it() {
        let cap = DeviceNanos(100);
        let mut spend = Spend::default();
        spend.roll(5);
        spend.hold(DeviceNanos(60));
        assert_eq!(spend.remaining(cap), DeviceNanos(40));
        spend.settle(DeviceNanos(60), DeviceNanos(30));
        assert_eq!(spend.remaining(cap), DeviceNanos(70));

        spend.hold(DeviceNanos(70));
        spend.roll(4); // the calendar does not go back
        assert_eq!(spend.remaining(cap), DeviceNanos::ZERO);
        spend.roll(6);
        assert_eq!(spend.remaining(cap), DeviceNanos(30));
        assert!(!spend.is_over(7), "something is held");
        spend.settle(DeviceNanos(70), DeviceNanos(50)); // held since yesterday
        assert_eq!(spend.remaining(cap), DeviceNanos(50));
        assert!(!spend.is_over(6));
        assert!(spend.is_over(7));

        spend.restore(5, DeviceNanos(9)); // of a day that is over
        assert_eq!(spend.remaining(cap), DeviceNanos(50));
        spend.restore(6, DeviceNanos(9));
        assert_eq!(spend.remaining(cap), DeviceNanos(41));
        spend.restore(7, DeviceNanos(1));
        assert_eq!(spend.remaining(cap), DeviceNanos(99));
    }

    #[test]
    fn a_lie_fills_the_cap_and_no_more() {
        let mut spend = Spend::default();
        spend.settle(DeviceNanos::ZERO, DeviceNanos(u64::MAX));
        spend.settle(DeviceNanos::ZERO, DeviceNanos(u64::MAX));
        assert_eq!(spend.remaining(DeviceNanos(5)), DeviceNanos::ZERO);
    }
}
