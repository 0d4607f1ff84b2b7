//! The clock that also runs while the machine sleeps.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A time since the machine was started, sleep included (`CLOCK_BOOTTIME`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BootTime(Duration);

/// A time that several threads read and set.
#[derive(Debug)]
pub struct SharedBootTime(AtomicU64);

impl SharedBootTime {
    /// Makes a shared time.
    pub fn new(time: BootTime) -> Self {
        Self(AtomicU64::new(time.nanos()))
    }

    /// Returns the time.
    pub fn get(&self) -> BootTime {
        BootTime(Duration::from_nanos(self.0.load(Ordering::Relaxed)))
    }

    /// Replaces the time.
    pub fn set(&self, time: BootTime) {
        self.0.store(time.nanos(), Ordering::Relaxed);
    }
}

impl BootTime {
    /// Returns the time now.
    pub fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        // The kernel counts from the start, so neither part is negative.
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        Self(Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0)))
    }

    /// Returns the time from `earlier` to this time; zero if `earlier` is later.
    pub fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// Returns the time since the machine was started.
    pub fn since_start(self) -> Duration {
        self.0
    }

    /// Returns the nanoseconds, which 64 bits hold for 584 years.
    fn nanos(self) -> u64 {
        u64::try_from(self.0.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the time after `time` has passed.
    #[must_use]
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
