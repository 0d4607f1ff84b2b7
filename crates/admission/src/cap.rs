//! Spend against a calendar cap. Settled and held amounts together never exceed the cap: a
//! hold never exceeds the rest, and a settlement never exceeds its hold, because the worker
//! stops before the budget. Where several gateways share the caps, a hold never exceeds the rest
//! of this gateway's slice either.
//!
//! Spend belongs to the period in which the request ends, like in the ledger. An open hold
//! therefore counts against every period that begins while it is open.

use std::time::Duration;

use tollgate_cluster::{Answer, Ask, Order, Slice, Taken, Wanted};
use tollgate_domain::{DeviceNanos, ExactAmount, MonotonicTime};

/// The unit of a cap. A sum or a difference that does not fit saturates: a wrong report can
/// fill a cap but cannot empty it by overflow.
pub(crate) trait Unit: Copy + Default + PartialEq {
    fn plus(self, other: Self) -> Self;
    fn minus(self, other: Self) -> Self;
    /// Returns the amount as a number.
    fn count(self) -> u128;
    /// Returns the smaller amount.
    fn least(self, other: Self) -> Self {
        if self.count() < other.count() { self } else { other }
    }
    /// Returns the amount in billionths, rounded up.
    fn nanos_up(self) -> u64;
    /// Returns the amount of this many billionths.
    fn of_nanos(nanos: u64) -> Self;
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

    fn nanos_up(self) -> u64 {
        self.nanos()
    }

    fn of_nanos(nanos: u64) -> Self {
        Self(nanos)
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

    fn nanos_up(self) -> u64 {
        u64::try_from(self.0.div_ceil(Self::of_nanos(1).0)).unwrap_or(u64::MAX)
    }

    fn of_nanos(nanos: u64) -> Self {
        Self::of_nanos(nanos)
    }
}

/// Settled and held amounts in one calendar period. The period is given by its index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spend<U> {
    period: u32,
    settled: U,
    held: U,
    /// True if the last threshold was reported in the period.
    is_full: bool,
    /// This gateway's part of the cap; `None` if the whole cap is its own. In a box, because
    /// most gateways have none, and there may be many scopes.
    share: Option<Box<Share>>,
}

/// The part of a cap that one of several gateways may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    slice: Slice,
    /// The time of the last answer that tells of the cap; `None` before the first.
    answered: Option<MonotonicTime>,
    /// The spend that the database knows.
    told: u64,
    /// The spend at the last beat, and what was spent from beat to beat on average.
    at_beat: u64,
    pace: u64,
}

