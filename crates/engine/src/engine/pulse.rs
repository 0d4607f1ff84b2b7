//! What the engine's thread is at, for whoever watches over it. Atomics alone:
//! a thread that is stuck may hold any lock, so nothing here takes one.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tollgate_domain::DeviceNanos;

/// Written by the engine's thread, read by any other.
#[derive(Debug, Default)]
pub(super) struct Pulse {
    /// Turns begun; none is under way where `resting` has the same number.
    begun: AtomicU64,
    resting: AtomicU64,
    predicted_ns: AtomicU64,
}

/// A turn of the engine that is under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Work {
    /// Which one. The same number twice is the same turn.
    pub tick: u64,
    /// How long its step should take; 0 before it has been decided.
    pub predicted: Duration,
}

impl Pulse {
    /// A turn begins.
    pub(super) fn begin(&self) {
        self.predicted_ns.store(0, Ordering::Relaxed);
        self.begun.fetch_add(1, Ordering::Release);
    }

    /// The turn's step should take so long.
    pub(super) fn expect(&self, predicted: DeviceNanos) {
        self.predicted_ns.store(predicted.nanos(), Ordering::Relaxed);
    }

    /// The thread waits, for commands or for the device.
    pub(super) fn rest(&self) {
        self.resting.store(self.begun.load(Ordering::Relaxed), Ordering::Release);
    }

    pub(super) fn work(&self) -> Option<Work> {
        let resting = self.resting.load(Ordering::Acquire);
        let tick = self.begun.load(Ordering::Acquire);
        // A prediction of another turn would be of one that did end.
        let predicted = Duration::from_nanos(self.predicted_ns.load(Ordering::Relaxed));
        (tick != resting).then_some(Work { tick, predicted })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_seen_from_its_beginning_to_its_end() {
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
