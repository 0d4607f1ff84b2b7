//! What a GPU makes of the engine: whether it computes what the CPU does, and
//! how fast. `cargo xtask gpu-check` packs it with all that a machine without
//! Rust and without a network needs.
//!
//! `gpu_check agree [--quick]` compares whole models with the CPU backend;
//! `gpu_check meter [--quick]` compares the time that is metered with what the
//! card's own tool says; `gpu_check speed [--quick]` measures shapes of known
//! models. Each prints one JSON document, and what it does meanwhile on standard
//! error; the exit status is 1 where something differs. `gpu_check table DIR`
//! prints what is in that folder as tables. `--kernels DIR` is a bundle of
//! machine code, `--nvidia-smi PATH` the tool, `--out FILE` where results are
//! written. `agree` and `speed` run each case in a process of its own and write
//! as these end; `--case NAME` runs that one in this.

#[path = "../../tests/cuda/agree.rs"]
#[allow(clippy::unwrap_used, unreachable_pub, dead_code, reason = "it is a test's")]
mod agree;
#[path = "../../tests/cuda/alike.rs"]
#[allow(clippy::unwrap_used, unreachable_pub, reason = "it is a test's")]
mod alike;
mod cases;
mod compare;
#[path = "../../tests/cuda/drawing.rs"]
#[allow(clippy::unwrap_used, unreachable_pub, dead_code, reason = "it is a test's")]
mod drawing;
mod meter;
mod options;
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
        ("meter", _) => Some(meter::run(&options)?),
        _ => return Err("usage: gpu_check agree|meter|speed|table".into()),
    };
    let told = told.ok_or_else(|| format!("no case is named {}", case.unwrap_or_default()))?;
    if let (None, Some(out)) = (case, &options.out) {
        std::fs::write(out, format!("{told:#}\n"))?;
    }
    println!("{told:#}");
    let passed = told["passed"].as_bool().unwrap_or(true);
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
