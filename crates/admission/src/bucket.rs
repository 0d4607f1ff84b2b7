//! A token bucket in integers, with a bounded debt. The level is counted in
//! sixty-billionths of a unit, so a refill of `per_minute` units is exact for any whole
//! number of nanoseconds. Rounding never creates units.
//!
//! Where several gateways share a rate, each has a bucket with its part of the burst and of
//! the refill. [`crate::lease`] moves parts between gateways.

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate_cluster::parts::{PartMode, WHOLE};
use tollgate_domain::{MonotonicTime, Rate};

use crate::lease::Lease;

/// One unit of the limit in the unit of the level: the nanoseconds of a minute.
const UNIT: i128 = 60_000_000_000;

/// The units that a request may take from a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Demand {
    /// Units that are taken at once.
    pub(crate) expected: u64,
    /// Largest number of units that the request can use within a minute.
    pub(crate) most: u64,
}

impl Demand {
    /// Returns the demand of a request whose cost is known.
    pub(crate) fn exact(units: u64) -> Self {
        Self { expected: units, most: units }
    }

    /// Returns the units that may become debt.
    pub(crate) fn risk(self) -> i128 {
        scaled(self.most.saturating_sub(self.expected))
    }

    /// Returns the level that leaves half of `burst` as debt at most, if the open demands use
    /// `risk` beyond what they have taken.
    pub(crate) fn needs(self, burst: i128, risk: i128) -> i128 {
        let beyond = risk.saturating_add(self.risk()).saturating_sub(burst / 2).max(0);
        scaled(self.expected).saturating_add(beyond)
    }
}

/// The condition under which a bucket can give a demand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fit {
    /// The bucket can give the demand now.
    Now,
    /// The bucket can give the demand after this time, from the last refill.
    After(Duration),
    /// The open demands may leave too large a debt, so one of them must end first.
    AfterAnother,
    /// Even a full bucket cannot give the expected units, or the bucket never refills.
    Never,
    /// Even a full bucket without open demands could go more than half a burst into debt.
    NeverSoMuch,
}

/// A token bucket of one rate. A full bucket gives `burst` units at once, and at most
/// `burst + per_minute t / 60 s` over any interval t. If a settlement exceeds its hold, the
/// excess is a debt that must be refilled before the bucket gives anything.
///
/// The debt is bounded: the bucket gives nothing that could take the level below minus half
/// a burst if every open demand used its most. So one demand may use 1.5 bursts at most.
///
/// A bucket of one of several gateways has a part of the burst and of the refill. An equal part
/// gives a larger demand, up to the bounds of the whole rate, when it is full and nothing else
/// is open; the excess is a debt. A part that can grow gives no such demand: it grows first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// The rate of all gateways together.
    pub(crate) rate: Rate,
    /// This gateway's parts of the rate, of [`WHOLE`].
    pub(crate) part: u64,
    /// The number of gateways that share the rate.
    pub(crate) gateways: NonZeroU32,
    /// The state of the parts, if they move between gateways.
    pub(crate) lease: Option<Lease>,
    /// The rest of the last refill, in the unit of the level divided by [`WHOLE`].
    carry: i128,
    // Signed, because a debt is a level below zero.
    pub(crate) level: i128,
    /// Sum of `most - expected` over the open demands, in the unit of the level.
    pub(crate) risk: i128,
    /// The part of `risk` of the demands that wait, if several tenants share the bucket.
    waiting_risk: i128,
    refilled: MonotonicTime,
}

impl Bucket {
    pub(crate) fn full(rate: Rate, now: MonotonicTime) -> Self {
        let (gateways, level) = (NonZeroU32::MIN, scaled(rate.burst));
        let (part, lease, refilled) = (WHOLE, None, now);
        Self { rate, part, gateways, lease, carry: 0, level, risk: 0, waiting_risk: 0, refilled }
    }

    /// Changes the number of gateways that share the rate, and with it the part of this one
    /// unless it moves. Call [`Self::refill`] first.
    pub(crate) fn share_among(&mut self, gateways: NonZeroU32) {
        self.gateways = gateways;
        let equal = WHOLE / u64::from(gateways.get());
        match self.mode() {
            PartMode::Leased => {}
            PartMode::Ended => self.set_part(0),
            PartMode::Narrowed => self.set_part(self.part.min(equal)),
            PartMode::Divided => self.set_part(equal),
        }
    }

    /// Changes the part. Taken units stay taken. A smaller part loses its excess, a larger one
    /// fills with time.
    pub(crate) fn set_part(&mut self, part: u64) {
        if part != self.part {
            (self.part, self.carry) = (part, 0);
            self.level = self.level.min(self.capacity());
        }
    }

