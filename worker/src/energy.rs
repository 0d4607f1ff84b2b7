//! The last reading of the device's energy counter. The health monitor writes it,
//! and the journal reads it at the end of a block. Neither side waits for the
//! other, so a driver that hangs delays no step.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tollgate_domain::{Millijoules, MonotonicTime};

/// The energy counter of one device. Clones share the reading. The counter has no
/// value if no monitor reads the device, or if other workers share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter {
    shared: Arc<Mutex<Option<CounterReading>>>,
}

#[derive(Clone, Copy, Debug)]
struct CounterReading {
    at: MonotonicTime,
    counter: Millijoules,
}

impl Meter {
    /// Stores the counter's value at `at`; `None` if the device no longer reports
    /// one.
    pub(crate) fn store(&self, at: MonotonicTime, counter: Option<Millijoules>) {
        let reading = counter.map(|counter| CounterReading { at, counter });
        // A panic cannot leave half a reading, so poisoning is ignored.
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = reading;
    }

    /// Returns the counter's last reading, or `None` if the reading is older than
    /// [`LONGEST_VALID`]. A reading is normally at most [`READ_EVERY`] old; a full
    /// health check, or a busy host, delays the next one.
    pub(crate) fn now(&self, now: MonotonicTime) -> Option<Millijoules> {
        let reading = *self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        // An old reading would move the energy of one block to the next block.
        reading.filter(|it| now.since(it.at) <= LONGEST_VALID).map(|it| it.counter)
    }
}

/// Time between two readings of the counter.
pub(crate) const READ_EVERY: Duration = Duration::from_millis(50);
/// Age up to which a reading still counts as current.
const LONGEST_VALID: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn energy_reading_expires() {
        let at = |ms: u64| MonotonicTime(ms * 1_000_000);
        let meter = Meter::default();
        assert_eq!(meter.now(at(0)), None);
        meter.clone().store(at(1_000), Some(Millijoules(7)));
        for (now, counter) in [(0, Some(7)), (1_000, Some(7)), (1_250, Some(7)), (1_251, None)] {
            assert_eq!(meter.now(at(now)), counter.map(Millijoules), "{now} ms");
        }
        meter.store(at(1_500), None);
        assert_eq!(meter.now(at(1_500)), None);
    }
}
