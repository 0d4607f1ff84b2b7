//! Runs the fairness benchmark in virtual time and prints its table: `fairness [--json
//! FILE] [PART...]`. The test suite runs the same benchmark.
//!
//! `fairness --search COUNT SEED MINUTES` runs that many random attacks, or as many as the
//! time allows, the worst of them again with nine other draws of arrivals, and prints the ten
//! that delay others most.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]
#![allow(clippy::expect_used, reason = "a measuring program stops at what it does not expect")]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde_json::json;

#[path = "../tests/fairness/batch.rs"]
mod batch;
#[path = "../tests/fairness/full_batch.rs"]
mod full_batch;
#[path = "../tests/fairness/play.rs"]
mod play;
#[path = "../tests/fairness/search.rs"]
mod search;
#[allow(dead_code, reason = "the test uses the rest")]
#[path = "../tests/fairness/table.rs"]
mod table;
#[path = "../tests/fairness/workload.rs"]
mod workload;

use table::PARTS;

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
    if let [flag, numbers @ ..] = words.as_slice()
        && flag == "--search"
    {
        return search_worst(numbers);
    }
    let mut output = None;
    if let Some(at) = words.iter().position(|word| word == "--json") {
        words.remove(at);
        if at == words.len() {
            eprintln!("--json wants a file");
            return ExitCode::FAILURE;
        }
        output = Some(words.remove(at));
    }
    let mut told = Vec::new();
    let mut holds = true;
    for part in &PARTS {
        if !words.is_empty() && !words.iter().any(|word| word == part.name) {
            continue;
        }
        let begun = Instant::now();
        for row in (part.rows)() {
            println!("{row}");
            holds &= row.holds();
            told.push(json!({
                "name": row.name,
                "figure": row.figure,
                "unit": row.unit,
                "bound": row.bound.to_string(),
                "holds": row.holds(),
            }));
        }
        eprintln!("{} took {:.1} s", part.name, begun.elapsed().as_secs_f64());
    }
    if let Some(output) = output {
        let text = serde_json::to_string_pretty(&told).expect("rows serialise") + "\n";
        if let Err(error) = std::fs::write(&output, text) {
            eprintln!("{output}: {error}");
            return ExitCode::FAILURE;
        }
    }
    if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Further runs of each of the worst attacks of a search, with other arrivals.
const REDRAWS: u32 = 9;

/// Runs a search and prints its results. `numbers` are the count of attacks, the seed and
/// the time limit in minutes.
fn search_worst(numbers: &[String]) -> ExitCode {
    let numbers: Option<Vec<u32>> = numbers.iter().map(|word| word.parse().ok()).collect();
    let Some(&[count, seed, minutes]) = numbers.as_deref() else {
        eprintln!("--search wants a count, a seed and a number of minutes");
        return ExitCode::FAILURE;
    };
    let limit = Duration::from_secs(60 * u64::from(minutes));
    let (found, played) = search::search(count, REDRAWS, seed.into(), limit);
    println!("{played} attacks, seed {seed}; victims' first token p99, the longest first");
    found.iter().for_each(|found| println!("{found}"));
    ExitCode::SUCCESS
}
