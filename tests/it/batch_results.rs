//! The results of a batch whose lines count: the input, the sums of the answers, and the checks
//! that every test of batches makes of them.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tollgate_loadtest::client::Connection;

use crate::support::rest;

/// Every so manieth line is refused when it runs, and ends in the error file.
pub const REFUSED_EVERY: usize = 7;

/// Returns the lines of an input. `tokens` says how many tokens the answer to a line may have.
pub fn input(lines: usize, mut tokens: impl FnMut(usize) -> u64) -> String {
    let line = |number: usize| {
        let temperature = if number.is_multiple_of(REFUSED_EVERY) { 9 } else { 0 };
        let body = json!({
            "model": "tollgate-demo", "temperature": temperature,
            "max_tokens": tokens(number),
            "messages": [{ "role": "user", "content": "Count from 1 to 400." }],
        });
        let line = json!({
            "custom_id": format!("line-{number}"), "method": "POST",
            "url": "/v1/chat/completions", "body": body,
        });
        format!("{line}\n")
    };
    (0..lines).map(line).collect()
}

pub fn figure(value: &Value) -> u64 {
    value.as_u64().unwrap_or_else(|| panic!("no figure: {value}"))
}

/// The figures of a bill.
pub const FIGURES: [&str; 6] = [
    "requests",
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "attributed_ns",
    "reference_ns",
];

/// The sums of [`FIGURES`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums([u64; FIGURES.len()]);

impl Sums {
    pub fn of_row(row: &Value) -> Self {
        Self(FIGURES.map(|name| figure(&row[name])))
    }

    fn of_answer(usage: &Value) -> Self {
        Self([
            1,
            figure(&usage["prompt_tokens"]),
            figure(&usage["prompt_tokens_details"]["cached_tokens"]),
            figure(&usage["completion_tokens"]),
            figure(&usage["tollgate"]["attributed_ns"]),
            figure(&usage["tollgate"]["reference_ns"]),
        ])
    }

    pub fn requests(&self) -> u64 {
        self.0[0]
    }

    pub fn completion_tokens(&self) -> u64 {
        self.0[3]
    }

    pub fn reference_ns(&self) -> u64 {
        self.0[5]
    }
}

impl std::iter::Sum for Sums {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        let plus = |sum: Self, next: Self| Self(std::array::from_fn(|at| sum.0[at] + next.0[at]));
        all.fold(Self::default(), plus)
    }
}

/// Returns the lines of a result of a batch.
async fn result(connection: &Connection, batch: &Value, file: &str) -> Vec<Value> {
    let Some(id) = batch[file].as_str() else { return Vec::new() };
    let path = format!("/v1/files/{id}/content");
    let text = rest(connection.get(&path).await.expect("answers")).await;
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Asserts that each of `lines` lines has one result, and returns the sums of the answers.
pub async fn check_lines(connection: &Connection, batch: &Value, lines: usize) -> Sums {
    let output = result(connection, batch, "output_file_id").await;
    let errors = result(connection, batch, "error_file_id").await;
    let mut seen = BTreeSet::new();
    for line in &output {
        assert_eq!(line["response"]["status_code"], 200, "{line}");
    }
    for line in output.iter().chain(&errors) {
        let custom_id = line["custom_id"].as_str().expect("text").to_owned();
        assert!(seen.insert(custom_id), "twice: {line}");
    }
    let expected: BTreeSet<String> = (0..lines).map(|number| format!("line-{number}")).collect();
    assert_eq!(seen, expected, "{batch}");
    let counts = json!({ "total": lines, "completed": output.len(), "failed": errors.len() });
    assert_eq!(batch["request_counts"], counts, "{batch}");
    output.iter().map(|line| Sums::of_answer(&line["response"]["body"]["usage"])).sum()
}

/// Asserts that a batch is completed and that only its wrong lines are refused. Returns the
/// sums of its answers.
pub async fn check_completed(connection: &Connection, batch: &Value, lines: usize) -> Sums {
    assert_eq!(batch["status"], "completed", "{batch}");
    for line in result(connection, batch, "error_file_id").await {
        assert_eq!(line["response"]["status_code"], 400, "{line}");
    }
    let sums = check_lines(connection, batch, lines).await;
    assert_eq!(sums.requests(), (lines - lines.div_ceil(REFUSED_EVERY)) as u64, "{batch}");
    assert_eq!(batch["usage"]["output_tokens"], sums.completion_tokens(), "{batch}");
    sums
}
