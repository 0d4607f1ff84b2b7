//! The gain of batching: the same requests one at a time and all at once, through the
//! whole engine, on the Qwen2.5-0.5B shape with random weights.

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::process::Process;
use super::report::Report;
use super::{Options, build, model_folder};
use crate::run::command;

/// The number of simultaneous requests, and the tokens in and out of each request.
const TOGETHER: u64 = 32;
const TOKENS: u64 = 32;

/// The number of requests one at a time. It is lower than [`TOGETHER`], because each
/// round takes longer.
const ALONE: u64 = 4;

/// The smallest ratio that the project promises.
const LEAST_RATIO: f64 = 3.0;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate-engine", "--example", "measure"])?;
    let measure = built.join("examples/measure");
    let model = model_folder(&measure)?;
    let mut start = command(&measure.to_string_lossy());
    let mut engine = Process::start("the engine", start.arg(&model).arg("engine"))?;
    let about: Value = serde_json::from_str(&engine.ready()?).context("the engine's ready line")?;
    report.fact("model", "Qwen2.5-0.5B shape, random weights, bf16");
    report.fact("engine", about);
    report.fact("requests", format!("{TOKENS} tokens in, {TOKENS} out, greedy"));
    report.fact("one_at_a_time", format!("{ALONE} requests a round"));
    report.fact("together", format!("{TOGETHER} requests a round"));
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        let mut alone = || measured(&mut engine, "alone", ALONE);
        let rate = alone()?;
        report.add("one at a time", "tokens/s", rate);
        let rate = measured(&mut engine, "together", TOGETHER)?;
        report.add("32 together", "tokens/s", rate);
    }
    let ratio = report.ratio("32 together over one at a time", "32 together", "one at a time")?;
    if ratio < LEAST_RATIO {
        eprintln!("the gain of batching is {ratio:.2}, less than the promised {LEAST_RATIO}");
    }
    Ok(())
}

/// Returns the generated tokens a second of one turn.
fn measured(engine: &mut Process, how: &str, count: u64) -> Result<f64> {
    let reply = engine.ask(&format!("{how} {count} {TOKENS} {TOKENS}"))?;
    let tokens = reply["tokens"].as_u64().context("no tokens")?;
    if tokens != count * TOKENS {
        bail!("the engine made {tokens} tokens instead of {}", count * TOKENS);
    }
    Ok(tokens as f64 / reply["seconds"].as_f64().context("no seconds")?)
}