    /// Takes all units. A debt stays.
    pub(crate) fn empty(&mut self) {
        self.level = self.level.min(0);
    }

    /// Returns the way in which the rate may be used. Without a lease it is divided.
    pub(crate) fn mode(&self) -> PartMode {
        self.lease.as_ref().map_or(PartMode::Divided, Lease::mode)
    }

    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Changes the rate. Taken units stay taken. A smaller bucket loses its excess, a
    /// larger bucket fills with time.
    pub(crate) fn adopt(&mut self, rate: Rate) {
        self.rate = rate;
        self.level = self.level.min(self.capacity());
    }

    /// Refills the bucket up to `now`. A `now` before the last refill changes nothing;
    /// concurrent threads can cause this.
    pub(crate) fn refill(&mut self, now: MonotonicTime) {
        let elapsed = now.0.saturating_sub(self.refilled.0);
        if elapsed > 0 {
            let grown = i128::from(elapsed).saturating_mul(i128::from(self.rate.per_minute));
            let grown = grown.saturating_mul(i128::from(self.part)).saturating_add(self.carry);
            self.carry = grown % i128::from(WHOLE);
            let grown = grown / i128::from(WHOLE);
            self.level = self.level.saturating_add(grown).min(self.capacity());
            // `refilled` moves only forward, so an interval is never counted twice.
            self.refilled = now;
        }
    }

    /// Returns the condition under which the bucket can give `demand`.
    pub(crate) fn fit(&self, demand: Demand) -> Fit {
        let (full, whole) = (self.capacity(), scaled(self.rate.burst));
        let expected = scaled(demand.expected);
        if expected > whole {
            return Fit::Never;
        }
        // Refused for good, also by an idle bucket. If an idle bucket gave such a demand, a
        // busy one would refuse it each time, and no client could tell when to ask.
        if demand.needs(whole, 0) > whole {
            return Fit::NeverSoMuch;
        }
        let needed = demand.needs(full, self.risk);
        let others_block = self.risk > 0 && needed > full;
        // If others block, the level that the demand needs in any case, so that a wait is
        // told if there is one. A demand that exceeds an equal part needs a full bucket.
        let needed = if others_block { expected } else { needed };
        if self.mode() == PartMode::Divided {
            return self.fit_at(needed.min(full), others_block);
        }
        match self.fit_at(needed, others_block) {
            // The part must grow first.
            Fit::Now if needed > full => Fit::After(NEXT_BEAT),
            fit => fit,
        }
    }

    /// Returns the condition under which the bucket has the level `needed`.
    fn fit_at(&self, needed: i128, others_block: bool) -> Fit {
        match self.time_to(needed) {
            None => Fit::Never,
            Some(Duration::ZERO) if others_block => Fit::AfterAnother,
            Some(Duration::ZERO) => Fit::Now,
            Some(wait) => Fit::After(wait),
        }
    }

    /// Returns true if `demand` may wait for a place. In a bucket of several tenants, the
    /// demands that wait may risk a quarter of a burst together: they cost nothing while
    /// they wait, and must not keep the demands of others from running.
    pub(crate) fn may_wait(&self, demand: Demand) -> bool {
        let risk = demand.risk();
        // A demand without risk keeps no other from running.
        risk == 0 || self.waiting_risk.saturating_add(risk) <= self.capacity() / 4
    }

    /// Counts a taken demand among those that wait.
    pub(crate) fn begin_wait(&mut self, demand: Demand) {
        self.waiting_risk = self.waiting_risk.saturating_add(demand.risk());
    }

    /// Counts a demand no longer among those that wait.
    pub(crate) fn end_wait(&mut self, demand: Demand) {
        // Not below zero: the demand may be older than this bucket.
        self.waiting_risk = self.waiting_risk.saturating_sub(demand.risk()).max(0);
    }

    /// Returns the largest `most` that a demand may have: 1.5 bursts, rounded down.
    pub(crate) fn largest_most(&self) -> u64 {
        let burst = self.rate.burst;
        // A demand may take a full bucket and leave half a burst of debt.
        burst.saturating_add(burst / 2)
    }

    /// Takes `demand`. The caller must have checked with [`Self::fit`] that it fits.
    pub(crate) fn take(&mut self, demand: Demand) {
        self.level = self.level.saturating_sub(scaled(demand.expected));
        self.risk = self.risk.saturating_add(demand.risk());
        if let Some(lease) = &mut self.lease {
            lease.count(demand.expected, self.refilled);
        }
    }

