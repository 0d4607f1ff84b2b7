//! The engine's clock. All that the meter books is read from one of these, so
//! a test can drive time itself.

use std::time::Instant;

use tollgate_domain::MonotonicTime;

/// A clock that never goes back.
pub trait Clock: Send + Sync {
    /// Nanoseconds since the clock's origin.
    fn now(&self) -> MonotonicTime;
}

/// The host's monotonic clock, counted from when this was made.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// A clock that starts at 0 now. Everything of one worker's epoch reads the
    /// same one.
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> MonotonicTime {
        // 2^64 ns are 584 years of uptime.
        MonotonicTime(self.origin.elapsed().as_nanos() as u64)
    }
}
