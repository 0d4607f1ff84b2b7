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
    /// Returns the amount as a number.
    fn count(self) -> u128;
}

impl Unit for DeviceNanos {
    fn plus(self, other: Self) -> Self {
        Self(self.nanos().saturating_add(other.nanos()))
    }

    fn minus(self, other: Self) -> Self {
        self.saturating_sub(other)
    }

    fn count(self) -> u128 {
        self.nanos().into()
    }
}

impl Unit for ExactAmount {
    fn plus(self, other: Self) -> Self {
        self.plus(other)
    }

    fn minus(self, other: Self) -> Self {
        self.minus(other)
    }

    fn count(self) -> u128 {
        self.0
    }
}

/// Settled and held amounts in one calendar period. The period is given by its index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spend<U> {
    period: u32,
    settled: U,
    held: U,
    /// True if the last threshold was reported in the period.
    is_full: bool,
}

/// Parts of a cap, in percent, that are reported when they are spent.
const THRESHOLDS: [u8; 3] = [50, 80, 100];
/// Part of a cap, in percent, from which on a refusal counts as the last threshold.
const NEARLY_SPENT: u8 = 80;

impl<U: Unit> Spend<U> {
    /// Advances to `period`, which has no spend yet, and keeps the held amounts. An earlier
    /// period changes nothing.
    pub(crate) fn roll(&mut self, period: u32) {
        if period > self.period {
            *self = Self { period, held: self.held, ..Self::default() };
        }
    }

    pub(crate) fn remaining(&self, cap: U) -> U {
        cap.minus(self.settled.plus(self.held))
    }

    /// Returns what is left of `cap` if every open hold is given back unused.
    pub(crate) fn remaining_without_holds(&self, cap: U) -> U {
        cap.minus(self.settled)
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

    /// Returns the largest threshold of `cap` that the last settled amount, `spent`, has
    /// reached. What was settled before, or is from the ledger, is not reported.
    pub(crate) fn newly_reached(&mut self, cap: U, spent: U) -> Option<u8> {
        let reached =
            |settled: U| THRESHOLDS.into_iter().rfind(|part| is_part(settled, cap, *part));
        let now = reached(self.settled);
        if self.is_full || now == reached(self.settled.minus(spent)) {
            return None;
        }
        self.is_full = now == Some(100);
        now
    }

    /// Notes that `cap` has refused a request. Returns true if the cap is nearly spent and
    /// the last threshold was not reported in this period.
    pub(crate) fn newly_refused(&mut self, cap: U) -> bool {
        let is_new = !self.is_full && self.is_nearly_spent(cap);
        self.is_full |= is_new;
        is_new
    }

    /// Reports the last threshold again if a larger cap has room.
    pub(crate) fn adopt(&mut self, cap: U) {
        self.is_full &= self.is_nearly_spent(cap);
    }

    fn is_nearly_spent(&self, cap: U) -> bool {
        is_part(self.settled, cap, NEARLY_SPENT)
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

/// Returns true if `used` is at least `part` percent of `cap`.
fn is_part<U: Unit>(used: U, cap: U, part: u8) -> bool {
    // Multiplied and not divided, so that no rounding moves a threshold.
    used.count().saturating_mul(100) >= cap.count().saturating_mul(part.into())
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
    fn threshold_is_reported_once_in_a_period() {
        let cap = DeviceNanos(100);
        let spent = |spend: &mut Spend<DeviceNanos>, amount| {
            spend.settle(DeviceNanos::ZERO, DeviceNanos(amount));
            spend.newly_reached(cap, DeviceNanos(amount))
        };
        let mut spend = Spend::<DeviceNanos>::default();
        spend.roll(5);
        assert_eq!(spent(&mut spend, 49), None);
        assert_eq!(spent(&mut spend, 1), Some(50));
        assert_eq!(spent(&mut spend, 1), None);
        assert_eq!(spent(&mut spend, 48), Some(80), "99 are spent");
        assert_eq!(spent(&mut spend, 1), Some(100));
        assert_eq!(spent(&mut spend, 1), None);
        assert!(!spend.newly_refused(cap), "reported already");
        spend.roll(6);
        assert_eq!(spent(&mut spend, 100), Some(100), "only the largest of several");
        spend.roll(7);
        spend.restore(7, DeviceNanos(60));
        assert_eq!(spent(&mut spend, 1), None, "half was spent before");
        assert!(!spend.newly_refused(cap), "the request was large, and much is left");
        spend.hold(DeviceNanos(39));
        assert!(!spend.newly_refused(cap), "what is held may come back");
        assert_eq!(spent(&mut spend, 30), Some(80));
        assert!(spend.newly_refused(cap));
        assert!(!spend.newly_refused(cap));
        spend.adopt(cap);
        assert!(!spend.newly_refused(cap), "the same cap");
        spend.adopt(DeviceNanos(1_000));
        spend.settle(DeviceNanos::ZERO, DeviceNanos(900));
        assert!(spend.newly_refused(DeviceNanos(1_000)), "a larger cap");
    }

    #[test]
    fn wrong_report_fills_cap_without_overflow() {
        let mut spend = Spend::<DeviceNanos>::default();
        spend.settle(DeviceNanos::ZERO, DeviceNanos(u64::MAX));
        spend.settle(DeviceNanos::ZERO, DeviceNanos(u64::MAX));
        assert_eq!(spend.remaining(DeviceNanos(5)), DeviceNanos::ZERO);
    }
}
