//! Raises of limits on a running gateway: by command and by the admin API.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tollgate_loadtest::client::Connection;

use crate::support::{self, Tollgate, get, post};

const CONFIG: &str = r#"
[plans.team]
requests_per_minute = 600
concurrent = 2

[tenants.acme]
plan = "team"
"#;

/// Time in which a change must be seen. A loaded machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the value of a limit of `acme`.
async fn bound(admin: &Connection, limit: &str) -> u64 {
    let (status, tenant) = get(admin, "/v1/tenants/acme").await;
    assert_eq!(status, 200, "{tenant}");
    let limits = tenant["limits"].as_array().expect("limits");
    let row = limits.iter().find(|row| row["limit"] == limit).expect("the limit");
    row["value"].as_u64().expect("a number")
}

fn raise(gateway: &Tollgate, words: &[&str]) -> String {
    let config = gateway.config().display().to_string();
    gateway.command(&[&["tenants", "raise", "acme", "--config", &config], words].concat())
}

#[tokio::test]
async fn raise_holds_over_restart_and_reload() {
    let gateway = Tollgate::with_config(CONFIG);
    let shown = raise(&gateway, &["--limit", "requests_per_minute=9_000", "--for", "30d"]);
    let row: Vec<&str> = shown.lines().nth(1).expect("a row").split_whitespace().collect();
    assert_eq!(row[..2], ["requests_per_minute", "9000"], "{shown}");
    let admin = gateway.connect_admin().await;
    assert_eq!(bound(&admin, "requests_per_minute").await, 9_000);
    assert_eq!(bound(&admin, "concurrent").await, 2);

    let text = CONFIG.replace("concurrent = 2", "concurrent = 3");
    std::fs::write(gateway.config(), text).expect("writes");
    let config = gateway.config().display().to_string();
    gateway.command(&["config", "reload", "--config", &config]);
    assert_eq!(bound(&admin, "concurrent").await, 3);
    assert_eq!(bound(&admin, "requests_per_minute").await, 9_000);

    let gateway = gateway.restart();
    let admin = gateway.connect_admin().await;
    assert_eq!(bound(&admin, "requests_per_minute").await, 9_000);
    let shown = gateway.command(&["tenants", "show", "acme", "--config", &config]);
    assert!(shown.contains("raised limit"), "{shown}");
    gateway.command(&["tenants", "lower", "acme", "--config", &config]);
    assert_eq!(bound(&admin, "requests_per_minute").await, 600);

    let actions = gateway.command(&["audit", "actions"]);
    let mut rest = actions.as_str();
    for expected in [
        "config.loaded",
        "  admin key  limits.raised  acme\n",
        "    limit: requests_per_minute\n",
        "    value: 9000\n",
        "  config.changed\n",
        ".concurrent: 2 -> 3\n",
        "  limits.raise_ended  acme\n",
    ] {
        let found = rest.split_once(expected);
        rest = found.unwrap_or_else(|| panic!("{expected} in order in {actions}")).1;
    }
    let newest = gateway.command(&["audit", "actions", "--last", "1", "--json"]);
    let newest: Value = serde_json::from_str(&newest).expect("JSON");
    let actions = newest["actions"].as_array().expect("a list");
    assert_eq!(actions.len(), 1, "{newest}");
    assert_eq!(actions[0]["operation.type"], "limits.raise_ended", "{newest}");
    assert!(actions[0]["seq"].as_u64().is_some_and(|seq| seq > 0), "{newest}");
}

