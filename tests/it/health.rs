//! Health and energy of a device. NVML is a stand-in that this test builds with the C
//! compiler and whose values it rewrites; the device is synthetic. Library loading,
//! worker, status and metrics are real. These tests prove nothing about a real GPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate_ledger::{EnergyBalance, Ledger};
use tollgate_loadtest::client::Connection;

use crate::reload::put_in_force;
use crate::support::{self, Tollgate, get, post};

/// The values of a healthy GPU.
const HEALTHY: &str = "utilisation 40\nmemory_used 30000000000\nmemory_total 80000000000\n\
    memory_ours 20000000000\ntemperature 60\npower 300000\npower_limit 700000\nenergy 123456\n\
    clock 1980\nmemory_clock 2619\nthrottle 0\necc_corrected 2\necc_uncorrected 0\nmig 0\n";

/// Values by name that replace those of a healthy GPU.
type Values = &'static [(&'static str, u64)];

/// The stand-in for NVML with its file of values.
struct StandIn {
    library: PathBuf,
    values: PathBuf,
}

impl StandIn {
    fn build(folder: &TempDir) -> Self {
        Self::with(folder, &[])
    }

    /// Builds the stand-in with these macros.
    fn with(folder: &TempDir, macros: &[&str]) -> Self {
        let (library, values) = (folder.path().join("libnvml.so"), folder.path().join("values"));
        fs::write(&values, HEALTHY).expect("writes");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/support/nvml.c");
        let status = Command::new("cc")
            .args(["-shared", "-fPIC", "-Wall", "-Werror", "-o"])
            .args([&library, &source])
            .arg(format!("-DVALUES=\"{}\"", values.display()))
            .args(macros)
            .status();
        assert!(status.expect("a C compiler").success());
        Self { library, values }
    }

    /// Replaces values of the healthy GPU from now on.
    fn set(&self, changes: &[(&str, u64)]) {
        let changes: Vec<_> = changes.iter().map(|&(name, value)| (name, Some(value))).collect();
        self.set_or_remove(&changes);
    }

    /// Replaces values, or removes those given as `None`.
    fn set_or_remove(&self, changes: &[(&str, Option<u64>)]) {
        let changed = |name: &str| changes.iter().any(|change| change.0 == name);
        let kept =
            HEALTHY.lines().filter(|line| !changed(line.split(' ').next().unwrap_or_default()));
        let new = changes.iter().filter_map(|(name, value)| Some(format!("{name} {}", (*value)?)));
        let text: String = kept.map(str::to_owned).chain(new).map(|line| line + "\n").collect();
        // A rename writes the file at once, because the library reads the file at any
        // time.
        let draft = self.values.with_extension("new");
        fs::write(&draft, text).expect("writes");
        fs::rename(&draft, &self.values).expect("renames");
    }
}

fn config(devices: &str, nvml: &Path, locks: &Path) -> String {
    format!(
        r#"
{}
[models.tollgate-demo]
devices = {devices}

[worker]
engine = "synthetic"
synthetic.step = "5ms"
sharing.locks = "{}"

[worker.health]
every = "100ms"
well_for = "3s"
nvml = "{}"
"#,
        support::OPEN,
        locks.display(),
        nvml.display()
    )
}

