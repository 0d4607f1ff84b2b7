//! Checks C09: the host's clock jumps by an hour, forwards and back, under the real
//! binary. Limits and bills follow the monotonic clock and do not change.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use http_body_util::BodyExt;
use serde_json::{Value, json};
use tollgate_ledger::Ledger;
use tollgate_loadtest::client::Connection;

use crate::support::{Tollgate, post, program};

const HOUR: Duration = Duration::from_secs(3_600);

const CONFIG: &str = r#"
[plans.open]
requests_per_minute = 100_000
concurrent = 256
queued = 1024
[plans.rated]
requests_per_minute = { limit = 6, burst = 6 }
[tenants.acme]
plan = "open"
[tenants.rated]
plan = "rated"
"#;

fn ask(tokens: u32, stream: bool) -> Value {
    json!({
        "model": "tollgate-demo", "temperature": 0, "max_tokens": tokens, "stream": stream,
        "logit_bias": { "300": 100 },
        "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
    })
}

/// Sends `count` requests and returns the number of answers; all others must be refused
/// for their rate.
async fn answered(connection: &Connection, count: u64) -> u64 {
    let mut answered = 0;
    for _ in 0..count {
        match post(connection, "/v1/chat/completions", &ask(1, false)).await {
            (200, _) => answered += 1,
            (429, _) => {}
            other => panic!("{other:?}"),
        }
    }
    answered
}

/// Sets the clock of the processes that read the file at `clock`.
fn jump(clock: &Path, seconds: i64) {
    // A rename replaces the file at once: the library reads the file at every request
    // for the time.
    let next = clock.with_extension("next");
    fs::write(&next, format!("{seconds:+}s\n")).expect("writes");
    fs::rename(&next, clock).expect("replaces");
}

#[tokio::test]
async fn clock_jump_of_an_hour_changes_no_limit() {
    let Some(faketime) = program("faketime") else { return };
    let shown = Command::new(faketime).args(["-f", "+0s", "env"]).output().expect("it runs");
    let shown = String::from_utf8(shown.stdout).expect("UTF-8");
    let library = shown.lines().find_map(|line| line.strip_prefix("LD_PRELOAD="));
    let folder = tempfile::tempdir().expect("a folder");
    let clock = folder.path().join("clock");
    jump(&clock, 0);
    let mut gateway = Tollgate::with_environment(
        CONFIG,
        &[
            ("LD_PRELOAD", library.expect("a library")),
            ("FAKETIME_TIMESTAMP_FILE", &clock.display().to_string()),
            ("FAKETIME_NO_CACHE", "1"),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ],
    );
    let started = Instant::now();
    let open = gateway.connect(&gateway.key("acme", &[])).await;
    let rated = gateway.connect(&gateway.key("rated", &[])).await;
    let began = Instant::now();
    let mut passed = answered(&rated, 8).await;
    assert!(passed >= 6, "{passed}");
    for seconds in [3_600, 0, -3_600, 0] {
        // This answer is still running while the clock jumps.
        let request = ask(800, true).to_string().into();
        let mut stream = open.post("/v1/chat/completions", request).await.expect("answers");
        stream.frame().await.expect("a first chunk").expect("whole");
        jump(&clock, seconds);
        assert_eq!(answered(&open, 20).await, 20, "refused after {seconds} s");
        passed += answered(&rated, 8).await;
        // The rate is still one request in ten seconds.
        let most = 6 + began.elapsed().as_secs() / 10 + 1;
        assert!(passed <= most, "{passed} of {most} after {seconds} s");
        let text = stream.into_body().collect().await.expect("a whole answer").to_bytes();
        let text = String::from_utf8(text.to_vec()).expect("UTF-8");
        assert!(text.ends_with("data: [DONE]\n\n") && !text.contains("\"error\""), "{text}");
    }
    assert_eq!(gateway.stop(), Some(0));
    let lived = started.elapsed() + HOUR / 60;

    // The jump reached at least the dates of the worker.
    let ledger = gateway.data().join("ledger.db");
    let open = rusqlite::Connection::open(&ledger).expect("opens");
    let dates = "SELECT max(started_utc_ns) - min(started_utc_ns) FROM blocks";
    let dates: u64 = open.query_row(dates, [], |row| row.get(0)).expect("blocks");
    assert!(u128::from(dates) > HOUR.as_nanos(), "{dates} ns between the first and the last");
    // No account gained or lost an hour.
    let reader = Ledger::open_read_only(&ledger).expect("a ledger");
    assert_eq!(reader.check(), vec![]);
    for epoch in reader.epochs().expect("reads") {
        let balance = reader.balance(epoch).expect("reads");
        assert!(balance.is_exact() && balance.idle_ns >= 0, "{balance:?}");
        assert!((balance.wall_ns as u128) < lived.as_nanos(), "{balance:?} in {lived:?}");
    }
    let usage = gateway.command(&["usage", "--json", "--by", "tenant"]);
    let usage: Value = serde_json::from_str(&usage).expect("JSON");
    let rows = usage["rows"].as_array().expect("rows").iter();
    let requests: u64 = rows.map(|row| row["requests"].as_u64().expect("a count")).sum();
    assert_eq!(requests, 4 * 21 + passed, "{usage}");
}