    /// Replaces a taken demand by the true cost. The excess of the hold is returned, or the
    /// excess of the cost becomes debt.
    pub(crate) fn settle(&mut self, held: Demand, true_cost: u64) {
        self.level = self
            .level
            // Capped at the capacity: a rate that was lowered in between must not overflow
            // its new bucket.
            .saturating_add(scaled(held.expected))
            .saturating_sub(scaled(true_cost))
            .min(self.capacity());
        // Not below zero: the demand may be older than this bucket.
        self.risk = self.risk.saturating_sub(held.risk()).max(0);
        if let Some(lease) = &mut self.lease {
            lease.correct(held.expected, true_cost);
        }
    }

    /// Returns the whole units that can be taken now; zero in debt. Where gateways share the
    /// rate, an estimate of the units that all of them have.
    pub(crate) fn remaining(&self) -> u64 {
        let of_all = match &self.lease {
            Some(lease) if lease.mode() == PartMode::Leased => {
                // What other gateways have is not known, but can be had from them.
                let known = self.level.saturating_add(self.units(lease.pooled()));
                if lease.is_new() { scaled(self.rate.burst) } else { known.max(0) }
            }
            _ if self.is_full() => return self.rate.burst,
            _ => {
                let level = self.level.max(0).saturating_mul(WHOLE.into());
                level / i128::from(self.part.max(1))
            }
        };
        u64::try_from(of_all / UNIT).unwrap_or(u64::MAX).min(self.rate.burst)
    }

