//! A token bucket in integers, with debt. The level is kept in sixty-billionths
//! of a unit, so that a refill of `per_minute` units over any whole number of
//! nanoseconds is exact and nothing is ever rounded into existence.

use std::time::Duration;

use tollgate_domain::{MonotonicTime, Rate};

/// One unit of the limit, in the level's own unit: the nanoseconds of a minute.
const UNIT: i128 = 60_000_000_000;

/// A bucket of one rate. From full it gives `burst` units at once; over any
/// interval t at most `burst + per_minute t / 60 s`, and what was under-held
/// is a debt that must be refilled before anything else is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    rate: Rate,
    level: i128,
    refilled: MonotonicTime,
}

impl Bucket {
    pub(crate) fn full(rate: Rate, now: MonotonicTime) -> Self {
        Self { rate, level: capacity(rate), refilled: now }
    }

    pub(crate) fn rate(&self) -> Rate {
        self.rate
    }

    /// Changes the limit. What has been taken stays taken; a smaller bucket
    /// spills, a larger one fills with time.
    pub(crate) fn adopt(&mut self, rate: Rate) {
        self.rate = rate;
        self.level = self.level.min(capacity(rate));
    }

    /// Brings the level up to `now`. A `now` before the last one, as racing
    /// threads give, changes nothing.
    pub(crate) fn refill(&mut self, now: MonotonicTime) {
        let elapsed = now.0.saturating_sub(self.refilled.0);
        if elapsed > 0 {
            let grown = i128::from(elapsed).saturating_mul(i128::from(self.rate.per_minute));
            self.level = self.level.saturating_add(grown).min(capacity(self.rate));
            self.refilled = now;
        }
    }

    /// Whether even a full bucket could not give `units`.
    pub(crate) fn never_fits(&self, units: u64) -> bool {
        units > self.rate.burst
    }

    /// How long from the last refill until `units` could be taken: zero when
    /// they can be now, `None` when a bucket that never refills lacks them.
    pub(crate) fn wait_for(&self, units: u64) -> Option<Duration> {
        self.time_to(scaled(units))
    }

    /// Takes `units` that [`Self::wait_for`] said are there.
    pub(crate) fn take(&mut self, units: u64) {
        self.level = self.level.saturating_sub(scaled(units));
    }

    /// Replaces `held` units by the `true_cost`: the rest is given back, or the
    /// excess becomes debt.
    pub(crate) fn settle(&mut self, held: u64, true_cost: u64) {
        self.level = self
            .level
            .saturating_add(scaled(held))
            .saturating_sub(scaled(true_cost))
            .min(capacity(self.rate));
    }

    /// Whole units that could be taken now; zero in debt.
    pub(crate) fn remaining(&self) -> u64 {
        u64::try_from(self.level.max(0) / UNIT).unwrap_or(u64::MAX)
    }

    /// How long until the bucket is full again if nothing is taken. A bucket
    /// that never refills says the longest time there is.
    pub(crate) fn reset(&self) -> Duration {
        self.time_to(capacity(self.rate)).unwrap_or(Duration::MAX)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.level >= capacity(self.rate)
    }

    fn time_to(&self, level: i128) -> Option<Duration> {
        let lacking = level.saturating_sub(self.level);
        if lacking <= 0 {
            return Some(Duration::ZERO);
        }
        let rate = i128::from(self.rate.per_minute);
        if rate == 0 {
            return None;
        }
        let nanos = (lacking - 1) / rate + 1; // rounded up: lacking is positive
        Some(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)))
    }
}

fn scaled(units: u64) -> i128 {
    i128::from(units) * UNIT // below 2^64 * 2^36
}

fn capacity(rate: Rate) -> i128 {
    scaled(rate.burst)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: u64 = 1_000_000_000;

    fn take_at(bucket: &mut Bucket, now: u64, units: u64) -> bool {
        bucket.refill(MonotonicTime(now));
        let fits = bucket.wait_for(units) == Some(Duration::ZERO);
        if fits {
            bucket.take(units);
        }
        fits
    }

    #[test]
    fn sixty_pass_at_once_and_the_next_a_second_later() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(7));
        for _ in 0..60 {
            assert!(take_at(&mut bucket, 7, 1));
        }
        assert!(!take_at(&mut bucket, 7, 1));
        assert_eq!(bucket.wait_for(1), Some(Duration::from_secs(1)));
        assert_eq!(bucket.reset(), Duration::from_secs(60));
        assert!(!take_at(&mut bucket, 7 + SECOND - 1, 1));
        assert!(take_at(&mut bucket, 7 + SECOND, 1));
        assert!(!take_at(&mut bucket, 7 + SECOND, 1));
    }

    #[test]
    fn debt_is_paid_back_before_anything_is_given() {
        let mut bucket = Bucket::full(Rate { per_minute: 60, burst: 10 }, MonotonicTime(0));
        bucket.take(10);
        bucket.settle(10, 25); // 15 in debt
        assert_eq!(bucket.remaining(), 0);
        assert_eq!(bucket.wait_for(0), Some(Duration::from_secs(15)));
        assert_eq!(bucket.wait_for(1), Some(Duration::from_secs(16)));
        assert!(!take_at(&mut bucket, 16 * SECOND - 1, 1));
        assert!(take_at(&mut bucket, 16 * SECOND, 1));
    }

    #[test]
    fn time_that_goes_back_refills_nothing() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(10 * SECOND));
        bucket.take(60);
        bucket.refill(MonotonicTime(0));
        assert_eq!(bucket.remaining(), 0);
        bucket.refill(MonotonicTime(11 * SECOND));
        assert_eq!(bucket.remaining(), 1);
    }

    #[test]
    fn a_changed_limit_keeps_what_was_taken() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(0));
        bucket.take(50);
        bucket.adopt(Rate::per_minute(5));
        assert_eq!(bucket.remaining(), 5);
        bucket.adopt(Rate::per_minute(100));
        assert_eq!(bucket.remaining(), 5);
        assert!(bucket.never_fits(101));
    }

    #[test]
    fn extremes_neither_wrap_nor_panic() {
        let mut bucket =
            Bucket::full(Rate { per_minute: u64::MAX, burst: u64::MAX }, MonotonicTime(0));
        bucket.settle(0, u64::MAX);
        bucket.settle(0, u64::MAX);
        bucket.refill(MonotonicTime(u64::MAX));
        assert!(bucket.is_full());
        let stopped = Bucket::full(Rate { per_minute: 0, burst: 0 }, MonotonicTime(0));
        assert_eq!(stopped.wait_for(1), None);
    }

    proptest! {
        /// Over any window of any run, no more than burst + rate t passes, and
        /// a refusal's wait is exact: then it passes, one nanosecond before not.
        #[test]
        fn never_more_than_burst_and_refill(
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
                    let wait = bucket.wait_for(units).expect("the rate is not zero").as_nanos() as u64;
                    let mut early = bucket.clone();
                    early.refill(MonotonicTime(now + wait - 1));
                    prop_assert!(early.wait_for(units) > Some(Duration::ZERO));
                    let mut later = bucket.clone();
                    later.refill(MonotonicTime(now + wait));
                    prop_assert_eq!(later.wait_for(units), Some(Duration::ZERO));
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
