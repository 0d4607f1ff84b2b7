//! One play on a real clock: a gateway of its own with a synthetic worker, the tenants'
//! keys, the load, and a reader of the ledger.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::bench::process::Process;
use crate::run::{command, output, target};

/// The load of a tenant. Times and rates are the cost model's.
#[derive(Clone)]
pub(super) struct Sender {
    /// The group. Tenants of one group send the same load and are reported together.
    pub(super) group: &'static str,
    pub(super) tenant: String,
    pub(super) weight: u32,
    pub(super) keys: u32,
    /// The requests a second.
    pub(super) rate: f64,
    pub(super) prompt: u32,
    pub(super) answer: u32,
    pub(super) max_tokens: u32,
    /// True if the play waits for its answers.
    pub(super) awaited: bool,
}

/// A play: senders against a gateway for some time.
pub(super) struct Play<'a> {
    /// The folder of the programs.
    pub(super) built: &'a Path,
    pub(super) policy: &'static str,
    pub(super) senders: Vec<Sender>,
    /// The duration in seconds of the cost model.
    pub(super) duration: f64,
    pub(super) speed: f64,
    pub(super) seed: u64,
}

/// The results of a play. Times are seconds of the cost model.
pub(super) struct PlayResult {
    /// The device time and tokens of each tenant since the start of the load.
    pub(super) series: Vec<LedgerSample>,
    /// The report of the awaited group.
    pub(super) report: Value,
    /// The p99 of the delay with which an idle thread woke during the play.
    pub(super) jitter: f64,
    /// The tokens of the prompts, by group.
    pub(super) prompt_tokens: Value,
    /// The accounts of all device time, to the nanosecond.
    pub(super) account: Value,
}

/// The sums in the ledger at a moment.
pub(super) struct LedgerSample {
    pub(super) at: f64,
    /// The device seconds and tokens so far, by tenant.
    pub(super) tenants: BTreeMap<String, (f64, f64)>,
}

