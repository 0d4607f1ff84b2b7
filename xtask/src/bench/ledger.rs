//! Cost of the ledger: the same short requests served with the ledger and with a null
//! ledger; blocks posted, a given number to a commit; and the statement of a month of
//! ten million entries.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde_json::Value;

use super::h2load::{Load, Protocol, SERVER_CORE, UNBOUNDED, listener_config, pinned};
use super::process::Process;
use super::report::Report;
use super::{INSTANT_DEVICE, Options, build, tools};
use crate::run::{command, output, target};

/// Blocks of one run, four requests each.
const BLOCKS: &str = "20000";
/// Blocks in one commit.
const GROUPS: [&str; 3] = ["16", "128", "1024"];
/// Entries of the month.
const MONTH: &str = "10000000";
/// Starts of each kind in one round.
const STARTS: usize = 3;
/// The promised share of the request rate without a ledger.
const PROMISED: f64 = 0.95;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    tools::h2load()?;
    let built = build(options, &["-p", "tollgate-ledger", "--examples"])?;
    build(options, &["-p", "tollgate", "--features", "bench"])?;
    let folder = target().join("bench/ledger");
    report.fact("blocks_a_turn", BLOCKS);
    report.fact("promised", PROMISED);
    requests(options, report, &built, &fresh(&folder.join("up"))?)?;
    for round in 0..options.rounds {
        eprintln!("round {}", round + 1);
        entries(report, &built, &fresh(&folder.join("speed"))?)?;
    }
    month(report, &built, &fresh(&folder.join("month"))?)
}

/// Measures requests a second of the whole gateway, with the ledger on and off in
/// turn.
fn requests(options: &Options, report: &mut Report, built: &Path, folder: &Path) -> Result<()> {
    fs::write(
        folder.join("bench.toml"),
        listener_config(UNBOUNDED, UNBOUNDED) + INSTANT_DEVICE + CONFIG,
    )?;
    let body = folder.join("chat.json");
    fs::write(&body, CHAT)?;
    report.fact("seconds_a_turn", options.seconds);
    report.fact("at_once", "h1: 32 connections; h2: 4 connections of 8 streams");
    // Two processes of one program differ by a few percent for as long as they live,
    // because their memory is laid out differently. So each turn starts a new one.
    for round in 0..STARTS * options.rounds {
        eprintln!("start {} of {}", round + 1, STARTS * options.rounds);
        let mut turns = LEDGERS;
        // Neither always runs second.
        turns.rotate_left(round % 2);
        for ledger in turns {
            let served = LedgerGateway::start(built, folder, ledger)?;
            for protocol in Protocol::ALL {
                let load = |seconds| Load {
                    url: format!("{}/v1/chat/completions", served.url),
                    protocol,
                    headers: &served.headers,
                    body: Some(&body),
                    status: 200,
                    exceptions: 0,
                    seconds,
                };
                // A first second is not counted: caches and connections warm up.
                load(1).run(&[&served.process])?;
                let (answered, microseconds) = load(options.seconds).run(&[&served.process])?;
                let name = series(ledger, protocol);
                report.add(&name, "requests/s", answered.per_second);
                report.add(&format!("{name}: server"), "us of processor a request", microseconds);
            }
        }
    }
    for protocol in Protocol::ALL {
        let [on, off] = LEDGERS.map(|ledger| series(ledger, protocol));
        let name = format!("ledger on over off, {}", protocol.name());
        let ratio = report.ratio(&format!("{name}: requests/s"), &on, &off)?;
        if ratio < PROMISED {
            eprintln!("{name}: {ratio:.3}, less than the promised {PROMISED}");
        }
        // Processor time is disturbed less by other processes of the machine.
        report.ratio(
            &format!("{name}: requests a processor second"),
            &format!("{off}: server"),
            &format!("{on}: server"),
        )?;
    }
    Ok(())
}

/// The two kinds of run that are compared.
const LEDGERS: [&str; 2] = ["on", "off"];

fn series(ledger: &str, protocol: Protocol) -> String {
    format!("chat, ledger {ledger}, {}", protocol.name())
}

/// A `tollgate up` with a synthetic worker, on one core.
struct LedgerGateway {
    process: Process,
    url: String,
    headers: Vec<String>,
}

impl LedgerGateway {
    fn start(built: &Path, folder: &Path, ledger: &str) -> Result<Self> {
        let (config, data) = (folder.join("bench.toml"), fresh(&folder.join(ledger))?);
        let tollgate = built.join("tollgate").display().to_string();
        let mut create = command(&tollgate);
        create.args(["keys", "create", "--quiet", "--tenant", "acme", "--config"]);
        let key = output(create.arg(&config).arg("--data").arg(&data))?;
        let mut up = pinned(SERVER_CORE, &tollgate);
        up.arg("up").arg("--config").arg(&config).arg("--data").arg(&data);
        if ledger == "off" {
            up.arg("--without-ledger");
        }
        let process = Process::start("tollgate", &mut up)?;
        let ready = process.ready()?;
        let url = ready.split_whitespace().next().context("the ready line has no URL")?.to_owned();
        let headers = vec![
            format!("authorization: Bearer {}", key.trim()),
            "content-type: application/json".to_owned(),
        ];
        Ok(Self { process, url, headers })
    }
}

/// Measures entries a second for each number of blocks to a commit.
fn entries(report: &mut Report, built: &Path, folder: &Path) -> Result<()> {
    let speed = built.join("examples/ledger_speed").display().to_string();
    let told = output(command(&speed).arg(folder).arg(BLOCKS).args(GROUPS))?;
    for line in told.lines() {
        let told: Value = serde_json::from_str(line).context("the program's output line")?;
        let figure = |key: &str| told[key].as_f64().with_context(|| format!("no {key}"));
        let text = |key: &str| told[key].as_str().with_context(|| format!("no {key}"));
        let (seconds, name) = (figure("seconds")?, text("name")?);
        let name = format!("{} blocks a commit, {name}", text("group")?);
        report.add(&format!("entries, {name}"), "1/s", figure("entries")? / seconds);
        report.add(&format!("requests, {name}"), "1/s", figure("requests")? / seconds);
        let bytes = figure("bytes")? / figure("requests")?;
        report.add(&format!("a request, {name}"), "bytes", bytes);
    }
    Ok(())
}

/// Measures the statement of a tenant's month, which is filled once.
fn month(report: &mut Report, built: &Path, folder: &Path) -> Result<()> {
    let month = built.join("examples/month").display().to_string();
    let told = output(command(&month).arg(MONTH).arg(folder))?;
    let told: Value = serde_json::from_str(told.trim()).context("the program's output line")?;
    report.fact("month", told);
    Ok(())
}

/// Empties a folder, or makes it.
fn fresh(folder: &Path) -> Result<PathBuf> {
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    fs::create_dir_all(folder)?;
    Ok(folder.to_owned())
}

/// Limits that no run reaches. The device's steps take next to no time, so the
/// request rate shows the cost of the HTTP layer, the journal and the ledger.
const CONFIG: &str = r#"
[plans.open]
requests_per_minute = 10_000_000
concurrent = 256
queued = 1024

[tenants.acme]
plan = "open"
"#;

const CHAT: &str = r#"{"model":"tollgate-demo","messages":[{"role":"user","content":"What is a rate limit?"}],"max_tokens":1}"#;
