//! Many tenants beside few: what starting costs, what a key takes in memory,
//! and whether finding out who calls stays as quick.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::Value;

use super::process::Process;
use super::report::Report;
use super::{Options, build};
use crate::run::{check, command, root};

/// What is compared: a name, tenants, keys.
const SIZES: [(&str, u64, u64); 2] = [("few", 100, 1_000), ("a million keys", 100_000, 1_000_000)];

/// Authentications of one turn.
const CALLS: u64 = 200_000;

/// No more is promised: a million keys do not fit a processor's cache.
const MOST_RATIO: f64 = 3.0;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate-gateway", "--example", "many_tenants"])?;
    build(options, &["-p", "tollgate"])?;
    let many_tenants = built.join("examples/many_tenants").display().to_string();
    let folder = root().join("target/bench/tenants");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    report.fact("calls_a_round", CALLS);
    for (name, tenants, keys) in SIZES {
        let place = folder.join(name);
        let began = Instant::now();
        let (tenants, keys) = (tenants.to_string(), keys.to_string());
        check(command(&many_tenants).arg("make").arg(&place).args([&tenants, &keys]))?;
        report.fact(&format!("{name}: making them, s"), began.elapsed().as_secs_f64());
        start(&built.join("tollgate"), name, &place, report)?;
    }
    let mut measured = Vec::new();
    for (name, tenants, keys) in SIZES {
        let mut start = command(&many_tenants);
        let process = Process::start(name, start.arg("measure").arg(folder.join(name)))?;
        let ready: Value = serde_json::from_str(&process.ready()?).context("its words")?;
        let figure = |key: &str| ready[key].as_f64().with_context(|| format!("no {key}"));
        report.fact(&format!("{name}: bytes a key"), figure("keys_bytes")? / keys as f64);
        report.fact(&format!("{name}: bytes a tenant"), figure("config_bytes")? / tenants as f64);
        report.fact(&format!("{name}: reading the keys, s"), figure("keys_seconds")?);
        report.fact(&format!("{name}: reading the config, s"), figure("config_seconds")?);
        measured.push((name, process));
    }
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        for (name, process) in &mut measured {
            let told = process.ask(&format!("authenticate {CALLS}"))?;
            let nanos = |key: &str| told[key].as_f64().with_context(|| format!("no {key}"));
            report.add(&format!("who calls, {name}: median"), "ns", nanos("p50_ns")?);
            report.add(&format!("who calls, {name}: 99 of 100"), "ns", nanos("p99_ns")?);
            let told = process.ask("change")?;
            let seconds = told["seconds"].as_f64().context("no seconds")?;
            report.add(&format!("a new key is known, {name}"), "ms", seconds * 1e3);
        }
    }
    let [(few, ..), (many, ..)] = SIZES;
    for part in ["median", "99 of 100"] {
        let (of, to) = (format!("who calls, {many}: {part}"), format!("who calls, {few}: {part}"));
        let ratio = report.ratio(&format!("who calls, a million over few: {part}"), &of, &to)?;
        if ratio > MOST_RATIO {
            eprintln!("{part}: {ratio:.2} times, more than the {MOST_RATIO} that is promised");
        }
    }
    Ok(())
}

/// The whole of `tollgate up` on what was made: until it is ready, and what it
/// then takes.
fn start(tollgate: &Path, name: &str, place: &Path, report: &mut Report) -> Result<()> {
    let mut up = command(&tollgate.to_string_lossy());
    up.args(["up", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0", "--config"]);
    up.arg(place.join("tollgate.toml")).arg("--data").arg(place);
    // The first start measures the device; the second is what is told.
    drop(ready(&mut up)?);
    let began = Instant::now();
    let process = ready(&mut up)?;
    report.fact(&format!("{name}: tollgate up until ready, s"), began.elapsed().as_secs_f64());
    report.fact(&format!("{name}: tollgate up, MiB resident"), process.resident_mib()?);
    Ok(())
}

fn ready(up: &mut std::process::Command) -> Result<Process> {
    let process = Process::start("tollgate", up)?;
    process.ready()?;
    Ok(process)
}
