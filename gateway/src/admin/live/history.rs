//! The last fifteen minutes in a ring: one point for each five seconds. Pure, given the time.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::{DeviceNanos, UtcTime, WorkerName};

use crate::telemetry::RequestTotals;

/// The figures of one moment.
#[derive(Clone, Debug, Default)]
pub(crate) struct Reading {
    pub(crate) at: UtcTime,
    pub(crate) totals: RequestTotals,
    /// Requests that limits let run.
    pub(crate) running: usize,
    /// Requests that wait for a place in their limits.
    pub(crate) waiting: usize,
    /// Device time of each worker's steps since its process started.
    pub(crate) busy: BTreeMap<WorkerName, DeviceNanos>,
}

/// The points of the last fifteen minutes, the newest last.
#[derive(Debug, Default)]
pub(crate) struct History {
    points: VecDeque<Point>,
    last: Option<Reading>,
}

/// The requests that ended between two readings, and the state at the second one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub(crate) struct Point {
    #[schemars(with = "u64")]
    at_ns: UtcTime,
    /// Nanoseconds since the point before.
    span_ns: u64,
    #[serde(flatten)]
    ended: RequestTotals,
    running: usize,
    waiting: usize,
    /// Device time of steps on all workers.
    #[schemars(with = "u64")]
    busy_ns: DeviceNanos,
}

impl History {
    /// Adds a point if [`INTERVAL`] has passed since the last one. The first reading only
    /// begins the history.
    pub(crate) fn record(&mut self, reading: Reading) {
        let Some(last) = &self.last else {
            self.last = Some(reading);
            return;
        };
        // A clock that stepped back begins anew, and no point has a negative span.
        let span = reading.at.0.saturating_sub(last.at.0);
        if reading.at >= last.at && u128::from(span) < INTERVAL.as_nanos() {
            return;
        }
        if span > 0 {
            if self.points.len() == MOST_POINTS {
                self.points.pop_front();
            }
            self.points.push_back(Point {
                at_ns: reading.at,
                span_ns: span,
                ended: reading.totals.since(last.totals),
                running: reading.running,
                waiting: reading.waiting,
                busy_ns: busy_since(&reading.busy, &last.busy),
            });
        }
        self.last = Some(reading);
    }

    /// Returns the points after the moment `seen`, the oldest first.
    pub(crate) fn after(&self, seen: UtcTime) -> Vec<Point> {
        self.points.iter().filter(|point| point.at_ns > seen).copied().collect()
    }
}

impl Point {
    /// Returns the moment of the point.
    pub(crate) fn at(&self) -> UtcTime {
        self.at_ns
    }
}

/// Returns the device time of steps between two readings.
fn busy_since(
    now: &BTreeMap<WorkerName, DeviceNanos>,
    earlier: &BTreeMap<WorkerName, DeviceNanos>,
) -> DeviceNanos {
    let grown = now.iter().map(|(worker, busy)| {
        let before = earlier.get(worker).copied().unwrap_or(DeviceNanos::ZERO);
        // A worker that was restarted counts from zero again.
        if *busy >= before { *busy - before } else { *busy }
    });
    grown.fold(DeviceNanos::ZERO, |sum, busy| sum + busy)
}

/// Time between two points, a little less than five readings of one second.
const INTERVAL: Duration = Duration::from_millis(4_500);

/// Points of fifteen minutes.
const MOST_POINTS: usize = 180;

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(second: u64, answered: u64, busy: &[(&str, u64)]) -> Reading {
        let busy = busy
            .iter()
            .map(|(name, nanos)| (WorkerName::new(name).expect("a name"), DeviceNanos(*nanos)));
        Reading {
            at: UtcTime(1_000_000_000_000_000_000 + second * 1_000_000_000),
            totals: RequestTotals { answered, ..RequestTotals::default() },
            running: 2,
            waiting: 1,
            busy: busy.collect(),
        }
    }

    #[test]
    fn history_keeps_fifteen_minutes() {
        let mut history = History::default();
        for second in 0..2_000 {
            history.record(reading(second, 10 * second, &[]));
        }
        let points = history.after(UtcTime(0));
        assert_eq!(points.len(), 180);
        let span = points[179].at_ns.0 - points[0].at_ns.0;
        assert_eq!(span, 895_000_000_000, "180 points that are 5 s apart");
        assert!(points.iter().all(|point| point.ended.answered == 50 && point.running == 2));
        assert_eq!(history.after(points[177].at_ns).len(), 2);
    }

    #[test]
    fn history_survives_restarted_worker_and_clock_step() {
        let mut history = History::default();
        history.record(reading(100, 0, &[("w0", 1_000), ("w1", 5)]));
        history.record(reading(105, 0, &[("w0", 1_700), ("w1", 9)]));
        history.record(reading(110, 0, &[("w0", 40)]));
        let busy = |history: &History| -> Vec<u64> {
            history.after(UtcTime(0)).iter().map(|point| point.busy_ns.nanos()).collect()
        };
        assert_eq!(busy(&history), [704, 40]);
        history.record(reading(50, 0, &[]));
        history.record(reading(55, 3, &[]));
        let points = history.after(UtcTime(0));
        assert_eq!((points.len(), points[2].ended.answered), (3, 3));
        assert_eq!(points[2].span_ns, 5_000_000_000);
    }
}
