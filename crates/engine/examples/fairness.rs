//! Runs the fairness benchmark in virtual time and prints its table: `fairness [--json
//! FILE] [PART...]`. The test suite runs the same benchmark.

use std::process::ExitCode;
use std::time::Instant;

use serde_json::json;

#[path = "../tests/fairness/play.rs"]
mod play;
#[allow(dead_code, reason = "the test uses the rest")]
#[path = "../tests/fairness/table.rs"]
mod table;
#[path = "../tests/fairness/workload.rs"]
mod workload;

use table::PARTS;

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().skip(1).collect();
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