/// Waits until the worker's status satisfies `holds`.
async fn until(admin: &Connection, words: &str, holds: impl Fn(&Value) -> bool) -> Value {
    let started = Instant::now();
    loop {
        let (_, status) = get(admin, "/v1/status").await;
        let worker = &status["workers"][0];
        if holds(worker) {
            return worker.clone();
        }
        assert!(started.elapsed() < Duration::from_secs(20), "never {words}: {worker}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

async fn ask(connection: &Connection) -> u16 {
    let body = json!({
        "model": "tollgate-demo", "max_tokens": 5,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    });
    post(connection, "/v1/chat/completions", &body).await.0
}

#[tokio::test]
#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
async fn unhealthy_device_gets_no_work_until_healthy() {
    let folder = tempfile::tempdir().expect("a folder");
    let gpu = StandIn::build(&folder);
    let config = config(r#"["cuda:one"]"#, &gpu.library, &folder.path().join("locks"));
    let mut gateway = Tollgate::with_config(&config);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let admin = gateway.connect_admin().await;
    let rests = |worker: &Value, concern: &str| {
        let health = &worker["health"];
        let concerned =
            health["concerns"].as_array().is_some_and(|all| all.contains(&json!(concern)));
        health["rests"] == true && concerned && worker["ready"] == false
    };
    let well = |worker: &Value| worker["health"]["rests"] == false && worker["ready"] == true;

    let worker = until(&admin, "well", well).await;
    for (figure, value) in [
        ("utilisation_percent", json!(40)),
        ("memory_used_bytes", json!(30_000_000_000_u64)),
        ("memory_ours_bytes", json!(20_000_000_000_u64)),
        ("temperature_celsius", json!(60)),
        ("power_mw", json!(300_000)),
        ("power_limit_mw", json!(700_000)),
        ("energy_mj", json!(123_456)),
        ("clock_mhz", json!(1_980)),
        ("memory_clock_mhz", json!(2_619)),
        ("ecc_corrected", json!(2)),
        ("processes", json!(1)),
        ("mig", json!(false)),
        ("concerns", json!([])),
    ] {
        assert_eq!(worker["health"][figure], value, "{figure} of {worker}");
    }
    assert_eq!(ask(&connection).await, 200);

    // Each fault, then the values after the fault.
    let cases: [(&str, &str, Values, Values); 3] = [
        ("hot", "hot", &[("temperature", 85)], &[("temperature", 75)]),
        ("ill by an Xid", "ill", &[("xid", 79), ("xids", 1)], &[]),
        ("gone", "gone", &[("lost", 1)], &[]),
    ];
    for (words, concern, is, was) in cases {
        gpu.set(is);
        until(&admin, words, |worker| rests(worker, concern)).await;
        if concern != "ill" {
            // This fault passes by itself, so a request may come too late to be
            // refused.
            assert_eq!(ask(&connection).await, 503, "{words}");
        }
        gpu.set(was);
        until(&admin, "well again", well).await;
        assert_eq!(ask(&connection).await, 200, "after it was {words}");
    }
    // An Xid of a program is no fault of the device; a full memory is a concern only.
    gpu.set(&[("xid", 31), ("xids", 2), ("memory_used", 79_000_000_000)]);
    let full = |worker: &Value| worker["health"]["concerns"] == json!(["memory_full"]);
    let worker = until(&admin, "full", full).await;
    assert!(well(&worker), "{worker}");
    let response = admin.get("/metrics").await.expect("answers");
    let metrics = http_body_util::BodyExt::collect(response.into_body()).await.expect("whole");
    let metrics = String::from_utf8(metrics.to_bytes().to_vec()).expect("UTF-8");
    for line in [
        r#"tollgate_device_memory_used_bytes{worker="0"} 79000000000.0"#,
        r#"tollgate_device_power_watts{worker="0"} 300.0"#,
        r#"tollgate_device_rests{worker="0"} 0.0"#,
        r#"tollgate_device_concern{worker="0",concern="memory_full"} 1"#,
        r#"tollgate_device_concern{worker="0",concern="hot"} 0"#,
        r#"tollgate_device_xids_total{worker="0"} 2.0"#,
    ] {
        assert!(metrics.contains(line), "{line} is missing in:\n{metrics}");
    }
    assert_eq!(gateway.stop(), Some(0));
}

/// A reload changes the temperature from which the device rests, also for a worker that
/// starts again.
#[tokio::test]
async fn reload_applies_thresholds_to_running_workers() {
    let folder = tempfile::tempdir().expect("a folder");
    let gpu = StandIn::build(&folder);
    let config = config(r#"["cuda:one"]"#, &gpu.library, &folder.path().join("locks"));
    let gateway = Tollgate::with_config(&config);
    let admin = gateway.connect_admin().await;
    let rests =
        |is: bool| move |worker: &Value| worker["health"]["rests"] == is && worker["ready"] == !is;
    until(&admin, "well", rests(false)).await;
    // The device has 60 degrees.
    let cautious = config.replace("well_for", "hot = 55\ncooled = 50\nwell_for");
    put_in_force(&gateway, &admin, &cautious).await;
    until(&admin, "too hot for the new threshold", rests(true)).await;
    let [worker] = gateway.workers()[..] else { panic!("one worker") };
    support::signal(worker, "KILL");
    until(&admin, "lost", |worker| worker["health"].is_null()).await;
    until(&admin, "too hot after its restart", rests(true)).await;
    put_in_force(&gateway, &admin, &config).await;
    until(&admin, "well again", rests(false)).await;
}

/// Sends a request and waits until its end is in the ledger.
async fn ask_and_settle(connection: &Connection, tokens: u32) {
    let body = json!({
        "model": "tollgate-demo", "max_tokens": tokens,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    });
    let response =
        connection.post("/v1/chat/completions", body.to_string().into()).await.expect("answers");
    assert_eq!(response.status(), 200);
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    support::read(response).await;
    let started = Instant::now();
    while get(connection, &format!("/v1/usage/{id}")).await.1["state"] != "posted" {
        assert!(started.elapsed() < Duration::from_secs(10), "{id} never ended");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the ledger's energy balance after a stop and asserts that energy and time
/// are exact.
fn energy_of(gateway: &Tollgate) -> Option<EnergyBalance> {
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    assert_eq!(reader.check(), vec![]);
    let mut all: Option<EnergyBalance> = None;
    for epoch in reader.epochs().expect("reads") {
        let time = reader.balance(epoch).expect("reads");
        assert!(time.is_exact() && time.wall_ns > 0, "{time:?}");
        if let Some(energy) = reader.energy(epoch).expect("reads") {
            assert!(energy.is_exact() && all.replace(energy).is_none(), "{energy:?}");
        }
    }
    all
}

/// Reads each row of `tollgate usage` by tenant: requests and energy.
fn usage_of(gateway: &Tollgate) -> Vec<(u64, Option<u64>)> {
    let usage = gateway.command(&["usage", "--json", "--by", "tenant"]);
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let rows = usage["rows"].as_array().expect("rows").iter();
    rows.map(|row| {
        assert!(row.get("energy_mj").is_some(), "{row}");
        (row["requests"].as_u64().expect("a figure"), row["energy_mj"].as_u64())
    })
    .collect()
}

/// Checks that the counter's movement is split between tenants, overhead, idle and loss
/// to the last millijoule. Backward and missing readings are in no account and disturb
/// no other figure.
#[tokio::test]
async fn energy_is_split_to_the_last_millijoule() {
    let folder = tempfile::tempdir().expect("a folder");
    let gpu = StandIn::build(&folder);
    let config = config(r#"["cuda:one"]"#, &gpu.library, &folder.path().join("locks"));
    let config = format!("{config}\n[tenants.other]\nplan = \"open\"\n");
    gpu.set(&[("energy", 500_000)]);
    let mut gateway = Tollgate::with_config(&config);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let admin = gateway.connect_admin().await;
    let told = |worker: &Value, counter: Option<u64>| {
        worker["ready"] == true && worker["health"]["energy_mj"] == json!(counter)
    };
    let mut moved = 0;
    for (counter, reported_mj, drawn_by) in [
        (Some(500_000), 0, None),
        (Some(500_701), 701, Some(&other)),
        (Some(512_345), 11_644, None),
        (Some(100), 0, None), // its driver was loaded anew
        (Some(153), 53, Some(&acme)),
        (None, 0, None),      // it tells nothing any more
        (Some(900), 0, None), // since when, nobody knows
        (Some(1_007), 107, Some(&other)),
    ] {
        let draw = async {
            gpu.set_or_remove(&[("energy", counter)]);
            until(&admin, "as it tells", |worker| told(worker, counter)).await;
            // The wait lets the worker also read the counter between two changes.
            tokio::time::sleep(Duration::from_millis(150)).await;
        };
        match drawn_by {
            // The device is idle.
            None => draw.await,
            // A stream of about 2 s is running.
            Some(connection) => {
                let later = async {
                    tokio::time::sleep(Duration::from_millis(500)).await;
                    draw.await;
                };
                tokio::join!(ask_and_settle(connection, 400), later);
            }
        }
        ask_and_settle(&acme, 20).await;
        ask_and_settle(&other, 20).await;
        moved += reported_mj;
    }
    let (status, statement) = get(&acme, "/v1/usage?group_by=").await;
    assert_eq!(status, 200, "{statement}");
    assert_eq!(gateway.stop(), Some(0));
    let energy = energy_of(&gateway).expect("it was told");
    assert_eq!(energy.energy_mj, moved);
    assert!(energy.tenants_mj > 0 && energy.idle_mj > 0 && energy.loss_mj == 0, "{energy:?}");
    let usage = usage_of(&gateway);
    assert_eq!(usage.iter().map(|row| row.0).collect::<Vec<_>>(), [9, 10]);
    assert!(usage.iter().all(|row| row.1 > Some(0)), "{usage:?}");
    let tenants: u64 = usage.iter().filter_map(|row| row.1).sum();
    assert_eq!(tenants as i64, energy.tenants_mj);
    assert_eq!(statement["data"][0]["energy_mj"].as_u64(), usage[0].1, "{statement}");
    let csv = gateway.command(&["usage", "--csv", "--by", "tenant"]);
    let (head, rows) = csv.split_once("\r\n").expect("a head");
    assert!(head.ends_with(",gpu_ns,energy_mj"), "{csv}");
    let of_row = |row: &str| row.rsplit(',').next().and_then(|energy| energy.parse().ok());
    let in_csv: Vec<Option<u64>> = rows.lines().map(of_row).collect();
    assert_eq!(in_csv, usage.iter().map(|row| row.1).collect::<Vec<_>>());
    println!("the counter moved by {moved} mJ that are told: {energy:?}; by tenant {usage:?}");
}

/// Checks that no energy is reported for a slice, which has no counter, or for a GPU
/// with several workers.
#[tokio::test]
async fn energy_of_a_shared_device_is_not_reported() {
    for (devices, slice) in [(r#"["cuda:one"]"#, true), (r#"["cuda:one", "cuda:one"]"#, false)] {
        let folder = tempfile::tempdir().expect("a folder");
        let gpu = StandIn::build(&folder);
        let config = config(devices, &gpu.library, &folder.path().join("locks"));
        let of_slice = slice.then_some(("slice", Some(1)));
        let tells = |energy| {
            let changes = [("energy", Some(energy))].into_iter().chain(of_slice);
            gpu.set_or_remove(&changes.collect::<Vec<_>>());
        };
        tells(1_000);
        let mut gateway = Tollgate::with_config(&config);
        let connection = gateway.connect(&gateway.key("acme", &[])).await;
        ask_and_settle(&connection, 20).await;
        tells(9_000);
        tokio::time::sleep(Duration::from_millis(300)).await;
        ask_and_settle(&connection, 20).await;
        assert_eq!(gateway.stop(), Some(0));
        assert_eq!(energy_of(&gateway), None, "{devices}");
        assert_eq!(usage_of(&gateway), [(2, None)], "{devices}");
        let table = gateway.command(&["usage"]);
        assert!(table.contains("billed") && !table.contains("energy"), "{table}");
    }
}

/// Checks that a hanging driver does not delay start, service and end.
#[tokio::test]
async fn hanging_nvml_delays_no_worker() {
    let folder = tempfile::tempdir().expect("a folder");
    let gpu = StandIn::build(&folder);
    let config = config(r#"["cuda:one"]"#, &gpu.library, &folder.path().join("locks"));
    gpu.set(&[("hangs", 1)]);
    let mut gateway = Tollgate::with_config(&config);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    ask_and_settle(&connection, 20).await;
    let (_, status) = get(&gateway.connect_admin().await, "/v1/status").await;
    assert_eq!(status["workers"][0]["health"], Value::Null, "{status}");
    assert_eq!(gateway.stop(), Some(0));
    assert_eq!(energy_of(&gateway), None);
}

/// Checks that a worker serves without NVML and logs one sentence.
#[tokio::test]
async fn device_unknown_to_nvml_serves_unmonitored() {
    let folder = tempfile::tempdir().expect("a folder");
    let gpu = StandIn::with(&folder, &["-DKNOWN=\"another\""]);
    let config = config(r#"["cuda:one"]"#, &gpu.library, &folder.path().join("locks"));
    let mut gateway = Tollgate::with_config(&config);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    assert_eq!(ask(&connection).await, 200);
    let admin = gateway.connect_admin().await;
    let worker = until(&admin, "ready", |worker| worker["ready"] == true).await;
    assert_eq!(worker["health"], Value::Null, "{worker}");
    assert_eq!(gateway.stop(), Some(0));
}

#[tokio::test]
async fn host_without_nvml_serves() {
    let folder = tempfile::tempdir().expect("a folder");
    let (missing, log) = (folder.path().join("missing.so"), folder.path().join("log"));
    let config = config(r#"["cuda:one"]"#, &missing, &folder.path().join("locks"));
    let mut gateway = Tollgate::logging(&config, "info", &log);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    assert_eq!(ask(&connection).await, 200);
    let (_, status) = get(&gateway.connect_admin().await, "/v1/status").await;
    assert_eq!(status["workers"][0]["health"], Value::Null, "{status}");
    assert_eq!(gateway.stop(), Some(0));
    let log = fs::read_to_string(&log).expect("a log");
    assert_eq!(log.matches("cannot open NVML").count(), 1, "{log}");
}
