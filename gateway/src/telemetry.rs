//! Metrics and the log, for operators.
//!
//! Metrics are one struct that is passed by value and never global. Every label
//! comes from a closed set or from config, so that no client can make a series.
//! A refusal is a counter, and a log line only in the access log. Prompts, answers and secrets appear
//! in neither.

mod activity;
mod devices;
mod jobs;
mod json_line;
mod log;
mod log_line;
mod process;
mod refusals;
mod state;
mod steps;
mod tenants;
mod text;
mod webhook;
mod workers;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::StatusCode;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, ModelName, TenantId, Usage, UtcTime, WorkerName,
};
use tollgate_edge::ListenerMetrics;
use tollgate_edge::listener::ConnectionCounts;

use self::activity::Activity;
pub(crate) use self::activity::{MinuteTotals, RecentRefusal, RequestTotals};
use self::devices::DeviceMetrics;
pub(crate) use self::devices::concerns;
use self::jobs::JobMetrics;
pub use self::log::{LogFormat, LogOptions, log_subscriber};
use self::process::ProcessMetrics;
use self::refusals::RefusalBook;
pub(crate) use self::refusals::RefusedRow;
use self::state::StateMetrics;
pub(crate) use self::state::StateReadings;
use self::steps::StepMetrics;
use self::tenants::TenantMetrics;
pub(crate) use self::tenants::{Outcome, TenantReadings};
pub(crate) use self::text::TextFormat;
use self::webhook::WebhookMetrics;
use self::workers::{WorkerMetrics, waiting_at_workers};
use crate::reply::ApiError;
use tollgate_admission::{CapReached, Offence};
use tollgate_jobs::JobFigures;
use tollgate_serving::caps::CapFigures;
use tollgate_serving::rates::PartFigures;
use tollgate_serving::settlement::BooksReport;
use tollgate_serving::timings::RequestTimings;
use tollgate_serving::workers::WorkerReport;
use tollgate_serving::{Clock, Observer};

/// A gauge of fractions.
type FloatGauge = Gauge<f64, std::sync::atomic::AtomicU64>;

