//! The engine's clock. The meter reads all times from one clock, so a test can control
//! time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tollgate_domain::MonotonicTime;

/// A clock that never goes back.
pub trait Clock: Send + Sync {
    /// Returns the nanoseconds since the clock's origin.
    fn now(&self) -> MonotonicTime;
}

/// The host's monotonic clock, counted from the creation of this value.
#[derive(Clone, Copy, Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// Creates a clock that starts at 0 now. All parts of one worker epoch use the same
    /// clock.
    #[expect(clippy::disallowed_methods, reason = "this is the engine's clock")]
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

/// A clock that stands still until it is moved. Clones are the same clock. The owner moves
/// it between steps, and a backend without a device moves it during a step.
#[derive(Clone, Debug, Default)]
pub struct VirtualClock(Arc<AtomicU64>);

impl VirtualClock {
    /// Advances the clock by `span`.
    pub fn advance(&self, span: Duration) {
        // 2^64 ns are 584 years.
        self.0.fetch_add(span.as_nanos() as u64, Ordering::Relaxed);
    }

    /// Advances the clock to `time`. A time in the past changes nothing.
    pub fn advance_to(&self, time: MonotonicTime) {
        self.0.fetch_max(time.0, Ordering::Relaxed);
    }
}

impl Clock for VirtualClock {
    fn now(&self) -> MonotonicTime {
        MonotonicTime(self.0.load(Ordering::Relaxed))
    }
}