/// The settled and held amounts in one period.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SpendView<U> {
    settled: U,
    held: U,
    share: Option<Share>,
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
            let share = self.share.take().map(|share| Box::new(share.rolled()));
            *self = Self { period, held: self.held, share, ..Self::default() };
        }
    }

    /// Returns the amounts in `period`, which may not have been seen yet.
    pub(crate) fn view(&self, period: u32) -> SpendView<U> {
        let Self { settled, held, .. } = *self;
        let share = self.share.as_deref().copied();
        if period <= self.period {
            return SpendView { settled, held, share };
        }
        SpendView { settled: U::default(), held, share: share.map(Share::rolled) }
    }

    /// Returns the amounts in the period that was seen last.
    pub(crate) fn now(&self) -> SpendView<U> {
        self.view(self.period)
    }

    /// Returns true if this gateway has only a slice of the cap.
    pub(crate) fn has_share(&self) -> bool {
        self.share.is_some()
    }

    /// Makes the cap one of which this gateway has a slice.
    pub(crate) fn share(&mut self) {
        self.share.get_or_insert_default();
    }

    fn taken(&self) -> Taken {
        self.now().taken()
    }

    /// Begins a call for `need` more than is spare, with what is expected beyond it.
    pub(crate) fn ask_for(&mut self, order: Order, asked: u64) -> Option<(u32, Ask)> {
        let (period, taken) = (self.period, self.taken());
        let share = self.share.as_mut()?;
        let need = asked.saturating_sub(share.slice.spare(taken));
        // At the first request the pace is unknown. What is not needed goes back soon.
        let expected = share.pace.saturating_mul(BEATS_AHEAD).max(need.saturating_mul(8));
        let wanted = Wanted { keep: u64::MAX, need, expected };
        Some((period, share.slice.ask(order, taken, wanted)))
    }

    /// Notes a beat at `now`, and begins a call if the database should know something or get
    /// something back. `is_hungry` is true if other gateways lack some of the cap.
    pub(crate) fn ask_at_beat(
        &mut self,
        now: MonotonicTime,
        order: Order,
        is_hungry: bool,
    ) -> Option<(u32, Ask)> {
        let (period, taken) = (self.period, self.taken());
        let share = self.share.as_mut()?;
        let spent = taken.used.saturating_sub(share.at_beat);
        share.at_beat = taken.used;
        // A mean over about four beats. It ends at zero, so that an idle slice goes back.
        share.pace = share.pace.saturating_mul(3).saturating_add(spent) / 4;
        let ahead = share.pace.saturating_mul(BEATS_AHEAD);
        let keep = if is_hungry { 0 } else { ahead };
        let (spare, slice) = (share.slice.spare(taken), &mut share.slice);
        let surplus = spare.saturating_sub(keep);
        let lacks = taken.all() > slice.granted();
        let is_untold = taken.used != share.told
            && share.answered.is_none_or(|answered| now.since(answered) >= UNTOLD);
        let gives_back = surplus > if is_hungry { 0 } else { spare / 2 };
        // The first call of a period tells that nothing is brought from the one before.
        let is_begun = slice.is_known() && slice.was_asked_for();
        // Before requests lack some, so that they go on while the database is away. Not where the
        // cap has no room: each beat would ask again.
        let least = share.pace.saturating_mul(LEAST_BEATS_AHEAD);
        let is_low = !is_hungry && spare < least && slice.standing().rest > least;
        if is_begun && !lacks && !is_untold && !gives_back && !is_low {
            return None;
        }
        let expected = if is_low { ahead - spare } else { 0 };
        Some((period, slice.ask(order, taken, Wanted { keep, need: 0, expected })))
    }

    /// Begins the last call, which gives everything back.
    pub(crate) fn ask_at_stop(&mut self, order: Order) -> Option<(u32, Ask)> {
        let (period, taken) = (self.period, self.taken());
        let share = self.share.as_mut()?;
        Some((period, share.slice.ask(order, taken, Wanted::default())))
    }

    /// Adopts the answer to a call.
    pub(crate) fn answered(
        &mut self,
        now: Option<MonotonicTime>,
        (period, used): (u32, u64),
        answer: &Answer,
        is_settled: bool,
    ) {
        if period != self.period {
            return;
        }
        let Some(share) = &mut self.share else { return };
        share.slice.answered(answer, used, is_settled);
        (share.answered, share.told) = (now, used);
    }

    /// Notes that all work of earlier lives of the gateway is settled.
    pub(crate) fn settle_earlier(&mut self) {
        self.share.iter_mut().for_each(|share| share.slice.settled());
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
        let settled = self.settled_of_all();
        let now = reached(settled);
        if self.is_full || now == reached(settled.minus(spent)) {
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
        is_part(self.settled_of_all(), cap, NEARLY_SPENT)
    }

    /// Returns the settled amount with that of the other gateways, as far as it is known.
    fn settled_of_all(&self) -> U {
        let elsewhere = self.share.as_ref().map(|share| share.slice.standing().used_elsewhere);
        self.settled.plus(elsewhere.map_or(U::default(), U::of_nanos))
    }

    /// Forgets the settled amounts, which were not counted completely.
    pub(crate) fn forget_settled(&mut self) {
        self.settled = U::default();
    }

    /// Returns true if nothing must be remembered once `period` has begun.
    pub(crate) fn is_over(&self, period: u32) -> bool {
        let has_slice = self.share.as_ref().is_some_and(|share| share.slice.granted() > 0);
        self.held == U::default()
            && (self.period < period || (self.settled == U::default() && !has_slice))
    }
}

impl<U: Unit> SpendView<U> {
    /// Returns what this gateway may still take of `cap`.
    pub(crate) fn remaining(&self, cap: U) -> U {
        let own = cap.minus(self.settled.plus(self.held));
        let Some(share) = &self.share else { return own };
        let spare = U::of_nanos(share.slice.spare(self.taken()));
        own.least(spare)
    }