impl Play<'_> {
    /// Runs the play in a fresh folder.
    ///
    /// # Errors
    ///
    /// A program failed or printed an unexpected line.
    pub(super) fn run(&self) -> Result<PlayResult> {
        let folder = target().join("bench/fairness");
        if folder.exists() {
            fs::remove_dir_all(&folder)?;
        }
        for within in ["keys", "data"] {
            fs::create_dir_all(folder.join(within))?;
        }
        fs::write(folder.join("tollgate.toml"), self.config())?;
        let keys = self.make_keys(&folder)?;
        let program = self.built.join("tollgate");
        let mut up = command(&program.to_string_lossy());
        up.arg("up").arg("--config").arg(folder.join("tollgate.toml"));
        let gateway = Process::start("tollgate", up.arg("--data").arg(folder.join("data")))?;
        let url = gateway.ready()?;
        let url = url.split_whitespace().next().context("the ready line has no URL")?.to_owned();
        let played = self.load(&folder, &url, &keys)?;
        drop(gateway);
        // The check runs after the gateway has stopped, when all device time is in the
        // ledger.
        let mut check = command(&self.built.join("examples/watch").to_string_lossy());
        let account = output(check.arg(folder.join("data/ledger.db")).arg("check"))?;
        Ok(PlayResult { account: serde_json::from_str(&account)?, ..played })
    }

    fn load(&self, folder: &Path, url: &str, keys: &Keys) -> Result<PlayResult> {
        let plan = folder.join("load.json");
        fs::write(&plan, self.plan(folder, url, keys).to_string())?;
        let mut mixed = command(&self.built.join("examples/mixed").to_string_lossy());
        let mixed = Process::start("the load", mixed.arg(&plan))?;
        if mixed.line()? != "begin" {
            bail!("the load generator did not print `begin`");
        }
        let mut watch = command(&self.built.join("examples/watch").to_string_lossy());
        let watch = watch.arg(folder.join("data/ledger.db")).arg(WATCH_MS);
        let mut watch = Process::start("the watch", watch)?;
        let reply: Value = serde_json::from_str(&mixed.line()?)?;
        let series = self.series(&watch.end())?;
        let jitter = reply["jitter_ms"]["p99"].as_f64().context("no jitter")?;
        let awaited = self.senders.iter().find(|sender| sender.awaited);
        let group = awaited.map_or("", |sender| sender.group);
        Ok(PlayResult {
            series,
            report: reply["groups"][group].clone(),
            jitter: jitter / 1e3 * self.speed,
            prompt_tokens: reply["prompt_tokens"].clone(),
            account: Value::Null,
        })
    }

    /// Parses the lines of the ledger's reader; sums count from the first line.
    fn series(&self, lines: &[String]) -> Result<Vec<LedgerSample>> {
        let mut series: Vec<LedgerSample> = Vec::new();
        let mut before = BTreeMap::new();
        for line in lines {
            let reply: Value = serde_json::from_str(line)?;
            let mut tenants = BTreeMap::new();
            for Sender { tenant, .. } in &self.senders {
                let of = &reply["tenants"][tenant];
                let seconds = of["ns"].as_f64().unwrap_or(0.0) / 1e9 * self.speed;
                let tokens = of["tokens"].as_f64().unwrap_or(0.0);
                tenants.insert(tenant.clone(), (seconds, tokens));
            }
            if series.is_empty() {
                before = tenants.clone();
            }
            for (tenant, so_far) in &mut tenants {
                let (seconds, tokens) = before[tenant];
                *so_far = (so_far.0 - seconds, so_far.1 - tokens);
            }
            let at = reply["at_s"].as_f64().context("no time")? * self.speed;
            series.push(LedgerSample { at, tenants });
        }
        Ok(series)
    }

    fn config(&self) -> String {
        let mut config =
            CONFIG.replace("SPEED", &format!("{:?}", self.speed)).replace("POLICY", self.policy);
        for Sender { tenant, weight, .. } in &self.senders {
            config += &format!(
                "[plans.{tenant}]\nweight = {weight}\n[tenants.{tenant}]\nplan = \"{tenant}\"\n"
            );
        }
        config
    }

    fn make_keys(&self, folder: &Path) -> Result<Keys> {
        let mut keys = Keys::new();
        for Sender { tenant, keys: count, .. } in &self.senders {
            for number in 0..*count {
                let mut create = command(&self.built.join("tollgate").to_string_lossy());
                create.args(["keys", "create", "--quiet", "--tenant", tenant, "--config"]);
                create.arg(folder.join("tollgate.toml")).arg("--data").arg(folder.join("data"));
                let path = folder.join(format!("keys/{tenant}.{number}"));
                fs::write(&path, output(&mut create)?)?;
                keys.entry(tenant.clone()).or_default().push(path);
            }
        }
        Ok(keys)
    }

    fn plan(&self, folder: &Path, url: &str, keys: &Keys) -> Value {
        let mut groups: BTreeMap<&str, Vec<&Sender>> = BTreeMap::new();
        for sender in &self.senders {
            groups.entry(sender.group).or_default().push(sender);
        }
        let seconds = self.duration / self.speed;
        let groups: Vec<Value> = groups
            .into_iter()
            .map(|(name, senders)| {
                let first = senders[0];
                let keys: Vec<&PathBuf> =
                    senders.iter().flat_map(|sender| &keys[&sender.tenant]).collect();
                let rate: f64 = senders.iter().map(|sender| sender.rate).sum();
                json!({
                    "name": name,
                    "keys": keys,
                    "rate": rate * self.speed,
                    "prompt_tokens": first.prompt,
                    "answer": first.answer,
                    "max_tokens": first.max_tokens,
                    // The number for each key.
                    "connections": if first.keys > 1 { 1 } else { 2 },
                    "awaited": first.awaited,
                })
            })
            .collect();
        json!({
            "url": url,
            "ca": folder.join("data/tls/ca.pem"),
            "model": "tollgate-demo",
            "seconds": seconds,
            "seed": self.seed,
            "timeout_seconds": ANSWER_TIMEOUT / self.speed,
            "groups": groups,
        })
    }
}

type Keys = BTreeMap<String, Vec<PathBuf>>;

/// The milliseconds between two readings of the ledger.
const WATCH_MS: &str = "250";

/// The longest wait for an awaited answer, in seconds of the cost model.
pub(super) const ANSWER_TIMEOUT: f64 = 300.0;

/// A config in which only the device limits the load, and a flood may wait in the
/// queue.
const CONFIG: &str = r#"
[gateway.connections]
per_source = 4096
new_per_second = 10_000
new_burst = 10_000

[gateway.sources]
requests_per_second = 1_000_000
request_burst = 1_000_000

[gateway.http2]
streams = 10_000

[gateway.deadlines]
queue = "20m"
request = "20m"

[worker]
engine = "synthetic"
queue_capacity = 65_536

[worker.synthetic]
speed = SPEED
policy = "POLICY"

"#;
