//! The gateway that is probed, and the keys for it. On a temporary gateway each
//! limit of each plan is in a plan alone, with a tenant of its own, so that no
//! other limit applies first. On a running gateway a key is created for each plan;
//! the keys expire after minutes and are revoked at the end.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::runtime::Runtime;
use tollgate_config::Config;
use tollgate_domain::{KeyId, PlanName, TenantId};
use tollgate_gateway::auth::{KeyStore, UnderWay};
use tollgate_loadtest::client::{Protocol, Target};

use super::Canary;
use crate::common::now;
use crate::keys::open_store;
use crate::own_gateway::{OwnGateway, WantedKeys, make_key};

/// The keys for the probes.
pub(super) struct Canaries {
    place: ProbedGateway,
    model: String,
    any: Canary,
    /// The targets, by `PLAN.LIMIT`; see [`Canaries::of`].
    keys: BTreeMap<String, Target>,
    /// The targets of the holders: one for each key of each.
    holders: Vec<Vec<Target>>,
}

enum ProbedGateway {
    Temporary(OwnGateway),
    Running { store: KeyStore, made: Vec<KeyId> },
}

/// The lifetime of a key on a running gateway, in case it is not revoked.
const LIFE: Duration = Duration::from_secs(15 * 60);

/// Time to wait for a new key. A gateway learns of a key within a second.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The tenant without limits on a temporary gateway.
const FREE: &str = "canary";

/// The start of the names of tenants that hold connections and bodies.
const HOLDER: &str = "holder-";
/// Number of these tenants.
const HOLDERS: usize = 10;
/// Largest number of keys of each.
const MOST_KEYS: u32 = 8;

/// The keys of a plan's limits. Each one is probed alone.
pub(super) const LIMITS: [&str; 7] = [
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent",
    "largest_job",
    "device_time_per_minute",
    "device_time_per_day",
    "device_time_per_month",
];

impl Canaries {
    /// Starts a temporary gateway with the limits of `config`. `shown` is the
    /// config as TOML.
    pub(super) fn temporary(config: &Config, shown: &str) -> Result<Self> {
        let (text, wanted) = derived(config, shown)?;
        let gateway = OwnGateway::start(&text, &wanted)?;
        let model = model(config)?;
        let target = |secret: &str| Target::new(&gateway.url, &gateway.ca(), secret);
        let mut keys = BTreeMap::new();
        for (tenant, secrets) in &gateway.keys {
            keys.insert(tenant.clone(), target(&secrets[0])?);
        }
        let free = keys.remove(FREE).context("the canary has a key")?;
        let mut holders = Vec::new();
        for (_, secrets) in gateway.keys.iter().filter(|(name, _)| name.starts_with(HOLDER)) {
            holders.push(secrets.iter().map(|it| target(it)).collect::<Result<Vec<_>, _>>()?);
        }
        let any = Canary { target: free, model: model.clone() };
        // Tenants are numbered in the order of the probes.
        let named = probes(config)
            .into_iter()
            .enumerate()
            .filter_map(|(number, name)| Some((name, keys.remove(&tenant_name(number))?)));
        let named = named.collect();
        Ok(Self { place: ProbedGateway::Temporary(gateway), model, any, keys: named, holders })
    }

    /// Creates keys of `tenant` on the gateway at `url`, whose certificate is from `ca`. The
    /// keys may be on a server, so this is no async code; the requests run on `runtime`.
    pub(super) fn running(
        runtime: &Runtime,
        config: &Config,
        (url, ca): (&str, &Path),
        tenant: &TenantId,
    ) -> Result<Self> {
        if config.tenant(tenant).is_none() {
            bail!(
                "unknown tenant {tenant}: it is not in the config; use --config for another config"
            );
        }
        let model = model(config)?;
        let store = open_store(config)?;
        let (mut keys, mut made_ids) = (BTreeMap::new(), Vec::new());
        let mut make = |plan: Option<PlanName>| -> Result<Target> {
            let new = make_key(&store, tenant, plan, Some(LIFE))?;
            made_ids.push(new.record.id);
            Ok(Target::new(url, ca, new.secret.expose())?)
        };
        let made = (|| -> Result<Target> {
            for plan in config.plans() {
                for limit in LIMITS {
                    keys.insert(format!("{}.{limit}", plan.name), make(Some(plan.name.clone()))?);
                }
            }
            make(None)
        })();
        let place = ProbedGateway::Running { store, made: made_ids };
        let ready = match made {
            Ok(target) => runtime.block_on(known(&target)).map(|()| target),
            Err(error) => Err(error),
        };
        match ready {
            Ok(target) => {
                let any = Canary { target, model: model.clone() };
                Ok(Self { place, model, any, keys, holders: Vec::new() })
            }
            Err(error) => {
                // The keys must not stay valid after a failed start.
                place.end()?;
                Err(error)
            }
        }
    }

