//! `docs/reference/metrics.md` lists what the registry exposes. To renew the page
//! after a change of a metric:
//! `TOLLGATE_REGENERATE=1 cargo test -p tollgate-gateway --lib telemetry::reference`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::Path;

use tollgate_admission::{CapReached, Limit, LimitState, Scope};
use tollgate_config::Config;
use tollgate_domain::{KeyId, StepCounts, WorkerName};
use tollgate_serving::settlement::{BlockOutcome, PostedTime};
use tollgate_serving::workers::DeviceLoad;
use tollgate_wire::v1;

use super::*;

#[test]
#[allow(clippy::disallowed_methods, reason = "the switch of a test, not a setting of the product")]
fn metrics_page_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
    let page = page(&every_metric(TextFormat::OpenMetrics));
    if std::env::var_os("TOLLGATE_REGENERATE").is_some() {
        std::fs::write(&path, page).unwrap();
    } else {
        let current = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            current == page,
            "docs/reference/metrics.md is stale: run \
             TOLLGATE_REGENERATE=1 cargo test -p tollgate-gateway --lib telemetry::reference"
        );
    }
}

/// Scrapes a registry in which every family has a series; families without one
/// are not exposed.
pub(super) fn every_metric(format: TextFormat) -> String {
    let metrics = Metrics::new(Clock::system());
    let (model, class) = (ModelName::new("m").unwrap(), DeviceClass::cpu());
    metrics.request_answered("models", StatusCode::OK, Duration::from_millis(3));
    metrics.error("requests_per_minute");
    metrics.penalty_began("refusals");
    metrics.cap_reached(&CapReached {
        limit: Limit::DeviceTimePerDay,
        scope: Scope::Gateway,
        class: None,
        percent: 80,
    });
    metrics.webhook.message("delivered");
    metrics.webhook.attempt_failed("status");
    metrics.connections_open("public", ConnectionCounts::default());
    metrics.connection_refused("per_source");
    metrics.connection_ended("idle");
    metrics.handshake_failed("silent");
    metrics.usage(&model, &class, &Usage { prompt_tokens: 7, ..Usage::default() });
    metrics.first_token(&model, &class, Duration::from_millis(40));
    metrics.timings(&RequestTimings::default());
    metrics.config_loaded("5feceb66", UtcTime(1));
    metrics.answer((&model, &class), Duration::from_secs(1), Some(Duration::from_millis(9)));
    let config = "[plans.p]\ndevice_time_per_day = \"1h\"\n[tenants.acme]\nplan = \"p\"\n";
    let config = Config::from_toml(Path::new("test.toml"), config).unwrap();
    let acme = TenantId::new("acme").unwrap();
    let caller = Caller { tenant: acme.clone(), key: KeyId::new("k1").unwrap() };
    metrics.tenant_request(&caller, Outcome::Refused, Some(&ApiError::Draining));
    metrics.tenant_used(&acme, &class, DeviceNanos(7));
    metrics.block_committed(Duration::from_millis(2));
    metrics.worker_restarted(&WorkerName::new("0").unwrap(), "killed");
    let limits = |_: &TenantId| vec![day_cap()];
    let readings = Readings {
        ready: true,
        workers: vec![worker()],
        books: books(),
        now: UtcTime(9_000_000_000),
        state: StateReadings { waiting: [("limits", 1), ("tokenizer", 2), ("", 0)], ..state() },
        jobs: JobFigures { waiting: BTreeMap::from([("no_worker", 1)]), ..JobFigures::default() },
        tenants: TenantReadings {
            config: Some(&config),
            limits: Some(&limits),
            ..TenantReadings::default()
        },
        ..Readings::default()
    };
    metrics.scrape(readings, format)
}

fn state() -> StateReadings {
    StateReadings {
        disk_free: Some(1),
        certificate_expires: Some(UtcTime(1_000_000_000)),
        ..StateReadings::default()
    }
}

