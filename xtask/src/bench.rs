//! Benchmarks: programs that print ratios to a peer or to a physical limit measured in
//! the same run. The programs under comparison take turns, round by round, so that
//! other work on the machine disturbs both. The raw figures go into `docs/benchmarks`,
//! beside the text about them.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::run::{cargo, check, root, target};

mod drills;
mod engine;
mod fairness;
mod gateway;
mod grammar;
mod h2load;
mod jobs;
mod ledger;
mod machine;
mod peers;
mod process;
mod refusal;
mod report;
mod tenants;
mod tools;

use report::Report;

/// The part of a config with a device that takes almost no time, so that a benchmark
/// measures the gateway alone.
const INSTANT_DEVICE: &str = r#"
[worker]
engine = "synthetic"

[worker.synthetic]
step = "10us"
sequence = "100ns"
kv_token = "1ns"
prefill_token = "10ns"
kv_tokens = 100_000
context = 4_096
"#;

/// The extent of a measurement.
struct Options {
    /// The number of turns of each program that is compared.
    rounds: usize,
    /// The seconds of load in one turn, if a turn is measured by time.
    seconds: u32,
    /// The file for the raw figures.
    output: PathBuf,
    /// True if the benchmark measures the programs that were built before, even if the
    /// sources have changed.
    as_built: bool,
}

/// Runs the benchmark `name` and writes its figures.
///
/// # Errors
///
/// An argument is wrong, a program failed, or a promised figure was missed where the
/// benchmark treats that as an error.
pub fn run(name: &str, rest: &[&str]) -> Result<()> {
    // These two have options of their own and write a page besides the figures.
    if name == "fairness" {
        return fairness::run(rest);
    }
    if name == "drills" {
        return drills::run(rest);
    }
    let options = Options::read(name, rest)?;
    let mut report = Report::begin(name)?;
    if options.as_built {
        report.fact("as_built", "the programs may be older than the revision");
    }
    match name {
        "gateway" => gateway::run(&options, &mut report)?,
        "engine" => engine::run(&options, &mut report)?,
        "grammar" => grammar::run(&options, &mut report)?,
        "jobs" => jobs::run(&options, &mut report)?,
        "ledger" => ledger::run(&options, &mut report)?,
        "peers" => peers::run(&options, &mut report)?,
        "refusal" => refusal::run(&options, &mut report)?,
        "tenants" => tenants::run(&options, &mut report)?,
        _ => bail!(
            "no such benchmark: {name} (choose one of gateway, refusal, engine, grammar, jobs, ledger, peers, tenants, fairness, drills)"
        ),
    }
    report.end()?;
    print!("{report}");
    report.write(&options.output)?;
    eprintln!("wrote {}", options.output.display());
    Ok(())
}

impl Options {
    /// Parses `--rounds N`, `--seconds N`, `--output FILE` and `--as-built`, in any
    /// order.
    fn read(name: &str, rest: &[&str]) -> Result<Self> {
        let mut options = Self {
            rounds: 5,
            seconds: 3,
            output: root().join(format!("docs/benchmarks/{name}.json")),
            as_built: false,
        };
        let mut words = rest.iter();
        while let Some(flag) = words.next() {
            let mut value = || words.next().with_context(|| format!("{flag} needs a value"));
            match *flag {
                "--rounds" => options.rounds = value()?.parse().context("--rounds")?,
                "--seconds" => options.seconds = value()?.parse().context("--seconds")?,
                "--output" => options.output = PathBuf::from(value()?),
                "--as-built" => options.as_built = true,
                _ => bail!("no such option: {flag} ({OPTIONS})"),
            }
        }
        if !(1..=100).contains(&options.rounds) || !(1..=60).contains(&options.seconds) {
            bail!("--rounds must be 1 to 100 and --seconds 1 to 60");
        }
        Ok(options)
    }
}

const OPTIONS: &str = "options: --rounds, --seconds, --output, --as-built";

/// Builds with the release profile, unless the options forbid it, and returns the
/// folder of the programs.
fn build(options: &Options, what: &[&str]) -> Result<PathBuf> {
    if !options.as_built {
        check(cargo().args(["build", "--release", "--locked"]).args(what))?;
    }
    Ok(target().join("release"))
}

/// Returns the folder of the model that is measured and makes the folder if it is
/// missing.
fn model_folder(measure: &std::path::Path) -> Result<PathBuf> {
    let folder = target().join("random-models/qwen2.5-0.5b-bf16");
    if !folder.join("model.safetensors").exists() {
        // The folder gets its name last, so that an interrupted run leaves no half-made
        // model to measure.
        let unfinished = PathBuf::from(format!("{}.unfinished", folder.display()));
        let mut make = crate::run::command(&measure.to_string_lossy());
        check(make.args(["make", "qwen2.5-0.5b"]).arg(&unfinished))?;
        if folder.exists() {
            std::fs::remove_dir_all(&folder)?;
        }
        std::fs::rename(unfinished, &folder).context("the model's folder")?;
    }
    Ok(folder)
}
