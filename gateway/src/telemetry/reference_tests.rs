//! `docs/reference/metrics.md` lists what the registry exposes. To renew the page
//! after a change of a metric:
//! `TOLLGATE_REGENERATE=1 cargo test -p tollgate-gateway --lib telemetry::reference`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use tollgate_domain::WorkerName;
use tollgate_wire::v1;

use super::*;

#[test]
#[allow(clippy::disallowed_methods, reason = "the switch of a test, not a setting of the product")]
fn metrics_page_is_current() {
    let path =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/metrics.md");
    let page = page(&every_metric());
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
fn every_metric() -> String {
    let metrics = Metrics::new();
    let (model, class) = (ModelName::new("m").unwrap(), DeviceClass::cpu());
    metrics.request_answered("models", StatusCode::OK, Duration::from_millis(3));
    metrics.error("requests_per_minute");
    metrics.penalty_began("refusals");
    metrics.connections_open("public", ConnectionCounts::default());
    metrics.connection_refused("per_source");
    metrics.connection_ended("idle");
    metrics.handshake_failed("silent");
    metrics.usage(&model, &class, &Usage { prompt_tokens: 7, ..Usage::default() });
    metrics.first_token(&model, &class, Duration::from_millis(40));
    metrics.timings(&RequestTimings::default());
    metrics.config_loaded("5feceb66", UtcTime(1));
    metrics.scrape(Readings { ready: true, workers: vec![worker()], ..Readings::default() })
}

/// Describes a worker whose device reports every figure.
fn worker() -> WorkerReport {
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
        ..v1::DeviceHealth::default()
    };
    WorkerReport {
        resting: false,
        name: WorkerName::new("0").unwrap(),
        ready: true,
        distrusted: false,
        class: None,
        device: None,
        models: Vec::new(),
        queued: 0,
        running: 0,
        backlog: Default::default(),
        health: Some(health),
        heartbeat: None,
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

`GET /metrics` on the admin listener answers in the OpenMetrics text format. Every label
value comes from a closed set or from the configuration, so a client cannot create a
series. A family without a series is not in the answer. A histogram has the usual samples
`_bucket`, `_sum` and `_count`.

| metric | type | labels | meaning |
|---|---|---|---|
";
