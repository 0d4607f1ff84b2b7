//! The log of refused connections: one line a minute for each source, so that a flood
//! does not fill the log and an admin still sees who is cut off.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::connection_limits::LimitReached;
use crate::source::Source;

/// The refusals since the last report.
#[derive(Default)]
pub(super) struct Refusals {
    table: Mutex<RefusalTable>,
}

#[derive(Default)]
struct RefusalTable {
    /// Refusals by source and limit; at most [`MOST_COUNTED`] entries.
    counts: HashMap<(Source, &'static str), u64>,
    /// Refusals of sources beyond that number.
    others: u64,
    /// The time of the next report; `None` before the first.
    due: Option<Instant>,
}

/// The refusals of a minute.
#[derive(Debug, Default, PartialEq, Eq)]
struct Report {
    /// The sources with most refusals, each with the limit and their number.
    sources: Vec<(Source, &'static str, u64)>,
    /// Refusals of all other sources.
    others: u64,
}

impl Refusals {
    /// Counts a refused connection of `source`.
    pub(super) fn count(&self, source: Source, reached: LimitReached) {
        let mut table = self.table.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (source, reached.as_str());
        if table.counts.len() >= MOST_COUNTED && !table.counts.contains_key(&key) {
            table.others += 1;
        } else {
            *table.counts.entry(key).or_default() += 1;
        }
    }

    /// Logs the refusals, if a minute has passed since the last report. Called once a
    /// second.
    pub(super) fn log(&self, listener: &'static str, now: Instant) {
        let Report { sources, others } =
            // In a block, so that the lock is free again before the lines are written.
            { self.table.lock().unwrap_or_else(PoisonError::into_inner).report(now) };
        for (source, limit, connections) in sources {
            tracing::warn!(
                listener, %source, limit, connections,
                "connections of a source were refused since the last such line; its clients see a reset"
            );
        }
        if others > 0 {
            tracing::warn!(
                listener,
                connections = others,
                "connections of other sources were refused"
            );
        }
    }
}

impl RefusalTable {
    /// Takes the refusals, if they are due. The first ones are due at once.
    fn report(&mut self, now: Instant) -> Report {
        if self.counts.is_empty() || self.due.is_some_and(|due| now < due) {
            return Report::default();
        }
        self.due = Some(now + REPORT_EVERY);
        let counts = self.counts.drain().map(|((source, limit), count)| (source, limit, count));
        let mut sources: Vec<_> = counts.collect();
        // By source as well, so that the order is not left to chance.
        sources.sort_unstable_by_key(|&(source, limit, count)| (u64::MAX - count, source, limit));
        let unlisted = sources.split_off(sources.len().min(MOST_LISTED));
        let unlisted: u64 = unlisted.into_iter().map(|(_, _, count)| count).sum();
        Report { sources, others: std::mem::take(&mut self.others) + unlisted }
    }
}

/// Time between two reports.
const REPORT_EVERY: Duration = Duration::from_secs(60);

/// Sources and limits that are counted apart.
const MOST_COUNTED: usize = 1_024;

/// Sources and limits in one report.
const MOST_LISTED: usize = 16;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn source(n: u32) -> Source {
        Source::V4(Ipv4Addr::from_bits(n))
    }

    #[test]
    fn refusals_are_reported_once_a_minute_by_source() {
        let refusals = Refusals::default();
        let start = Instant::now();
        let report =
            |seconds| refusals.table.lock().unwrap().report(start + Duration::from_secs(seconds));
        assert_eq!(report(0), Report::default());
        refusals.count(source(1), LimitReached::PerSource);
        for _ in 0..3 {
            refusals.count(source(2), LimitReached::Rate);
        }
        let sources = vec![(source(2), "source_rate", 3), (source(1), "per_source", 1)];
        assert_eq!(report(1), Report { sources, others: 0 });
        refusals.count(source(1), LimitReached::PerSource);
        assert_eq!(report(60), Report::default(), "within the minute");
        let sources = vec![(source(1), "per_source", 1)];
        assert_eq!(report(61), Report { sources, others: 0 });
    }

    #[test]
    fn refusals_of_many_sources_are_summed() {
        let refusals = Refusals::default();
        let all = 2 * MOST_COUNTED as u32;
        for n in 0..all {
            refusals.count(source(n), LimitReached::PerSource);
        }
        let Report { sources, others } = refusals.table.lock().unwrap().report(Instant::now());
        assert_eq!((sources.len(), others), (MOST_LISTED, u64::from(all) - MOST_LISTED as u64));
    }
}
