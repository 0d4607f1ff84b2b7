//! The engine's clock. All that the meter books is read from one of these, so
//! a test can drive time itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

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

/// A clock that stands still until it is told. Clones are the same clock: its
/// owner moves it between steps, a backend without a device during one.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    /// Moves it on by `span`.
    pub fn advance(&self, span: Duration) {
        // 2^64 ns are 584 years.
        self.0.fetch_add(span.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Moves it on to `time`, unless it is there or beyond.
    pub fn advance_to(&self, time: MonotonicTime) {
        self.0.fetch_max(time.0, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> MonotonicTime {
        MonotonicTime(self.0.load(Ordering::Relaxed))
    }
}
