//! Fair shares of a device under attack: in virtual time, as the test suite
//! plays it, and on a real clock, from a client over TLS through the gateway to
//! a worker whose engine is synthetic. Both fill one table.
//!
//! Seconds of a figure are the model's: at five times its speed, five for each
//! that passes.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::report::Report;
use super::{Options, build};
use crate::run::{command, root};

mod play;
mod table;
mod wall;

use table::Table;

/// How much is played.
struct Wanted {
    /// Nothing on a real clock.
    only_virtual: bool,
    /// What all plays on a real clock may take together, about.
    minutes: f64,
    /// Plays of each attack on a real clock.
    seeds: u64,
    /// How much faster than the model the synthetic device is.
    speed: f64,
    output: PathBuf,
    as_built: bool,
}

/// Plays all, prints the table, and writes it as JSON and as text.
pub(super) fn run(rest: &[&str]) -> Result<()> {
    let wanted = Wanted::read(rest)?;
    let mut report = Report::begin("fairness")?;
    report.fact("device", "synthetic: computes nothing, takes the time of a cost model");
    let mut table = Table::default();
    in_virtual_time(&wanted, &mut table)?;
    if wanted.only_virtual {
        report.fact("real_clock", "not played");
    } else {
        wall::run(&wanted, &mut report, &mut table)?;
    }
    report.fact("rows", serde_json::to_value(&table)?);
    report.end()?;
    println!("{}\n{table}", report.head());
    report.write(&wanted.output)?;
    let text = wanted.output.with_extension("md");
    std::fs::write(&text, table.page(&report)?).with_context(|| text.display().to_string())?;
    eprintln!("wrote {} and {}", wanted.output.display(), text.display());
    if !table.holds() {
        bail!("a figure is out of its bound");
    }
    Ok(())
}

/// The same as `cargo test -p tollgate-engine --test fairness`, for its figures.
fn in_virtual_time(wanted: &Wanted, table: &mut Table) -> Result<()> {
    let what = ["-p", "tollgate-engine", "--example", "fairness"];
    let built = build(&wanted.options(), &what)?;
    let told = root().join("target/bench/fairness-virtual.json");
    std::fs::create_dir_all(told.parent().expect("it has one"))?;
    let mut play = command(&built.join("examples/fairness").to_string_lossy());
    // A row out of its bound is in the table; it ends the program ill.
    let status = play.arg("--json").arg(&told).status()?;
    let text = std::fs::read_to_string(&told).with_context(|| format!("fairness: {status}"))?;
    let rows: Vec<Value> = serde_json::from_str(&text)?;
    rows.iter().try_for_each(|row| table.add_virtual(row))
}

impl Wanted {
    /// `--virtual`, `--minutes N`, `--seeds N`, `--speed N`, `--output FILE`,
    /// `--as-built`, in any order.
    fn read(rest: &[&str]) -> Result<Self> {
        let mut wanted = Self {
            only_virtual: false,
            minutes: 20.0,
            seeds: 1,
            speed: 5.0,
            output: root().join("docs/benchmarks/fairness.json"),
            as_built: false,
        };
        let mut words = rest.iter();
        while let Some(flag) = words.next() {
            let mut value = || words.next().with_context(|| format!("{flag} wants a value"));
            match *flag {
                "--virtual" => wanted.only_virtual = true,
                "--minutes" => wanted.minutes = value()?.parse().context("--minutes")?,
                "--seeds" => wanted.seeds = value()?.parse().context("--seeds")?,
                "--speed" => wanted.speed = value()?.parse().context("--speed")?,
                "--output" => wanted.output = PathBuf::from(value()?),
                "--as-built" => wanted.as_built = true,
                _ => bail!("no such option: {flag} ({OPTIONS})"),
            }
        }
        let within = (0.5..=600.0).contains(&wanted.minutes)
            && (1..=10).contains(&wanted.seeds)
            && (0.1..=100.0).contains(&wanted.speed);
        if !within {
            bail!("0.5 to 600 minutes, 1 to 10 seeds, a speed of 0.1 to 100");
        }
        Ok(wanted)
    }

    fn options(&self) -> Options {
        Options { rounds: 1, seconds: 1, output: self.output.clone(), as_built: self.as_built }
    }
}

const OPTIONS: &str = "there: --virtual, --minutes, --seeds, --speed, --output, --as-built";