    /// Returns a canary that `limit` of `plan` applies to.
    pub(super) fn of(&self, plan: &PlanName, limit: &str) -> Option<Canary> {
        let target = self.keys.get(&format!("{plan}.{limit}"))?.clone();
        Some(Canary { target, model: self.model.clone() })
    }

    /// Returns a canary that no probed plan applies to.
    pub(super) fn any(&self) -> &Canary {
        &self.any
    }

    /// Returns the keys of each tenant that may hold as much as a limit allows; none on a
    /// running gateway.
    pub(super) fn holders(&self) -> &[Vec<Target>] {
        &self.holders
    }

    /// Returns the number of long requests that a probe may start and cancel. On a
    /// running gateway they belong to one tenant, and too many cancels earn a
    /// penalty.
    pub(super) fn most_places(&self) -> usize {
        match self.place {
            ProbedGateway::Temporary(_) => 512,
            ProbedGateway::Running { .. } => 24,
        }
    }

    /// Ends the temporary gateway, or revokes the keys.
    pub(super) fn end(self) -> Result<()> {
        self.place.end()
    }
}

impl ProbedGateway {
    /// Ends the temporary gateway, or revokes the keys.
    fn end(self) -> Result<()> {
        match self {
            Self::Temporary(gateway) => gateway.end(),
            Self::Running { store, made } => {
                let revoke = |id: &KeyId| store.revoke(id, UnderWay::Finish, now()).map(|_| ());
                // Every key, also after one that could not be revoked.
                let revoked: Vec<_> = made.iter().map(revoke).collect();
                Ok(revoked.into_iter().collect::<Result<(), _>>()?)
            }
        }
    }
}

pub(super) fn model(config: &Config) -> Result<String> {
    let model = config.models().next().context("a config has a model")?;
    Ok(model.name.as_str().to_owned())
}

