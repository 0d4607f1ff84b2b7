//! Files and batches over HTTP: the SDKs, quotas, hostile uploads and foreign ids.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use http::HeaderMap;
use serde_json::{Value, json};
use tollgate_loadtest::client::Connection;

use crate::sdks::{succeeds, variable};
use crate::support::{self, Tollgate, get, post, program, read, tool};

const CONFIG: &str = r#"
[gateway.jobs]
file = "2MiB"

[plans.open]
requests_per_minute = 100_000
concurrent = 64

[plans.small]
requests_per_minute = 100_000
concurrent = 64

[plans.small.batches]
queued = 2
lines = 5
stored = "64KiB"
files = 6
made_per_minute = 30

[plans.none]
requests_per_minute = 100_000
[plans.none.batches]
queued = 0

[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"
[tenants.small]
plan = "small"
[tenants.none]
plan = "none"
"#;

#[test]
fn python_sdk_with_batches() {
    let Some(python) = tool("the Python SDK", variable("TOLLGATE_PYTHON")) else { return };
    let gateway = Tollgate::with_config(CONFIG);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/test_batches.py");
    let mut command = Command::new(python);
    command.arg(script).env("TOLLGATE_URL", &gateway.url).env("TOLLGATE_CA", gateway.ca());
    command.env("TOLLGATE_KEY", gateway.key("acme", &[]));
    command.env("TOLLGATE_KEY_OTHER", gateway.key("other", &[]));
    succeeds(command);
}

#[test]
fn node_sdk_with_batches() {
    let Some(modules) = tool("the Node SDK", variable("TOLLGATE_NODE_MODULES")) else { return };
    let Some(node) = program("node") else { return };
    let gateway = Tollgate::with_config(CONFIG);
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/sdk/batches.test.mjs");
    let mut command = Command::new(node);
    command.arg("--test").arg(script).env("TOLLGATE_NODE_MODULES", modules);
    command.env("NODE_EXTRA_CA_CERTS", gateway.ca()).env("TOLLGATE_URL", &gateway.url);
    command.env("TOLLGATE_KEY", gateway.key("acme", &[]));
    succeeds(command);
}

fn line(number: usize) -> String {
    let body = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 4,
        "messages": [{ "role": "user", "content": "Say hello." }],
    });
    let line = json!({
        "custom_id": format!("line-{number}"), "method": "POST",
        "url": "/v1/chat/completions", "body": body,
    });
    format!("{line}\n")
}

pub(crate) fn lines(count: usize) -> String {
    (0..count).map(line).collect()
}

const BOUNDARY: &str = "tollgate-test";

/// Returns the form of an upload.
fn form(text: &str) -> String {
    format!(
        "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n\
         --{BOUNDARY}\r\ncontent-disposition: form-data; name=\"file\"; filename=\"in.jsonl\"\r\n\
         content-type: application/octet-stream\r\n\r\n{text}\r\n--{BOUNDARY}--\r\n"
    )
}

async fn send(
    connection: &Connection,
    path: &str,
    headers: &[(&str, &str)],
    body: String,
) -> (u16, Value) {
    let pairs = headers
        .iter()
        .map(|(name, value)| (name.parse().expect("a name"), value.parse().expect("a value")));
    let headers: HeaderMap = pairs.collect();
    let response = connection.post_with(path, body.into(), headers).await.expect("answers");
    read(response).await
}

pub(crate) async fn upload(connection: &Connection, text: &str) -> (u16, Value) {
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    send(connection, "/v1/files", &[("content-type", &content_type)], form(text)).await
}

