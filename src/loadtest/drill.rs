//! `tollgate loadtest --scenario`: runs a drill against a temporary gateway or
//! against a given one, shows the progress, and ends with a verdict. Exit code 0:
//! every expectation held; 1: one was broken; 2: no verdict.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use tokio_util::sync::CancellationToken;
use tollgate_loadtest::client::Target;
use tollgate_loadtest::drill::{GATEWAY, Live, Stage, play};
use tollgate_loadtest::page;
use tollgate_loadtest::scenario::{SHIPPED, Scenario, Shipped};
use tollgate_loadtest::verdict::{DrillReport, Verdict};

use super::LoadtestArguments;
use crate::common::{say, table};
use crate::own_gateway::{OwnGateway, WantedKeys};

/// The exit code without a verdict.
pub const UNCLEAR: u8 = 2;

/// Prints every built-in scenario with its description.
pub fn list() -> Result<()> {
    let rows: Result<Vec<Vec<String>>> = SHIPPED
        .iter()
        .map(|shipped| {
            let scenario = Scenario::find(shipped.name)?;
            let seconds = format!("{} s", scenario.whole().as_secs());
            Ok(vec![shipped.name.to_owned(), seconds, scenario.about])
        })
        .collect();
    say(table(&["scenario", "takes", "shows"], &rows?))
}

/// Prints the TOML of the built-in scenario `name`.
pub fn show(name: &str) -> Result<()> {
    say(Shipped::find(name)?.text)
}