/// Waits until the gateway knows the new keys.
async fn known(target: &Target) -> Result<()> {
    let connection = target.connect(Protocol::Http2).await?;
    let started = Instant::now();
    while started.elapsed() < LONGEST_WAIT {
        // The gateway answers an unknown key with 401.
        if connection.get("/v1/models").await?.status() != 401 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    bail!("the gateway does not know a new key; does it use this data folder?")
}

/// Returns `PLAN.LIMIT` for every limit of every plan.
fn probes(config: &Config) -> Vec<String> {
    let plans = config.plans();
    plans.flat_map(|plan| LIMITS.map(|limit| format!("{}.{limit}", plan.name))).collect()
}

fn tenant_name(number: usize) -> String {
    format!("canary-{number}")
}

/// Returns the config without everything that a temporary gateway must not share with the
/// real one: addresses, certificate, issuers, tenants and pools. Prices are for budgets, which
/// are not probed. A model's plan would limit the canaries, too.
pub(super) fn isolated(shown: &str) -> Result<toml::Table> {
    let mut tree: toml::Table = shown.parse().context("cannot parse the config")?;
    for section in ["data", "tenants", "pools", "auth", "prices"] {
        tree.remove(section);
    }
    if let Some(gateway) = tree.get_mut("gateway").and_then(toml::Value::as_table_mut) {
        for key in ["listen", "admin_listen", "tls"] {
            gateway.remove(key);
        }
    }
    if let Some(models) = tree.get_mut("models").and_then(toml::Value::as_table_mut) {
        for (_, model) in models.iter_mut() {
            model.as_table_mut().and_then(|model| model.remove("plan"));
        }
    }
    Ok(tree)
}

/// Takes the plans off a config.
pub(super) fn plans(tree: &mut toml::Table) -> toml::Table {
    match tree.remove("plans") {
        Some(toml::Value::Table(plans)) => plans,
        _ => toml::Table::new(),
    }
}

/// Returns the config with each limit in a plan of its own.
fn derived(config: &Config, shown: &str) -> Result<(String, Vec<WantedKeys>)> {
    let mut tree = isolated(shown)?;
    let plans = plans(&mut tree);
    let (mut alone, mut tenants) = (toml::Table::new(), toml::Table::new());
    let free = toml::Table::from_iter([("concurrent".to_owned(), toml::Value::Integer(256))]);
    alone.insert(FREE.to_owned(), toml::Value::Table(free));
    tenants.insert(FREE.to_owned(), bound_by(FREE));
    for (number, probe) in probes(config).iter().enumerate() {
        let Some((plan, limit)) = probe.split_once('.') else { continue };
        // `queued` has no effect without `concurrent`, so both are in one plan.
        let keys = if limit == "concurrent" { &["concurrent", "queued"][..] } else { &[limit] };
        let own = plans.get(plan).and_then(toml::Value::as_table);
        let limits =
            keys.iter().filter_map(|key| Some(((*key).to_owned(), own?.get(*key)?.clone())));
        let limits: toml::Table = limits.collect();
        if limits.is_empty() {
            continue;
        }
        let name = tenant_name(number);
        alone.insert(name.clone(), toml::Value::Table(limits));
        tenants.insert(name.clone(), bound_by(&name));
    }
    let mut wanted: Vec<WantedKeys> = tenants
        .keys()
        .map(|tenant| WantedKeys { tenant: tenant.clone(), count: 1, plan: None })
        .collect();
    // One key more than the bound of a tenant needs, so that it is met before theirs.
    let bounds = &config.gateway().connections;
    let count = (bounds.per_tenant / bounds.per_key.max(1) + 1).min(MOST_KEYS);
    // After the list above, because a holder has several keys.
    for number in 0..HOLDERS {
        let tenant = format!("{HOLDER}{number}");
        tenants.insert(tenant.clone(), bound_by(FREE));
        wanted.push(WantedKeys { tenant, count, plan: None });
    }
    tree.insert("plans".to_owned(), toml::Value::Table(alone));
    tree.insert("tenants".to_owned(), toml::Value::Table(tenants));
    Ok((toml::to_string(&tree)?, wanted))
}

pub(super) fn bound_by(plan: &str) -> toml::Value {
    let plan = toml::Value::String(plan.to_owned());
    toml::Value::Table(toml::Table::from_iter([("plan".to_owned(), plan)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn derived_config_isolates_each_limit() {
        let config = r#"
            [gateway]
            listen = "127.0.0.1:1"
            [gateway.requests]
            messages = 7
            [plans.team]
            requests_per_minute = { limit = 60, burst = 3 }
            concurrent = 2
            queued = 1
            device_time_per_day = { default = "1s" }
            [tenants.acme]
            plan = "team"
        "#;
        let name = Path::new("x.toml");
        let shown = Config::show_toml(name, config).expect("valid");
        let config = Config::from_toml(name, config).expect("valid");
        let (text, wanted) = derived(&config, &shown).expect("derived");
        let derived = Config::from_toml(Path::new("y.toml"), &text).expect(&text);
        assert_eq!(derived.gateway().requests.messages, 7);
        assert_eq!(derived.tenants().count(), wanted.len());
        let of_limits = wanted.iter().filter(|wanted| !wanted.tenant.starts_with(HOLDER)).count();
        assert_eq!(of_limits, 4, "the canary and three limits: {text}");
        let holders = wanted.iter().filter(|wanted| wanted.tenant.starts_with(HOLDER));
        assert!(holders.clone().all(|holder| holder.count == 3), "1,024 / 512 and one more");
        assert_eq!(holders.count(), HOLDERS);
        assert!(derived.tenant(&TenantId::new("acme").expect("a name")).is_none());
        let limits: Vec<_> = derived.plans().map(|plan| &plan.limits).collect();
        let pairs = limits.iter().filter(|limits| limits.concurrent == Some(2));
        assert!(pairs.clone().all(|limits| limits.queued == Some(1) && limits.requests.is_none()));
        assert_eq!(pairs.count(), 1);
    }

    #[test]
    fn canaries_revoke_keys_after_failed_start() {
        let data = tempfile::tempdir().expect("a folder");
        let (folder, tenant) = (data.path(), TenantId::new("acme").expect("a name"));
        let text = format!(
            "data = {:?}\n[plans.team]\n[tenants.acme]\nplan = \"team\"\n[models.tollgate-demo]\n",
            folder.display().to_string()
        );
        let config = Config::from_toml(Path::new("x.toml"), &text).expect("valid");
        // The first key is made before the certificate is missed.
        let (url, ca) = ("https://127.0.0.1:1", folder.join("no-such-ca.pem"));
        let runtime = Runtime::new().expect("a runtime");
        let started = Canaries::running(&runtime, &config, (url, &ca), &tenant);
        assert!(started.is_err());
        let keys = KeyStore::open(folder).and_then(|store| store.list(None)).expect("keys");
        let states: Vec<&str> = keys.iter().map(|key| key.state(now())).collect();
        assert_eq!(states, ["revoked"]);
    }
}