pub(crate) async fn create(connection: &Connection, file: &Value) -> (u16, Value) {
    let body = json!({
        "input_file_id": file["id"], "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    });
    post(connection, "/v1/batches", &body).await
}

pub(crate) async fn ended(connection: &Connection, batch: &Value) -> Value {
    let path = format!("/v1/batches/{}", batch["id"].as_str().expect("an id"));
    let started = Instant::now();
    loop {
        let (status, batch) = get(connection, &path).await;
        assert_eq!(status, 200, "{batch}");
        let state = batch["status"].as_str().expect("a state");
        if ["completed", "failed", "expired", "cancelled"].contains(&state) {
            return batch;
        }
        assert!(started.elapsed() < Duration::from_secs(60), "{batch}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// J01: the quotas of a plan hold, and their messages name figures and plan.
#[tokio::test]
async fn batch_quotas_refuse_with_figures() {
    let gateway = Tollgate::with_config(CONFIG);
    let small = gateway.connect(&gateway.key("small", &[])).await;
    let (status, file) = upload(&small, &lines(4)).await;
    assert_eq!(status, 200, "{file}");
    // Too many bytes for the plan, though not for the gateway.
    let (status, error) = upload(&small, &"x".repeat(70 << 10)).await;
    let text = error["error"]["message"].as_str().expect("a message");
    assert_eq!((status, &error["error"]["code"]), (429, &json!("batch_quota_exceeded")), "{error}");
    assert!(text.contains("'small'"), "{text}");
    let (status, first) = create(&small, &file).await;
    assert_eq!(status, 200, "{first}");
    ended(&small, &first).await;
    let (_, six) = upload(&small, &lines(6)).await;
    let (status, error) = create(&small, &six).await;
    assert_eq!((status, &error["error"]["code"]), (429, &json!("batch_quota_exceeded")), "{error}");
    assert!(error["error"]["message"].as_str().expect("text").contains('5'), "{error}");
    let none = gateway.connect(&gateway.key("none", &[])).await;
    let (_, file) = upload(&none, &lines(1)).await;
    let (status, error) = create(&none, &file).await;
    assert_eq!((status, &error["error"]["code"]), (429, &json!("batch_quota_exceeded")), "{error}");
    // The control: another tenant is not concerned.
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let (_, file) = upload(&acme, &lines(6)).await;
    assert_eq!(create(&acme, &file).await.0, 200);
}

/// J03: hostile inputs are refused, and none of them is kept.
#[tokio::test]
async fn batch_uploads_refuse_hostile_forms() {
    let gateway = Tollgate::with_config(CONFIG);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    let headers = [("content-type", content_type.as_str())];
    let part = |name: &str, value: &str| {
        format!(
            "--{BOUNDARY}\r\ncontent-disposition: form-data; name=\"{name}\"\r\n\r\n{value}\r\n"
        )
    };
    let end = format!("--{BOUNDARY}--\r\n");
    for (body, status) in [
        (part("purpose", "batch") + &end, 400),
        (part("file", "{}") + &end, 400),
        (part("purpose", "batch") + &part("file", "a") + &part("file", "b") + &end, 400),
        (part("purpose", &"p".repeat(5_000)) + &part("file", "a") + &end, 400),
        ((0..40).map(|n| part(&format!("p{n}"), "x")).collect::<String>() + &end, 400),
        (format!("--{BOUNDARY}\r\nx: {}\r\n\r\n", "y".repeat(200 << 10)), 400),
        (part("purpose", "batch") + &part("file", "a"), 400),
        (String::new(), 400),
        (form(&"x".repeat(3 << 20)), 413),
    ] {
        let shown: String = body.chars().take(80).collect();
        let answer = send(&acme, "/v1/files", &headers, body).await;
        assert_eq!(answer.0, status, "{shown}: {}", answer.1);
        // A refusal may end the connection, because the rest of the body is not read.
    }
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let gzip = [headers[0], ("content-encoding", "gzip")];
    assert_eq!(send(&acme, "/v1/files", &gzip, form("{}")).await.0, 415);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let (_, list) = get(&acme, "/v1/files").await;
    assert_eq!(list["data"], json!([]), "{list}");
    let twice = line(0) + &line(0);
    for (text, code) in [
        ("{\"custom_id\": 1}\n".to_owned(), "missing_required_parameter"),
        ("[[[\n".to_owned(), "invalid_json_line"),
        (twice, "duplicate_custom_id"),
        ("\n\n".to_owned(), "empty_file"),
    ] {
        let (_, file) = upload(&acme, &text).await;
        let batch = ended(&acme, &create(&acme, &file).await.1).await;
        assert_eq!(batch["status"], "failed", "{batch}");
        assert_eq!(batch["errors"]["data"][0]["code"], code, "{batch}");
    }
    // A body that nests too deep is the error of its own line.
    let deep = line(0).replace("\"Say hello.\"", &("[".repeat(5_000) + &"]".repeat(5_000)));
    let (_, file) = upload(&acme, &(deep + &line(1))).await;
    let batch = ended(&acme, &create(&acme, &file).await.1).await;
    assert_eq!(batch["request_counts"], json!({ "total": 2, "completed": 1, "failed": 1 }));
}

/// J07: another tenant's ids look like ids that do not exist.
#[tokio::test]
async fn batch_ids_of_others_look_unknown() {
    let gateway = Tollgate::with_config(CONFIG);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let (_, file) = upload(&acme, &lines(2)).await;
    let batch = ended(&acme, &create(&acme, &file).await.1).await;
    let id = |value: &Value| value.as_str().expect("an id").to_owned();
    let unknown = format!("file-{}", "0".repeat(32));
    let mut texts = Vec::new();
    for path in [
        format!("/v1/files/{}", id(&file["id"])),
        format!("/v1/files/{}/content", id(&batch["output_file_id"])),
        format!("/v1/batches/{}", id(&batch["id"])),
        format!("/v1/files/{unknown}"),
        "/v1/files/..%2f..%2fkeys.db/content".to_owned(),
        "/v1/files/%2e%2e".to_owned(),
    ] {
        let (status, error) = get(&other, &path).await;
        assert_eq!((status, &error["error"]["code"]), (404, &json!("not_found")), "{path} {error}");
        texts.push(error["error"]["message"].as_str().expect("text").to_owned());
    }
    let cancel = format!("/v1/batches/{}/cancel", id(&batch["id"]));
    assert_eq!(post(&other, &cancel, &json!({})).await.0, 404);
    let (status, error) = create(&other, &file).await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("input_file_id")), "{error}");
    // The control: its owner finds all of them.
    assert_eq!(get(&acme, &format!("/v1/files/{}", id(&file["id"]))).await.0, 200);
    let (status, error) = post(&acme, &cancel, &json!({})).await;
    assert_eq!((status, &error["error"]["code"]), (409, &json!("batch_ended")), "{error}");
}

/// J10: a creation that is repeated with its key makes one batch, also after a restart.
#[tokio::test]
async fn repeated_creations_make_one_batch() {
    let mut gateway = Tollgate::with_config(CONFIG);
    let key = gateway.key("acme", &[]);
    let acme = gateway.connect(&key).await;
    let content_type = format!("multipart/form-data; boundary={BOUNDARY}");
    let headers = [("content-type", content_type.as_str()), ("idempotency-key", "up-1")];
    let (status, file) = send(&acme, "/v1/files", &headers, form(&lines(3))).await;
    assert_eq!(status, 200, "{file}");
    assert_eq!(send(&acme, "/v1/files", &headers, form(&lines(3))).await.1["id"], file["id"]);
    for other in [form(&lines(2)), form(&lines(4)), form(&lines(3).replace("hello", "hullo"))] {
        let (status, error) = send(&acme, "/v1/files", &headers, other).await;
        assert_eq!((status, &error["error"]["code"]), (422, &json!("idempotency_key_reused")));
    }
    let body = json!({
        "input_file_id": file["id"], "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
    });
    let json = [("content-type", "application/json"), ("idempotency-key", "make-1")];
    let (status, batch) = send(&acme, "/v1/batches", &json, body.to_string()).await;
    assert_eq!(status, 200, "{batch}");
    let other = body.to_string().replace("chat/completions", "completions");
    let (status, error) = send(&acme, "/v1/batches", &json, other).await;
    assert_eq!((status, &error["error"]["code"]), (422, &json!("idempotency_key_reused")));
    gateway.stop();
    let gateway = gateway.restart();
    let acme = gateway.connect(&key).await;
    let (status, again) = send(&acme, "/v1/batches", &json, body.to_string()).await;
    assert_eq!((status, &again["id"]), (200, &batch["id"]), "{again}");
    let batch = ended(&acme, &batch).await;
    assert_eq!(batch["request_counts"]["completed"], 3, "{batch}");
    let (_, list) = get(&acme, "/v1/batches").await;
    assert_eq!(list["data"].as_array().expect("a list").len(), 1, "{list}");
    let usage = gateway.command(&["usage", "--json", "--by", "tenant"]);
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    assert_eq!(usage["rows"][0]["requests"], 3, "one bill: {usage}");
}

/// Admins list, show and cancel the batches of a tenant, and the cancel is recorded.
#[tokio::test]
async fn admins_list_and_cancel_batches() {
    let gateway = Tollgate::with_config(CONFIG);
    let acme = gateway.connect(&gateway.key("acme", &[])).await;
    // Long answers, so that the batch still runs when it is cancelled.
    let long = lines(400).replace("Say hello.", "Count from 1 to 400.");
    let (_, file) = upload(&acme, &long.replace("\"max_tokens\":4", "\"max_tokens\":400")).await;
    let (_, batch) = create(&acme, &file).await;
    let id = batch["id"].as_str().expect("an id").to_owned();
    let config = gateway.config().display().to_string();
    let run = |words: &[&str]| {
        gateway.command(&[words, &["--tenant", "acme", "--config", &config]].concat())
    };
    assert!(run(&["jobs", "list"]).contains(&id));
    assert!(run(&["jobs", "show", &id, "--json"]).contains("\"total\": 400"));
    let cancelled = run(&["jobs", "cancel", &id]);
    assert!(cancelled.lines().all(|line| line.chars().count() <= 80), "{cancelled}");
    let batch = ended(&acme, &batch).await;
    assert_eq!(batch["status"], "cancelled", "{batch}");
    let actions = gateway.command(&["audit", "actions", "--config", &config]);
    assert!(actions.contains("batch.cancelled"), "{actions}");
    let list = gateway.command(&["jobs", "list", "--tenant", "other", "--config", &config]);
    assert!(!list.contains(&id), "{list}");
}

/// A key that may not make batches is refused, and a revoked key ends its batches.
#[tokio::test]
async fn batches_follow_the_rights_of_their_key() {
    let gateway = Tollgate::with_config(CONFIG);
    let chat = gateway.connect(&gateway.key("acme", &["--endpoint", "chat"])).await;
    let (status, error) = upload(&chat, &lines(1)).await;
    assert_eq!((status, &error["error"]["code"]), (403, &json!("permission_denied")), "{error}");
    let key = gateway.key("acme", &[]);
    let acme = gateway.connect(&key).await;
    let (_, file) = upload(&acme, &lines(400)).await;
    let (_, batch) = create(&acme, &file).await;
    let id = key.split(['-', '.']).nth(1).expect("an id").to_owned();
    gateway.command(&["keys", "revoke", &id, "--config", &gateway.config().display().to_string()]);
    let second = gateway.connect(&gateway.key("acme", &[])).await;
    let batch = ended(&second, &batch).await;
    // A fast machine may have answered every line before.
    let state = batch["status"].as_str().expect("a state");
    assert!(["cancelled", "completed"].contains(&state), "{batch}");
    let counts = &batch["request_counts"];
    let sum = counts["completed"].as_u64().expect("a number")
        + counts["failed"].as_u64().expect("a number");
    assert_eq!(sum, 400, "{batch}");
}

/// Waits until no line of a batch runs because a cap is spent. Returns the number of answered
/// lines, and the spent part of the cap in ns.
pub(crate) async fn until_cap_spent(
    gateway: &Tollgate,
    connection: &Connection,
    path: &str,
) -> (u64, u64) {
    let started = Instant::now();
    let (mut last, mut equal) = ((0, 0), 0);
    loop {
        let (_, batch) = get(connection, path).await;
        assert_ne!(batch["status"], "completed", "the cap is for fewer lines: {batch}");
        let (_, limits) = get(connection, "/v1/limits").await;
        let rows = limits["data"].as_array().expect("rows");
        let cap = rows.iter().find(|row| row["scope"] == "tenant_batches").expect("the cap");
        let figure = |value: &Value| value.as_u64().expect("a figure");
        let now = (figure(&batch["request_counts"]["completed"]), figure(&cap["used"]));
        // Lines that ran when the cap was spent still end, and are counted a moment later.
        let metrics = gateway.metrics().await;
        let is_idle = metrics.lines().any(|line| line == "tollgate_batch_lines_running 0");
        let waits = is_idle && batch["tollgate"]["waiting"] == "cap_spent" && now == last;
        equal = if waits { equal + 1 } else { 0 };
        if equal == 3 {
            return now;
        }
        last = now;
        assert!(started.elapsed() < Duration::from_secs(30), "{batch} {limits}");
        tokio::time::sleep(Duration::from_millis(400)).await;
    }
}

/// A day's cap on the lines of batches stops them and leaves the plan's other requests alone. It
/// holds over a restart, and a larger cap lets the lines run at its reload.
#[tokio::test]
async fn batch_cap_holds_over_restart() {
    support::stay_within_a_day().await;
    const CAP_NS: u64 = 300_000_000;
    let config = "[worker]\nengine = \"synthetic\"\n[worker.synthetic]\nspeed = 2.0\n\
         [plans.open]\nrequests_per_minute = 100_000\nconcurrent = 64\n\
         [plans.open.batches]\ndevice_time_per_day = \"300ms\"\n\
         [tenants.acme]\nplan = \"open\"\n";
    let mut gateway = Tollgate::with_config(config);
    let key = gateway.key("acme", &[]);
    let mut acme = gateway.connect(&key).await;
    let (_, file) = upload(&acme, &lines(400)).await;
    let (_, batch) = create(&acme, &file).await;
    let path = format!("/v1/batches/{}", batch["id"].as_str().expect("an id"));
    let mut stopped = None;
    for is_restarted in [false, true] {
        if is_restarted {
            gateway.kill();
            gateway = gateway.restart();
            acme = gateway.connect(&key).await;
        }
        let (completed, used) = until_cap_spent(&gateway, &acme, &path).await;
        assert!(completed > 0 && (CAP_NS / 2..=CAP_NS).contains(&used), "{completed} {used}");
        let first = *stopped.get_or_insert((completed, used));
        assert_eq!(first, (completed, used), "answered lines, spent ns");
    }
    let usage = gateway.command(&["usage", "--json", "--by", "tenant"]);
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let billed = &usage["rows"][0]["reference_ns"];
    assert_eq!(stopped.map(|(_, used)| json!(used)).as_ref(), Some(billed), "{usage}");
    // The control: the plan has room for other requests.
    let ask: Value = serde_json::from_str(line(0).trim()).expect("JSON");
    assert_eq!(post(&acme, "/v1/chat/completions", &ask["body"]).await.0, 200);
    std::fs::write(gateway.config(), config.replace("300ms", "2h")).expect("writes");
    // The gateway follows the file, and the batch hears of the new cap.
    let batch = ended(&acme, &batch).await;
    assert_eq!(batch["request_counts"]["completed"], 400, "{batch}");
}
