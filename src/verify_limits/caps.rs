//! The probe of caps that would take hours to spend. Another temporary gateway starts with a
//! ledger in which almost all of each cap is spent, so that a few requests reach its end.

use std::path::Path;

use anyhow::{Context, Result};
use tokio::runtime::Runtime;
use tollgate_config::Config;
use tollgate_domain::block::LONGEST_ATTEMPT;
use tollgate_domain::{
    Attempt, Block, BlockParts, Caller, Device, DeviceClass, DeviceNanos, FinishReason,
    FinishedAttempt, KeyId, ModelName, PlanName, RequestId, SequenceId, Share, Stages, TenantId,
    Tier, Usage, WorkerEpoch, WorkerName,
};
use tollgate_ledger::Ledger;
use tollgate_loadtest::client::Target;

use super::caller::ask;
use super::place::{bound_by, isolated, model, plans};
use super::plans::time;
use super::{Canary, Finding, ProbeResult};
use crate::common::now;
use crate::own_gateway::{OwnGateway, WantedKeys};

/// The device of the probes, and the cost of one of their requests.
#[derive(Clone, Debug)]
pub(super) struct Measured {
    pub(super) class: DeviceClass,
    /// Reference cost of [`question`].
    pub(super) cost: DeviceNanos,
}

/// A cap that is nearly spent at the start.
struct Cap {
    plan: PlanName,
    limit: &'static str,
    /// The words by which a refusal names the cap.
    said: &'static str,
    most: DeviceNanos,
    /// The amount that is left at the start.
    left: DeviceNanos,
    /// The place of the row that the probe replaces.
    row: usize,
}

/// Returns the request that spends device time, for `canary`.
pub(super) fn question(canary: &Canary) -> String {
    canary.chat("Count from 1 to 400.", 100).to_string()
}

/// Probes the caps among `rows` that were not probed because they take too long, and
/// replaces their rows. `shown` is the config as TOML.
pub(super) fn probe(
    runtime: &Runtime,
    (config, shown): (&Config, &str),
    measured: &Measured,
    rows: &mut [ProbeResult],
) -> Result<()> {
    let caps = skipped(config, measured, rows);
    if caps.is_empty() {
        return Ok(());
    }
    eprintln!("probing caps that are nearly spent, on another gateway");
    let model = model(config)?;
    let (text, wanted) = derived(shown, &caps)?;
    // Before the start, because admission reads only once what was spent.
    let prepare = |data: &Path| spend(runtime, data, spent(measured, &model, &caps)?);
    let gateway = OwnGateway::start_prepared(&text, &wanted, prepare)?;
    let mut found = Vec::new();
    for (number, cap) in caps.iter().enumerate() {
        let secrets = gateway.keys.get(&tenant(number)).context("each cap has a tenant")?;
        let target = Target::new(&gateway.url, &gateway.ca(), &secrets[0])?;
        let canary = Canary { target, model: model.clone() };
        found.push(runtime.block_on(reach(&canary, cap, measured)));
    }
    gateway.end()?;
    for (cap, found) in caps.iter().zip(found) {
        let (finding, observed) = found?;
        rows[cap.row] = rows[cap.row].clone().saw(finding, observed);
    }
    Ok(())
}

fn skipped(config: &Config, measured: &Measured, rows: &[ProbeResult]) -> Vec<Cap> {
    let mut caps = Vec::new();
    for plan in config.plans() {
        let limits = &plan.limits;
        for (limit, said, by_class) in [
            ("device_time_per_day", "a day", &limits.device_time_per_day),
            ("device_time_per_month", "a month", &limits.device_time_per_month),
        ] {
            let name = format!("plans.{}.{limit}", plan.name);
            let row =
                rows.iter().position(|row| row.limit == name && row.finding == Finding::NotProbed);
            // With less than a few requests, nothing could be spent before.
            let left = DeviceNanos(measured.cost.nanos().saturating_mul(REQUESTS_LEFT));
            if let (Some(row), Some(most)) = (row, by_class.limit(&measured.class))
                && left.nanos() > 0
                && left < most
            {
                caps.push(Cap { plan: plan.name.clone(), limit, said, most, left, row });
            }
        }
    }
    caps
}

