//! Virtual time: device time over the weight of a share owner, in integers.

use tollgate_domain::DeviceNanos;

/// The weight of a share owner, in parts of 2^32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Weight(u64);

impl Weight {
    pub(crate) const ONE: Self = Self(1 << 32);

    /// Converts a weight. Weights from config are 0.001 to 1,000; weights from other
    /// sources are clamped so that the arithmetic cannot overflow.
    pub(super) fn new(weight: f64) -> Self {
        // `clamp` also brings infinity into range.
        Self((weight.clamp(LEAST_WEIGHT, MOST_WEIGHT) * Self::ONE.0 as f64) as u64)
    }

    pub(crate) fn parts(self) -> u64 {
        self.0
    }
}

const LEAST_WEIGHT: f64 = 1.0 / (1 << 20) as f64;
const MOST_WEIGHT: f64 = (1 << 20) as f64;

/// Device time over weight, in units of 2^-24 nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct VirtualTime(u128);

impl VirtualTime {
    /// Returns the virtual time of `time` for a node of this weight.
    pub(crate) fn of(time: DeviceNanos, weight: Weight) -> Self {
        // 2^64 ns over the smallest weight are 2^108 units, which fit a u128.
        Self((u128::from(time.nanos()) << 56) / u128::from(weight.0))
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }

    pub(super) fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}
