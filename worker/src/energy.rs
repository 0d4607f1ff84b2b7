//! What the device's energy counter said last: the monitor tells it, the
//! journal reads it where a block ends. Neither waits for the other, so a
//! driver that hangs holds up no step.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tollgate_domain::{Millijoules, MonotonicTime};

/// The counter of one device; clones are the same. It tells nothing where
/// nobody reads the device, or where what it draws is not this worker's alone.
#[derive(Clone, Debug, Default)]
pub(crate) struct Meter {
    shared: Arc<Mutex<Option<Reading>>>,
}

#[derive(Clone, Copy, Debug)]
struct Reading {
    at: MonotonicTime,
    counter: Millijoules,
}

impl Meter {
    /// What was read at `at`; `None` where the device does not tell any more.
    pub(crate) fn tell(&self, at: MonotonicTime, counter: Option<Millijoules>) {
        let reading = counter.map(|counter| Reading { at, counter });
        *self.shared.lock().unwrap_or_else(PoisonError::into_inner) = reading;
    }

    /// The counter as it is now, give or take [`READ_EVERY`], and [`LONGEST_TRUE`]
    /// where a look at the whole device, or the host, holds the reading up; `None`
    /// beyond that.
    pub(crate) fn now(&self, now: MonotonicTime) -> Option<Millijoules> {
        let reading = *self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        reading.filter(|it| now.since(it.at) <= LONGEST_TRUE).map(|it| it.counter)
    }
}

/// How often the counter is read.
pub(crate) const READ_EVERY: Duration = Duration::from_millis(50);
/// For how long a reading stands for the present.
const LONGEST_TRUE: Duration = Duration::from_millis(250);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_is_true_for_a_while() {
        let at = |ms: u64| MonotonicTime(ms * 1_000_000);
        let meter = Meter::default();
        assert_eq!(meter.now(at(0)), None);
        meter.clone().tell(at(1_000), Some(Millijoules(7)));
        for (now, counter) in [(0, Some(7)), (1_000, Some(7)), (1_250, Some(7)), (1_251, None)] {
            assert_eq!(meter.now(at(now)), counter.map(Millijoules), "{now} ms");
        }
        meter.tell(at(1_500), None);
        assert_eq!(meter.now(at(1_500)), None);
    }
}
