//! Units. Device time is counted in whole nanoseconds; only reports show seconds.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Sub, SubAssign};

use serde::{Deserialize, Serialize};

/// A span of time in which a device was occupied, in nanoseconds.
///
/// Addition and subtraction panic on overflow, also in release builds, because an amount
/// that is billed must never wrap. 2^64 ns are 584 years, so no correct sum overflows.
/// Amounts from outside are added with [`DeviceNanos::checked_add`].
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct DeviceNanos(pub u64);

impl DeviceNanos {
    /// The zero span.
    pub const ZERO: Self = Self(0);

    /// Returns the nanoseconds.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// Creates a span of whole seconds, saturating at the maximum.
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000_000))
    }

    /// Returns the seconds, for display only. Never compute with them.
    pub fn as_secs_f64(self) -> f64 {
        self.0 as f64 / 1e9
    }

    /// Returns the sum, or `None` on overflow.
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// Returns the difference, or zero if `other` is larger.
    pub fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Rounds `value` nanoseconds up. A negative value or NaN gives zero; a value that is
    /// too large gives the maximum.
    pub fn from_f64_ceil(value: f64) -> Self {
        // `as` saturates and converts NaN to 0.
        Self(value.ceil() as u64)
    }
}

impl Add for DeviceNanos {
    type Output = Self;
    #[expect(
        clippy::expect_used,
        reason = "no correct sum reaches 584 years, and a wrapped sum would be billed"
    )]
    fn add(self, other: Self) -> Self {
        // Release builds would wrap silently with `+`.
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
    #[expect(
        clippy::expect_used,
        reason = "no correct difference is negative, and a wrapped one would be billed"
    )]
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

/// Formats the span for display, like `1.234ms` or `56.700s`.
impl fmt::Display for DeviceNanos {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Precision does not matter for display.
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
    fn from_f64_ceil_rounds_up_and_saturates() {
        for (value, expected) in
            [(0.0, 0), (0.1, 1), (1.0, 1), (-5.0, 0), (f64::NAN, 0), (f64::INFINITY, u64::MAX)]
        {
            assert_eq!(DeviceNanos::from_f64_ceil(value).nanos(), expected, "{value}");
        }
    }

    #[test]
    fn display_picks_a_readable_unit() {
        for (nanos, expected) in
            [(7, "7ns"), (1_500, "1.500us"), (2_345_678, "2.346ms"), (61_000_000_000, "61.000s")]
        {
            assert_eq!(DeviceNanos(nanos).to_string(), expected);
        }
    }

    #[test]
    #[should_panic(expected = "below zero")]
    fn subtraction_below_zero_panics() {
        let _ = DeviceNanos(1) - DeviceNanos(2);
    }
}
