//! Checks a GPU: whether the engine computes the same on it as on the CPU, and how
//! fast. `cargo xtask gpu-check` packs the program with everything that a machine
//! without Rust and without a network needs.
//!
//! `gpu_check agree [--quick]` compares whole models with the CPU backend. `gpu_check
//! meter [--quick]` compares the metered time with the report of the device's own tool.
//! `gpu_check attribution [--quick]` compares the attribution of steps with measurements
//! of every subset of their sequences.
//! `gpu_check speed [--quick]` measures shapes of known models. Each prints one JSON
//! document, and its progress on standard error; the exit status is 1 if something
//! differs. `gpu_check table DIR` prints the results in that folder as tables.
//! `--kernels DIR` is a bundle of machine code, `--nvidia-smi PATH` the tool, `--out
//! FILE` the file for results. `agree`, `speed` and `attribution` run each case in a
//! process of its own and write results as cases end; `--case NAME` runs one case in the
//! current process.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

#[path = "../../tests/cuda/agree.rs"]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    unreachable_pub,
    dead_code,
    reason = "it is a test's"
)]
mod agree;
mod attribution;
mod cases;
mod compare;
#[path = "../../tests/cuda/determinism.rs"]
#[allow(clippy::unwrap_used, clippy::expect_used, unreachable_pub, reason = "it is a test's")]
mod determinism;
mod meter;
mod options;
#[path = "../../tests/cuda/sampling.rs"]
#[allow(
    clippy::unwrap_used,
    clippy::expect_used,
    unreachable_pub,
    dead_code,
    reason = "it is a test's"
)]
mod sampling;
mod speed;
mod table;

use std::error::Error;
use std::process::ExitCode;

use options::Options;
use serde_json::Value;

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("gpu_check: {error}");
        ExitCode::FAILURE
    })
}

fn run() -> Result<ExitCode, Box<dyn Error>> {
    let mut words = std::env::args().skip(1);
    let command = words.next().unwrap_or_default();
    if command == "table" {
        let folder = words.next().ok_or("table wants a folder")?;
        print!("{}", table::run(folder.as_ref())?);
        return Ok(ExitCode::SUCCESS);
    }
    let mut options = Options::default();
    while let Some(word) = words.next() {
        match word.as_str() {
            "--quick" => options.is_quick = true,
            "--kernels" => {
                options.kernels.push(words.next().ok_or("--kernels wants a folder")?.into());
            }
            "--case" => options.case = Some(words.next().ok_or("--case wants a name")?),
            "--out" => options.out = Some(words.next().ok_or("--out wants a file")?.into()),
            "--nvidia-smi" => {
                let tool = words.next().ok_or("--nvidia-smi wants a program")?;
                options.nvidia_smi = Some(tool.into());
            }
            _ => return Err(format!("no such option: {word}").into()),
        }
    }
    let case = options.case.as_deref();
    let told: Option<Value> = match (command.as_str(), case) {
        ("agree", Some(case)) => compare::run(&options, case),
        ("agree", None) => Some(cases::apart("agree", &compare::titles(&options), &options)?),
        ("speed", Some(case)) => speed::run(&options, case),
        ("speed", None) => Some(cases::apart("speed", &speed::titles(&options), &options)?),
        ("attribution", Some(case)) => attribution::run(&options, case),
        ("attribution", None) => {
            Some(cases::apart("attribution", &attribution::titles(&options), &options)?)
        }
        ("meter", _) => Some(meter::run(&options)?),
        _ => return Err("usage: gpu_check agree|attribution|meter|speed|table".into()),
    };
    let told = told.ok_or_else(|| format!("no case is named {}", case.unwrap_or_default()))?;
    if let (None, Some(out)) = (case, &options.out) {
        std::fs::write(out, format!("{told:#}\n"))?;
    }
    println!("{told:#}");
    let passed = told["passed"].as_bool().unwrap_or(true);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
