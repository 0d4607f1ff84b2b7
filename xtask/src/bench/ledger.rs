//! What the audit log costs: the same blocks posted with its records and
//! without, each to a new ledger on this disk, turn by turn.

use std::fs;

use anyhow::{Context, Result};
use serde_json::Value;

use super::report::Report;
use super::{Options, build};
use crate::run::{command, output, root};

/// Blocks of one turn, four requests each.
const BLOCKS: u64 = 20_000;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate-ledger", "--example", "ledger_speed"])?;
    let speed = built.join("examples/ledger_speed").display().to_string();
    let folder = root().join("target/bench/ledger");
    report.fact("blocks_a_round", BLOCKS);
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        let told = output(command(&speed).arg(&folder).arg(BLOCKS.to_string()))?;
        for line in told.lines() {
            let told: Value = serde_json::from_str(line).context("its words")?;
            let figure = |key: &str| told[key].as_f64().with_context(|| format!("no {key}"));
            let name = told["name"].as_str().context("no name")?;
            let (seconds, requests) = (figure("seconds")?, figure("requests")?);
            report.add(&format!("entries, {name}"), "1/s", figure("entries")? / seconds);
            report.add(&format!("requests, {name}"), "1/s", requests / seconds);
            report.add(&format!("a request, {name}"), "bytes", figure("bytes")? / requests);
        }
    }
    for figure in ["requests", "a request"] {
        let name = format!("{figure}: with records over without");
        report.ratio(&name, &format!("{figure}, records"), &format!("{figure}, left_out"))?;
    }
    Ok(())
}
