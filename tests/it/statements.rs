//! A statement over the real process: it covers the requested period, each line leads
//! to its records, and a second import changes nothing.

use std::collections::BTreeMap;
use std::io::Write as _;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::batches;
use crate::support::{Tollgate, failing, post};

fn sha256(text: &str) -> String {
    let mut sum = Command::new("sha256sum")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("sha256sum");
    sum.stdin.take().expect("it is piped").write_all(text.as_bytes()).expect("writes");
    let said = sum.wait_with_output().expect("it ends").stdout;
    String::from_utf8(said).expect("UTF-8")[..64].to_owned()
}

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
per_device_second = "7"

[prices.demo]
from = 2026-01-01
model = "tollgate-demo"
currency = "EUR"
per_device_second = { h200 = "0.0025", default = "0.0003" }
per_million_prompt_tokens = "0.15"
per_million_completion_tokens = "0.6"
"#;

#[tokio::test]
#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
async fn monthly_statement_covers_every_record() {
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
    // The gateway's day counts, because midnight may pass during the test.
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
    let lists: Vec<&Value> = lines.iter().map(|line| &line["price_list"]).collect();
    assert_eq!(lists, ["demo", "demo"], "the list of the model, not the general one");
    let plans = statement["plans"].as_array().expect("plans");
    assert_eq!((plans.len(), &plans[0]["plan"]), (1, &json!("open")), "{statement}");

    // Usage and statement agree, line by line and in total.
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

    // The digest of a line follows from the digests of its days.
    let days = with("--days");
    for line in lines {
        let mine = format!("{},", line["id"].as_str().expect("an id"));
        let text: String = days
            .lines()
            .filter_map(|day| Some(format!("{}\n", day.strip_prefix(&mine)?)))
            .collect();
        assert_eq!(line["digest"], sha256(&text), "{text}");
    }

    // A second statement has the same ids, digests and amounts.
    let again: Value = serde_json::from_str(&with("--json")).expect("JSON");
    assert_eq!(statement, again);
    let csv = with("--csv");
    let table: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(table.len(), 3, "{csv}");
    assert!(table.iter().all(|row| row.len() == table[0].len()), "{csv}");
    let text = gateway.command(&asked);
    assert!(text.starts_with("provisional statement stmt-"), "{text}");
    assert!(text.contains(&format!("0.{nanos:09}")), "{text}");

    // A missing price is refused, and the message names it.
    let data = gateway.data().to_str().expect("UTF-8");
    let unknown = ["statement", "--tenant", "gone", "--month", month, "--config", config];
    let error = failing(&[&unknown[..], &["--data", data]].concat());
    assert!(error.contains("give --plan"), "{error}");
    let error = failing(&["statement", "--tenant", "acme", "--month", "2026-13"]);
    assert!(error.contains("not a month like 2026-11"), "{error}");
}

/// Checks that the batch tier costs the factor of its price list: a flex request and the lines of
/// a batch, beside an interactive request.
#[tokio::test]
async fn statement_multiplies_batch_tier_by_factor() {
    let mut gateway = Tollgate::with_config(HALF_PRICE);
    let connection = gateway.connect(&gateway.key("acme", &[])).await;
    for tier in ["default", "flex"] {
        let body = json!({
            "model": "tollgate-demo", "max_tokens": 8, "service_tier": tier,
            "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
        });
        assert_eq!(post(&connection, "/v1/chat/completions", &body).await.0, 200);
    }
    let (_, file) = batches::upload(&connection, &batches::lines(3)).await;
    let (_, batch) = batches::create(&connection, &file).await;
    let batch = batches::ended(&connection, &batch).await;
    assert_eq!(batch["status"], "completed", "{batch}");
    gateway.stop();
    let printed = gateway.command(&["usage", "--tenant", "acme", "--json", "--by", "day"]);
    let days: Value = serde_json::from_str(&printed).expect("JSON");
    let month = &days["rows"][0]["day"].as_str().expect("a day")[..7];
    let config = gateway.config();
    let config = config.to_str().expect("UTF-8");
    let asked = ["statement", "--tenant", "acme", "--month", month, "--config", config, "--json"];
    let statement: Value = serde_json::from_str(&gateway.command(&asked)).expect("JSON");
    // A device second costs 2, so an interactive one costs twice its nanoseconds.
    let mut nanos = 0;
    for (tier, requests, price) in [("interactive", 1, 2), ("batch", 4, 1)] {
        let lines = statement["lines"].as_array().expect("lines");
        let line = lines.iter().find(|line| line["tier"] == tier).expect("a line of the tier");
        assert_eq!(line["requests"], requests, "{line}");
        let amount = line["reference_ns"].as_u64().expect("nanoseconds") * price;
        assert_eq!(line["amount"], money(amount), "{line}");
        nanos += amount;
    }
    assert_eq!(statement["total"]["amount"], money(nanos), "{statement}");
}

/// Formats billionths as a statement does.
fn money(nanos: u64) -> String {
    format!("{}.{:09}", nanos / 1_000_000_000, nanos % 1_000_000_000)
}

const HALF_PRICE: &str = r#"
[plans.open]
requests_per_minute = 100_000
flex = true

[tenants.acme]
plan = "open"

[prices.standard]
from = 2026-01-01
currency = "EUR"
per_device_second = "2"
batch = "0.5"
"#;

