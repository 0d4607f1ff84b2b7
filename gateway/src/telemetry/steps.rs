//! The steps of engines, the work that waits for them, and the restarts of worker processes.
//! All but the restarts is read from the workers when metrics are scraped.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::{MetricType, TypedMetric};
use prometheus_client::registry::{Registry, Unit};
use tollgate_domain::{DeviceNanos, STEP_NANOS, STEP_SEQUENCES, StepCounts, WorkerName};
use tollgate_serving::workers::WorkerReport;

use super::FloatGauge;

/// The figures of all engines.
#[derive(Debug)]
pub(super) struct StepMetrics {
    registry: Registry,
    step_seconds: Family<StepLabels, ReportedHistogram>,
    batch_sequences: Family<StepLabels, ReportedHistogram>,
    preemptions: Family<StepLabels, Counter>,
    queued: Family<QueueLabels, FloatGauge>,
    restarts: Family<RestartLabels, Counter>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabels {
    worker: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct QueueLabels {
    class: String,
    tier: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RestartLabels {
    worker: String,
    why: &'static str,
}

/// A histogram with counts that are kept elsewhere. Clones share the last reading.
#[derive(Clone, Debug, Default)]
struct ReportedHistogram(Arc<Mutex<HistogramReading>>);

/// The counts of a histogram.
#[derive(Debug, Default)]
struct HistogramReading {
    sum: f64,
    /// Upper limits, each with the number of values that exceed the limit before.
    buckets: Vec<(f64, u64)>,
}

impl ReportedHistogram {
    /// Sets the counts by `limits`. The last count has no limit.
    fn set(&self, sum: f64, limits: impl Iterator<Item = f64>, counts: &[u64]) {
        let limits = limits.chain([f64::INFINITY]);
        let reading =
            HistogramReading { sum, buckets: limits.zip(counts.iter().copied()).collect() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = reading;
    }
}

impl TypedMetric for ReportedHistogram {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for ReportedHistogram {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let reading = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let HistogramReading { sum, buckets } = &*reading;
        // The sum exists: the counts were checked when the report arrived.
        let count = buckets.iter().map(|(_, count)| count).sum();
        encoder.encode_histogram::<NoLabelSet>(*sum, count, buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

impl StepMetrics {
    pub(super) fn new() -> Self {
        let mut registry = Registry::with_prefix("tollgate");
        let (step_seconds, batch_sequences) = (Family::default(), Family::default());
        let (preemptions, restarts) = (Family::default(), Family::default());
        let queued = Family::default();
        registry.register_with_unit(
            "worker_step",
            "Device time of the steps since the worker's process started",
            Unit::Seconds,
            Family::clone(&step_seconds),
        );
        registry.register(
            "worker_batch_sequences",
            "Sequences in each step since the worker's process started",
            Family::clone(&batch_sequences),
        );
        registry.register(
            "worker_preemptions",
            "Sequences that lost their place in the batch since the worker's process started",
            Family::clone(&preemptions),
        );
        registry.register_with_unit(
            "queued_device",
            "Predicted device time of the requests that wait at workers and are in no batch",
            Unit::Seconds,
            Family::clone(&queued),
        );
        registry.register(
            "worker_restarts",
            "Restarts of a worker's process since the gateway started, by the end of the process before",
            Family::clone(&restarts),
        );
        Self { registry, step_seconds, batch_sequences, preemptions, queued, restarts }
    }

    /// Counts a restart of `worker`. `why` is one of a closed set.
    pub(super) fn restarted(&self, worker: &WorkerName, why: &'static str) {
        self.restarts.get_or_create(&RestartLabels { worker: worker.to_string(), why }).inc();
    }

    /// Sets the figures and returns the registry.
    pub(super) fn read(&self, workers: &[WorkerReport]) -> &Registry {
        // A worker that is gone must not keep its last figures, which would look current.
        self.step_seconds.clear();
        self.batch_sequences.clear();
        self.preemptions.clear();
        self.queued.clear();
        let mut queued: BTreeMap<(String, &'static str), DeviceNanos> = BTreeMap::new();
        for report in workers {
            // A worker without a connection reports neither.
            let (Some(load), Some(class)) = (report.load, &report.class) else { continue };
            let label = StepLabels { worker: report.name.to_string() };
            if let Some(counts) = load.counts {
                self.show(&label, &counts, load.busy);
                let preemptions = self.preemptions.get_or_create(&label);
                preemptions.inner().store(load.preemptions, Ordering::Relaxed);
            }
            for (tier, waiting) in
                [("interactive", load.waiting_interactive), ("batch", load.waiting_batch)]
            {
                let sum = queued.entry((class.to_string(), tier)).or_default();
                *sum = DeviceNanos(sum.nanos().saturating_add(waiting.nanos()));
            }
        }
        for ((class, tier), waiting) in queued {
            self.queued.get_or_create(&QueueLabels { class, tier }).set(waiting.as_secs_f64());
        }
        &self.registry
    }

    fn show(&self, label: &StepLabels, counts: &StepCounts, busy: DeviceNanos) {
        let seconds = STEP_NANOS.iter().map(|limit| DeviceNanos(*limit).as_secs_f64());
        self.step_seconds.get_or_create(label).set(busy.as_secs_f64(), seconds, counts.by_time());
        let sequences = STEP_SEQUENCES.iter().map(|limit| *limit as f64);
        let sum = counts.sequences() as f64;
        self.batch_sequences.get_or_create(label).set(sum, sequences, counts.by_sequences());
    }
}
