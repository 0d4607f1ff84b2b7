//! A test of `tollgate verify-limits` on real gateways: every probed limit holds on a
//! gateway of its own, and a gateway with other limits than its config is reported.

use std::process::Command;

use serde_json::Value;

use crate::support::{self, Tollgate, binary};

const CONFIG: &str = r#"
[gateway.timeouts]
handshake = "1s"
first_byte = "1s"
headers = "1s"
body_progress = "1s"

[gateway.http2]
streams = 50

[gateway.connections]
per_key = 20
per_tenant = 50
authenticated_per_source = 30

[gateway.requests]
body_memory_per_tenant = "4MiB"
body_memory = "8MiB"

[plans.small]
requests_per_minute = { limit = 60, burst = 5 }
concurrent = 2
queued = 3
device_time_per_day = { default = "30ms" }

[plans.small.batches]
queued = 5
lines = 40
files = 12
made_per_minute = { limit = 60, burst = 9 }

[plans.nightly.batches]
queued = 5
lines = 40
files = 12
made_per_minute = { limit = 60, burst = 9 }
device_time_per_day = { default = "300ms" }

[plans.long]
device_time_per_day = { default = "4h" }
device_time_per_month = { default = "100h" }

[plans.wide]
concurrent = 80
queued = 8

[tenants.acme]
plan = "small"
[tenants.canary]
plan = "wide"
"#;

/// The findings by limit, and the exit code.
fn verify(config: &str, words: &[&str]) -> (Option<i32>, Value) {
    verify_within("20s", config, words)
}

fn verify_within(budget: &str, config: &str, words: &[&str]) -> (Option<i32>, Value) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("tollgate.toml");
    std::fs::write(&path, config).expect("writes the config");
    let output = Command::new(binary())
        .args(["verify-limits", "--json", "--budget", budget, "--config"])
        .arg(&path)
        .args(words)
        .output()
        .expect("the binary starts");
    let told = serde_json::from_slice(&output.stdout).unwrap_or_else(|error| {
        panic!("{error}: {}", String::from_utf8_lossy(&output.stderr));
    });
    (output.status.code(), told)
}

fn finding<'a>(told: &'a Value, limit: &str) -> &'a str {
    let rows = told["limits"].as_array().expect("rows");
    let row = rows.iter().find(|row| row["limit"] == limit);
    row.unwrap_or_else(|| panic!("no {limit} in {told:#}"))["finding"].as_str().expect("text")
}

#[test]
fn verify_limits_sees_every_configured_limit() {
    stay_within_a_day();
    let (code, told) = verify(CONFIG, &[]);
    assert_eq!(code, Some(0), "{told:#}");
    for limit in [
        "plans.small.requests_per_minute",
        "plans.small.concurrent",
        "plans.small.queued",
        "plans.small.device_time_per_day",
        "plans.long.device_time_per_day",
        "plans.long.device_time_per_month",
        "gateway.requests.messages",
        "gateway.requests.body",
        "gateway.requests.json_depth",
        "gateway.http2.streams",
        "gateway.http2.header_size",
        "plans.* together",
        "plans.small.batches.made_per_minute",
        "plans.small.batches.queued",
        "plans.small.batches.lines",
        "plans.small.batches.files",
        "plans.nightly.batches.device_time_per_day",
        "plans.long.batches.queued",
        "plans.long.batches.lines",
        "gateway.timeouts.headers",
        "gateway.connections.per_source",
        "gateway.connections.per_key",
        "gateway.connections.per_tenant",
        "gateway.connections.authenticated_per_source",
        "gateway.requests.body_memory_per_tenant",
        "gateway.requests.body_memory",
    ] {
        assert_eq!(finding(&told, limit), "holds", "{limit} of {told:#}");
    }
    // Limits that are not probed are listed with a reason.
    assert_eq!(finding(&told, "gateway.timeouts.connection_age"), "no_probe");
    assert_eq!(finding(&told, "gateway.timeouts.idle"), "not_probed");
}

/// Checks that a limit of connections that cannot be probed in time leaves no verdict.
#[test]
fn verify_limits_without_time_gives_no_verdict() {
    let (code, told) =
        verify_within("10ms", "[plans.open]\n[tenants.acme]\nplan = \"open\"\n", &[]);
    assert_eq!(code, Some(2), "{told:#}");
    assert_eq!(finding(&told, "gateway.connections.per_key"), "not_probed", "{told:#}");
}

/// Checks the control: a gateway runs with other limits than the config.
#[test]
fn verify_limits_finds_a_wrong_limit() {
    // A slow device would spend the day's cap before the rate is reached.
    let config = CONFIG.replace("30ms", "30s");
    let other = config.replace("burst = 5", "burst = 50").replace("streams = 50", "streams = 55");
    let gateway = Tollgate::with_config(&other);
    let data = gateway.data().display().to_string();
    let words = ["--url", &gateway.url, "--data", &data, "--tenant", "canary"];
    let (code, told) = verify(&config, &words);
    assert_eq!(code, Some(1), "{told:#}");
    assert_eq!(finding(&told, "plans.small.requests_per_minute"), "broken", "{told:#}");
    assert_eq!(finding(&told, "gateway.http2.streams"), "broken", "{told:#}");
    assert_eq!(finding(&told, "gateway.requests.choices"), "holds", "{told:#}");
    // The keys of the probe are revoked afterwards.
    let keys: Value =
        serde_json::from_str(&gateway.command(&["keys", "list", "--json"])).expect("JSON");
    let keys = keys["keys"].as_array().expect("keys");
    assert!(!keys.is_empty() && keys.iter().all(|key| key["state"] == "revoked"), "{keys:#?}");
}

/// Waits until midnight if it is near, because midnight resets a daily cap.
fn stay_within_a_day() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(support::stay_within_a_day());
}
