//! Benchmarks: programs that print ratios against a peer or a physical limit
//! measured in the same run. What is compared takes turns, round by round, so
//! that whatever else the machine does falls on both; raw figures go beside
//! the text that reads them, into `docs/benchmarks`.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

use crate::run::{cargo, check, root};

mod drills;
mod engine;
mod fairness;
mod gateway;
mod h2load;
mod ledger;
mod machine;
mod peers;
mod process;
mod refusal;
mod report;
mod tenants;
mod tools;

use report::Report;

/// The part of a config with a device that takes next to no time, so that only
/// the gateway's is measured.
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

/// How long a benchmark measures.
struct Options {
    /// Turns of each thing that is compared.
    rounds: usize,
    /// Seconds of load in one turn, where a turn is a time.
    seconds: u32,
    /// Where the raw figures go.
    output: PathBuf,
    /// Measure what was built before, whatever has changed since.
    as_built: bool,
}

/// Runs the benchmark `name`.
pub fn run(name: &str, rest: &[&str]) -> Result<()> {
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
        "ledger" => ledger::run(&options, &mut report)?,
        "peers" => peers::run(&options, &mut report)?,
        "refusal" => refusal::run(&options, &mut report)?,
        "tenants" => tenants::run(&options, &mut report)?,
        _ => bail!(
            "no such benchmark: {name} (there: gateway, refusal, engine, ledger, peers, tenants, fairness, drills)"
        ),
    }
    report.end()?;
    print!("{report}");
    report.write(&options.output)?;
    eprintln!("wrote {}", options.output.display());
    Ok(())
}

impl Options {
    /// `--rounds N`, `--seconds N`, `--output FILE`, `--as-built`, in any order.
    fn read(name: &str, rest: &[&str]) -> Result<Self> {
        let mut options = Self {
            rounds: 5,
            seconds: 3,
            output: root().join(format!("docs/benchmarks/{name}.json")),
            as_built: false,
        };
        let mut words = rest.iter();
        while let Some(flag) = words.next() {
            let mut value = || words.next().with_context(|| format!("{flag} wants a value"));
            match *flag {
                "--rounds" => options.rounds = value()?.parse().context("--rounds")?,
                "--seconds" => options.seconds = value()?.parse().context("--seconds")?,
                "--output" => options.output = PathBuf::from(value()?),
                "--as-built" => options.as_built = true,
                _ => bail!("no such option: {flag} ({OPTIONS})"),
            }
        }
        if !(1..=100).contains(&options.rounds) || !(1..=60).contains(&options.seconds) {
            bail!("1 to 100 rounds of 1 to 60 seconds");
        }
        Ok(options)
    }
}

const OPTIONS: &str = "there: --rounds, --seconds, --output, --as-built";

/// Builds with the release profile and gives the folder of what was built.
fn build(options: &Options, what: &[&str]) -> Result<PathBuf> {
    if !options.as_built {
        check(cargo().args(["build", "--release", "--locked"]).args(what))?;
    }
    Ok(root().join("target/release"))
}

/// The folder of the shape that is measured, made when it is not there.
fn model_folder(measure: &std::path::Path) -> Result<PathBuf> {
    let folder = root().join("target/random-models/qwen2.5-0.5b-bf16");
    if !folder.join("model.safetensors").exists() {
        // Under another name first: a torn folder must not be measured.
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