    /// Returns the time until the bucket is full if nothing is taken, or the longest
    /// duration if it never refills.
    pub(crate) fn reset(&self) -> Duration {
        if self.mode() == PartMode::Divided {
            return self.time_to(self.capacity()).unwrap_or(Duration::MAX);
        }
        let lacking = scaled(self.rate.burst.saturating_sub(self.remaining()));
        match lacking {
            0 => Duration::ZERO,
            lacking => self.time_of(lacking, WHOLE, 0).unwrap_or(Duration::MAX),
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.level >= self.capacity()
    }

    /// Returns true if the bucket is full and has nothing that other gateways lack, so that a
    /// `new` one is as good.
    pub(crate) fn can_be_forgotten(&self, new: impl FnOnce() -> Self) -> bool {
        if !self.is_full() {
            return false;
        }
        match &self.lease {
            None => true,
            // While the store does not answer, a new bucket may not be full.
            Some(lease) if lease.mode() == PartMode::Divided => new().is_full(),
            Some(lease) => lease.is_over(self.part),
        }
    }

    /// Returns this gateway's part of the burst, in the unit of the level.
    pub(crate) fn capacity(&self) -> i128 {
        self.units(self.part)
    }

    /// Returns the level of `parts` of the burst.
    pub(crate) fn units(&self, parts: u64) -> i128 {
        scaled(self.rate.burst).saturating_mul(parts.into()) / i128::from(WHOLE)
    }

    fn time_to(&self, level: i128) -> Option<Duration> {
        let lacking = level.saturating_sub(self.level);
        if lacking <= 0 {
            return Some(Duration::ZERO);
        }
        if self.mode() == PartMode::Divided {
            // What the last refill left over counts.
            return self.time_of(lacking, self.part, self.carry);
        }
        // As if the gateway had an equal part: it gets one, if it asks again.
        let part = self.part.max(WHOLE / u64::from(self.gateways.get()));
        let time = self.time_of(lacking, part, 0);
        time.or_else(|| (self.part < WHOLE).then_some(NEXT_BEAT))
    }

    /// Returns the time in which `part` refills what is lacking, less `carry`.
    fn time_of(&self, lacking: i128, part: u64, carry: i128) -> Option<Duration> {
        let refill = i128::from(self.rate.per_minute).saturating_mul(part.into());
        if refill == 0 {
            return None;
        }
        let lacking = lacking.saturating_mul(WHOLE.into()).saturating_sub(carry);
        let nanos = (lacking - 1) / refill + 1; // rounded up: lacking is positive
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

/// The time after which a gateway that others wait for has given back what it can.
pub(crate) const NEXT_BEAT: Duration = Duration::from_secs(1);

pub(crate) fn scaled(units: u64) -> i128 {
    i128::from(units) * UNIT // below 2^64 * 2^36
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn take_at(bucket: &mut Bucket, now: u64, units: u64) -> bool {
        bucket.refill(MonotonicTime(now));
        let fits = bucket.fit(Demand::exact(units)) == Fit::Now;
        if fits {
            bucket.take(Demand::exact(units));
        }
        fits
    }

    #[test]
    fn bucket_gives_burst_then_one_per_refill() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(7));
        for _ in 0..60 {
            assert!(take_at(&mut bucket, 7, 1));
        }
        assert!(!take_at(&mut bucket, 7, 1));
        assert_eq!(bucket.fit(Demand::exact(1)), Fit::After(Duration::from_secs(1)));
        assert_eq!(bucket.reset(), Duration::from_secs(60));
        assert!(!take_at(&mut bucket, 7 + SECOND - 1, 1));
        assert!(take_at(&mut bucket, 7 + SECOND, 1));
        assert!(!take_at(&mut bucket, 7 + SECOND, 1));
    }

    #[test]
    fn bucket_repays_debt_before_giving() {
        let mut bucket = Bucket::full(Rate { per_minute: 60, burst: 10 }, MonotonicTime(0));
        bucket.take(Demand::exact(10));
        bucket.settle(Demand::exact(10), 25); // 15 in debt
        assert_eq!(bucket.remaining(), 0);
        assert_eq!(bucket.fit(Demand::exact(0)), Fit::After(Duration::from_secs(15)));
        assert_eq!(bucket.fit(Demand::exact(1)), Fit::After(Duration::from_secs(16)));
        assert!(!take_at(&mut bucket, 16 * SECOND - 1, 1));
        assert!(take_at(&mut bucket, 16 * SECOND, 1));
    }

    #[test]
    fn open_risk_leaves_half_a_burst_of_debt() {
        let mut bucket = Bucket::full(Rate { per_minute: 60, burst: 100 }, MonotonicTime(0));
        let taught = Demand { expected: 1, most: 40 };
        for _ in 0..3 {
            assert_eq!(bucket.fit(taught), Fit::Now);
            bucket.take(taught);
        }
        // 3 are taken and 117 are at risk. Another 40 could end 59 in debt of a full bucket.
        assert_eq!(bucket.fit(taught), Fit::AfterAnother);
        assert_eq!(
            bucket.fit(Demand { expected: 1, most: 31 }),
            Fit::After(Duration::from_secs(1))
        );
        assert_eq!(bucket.fit(Demand::exact(30)), Fit::Now);
        assert_eq!(bucket.fit(Demand::exact(34)), Fit::AfterAnother);
        bucket.settle(taught, 40);
        assert_eq!(bucket.fit(taught), Fit::After(Duration::from_secs(10)));
        bucket.settle(taught, 1);
        assert_eq!(bucket.fit(taught), Fit::Now);
    }

    #[test]
    fn demand_beyond_one_and_half_bursts_never_fits() {
        for burst in [1, 2, 99, 100, 101] {
            let bucket = Bucket::full(Rate { per_minute: 60, burst }, MonotonicTime(0));
            let most = bucket.largest_most();
            for expected in [0, 1, burst] {
                assert_eq!(bucket.fit(Demand { expected, most }), Fit::Now, "{burst}");
                let larger = Demand { expected, most: most + 1 };
                assert_eq!(bucket.fit(larger), Fit::NeverSoMuch, "{burst}");
            }
        }
        // Load makes no difference: the answer is the same for a bucket in use.
        let mut bucket = Bucket::full(Rate { per_minute: 60, burst: 100 }, MonotonicTime(0));
        bucket.take(Demand { expected: 1, most: 149 });
        assert_eq!(bucket.fit(Demand { expected: 10, most: 151 }), Fit::NeverSoMuch);
        assert_eq!(bucket.fit(Demand { expected: 101, most: 151 }), Fit::Never);
        assert_eq!(bucket.fit(Demand { expected: 10, most: 150 }), Fit::AfterAnother);
    }

    #[test]
    fn bucket_ignores_time_that_goes_back() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(10 * SECOND));
        bucket.take(Demand::exact(60));
        bucket.refill(MonotonicTime(0));
        assert_eq!(bucket.remaining(), 0);
        bucket.refill(MonotonicTime(11 * SECOND));
        assert_eq!(bucket.remaining(), 1);
    }

    #[test]
    fn changed_rate_keeps_taken_units() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(0));
        bucket.take(Demand::exact(50));
        bucket.adopt(Rate::per_minute(5));
        assert_eq!(bucket.remaining(), 5);
        bucket.adopt(Rate::per_minute(100));
        assert_eq!(bucket.remaining(), 5);
        assert_eq!(bucket.fit(Demand::exact(101)), Fit::Never);
    }

    fn shared(rate: Rate, gateways: u32) -> Bucket {
        let mut bucket = Bucket::full(rate, MonotonicTime(0));
        bucket.share_among(NonZeroU32::new(gateways).expect("some gateway"));
        bucket
    }

    #[test]
    fn shared_bucket_gives_its_part_and_refills_slower() {
        let mut bucket = shared(Rate { per_minute: 60, burst: 30 }, 3);
        assert_eq!(bucket.remaining(), 30, "of all gateways");
        (0..10).for_each(|_| assert!(take_at(&mut bucket, 0, 1)));
        assert_eq!(bucket.fit(Demand::exact(1)), Fit::After(Duration::from_secs(3)));
        assert!(!take_at(&mut bucket, 3 * SECOND - 1, 1));
        assert!(take_at(&mut bucket, 3 * SECOND, 1));
        bucket.share_among(NonZeroU32::MIN);
        assert!(!take_at(&mut bucket, 4 * SECOND - 1, 1), "taken units stay taken");
        assert!(take_at(&mut bucket, 4 * SECOND, 1));
    }

    #[test]
    fn large_demand_passes_when_shared_bucket_is_full() {
        let mut bucket = shared(Rate { per_minute: 60, burst: 30 }, 3);
        assert_eq!(bucket.fit(Demand::exact(31)), Fit::Never);
        assert_eq!(bucket.fit(Demand { expected: 1, most: 46 }), Fit::NeverSoMuch);
        assert!(take_at(&mut bucket, 0, 1));
        assert_eq!(bucket.fit(Demand::exact(30)), Fit::After(Duration::from_secs(3)));
        assert!(take_at(&mut bucket, 3 * SECOND, 30));
        // 20 of its 10 units are a debt, which refills at a third of the rate.
        assert_eq!(bucket.fit(Demand::exact(1)), Fit::After(Duration::from_secs(63)));
        let mut single = shared(Rate { per_minute: 60, burst: 1 }, 3);
        assert!(take_at(&mut single, 0, 1), "a burst of one is never a part of a request");
        assert!(!take_at(&mut single, 0, 1));
        let mut risky = shared(Rate { per_minute: 60, burst: 30 }, 3);
        let open = Demand { expected: 1, most: 3 };
        risky.take(open);
        assert_eq!(risky.fit(Demand { expected: 1, most: 40 }), Fit::AfterAnother);
    }

    #[test]
    fn extreme_rates_neither_wrap_nor_panic() {
        let mut bucket =
            Bucket::full(Rate { per_minute: u64::MAX, burst: u64::MAX }, MonotonicTime(0));
        bucket.settle(Demand::default(), u64::MAX);
        bucket.settle(Demand::default(), u64::MAX);
        bucket.refill(MonotonicTime(u64::MAX));
        assert!(bucket.is_full());
        let stopped = Bucket::full(Rate { per_minute: 0, burst: 0 }, MonotonicTime(0));
        assert_eq!(stopped.fit(Demand::exact(1)), Fit::Never);
    }

    proptest! {
        /// Checks that over any window no more than burst + rate t passes, and that a
        /// refusal's wait is exact to the nanosecond.
        #[test]
        fn bucket_never_gives_more_than_burst_and_refill(
            per_minute in 1_u64..10_000,
            burst in 1_u64..500,
            asks in prop::collection::vec((0_u64..3 * SECOND, 1_u64..20), 1..80),
        ) {
            let mut bucket = Bucket::full(Rate { per_minute, burst }, MonotonicTime(0));
            let mut now = 0;
            let mut passed: Vec<(u64, u64)> = Vec::new();
            for (gap, units) in asks {
                now += gap;
                if take_at(&mut bucket, now, units) {
                    passed.push((now, units));
                } else if units <= burst {
                    let Fit::After(wait) = bucket.fit(Demand::exact(units)) else {
                        panic!("time alone helps")
                    };
                    let wait = wait.as_nanos() as u64;
                    let mut early = bucket.clone();
                    early.refill(MonotonicTime(now + wait - 1));
                    prop_assert_ne!(early.fit(Demand::exact(units)), Fit::Now);
                    let mut later = bucket.clone();
                    later.refill(MonotonicTime(now + wait));
                    prop_assert_eq!(later.fit(Demand::exact(units)), Fit::Now);
                }
            }
            for (first, &(start, _)) in passed.iter().enumerate() {
                let mut sum = 0;
                for &(at, units) in &passed[first..] {
                    sum += units;
                    let allowed = i128::from(burst) * UNIT
                        + i128::from(per_minute) * i128::from(at - start);
                    prop_assert!(scaled(sum) <= allowed);
                }
            }
        }
    }
}
