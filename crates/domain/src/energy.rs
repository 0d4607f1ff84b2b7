//! Energy that a device used, and its attribution. Energy is counted in whole millijoules
//! and split by the same nanoseconds as device time, so the parts sum to the measured
//! energy.

use std::fmt;
use std::iter::Sum;

use serde::{Deserialize, Serialize};

use crate::DeviceNanos;

/// Energy in whole millijoules, the unit of NVML's counter.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Millijoules(pub u64);

impl Millijoules {
    /// The zero energy.
    pub const ZERO: Self = Self(0);

    /// Returns the millijoules.
    pub const fn millijoules(self) -> u64 {
        self.0
    }

    /// Returns the increase of a counter since `before`, or `None` if the counter went
    /// backwards. A counter restarts when the driver is loaded again.
    pub fn since(self, before: Self) -> Option<Self> {
        self.0.checked_sub(before.0).map(Self)
    }

    /// Returns true if a device can have used this energy in `wall`: less than 100 kW, with
    /// a tolerance for a counter that was read early, and nothing in no time. A larger
    /// value is a wrong report or a broken counter.
    pub fn is_drawn_in(self, wall: DeviceNanos) -> bool {
        // The tolerance below would allow energy in no time.
        if wall == DeviceNanos::ZERO {
            return self == Self::ZERO;
        }
        self.0 <= (wall.nanos() / NANOS_OF_MILLI + LATE_MS).saturating_mul(MOST_MJ_OF_MILLI)
    }

    /// Splits the energy in proportion to `times`, exactly: largest remainder, ties to the
    /// first. A time of zero gets nothing. Returns `None` if all times are zero.
    pub fn split(self, times: &[DeviceNanos]) -> Option<Vec<Self>> {
        let sum: u128 = times.iter().map(|time| u128::from(time.nanos())).sum();
        // Without time there is no proportion; the caller decides.
        if sum == 0 {
            return None;
        }
        let product = |time: &DeviceNanos| u128::from(self.0) * u128::from(time.nanos());
        let mut parts: Vec<Self> =
            times.iter().map(|time| Self((product(time) / sum) as u64)).collect(); // each part is at most the whole, so the cast is exact
        let given: Self = parts.iter().copied().sum();
        let left = (self.0 - given.0) as usize; // fewer than the times that have a remainder
        let mut order: Vec<usize> = (0..times.len()).collect();
        // The sort is stable, so equal remainders keep their order.
        order.sort_by_key(|&index| std::cmp::Reverse(product(&times[index]) % sum));
        for &index in order.iter().take(left) {
            parts[index].0 += 1;
        }
        Some(parts)
    }

    /// Returns the energy of `part` of the time `whole`, rounded down.
    pub fn of_part(self, part: DeviceNanos, whole: DeviceNanos) -> Self {
        // Also covers a whole of zero, which must not divide.
        if part >= whole {
            return self;
        }
        let product = u128::from(self.0) * u128::from(part.nanos());
        Self((product / u128::from(whole.nanos())) as u64) // less than the whole, so the cast is exact
    }
}

/// Panics on overflow: no correct sum overflows.
impl Sum for Millijoules {
    #[expect(
        clippy::expect_used,
        reason = "no correct sum overflows, and a wrapped sum would be billed"
    )]
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        let add = |sum: u64, part: Self| sum.checked_add(part.0).expect("energy overflowed");
        Self(parts.fold(0, add))
    }
}

/// Formats the energy for display, like `1.234J` or `56.700kJ`.
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
/// Largest power, 100 kW, in mJ per millisecond.
const MOST_MJ_OF_MILLI: u64 = 100_000;
/// Tolerance for a counter that was read too early, in ms.
const LATE_MS: u64 = 2_000;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counter_that_goes_backwards_gives_none() {
        let at = Millijoules;
        for (before, after, moved) in
            [(5, 9, Some(4)), (9, 9, Some(0)), (9, 5, None), (u64::MAX, 0, None)]
        {
            assert_eq!(at(after).since(at(before)), moved.map(Millijoules));
        }
    }

    #[test]
    fn drawn_energy_is_bounded_by_wall_time() {
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
    fn split_uses_largest_remainders_first_on_ties() {
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
    fn display_picks_a_readable_unit() {
        for (energy, expected) in
            [(7, "7mJ"), (1_500, "1.500J"), (2_345_678, "2.346kJ"), (61_000_000_000, "61.000MJ")]
        {
            assert_eq!(Millijoules(energy).to_string(), expected);
        }
    }

    proptest! {
        #[test]
        fn split_sums_exactly_within_one_of_proportion(
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
        fn part_is_at_most_the_whole(
            energy: u64, part in 0..1_u64 << 60, whole in 0..1_u64 << 60,
        ) {
            let (part, whole) = (DeviceNanos(part), DeviceNanos(whole));
            let drew = Millijoules(energy).of_part(part, whole);
            prop_assert!(drew <= Millijoules(energy));
            prop_assert!(part < whole || drew == Millijoules(energy));
        }
    }
}
