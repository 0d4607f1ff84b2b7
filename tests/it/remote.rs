//! Workers on other machines: `tollgate gateway` and `tollgate worker --listen`, which
//! prove by certificates who they are. Here all machines are this one.

use std::fs;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::machines::Machines;
use crate::support::{failing, post, posted, rest, signal};

fn count(max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens, "stream": stream,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

const CHAT: &str = "/v1/chat/completions";
const SOON: Duration = Duration::from_secs(60);

/// The worker is killed in the middle of an answer. What the device did before is billed,
/// and the next worker process goes on.
#[tokio::test]
async fn remote_worker_killed_loses_no_usage() {
    let machines = Machines::new();
    let mut gateway = machines.gateway("a");
    assert!(gateway.banner.iter().any(|line| line.contains("gpu0   not connected yet")));
    let mut worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 200, "{body}");

    let long = count(400, true).to_string().into();
    let response = connection.post(CHAT, long).await.expect("answers");
    assert_eq!(response.status(), 200);
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    worker.kill();
    let _ = rest(response).await;
    let mut worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let usage = posted(&connection, &id).await;
    assert!(usage["attributed_ns"].as_u64() > Some(0), "{usage}");
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 200, "{body}");

    // A drained worker hands over its last blocks before it ends.
    worker.drain();
    assert_eq!(gateway.stop(), Some(0));
    let books = gateway.books();
    let epochs = books.epochs().expect("reads");
    assert_eq!(epochs.len(), 2, "two lives of one worker");
    assert!(epochs.into_iter().all(|epoch| books.balance(epoch).expect("reads").is_exact()));
}

/// A worker that does not answer, as one behind a cut cable, gets no requests and is
/// connected again when it answers.
#[tokio::test]
async fn remote_worker_that_hangs_is_left_and_returns() {
    let machines = Machines::new();
    let mut gateway = machines.gateway("a");
    let worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let long = count(400, true).to_string().into();
    let response = connection.post(CHAT, long).await.expect("answers");
    signal(worker.pid(), "STOP");
    let stopped = Instant::now();
    // The ping after 5 s and its answer within 5 s decide; the test has a margin.
    gateway.until_ready(0, Duration::from_secs(30)).await;
    assert!(rest(response).await.contains("\"error\""), "the stream ends with its error");
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 503, "{body} {:?}", stopped.elapsed());
    signal(worker.pid(), "CONT");
    gateway.until_ready(1, SOON).await;
    let (status, body) = post(&connection, CHAT, &count(20, false)).await;
    assert_eq!(status, 200, "{body}");
    assert_eq!(gateway.stop(), Some(0));
    gateway.books();
}

#[tokio::test]
async fn remote_link_is_measured() {
    let machines = Machines::new();
    let gateway = machines.gateway("a");
    let _worker = machines.worker("tls", "gpu0");
    gateway.until_ready(1, SOON).await;
    let admin = gateway.connect_admin().await;
    let metrics = read_metrics(&admin).await;
    let series = "tollgate_worker_round_trip_seconds{worker=\"gpu0\"} ";
    let seconds = metrics.lines().find_map(|line| line.strip_prefix(series));
    let seconds: f64 = seconds.expect(&metrics).parse().expect("a number");
    assert!(seconds > 0.0 && seconds < 5.0, "{seconds}");
    let (is_ok, text) = machines.check(&machines.gateway_config("a"));
    assert!(is_ok, "{text}");
    assert!(text.contains("gpu0") && text.contains("tollgate-demo"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    // Two ledgers must not bill the same time, so another gateway is refused.
    let (is_ok, text) = machines.check(&machines.gateway_config("b"));
    assert!(!is_ok && text.contains("the worker serves gateway a"), "{text}");
}

async fn read_metrics(admin: &tollgate_loadtest::client::Connection) -> String {
    let response = admin.get("/metrics").await.expect("answers");
    rest(response).await
}

/// Each wrong certificate is refused, with a sentence that names the mistake.
#[tokio::test]
async fn remote_link_refuses_wrong_certificates() {
    let machines = Machines::new();
    machines.certificates("foreign", "prod");
    machines.certificates("staging", "staging");
    // The worker's own certificate has another name.
    let failure = machines.worker("tls", "gpu1").failure();
    assert!(failure.contains("is not of tollgate://prod/worker/gpu0"), "{failure}");
    assert!(failure.contains("it names tollgate://prod/worker/gpu1"), "{failure}");
    let failure = machines.worker("staging", "gpu0").failure();
    assert!(failure.contains("it names tollgate://staging/worker/gpu0"), "{failure}");

    let worker = machines.worker("tls", "gpu0");
    worker.until_logged("is ready to serve").await;
    let ours = machines.gateway_config("a");
    let tls = machines.path("tls").display().to_string();
    let foreign = machines.path("foreign").display().to_string();
    let (is_ok, text) = machines.check(&ours.replace(&tls, &foreign));
    assert!(!is_ok && text.contains("invalid peer certificate"), "{text}");
    let (is_ok, text) = machines.check(&ours.replace("workers.gpu0", "workers.gpu1"));
    assert!(!is_ok && text.contains("tollgate://prod/worker/gpu1"), "{text}");
    // A worker's certificate is none of a gateway.
    let (is_ok, text) = machines.check(&ours.replace("/a.", "/gpu1."));
    assert!(!is_ok && text.contains("is not of tollgate://prod/gateway/NAME"), "{text}");
    let (is_ok, text) = machines.check(&ours.replace(machines.address(), "127.0.0.1:1"));
    assert!(!is_ok && text.contains("cannot connect to 127.0.0.1:1"), "{text}");
    // The control: nothing of this has harmed the worker.
    let (is_ok, text) = machines.check(&ours);
    assert!(is_ok, "{text}");
}

#[test]
fn remote_workers_need_their_own_command() {
    let machines = Machines::new();
    let config = machines.path("gateway.toml");
    fs::write(&config, machines.gateway_config("a")).expect("writes");
    let (config, data) = (config.display().to_string(), machines.path("x").display().to_string());
    let refused = failing(&["up", "--config", &config, "--data", &data]);
    assert!(refused.contains("run `tollgate gateway`"), "{refused}");
    let refused = failing(&["gateway", "--data", &data]);
    assert!(refused.contains("the config names no worker"), "{refused}");
    let tls = machines.path("tls").display().to_string();
    let words = ["workers", "certificates", "--cluster", "prod", "--out", &tls, "--worker", "gpu0"];
    let refused = failing(&words);
    assert!(refused.contains("gpu0.pem exists"), "{refused}");
}
