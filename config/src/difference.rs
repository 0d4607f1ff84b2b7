//! The difference of two configs, key by key. Each change says if it takes effect while
//! the gateway runs or needs a restart, and [`in_force_after`] builds the sections that
//! follow from that. A difference has no secrets, because a config contains only their
//! paths.

use std::collections::BTreeMap;
use std::fmt;

use crate::problem::Place;
use crate::read::{Section, Visited, join};
use crate::sections::{Gateway, Health, RawModel, Root, Worker};
use crate::show;
use crate::tree::Table;

/// A key whose value differs between two configs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// The dotted key.
    pub key: String,
    /// The earlier value as TOML; `None` if it was not set.
    pub old: Option<String>,
    /// The new value as TOML; `None` if it is not set.
    pub new: Option<String>,
    /// The place of the new value.
    pub place: Place,
    /// The time at which the new value takes effect.
    pub effect: Effect,
}

/// The time at which a change takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// At the reload.
    Live,
    /// At the next start of the gateway.
    Restart,
}

impl Effect {
    /// Returns the name in lists: `live` or `restart`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Live => "live",
            Self::Restart => "restart",
        }
    }
}

/// `plans.team.concurrent: 4 -> 8 (plans.toml:12, live)`.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, old, new, place, effect } = self;
        let shown = |value: &Option<String>| value.clone().unwrap_or_else(|| "not set".to_owned());
        write!(f, "{key}: {} -> {} ({place}, {})", shown(old), shown(new), effect.as_str())
    }
}

/// The keys and sections of [`Gateway`] that need a restart.
const RESTART_IN_GATEWAY: [&str; 4] = ["admin_listen", "idempotency", "jobs", "listen"];

/// The top-level sections that a reload replaces.
const LIVE: [&str; 5] = ["auth", "plans", "pools", "prices", "tenants"];

/// Returns every key whose value differs, in the order of the keys. `tree` has the places
/// of `new`.
pub(crate) fn between(old: &Root, new: &Root, tree: &Table) -> Vec<Change> {
    let mut places = BTreeMap::new();
    show::collect(tree, "", &mut places);
    let (mut before, after) = (values(old), values(new));
    // Only models that are served already can get another plan; the others wait for the restart.
    let kept_plans: Vec<String> = new
        .models
        .keys()
        .filter(|name| old.models.contains_key(*name))
        .map(|name| join(&join("models", name.as_str()), "plan"))
        .collect();
    let effect = |key: &str| {
        if is_live(key) || kept_plans.iter().any(|plan| plan == key) {
            Effect::Live
        } else {
            Effect::Restart
        }
    };
    let mut changes = Vec::new();
    for (key, new) in after {
        // Removed, so that only keys that the new config lacks are left for the loop below.
        let known = before.remove(&key);
        let place = places.get(&key).cloned().unwrap_or(Place::Default);
        // A default in an entry that is new says nothing.
        let is_implied = known.is_none() && place == Place::Default;
        let old = known.flatten();
        if old != new && !is_implied {
            let effect = effect(&key);
            changes.push(Change { key, old, new, place, effect });
        }
    }
    // The keys of entries that the new config does not have.
    for (key, old) in before.into_iter().filter(|(_, old)| old.is_some()) {
        let effect = effect(&key);
        changes.push(Change { key, old, new: None, place: Place::Default, effect });
    }
    changes.sort_by(|a, b| a.key.cmp(&b.key));
    changes
}

/// Returns true if a reload applies a change of `key`. The plan of a model is not among
/// these keys: it is live if the model is served already.
fn is_live(key: &str) -> bool {
    let mut parts = key.split('.');
    let first = parts.next().unwrap_or_default();
    match first {
        "gateway" => !parts.next().is_some_and(|part| RESTART_IN_GATEWAY.contains(&part)),
        // The library is opened once.
        "worker" => parts.next() == Some("health") && parts.next() != Some("nvml"),
        _ => LIVE.contains(&first),
    }
}

/// Returns the sections in force after a reload of `new` while `running` is in force: those
/// of `new` with the parts of `running` that need a restart.
pub(crate) fn in_force_after(running: &Root, new: &Root) -> Root {
    // Destructured in full, so that a new section is either live or not.
    let Root { data: _, gateway, worker, plans, pools, tenants, models, prices, auth, cluster: _ } =
        new;
    let Gateway {
        listen: _,
        admin_listen: _,
        idempotency: _,
        tls: _,
        timeouts: _,
        connections: _,
        sources: _,
        reads: _,
        proxies: _,
        http2: _,
        requests: _,
        deadlines: _,
        penalties: _,
        cors: _,
        access_log: _,
        webhook: _,
        jobs: _,
    } = gateway;
    let Gateway { listen, admin_listen, idempotency, jobs, .. } = running.gateway.clone();
    let nvml = running.worker.health.nvml.clone();
    // A served model takes its new plan at once; all else of a model waits for the restart.
    let with_new_plan = |(name, model): (&_, &RawModel)| {
        let plan = models.get(name).map_or_else(|| model.plan.clone(), |new| new.plan.clone());
        (Clone::clone(name), RawModel { plan, ..model.clone() })
    };
    Root {
        gateway: Gateway { listen, admin_listen, idempotency, jobs, ..gateway.clone() },
        worker: Worker {
            health: Health { nvml, ..worker.health.clone() },
            ..running.worker.clone()
        },
        plans: plans.clone(),
        pools: pools.clone(),
        tenants: tenants.clone(),
        models: running.models.iter().map(with_new_plan).collect(),
        prices: prices.clone(),
        auth: auth.clone(),
        ..running.clone()
    }
}

/// Returns the value of every key.
fn values(root: &Root) -> BTreeMap<String, Option<String>> {
    let mut values = BTreeMap::new();
    root.visit("", &mut |visited| {
        if let Visited::Field { key, value, .. } = visited {
            values.insert(key.to_owned(), value);
        }
    });
    values
}
