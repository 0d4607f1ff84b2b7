//! Billing over real processes: every nanosecond of a worker's time has an account,
//! even after disconnects, cuts and kills.

use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tollgate_ledger::Ledger;

use crate::support::{self, Tollgate, get, post, posted, signal};

fn count(max_tokens: u32, stream: bool) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens, "stream": stream,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Asserts that all of the ledger's own checks pass and that it has entries.
fn assert_exact(gateway: &Tollgate) {
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    let findings = reader.check();
    assert!(findings.is_empty(), "{findings:#?}");
    let epochs = reader.epochs().expect("reads");
    assert!(!epochs.is_empty(), "no worker has reported");
    for epoch in epochs {
        let balance = reader.balance(epoch).expect("reads");
        assert!(balance.is_exact(), "{epoch}: {balance:?}");
        assert!(balance.wall_ns > 0 && balance.idle_ns >= 0, "{epoch}: {balance:?}");
    }
}

#[tokio::test]
async fn mixed_run_with_aborts_is_billed_exactly() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let mut ids = Vec::new();
    for round in 0..12u32 {
        let connection = gateway.connect(&key).await;
        let (whole, several) = (connection.clone(), connection.clone());
        let mut body = count(8 + round, false);
        body["n"] = json!(1 + round % 3);
        let leaves = async {
            let request = count(300, true).to_string().into();
            let mut response =
                connection.post("/v1/chat/completions", request).await.expect("answers");
            let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
            for _ in 0..round {
                match response.frame().await {
                    Some(chunk) => drop(chunk.expect("whole")),
                    None => break, // few chunks, many tokens in each: a slow moment
                }
            }
            id // dropping the response resets the stream
        };
        let (id, first, second) = tokio::join!(
            leaves,
            async { post(&whole, "/v1/chat/completions", &count(20, false)).await },
            async { post(&several, "/v1/chat/completions", &body).await },
        );
        assert_eq!((first.0, second.0), (200, 200), "{first:?} {second:?}");
        ids.push(id);
    }
    let connection = gateway.connect(&key).await;
    for id in &ids {
        let usage = posted(&connection, id).await;
        let charged = usage["attributed_ns"].as_u64().expect("a figure");
        assert!(charged > 0 && usage["prompt_tokens"].as_u64() > Some(0), "{usage}");
    }
    assert_eq!(gateway.stop(), Some(0));
    assert_exact(&gateway);
    let usage: Value =
        serde_json::from_str(&gateway.command(&["usage", "--json", "--by", "tenant"]))
            .expect("JSON");
    assert_eq!(usage["rows"][0]["requests"], 36, "{usage}");
}

/// Checks T42: there is a usage row for each request at any moment of a disconnect, and
/// the billed time equals the device's work to the nanosecond.
#[tokio::test]
async fn clients_leaving_at_random_pay_their_usage() {
    // The limit is off, because so many cancellations would earn a penalty.
    let penalties = "[gateway.penalties]\nwasted_time_per_minute = \"24h\"\n";
    let mut gateway = Tollgate::with_config(&format!("{}{penalties}", support::OPEN));
    let key = gateway.key("acme", &[]);
    // The seed is fixed, so the disconnects are at the same points in each run.
    let mut drawn = 0x2545_f491_4f6c_dd1d_u64;
    let mut draw = |below: u64| {
        drawn ^= drawn << 13;
        drawn ^= drawn >> 7;
        drawn ^= drawn << 17;
        drawn % below
    };
    let mut ids = Vec::new();
    for _ in 0..10 {
        let connection = gateway.connect(&key).await;
        let mut leaving = tokio::task::JoinSet::new();
        for _ in 0..10 {
            let (connection, chunks, tokens) = (connection.clone(), draw(12), draw(300) as u32 + 1);
            leaving.spawn(async move {
                let request = count(tokens, true).to_string().into();
                let mut response =
                    connection.post("/v1/chat/completions", request).await.expect("answers");
                assert_eq!(response.status(), 200);
                let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
                for _ in 0..chunks {
                    if response.frame().await.is_none() {
                        break; // it ended before its client left
                    }
                }
                id // dropping the response resets the stream
            });
        }
        ids.extend(leaving.join_all().await);
    }
    let connection = gateway.connect(&key).await;
    let mut billed = 0;
    for id in &ids {
        let usage = posted(&connection, id).await;
        assert_ne!(usage["reason"], "fault", "{usage}");
        let entries = usage["entries"].as_array().expect("entries");
        let sum: i64 = entries.iter().map(|e| e["amount_ns"].as_i64().expect("ns")).sum();
        let charged = usage["attributed_ns"].as_i64().expect("a figure");
        assert!(charged > 0 && charged == sum, "{usage}");
        billed += charged;
    }
    assert_eq!(ids.len(), 100);
    assert_eq!(gateway.stop(), Some(0));
    assert_exact(&gateway);
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    let balances = reader.epochs().expect("reads").into_iter();
    let balances: Vec<_> = balances.map(|epoch| reader.balance(epoch).expect("reads")).collect();
    let done: i64 = balances.iter().map(|balance| balance.tenants_ns).sum();
    assert_eq!(billed - done, 0);
    assert_eq!(balances.iter().map(|balance| balance.loss_ns).sum::<i64>(), 0, "{balances:?}");
}

