//! The one place of the gateway that reads clocks.
//!
//! Intervals come from the monotonic clock. The calendar comes from the wall
//! clock at the start plus monotonic time, and follows the wall clock slowly
//! and never backwards: a jump of an hour neither opens nor closes a day.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tollgate_domain::{MonotonicTime, UtcTime};

/// The gateway's clock. Clones share it.
#[derive(Clone, Debug)]
pub struct Clock {
    source: Source,
    calendar: Arc<Mutex<Calendar>>,
}

/// Where time comes from.
#[derive(Clone, Copy, Debug)]
enum Source {
    /// The host, since then.
    Host(Instant),
    /// A test's runtime, since then; what the wall clock said is all it knows.
    #[cfg(test)]
    Played(tokio::time::Instant, UtcTime),
}

impl Clock {
    /// A clock whose monotonic time starts now.
    pub fn system() -> Self {
        Self::of(Source::Host(Instant::now()))
    }

    /// A clock that goes with the time of the test's runtime.
    #[cfg(test)]
    pub(crate) fn played(origin: tokio::time::Instant, utc: UtcTime) -> Self {
        Self::of(Source::Played(origin, utc))
    }

    fn of(source: Source) -> Self {
        Self { source, calendar: Arc::new(Mutex::new(Calendar::new(source.wall()))) }
    }

    /// Time for intervals.
    pub fn now(&self) -> MonotonicTime {
        let elapsed = match self.source {
            Source::Host(origin) => origin.elapsed(),
            #[cfg(test)]
            Source::Played(origin, _) => origin.elapsed(),
        };
        MonotonicTime(elapsed.as_nanos() as u64)
    }

    /// Time for days, months and what people read.
    pub fn utc(&self) -> UtcTime {
        self.utc_at(self.now())
    }

    /// As [`Self::utc`], where somebody has just read [`Self::now`].
    pub(crate) fn utc_at(&self, now: MonotonicTime) -> UtcTime {
        let mut calendar = self.calendar.lock().unwrap_or_else(PoisonError::into_inner);
        calendar.read(now, self.source.wall())
    }
}

/// Calendar time that follows the wall clock by at most 1 part in
/// [`SLEW`] and never goes back.
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
        let utc = wall.0.clamp(predicted - most, predicted.saturating_add(most));
        self.at = MonotonicTime(self.at.0.max(now.0));
        self.utc = UtcTime(utc);
        self.utc
    }
}

impl Source {
    /// What the wall clock says.
    fn wall(self) -> UtcTime {
        match self {
            Self::Host(_) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                UtcTime(since.as_nanos() as u64)
            }
            #[cfg(test)]
            Self::Played(origin, utc) => UtcTime(utc.0 + origin.elapsed().as_nanos() as u64),
        }
    }
}

/// An hour's error is gone in two hundred hours; a drifting crystal (50 parts
/// in a million) is followed easily.
const SLEW: u64 = 200;

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    #[test]
    fn follows_slowly_and_never_back() {
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
