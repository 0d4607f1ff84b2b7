//! The only module of the gateway that reads the system's clocks.
//!
//! Intervals come from the monotonic clock. The calendar starts with the wall
//! clock and goes on with monotonic time. The calendar follows the wall clock
//! slowly and never goes backwards, so a jump of an hour neither opens nor
//! closes a day.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tollgate_domain::{MonotonicTime, UtcTime};

/// The gateway's clock. Clones share one calendar.
#[derive(Clone, Debug)]
pub struct Clock {
    source: ClockSource,
    calendar: Arc<Mutex<Calendar>>,
}

/// The source of a clock's time.
#[derive(Clone, Copy, Debug)]
enum ClockSource {
    /// The host's clocks, from this moment on.
    Host(Instant),
    /// A test runtime's clock from this moment on, and the wall clock at that moment.
    #[cfg(any(test, feature = "test-support"))]
    Simulated(tokio::time::Instant, UtcTime),
}

impl Clock {
    /// Makes a clock with monotonic time that starts now.
    #[expect(clippy::disallowed_methods, reason = "this is the gateway's clock")]
    pub fn system() -> Self {
        Self::of(ClockSource::Host(Instant::now()))
    }

    /// Makes a clock that goes with the time of a test's runtime.
    #[cfg(any(test, feature = "test-support"))]
    pub fn simulated(origin: tokio::time::Instant, utc: UtcTime) -> Self {
        Self::of(ClockSource::Simulated(origin, utc))
    }

    fn of(source: ClockSource) -> Self {
        Self { source, calendar: Arc::new(Mutex::new(Calendar::new(source.wall()))) }
    }

    /// Returns the time for intervals.
    pub fn now(&self) -> MonotonicTime {
        let elapsed = match self.source {
            ClockSource::Host(origin) => origin.elapsed(),
            #[cfg(any(test, feature = "test-support"))]
            ClockSource::Simulated(origin, _) => origin.elapsed(),
        };
        // 64 bits of nanoseconds last for 584 years.
        MonotonicTime(elapsed.as_nanos() as u64)
    }

    /// Returns the time for days, months and people.
    pub fn utc(&self) -> UtcTime {
        self.utc_at(self.now())
    }

    /// Returns the calendar time at `now`, which the caller has just read with
    /// [`Self::now`]. This saves a second read of the host's clock.
    pub fn utc_at(&self, now: MonotonicTime) -> UtcTime {
        // No panic can happen between the assignments of `read`, so poisoning is ignored.
        let mut calendar = self.calendar.lock().unwrap_or_else(PoisonError::into_inner);
        calendar.read(now, self.source.wall())
    }
}

/// Calendar time that follows the wall clock by at most 1 part in [`SLEW`] and
/// never goes back.
#[derive(Debug)]
struct Calendar {
    at: MonotonicTime,
    utc: UtcTime,
}

impl Calendar {
    fn new(wall: UtcTime) -> Self {
        Self { at: MonotonicTime::default(), utc: wall }
    }

    fn read(&mut self, now: MonotonicTime, wall: UtcTime) -> UtcTime {
        let elapsed = now.0.saturating_sub(self.at.0);
        let predicted = self.utc.0.saturating_add(elapsed);
        let most = elapsed / SLEW;
        // The bounds are below and above the prediction, so `utc` never goes back
        // and a step of the wall clock is spread over `SLEW` times its size.
        let utc = wall.0.clamp(predicted - most, predicted.saturating_add(most));
        // Threads race between reading the clock and taking the lock.
        self.at = MonotonicTime(self.at.0.max(now.0));
        self.utc = UtcTime(utc);
        self.utc
    }
}

impl ClockSource {
    /// Returns the time of the wall clock.
    #[expect(clippy::disallowed_methods, reason = "this is the gateway's clock")]
    fn wall(self) -> UtcTime {
        match self {
            Self::Host(_) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                UtcTime(since.as_nanos() as u64)
            }
            #[cfg(any(test, feature = "test-support"))]
            Self::Simulated(origin, utc) => UtcTime(utc.0 + origin.elapsed().as_nanos() as u64),
        }
    }
}

/// The calendar corrects at most 1 part in this many. An error of an hour is gone
/// after two hundred hours; a drifting crystal (50 parts in a million) is followed
/// easily.
const SLEW: u64 = 200;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn calendar_follows_wall_clock_slowly() {
        let mut calendar = Calendar::new(UtcTime(1_000 * SECOND));
        for (now, wall, expected) in [
            (0, 1_000, 1_000 * SECOND),   // agrees
            (200, 1_200, 1_200 * SECOND), // agrees
            (400, 5_000, 1_401 * SECOND), // a jump ahead: 1 s in 200
            (600, 10, 1_600 * SECOND),    // a jump back: likewise
            (600, 10, 1_600 * SECOND),    // asked twice
            (500, 10, 1_600 * SECOND),    // threads that race
        ] {
            let read = calendar.read(MonotonicTime(now * SECOND), UtcTime(wall * SECOND));
            assert_eq!(read.0, expected, "at {now}");
        }
    }
}