fn day_cap() -> LimitState {
    LimitState {
        scope: Scope::Tenant(TenantId::new("acme").unwrap()),
        limit: Limit::DeviceTimePerDay,
        class: Some(DeviceClass::cpu()),
        currency: None,
        value: 4,
        burst: None,
        used: 1,
        remaining: 3,
        refills: None,
    }
}

fn books() -> BooksReport {
    let posted = PostedTime { tenants: 1, until: UtcTime(8_000_000_000), ..PostedTime::default() };
    let mut books = BooksReport::default();
    books.workers.insert(WorkerName::new("0").unwrap(), posted);
    books.blocks.insert(BlockOutcome::Posted, 3);
    books
}

/// Describes a worker whose device reports every figure.
pub(super) fn worker() -> WorkerReport {
    let health = v1::DeviceHealth {
        utilisation_percent: Some(1),
        memory_used: Some(1),
        memory_total: Some(1),
        memory_ours: Some(1),
        temperature_celsius: Some(1),
        power_mw: Some(1),
        power_limit_mw: Some(1),
        energy_mj: Some(1),
        clock_mhz: Some(1),
        memory_clock_mhz: Some(1),
        ecc_corrected: Some(1),
        ecc_uncorrected: Some(1),
        processes: Some(1),
        xids: Some(1),
        ..v1::DeviceHealth::default()
    };
    WorkerReport {
        resting: false,
        name: WorkerName::new("0").unwrap(),
        ready: true,
        distrusted: false,
        class: Some(DeviceClass::cpu()),
        device: Some("a \"quoted\" name".to_owned()),
        models: vec![ModelName::new("m").unwrap()],
        queued: 0,
        running: 0,
        backlog: Default::default(),
        load: Some(DeviceLoad { counts: Some(StepCounts::default()), ..DeviceLoad::default() }),
        health: Some(health),
        heartbeat: None,
        round_trip: Some(Duration::from_millis(1)),
    }
}

/// Renders the page from a scrape in the text format.
fn page(scrape: &str) -> String {
    let mut help = BTreeMap::new();
    let mut labels: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in scrape.lines() {
        if let Some((name, text)) = line.strip_prefix("# HELP ").and_then(|l| l.split_once(' ')) {
            help.insert(name, text);
        } else if let Some((name, set)) = line.split_once('{') {
            let (set, _) = set.split_once('}').unwrap();
            // Label values of these samples hold neither commas nor braces.
            let names = set.split(',').filter_map(|pair| pair.split_once('=')).map(|(key, _)| key);
            labels.entry(name).or_default().extend(names.filter(|name| *name != "le"));
        }
    }
    let mut page = HEAD.to_owned();
    let types = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    for (name, kind) in types {
        // A counter's and a histogram's samples have a suffix.
        let sample = match kind {
            "counter" => format!("{name}_total"),
            "histogram" => format!("{name}_bucket"),
            _ => name.to_owned(),
        };
        let labels: Vec<String> =
            labels.get(&*sample).into_iter().flatten().map(|label| format!("`{label}`")).collect();
        let shown = if kind == "counter" { &sample } else { name };
        let (labels, help) = (labels.join(", "), help[name].trim_end_matches('.'));
        writeln!(page, "| `{shown}` | {kind} | {labels} | {help} |").unwrap();
    }
    page
}

const HEAD: &str = "\
# Metrics

<!-- Generated from gateway/src/telemetry. Do not edit this page. To renew it, run
TOLLGATE_REGENERATE=1 cargo test -p tollgate-gateway --lib telemetry::reference -->

`GET /metrics` on the admin listener answers in Prometheus's text format, or in OpenMetrics
if the `accept` header asks for `application/openmetrics-text`. Every label value comes from
a closed set or from the configuration, so a client cannot create a series. A family without
a series is not in the answer. A histogram has the usual samples `_bucket`, `_sum` and
`_count`.

The label `tenant` has at most 200 values: the tenants of the configuration with the most
device time today. The rest is `other`. All metrics of tenants together have at most 5,000
series. A label has at most 12 values of `kind`, the last of which is `other`, too. What a
tenant does while it has no label counts as `other` for good, so no counter goes back.

| metric | type | labels | meaning |
|---|---|---|---|
";
