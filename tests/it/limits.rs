//! Limits over the real path: rates admit exactly their limit, caps hold under parallel
//! requests and after restarts, and headers give the true numbers.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_loadtest::client::Connection;

use crate::support::{self, Tollgate, post, read};

const LIMITS: &str = r#"
[plans.rate]
requests_per_minute = 60
concurrent = 128

[plans.cap]
concurrent = 256
queued = 256
device_time_per_day = { default = "150ms" }

[plans.slow]
concurrent = 1
queued = 1

[plans.time]
concurrent = 8
device_time_per_minute = { default = "60ms" }

[plans.wide]
concurrent = 256
queued = 256

[plans.three]
requests_per_minute = { limit = 60, burst = 3 }

[pools.trial]
plan = "three"

[tenants.wide]
plan = "wide"
[tenants.first]
plan = "rate"
pool = "trial"
[tenants.second]
pool = "trial"
[tenants.rated]
plan = "rate"
[tenants.capped]
plan = "cap"
[tenants.single]
plan = "slow"
[tenants.timed]
plan = "time"
"#;

fn ask(max_tokens: u32) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": max_tokens,
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Sends `count` requests at once on one h2 connection and returns statuses and bodies.
async fn at_once(gateway: &Tollgate, key: &str, count: usize, body: &Value) -> Vec<(u16, Value)> {
    burst(&gateway.connect(key).await, count, body).await
}

async fn burst(connection: &Connection, count: usize, body: &Value) -> Vec<(u16, Value)> {
    let mut sent = tokio::task::JoinSet::new();
    for _ in 0..count {
        let (connection, body) = (connection.clone(), body.to_string());
        sent.spawn(async move {
            read(connection.post("/v1/chat/completions", body.into()).await.expect("answers")).await
        });
    }
    sent.join_all().await
}

fn with_status(answers: &[(u16, Value)], status: u16) -> usize {
    answers.iter().filter(|(found, _)| *found == status).count()
}

#[tokio::test]
async fn request_rate_admits_its_burst_and_no_more() {
    let gateway = Tollgate::with_config(LIMITS);
    let key = gateway.key("rated", &[]);
    let started = Instant::now();
    let mut admitted = 0;
    // One h2 connection allows 100 streams.
    let connection = gateway.connect(&key).await;
    let answers = burst(&connection, 90, &ask(1)).await;
    admitted += with_status(&answers, 200);
    let most = 60 + started.elapsed().as_secs() as usize + 1;
    assert!((60..=most).contains(&admitted), "{admitted} admitted, {most} allowed");
    for (status, body) in answers.iter().filter(|(status, _)| *status != 200) {
        assert_eq!((*status, &body["error"]["code"]), (429, &json!("rate_limit_exceeded")));
        let message = body["error"]["message"].as_str().expect("a message");
        assert!(message.contains("60") && message.contains("rated"), "{message}");
    }
    // The bound of a rate is burst + t in t seconds.
    while started.elapsed() < Duration::from_secs(5) {
        let answers = burst(&connection, 5, &ask(1)).await;
        admitted += with_status(&answers, 200);
        let most = 60 + started.elapsed().as_secs() as usize + 1;
        assert!(admitted <= most, "{admitted} admitted, {most} allowed");
    }
}

#[tokio::test]
async fn headers_count_down() {
    let gateway = Tollgate::with_config(LIMITS);
    let connection = gateway.connect(&gateway.key("rated", &[])).await;
    let mut before = None;
    for _ in 0..3 {
        let body = ask(1).to_string().into();
        let response = connection.post("/v1/chat/completions", body).await.expect("answers");
        let header = |name: &str| {
            let value = response.headers().get(name).unwrap_or_else(|| panic!("no {name}"));
            value.to_str().expect("text").to_owned()
        };
        assert_eq!(header("x-ratelimit-limit-requests"), "60");
        let left: u64 = header("x-ratelimit-remaining-requests").parse().expect("a number");
        // At most one request a second flows back.
        assert!(before.is_none_or(|before| left < before + 1), "{left} after {before:?}");
        assert!(left <= 59);
        before = Some(left);
        read(response).await;
    }
}

#[tokio::test]
async fn daily_cap_holds_under_load_and_restart() {
    support::stay_within_a_day().await;
    let gateway = Tollgate::with_config(LIMITS);
    let key = gateway.key("capped", &[]);
    let refused = spend_out(&gateway, &key, 200).await;
    assert_eq!(refused["error"]["code"], "insufficient_quota", "{refused}");
    let spent = spent(&gateway, "capped");
    assert!(spent > 0 && spent <= 150_000_000, "{spent} ns of a cap of 150 ms");
    let mut gateway = gateway;
    gateway.kill();
    let gateway = gateway.restart();
    spend_out(&gateway, &key, 200).await;
    let after = self::spent(&gateway, "capped");
    assert!(after <= 150_000_000, "{after} ns after a restart");
}

#[tokio::test]
async fn key_cap_binds_only_its_key_after_restart() {
    support::stay_within_a_day().await;
    let gateway = Tollgate::with_config(LIMITS);
    let limited = gateway.key("wide", &["--plan", "cap"]);
    let free = gateway.key("wide", &[]);
    // The work is far below the cap on any machine, so that the restart finds a
    // remainder.
    at_once(&gateway, &limited, 5, &ask(20)).await;
    let before = spent(&gateway, "wide");
    assert!(before > 0 && before <= 150_000_000, "{before} ns of a cap of 150 ms");
    let mut gateway = gateway;
    gateway.kill();
    let gateway = gateway.restart();
    let refused = spend_out(&gateway, &limited, 100).await;
    let after = spent(&gateway, "wide");
    assert!(before < after && after <= 150_000_000, "{before}, then {after} ns after a restart");
    assert_eq!(refused["error"]["code"], "insufficient_quota", "{refused}");
    let message = refused["error"]["message"].as_str().expect("a message");
    assert!(message.contains("for key "), "{message}");
    assert_eq!(at_once(&gateway, &free, 1, &ask(1)).await[0].0, 200);
}