/// Sends requests until the cap refuses one.
async fn reach(canary: &Canary, cap: &Cap, measured: &Measured) -> Result<(Finding, String)> {
    let connection = canary.connect().await?;
    let body = question(canary);
    let mut spent = DeviceNanos::ZERO;
    for _ in 0..MOST_REQUESTS {
        let told = ask(&connection, "/v1/chat/completions", body.clone()).await?;
        if told.names(cap.said) {
            // The last request is cut where the cap ends, or refused if less is left than
            // its first token costs.
            let rest = cap.left.nanos().saturating_sub(spent.nanos());
            let holds = spent <= cap.left && rest <= 2 * measured.cost.nanos();
            let before = time(cap.most.nanos() - cap.left.nanos());
            let seen = format!("{before} spent before, {} now, then refused", time(spent.nanos()));
            return Ok((Finding::of(holds), seen));
        }
        if !told.is_ok() {
            return Ok((Finding::NotProbed, told.masks()));
        }
        spent += DeviceNanos(told.reference);
    }
    Ok((Finding::Broken, format!("{} beyond {}", time(spent.nanos()), time(cap.left.nanos()))))
}

/// Makes a ledger with `block` in the folder `data`.
fn spend(runtime: &Runtime, data: &Path, block: Block) -> Result<()> {
    let ledger = Ledger::open(&data.join("ledger.db")).context("cannot make a ledger")?;
    runtime.block_on(ledger.submit(block)).context("cannot post the spent device time")?;
    Ok(())
}

/// Returns a block with ended requests that have spent each cap but for `left`.
fn spent(measured: &Measured, model: &str, caps: &[Cap]) -> Result<Block> {
    let (mut shares, mut finished) = (Vec::new(), Vec::new());
    for (number, cap) in caps.iter().enumerate() {
        let caller = Caller { tenant: TenantId::new(&tenant(number))?, key: KeyId::new("canary")? };
        // Caps count the reference cost, by the day on which a request ends.
        let mut rest = cap.most.nanos() - cap.left.nanos();
        while rest > 0 {
            // A block with a longer attempt is refused, so a large cap takes several.
            let reference = rest.min(LONGEST_ATTEMPT.nanos());
            rest -= reference;
            let sequence = SequenceId(shares.len() as u64);
            let request = RequestId::from_random(shares.len() as u128);
            let (caller, attempt) = (caller.clone(), Attempt { request, attempt: 0 });
            // Caps ignore attributed time. One nanosecond each keeps the wall time of the block
            // small.
            let attributed = DeviceNanos(1);
            shares.push(Share {
                sequence,
                caller: caller.clone(),
                attempt: attempt.clone(),
                attributed,
                tier: Tier::Interactive,
            });
            finished.push(FinishedAttempt {
                caller,
                attempt,
                usage: Usage {
                    prompt_tokens: 1,
                    cached_tokens: 0,
                    completion_tokens: 1,
                    attributed,
                    reference: DeviceNanos(reference),
                },
                stages: Stages::default(),
                reason: FinishReason::Stop,
                finished: now(),
                tier: Tier::Interactive,
            });
        }
    }
    let wall = DeviceNanos(shares.len() as u64);
    let parts = BlockParts {
        epoch: WorkerEpoch(1),
        number: 1,
        worker: WorkerName::new("spent-before")?,
        device: Device {
            class: measured.class.clone(),
            name: "spent before".to_owned(),
            uuid: String::new(),
        },
        model: ModelName::new(model)?,
        calibration: "none".to_owned(),
        first_step: 1,
        last_step: 1,
        started: now(),
        wall,
        overhead: DeviceNanos::ZERO,
        idle: DeviceNanos::ZERO,
        loss: DeviceNanos::ZERO,
        shares,
        finished,
        last_of_epoch: true,
        energy: None,
    };
    Block::try_from(parts).context("the block of the spent time")
}

/// Returns a config with each cap in a plan of its own.
fn derived(shown: &str, caps: &[Cap]) -> Result<(String, Vec<WantedKeys>)> {
    let mut tree = isolated(shown)?;
    let configured = plans(&mut tree);
    let (mut alone, mut tenants, mut wanted) = (toml::Table::new(), toml::Table::new(), Vec::new());
    for (number, cap) in caps.iter().enumerate() {
        let own = configured.get(cap.plan.as_str()).and_then(toml::Value::as_table);
        let limit = own.and_then(|own| own.get(cap.limit)).context("a configured cap")?;
        let limits = toml::Table::from_iter([(cap.limit.to_owned(), limit.clone())]);
        let name = tenant(number);
        alone.insert(name.clone(), toml::Value::Table(limits));
        tenants.insert(name.clone(), bound_by(&name));
        wanted.push(WantedKeys { tenant: name, count: 1, plan: None });
    }
    tree.insert("plans".to_owned(), toml::Value::Table(alone));
    tree.insert("tenants".to_owned(), toml::Value::Table(tenants));
    Ok((toml::to_string(&tree)?, wanted))
}

fn tenant(number: usize) -> String {
    format!("cap-{number}")
}

/// Requests that are left of a cap.
const REQUESTS_LEFT: u64 = 5;
/// Requests after which a cap is broken. More than are left, because another calibration may
/// give lower costs.
const MOST_REQUESTS: u32 = 300;
