//! Several workers: workers on one GPU take turns, workers on several GPUs run in
//! parallel, and the other workers replace a lost one. The GPUs are synthetic; locks,
//! processes, journals and ledger are real.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_loadtest::client::Connection;

use crate::support::{self, Tollgate, post, signal};

fn config(devices: &str, locks: &Path) -> String {
    format!(
        r#"
{}
[models.tollgate-demo]
devices = {devices}

[worker]
engine = "synthetic"

[worker.sharing]
locks = "{}"

[worker.synthetic]
step = "5ms"
"#,
        support::OPEN,
        locks.display()
    )
}

async fn ask(connection: &Connection, tokens: u32) -> Value {
    let body = json!({
        "model": "tollgate-demo", "max_tokens": tokens,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    });
    let (status, reply) = post(connection, "/v1/chat/completions", &body).await;
    assert_eq!((status, &reply["usage"]["completion_tokens"]), (200, &json!(tokens)), "{reply}");
    reply
}

/// Returns the busy time of each worker that had any, ns.
fn busy(gateway: &Tollgate) -> Vec<i64> {
    let reader = gateway.books();
    let epochs = reader.epochs().expect("reads").into_iter();
    let balances = epochs.map(|epoch| reader.balance(epoch).expect("reads"));
    balances.map(|it| it.tenants_ns + it.overhead_ns).filter(|&busy| busy > 0).collect()
}

/// Loads two workers on `devices` at once. Returns each worker's busy time, the elapsed
/// time, and the stopped gateway.
async fn two_at_once(devices: &str, locks: &Path) -> (Vec<i64>, i64, Tollgate) {
    let mut gateway = Tollgate::with_config(&config(devices, locks));
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let began = Instant::now();
    tokio::join!(
        ask(&connection, 200),
        ask(&connection, 200),
        ask(&connection, 200),
        ask(&connection, 200),
    );
    let passed = i64::try_from(began.elapsed().as_nanos()).expect("seconds");
    assert_eq!(gateway.stop(), Some(0));
    (busy(&gateway), passed, gateway)
}

/// Checks that workers on a shared GPU take turns, so that its time is billed once. As
/// a control, the same load on two GPUs must be busy for longer than the elapsed time.
#[tokio::test]
async fn workers_sharing_a_gpu_never_overlap() {
    let locks = tempfile::tempdir().expect("a folder");
    let shared = r#"["cuda:one", "cuda:one"]"#;
    let (busy, passed, gateway) = two_at_once(shared, locks.path()).await;
    assert_eq!(busy.len(), 2, "both had turns: {busy:?}");
    assert!(busy.iter().sum::<i64>() <= passed, "{busy:?} in {passed}");
    let apart = r#"["cuda:one", "cuda:two"]"#;
    let (busy, passed, _) = two_at_once(apart, locks.path()).await;
    assert!(busy.iter().sum::<i64>() > passed, "the control fails: {busy:?} in {passed}");

    // Every record names the GPU.
    let folder = locks.path().join("audit");
    gateway.command(&["audit", "export", "--out", &folder.display().to_string()]);
    let lines = fs::read_to_string(folder.join("records.jsonl")).expect("an export");
    let gpus: BTreeSet<String> = lines
        .lines()
        .map(|line| serde_json::from_str::<Value>(line).expect("JSON")["record"].clone())
        .filter(|record| record["user.id"]["tenant"] == "acme")
        .filter_map(|record| record["gpu.id"].as_str().map(str::to_owned))
        .collect();
    assert_eq!(gpus.into_iter().collect::<Vec<_>>(), ["synthetic-one"]);
}

/// Checks that a GPU in use by another instance is refused in one clear sentence.
#[test]
fn gpu_locked_by_another_process_is_refused() {
    let locks = tempfile::tempdir().expect("a folder");
    let config = config(r#"["cuda:one"]"#, locks.path());
    let first = Tollgate::with_config(&config);
    let (path, data) = (first.config().display().to_string(), locks.path().join("data"));
    let other = data.display().to_string();
    let words = ["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];
    let words = [&words[..], &["--config", &path, "--data", &other]].concat();
    let error = support::failing(&words);
    let expected = format!(
        "the GPU synthetic-one is in use by tollgate with the data folder {}",
        first.data().display()
    );
    assert!(error.contains(&expected), "{error}");
}

/// Checks three devices: requests spread over them, and each device is lost in turn.
#[tokio::test]
async fn requests_spread_over_workers_and_survive_losses() {
    let locks = tempfile::tempdir().expect("a folder");
    let devices = r#"["cuda:one", "cuda:two", "cuda:three"]"#;
    let mut gateway = Tollgate::with_config(&config(devices, locks.path()));
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let workers = gateway.workers();
    assert_eq!(workers.len(), 3);
    for worker in workers {
        let mut asks = tokio::task::JoinSet::new();
        for _ in 0..9 {
            let connection = connection.clone();
            asks.spawn(async move { ask(&connection, 60).await });
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        signal(worker, "KILL");
        // No part of these answers had been sent, so another worker repeats the
        // request.
        asks.join_all().await;
    }
    assert_eq!(gateway.stop(), Some(0));
    let busy = busy(&gateway);
    assert!(busy.len() >= 3, "each had its part: {busy:?}");
}