    /// Returns what is left of `cap` if every open hold is given back unused.
    pub(crate) fn remaining_without_holds(&self, cap: U) -> U {
        match self.share {
            None => cap.minus(self.settled),
            Some(_) => self.remaining(cap).plus(self.held),
        }
    }

    /// Returns what all gateways together may still take of `cap`, as far as this one knows.
    pub(crate) fn remaining_of_all(&self, cap: U) -> U {
        let own = cap.minus(self.settled.plus(self.held));
        let Some(share) = self.share.filter(|share| share.slice.is_known()) else { return own };
        let all = share.slice.spare(self.taken()).saturating_add(share.slice.standing().rest);
        let all = U::of_nanos(all);
        own.least(all)
    }

    /// Returns true if the slice lacks some of `asked`, and the database may have it.
    pub(crate) fn should_ask(&self, now: MonotonicTime, asked: u64) -> bool {
        self.share.is_some_and(|share| {
            // An answer without a rest counts for a while, so that requests that are refused
            // cost the database little.
            let may_get = !share.slice.is_known()
                || share.slice.standing().rest > 0
                || share.answered.is_none_or(|answered| now.since(answered) >= ANSWER_COUNTS);
            may_get && share.slice.spare(self.taken()) < asked
        })
    }

    /// Returns true if the database may have more of the cap later in the period.
    pub(crate) fn may_get_more(&self) -> bool {
        self.share.is_some_and(|share| !share.slice.is_at_end())
    }

    fn taken(&self) -> Taken {
        Taken { used: self.settled.nanos_up(), held: self.held.nanos_up() }
    }
}

impl Share {
    /// Returns the share in the next period.
    fn rolled(self) -> Self {
        let Self { mut slice, pace, answered, .. } = self;
        slice.roll();
        Self { slice, pace, answered, ..Self::default() }
    }
}

/// The beats for which a gateway keeps or asks for what it spends in a beat.
const BEATS_AHEAD: u64 = 180;
/// The beats for which it has enough at least, as far as the cap allows: slices are valid for 90 s
/// without the database.
const LEAST_BEATS_AHEAD: u64 = 100;
/// The time after which the database hears of spend that changes nothing else.
const UNTOLD: Duration = Duration::from_secs(5);
/// The time for which an answer counts that the cap has no rest.
const ANSWER_COUNTS: Duration = Duration::from_secs(1);

/// Returns true if `used` is at least `part` percent of `cap`.
fn is_part<U: Unit>(used: U, cap: U, part: u8) -> bool {
    // Multiplied and not divided, so that no rounding moves a threshold.
    used.count().saturating_mul(100) >= cap.count().saturating_mul(part.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn left(spend: &Spend<DeviceNanos>, cap: DeviceNanos) -> DeviceNanos {
        spend.view(spend.period).remaining(cap)
    }

    #[test]
    fn new_period_keeps_holds_and_gets_their_spend() {
        let cap = DeviceNanos(100);
        let mut spend = Spend::<DeviceNanos>::default();
        spend.roll(5);
        spend.hold(DeviceNanos(60));
        assert_eq!(left(&spend, cap), DeviceNanos(40));
        spend.settle(DeviceNanos(60), DeviceNanos(30));
        assert_eq!(left(&spend, cap), DeviceNanos(70));

        spend.hold(DeviceNanos(70));
        spend.roll(4); // the calendar does not go back
        assert_eq!(left(&spend, cap), DeviceNanos::ZERO);
        spend.roll(6);
        assert_eq!(left(&spend, cap), DeviceNanos(30));
        assert!(!spend.is_over(7), "something is held");
        spend.settle(DeviceNanos(70), DeviceNanos(50)); // held since yesterday
        assert_eq!(left(&spend, cap), DeviceNanos(50));
        assert!(!spend.is_over(6));
        assert!(spend.is_over(7));

        spend.restore(5, DeviceNanos(9)); // of a day that is over
        assert_eq!(left(&spend, cap), DeviceNanos(50));
        spend.restore(6, DeviceNanos(9));
        assert_eq!(left(&spend, cap), DeviceNanos(41));
        spend.restore(7, DeviceNanos(1));
        assert_eq!(left(&spend, cap), DeviceNanos(99));
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
        assert_eq!(left(&spend, DeviceNanos(5)), DeviceNanos::ZERO);
    }
}