#[tokio::test]
async fn raise_admits_at_once_and_ends_by_itself() {
    let gateway = Tollgate::with_config(&CONFIG.replace("600", "1"));
    let admin = gateway.connect_admin().await;
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    let ask = json!({ "model": "tollgate-demo", "max_tokens": 1,
        "messages": [{ "role": "user", "content": "hi" }] });
    let chat = "/v1/chat/completions";
    assert_eq!(post(&connection, chat, &ask).await.0, 200);
    assert_eq!(post(&connection, chat, &ask).await.0, 429);
    let shown = gateway.command(&["tenants", "refused"]);
    let row: Vec<&str> = shown.lines().nth(1).expect("a row").split_whitespace().collect();
    assert_eq!(row[..4], ["acme", "requests_per_minute", "1", "1"], "{shown}");
    assert!(shown.contains("acme: Limit reached: 1 requests a minute"), "{shown}");
    let shown = gateway.command(&["tenants", "refused", "--recent"]);
    let row: Vec<&str> = shown.lines().nth(1).expect("a row").split_whitespace().collect();
    assert_eq!((row[2], row[4], row[5]), ("acme", "requests_per_minute", "tenant"), "{shown}");
    assert!(row[6].ends_with('s') && shown.lines().count() == 2, "{shown}");
    let steps = |live: &Value| live["workers"][0]["engine"]["steps"].as_u64();
    // The end of a request is counted after its answer went out, and the worker reports its
    // steps a moment later.
    let mut live = get(&admin, "/v1/live").await.1;
    while live["totals"]["answered"] != 1 || steps(&live) == Some(0) {
        tokio::time::sleep(Duration::from_millis(50)).await;
        live = get(&admin, "/v1/live").await.1;
    }
    assert_eq!(live["totals"]["refused"], 1, "{live}");
    assert!(steps(&live).is_some_and(|steps| steps > 0), "{live}");
    let of_acme = &live["tenants"][0]["last_minute"];
    assert!(of_acme["attributed_ns"].as_u64().is_some_and(|nanos| nanos > 0), "{live}");
    let wanted = json!({ "limits": { "requests_per_minute": 6_000 }, "seconds": 10 });
    let made = Instant::now();
    let (status, raised) = post(&admin, "/v1/tenants/acme/raises", &wanted).await;
    assert_eq!(status, 201, "{raised}");
    // The level of the bucket is kept, and fills a hundred times a second now.
    let started = Instant::now();
    while post(&connection, chat, &ask).await.0 != 200 {
        assert!(started.elapsed() < PATIENCE, "the raise admits nothing");
    }
    while bound(&admin, "requests_per_minute").await != 1 {
        assert!(made.elapsed() < PATIENCE, "the raise does not end");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(made.elapsed() > Duration::from_secs(7), "the raise ended early");
    let (_, tenant) = get(&admin, "/v1/tenants/acme").await;
    assert_eq!(tenant["raises"], json!([]));

    let data = gateway.into_data();
    let export = data.0.join("exported");
    support::command(&[
        "audit",
        "export",
        "--data",
        &data.0.display().to_string(),
        "--out",
        &export.display().to_string(),
    ]);
    let files = std::fs::read_dir(&export).expect("a folder");
    let read = |file: std::fs::DirEntry| std::fs::read(file.path()).expect("reads");
    let log: Vec<u8> = files.flatten().flat_map(read).collect();
    let log = String::from_utf8_lossy(&log);
    for operation in ["limits.raised", "limits.raise_ended"] {
        assert!(log.contains(operation), "no {operation} in the audit log");
    }
}

#[tokio::test]
async fn raise_of_nothing_is_refused_in_words() {
    let gateway = Tollgate::with_config(CONFIG);
    let admin = gateway.connect_admin().await;
    let message = async |body: Value| {
        let (status, answer) = post(&admin, "/v1/tenants/acme/raises", &body).await;
        assert_eq!(status, 400, "{answer}");
        answer["error"]["message"].as_str().expect("a message").to_owned()
    };
    let limits = json!({ "concurrent": 2 });
    assert_eq!(
        message(json!({ "limits": limits, "seconds": 60 })).await,
        "Plan team has no concurrent below 2, so there is nothing to raise."
    );
    let higher = json!({ "concurrent": 9 });
    assert_eq!(
        message(json!({ "limits": higher, "until": "2020-01-01" })).await,
        "A raise must end in the future and within 366 days."
    );
    assert_eq!(
        message(json!({ "limits": higher, "until": "Friday" })).await,
        "'until' must be a day like 2026-12-01."
    );
    assert_eq!(message(json!({ "limits": higher })).await, "Give one of 'until' and 'seconds'.");
    let body = json!({ "limits": higher, "seconds": 60 });
    assert_eq!(post(&admin, "/v1/tenants/nobody/raises", &body).await.0, 404);
    let data = gateway.data().display().to_string();
    let error = support::failing(&[
        "tenants",
        "raise",
        "acme",
        "--limit",
        "concurrent",
        "--for",
        "1h",
        "--data",
        &data,
    ]);
    assert!(error.contains("is not LIMIT=VALUE"), "{error}");
}
