//! Repeated requests over the real process: each runs once and is charged once, even if
//! the gateway is killed in between.

use std::time::{Duration, Instant};

use http::HeaderMap;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tollgate_ledger::Ledger;
use tollgate_loadtest::client::Connection;

use crate::support::{self, Tollgate, get, read};

type Answer = http::Response<hyper::body::Incoming>;

fn count(max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens, "stream": stream,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

async fn send(connection: &Connection, body: &Value, key: &str) -> Answer {
    let mut headers = HeaderMap::new();
    headers.insert("idempotency-key", key.parse().expect("visible"));
    // The header that the SDKs add to a retry.
    headers.insert("x-stainless-retry-count", "1".parse().expect("visible"));
    let body = body.to_string().into();
    connection.post_with("/v1/chat/completions", body, headers).await.expect("answers")
}

fn id_of(answer: &Answer) -> String {
    answer.headers()["x-request-id"].to_str().expect("text").to_owned()
}

fn replay_of(answer: &Answer) -> Option<&str> {
    answer.headers().get("x-tollgate-replay-of").map(|value| value.to_str().expect("text"))
}

async fn text(answer: Answer) -> String {
    let body = answer.into_body().collect().await.expect("a whole body").to_bytes();
    String::from_utf8(body.to_vec()).expect("UTF-8")
}

/// Returns the number of billed requests after the gateway has stopped.
fn requests(gateway: &Tollgate) -> u64 {
    let printed = gateway.command(&["usage", "--json", "--by", "tenant"]);
    let usage: Value = serde_json::from_str(&printed).expect("JSON");
    usage["rows"][0]["requests"].as_u64().expect("a count")
}

#[tokio::test]
async fn duplicates_with_one_key_are_billed_once() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let body = count(24, false);
    let mut connections = Vec::new();
    for _ in 0..4 {
        connections.push(gateway.connect(&key).await);
    }
    let mut all = tokio::task::JoinSet::new();
    for number in 0..200 {
        let (connection, body) = (connections[number % 4].clone(), body.clone());
        all.spawn(async move {
            let answer = send(&connection, &body, "once").await;
            let first = replay_of(&answer).map(str::to_owned);
            let (status, reply) = read(answer).await;
            (status, reply["id"].clone(), first)
        });
    }
    let mut ids = Vec::new();
    let mut ran = 0;
    for (status, id, replay_of) in all.join_all().await {
        assert_eq!(status, 200, "{id}");
        ran += usize::from(replay_of.is_none());
        ids.push(id.to_string());
    }
    ids.dedup();
    assert_eq!((ids.len(), ran), (1, 1), "{ids:?}");

    // A repeated stream is the same bytes; another body with the key is refused.
    let first = text(send(&connections[0], &count(8, true), "stream").await).await;
    let again = send(&connections[1], &count(8, true), "stream").await;
    assert!(replay_of(&again).is_some());
    assert_eq!(text(again).await, first);
    assert_eq!(read(send(&connections[2], &count(9, true), "stream").await).await.0, 422);
    assert_eq!(gateway.stop(), Some(0));
    assert_eq!(requests(&gateway), 2);
}

#[tokio::test]
async fn kill_between_duplicates_bills_once() {
    let gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let done = send(&connection, &count(6, false), "done").await;
    let done_id = id_of(&done);
    assert_eq!(read(done).await.0, 200);
    wait_until_posted(&connection, &done_id).await;
    // The answer is long, so it is most likely still running at the kill.
    let mut long = count(400, true);
    long["n"] = json!(8);
    let mut running = send(&connection, &long, "running").await;
    let running_id = id_of(&running);
    running.frame().await.expect("a first chunk").expect("whole");
    let mut gateway = gateway;
    gateway.kill();
    let mut gateway = gateway.restart();

    // A charged request is not run again; the error names its id.
    let connection = gateway.connect(&key).await;
    let (status, reply) = read(send(&connection, &count(6, false), "done").await).await;
    assert_eq!((status, &reply["error"]["code"]), (409, &json!("idempotency_answer_gone")));
    assert!(reply["error"]["message"].as_str().expect("text").contains(&done_id), "{reply}");
    assert_eq!(read(send(&connection, &count(7, false), "done").await).await.0, 422);

    // The interrupted request has cost nothing and runs again as soon as that is
    // settled.
    let started = Instant::now();
    let answer = loop {
        let answer = send(&connection, &long, "running").await;
        if answer.status() == 200 {
            break Some(answer);
        }
        let (status, reply) = read(answer).await;
        match reply["error"]["code"].as_str() {
            Some("idempotency_unsettled" | "overloaded") => {}
            // On a fast machine the answer ended before the kill and was charged once.
            Some("idempotency_answer_gone") => break None,
            _ => panic!("{status} {reply}"),
        }
        assert!(started.elapsed() < Duration::from_secs(90), "{status} {reply}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    };
    let before = get(&connection, &format!("/v1/usage/{running_id}")).await.1;
    assert_eq!(before["attributed_ns"] == 0, answer.is_some(), "charged or run again: {before}");
    if let Some(answer) = answer {
        let again_id = id_of(&answer);
        let told = text(answer).await;
        assert!(told.ends_with("data: [DONE]\n\n"), "{told}");
        wait_until_posted(&connection, &again_id).await;
        let again = send(&connection, &long, "running").await;
        assert_eq!(replay_of(&again), Some(again_id.as_str()));
        assert_eq!(text(again).await, told);
    }
    assert_eq!(gateway.stop(), Some(0));
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    assert_eq!(reader.check(), vec![]);
    assert_eq!(requests(&gateway), 2);
}

async fn wait_until_posted(connection: &Connection, id: &str) {
    let started = Instant::now();
    while get(connection, &format!("/v1/usage/{id}")).await.1["state"] != "posted" {
        assert!(started.elapsed() < Duration::from_secs(20), "{id} is not posted");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