/// All metrics of a gateway.
#[derive(Debug)]
pub struct Metrics {
    /// Held by the scrape that runs: a second one would clear series that the first is about
    /// to write.
    scraping: Mutex<()>,
    registry: Registry,
    process: ProcessMetrics,
    devices: DeviceMetrics,
    tenants: TenantMetrics,
    refused: RefusalBook,
    activity: Activity,
    workers: WorkerMetrics,
    steps: StepMetrics,
    state: StateMetrics,
    jobs: JobMetrics,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Family<EndpointLabel, Histogram>,
    in_flight: Gauge,
    refusals: Family<KindLabel, Counter>,
    penalties: Family<ReasonLabel, Counter>,
    caps_reached: Family<CapReachedLabels, Counter>,
    /// The counters of the webhook.
    pub(crate) webhook: WebhookMetrics,
    connections: Family<ConnectionLabels, Gauge>,
    connections_refused: Family<ReasonLabel, Counter>,
    connections_ended: Family<ReasonLabel, Counter>,
    responses_unread: Counter,
    handshakes_failed: Family<ReasonLabel, Counter>,
    tokens: Family<TokenLabels, Counter>,
    attributed_seconds: Family<ModelLabels, Counter<f64, std::sync::atomic::AtomicU64>>,
    first_token_seconds: Family<ModelLabels, Histogram>,
    answer_seconds: Family<ModelLabels, Histogram>,
    output_token_seconds: Family<ModelLabels, Histogram>,
    stage_seconds: Family<StageLabel, Histogram>,
    ready: Gauge,
    ledger_writable: Gauge,
    gateways: Gauge,
    rate_waits: Counter,
    rate_waits_unanswered: Counter,
    rate_calls: Counter,
    rates_shared: Gauge,
    cap_waits: Counter,
    cap_waits_unanswered: Counter,
    cap_transactions: Counter,
    workers_ready: Gauge,
    worker_protocol_violations: Counter,
    worker_losses: Counter,
    holds: Gauge,
    body_bytes: Gauge,
    host_work_waiting: Gauge,
    config_ok: Gauge,
    config_loaded: Gauge<f64, std::sync::atomic::AtomicU64>,
    config_info: Family<ConfigLabel, Gauge>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConfigLabel {
    sha256: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    endpoint: &'static str,
    status: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EndpointLabel {
    endpoint: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct CapReachedLabels {
    limit: &'static str,
    percent: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ConnectionLabels {
    listener: &'static str,
    state: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct TokenLabels {
    model: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
    class: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StageLabel {
    stage: &'static str,
}

/// Values that a scrape reads from other components.
#[derive(Default)]
pub(crate) struct Readings<'a> {
    pub(crate) tenants: TenantReadings<'a>,
    pub(crate) state: StateReadings,
    pub(crate) jobs: JobFigures,
    pub(crate) books: BooksReport,
    /// The time of the scrape.
    pub(crate) now: UtcTime,
    pub(crate) ready: bool,
    pub(crate) ledger_writable: bool,
    pub(crate) gateways: u32,
    pub(crate) caps: CapFigures,
    /// The work for parts of rates, if these move between gateways.
    pub(crate) parts: Option<PartFigures>,
    pub(crate) workers: Vec<WorkerReport>,
    pub(crate) worker_protocol_violations: u64,
    pub(crate) worker_losses: u64,
    pub(crate) holds: usize,
    pub(crate) body_bytes: u64,
    pub(crate) host_work_waiting: usize,
}

impl Metrics {
    /// Creates the metrics with every figure at zero.
    pub fn new(clock: Clock) -> Arc<Self> {
        let mut metrics = Self {
            scraping: Mutex::default(),
            // The prefix keeps these names apart from those of other programs in the same database.
            registry: Registry::with_prefix("tollgate"),
            process: ProcessMetrics::new(),
            devices: DeviceMetrics::new(),
            tenants: TenantMetrics::new(),
            refused: RefusalBook::new(clock.clone()),
            activity: Activity::new(clock),
            workers: WorkerMetrics::new(),
            steps: StepMetrics::new(),
            state: StateMetrics::new(),
            jobs: JobMetrics::new(),
            requests: Family::default(),
            request_seconds: Family::new_with_constructor(|| seconds(&REQUEST_SECONDS)),
            in_flight: Gauge::default(),
            refusals: Family::default(),
            penalties: Family::default(),
            caps_reached: Family::default(),
            webhook: WebhookMetrics::default(),
            connections: Family::default(),
            connections_refused: Family::default(),
            connections_ended: Family::default(),
            responses_unread: Counter::default(),
            handshakes_failed: Family::default(),
            tokens: Family::default(),
            attributed_seconds: Family::default(),
            first_token_seconds: Family::new_with_constructor(|| seconds(&FIRST_TOKEN_SECONDS)),
            answer_seconds: Family::new_with_constructor(|| seconds(&ANSWER_SECONDS)),
            output_token_seconds: Family::new_with_constructor(|| seconds(&OUTPUT_TOKEN_SECONDS)),
            stage_seconds: Family::new_with_constructor(|| seconds(&STAGE_SECONDS)),
            ready: Gauge::default(),
            ledger_writable: Gauge::default(),
            gateways: Gauge::default(),
            rate_waits: Counter::default(),
            rate_waits_unanswered: Counter::default(),
            rate_calls: Counter::default(),
            rates_shared: Gauge::default(),
            cap_waits: Counter::default(),
            cap_waits_unanswered: Counter::default(),
            cap_transactions: Counter::default(),
            workers_ready: Gauge::default(),
            worker_protocol_violations: Counter::default(),
            worker_losses: Counter::default(),
            holds: Gauge::default(),
            body_bytes: Gauge::default(),
            host_work_waiting: Gauge::default(),
            config_ok: Gauge::default(),
            config_loaded: Gauge::default(),
            config_info: Family::default(),
        };
        metrics.register_requests();
        metrics.register_usage();
        metrics.register_readings();
        metrics.register_shared();
        metrics.register_config();
        Arc::new(metrics)
    }

    fn register_requests(&mut self) {
        // A clone shares its figures with the original, so later updates reach the registry.
        let Self { registry, .. } = self;
        registry.register("requests", "Requests answered", self.requests.clone());
        registry.register_with_unit(
            "request",
            "Time from a request's head to the end of its handler; a stream goes on after its handler; requests that the head check refuses are not included",
            Unit::Seconds,
            self.request_seconds.clone(),
        );
        registry.register(
            "requests_in_flight",
            "Requests whose handler runs",
            self.in_flight.clone(),
        );
        registry.register("errors", "Requests that ended in an error", self.refusals.clone());
        registry.register("penalties", "Penalties imposed", self.penalties.clone());
        registry.register(
            "connections",
            "Open connections; uncounted: those of trusted proxies, and those being closed",
            self.connections.clone(),
        );
        registry.register(
            "connections_refused",
            "Connections closed by a connection limit",
            self.connections_refused.clone(),
        );
        registry.register(
            "connections_ended",
            "Connections closed after their TLS handshake",
            self.connections_ended.clone(),
        );
        registry.register(
            "responses_unread",
            "Responses over HTTP/2 ended because the client did not read them",
            self.responses_unread.clone(),
        );
        registry.register(
            "handshakes_failed",
            "Connections closed before the end of their TLS handshake",
            self.handshakes_failed.clone(),
        );
    }

    fn register_usage(&mut self) {
        let Self { registry, .. } = self;
        registry.register("tokens", "Tokens metered", self.tokens.clone());
        registry.register(
            "caps_reached",
            "Caps and budgets that reached a part of their value, in percent",
            self.caps_reached.clone(),
        );
        self.webhook.register(registry);
        registry.register_with_unit(
            "attributed",
            "Device time attributed to requests",
            Unit::Seconds,
            self.attributed_seconds.clone(),
        );
        registry.register_with_unit(
            "answer",
            "Time of an answered request from its body to its last token: the sum of its stages",
            Unit::Seconds,
            self.answer_seconds.clone(),
        );
        registry.register_with_unit(
            "output_token",
            "Mean time of an answer between two of its tokens, at the worker",
            Unit::Seconds,
            self.output_token_seconds.clone(),
        );
        registry.register_with_unit(
            "first_token",
            "Time from a request's head to its first token",
            Unit::Seconds,
            self.first_token_seconds.clone(),
        );
        registry.register_with_unit(
            "stage",
            "Time of an answered request in each stage; to_device and to_host are parts of prefill and decode, and grammar is host time beside them",
            Unit::Seconds,
            self.stage_seconds.clone(),
        );
    }

    /// Registers the figures of what several gateways share.
    fn register_shared(&mut self) {
        let Self { registry, .. } = self;
        registry.register(
            "gateways",
            "Gateways among which rates and places are divided, this one included",
            self.gateways.clone(),
        );
        registry.register(
            "rate_waits",
            "Waits of requests for a part of a rate that several gateways share",
            self.rate_waits.clone(),
        );
        registry.register(
            "rate_waits_unanswered",
            "Waits for a part of a rate that ended without an answer of the Redis server",
            self.rate_waits_unanswered.clone(),
        );
        registry.register(
            "rate_calls",
            "Calls to the Redis server about parts of rates",
            self.rate_calls.clone(),
        );
        registry.register(
            "rates_shared",
            "1 if this gateway shares rates on a Redis server; 0 if it uses an equal part of each",
            self.rates_shared.clone(),
        );
        registry.register(
            "cap_waits",
            "Waits of requests for a part of a cap that several gateways share",
            self.cap_waits.clone(),
        );
        registry.register(
            "cap_waits_unanswered",
            "Waits for a part of a cap that ended without an answer of the database server",
            self.cap_waits_unanswered.clone(),
        );
        registry.register(
            "cap_transactions",
            "Transactions on the database server about parts of caps",
            self.cap_transactions.clone(),
        );
    }

    fn register_readings(&mut self) {
        let Self { registry, .. } = self;
        registry.register(
            "ready",
            "1 if requests succeed: a worker is ready, usage can be recorded, no drain",
            self.ready.clone(),
        );
        registry.register(
            "ledger_writable",
            "1 if the last commit of the ledger reached the disk; billable requests are refused while 0",
            self.ledger_writable.clone(),
        );
        registry.register(
            "workers_ready",
            "Workers that accept requests",
            self.workers_ready.clone(),
        );
        registry.register(
            "worker_protocol_violations",
            "Invalid reports of workers",
            self.worker_protocol_violations.clone(),
        );
        registry.register(
            "worker_losses",
            "Worker connections lost since the start",
            self.worker_losses.clone(),
        );
        registry.register(
            "holds",
            "Holds on limits: requests that run or wait",
            self.holds.clone(),
        );
        registry.register_with_unit(
            "request_body",
            "Memory for request bodies that arrive or wait to be parsed",
            Unit::Bytes,
            self.body_bytes.clone(),
        );
        registry.register(
            "host_work_waiting",
            "Requests that wait to be parsed and tokenized",
            self.host_work_waiting.clone(),
        );
    }

    fn register_config(&mut self) {
        let Self { registry, .. } = self;
        registry.register(
            "config_ok",
            "1 if the last reading of the config found no mistake; while 0 the earlier config stays in force",
            self.config_ok.clone(),
        );
        registry.register_with_unit(
            "config_loaded_timestamp",
            "Unix time at which the config in force was loaded",
            Unit::Seconds,
            self.config_loaded.clone(),
        );
        registry.register(
            "config_info",
            "Always 1; the label is the SHA-256 of the files of the config in force",
            self.config_info.clone(),
        );
    }

    /// Notes that a config of this hash is in force since `at`.
    pub(crate) fn config_loaded(&self, sha256: &str, at: UtcTime) {
        // At the start no reading has set it.
        self.config_ok.set(1);
        self.config_loaded.set(at.unix_seconds() as f64);
        // One series at a time: the hash of the config before has no meaning any more.
        self.config_info.clear();
        self.config_info.get_or_create(&ConfigLabel { sha256: sha256.to_owned() }).set(1);
    }

    /// Notes that a config was read, with or without a mistake.
    pub(crate) fn config_read(&self, is_ok: bool) {
        self.config_ok.set(is_ok.into());
    }

    /// Returns the metrics in `format`.
    #[expect(clippy::expect_used, reason = "writing to a string does not fail")]
    pub(crate) fn scrape(&self, readings: Readings<'_>, format: TextFormat) -> String {
        // A panic of another scrape leaves series that this one clears.
        let _turn = self.scraping.lock().unwrap_or_else(PoisonError::into_inner);
        self.set_readings(&readings);
        let Readings { workers, tenants, mut state, jobs, books, now, .. } = readings;
        state.waiting[2] = ("workers", waiting_at_workers(&workers));
        let registries = [
            &self.registry,
            self.process.read(),
            self.devices.read(&workers),
            self.workers.read(&workers, &books, now),
            self.steps.read(&workers),
            self.tenants.read(&tenants),
            self.state.read(&state, &books),
            self.jobs.read(&jobs, now),
        ];
        let mut text = String::new();
        registries
            .into_iter()
            .try_for_each(|registry| encode_registry(&mut text, registry))
            // OpenMetrics requires an end mark, by which a scraper notices a text that was cut off.
            .and_then(|()| encode_eof(&mut text))
            .expect("writing into a String cannot fail");
        match format {
            TextFormat::OpenMetrics => text,
            TextFormat::Prometheus => text::to_prometheus(&text),
        }
    }

    /// Returns the metrics of no moment, as OpenMetrics.
    #[cfg(test)]
    pub(crate) fn text(&self) -> String {
        self.scrape(Readings::default(), TextFormat::OpenMetrics)
    }

    /// Sets the gauges that show the moment of the scrape.
    fn set_readings(&self, readings: &Readings<'_>) {
        let Readings { tenants: _, state: _, books: _, now: _, workers, .. } = readings;
        self.ready.set(readings.ready.into());
        self.ledger_writable.set(readings.ledger_writable.into());
        self.gateways.set(readings.gateways.into());
        self.workers_ready.set(gauge(workers.iter().filter(|report| report.ready).count()));
        // Serving keeps these counts; nothing else writes the counters.
        let set = |counter: &Counter, count| {
            counter.inner().store(count, std::sync::atomic::Ordering::Relaxed);
        };
        set(&self.worker_protocol_violations, readings.worker_protocol_violations);
        set(&self.worker_losses, readings.worker_losses);
        let PartFigures { waits, unanswered, calls, are_leased } =
            readings.parts.unwrap_or_default();
        set(&self.rate_waits, waits);
        set(&self.rate_waits_unanswered, unanswered);
        set(&self.rate_calls, calls);
        self.rates_shared.set(are_leased.into());
        let CapFigures { waits, unanswered, transactions } = readings.caps;
        set(&self.cap_waits, waits);
        set(&self.cap_waits_unanswered, unanswered);
        set(&self.cap_transactions, transactions);
        self.holds.set(gauge(readings.holds));
        self.body_bytes.set(gauge(readings.body_bytes));
        self.host_work_waiting.set(gauge(readings.host_work_waiting));
    }

    /// Counts the end of a request for work of `caller`. The config must have the caller's
    /// tenant. `refusal` is the error of a refused one.
    pub(crate) fn tenant_request(
        &self,
        caller: &Caller,
        outcome: Outcome,
        refusal: Option<&ApiError>,
    ) {
        self.tenants.count(&caller.tenant, outcome, refusal.map(|error| error.kind().0));
        self.activity.count(caller, outcome, refusal);
        if let Some(error) = refusal {
            self.refused.count(&caller.tenant, error);
        }
    }

    /// Returns the requests of the moment.
    pub(crate) fn activity(&self) -> &Activity {
        &self.activity
    }

    /// Returns the refusals of the last hour.
    pub(crate) fn refused(&self) -> &RefusalBook {
        &self.refused
    }

    /// Adds attributed device time of `tenant`, which must be one of the config's.
    pub(crate) fn tenant_used(&self, tenant: &TenantId, class: &DeviceClass, time: DeviceNanos) {
        self.tenants.used(tenant, class, time);
        self.activity.used(tenant, time);
    }

    /// Observes the times of a whole answer. `token` is the mean time between two tokens, if
    /// there are two.
    pub(crate) fn answer(
        &self,
        (model, class): (&ModelName, &DeviceClass),
        whole: Duration,
        token: Option<Duration>,
    ) {
        let labels = ModelLabels { model: model.to_string(), class: class.to_string() };
        self.answer_seconds.get_or_create(&labels).observe(whole.as_secs_f64());
        if let Some(token) = token {
            self.output_token_seconds.get_or_create(&labels).observe(token.as_secs_f64());
        }
    }

    pub(crate) fn request_began(&self) {
        self.in_flight.inc();
    }

    pub(crate) fn request_left(&self) {
        self.in_flight.dec();
    }

    /// Counts a request without its time, as for a refusal by the head check.
    pub(crate) fn request_counted(&self, endpoint: &'static str, status: StatusCode) {
        let status = status_class(status);
        self.requests.get_or_create(&RequestLabels { endpoint, status }).inc();
    }

    pub(crate) fn request_answered(
        &self,
        endpoint: &'static str,
        status: StatusCode,
        elapsed: Duration,
    ) {
        // Both figures are kept, because the histogram has no label for the status.
        self.request_counted(endpoint, status);
        self.request_seconds
            .get_or_create(&EndpointLabel { endpoint })
            .observe(elapsed.as_secs_f64());
    }

    pub(crate) fn error(&self, kind: &'static str) {
        self.refusals.get_or_create(&KindLabel { kind }).inc();
    }

    /// Counts a restart of a worker's process; `why` is one of a closed set.
    pub(crate) fn worker_restarted(&self, worker: &WorkerName, why: &'static str) {
        self.steps.restarted(worker, why);
    }

    /// Counts a penalty; `reason` is the name of an offence.
    pub(crate) fn penalty_began(&self, reason: &'static str) {
        self.penalties.get_or_create(&ReasonLabel { reason }).inc();
    }

    /// Observes the time of one stage of an answered request. `stage` must be one of
    /// a closed set.
    pub(crate) fn stage(&self, stage: &'static str, time: Duration) {
        self.stage_seconds.get_or_create(&StageLabel { stage }).observe(time.as_secs_f64());
    }
}

impl Observer for Metrics {
    fn usage(&self, model: &ModelName, class: &DeviceClass, usage: &Usage) {
        // The label `model` is safe: only models that a worker serves are metered, so a client
        // cannot make up names.
        for (kind, tokens) in [
            ("prompt", usage.prompt_tokens),
            ("cached", usage.cached_tokens),
            ("completion", usage.completion_tokens),
        ] {
            let labels = TokenLabels { model: model.to_string(), kind };
            self.tokens.get_or_create(&labels).inc_by(tokens);
        }
        self.attributed_seconds
            .get_or_create(&ModelLabels { model: model.to_string(), class: class.to_string() })
            .inc_by(usage.attributed.as_secs_f64());
    }

    fn first_token(&self, model: &ModelName, class: &DeviceClass, elapsed: Duration) {
        self.first_token_seconds
            .get_or_create(&ModelLabels { model: model.to_string(), class: class.to_string() })
            .observe(elapsed.as_secs_f64());
    }

    fn timings(&self, timings: &RequestTimings) {
        for (stage, time) in timings.stages() {
            self.stage(stage, time);
        }
    }

    fn block_committed(&self, elapsed: Duration) {
        self.state.block_committed(elapsed);
    }

    fn penalty_began(&self, offence: Offence) {
        Self::penalty_began(self, offence.as_str());
    }

    fn cap_reached(&self, reached: &CapReached) {
        let CapReached { limit, scope: _, class: _, percent } = reached;
        let labels = CapReachedLabels { limit: limit.as_str(), percent: u32::from(*percent) };
        self.caps_reached.get_or_create(&labels).inc();
    }
}

impl ListenerMetrics for Metrics {
    fn connections_open(&self, listener: &'static str, counts: ConnectionCounts) {
        let ConnectionCounts { authenticated, unauthenticated, uncounted } = counts;
        for (state, open) in [
            ("authenticated", authenticated),
            ("unauthenticated", unauthenticated),
            ("uncounted", uncounted),
        ] {
            self.connections.get_or_create(&ConnectionLabels { listener, state }).set(gauge(open));
        }
    }

    fn connection_refused(&self, reason: &'static str) {
        self.connections_refused.get_or_create(&ReasonLabel { reason }).inc();
    }

    fn connection_ended(&self, reason: &'static str) {
        self.connections_ended.get_or_create(&ReasonLabel { reason }).inc();
    }

    fn response_unread(&self) {
        self.responses_unread.inc();
    }

    fn handshake_failed(&self, reason: &'static str) {
        self.handshakes_failed.get_or_create(&ReasonLabel { reason }).inc();
    }
}

/// Returns `2xx`, `4xx` and so on: a closed set of labels.
fn status_class(status: StatusCode) -> &'static str {
    // Classes keep the number of series small; the counter of errors has the exact kinds.
    match status.as_u16() {
        100..200 => "1xx",
        200..300 => "2xx",
        300..400 => "3xx",
        400..500 => "4xx",
        _ => "5xx",
    }
}

fn seconds(bounds: &[f64]) -> Histogram {
    Histogram::new(bounds.iter().copied())
}

fn gauge(value: impl TryInto<i64>) -> i64 {
    // A figure beyond the range must not make a scrape panic.
    value.try_into().unwrap_or(i64::MAX)
}

// The last bound is the default deadline of a request.
const REQUEST_SECONDS: [f64; 12] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0, 600.0];

const STAGE_SECONDS: [f64; 14] = [
    0.000_01, 0.000_1, 0.000_5, 0.001, 0.002_5, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 60.0, 600.0,
];

const FIRST_TOKEN_SECONDS: [f64; 10] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0];

const ANSWER_SECONDS: [f64; 12] =
    [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0, 600.0];

const OUTPUT_TOKEN_SECONDS: [f64; 10] =
    [0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0];

#[cfg(test)]
mod reference_tests;
#[cfg(test)]
mod strict_tests;
#[cfg(test)]
mod tests;
