//! The current tick of the engine's thread, for a watchdog. Only atomics are used, because
//! a stuck thread may hold any lock.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate_domain::DeviceNanos;

/// State that the engine's thread writes and other threads read.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    /// Number of ticks started. No tick is running if `resting` is equal.
    begun: AtomicU64,
    resting: AtomicU64,
    predicted_ns: AtomicU64,
}

/// A running tick of the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Number of the tick. Two equal numbers mean the same tick.
    pub tick: u64,
    /// Predicted time of the step; 0 before the step is decided.
    pub predicted: Duration,
}

impl Pulse {
    /// Marks the start of a tick.
    pub(super) fn begin(&self) {
        self.predicted_ns.store(0, Ordering::Relaxed);
        // The old prediction is cleared before the new tick becomes visible.
        self.begun.fetch_add(1, Ordering::Release);
    }

    /// Sets the predicted time of the step.
    pub(super) fn expect(&self, predicted: DeviceNanos) {
        self.predicted_ns.store(predicted.nanos(), Ordering::Relaxed);
    }

    /// Marks that the thread waits for commands or for the device.
    pub(super) fn rest(&self) {
        // Only this thread writes `begun`, so a relaxed read gives its own last value.
        self.resting.store(self.begun.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Returns the running tick, or `None` while the thread waits.
    pub(super) fn work(&self) -> Option<Work> {
        // `resting` is read first. In the other order a tick that ends in between would
        // look like a running one.
        let resting = self.resting.load(Ordering::Acquire);
        let tick = self.begun.load(Ordering::Acquire);
        // The prediction may already belong to the next tick. Then the tick read here has
        // ended, which is harmless.
        let predicted = Duration::from_nanos(self.predicted_ns.load(Ordering::Relaxed));
        (tick != resting).then_some(Work { tick, predicted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pulse_shows_tick_from_start_to_end() {
        let pulse = Pulse::default();
        assert_eq!(pulse.work(), None);
        pulse.begin();
        assert_eq!(pulse.work(), Some(Work { tick: 1, predicted: Duration::ZERO }));
        pulse.expect(DeviceNanos(7));
        assert_eq!(pulse.work(), Some(Work { tick: 1, predicted: Duration::from_nanos(7) }));
        pulse.rest();
        assert_eq!(pulse.work(), None);
        pulse.begin();
        assert_eq!(pulse.work(), Some(Work { tick: 2, predicted: Duration::ZERO }));
    }
}
