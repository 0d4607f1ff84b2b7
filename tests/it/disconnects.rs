//! Clients that disconnect, links that must not be fetched, and secrets that must not
//! be written: T40, T42 and T52 over the real binary.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::sync::Barrier;
use tollgate_ledger::Ledger;
use tollgate_loadtest::client::{Connection, Protocol, Target};

use crate::support::{self, Tollgate, post, posted, signal};

const DISCONNECTS: u32 = 1_000;
const AT_ONCE: u32 = 8;

/// Checks T42: at any moment of a disconnect, the bill covers the work done and no
/// more.
#[tokio::test]
async fn early_disconnects_are_billed_to_the_nanosecond() {
    // The limit is off: so many cancellations would earn a penalty, which another test
    // covers.
    let config =
        format!("[gateway.penalties]\nwasted_time_per_minute = \"24h\"\n{}", support::OPEN);
    let mut gateway = Tollgate::with_config(&config);
    let key = gateway.key("acme", &[]);
    let mut ids = Vec::new();
    for first in (0..DISCONNECTS).step_by(AT_ONCE as usize) {
        let connection = gateway.connect(&key).await;
        let at = |number| leave(&connection, first + number);
        let left = tokio::join!(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7));
        ids.extend(<[String; AT_ONCE as usize]>::from(left));
    }
    let connection = gateway.connect(&key).await;
    let mut billed = 0;
    for id in &ids {
        let usage = posted(&connection, id).await;
        billed += usage["attributed_ns"].as_u64().expect("a figure");
    }
    assert_eq!(gateway.stop(), Some(0));
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    assert_eq!(reader.check(), vec![]);
    let mut done = 0;
    for epoch in reader.epochs().expect("reads") {
        let balance = reader.balance(epoch).expect("reads");
        assert!(balance.is_exact(), "{balance:?}");
        done += balance.tenants_ns;
    }
    assert_eq!(i64::try_from(billed), Ok(done), "billed is what was done for them");
}

/// Checks with the default penalties that a client that closes many streams at once, as
/// at a deploy, is served afterwards.
#[tokio::test]
async fn streams_closed_at_once_earn_no_penalty() {
    let device = r#"
[worker]
engine = "synthetic"
max_sequences = 128
[worker.synthetic]
step = "10ms"
sequence = "10us"
kv_token = "1ns"
prefill_token = "10us"
kv_tokens = 200_000
context = 1_024
"#;
    let gateway = Tollgate::with_config(&format!("{}{device}", support::OPEN));
    let key = gateway.key("acme", &[]);
    let connections = [gateway.connect(&key).await, gateway.connect(&key).await];
    let (mut streams, begun) = (tokio::task::JoinSet::new(), Arc::new(Barrier::new(100)));
    for number in 0..100 {
        let (connection, begun) = (connections[number % 2].clone(), Arc::clone(&begun));
        streams.spawn(async move {
            let body = json!({
                "model": "tollgate-demo", "max_tokens": 900, "ignore_eos": true, "stream": true,
                "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
            });
            let path = "/v1/chat/completions";
            let response = connection.post(path, body.to_string().into()).await;
            let mut response = response.expect("answers");
            assert_eq!(response.status(), 200);
            response.frame().await.expect("a first chunk").expect("whole");
            let all_begun = begun.wait();
            tokio::pin!(all_begun);
            // An answer that nobody reads would be ended for that.
            while let Ok(Some(_)) = tokio::select! {
                _ = &mut all_begun => Err(()),
                frame = response.frame() => Ok(frame),
            } {}
            response.headers()["x-request-id"].to_str().expect("text").to_owned()
        });
    }
    let ids = streams.join_all().await;
    drop(connections);
    let connection = gateway.connect(&key).await;
    for id in &ids {
        assert_eq!(posted(&connection, id).await["reason"], "cancelled");
    }
    let body = json!({
        "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "Hello!" }],
    });
    let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
    assert_eq!(status, 200, "{reply}");
}

/// Starts a long answer and disconnects after a pseudo-random number of chunks.
async fn leave(connection: &Connection, number: u32) -> String {
    let body = json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": 60, "stream": true,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    });
    let body = body.to_string().into();
    let mut response = connection.post("/v1/chat/completions", body).await.expect("answers");
    assert_eq!(response.status(), 200);
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    for _ in 0..(number.wrapping_mul(2_654_435_761) >> 16) % 24 {
        if response.frame().await.is_none() {
            break;
        }
    }
    id
}

