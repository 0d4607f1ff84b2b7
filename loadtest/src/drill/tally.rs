//! Counts of outcomes by second. Their memory is bounded whatever an attacker
//! sends, and they can be read during the run.

#![expect(clippy::expect_used, reason = "no code panics under the locks of this module")]

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use crate::clock;
use crate::outcome::End;

/// Counts of each second of a run, by outcome.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tally {
    seconds: Vec<BTreeMap<String, u64>>,
}

/// Seconds that are counted separately; later ones count as the last.
const MOST_SECONDS: usize = 86_400;

/// Outcomes that are counted separately in a second.
const MOST_OUTCOMES: usize = 64;

impl Tally {
    /// Counts the outcome `what`, `at` seconds after the start.
    pub fn add(&mut self, at: f64, what: &str) {
        let second = (at.max(0.0) as usize).min(MOST_SECONDS);
        if self.seconds.len() <= second {
            self.seconds.resize(second + 1, BTreeMap::new());
        }
        let counts = &mut self.seconds[second];
        if counts.len() >= MOST_OUTCOMES && !counts.contains_key(what) {
            *counts.entry("something else".to_owned()).or_default() += 1;
        } else if let Some(count) = counts.get_mut(what) {
            *count += 1;
        } else {
            counts.insert(what.to_owned(), 1);
        }
    }

    /// Returns the counts of each second.
    pub fn seconds(&self) -> &[BTreeMap<String, u64>] {
        &self.seconds
    }

    /// Returns the counts over all seconds.
    pub fn totals(&self) -> BTreeMap<String, u64> {
        let mut totals = BTreeMap::new();
        for (what, count) in self.seconds.iter().flatten() {
            *totals.entry(what.clone()).or_default() += count;
        }
        totals
    }

    /// Returns the count of `what`.
    pub fn total(&self, what: &str) -> u64 {
        self.seconds.iter().filter_map(|counts| counts.get(what)).sum()
    }

    /// Returns the count of `what` in the seconds from `from` up to `to`.
    pub fn between(&self, what: &str, from: f64, to: f64) -> u64 {
        let seconds = self.seconds.iter().enumerate();
        seconds
            .filter(|(second, _)| (from..to).contains(&(*second as f64)))
            .filter_map(|(_, counts)| counts.get(what))
            .sum()
    }
}

/// Returns a short name of an outcome.
pub(crate) fn outcome(end: &End) -> String {
    match end {
        End::Done => ANSWERED.to_owned(),
        End::Refused { status, code } => format!("{status} {code}"),
        End::BrokenOff(code) => format!("broke off: {code}"),
        End::Error(kind) => (*kind).to_owned(),
        End::TimedOut => "timed out".to_owned(),
        End::NotSent => "not sent: too many in flight".to_owned(),
    }
}

/// The name of the outcome of a complete answer.
pub(crate) const ANSWERED: &str = "answered";

/// The progress of a drill.
#[derive(Debug)]
pub struct Live {
    phase: Mutex<(&'static str, Instant, Duration)>,
    /// Honest requests that were due.
    pub honest_due: AtomicU64,
    /// Honest requests with a complete answer.
    pub honest_answered: AtomicU64,
    /// The time to the first token of the last honest answer, in microseconds.
    pub last_first_token: AtomicU64,
    /// Requests that attackers sent.
    pub attacks: AtomicU64,
    /// Attackers' requests with an answer.
    pub attacks_answered: AtomicU64,
    /// The gateway's memory in bytes; 0 if unknown.
    pub memory: AtomicU64,
    /// The gateway's open descriptors; 0 if unknown.
    pub descriptors: AtomicU64,
}

impl Default for Live {
    fn default() -> Self {
        let none = AtomicU64::default;
        Self {
            phase: Mutex::new(("starting", clock::now(), Duration::ZERO)),
            honest_due: none(),
            honest_answered: none(),
            last_first_token: none(),
            attacks: none(),
            attacks_answered: none(),
            memory: none(),
            descriptors: none(),
        }
    }
}

impl Live {
    pub(crate) fn enter(&self, name: &'static str, span: Duration) {
        *self.phase.lock().expect("no panic under the lock") = (name, clock::now(), span);
    }

    pub(crate) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the phase, the time since its beginning, and its length.
    pub fn phase(&self) -> (&'static str, Duration, Duration) {
        let (name, since, span) = *self.phase.lock().expect("no panic under the lock");
        (name, since.elapsed(), span)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tally_counts_by_second_and_outcome() {
        let mut tally = Tally::default();
        for (at, what) in [(0.1, "a"), (0.9, "a"), (1.0, "b"), (3.5, "a"), (-1.0, "b")] {
            tally.add(at, what);
        }
        assert_eq!((tally.total("a"), tally.total("b"), tally.total("c")), (3, 2, 0));
        assert_eq!((tally.between("a", 0.0, 1.0), tally.between("a", 1.0, 4.0)), (2, 1));
        assert_eq!(tally.seconds().len(), 4);
    }

    #[test]
    fn tally_bounds_distinct_outcomes() {
        let mut tally = Tally::default();
        for number in 0..10_000 {
            tally.add(0.0, &format!("invented {number}"));
        }
        assert!(tally.seconds()[0].len() <= MOST_OUTCOMES + 1);
        assert_eq!(tally.totals().values().sum::<u64>(), 10_000);
    }
}
