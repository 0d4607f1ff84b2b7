//! The clock that also runs while the machine sleeps.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A time since the machine was started, sleep included (`CLOCK_BOOTTIME`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct BootTime(Duration);

impl BootTime {
    /// Returns the time now.
    pub(super) fn now() -> Self {
        let now = clock_gettime(ClockId::Boottime);
        // The kernel counts from the start, so neither part is negative.
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        Self(Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0)))
    }

    /// Returns the time from `earlier` to this time; zero if `earlier` is later.
    pub(super) fn since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    #[cfg(test)]
    pub(super) fn plus(self, time: Duration) -> Self {
        Self(self.0 + time)
    }
}
