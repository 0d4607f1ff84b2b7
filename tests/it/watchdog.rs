//! Workers that hang, fall silent or lose their device. Each client gets one error, the
//! bill covers only the work done, the worker returns, and other workers are not
//! affected. The devices are synthetic and fail on the request of a file; processes,
//! streams, journals and ledger are real.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde_json::{Value, json};
use tempfile::TempDir;
use tollgate_ledger::LedgerReader;
use tollgate_loadtest::client::Connection;

use crate::support::{self, Tollgate, errors, post, rest, runs, signal};

/// The longest wait for a new worker: C12 promises 30 s.
const BACK_WITHIN: Duration = Duration::from_secs(30);

/// Returns a config with `workers` synthetic devices that fail as files in `faults`
/// ask; a token takes about 30 ms.
fn config(workers: usize, faults: &TempDir, more: &str) -> String {
    let devices = vec!["\"cpu\""; workers].join(", ");
    format!(
        r#"
{}
[models.tollgate-demo]
devices = [{devices}]

[worker]
engine = "synthetic"

[worker.synthetic]
faults = "{}"
{more}
"#,
        support::OPEN,
        faults.path().display()
    )
}

fn ask(max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": "tollgate-demo", "max_tokens": max_tokens, "stream": stream,
        "messages": [{ "role": "user", "content": "Tell me a story." }],
    })
}

/// Sends a streaming request and waits for its first event.
async fn streamed(connection: &Connection, tokens: u32) -> http::Response<Incoming> {
    let body = ask(tokens, true).to_string().into();
    let mut response = connection.post("/v1/chat/completions", body).await.expect("answers");
    assert_eq!(response.status(), 200);
    response.frame().await.expect("a first chunk").expect("whole");
    response
}

