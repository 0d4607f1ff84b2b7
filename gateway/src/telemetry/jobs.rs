//! The figures of files and batches, read when metrics are scraped.

use std::sync::atomic::Ordering;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tollgate_domain::UtcTime;
use tollgate_jobs::{JobFigures, LineOutcome};

use super::gauge;

/// The figures of files and batches.
#[derive(Debug)]
pub(super) struct JobMetrics {
    registry: Registry,
    batches: Family<BatchLabel, Gauge>,
    waiting: Family<WaitLabel, Gauge>,
    lines: Family<LineLabel, Counter>,
    unanswered: Gauge,
    running: Gauge,
    stored: Family<FileLabel, Gauge>,
    oldest: Gauge,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BatchLabel {
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WaitLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct LineLabel {
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FileLabel {
    kind: &'static str,
}

impl JobMetrics {
    pub(super) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("tollgate"),
            batches: Family::default(),
            waiting: Family::default(),
            lines: Family::default(),
            unanswered: Gauge::default(),
            running: Gauge::default(),
            stored: Family::default(),
            oldest: Gauge::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let Self { registry, .. } = self;
        registry.register("batches", "Batches that are kept, by state", self.batches.clone());
        registry.register(
            "batches_waiting",
            "Batches of which no line runs, by reason",
            self.waiting.clone(),
        );
        registry.register(
            "batch_lines",
            "Lines that have ended since the gateway started, by outcome",
            self.lines.clone(),
        );
        registry.register(
            "batch_lines_unanswered",
            "Lines without an answer, over all batches",
            self.unanswered.clone(),
        );
        registry.register("batch_lines_running", "Lines on workers", self.running.clone());
        registry.register_with_unit(
            "batch_files",
            "Bytes of inputs and of results, with those that are reserved",
            Unit::Bytes,
            self.stored.clone(),
        );
        registry.register_with_unit(
            "batch_oldest_age",
            "Age of the oldest batch that has not ended; 0 if there is none",
            Unit::Seconds,
            self.oldest.clone(),
        );
    }

    /// Sets the figures and returns the registry. `now` is the time of the scrape.
    pub(super) fn read(&self, figures: &JobFigures, now: UtcTime) -> &Registry {
        let JobFigures { stored, lines, in_flight, waiting } = figures;
        for (state, count) in [
            ("validating", stored.validating),
            ("running", stored.running),
            ("ending", stored.ending),
            ("ended", stored.ended),
        ] {
            self.batches.get_or_create(&BatchLabel { state }).set(gauge(count));
        }
        // A reason that is over must not keep its last figure.
        self.waiting.clear();
        for (&reason, &count) in waiting {
            self.waiting.get_or_create(&WaitLabel { reason }).set(gauge(count));
        }
        for outcome in LineOutcome::ALL {
            let count = lines.get(&outcome).copied().unwrap_or_default();
            let label = LineLabel { outcome: outcome.as_str() };
            self.lines.get_or_create(&label).inner().store(count, Ordering::Relaxed);
        }
        self.unanswered.set(gauge(stored.lines));
        self.running.set(gauge(*in_flight));
        for (kind, bytes) in [("inputs", stored.stored), ("results", stored.results)] {
            self.stored.get_or_create(&FileLabel { kind }).set(gauge(bytes));
        }
        let age = stored.oldest.map_or(0, |oldest| now.0.saturating_sub(oldest.0) / 1_000_000_000);
        self.oldest.set(gauge(age));
        &self.registry
    }
}
