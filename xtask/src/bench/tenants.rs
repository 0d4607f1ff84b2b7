//! Many tenants beside few: the cost of a start, the memory of a key, and the time of
//! an authentication and of a whole request.

#![expect(clippy::disallowed_methods, reason = "a benchmark measures time")]

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::h2load::{UNBOUNDED, listener_config};
use super::process::Process;
use super::report::Report;
use super::{INSTANT_DEVICE, Options, build};
use crate::run::{check, command, target};

/// The installations under comparison: a name, tenants, keys.
const SIZES: [(&str, u64, u64); 2] = [("few", 100, 1_000), ("a million keys", 100_000, 1_000_000)];

/// The authentications of one turn.
const CALLS: u64 = 200_000;

/// The requests of one turn.
const CHATS: u64 = 2_000;

/// The number of keys that send requests, the same in both installations.
const SENDERS: u64 = 1_000;

/// The largest promised ratio of a whole request's median.
const MOST_OF_A_REQUEST: f64 = 1.1;

#[allow(clippy::too_many_lines, reason = "one scenario, told in its order")]
pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let built = build(options, &["-p", "tollgate-gateway", "--example", "many_tenants"])?;
    build(options, &["-p", "tollgate-loadtest", "--example", "many_keys"])?;
    build(options, &["-p", "tollgate"])?;
    let many_keys = built.join("examples/many_keys").display().to_string();
    let many_tenants = built.join("examples/many_tenants").display().to_string();
    let folder = target().join("bench/tenants");
    if folder.exists() {
        fs::remove_dir_all(&folder)?;
    }
    report.fact("calls_a_round", CALLS);
    report.fact("requests_a_round", CHATS);
    let mut gateways = Vec::new();
    for (name, tenants, keys) in SIZES {
        let place = folder.join(name);
        let began = Instant::now();
        let (tenants, keys) = (tenants.to_string(), keys.to_string());
        check(command(&many_tenants).arg("make").arg(&place).args([&tenants, &keys]))?;
        report.fact(&format!("{name}: making them, s"), began.elapsed().as_secs_f64());
        let mut config = OpenOptions::new().append(true).open(place.join("tollgate.toml"))?;
        config.write_all((listener_config(UNBOUNDED, UNBOUNDED) + INSTANT_DEVICE).as_bytes())?;
        let (gateway, url) = start(&built.join("tollgate"), name, &place, report)?;
        let mut ask = command(&many_keys);
        ask.arg(url).arg(place.join("tls/ca.pem")).arg(place.join("sample")).arg("tollgate-demo");
        let asks = Process::start("many_keys", &mut ask)?;
        asks.ready()?;
        // The creation of a million keys wrote a million records, which the gateway
        // puts into the audit log first.
        let seconds = settled(&gateway)?;
        report.fact(&format!("{name}: until their records are in the log, s"), seconds);
        gateways.push((name, asks, gateway));
    }
    let mut measured = Vec::new();
    for (name, tenants, keys) in SIZES {
        let mut start = command(&many_tenants);
        let process = Process::start(name, start.arg("measure").arg(folder.join(name)))?;
        let ready: Value =
            serde_json::from_str(&process.ready()?).context("the program's ready line")?;
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
            let reply = process.ask(&format!("authenticate {CALLS}"))?;
            let nanos = |key: &str| reply[key].as_f64().with_context(|| format!("no {key}"));
            report.add(&format!("who calls, {name}: median"), "ns", nanos("p50_ns")?);
            report.add(&format!("who calls, {name}: 99 of 100"), "ns", nanos("p99_ns")?);
            let reply = process.ask("change")?;
            let seconds = reply["seconds"].as_f64().context("no seconds")?;
            report.add(&format!("a new key is known, {name}"), "ms", seconds * 1e3);
        }
        for (name, asks, _) in &mut gateways {
            let reply = asks.ask(&format!("chat {CHATS} {SENDERS}"))?;
            let micros = |key: &str| reply[key].as_f64().map(|it| it / 1e3).context("no figure");
            report.add(&format!("a request, {name}: median"), "us", micros("p50_ns")?);
            report.add(&format!("a request, {name}: 99 of 100"), "us", micros("p99_ns")?);
        }
    }
    let [(few, ..), (many, ..)] = SIZES;
    // A million keys do not fit a processor's cache, so a slower authentication is
    // expected and has no bound.
    for (what, part, most) in [
        ("who calls", "median", None),
        ("who calls", "99 of 100", None),
        ("a request", "median", Some(MOST_OF_A_REQUEST)),
        ("a request", "99 of 100", None),
    ] {
        let (of, to) = (format!("{what}, {many}: {part}"), format!("{what}, {few}: {part}"));
        let ratio = report.ratio(&format!("{what}, a million over few: {part}"), &of, &to)?;
        if let Some(most) = most.filter(|most| ratio > *most) {
            eprintln!("{what}, {part}: {ratio:.2} times, more than the promised {most}");
        }
    }
    Ok(())
}

/// Starts `tollgate up` on an installation and reports the time to ready and the
/// memory. Returns the process and its URL.
fn start(
    tollgate: &Path,
    name: &str,
    place: &Path,
    report: &mut Report,
) -> Result<(Process, String)> {
    let mut up = command(&tollgate.to_string_lossy());
    up.args(["up", "--config"]).arg(place.join("tollgate.toml")).arg("--data").arg(place);
    // The first start calibrates the device; the second start is the one that is
    // reported.
    drop(ready(&mut up)?);
    let began = Instant::now();
    let (process, url) = ready(&mut up)?;
    report.fact(&format!("{name}: tollgate up until ready, s"), began.elapsed().as_secs_f64());
    report.fact(&format!("{name}: tollgate up, MiB resident"), process.resident_mib()?);
    Ok((process, url))
}

/// Waits until an idle gateway uses almost no processor time and returns the seconds.
fn settled(gateway: &Process) -> Result<f64> {
    let began = Instant::now();
    loop {
        let before = gateway.processor_seconds()?;
        std::thread::sleep(Duration::from_secs(1));
        if gateway.processor_seconds()? - before < 0.05 {
            return Ok((began.elapsed().as_secs_f64() - 1.0).max(0.0));
        }
        if began.elapsed() > LONGEST_SETTLING {
            bail!("the idle gateway still uses the processor after 600 s");
        }
    }
}

const LONGEST_SETTLING: Duration = Duration::from_secs(600);

fn ready(up: &mut std::process::Command) -> Result<(Process, String)> {
    let process = Process::start("tollgate", up)?;
    let ready = process.ready()?;
    let url = ready.split_whitespace().next().context("the ready line has no URL")?.to_owned();
    Ok((process, url))
}