/// Checks T40: the gateway connects to no address that a client names.
#[tokio::test]
async fn urls_from_clients_are_never_fetched() {
    let trap = TcpListener::bind("127.0.0.1:0").expect("binds");
    trap.set_nonblocking(true).expect("a socket");
    let url = format!("http://{}/secret", trap.local_addr().expect("bound"));
    let gateway = Tollgate::with_config(support::OPEN);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let part = |part: Value| json!([{ "role": "user", "content": [part] }]);
    let plain = json!([{ "role": "user", "content": url.clone() }]);
    for (field, value, messages) in [
        ("user", json!("u"), part(json!({ "type": "image_url", "image_url": { "url": url } }))),
        (
            "user",
            json!("u"),
            part(json!({ "type": "input_audio", "input_audio": { "data": url } })),
        ),
        ("user", json!("u"), part(json!({ "type": "file", "file": { "file_id": url } }))),
        ("documents", json!([{ "url": url }]), plain.clone()),
        ("tools", json!([{ "type": "mcp", "server_url": url }]), plain.clone()),
        ("web_search_options", json!({ "url": url }), plain.clone()),
        (
            "response_format",
            json!({ "type": "json_schema", "json_schema": { "$ref": url } }),
            plain.clone(),
        ),
        ("prediction", json!({ "type": "content", "content": url }), plain.clone()),
    ] {
        let mut body = json!({ "model": "tollgate-demo", "max_tokens": 1, "messages": messages });
        body[field] = value;
        let (status, reply) = post(&connection, "/v1/chat/completions", &body).await;
        assert_eq!(status, 400, "{body}: {reply}");
        assert!(reply["error"]["param"].is_string(), "{reply}");
    }
    // A URL in a text, or in an unknown field, is ignored.
    let body =
        json!({ "model": "tollgate-demo", "max_tokens": 1, "messages": plain, "image": url });
    assert_eq!(post(&connection, "/v1/chat/completions", &body).await.0, 200);
    assert!(trap.accept().is_err(), "somebody came for {url}");
}

/// Checks T52: a unique key and a unique prompt go through answers, refusals and a
/// worker's death at the most verbose log level, and appear in no file.
#[tokio::test]
async fn keys_and_prompts_reach_no_file() {
    const PROMPT: &str = "xylocanary quagmire seventeen";
    let folder = tempfile::tempdir().expect("a folder");
    let log = folder.path().join("log");
    let gateway = Tollgate::logging(support::OPEN, "trace", &log);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let ask = |max_tokens: u32, stream: bool| {
        json!({
            "model": "tollgate-demo", "max_tokens": max_tokens, "stream": stream, "stop": [PROMPT],
            "messages": [{ "role": "user", "content": PROMPT }],
        })
    };
    assert_eq!(post(&connection, "/v1/chat/completions", &ask(4, false)).await.0, 200);
    let text = json!({ "model": "tollgate-demo", "max_tokens": 1, "prompt": PROMPT, "echo": true });
    assert_eq!(post(&connection, "/v1/completions", &text).await.0, 200);
    let mut refused = ask(4, false);
    refused["temperature"] = json!(PROMPT);
    assert_eq!(post(&connection, "/v1/chat/completions", &refused).await.0, 400);
    let long = json!({ "model": "tollgate-demo", "prompt": PROMPT.repeat(2_000) });
    assert_eq!(post(&connection, "/v1/completions", &long).await.0, 400);
    // A key with a typing error is still a secret.
    let mut typo = key.clone();
    let last = typo.pop().expect("a key");
    typo.push(if last == 'a' { 'b' } else { 'a' });
    let stranger = gateway.connect(&typo).await;
    assert_eq!(post(&stranger, "/v1/chat/completions", &ask(4, false)).await.0, 401);
    let body = ask(300, true).to_string().into();
    let mut stream = connection.post("/v1/chat/completions", body).await.expect("answers");
    stream.frame().await.expect("a chunk").expect("whole");
    signal(gateway.workers()[0], "KILL");
    let _ = stream.into_body().collect().await;
    let admin = Target::new(&gateway.admin, &gateway.ca(), "none").expect("a target");
    let admin = admin.connect(Protocol::Either).await.expect("connects");
    let metrics = admin.get("/metrics").await.expect("answers").into_body().collect().await;
    let metrics = metrics.expect("a whole body").to_bytes().to_vec();
    drop((connection, stranger));
    let (data, _folder) = gateway.into_data();

    let (_, secret) = key.split_once('.').expect("id and secret");
    let secret = &secret[..32];
    let written = fs::read(&log).expect("a log");
    assert!(written.len() > 10_000, "the log says much: {} bytes", written.len());
    let mut places = vec![("the log".to_owned(), written), ("metrics".to_owned(), metrics)];
    collect(&data, &mut places);
    assert!(places.len() > 5, "ledger, keys, journals");
    for (place, bytes) in places {
        for canary in [PROMPT, secret, "xylocanary"] {
            let found = bytes.windows(canary.len()).position(|window| window == canary.as_bytes());
            if let Some(at) = found {
                let near = &bytes[at.saturating_sub(300)..bytes.len().min(at + 100)];
                panic!("{canary:?} is in {place}: {}", String::from_utf8_lossy(near));
            }
        }
    }
}

/// Lists every file under `folder`.
fn collect(folder: &Path, into: &mut Vec<(String, Vec<u8>)>) {
    for entry in fs::read_dir(folder).expect("reads").map_while(Result::ok) {
        let path = entry.path();
        if path.is_dir() {
            collect(&path, into);
        } else if path.is_file() {
            into.push((path.display().to_string(), fs::read(&path).unwrap_or_default()));
        }
    }
}
