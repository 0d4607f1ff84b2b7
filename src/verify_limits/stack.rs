//! The probe of limits that apply together: a key, its tenant, the tenant's pool and a model,
//! each with a rate of requests of its own, on a second temporary gateway. Each of them must
//! refuse exactly where its own rate is spent, while the others still have requests left.

use anyhow::{Context, Result};
use tollgate_config::Config;
use tollgate_domain::PlanName;
use tollgate_loadtest::client::Target;

use super::caller::{Told, ask};
use super::place::{bound_by, isolated, model};
use super::{Canary, Finding, ProbeResult};
use crate::own_gateway::{OwnGateway, WantedKeys};

/// The requests that a key, a tenant, a pool and a model may send at once.
const BURSTS: [(&str, u32); 4] = [("key", 2), ("tenant", 4), ("pool", 6), ("model", 8)];

/// A step of the probe: the tenant, the number of its key, the requests that must pass, and
/// the owner that must refuse the next one.
struct Step {
    tenant: &'static str,
    key: usize,
    passes: u32,
    owner: &'static str,
}

/// The steps. Each key that is new finds its own rate whole, so what refuses it is the limit
/// around it that the keys before have spent.
const STEPS: [Step; 7] = [
    Step { tenant: "stack-a", key: 0, passes: 2, owner: "key" },
    Step { tenant: "stack-a", key: 1, passes: 2, owner: "key" },
    Step { tenant: "stack-a", key: 2, passes: 0, owner: "tenant" },
    Step { tenant: "stack-b", key: 0, passes: 2, owner: "key" },
    Step { tenant: "stack-c", key: 0, passes: 0, owner: "pool" },
    Step { tenant: "stack-d", key: 0, passes: 2, owner: "key" },
    Step { tenant: "stack-e", key: 0, passes: 0, owner: "model" },
];

/// Starts the gateway, probes it and ends it. `shown` is the config as TOML.
pub(super) async fn probe(config: &Config, shown: &str) -> Result<ProbeResult> {
    let model = model(config)?;
    let gateway = OwnGateway::start(&stacked(shown, &model)?, &wanted()?)?;
    let found = steps(&gateway, &model).await;
    gateway.end()?;
    let bursts: Vec<String> =
        BURSTS.iter().map(|(owner, most)| format!("{owner} {most}")).collect();
    let row = ProbeResult::new(NAME, bursts.join(", "));
    let wrong = found?;
    Ok(match wrong {
        None => row.saw(Finding::Holds, "each refuses where its own rate is spent, and is named"),
        Some(wrong) => row.saw(Finding::Broken, wrong),
    })
}

/// Returns the row of a running gateway, which has plans of its own.
pub(super) fn no_probe() -> ProbeResult {
    ProbeResult::new(NAME, "-").has_no_probe("probed on a temporary gateway only")
}

/// Plays the steps. Returns what was wrong, if anything was.
async fn steps(gateway: &OwnGateway, model: &str) -> Result<Option<String>> {
    for Step { tenant, key, passes, owner } in &STEPS {
        let secret = gateway.keys.get(*tenant).and_then(|keys| keys.get(*key));
        let secret = secret.context("each tenant has its keys")?;
        let target = Target::new(&gateway.url, &gateway.ca(), secret)?;
        let canary = Canary { target, model: model.to_owned() };
        let connection = canary.connect().await?;
        let body = canary.chat("Say hello.", 1).to_string();
        // One request more than may pass: the last one must be refused.
        for number in 0..=*passes {
            let told = ask(&connection, "/v1/chat/completions", body.clone()).await?;
            let is_right = match number < *passes {
                true => told.is_ok(),
                false => told.names(&format!(" for {owner} ")),
            };
            if !is_right {
                let Told { status, message, .. } = told;
                let expected = if number < *passes { "pass" } else { owner };
                return Ok(Some(format!(
                    "request {} of key {} of {tenant}: expected {expected}, got {status} {message}",
                    number + 1,
                    key + 1,
                )));
            }
        }
    }
    Ok(None)
}

/// Returns a config in which the four limits apply to each request for `model`.
fn stacked(shown: &str, model: &str) -> Result<String> {
    let mut tree = isolated(shown)?;
    let mut plans = toml::Table::new();
    for (owner, burst) in BURSTS {
        // One a minute: nothing refills while the probe runs.
        let rate = format!("requests_per_minute = {{ limit = 1, burst = {burst} }}");
        plans.insert(plan(owner), toml::Value::Table(rate.parse()?));
    }
    let mut tenants = toml::Table::new();
    for Step { tenant, .. } in &STEPS {
        let mut own = toml::Table::from_iter([("plan".to_owned(), plan("tenant").into())]);
        // The last two tenants meet the model's limit, and not the pool's.
        if !["stack-d", "stack-e"].contains(tenant) {
            own.insert("pool".to_owned(), "stack".into());
        }
        tenants.insert((*tenant).to_owned(), toml::Value::Table(own));
    }
    let pools = toml::Table::from_iter([("stack".to_owned(), bound_by(&plan("pool")))]);
    tree.insert("plans".to_owned(), toml::Value::Table(plans));
    tree.insert("tenants".to_owned(), toml::Value::Table(tenants));
    tree.insert("pools".to_owned(), toml::Value::Table(pools));
    let models = tree.entry("models").or_insert_with(|| toml::Table::new().into());
    let models = models.as_table_mut().context("models are a table")?;
    let own = models.entry(model).or_insert_with(|| toml::Table::new().into());
    own.as_table_mut()
        .context("a model is a table")?
        .insert("plan".to_owned(), plan("model").into());
    Ok(toml::to_string(&tree)?)
}

fn wanted() -> Result<Vec<WantedKeys>> {
    let key_plan = PlanName::new(&plan("key"))?;
    let mut wanted: Vec<WantedKeys> = Vec::new();
    for Step { tenant, key, .. } in &STEPS {
        // A step names a key by its place, so that a tenant needs all keys up to it.
        let count = *key as u32 + 1;
        match wanted.iter_mut().find(|wanted| wanted.tenant == *tenant) {
            Some(wanted) => wanted.count = wanted.count.max(count),
            None => wanted.push(WantedKeys {
                tenant: (*tenant).to_owned(),
                count,
                plan: Some(key_plan.clone()),
            }),
        }
    }
    Ok(wanted)
}

fn plan(owner: &str) -> String {
    format!("stack-{owner}")
}

/// The name of the row.
const NAME: &str = "plans.* together";

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn stacked_config_has_four_limits() {
        let config = "[plans.p]\nconcurrent = 2\n[tenants.acme]\nplan = \"p\"\n[models.tollgate-demo]\nplan = \"p\"\n";
        let shown = Config::show_toml(Path::new("x.toml"), config).expect("valid");
        let text = stacked(&shown, "tollgate-demo").expect("a config");
        let config = Config::from_toml(Path::new("y.toml"), &text).expect(&text);
        assert_eq!(config.plans().count(), BURSTS.len(), "{text}");
        let model = config.models().next().expect("a model");
        assert_eq!(model.plan.as_ref().map(|plan| plan.name.as_str()), Some("stack-model"));
        let pooled = config.tenants().filter(|tenant| tenant.pool.is_some()).count();
        assert_eq!((config.tenants().count(), pooled), (5, 3));
        let counts: Vec<u32> = wanted().expect("names").iter().map(|wanted| wanted.count).collect();
        assert_eq!(counts, [3, 1, 1, 1, 1]);
    }
}
