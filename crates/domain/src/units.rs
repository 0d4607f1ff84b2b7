//! Units. Device time is whole nanoseconds everywhere; only a report may
//! show seconds.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// A span of time during which a device was occupied, in nanoseconds.
///
/// Addition and subtraction panic on overflow in every profile: money is
/// never wrapped. 2^64 ns are 584 years, so no honest sum comes near it; what
/// arrives from outside is added with [`DeviceNanos::checked_add`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct DeviceNanos(pub u64);

impl DeviceNanos {
    /// No time at all.
    pub const ZERO: Self = Self(0);

    /// The whole nanoseconds.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// `seconds` whole seconds of device time, saturating at the maximum.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000_000))
    }

    /// Seconds, for people; never fed back into a sum.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// The sum, or `None` if it does not fit.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The difference, or zero where `other` is the larger.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// `value` nanoseconds rounded up to whole ones; what is negative or not
    /// a number is zero, what is too large is the maximum.
    pub fn from_f64_ceil(value: f64) -> Self {
        // `as` saturates and sends NaN to 0, which is the contract above.
        Self(value.ceil() as u64)
    }
}

impl Add for DeviceNanos {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0.checked_add(other.0).expect("device time overflowed 584 years"))
    }
}

impl AddAssign for DeviceNanos {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Sub for DeviceNanos {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0.checked_sub(other.0).expect("device time below zero"))
    }
}

impl SubAssign for DeviceNanos {
    fn sub_assign(&mut self, other: Self) {
        *self = *self - other;
    }
}

impl Sum for DeviceNanos {
    fn sum<I: Iterator<Item = Self>>(parts: I) -> Self {
        parts.fold(Self::ZERO, Add::add)
    }
}

/// `1.234ms`, `56.7s`: three or so significant digits, for people.
impl fmt::Display for DeviceNanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0 as f64;
        let (value, unit) = match self.0 {
            0..1_000 => return write!(f, "{}ns", self.0),
            1_000..1_000_000 => (nanos / 1e3, "us"),
            1_000_000..1_000_000_000 => (nanos / 1e6, "ms"),
            _ => (nanos / 1e9, "s"),
        };
        write!(f, "{value:.3}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_up_and_survives_nonsense() {
        for (value, expected) in
            [(0.0, 0), (0.1, 1), (1.0, 1), (-5.0, 0), (f64::NAN, 0), (f64::INFINITY, u64::MAX)]
        {
            assert_eq!(DeviceNanos::from_f64_ceil(value).nanos(), expected, "{value}");
        }
    }

    #[test]
    fn displays_for_people() {
        for (nanos, expected) in
            [(7, "7ns"), (1_500, "1.500us"), (2_345_678, "2.346ms"), (61_000_000_000, "61.000s")]
        {
            assert_eq!(DeviceNanos(nanos).to_string(), expected);
        }
    }

    #[test]
    #[should_panic(expected = "below zero")]
    fn a_negative_balance_is_a_bug() {
        let _ = DeviceNanos(1) - DeviceNanos(2);
    }
}
