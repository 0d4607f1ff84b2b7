//! Fair shares of a device under attack, in virtual time like the test suite, and on a
//! real clock, from a client over TLS through the gateway to a worker with a synthetic
//! engine. Both modes fill one table.
//!
//! The seconds of a figure are the cost model's: at a speed of five, five of them pass
//! in one real second.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::report::Report;
use super::{Options, build};
use crate::run::{command, root, target};

mod play;
mod table;
mod wall;

use table::FairnessTable;

/// The options of a run.
struct FairnessOptions {
    /// True if no play runs on a real clock.
    only_virtual: bool,
    /// The approximate time of all plays on a real clock together, or the longest time of a
    /// search, in minutes.
    minutes: f64,
    /// The number of plays of each attack on a real clock.
    seeds: u64,
    /// The factor by which the synthetic device is faster than the cost model.
    speed: f64,
    output: PathBuf,
    as_built: bool,
    /// The number of random attacks to search, and the seed. Then nothing else runs.
    search: Option<u32>,
    seed: u32,
}

/// Runs all plays, prints the table, and writes the table as JSON and as text.
///
/// # Errors
///
/// A play failed, or a figure is out of its bound.
pub(super) fn run(rest: &[&str]) -> Result<()> {
    let options = FairnessOptions::read(rest)?;
    if let Some(count) = options.search {
        return search(&options, count);
    }
    let mut report = Report::begin("fairness")?;
    report.fact("device", "synthetic: computes nothing, takes the time of a cost model");
    let mut table = FairnessTable::default();
    in_virtual_time(&options, &mut table)?;
    if options.only_virtual {
        report.fact("real_clock", "not played");
    } else {
        wall::run(&options, &mut report, &mut table)?;
    }
    report.fact("rows", serde_json::to_value(&table)?);
    report.end()?;
    println!("{}\n{table}", report.head());
    report.write(&options.output)?;
    let text = options.output.with_extension("md");
    std::fs::write(&text, table.page(&report)?).with_context(|| text.display().to_string())?;
    eprintln!("wrote {} and {}", options.output.display(), text.display());
    if !table.holds() {
        bail!("a figure is out of its bound");
    }
    Ok(())
}

/// Runs the plays of `cargo test -p tollgate-engine --test fairness` and adds their
/// figures to the table.
fn in_virtual_time(options: &FairnessOptions, table: &mut FairnessTable) -> Result<()> {
    let what = ["-p", "tollgate-engine", "--example", "fairness"];
    let built = build(&options.build_options(), &what)?;
    let figures = target().join("bench/fairness-virtual.json");
    std::fs::create_dir_all(figures.parent().expect("the path has a parent"))?;
    let mut play = command(&built.join("examples/fairness").to_string_lossy());
    // A row out of its bound gives a non-zero status; the table shows the row, so the
    // status is no error.
    let status = play.arg("--json").arg(&figures).status()?;
    let text = std::fs::read_to_string(&figures).with_context(|| format!("fairness: {status}"))?;
    let rows: Vec<Value> = serde_json::from_str(&text)?;
    rows.iter().try_for_each(|row| table.add_virtual(row))
}

/// Runs random attacks in virtual time and prints the ten that delay others most.
fn search(options: &FairnessOptions, count: u32) -> Result<()> {
    let what = ["-p", "tollgate-engine", "--example", "fairness"];
    let built = build(&options.build_options(), &what)?;
    let mut play = command(&built.join("examples/fairness").to_string_lossy());
    let minutes = options.minutes.ceil() as u32;
    let numbers = [count, options.seed, minutes].map(|number| number.to_string());
    let status = play.arg("--search").args(numbers).status()?;
    if !status.success() {
        bail!("the search failed: {status}");
    }
    Ok(())
}

impl FairnessOptions {
    /// Parses `--virtual`, `--minutes N`, `--seeds N`, `--speed N`, `--output FILE`,
    /// `--as-built`, `--search N` and `--seed N`, in any order.
    fn read(rest: &[&str]) -> Result<Self> {
        let mut options = Self {
            only_virtual: false,
            minutes: 20.0,
            seeds: 1,
            speed: 5.0,
            output: PathBuf::new(),
            as_built: false,
            search: None,
            seed: 1,
        };
        let mut output = None;
        let mut words = rest.iter();
        while let Some(flag) = words.next() {
            let mut value = || words.next().with_context(|| format!("{flag} needs a value"));
            match *flag {
                "--virtual" => options.only_virtual = true,
                "--minutes" => options.minutes = value()?.parse().context("--minutes")?,
                "--seeds" => options.seeds = value()?.parse().context("--seeds")?,
                "--speed" => options.speed = value()?.parse().context("--speed")?,
                "--output" => output = Some(PathBuf::from(value()?)),
                "--as-built" => options.as_built = true,
                "--search" => options.search = Some(value()?.parse().context("--search")?),
                "--seed" => options.seed = value()?.parse().context("--seed")?,
                _ => bail!("no such option: {flag} ({OPTIONS})"),
            }
        }
        // The committed table has the figures of both clocks, and half a run must not replace it.
        options.output = output.unwrap_or_else(|| match options.only_virtual {
            true => target().join("bench/fairness.json"),
            false => root().join("docs/benchmarks/fairness.json"),
        });
        let within = (0.5..=600.0).contains(&options.minutes)
            && (1..=10).contains(&options.seeds)
            && (0.1..=100.0).contains(&options.speed);
        if !within {
            bail!("--minutes must be 0.5 to 600, --seeds 1 to 10, --speed 0.1 to 100");
        }
        Ok(options)
    }

    fn build_options(&self) -> Options {
        Options { rounds: 1, seconds: 1, output: self.output.clone(), as_built: self.as_built }
    }
}

const OPTIONS: &str =
    "options: --virtual, --minutes, --seeds, --speed, --output, --as-built, --search, --seed";