/// Sends rounds of `count` requests until one is refused and returns the refusal. The
/// number that fits depends on the machine, so the bound on the rounds is generous.
async fn spend_out(gateway: &Tollgate, key: &str, count: usize) -> Value {
    let connections = [gateway.connect(key).await, gateway.connect(key).await];
    for _ in 0..100 {
        let body = ask(40);
        let halves = tokio::join!(
            burst(&connections[0], count / 2, &body),
            burst(&connections[1], count / 2, &body)
        );
        let answers = [halves.0, halves.1].concat();
        let (served, refused) = (with_status(&answers, 200), with_status(&answers, 429));
        assert_eq!(
            served + refused,
            count,
            "{:?}",
            answers.iter().map(|a| a.0).collect::<Vec<_>>()
        );
        if let Some((_, body)) = answers.into_iter().find(|(status, _)| *status == 429) {
            return body;
        }
    }
    panic!("{} requests did not spend the cap", 100 * count);
}

/// Checks that a pool's limits bind its tenants together, even if their own limits are
/// higher.
#[tokio::test]
async fn pool_limits_are_shared_by_its_tenants() {
    let gateway = Tollgate::with_config(LIMITS);
    let (first, second) = (gateway.key("first", &[]), gateway.key("second", &[]));
    let started = Instant::now();
    let mut answers = at_once(&gateway, &first, 10, &ask(1)).await;
    answers.extend(at_once(&gateway, &second, 10, &ask(1)).await);
    let most = 3 + started.elapsed().as_secs() as usize + 1;
    let admitted = with_status(&answers, 200);
    assert!((3..=most).contains(&admitted), "{admitted} admitted, {most} allowed");
    for (_, body) in answers.iter().filter(|(status, _)| *status != 200) {
        let message = body["error"]["message"].as_str().expect("a message");
        assert!(message.contains("pool trial"), "{message}");
    }
}

/// Checks that a missing plan is reported when a key is made, and that a plan removed
/// from the config admits nothing.
#[tokio::test]
async fn key_without_its_plan_is_refused() {
    let gateway = Tollgate::with_config(LIMITS);
    let key = gateway.key("wide", &["--plan", "time"]);
    assert_eq!(at_once(&gateway, &key, 1, &ask(1)).await[0].0, 200);
    let mut gateway = gateway;
    gateway.kill();
    let without = LIMITS.replace("[plans.time]", "[plans.later]").replace("\"time\"", "\"later\"");
    let folder = gateway.data().parent().expect("the data folder has a parent");
    std::fs::write(folder.join("tollgate.toml"), without).expect("writes the config");
    let gateway = gateway.restart();
    let (status, body) = at_once(&gateway, &key, 1, &ask(1)).await.remove(0);
    assert_eq!((status, &body["error"]["code"]), (403, &json!("permission_denied")), "{body}");
}

/// Returns the reference cost in the ledger after all requests have ended.
fn spent(gateway: &Tollgate, tenant: &str) -> u64 {
    let words = ["usage", "--json", "--tenant", tenant, "--by", "tenant"];
    let mut last = None;
    loop {
        let usage: Value = serde_json::from_str(&gateway.command(&words)).expect("JSON");
        let spent = usage["rows"][0]["reference_ns"].as_u64().unwrap_or(0);
        if last == Some(spent) {
            return spent;
        }
        last = Some(spent);
        std::thread::sleep(Duration::from_millis(300));
    }
}

#[tokio::test]
async fn concurrency_limit_runs_one_queues_one_refuses_third() {
    let gateway = Tollgate::with_config(LIMITS);
    let key = gateway.key("single", &[]);
    let answers = at_once(&gateway, &key, 3, &ask(150)).await;
    let statuses: Vec<u16> = answers.iter().map(|answer| answer.0).collect();
    assert_eq!(with_status(&answers, 200), 2, "{statuses:?}");
    assert_eq!(with_status(&answers, 429), 1, "{statuses:?}");
}

#[tokio::test]
async fn device_time_debt_is_paid_back() {
    let gateway = Tollgate::with_config(LIMITS);
    let key = gateway.key("timed", &[]);
    let connection = gateway.connect(&key).await;
    let started = Instant::now();
    let mut refused = 0;
    while started.elapsed() < Duration::from_secs(8) {
        let (status, body) = post(&connection, "/v1/chat/completions", &ask(150)).await;
        assert!(status == 200 || status == 429, "{status} {body}");
        if status == 429 {
            refused += 1;
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }
    let seconds = started.elapsed().as_secs_f64();
    let spent = spent(&gateway, "timed") as f64 / 1e9;
    // The bound is burst, refill, and the error of one estimate, which later requests
    // pay back.
    let allowed = 0.06 + 0.06 * seconds / 60.0;
    assert!(refused > 0, "the limit never bit; {spent:.3} s spent");
    assert!(spent <= allowed * 1.25, "{spent:.3} s spent, {allowed:.3} s allowed");
}
