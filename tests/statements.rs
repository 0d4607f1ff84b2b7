//! A statement over the real process: what was asked for is on it, each line
//! can be followed to its records, and a second import changes nothing.

use std::collections::BTreeMap;

use serde_json::{Value, json};

mod support;
use support::{Tollgate, failing, post};

const PRICED: &str = r#"
[plans.open]
requests_per_minute = 100_000

[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"

[prices.standard]
from = 2026-01-01
currency = "EUR"
per_device_second = { h200 = "0.0025", default = "0.0003" }
per_million_prompt_tokens = "0.15"
per_million_completion_tokens = "0.6"
"#;

#[tokio::test]
async fn a_month_is_stated_to_the_last_record() {
    let mut gateway = Tollgate::with_config(PRICED);
    let (first, second) = (gateway.key("acme", &[]), gateway.key("acme", &[]));
    let other = gateway.key("other", &[]);
    for (key, tokens) in [(&first, 3), (&first, 5), (&second, 4), (&other, 2)] {
        let connection = gateway.connect(key).await;
        let body = json!({
            "model": "tollgate-demo", "max_tokens": tokens,
            "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
        });
        assert_eq!(post(&connection, "/v1/chat/completions", &body).await.0, 200);
    }
    gateway.stop();
    let usage = |by: &'static str| -> Value {
        let printed = gateway.command(&["usage", "--tenant", "acme", "--json", "--by", by]);
        serde_json::from_str(&printed).expect("JSON")
    };
    let used = usage("key");
    // The day is the gateway's, not one that midnight may change meanwhile.
    let days = usage("day");
    let month = &days["rows"][0]["day"].as_str().expect("a day")[..7];

    let config = gateway.data().with_file_name("tollgate.toml");
    let config = config.to_str().expect("UTF-8");
    let asked = ["statement", "--tenant", "acme", "--month", month, "--config", config];
    let with = |flag: &'static str| gateway.command(&[&asked[..], &[flag]].concat());
    let statement: Value = serde_json::from_str(&with("--json")).expect("JSON");
    assert_eq!(statement["status"], "provisional", "the month has not ended: {statement}");
    let lines = statement["lines"].as_array().expect("lines");
    assert_eq!(lines.len(), 2, "a line for each key: {statement}");

    // What usage says is what is priced, line by line and in all.
    let usage = used["rows"].as_array().expect("rows");
    let mut nanos = 0;
    for line in lines {
        let row = usage.iter().find(|row| row["key"] == line["key"]).expect("a row");
        for figure in ["requests", "prompt_tokens", "completion_tokens", "attributed_ns"] {
            assert_eq!(line[figure], row[figure], "{figure}: {line} {row}");
        }
        let figure = |name: &str| u128::from(line[name].as_u64().expect(name));
        let exact = figure("reference_ns") * 300_000 * 1_000_000
            + figure("prompt_tokens") * 150_000_000 * 1_000_000_000
            + figure("completion_tokens") * 600_000_000 * 1_000_000_000;
        let amount = exact / 1_000_000_000_000_000;
        assert_eq!(line["amount"], format!("0.{amount:09}"), "{line}");
        nanos += amount;
    }
    assert_eq!(statement["total"]["amount"], format!("0.{nanos:09}"));

    // The records, counted by line.
    let records = with("--entries");
    let mut counted: BTreeMap<&str, u64> = BTreeMap::new();
    for record in records.lines() {
        *counted.entry(record.split_once(',').expect("an id").0).or_default() += 1;
    }
    for line in lines {
        let count = |name: &str| line[name].as_u64().expect(name);
        assert_eq!(count("charges"), count("requests"), "{line}");
        assert_eq!(
            counted.remove(line["id"].as_str().expect("an id")),
            Some(count("charges") + count("entries"))
        );
    }
    assert!(counted.is_empty(), "records of no line: {counted:?}");

    // Once more: the same ids, digests and amounts.
    let again: Value = serde_json::from_str(&with("--json")).expect("JSON");
    assert_eq!(statement, again);
    let csv = with("--csv");
    let table: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(table.len(), 3, "{csv}");
    assert!(table.iter().all(|row| row.len() == table[0].len()), "{csv}");
    let text = gateway.command(&asked);
    assert!(text.starts_with("provisional statement stmt-"), "{text}");
    assert!(text.contains(&format!("0.{nanos:09}")), "{text}");

    // What has no price is refused, and says what is missing.
    let data = gateway.data().to_str().expect("UTF-8");
    let unknown = ["statement", "--tenant", "gone", "--month", month, "--config", config];
    let error = failing(&[&unknown[..], &["--data", data]].concat());
    assert!(error.contains("give --plan"), "{error}");
    let error = failing(&["statement", "--tenant", "acme", "--month", "2026-13"]);
    assert!(error.contains("not a month like 2026-11"), "{error}");
}
