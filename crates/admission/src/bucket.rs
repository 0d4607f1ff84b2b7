//! A token bucket in integers, with debt. The level is counted in sixty-billionths of a
//! unit, so a refill of `per_minute` units is exact for any whole number of nanoseconds.
//! Rounding never creates units.

use std::time::Duration;

use tollgate_domain::{MonotonicTime, Rate};

/// One unit of the limit in the unit of the level: the nanoseconds of a minute.
const UNIT: i128 = 60_000_000_000;

/// A token bucket of one rate. A full bucket gives `burst` units at once, and at most
/// `burst + per_minute t / 60 s` over any interval t. If a settlement exceeds its hold, the
/// excess is a debt that must be refilled before the bucket gives anything.
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

    /// Changes the rate. Taken units stay taken. A smaller bucket loses its excess, a
    /// larger bucket fills with time.
    pub(crate) fn adopt(&mut self, rate: Rate) {
        self.rate = rate;
        self.level = self.level.min(capacity(rate));
    }

    /// Refills the bucket up to `now`. A `now` before the last refill changes nothing;
    /// concurrent threads can cause this.
    pub(crate) fn refill(&mut self, now: MonotonicTime) {
        let elapsed = now.0.saturating_sub(self.refilled.0);
        if elapsed > 0 {
            let grown = i128::from(elapsed).saturating_mul(i128::from(self.rate.per_minute));
            self.level = self.level.saturating_add(grown).min(capacity(self.rate));
            // `refilled` moves only forward, so an interval is never counted twice.
            self.refilled = now;
        }
    }

    /// Returns true if even a full bucket cannot give `units`.
    pub(crate) fn never_fits(&self, units: u64) -> bool {
        units > self.rate.burst
    }

    /// Returns the wait from the last refill until the bucket can give `units`: zero if it
    /// can now, `None` if it never refills.
    pub(crate) fn wait_for(&self, units: u64) -> Option<Duration> {
        self.time_to(scaled(units))
    }

    /// Takes `units`. The caller must have checked with [`Self::wait_for`] that they are
    /// there.
    pub(crate) fn take(&mut self, units: u64) {
        self.level = self.level.saturating_sub(scaled(units));
    }

    /// Replaces `held` units by `true_cost`. The rest is returned, or the excess becomes
    /// debt.
    pub(crate) fn settle(&mut self, held: u64, true_cost: u64) {
        self.level = self
            .level
            // Capped at the capacity: a rate that was lowered in between must not overflow
            // its new bucket.
            .saturating_add(scaled(held))
            .saturating_sub(scaled(true_cost))
            .min(capacity(self.rate));
    }

    /// Returns the whole units that can be taken now; zero in debt.
    pub(crate) fn remaining(&self) -> u64 {
        u64::try_from(self.level.max(0) / UNIT).unwrap_or(u64::MAX)
    }

    /// Returns the time until the bucket is full if nothing is taken, or the longest
    /// duration if it never refills.
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
    fn bucket_gives_burst_then_one_per_refill() {
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
    fn bucket_repays_debt_before_giving() {
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
    fn bucket_ignores_time_that_goes_back() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(10 * SECOND));
        bucket.take(60);
        bucket.refill(MonotonicTime(0));
        assert_eq!(bucket.remaining(), 0);
        bucket.refill(MonotonicTime(11 * SECOND));
        assert_eq!(bucket.remaining(), 1);
    }

    #[test]
    fn changed_rate_keeps_taken_units() {
        let mut bucket = Bucket::full(Rate::per_minute(60), MonotonicTime(0));
        bucket.take(50);
        bucket.adopt(Rate::per_minute(5));
        assert_eq!(bucket.remaining(), 5);
        bucket.adopt(Rate::per_minute(100));
        assert_eq!(bucket.remaining(), 5);
        assert!(bucket.never_fits(101));
    }

    #[test]
    fn extreme_rates_neither_wrap_nor_panic() {
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
