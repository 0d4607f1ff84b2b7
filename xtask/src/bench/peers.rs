//! The CPU engine beside llama.cpp on the same bf16 weights: prefill, decode of one
//! sequence, decode of eight, in turns within one run. Before any measurement both
//! engines must choose the same greedy tokens.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::process::Process;
use super::report::{Report, median};
use super::{Options, build, model_folder, tools};
use crate::run::{check, command, root};

/// The measurements: a name, and an order that both programs understand.
const MEASURED: [(&str, &str); 3] = [
    ("decode 1", "decode 1 128 16"),
    ("decode 8", "decode 8 128 12"),
    ("prefill 512", "prefill 512"),
];

/// The number of prompts with compared greedy continuations, and the tokens of each
/// prompt.
const PROMPTS: u32 = 8;
const PROMPT_TOKENS: u32 = 24;
const CONTINUED: usize = 8;

struct Sides {
    ours: Process,
    theirs: Process,
}

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate-engine", "--example", "measure"])?;
    let python = tools::llama_cpp()?;
    let measure = built.join("examples/measure");
    let model = model_folder(&measure)?;
    let weights = std::fs::metadata(model.join("model.safetensors"))?.len();
    let mut sides = start(&measure, &python, &model, report)?;
    report.fact("model", "Qwen2.5-0.5B shape, random weights, bf16");
    report.fact("weight_bytes", weights);
    agree(&mut sides, report)?;
    for (name, order) in MEASURED {
        report.fact(name, order);
        // This turn is not timed: it loads pages and wakes threads.
        sides.ours.ask(order)?;
        sides.theirs.ask(order)?;
    }
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        take_turns(&mut sides, round, report)?;
        let read = sides.ours.ask("bandwidth")?;
        let seconds = read["seconds"].as_f64().context("no seconds")?;
        let bytes = read["bytes"].as_f64().context("no bytes")?;
        report.add("memory reads", "GB/s", bytes / seconds / 1e9);
        report.add("decode 1 within memory reads", "tokens/s", bytes / seconds / weights as f64);
    }
    for (name, _) in MEASURED {
        report.ratio(
            &format!("{name}: tollgate over llama.cpp"),
            &format!("{name}, tollgate"),
            &format!("{name}, llama.cpp"),
        )?;
    }
    report.ratio(
        "decode 1: tollgate over what memory allows",
        "decode 1, tollgate",
        "decode 1 within memory reads",
    )?;
    Ok(())
}

/// Runs one round of all measurements. The program that begins changes from round to
/// round.
fn take_turns(sides: &mut Sides, round: usize, report: &mut Report) -> Result<()> {
    for (name, order) in MEASURED {
        for turn in 0..2 {
            let is_ours = (turn + round).is_multiple_of(2);
            let (side, engine_name) = if is_ours {
                (&mut sides.ours, "tollgate")
            } else {
                (&mut sides.theirs, "llama.cpp")
            };
            let reply = side.ask(order)?;
            let tokens = reply["tokens"].as_f64().context("no tokens")?;
            let seconds = reply["seconds"].as_f64().context("no seconds")?;
            report.add(&format!("{name}, {engine_name}"), "tokens/s", tokens / seconds);
        }
    }
    Ok(())
}

/// Starts both programs and converts the model for llama.cpp if that is not done yet.
fn start(measure: &Path, python: &Path, model: &Path, report: &mut Report) -> Result<Sides> {
    let here = root().join("xtask/src/bench/peers");
    let converted = PathBuf::from(format!("{}.gguf", model.display()));
    if !converted.exists() {
        let mut convert = command(&python.to_string_lossy());
        check(convert.arg(here.join("to_gguf.py")).arg(model).arg(&converted))?;
    }
    let ours = Process::start(
        "the engine",
        command(&measure.to_string_lossy()).arg(model).arg("backend"),
    )?;
    let ours_about: Value =
        serde_json::from_str(&ours.ready()?).context("the engine's ready line")?;
    let threads = ours_about["threads"].as_u64().context("no threads")?;
    let theirs = Process::start(
        "llama.cpp",
        command(&python.to_string_lossy())
            .arg(here.join("llama_cpp_measure.py"))
            .arg(&converted)
            .arg(threads.to_string()),
    )?;
    let theirs_about: Value =
        serde_json::from_str(&theirs.ready()?).context("llama.cpp's ready line")?;
    report.fact("tollgate", ours_about);
    report.fact("llama.cpp", theirs_about);
    Ok(Sides { ours, theirs })
}

/// Checks that the first greedy token of every prompt is the same, and reports the
/// number of further equal tokens. Weights are random, so two best logits may be closer
/// together than the difference between two orders of summation in bf16.
fn agree(sides: &mut Sides, report: &mut Report) -> Result<()> {
    let mut agreed = Vec::new();
    for number in 0..PROMPTS {
        let prompt: Vec<String> = (0..PROMPT_TOKENS)
            .map(|at| ((at * 7_919 + number * 104_729 + 13) % 151_000).to_string())
            .collect();
        let order = format!("greedy {CONTINUED} {}", prompt.join(","));
        let (ours, theirs) = (ids(sides.ours.ask(&order)?)?, ids(sides.theirs.ask(&order)?)?);
        let same = ours.iter().zip(&theirs).take_while(|(a, b)| a == b).count();
        eprintln!("  prompt {number}: {same} of {CONTINUED} greedy tokens agree");
        if same == 0 {
            bail!("prompt {number}: tollgate chose {ours:?} and llama.cpp {theirs:?}");
        }
        agreed.push(same as f64);
    }
    report.fact(
        "greedy_agreement",
        json!({
            "prompts": PROMPTS, "prompt_tokens": PROMPT_TOKENS, "continued": CONTINUED,
            "tokens_agreed": agreed, "median": median(&agreed),
        }),
    );
    Ok(())
}

fn ids(reply: Value) -> Result<Vec<u64>> {
    let ids = reply["tokens"].as_array().context("no tokens")?;
    ids.iter().map(|id| id.as_u64().context("an id is a number")).collect()
}