/// A billing system that follows docs/statements.md: each line is a row by its id, and
/// a known statement is skipped.
struct Billing(rusqlite::Connection);

impl Billing {
    fn new() -> Self {
        let connection = rusqlite::Connection::open_in_memory().expect("opens");
        connection
            .execute_batch(
                "CREATE TABLE statements (id TEXT PRIMARY KEY, digest TEXT NOT NULL);
                 CREATE TABLE lines (id TEXT PRIMARY KEY, statement TEXT NOT NULL,
                   key TEXT NOT NULL, requests INTEGER NOT NULL, amount TEXT NOT NULL,
                   digest TEXT NOT NULL);",
            )
            .expect("makes tables");
        Self(connection)
    }

    /// The number of rows that an import changed.
    fn import(&mut self, statement: &Value) -> usize {
        let text = |value: &Value| value.as_str().expect("text").to_owned();
        let (id, digest) = (text(&statement["id"]), text(&statement["digest"]));
        let transaction = self.0.transaction().expect("begins");
        let known = transaction
            .query_row(
                "SELECT count(*) FROM statements WHERE id = ?1 AND digest = ?2",
                [&id, &digest],
                |row| row.get::<_, u32>(0),
            )
            .expect("reads");
        if known == 1 {
            return 0;
        }
        let mut touched = transaction
            .execute("REPLACE INTO statements VALUES (?1, ?2)", [&id, &digest])
            .expect("writes");
        let lines = statement["lines"].as_array().expect("lines");
        let ids: Vec<&str> = lines.iter().map(|line| line["id"].as_str().expect("an id")).collect();
        let ids = serde_json::to_string(&ids).expect("JSON");
        touched += transaction
            .execute(
                "DELETE FROM lines WHERE statement = ?1
                   AND id NOT IN (SELECT value FROM json_each(?2))",
                [&id, &ids],
            )
            .expect("writes");
        for line in lines {
            touched += transaction
                .execute(
                    "REPLACE INTO lines VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                    rusqlite::params![
                        text(&line["id"]),
                        id,
                        text(&line["key"]),
                        line["requests"].as_u64().expect("a count"),
                        text(&line["amount"]),
                        text(&line["digest"])
                    ],
                )
                .expect("writes");
        }
        transaction.commit().expect("commits");
        touched
    }

    /// Returns the requests and the amount in nano-units over all lines.
    fn total(&self) -> (u64, u64) {
        self.0
            .query_row(
                "SELECT sum(requests), sum(CAST(replace(amount, '.', '') AS INTEGER)) FROM lines",
                [],
                |row| Ok((row.get(0)?, row.get(1)?)),
            )
            .expect("reads")
    }
}

/// Checks that an old export, a late entry, the old export again and a new export
/// double nothing and miss nothing.
#[tokio::test]
async fn export_imported_twice_is_counted_once() {
    let mut gateway = Tollgate::with_config(PRICED);
    let key = gateway.key("acme", &[]);
    let ask = async |gateway: &Tollgate| {
        let body = json!({
            "model": "tollgate-demo", "max_tokens": 3,
            "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
        });
        let connection = gateway.connect(&key).await;
        assert_eq!(post(&connection, "/v1/chat/completions", &body).await.0, 200);
    };
    let export = |gateway: &Tollgate| -> (Value, Vec<String>) {
        let config = gateway.data().with_file_name("tollgate.toml");
        let config = config.to_str().expect("UTF-8").to_owned();
        let printed = gateway.command(&["usage", "--tenant", "acme", "--json", "--by", "day"]);
        let days: Value = serde_json::from_str(&printed).expect("JSON");
        let month = days["rows"][0]["day"].as_str().expect("a day")[..7].to_owned();
        let asked = ["statement", "--tenant", "acme", "--month", &month, "--config", &config];
        let with = |flag: &str| gateway.command(&[&asked[..], &[flag]].concat());
        // The CSV has the same identifiers.
        let of_line = |row: &str| row.split(',').nth(4).expect("a line's id").to_owned();
        let csv = with("--csv").lines().skip(1).map(of_line).collect();
        (serde_json::from_str(&with("--json")).expect("JSON"), csv)
    };
    ask(&gateway).await;
    gateway.stop();
    let (first, _) = export(&gateway);
    let mut gateway = gateway.restart();
    ask(&gateway).await;
    gateway.stop();
    let (second, csv) = export(&gateway);
    assert_eq!(first["id"], second["id"], "one month of one tenant");
    let ids = |it: &Value| -> Vec<String> {
        let lines = it["lines"].as_array().expect("lines").iter();
        lines.map(|line| line["id"].as_str().expect("an id").to_owned()).collect()
    };
    assert_eq!((ids(&first), ids(&second)), (csv.clone(), csv));
    assert_ne!(first["digest"], second["digest"]);

    let mut billing = Billing::new();
    let touched: Vec<usize> = [&first, &first, &second, &second, &first, &second]
        .map(|statement| billing.import(statement))
        .to_vec();
    assert_eq!(touched, [2, 0, 2, 0, 2, 2], "what is known is passed over");
    let amount = second["total"]["amount"].as_str().expect("text").replace('.', "");
    assert_eq!(billing.total(), (2, amount.parse().expect("a number")));
}