/// Runs the scenario `name`.
pub fn run(name: &str, arguments: &LoadtestArguments) -> Result<ExitCode> {
    let mut scenario = Scenario::find(name)?;
    scenario.seed = arguments.seed.unwrap_or(scenario.seed);
    if let Some(requests) = arguments.requests {
        scenario.set_requests(requests.get()).map_err(anyhow::Error::msg)?;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = match &arguments.url {
        Some(url) => {
            let stage = named_stage(&scenario, arguments, url)?;
            if let Some(host) = &stage.allowed_host {
                eprintln!("warning: the attack goes to {host}, which is not this machine");
            }
            runtime.block_on(watched(&scenario, &stage))?
        }
        None => on_its_own(&runtime, &scenario)?,
    };
    say(report.to_string())?;
    write(&report, arguments)?;
    Ok(match report.verdict {
        Verdict::Holds => ExitCode::SUCCESS,
        Verdict::Broken => ExitCode::FAILURE,
        Verdict::Unclear => ExitCode::from(UNCLEAR),
    })
}

/// Runs the scenario against a temporary gateway.
fn on_its_own(runtime: &tokio::runtime::Runtime, scenario: &Scenario) -> Result<DrillReport> {
    eprintln!("starting a gateway for scenario {}", scenario.name);
    let wanted: Vec<WantedKeys> = scenario
        .tenants()
        .iter()
        .map(|wanted| WantedKeys { tenant: wanted.name.to_owned(), count: wanted.keys, plan: None })
        .collect();
    let gateway = OwnGateway::start(&scenario.own_config(), &wanted)?;
    let workers = gateway.workers().into_iter().enumerate();
    let workers = workers.map(|(number, pid)| (format!("worker {number}"), pid));
    let stage = Stage {
        keys: targets(&gateway.url, &gateway.ca(), &gateway.keys)?,
        // The drill reads metrics only, which need no key.
        admin: Some(Target::new(&gateway.admin_url, &gateway.ca(), "none")?),
        processes: workers.chain([(GATEWAY.to_owned(), gateway.pid())]).collect(),
        log: Some(gateway.log()),
        allowed_host: None,
    };
    let report = runtime.block_on(watched(scenario, &stage))?;
    gateway.end()?;
    Ok(report)
}

/// Returns the stage at the gateway `url`, with the given keys.
fn named_stage(scenario: &Scenario, arguments: &LoadtestArguments, url: &str) -> Result<Stage> {
    let ca = arguments.ca();
    let mut keys = BTreeMap::new();
    for given in &arguments.tenants {
        let (name, file) = super::name_and_file(given)?;
        let text = std::fs::read_to_string(file).with_context(|| format!("key {file}"))?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        keys.insert(name.to_owned(), lines.map(str::to_owned).collect::<Vec<_>>());
    }
    let missing: Vec<&str> = scenario
        .tenants()
        .iter()
        .filter(|wanted| !keys.contains_key(wanted.name))
        .map(|wanted| wanted.name)
        .collect();
    if !missing.is_empty() {
        bail!(
            "scenario {} needs keys of {}; give each as --tenant NAME=KEYFILE with a key \
             a line, or omit --url to use a temporary gateway with these tenants",
            scenario.name,
            missing.join(", ")
        );
    }
    let admin = arguments.admin_url.as_deref();
    Ok(Stage {
        keys: targets(url, &ca, &keys)?,
        admin: admin.map(|admin| Target::new(admin, &ca, "none")).transpose()?,
        processes: Vec::new(),
        log: None,
        allowed_host: arguments.allow_remote.clone(),
    })
}

fn targets(
    url: &str,
    ca: &Path,
    keys: &BTreeMap<String, Vec<String>>,
) -> Result<BTreeMap<String, Vec<Target>>> {
    let mut targets = BTreeMap::new();
    for (tenant, keys) in keys {
        let Some(first) = keys.first() else { bail!("tenant {tenant} has no key") };
        let target = Target::new(url, ca, first)?;
        let all: Result<Vec<Target>, _> = keys.iter().map(|key| target.with_key(key)).collect();
        targets.insert(tenant.clone(), all?);
    }
    Ok(targets)
}

/// Runs the drill with a progress line. Ctrl-C ends it without a verdict.
async fn watched(scenario: &Scenario, stage: &Stage) -> Result<DrillReport> {
    let (live, stop) = (Arc::new(Live::default()), CancellationToken::new());
    let playing = play(scenario, stage, Arc::clone(&live), stop.clone());
    tokio::pin!(playing);
    let bar = ProgressBar::new(scenario.whole().as_secs());
    let style = "{elapsed_precise} {msg}";
    bar.set_style(ProgressStyle::with_template(style).context("the progress line")?);
    let mut tick = tokio::time::interval(Duration::from_millis(250));
    loop {
        tokio::select! {
            drill = &mut playing => {
                bar.finish_and_clear();
                return Ok(DrillReport::new(scenario, &drill?));
            }
            _ = tokio::signal::ctrl_c() => stop.cancel(),
            _ = tick.tick() => bar.set_message(line(&live)),
        }
    }
}

fn line(live: &Live) -> String {
    let (phase, since, span) = live.phase();
    let [due, answered, first, sent, taken, memory, descriptors] = [
        &live.honest_due,
        &live.honest_answered,
        &live.last_first_token,
        &live.attacks,
        &live.attacks_answered,
        &live.memory,
        &live.descriptors,
    ]
    .map(|counter| counter.load(Ordering::Relaxed));
    let time = match span.as_secs() {
        0 => String::new(),
        whole => format!(" {}/{whole} s", since.as_secs()),
    };
    let first = first as f64 / 1e3;
    format!(
        "{phase}{time} | honest {answered} of {due}, first token {first:.0} ms | attackers {sent} \
         sent, {taken} answered | gateway {} MiB, {descriptors} descriptors",
        memory >> 20
    )
}

/// Writes the page and the JSON file that were asked for.
fn write(report: &DrillReport, arguments: &LoadtestArguments) -> Result<()> {
    let mut files: Vec<(PathBuf, String)> = Vec::new();
    let json = || serde_json::to_string_pretty(report).context("the report as JSON");
    if let Some(path) = &arguments.report {
        files.push((path.clone(), page::html(report)));
        files.push((path.with_extension("json"), json()?));
    }
    if let Some(path) = &arguments.json {
        files.push((path.clone(), json()?));
    }
    for (path, text) in files {
        std::fs::write(&path, text)
            .with_context(|| format!("could not write {}", path.display()))?;
        eprintln!("wrote {}", path.display());
    }
    Ok(())
}
