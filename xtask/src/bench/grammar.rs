//! The host time of forms: compiling schemas, and masks of tokens, over the vocabulary of Qwen
//! (151,643 tokens of text). Each round draws other answers. Then the effect of answers with a
//! form on requests without one: the same load beside answers with and without a form, in turn, once
//! below the capacity of the machine, for their latency, and once above it, for their number.

use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::Report;
use super::{Options, build, drills, tools};
use crate::run::{command, output, target};

/// Targets in microseconds: the median and the 99th percentile of masks.
const MOST_MASK_US: (f64, f64) = (100.0, 2_000.0);

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate-engine", "--example", "grammar_speed"])?;
    let tokens = tools::vocabulary()?;
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        let mut program = command(&built.join("examples/grammar_speed").to_string_lossy());
        program.arg(&tokens).arg((round + 1).to_string());
        let result: Value = serde_json::from_str(&output(&mut program)?)?;
        let figure = |name: &str| result[name].as_f64().with_context(|| format!("no {name}"));
        for (series, name) in [
            ("compiling, median", "compile_p50_us"),
            ("compiling, longest", "compile_max_us"),
            ("mask, median", "mask_p50_us"),
            ("mask, 99 of 100", "mask_p99_us"),
            ("mask, longest", "mask_max_us"),
        ] {
            report.add(series, "us", figure(name)?);
        }
        report.add("masks", "masks", figure("masks")?);
        report.add("masks later than 2 ms", "masks", figure("late")?);
        report.fact("vocabulary", result["vocabulary"].clone());
    }
    neighbours(options, report)?;
    let (median, tail) = (report.most("mask, median")?, report.most("mask, 99 of 100")?);
    if median > MOST_MASK_US.0 || tail > MOST_MASK_US.1 {
        eprintln!(
            "masks take {median:.0} us (median) and {tail:.0} us (99 of 100); the targets are 100 and 2,000"
        );
    }
    Ok(())
}

/// Plays honest requests beside answers with a form, and beside as many without one.
fn neighbours(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate"])?;
    for round in 0..options.rounds {
        eprintln!("round {} of the neighbours", round + 1);
        for (beside, shape) in [("forms", "formed_answer"), ("free answers", "free_answer")] {
            let attack = beside_shape(&built, shape, BELOW_CAPACITY)?;
            for (field, name) in
                [("first_token", "first token, p99"), ("between_tokens", "between tokens, p99")]
            {
                let figure = &attack[field]["p99"];
                let figure = figure.as_f64().with_context(|| format!("no {name}: {attack}"))?;
                report.add(&format!("{name}, beside {beside}"), "ms", figure);
            }
            let attack = beside_shape(&built, shape, ABOVE_CAPACITY)?;
            let answered = attack["answered"].as_f64();
            let answered = answered.with_context(|| format!("no count of answers: {attack}"))?;
            report.add(&format!("answered, beside {beside}"), "1/s", answered / ATTACK_SECONDS);
        }
    }
    for name in ["first token, p99", "between tokens, p99", "answered"] {
        let (of, to) = (format!("{name}, beside forms"), format!("{name}, beside free answers"));
        report.ratio(&format!("{name}: forms over free answers"), &of, &to)?;
    }
    Ok(())
}

/// Plays honest requests beside answers of `shape`, and returns the figures of the honest requests.
fn beside_shape(built: &Path, shape: &str, (rate, tokens): (f64, u32)) -> Result<Value> {
    let file = target().join(format!("bench/beside-{shape}.toml"));
    std::fs::create_dir_all(target().join("bench"))?;
    let text = SCENARIO
        .replace("SHAPE", shape)
        .replace("RATE", &format!("{rate:.1}"))
        .replace("TOKENS", &tokens.to_string())
        .replace("SECONDS", &ATTACK_SECONDS.to_string());
    std::fs::write(&file, text)?;
    let found = drills::play(built, &file.to_string_lossy(), shape)?;
    Ok(found["honest"]["attack"].clone())
}

/// Honest requests a second, and the tokens of each: a load without a queue.
const BELOW_CAPACITY: (f64, u32) = (16.0, 16);
/// The same, beyond what two cores compute; the plan refuses the rest.
const ABOVE_CAPACITY: (f64, u32) = (1_000.0, 64);
/// Seconds in which both kinds are sent.
const ATTACK_SECONDS: f64 = 30.0;

/// Honest requests, and 16 answers a second of 64 tokens.
const SCENARIO: &str = r#"
about = "Requests without a form, beside answers with and without one."

[phases]
alone = "5s"
attack = "SECONDSs"
after = "2s"

[[honest]]
tenants = ["acme"]
plan = "team"
rate = RATE
max_tokens = TOKENS

[[attackers]]
kind = "odd_shapes"
tenants = ["forms"]
plan = "team"
rate = 16.0
shapes = ["SHAPE"]

[hold]
success = 0.999

[gateway]
config = """
[plans.team]
concurrent = 64
queued = 64
grammar_time_per_minute = "60s"
"""
"#;