#[tokio::test]
async fn usage_shows_only_own_requests() {
    let config = format!("{}\n[tenants.other]\nplan = \"open\"\n", support::OPEN);
    let gateway = Tollgate::with_config(&config);
    let mine = gateway.connect(&gateway.key("acme", &[])).await;
    let other = gateway.connect(&gateway.key("other", &[])).await;
    let body = count(4, false).to_string().into();
    let response = mine.post("/v1/chat/completions", body).await.expect("answers");
    let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
    let (_, answer) = support::read(response).await;
    let usage = posted(&mine, &id).await;
    assert_eq!(usage["completion_tokens"], answer["usage"]["completion_tokens"]);
    assert_eq!(get(&other, &format!("/v1/usage/{id}")).await.0, 404);
    assert_eq!(get(&mine, "/v1/usage/req-00000000000000000000000000000000").await.0, 404);
    let (status, all) = get(&other, "/v1/usage").await;
    assert_eq!((status, all["data"].as_array().map(Vec::len)), (200, Some(0)), "{all}");
}

#[tokio::test]
async fn killed_worker_ends_streams_and_is_restarted() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    for _ in 0..3 {
        let request = count(300, true).to_string().into();
        let mut response = connection.post("/v1/chat/completions", request).await.expect("answers");
        response.frame().await.expect("a first chunk").expect("whole");
        let workers = gateway.workers();
        assert_eq!(workers.len(), 1, "{workers:?}");
        signal(workers[0], "KILL");
        let killed = Instant::now();
        let rest = response.into_body().collect().await.expect("a clean end").to_bytes();
        assert!(killed.elapsed() < Duration::from_secs(2), "{:?}", killed.elapsed());
        let rest = String::from_utf8_lossy(&rest);
        assert!(rest.contains("\"error\"") && rest.contains("server_error"), "{rest}");
        // The worker is started again and serves the waiting requests.
        let (status, reply) = loop {
            let answer = post(&connection, "/v1/chat/completions", &count(4, false)).await;
            if answer.0 != 503 || killed.elapsed() > Duration::from_secs(20) {
                break answer;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        };
        assert_eq!(status, 200, "{reply}");
    }
    assert_eq!(gateway.stop(), Some(0));
    assert_exact(&gateway);
}

/// Checks that tenants do not pay for the answers of a killed gateway: the platform is
/// at fault, and the delivered part is unknown.
#[tokio::test]
async fn killed_gateway_loss_is_booked_to_the_platform() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let connection = gateway.connect(&key).await;
    let mut whole = tokio::task::JoinSet::new();
    // The answers are long enough on any machine that none ends before the kill.
    let mut long = count(400, false);
    long["n"] = json!(8);
    for _ in 0..3 {
        let (connection, body) = (connection.clone(), long.to_string());
        whole.spawn(
            async move { connection.post("/v1/chat/completions", body.into()).await.is_ok() },
        );
    }
    let mut streams = Vec::new();
    for _ in 0..3 {
        let body = count(400, true).to_string().into();
        let mut response = connection.post("/v1/chat/completions", body).await.expect("answers");
        response.frame().await.expect("a first chunk").expect("whole");
        streams.push(response);
    }
    gateway.kill();
    let answered = whole.join_all().await;
    assert_eq!(answered, [false; 3], "one ended before the gateway was killed");
    drop(streams);
    let mut gateway = gateway.restart();
    let usage: Value =
        serde_json::from_str(&gateway.command(&["usage", "--json", "--by", "tenant"]))
            .expect("JSON");
    for row in usage["rows"].as_array().expect("rows") {
        for figure in ["requests", "attributed_ns", "reference_ns"] {
            assert_eq!(row[figure], 0, "{figure} of {usage}");
        }
    }
    let reader = Ledger::open_read_only(&gateway.data().join("ledger.db")).expect("a ledger");
    let lost: i64 = reader
        .epochs()
        .expect("reads")
        .into_iter()
        .map(|epoch| reader.balance(epoch).expect("reads").loss_ns)
        .sum();
    assert!(lost > 0, "six requests had begun: {usage}");
    assert_eq!(gateway.stop(), Some(0));
    assert_exact(&gateway);
}

#[tokio::test]
async fn killed_gateway_loses_no_usage() {
    let mut gateway = Tollgate::with_config(support::OPEN);
    let key = gateway.key("acme", &[]);
    let mut acknowledged = Vec::new();
    for round in 0..4 {
        let connection = gateway.connect(&key).await;
        for _ in 0..3 {
            let body = count(10, false).to_string().into();
            let response = connection.post("/v1/chat/completions", body).await.expect("answers");
            let id = response.headers()["x-request-id"].to_str().expect("text").to_owned();
            let (status, reply) = support::read(response).await;
            assert_eq!(status, 200, "{reply}");
            acknowledged.push(id);
        }
        let workers = gateway.workers();
        gateway.kill();
        let killed = Instant::now();
        while workers.iter().any(|&pid| support::runs(pid)) {
            assert!(
                killed.elapsed() < Duration::from_secs(3),
                "a worker outlived us in round {round}"
            );
            std::thread::sleep(Duration::from_millis(20));
        }
        gateway = gateway.restart();
    }
    let connection = gateway.connect(&key).await;
    for id in &acknowledged {
        posted(&connection, id).await;
    }
    assert_eq!(gateway.stop(), Some(0));
    assert_exact(&gateway);
    let usage: Value =
        serde_json::from_str(&gateway.command(&["usage", "--json", "--by", "tenant"]))
            .expect("JSON");
    assert_eq!(usage["rows"][0]["requests"], 12, "lost or doubled: {usage}");
}
