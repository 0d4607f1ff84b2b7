//! One play on a real clock: a gateway of its own with a synthetic worker, its
//! tenants' keys, the load, and the ledger beside it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::bench::process::Process;
use crate::run::{command, output, root};

/// What a tenant sends. Times and rates are the model's.
#[derive(Clone)]
pub(super) struct Sender {
    /// Tenants of one group send alike and are reported together.
    pub(super) group: &'static str,
    pub(super) tenant: String,
    pub(super) weight: u32,
    pub(super) keys: u32,
    /// Requests a second.
    pub(super) rate: f64,
    pub(super) prompt: u32,
    pub(super) answer: u32,
    pub(super) max_tokens: u32,
    /// Whether its answers are waited for.
    pub(super) awaited: bool,
}

/// A play.
pub(super) struct Play<'a> {
    /// Where the programs lie.
    pub(super) built: &'a Path,
    pub(super) policy: &'static str,
    pub(super) senders: Vec<Sender>,
    /// Seconds of the model.
    pub(super) lasts: f64,
    pub(super) speed: f64,
    pub(super) seed: u64,
}

/// What came of it. Times are the model's, seconds.
pub(super) struct Played {
    /// Each tenant's device time and tokens, from when the load began.
    pub(super) series: Vec<Moment>,
    /// The awaited group's report.
    pub(super) report: Value,
    /// The p99 by which an idle thread woke late meanwhile.
    pub(super) jitter: f64,
    /// What prompts came to, by group.
    pub(super) prompt_tokens: Value,
    /// Where all device time went, to the nanosecond.
    pub(super) account: Value,
}

/// What stood in the ledger at a moment.
pub(super) struct Moment {
    pub(super) at: f64,
    /// Device seconds and tokens so far.
    pub(super) tenants: BTreeMap<String, (f64, f64)>,
}

impl Play<'_> {
    /// Plays it.
    pub(super) fn run(&self) -> Result<Played> {
        let folder = root().join("target/bench/fairness");
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
        let url = url.split_whitespace().next().context("no URL behind ready")?.to_owned();
        let played = self.load(&folder, &url, &keys)?;
        drop(gateway);
        let mut check = command(&self.built.join("examples/watch").to_string_lossy());
        let account = output(check.arg(folder.join("data/ledger.db")).arg("check"))?;
        Ok(Played { account: serde_json::from_str(&account)?, ..played })
    }

    fn load(&self, folder: &Path, url: &str, keys: &Keys) -> Result<Played> {
        let plan = folder.join("load.json");
        fs::write(&plan, self.plan(folder, url, keys).to_string())?;
        let mut mixed = command(&self.built.join("examples/mixed").to_string_lossy());
        let mixed = Process::start("the load", mixed.arg(&plan))?;
        if mixed.line()? != "begin" {
            bail!("the load did not begin");
        }
        let mut watch = command(&self.built.join("examples/watch").to_string_lossy());
        let watch = watch.arg(folder.join("data/ledger.db")).arg(WATCH_MS);
        let mut watch = Process::start("the watch", watch)?;
        let told: Value = serde_json::from_str(&mixed.line()?)?;
        let series = self.series(&watch.end())?;
        let jitter = told["jitter_ms"]["p99"].as_f64().context("no jitter")?;
        let awaited = self.senders.iter().find(|sender| sender.awaited);
        let group = awaited.map_or("", |sender| sender.group);
        Ok(Played {
            series,
            report: told["groups"][group].clone(),
            jitter: jitter / 1e3 * self.speed,
            prompt_tokens: told["prompt_tokens"].clone(),
            account: Value::Null,
        })
    }

    /// The watch's lines, counted from its first.
    fn series(&self, lines: &[String]) -> Result<Vec<Moment>> {
        let mut series: Vec<Moment> = Vec::new();
        let mut before = BTreeMap::new();
        for line in lines {
            let told: Value = serde_json::from_str(line)?;
            let mut tenants = BTreeMap::new();
            for Sender { tenant, .. } in &self.senders {
                let of = &told["tenants"][tenant];
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
            let at = told["at_s"].as_f64().context("no time")? * self.speed;
            series.push(Moment { at, tenants });
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
        let seconds = self.lasts / self.speed;
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
                    // Of each key.
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
            "timeout_seconds": PATIENCE / self.speed,
            "groups": groups,
        })
    }
}

type Keys = BTreeMap<String, Vec<PathBuf>>;

/// How often the ledger is looked at.
const WATCH_MS: &str = "250";

/// How long an awaited answer may take, seconds of the model.
pub(super) const PATIENCE: f64 = 300.0;

/// Nothing but the device is to be the limit; a flood may wait.
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
