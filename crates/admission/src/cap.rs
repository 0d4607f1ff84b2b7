//! Spend against a calendar cap. Settled and held amounts together never exceed the cap: a
//! hold never exceeds the rest, and a settlement never exceeds its hold, because the worker
//! stops before the budget.
//!
//! Spend belongs to the period in which the request ends, like in the ledger. An open hold
//! therefore counts against every period that begins while it is open.

use tollgate_domain::{DeviceNanos, ExactAmount};

/// The unit of a cap. A sum or a difference that does not fit saturates: a wrong report can
/// fill a cap but cannot empty it by overflow.
pub(crate) trait Unit: Copy + Default + PartialEq {
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
}

impl Unit for DeviceNanos {
    fn plus(self, other: Self) -> Self {
        Self(self.nanos().saturating_add(other.nanos()))
    }

    fn minus(self, other: Self) -> Self {
        self.saturating_sub(other)
    }
}

impl Unit for ExactAmount {
    fn plus(self, other: Self) -> Self {
        self.plus(other)
    }

    fn minus(self, other: Self) -> Self {
        self.minus(other)
    }
}

/// Settled and held amounts in one calendar period. The period is given by its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spend<U> {
    period: u32,
    settled: U,
    held: U,
}

impl<U: Unit> Spend<U> {
    /// Advances to `period`, which has no spend yet, and keeps the held amounts. An earlier
    /// period changes nothing.
    pub(crate) fn roll(&mut self, period: u32) {
        if period > self.period {
            *self = Self { period, settled: U::default(), held: self.held };
        }
    }

    pub(crate) fn remaining(&self, cap: U) -> U {
        cap.minus(self.settled.plus(self.held))
    }

    pub(crate) fn hold(&mut self, amount: U) {
        self.held = self.held.plus(amount);
    }

    /// Ends a hold of `held` and charges `spent` to the current period, whenever the hold
    /// was made.
    pub(crate) fn settle(&mut self, held: U, spent: U) {
        self.held = self.held.minus(held);
        self.settled = self.settled.plus(spent);
    }

    /// Adds spend of `period` from the ledger. Spend of an earlier period concerns no cap
    /// and is ignored.
    pub(crate) fn restore(&mut self, period: u32, spent: U) {
        self.roll(period);
        if period == self.period {
            self.settled = self.settled.plus(spent);
        }
    }

    /// Forgets the settled amounts, which were not counted completely.
    pub(crate) fn forget_settled(&mut self) {
        self.settled = U::default();
    }

    /// Returns true if nothing must be remembered once `period` has begun.
    pub(crate) fn is_over(&self, period: u32) -> bool {
        self.held == U::default() && (self.period < period || self.settled == U::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn new_period_keeps_holds_and_gets_their_spend() {
        let cap = DeviceNanos(100);
        let mut spend = Spend::<DeviceNanos>::default();
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
    fn wrong_report_fills_cap_without_overflow() {
        let mut spend = Spend::<DeviceNanos>::default();
        spend.settle(DeviceNanos::ZERO, DeviceNanos(u64::MAX));
        spend.settle(DeviceNanos::ZERO, DeviceNanos(u64::MAX));
        assert_eq!(spend.remaining(DeviceNanos(5)), DeviceNanos::ZERO);
    }
}
