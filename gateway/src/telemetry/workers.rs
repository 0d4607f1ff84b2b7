//! The state of workers and of the journals that they send, read when metrics are scraped.
//! Labels are the names of workers, models and device classes.

use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tollgate_domain::{DeviceNanos, UtcTime};
use tollgate_serving::settlement::{BooksReport, PostedTime};
use tollgate_serving::workers::{DeviceLoad, WorkerReport};

use super::{FloatGauge, gauge};

type Seconds = Counter<f64, AtomicU64>;

/// The figures of all workers.
#[derive(Debug)]
pub(super) struct WorkerMetrics {
    registry: Registry,
    info: Family<InfoLabels, Gauge>,
    up: Family<ByWorker, Gauge>,
    distrusted: Family<ByWorker, Gauge>,
    queued: Family<ByWorker, Gauge>,
    running: Family<ByWorker, Gauge>,
    backlog: Family<ByWorker, FloatGauge>,
    kv_blocks: Family<StateLabels, Gauge>,
    steps: Family<ByWorker, Counter>,
    busy: Family<ByWorker, Seconds>,
    account: Family<AccountLabels, Seconds>,
    wall: Family<ByWorker, Seconds>,
    journal_lag: Family<ByWorker, FloatGauge>,
    round_trip: Family<ByWorker, FloatGauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ByWorker {
    worker: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InfoLabels {
    worker: String,
    class: String,
    device: String,
    model: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StateLabels {
    worker: String,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AccountLabels {
    worker: String,
    account: &'static str,
}

impl WorkerMetrics {
    pub(super) fn new() -> Self {
        let mut metrics = Self {
            registry: Registry::with_prefix("tollgate"),
            info: Family::default(),
            up: Family::default(),
            distrusted: Family::default(),
            queued: Family::default(),
            running: Family::default(),
            backlog: Family::default(),
            kv_blocks: Family::default(),
            steps: Family::default(),
            busy: Family::default(),
            account: Family::default(),
            wall: Family::default(),
            journal_lag: Family::default(),
            round_trip: Family::default(),
        };
        metrics.register_state();
        metrics.register_time();
        metrics
    }

    fn register_state(&mut self) {
        let Self { registry, .. } = self;
        registry.register(
            "worker_info",
            "Always 1 for each model of a connected worker; device is the name for people",
            self.info.clone(),
        );
        registry.register("worker_up", "1 if the worker is connected", self.up.clone());
        registry.register(
            "worker_distrusted",
            "1 if the worker sent an invalid report and gets no requests until it is restarted",
            self.distrusted.clone(),
        );
        registry.register("worker_queued", "Requests that wait at the worker", self.queued.clone());
        registry.register(
            "worker_running",
            "Requests that run at the worker",
            self.running.clone(),
        );
        registry.register_with_unit(
            "worker_backlog",
            "Predicted device time of the requests that wait and run at the worker",
            Unit::Seconds,
            self.backlog.clone(),
        );
        registry.register(
            "worker_kv_blocks",
            "Blocks of the KV cache, used and free",
            self.kv_blocks.clone(),
        );
        registry.register(
            "worker_steps",
            "Steps since the worker's process started",
            self.steps.clone(),
        );
    }

    fn register_time(&mut self) {
        let Self { registry, .. } = self;
        registry.register_with_unit(
            "worker_busy",
            "Device time of steps since the worker's process started",
            Unit::Seconds,
            self.busy.clone(),
        );
        registry.register_with_unit(
            "worker_account",
            "Device time that reached the ledger since the gateway started, by account",
            Unit::Seconds,
            self.account.clone(),
        );
        registry.register_with_unit(
            "worker_wall",
            "Wall time that reached the ledger since the gateway started: the sum of all accounts",
            Unit::Seconds,
            self.wall.clone(),
        );
        registry.register_with_unit(
            "journal_lag",
            "Age of the newest time of the worker that is in the ledger; an idle worker sends a block once a minute",
            Unit::Seconds,
            self.journal_lag.clone(),
        );
        registry.register_with_unit(
            "worker_round_trip",
            "Time of the latest message to the worker and back; the gateway sends one every 5 s",
            Unit::Seconds,
            self.round_trip.clone(),
        );
    }

    /// Sets the figures and returns the registry. `now` is the time of the scrape.
    pub(super) fn read(
        &self,
        workers: &[WorkerReport],
        books: &BooksReport,
        now: UtcTime,
    ) -> &Registry {
        self.clear();
        workers.iter().for_each(|report| self.show(report));
        for (worker, posted) in &books.workers {
            self.show_posted(ByWorker { worker: worker.to_string() }, posted, now);
        }
        &self.registry
    }

    /// Removes all series: a worker that is gone must not keep its last figures, which would
    /// look current.
    fn clear(&self) {
        self.info.clear();
        self.up.clear();
        self.distrusted.clear();
        self.queued.clear();
        self.running.clear();
        self.backlog.clear();
        self.kv_blocks.clear();
        self.steps.clear();
        self.busy.clear();
        self.account.clear();
        self.wall.clear();
        self.journal_lag.clear();
        self.round_trip.clear();
    }

    fn show(&self, report: &WorkerReport) {
        let label = ByWorker { worker: report.name.to_string() };
        // Only a connected worker has a load.
        self.up.get_or_create(&label).set(report.load.is_some().into());
        self.distrusted.get_or_create(&label).set(report.distrusted.into());
        // A worker that is not connected reports nothing, and 0 would look measured.
        let Some(load) = report.load else { return };
        for model in &report.models {
            let labels = InfoLabels {
                worker: label.worker.clone(),
                class: report.class.as_ref().map_or_else(String::new, ToString::to_string),
                device: report.device.clone().unwrap_or_default(),
                model: model.to_string(),
            };
            self.info.get_or_create(&labels).set(1);
        }
        self.queued.get_or_create(&label).set(report.queued.into());
        self.running.get_or_create(&label).set(report.running.into());
        self.backlog.get_or_create(&label).set(report.backlog.as_secs_f64());
        if let Some(time) = report.round_trip {
            self.round_trip.get_or_create(&label).set(time.as_secs_f64());
        }
        let DeviceLoad {
            kv_blocks_used,
            kv_blocks_free,
            steps,
            busy,
            // The figures of steps and of the queue have metrics of their own.
            counts: _,
            preemptions: _,
            waiting_interactive: _,
            waiting_batch: _,
        } = load;
        for (state, blocks) in [("used", kv_blocks_used), ("free", kv_blocks_free)] {
            let labels = StateLabels { worker: label.worker.clone(), state };
            self.kv_blocks.get_or_create(&labels).set(blocks.into());
        }
        self.steps.get_or_create(&label).inner().store(steps, Ordering::Relaxed);
        set_seconds(&self.busy.get_or_create(&label), busy.nanos());
    }

    fn show_posted(&self, label: ByWorker, posted: &PostedTime, now: UtcTime) {
        let PostedTime { tenants, overhead, idle, loss, until } = *posted;
        for (account, nanos) in
            [("tenants", tenants), ("overhead", overhead), ("idle", idle), ("loss", loss)]
        {
            let labels = AccountLabels { worker: label.worker.clone(), account };
            set_seconds(&self.account.get_or_create(&labels), nanos);
        }
        set_seconds(&self.wall.get_or_create(&label), tenants + overhead + idle + loss);
        // Another machine's clock may be ahead of this one.
        let lag = DeviceNanos(now.0.saturating_sub(until.0)).as_secs_f64();
        self.journal_lag.get_or_create(&label).set(lag);
    }
}

/// Sets a counter whose count is kept elsewhere.
fn set_seconds(counter: &Seconds, nanos: u64) {
    let seconds = DeviceNanos(nanos).as_secs_f64();
    // The counter holds the bits of a float.
    counter.inner().store(seconds.to_bits(), Ordering::Relaxed);
}

/// Returns the number of requests that wait at workers.
pub(super) fn waiting_at_workers(workers: &[WorkerReport]) -> i64 {
    gauge(workers.iter().map(|report| u64::from(report.queued)).sum::<u64>())
}
