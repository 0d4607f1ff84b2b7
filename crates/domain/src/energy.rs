//! What a device drew, and whose it was: whole millijoules, split by the same
//! nanoseconds as its time, so that the parts sum to what was drawn.

use std::fmt;
use std::iter::Sum;

use serde::{Deserialize, Serialize};

use crate::DeviceNanos;

/// Energy in whole millijoules, as NVML counts it.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Millijoules(pub u64);

impl Millijoules {
    /// None at all.
    pub const ZERO: Self = Self(0);

    /// The whole millijoules.
    pub const fn millijoules(self) -> u64 {
        self.0
    }

    /// How far a counter moved from `before` to here; `None` where it went
    /// backwards, as it does when a driver is loaded anew.
    pub fn since(self, before: Self) -> Option<Self> {
        self.0.checked_sub(before.0).map(Self)
    }

    /// Whether a device may have drawn so much in `wall`. In no time nothing is
    /// drawn; and no device draws 100 kW, also where its counter was read
    /// early: more is a lie or a broken counter.
    pub fn is_drawn_in(self, wall: DeviceNanos) -> bool {
        if wall == DeviceNanos::ZERO {
            return self == Self::ZERO;
        }
        self.0 <= (wall.nanos() / NANOS_OF_MILLI + LATE_MS).saturating_mul(MOST_MJ_OF_MILLI)
    }

    /// Split in proportion to `times`, exactly: largest remainder, ties to the
    /// first. Who had no time gets none. `None` where nobody had any.
    pub fn split(self, times: &[DeviceNanos]) -> Option<Vec<Self>> {
        let sum: u128 = times.iter().map(|time| u128::from(time.nanos())).sum();
        if sum == 0 {
            return None;
        }
        let product = |time: &DeviceNanos| u128::from(self.0) * u128::from(time.nanos());
        let mut parts: Vec<Self> =
            times.iter().map(|time| Self((product(time) / sum) as u64)).collect(); // at most all
        let given: Self = parts.iter().copied().sum();
        let left = (self.0 - given.0) as usize; // fewer than have a remainder
        let mut order: Vec<usize> = (0..times.len()).collect();
        // Stable, so that the first of equals comes first.
        order.sort_by_key(|&index| std::cmp::Reverse(product(&times[index]) % sum));
        for &index in order.iter().take(left) {
            parts[index].0 += 1;
        }
        Some(parts)
    }

    /// What `part` of the time `whole` drew of this, rounded down.
    pub fn of_part(self, part: DeviceNanos, whole: DeviceNanos) -> Self {
        if part >= whole {
            return self;
        }
        let product = u128::from(self.0) * u128::from(part.nanos());
        Self((product / u128::from(whole.nanos())) as u64) // less than all
    }
}

/// Panics on overflow: no honest sum comes near it.
impl Sum for Millijoules {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        let add = |sum: u64, part: Self| sum.checked_add(part.0).expect("energy overflowed");
        Self(parts.fold(0, add))
    }
}

/// `1.234J`, `56.700kJ`, for people.
impl fmt::Display for Millijoules {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millijoules = self.0 as f64;
        let (value, unit) = match self.0 {
            0..1_000 => return write!(f, "{}mJ", self.0),
            1_000..1_000_000 => (millijoules / 1e3, "J"),
            1_000_000..1_000_000_000 => (millijoules / 1e6, "kJ"),
            _ => (millijoules / 1e9, "MJ"),
        };
        write!(f, "{value:.3}{unit}")
    }
}

const NANOS_OF_MILLI: u64 = 1_000_000;
/// 100 kW, mJ in a millisecond.
const MOST_MJ_OF_MILLI: u64 = 100_000;
/// By how much a counter may have been read too early, ms.
const LATE_MS: u64 = 2_000;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_counter_that_goes_backwards_tells_nothing() {
        let at = Millijoules;
        for (before, after, moved) in
            [(5, 9, Some(4)), (9, 9, Some(0)), (9, 5, None), (u64::MAX, 0, None)]
        {
            assert_eq!(at(after).since(at(before)), moved.map(Millijoules));
        }
    }

    #[test]
    fn nothing_is_drawn_in_no_time_and_nothing_absurd_in_any() {
        let second = DeviceNanos::from_secs(1);
        for (energy, wall, possible) in [
            (0, DeviceNanos::ZERO, true),
            (1, DeviceNanos::ZERO, false),
            (700_000, second, true),
            (300_000_000, second, true),
            (300_000_001, second, false),
            (200_000_001, DeviceNanos(1), false),
            (u64::MAX, DeviceNanos::from_secs(86_400), false),
        ] {
            assert_eq!(Millijoules(energy).is_drawn_in(wall), possible, "{energy} mJ in {wall}");
        }
    }

    #[test]
    fn the_largest_remainders_get_what_is_left_and_ties_go_to_the_first() {
        let split = |energy, times: &[u64]| {
            let times: Vec<_> = times.iter().copied().map(DeviceNanos).collect();
            let parts = Millijoules(energy).split(&times);
            parts.map(|parts| parts.into_iter().map(Millijoules::millijoules).collect())
        };
        for (energy, times, parts) in [
            (10, &[1, 1, 1][..], Some(vec![4, 3, 3])),
            (10, &[0, 2, 1], Some(vec![0, 7, 3])),
            (2, &[1, 5, 0, 1], Some(vec![0, 2, 0, 0])),
            (0, &[3, 4], Some(vec![0, 0])),
            (7, &[0, 0], None),
            (7, &[], None),
        ] {
            assert_eq!(split(energy, times), parts, "{energy} mJ over {times:?}");
        }
    }

    #[test]
    fn displays_for_people() {
        for (energy, expected) in
            [(7, "7mJ"), (1_500, "1.500J"), (2_345_678, "2.346kJ"), (61_000_000_000, "61.000MJ")]
        {
            assert_eq!(Millijoules(energy).to_string(), expected);
        }
    }

    proptest! {
        #[test]
        fn parts_sum_to_the_whole_and_each_is_within_one_of_its_due(
            energy in prop_oneof![0..1_000_u64, any::<u64>()],
            times in prop::collection::vec(prop_oneof![Just(0), 1..50_u64, 0..1_u64 << 60], 1..40),
        ) {
            let times: Vec<_> = times.into_iter().map(DeviceNanos).collect();
            let sum: u128 = times.iter().map(|time| u128::from(time.nanos())).sum();
            let Some(parts) = Millijoules(energy).split(&times) else {
                prop_assert_eq!(sum, 0);
                return Ok(());
            };
            prop_assert_eq!(parts.iter().copied().sum::<Millijoules>(), Millijoules(energy));
            for (part, time) in parts.iter().zip(&times) {
                let due = u128::from(energy) * u128::from(time.nanos()) / sum;
                prop_assert!((due..=due + 1).contains(&u128::from(part.0)));
                prop_assert!(part.0 == 0 || *time != DeviceNanos::ZERO);
            }
        }

        #[test]
        fn a_part_is_no_more_than_the_whole(
            energy: u64, part in 0..1_u64 << 60, whole in 0..1_u64 << 60,
        ) {
            let (part, whole) = (DeviceNanos(part), DeviceNanos(whole));
            let drew = Millijoules(energy).of_part(part, whole);
            prop_assert!(drew <= Millijoules(energy));
            prop_assert!(part < whole || drew == Millijoules(energy));
        }
    }
}