/// Sends requests until a worker answers.
async fn answered(connection: &Connection, tokens: u32) {
    let started = Instant::now();
    loop {
        let (status, reply) = post(connection, "/v1/chat/completions", &ask(tokens, false)).await;
        if status == 200 {
            assert_eq!(reply["usage"]["completion_tokens"], tokens, "{reply}");
            return;
        }
        assert!(status == 503 && started.elapsed() < BACK_WITHIN, "{status} {reply}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Asserts that every nanosecond has an account and that the log contains `words`.
fn books(gateway: &Tollgate, log: &Path, words: &[&str]) -> LedgerReader {
    let log = fs::read_to_string(log).expect("a log");
    for words in words {
        assert!(log.contains(words), "{words:?} is missing in:\n{log}");
    }
    gateway.books()
}

/// Returns the counted restarts of worker processes: labels and number.
async fn restarts(gateway: &Tollgate) -> Vec<String> {
    let metrics = gateway.metrics().await;
    let counted = metrics.lines();
    counted
        .filter_map(|line| line.strip_prefix("tollgate_worker_restarts_total"))
        .map(str::to_owned)
        .collect()
}

fn loss(reader: &LedgerReader) -> i64 {
    let epochs = reader.epochs().expect("reads");
    epochs.into_iter().map(|epoch| reader.balance(epoch).expect("reads").loss_ns).sum()
}

/// Checks C12: a step never ends.
#[tokio::test]
async fn hanging_worker_is_ended_while_others_serve() {
    let faults = tempfile::tempdir().expect("a folder");
    let log = faults.path().join("log");
    let limits = "[worker.watchdog]\nstep = \"1s\"\n";
    let mut gateway = Tollgate::logging(&config(2, &faults, limits), "info", &log);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let before = gateway.workers();
    let (one, other) = (streamed(&connection, 150).await, streamed(&connection, 150).await);
    // An unstarted answer moves to another worker.
    let (whole, also) = (connection.clone(), connection.clone());
    let body = ask(60, false);
    let hang = async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        fs::write(faults.path().join("0"), "hang").expect("writes");
        Instant::now()
    };
    let (hung, one, other, first, second) = tokio::join!(
        hang,
        rest(one),
        rest(other),
        async { post(&whole, "/v1/chat/completions", &body).await },
        async { post(&also, "/v1/chat/completions", &body).await },
    );
    let mut told = [errors(&one), errors(&other)];
    told.sort_unstable();
    assert_eq!(told, [0, 1], "one of the two was on it, and hears of it once: {one} {other}");
    let unharmed = if errors(&one) == 0 { &one } else { &other };
    assert!(unharmed.contains("\"length\"") && unharmed.contains("[DONE]"), "{unharmed}");
    for (status, reply) in [&first, &second] {
        assert_eq!((*status, &reply["usage"]["completion_tokens"]), (200, &json!(60)), "{reply}");
    }
    gateway.until_ready(2, BACK_WITHIN).await;
    assert!(hung.elapsed() < BACK_WITHIN, "{:?}", hung.elapsed());
    let after = gateway.workers();
    let stayed = after.iter().filter(|pid| before.contains(pid)).count();
    assert_eq!((after.len(), stayed), (2, 1), "{before:?} {after:?}");
    answered(&connection, 5).await;
    let counted = restarts(&gateway).await;
    assert!(counted.len() == 1 && counted[0].ends_with("why=\"hung\"} 1"), "{counted:?}");
    assert_eq!(gateway.stop(), Some(0));
    let reader = books(&gateway, &log, &["a step has not ended", "a step did not end in time"]);
    // The watched time of the hung step, at least a second, is in the platform's loss.
    assert!(loss(&reader) >= 1_000_000_000, "{}", loss(&reader));
}

/// Checks C12: a stopped process, which cannot detect its own hang.
#[tokio::test]
async fn silent_worker_is_killed_and_restarted() {
    let faults = tempfile::tempdir().expect("a folder");
    let log = faults.path().join("log");
    let limits = "[worker.watchdog]\nsilence = \"4s\"\n";
    let mut gateway = Tollgate::logging(&config(1, &faults, limits), "info", &log);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let response = streamed(&connection, 2_000).await;
    let [silent] = gateway.workers()[..] else { panic!("one worker") };
    signal(silent, "STOP");
    let stopped = Instant::now();
    let text = rest(response).await;
    assert_eq!(errors(&text), 1, "{text}");
    answered(&connection, 5).await;
    assert_eq!(restarts(&gateway).await, [r#"{worker="0",why="silent"} 1"#]);
    assert!(stopped.elapsed() < BACK_WITHIN, "{:?}", stopped.elapsed());
    assert!(!runs(silent) && gateway.workers() != [silent]);
    assert_eq!(gateway.stop(), Some(0));
    books(&gateway, &log, &["worker sends no heartbeats", "the worker sent no heartbeats"]);
}

/// Checks C13: the device fails in a step and has no memory for the next start.
#[tokio::test]
async fn worker_with_failing_device_is_restarted() {
    let faults = tempfile::tempdir().expect("a folder");
    let log = faults.path().join("log");
    let mut gateway = Tollgate::logging(&config(1, &faults, ""), "info", &log);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for (fault, first_start) in [("memory", Some("memory")), ("fail", None)] {
        let response = streamed(&connection, 2_000).await;
        if let Some(fault) = first_start {
            fs::write(faults.path().join("0.start"), fault).expect("writes");
        }
        fs::write(faults.path().join("0"), fault).expect("writes");
        let failed = Instant::now();
        let text = rest(response).await;
        assert_eq!(errors(&text), 1, "{text}");
        answered(&connection, 5).await;
        assert!(failed.elapsed() < BACK_WITHIN, "{:?}", failed.elapsed());
        assert!(!faults.path().join("0.start").exists(), "it was started twice");
    }
    assert_eq!(gateway.stop(), Some(0));
    let reader = books(&gateway, &log, &["out of memory", "the device failed"]);
    assert!(loss(&reader) > 0, "two steps failed");
}

/// Checks C13: three answers need together twice the KV cache.
#[tokio::test]
async fn full_kv_pool_preempts_and_answers_all() {
    let faults = tempfile::tempdir().expect("a folder");
    let log = faults.path().join("log");
    let small = "kv_tokens = 1_024\ncontext = 1_024\nspeed = 20.0\n";
    let mut gateway = Tollgate::logging(&config(1, &faults, small), "info", &log);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let before = gateway.workers();
    let body = ask(600, false);
    let answer = || {
        let (connection, body) = (connection.clone(), body.clone());
        async move { post(&connection, "/v1/chat/completions", &body).await }
    };
    let (first, second, third) = tokio::join!(answer(), answer(), answer());
    for (status, reply) in [first, second, third] {
        assert_eq!((status, &reply["usage"]["completion_tokens"]), (200, &json!(600)), "{reply}");
    }
    assert_eq!(gateway.workers(), before, "the process lives");
    assert_eq!(gateway.stop(), Some(0));
    let reader = books(&gateway, &log, &[]);
    let epochs = reader.epochs().expect("reads");
    let overhead: i64 =
        epochs.iter().map(|&epoch| reader.balance(epoch).expect("reads").overhead_ns).sum();
    assert!(overhead > 0, "what was computed again is the platform's");
    assert_eq!(loss(&reader), 0);
}
