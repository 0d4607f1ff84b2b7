//! The whole config, checked: what a section names exists, no limit
//! contradicts another, and the demo tenant is there only when nobody else is.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::{ModelName, PlanLimits, PlanName, PoolName, PriceBook, Rate, TenantId};

use crate::problem::{ConfigErrors, Problem};
use crate::read::{Reader, Section};
use crate::sections::{DeviceSelector, Gateway, Issuer, RawPlan, RawTenant, Root, Worker};
use crate::source::Sources;
use crate::tree::Table;
use crate::{example, schema, show};

mod check;
mod prices;

/// The model that comes along.
pub(crate) const DEMO_MODEL: &str = "tollgate-demo";
/// The tenant and plan of a first start.
const DEMO: &str = "demo";

/// A config that is whole. It never changes: share it in an `Arc`.
#[derive(Clone, Debug)]
pub struct Config {
    root: Root,
    /// What was written, for the places of what is shown.
    tree: Table,
    plans: BTreeMap<PlanName, Arc<Plan>>,
    pools: BTreeMap<PoolName, Pool>,
    tenants: BTreeMap<TenantId, Tenant>,
    models: BTreeMap<ModelName, Model>,
    issuers: Vec<Issuer>,
    prices: Option<PriceBook>,
    demo: bool,
}

/// A named set of limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Its name.
    pub name: PlanName,
    /// Its limits. Where `concurrent` is given, so is `queued`.
    pub limits: Arc<PlanLimits>,
    /// Its share of a contended device, relative to others; above zero.
    pub weight: f64,
}

/// Tenants that share limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// Its name.
    pub name: PoolName,
    /// The limits that bind them together.
    pub plan: Arc<Plan>,
}

/// Who pays. Its own plan, its pool's or both bind it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// Its name.
    pub name: TenantId,
    /// The limits of its own, if any.
    pub plan: Option<Arc<Plan>>,
    /// With whom it shares limits, if with anyone.
    pub pool: Option<Pool>,
    /// Its share of a contended device: its own plan's, else its pool's.
    pub weight: f64,
    /// The models that it may use; all where `None`.
    pub models: Option<BTreeSet<ModelName>>,
}

impl Tenant {
    /// The plan whose prices it pays: its own, else its pool's.
    pub fn priced_as(&self) -> Option<&Arc<Plan>> {
        self.plan.as_ref().or(self.pool.as_ref().map(|pool| &pool.plan))
    }

    /// Whether it may use `model`.
    pub fn allows(&self, model: &ModelName) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }
}

/// A model to serve.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// Its name in requests.
    pub name: ModelName,
    /// Its folder; `None` for the model that comes along.
    pub path: Option<PathBuf>,
    /// Where it runs; not empty.
    pub devices: Vec<DeviceSelector>,
    /// The limits of all its callers together, if any.
    pub plan: Option<Arc<Plan>>,
}

impl Config {
    /// Loads a config.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn load(sources: &Sources) -> Result<Self, ConfigErrors> {
        let mut problems = Vec::new();
        let tree = sources.gather(&mut problems);
        Self::resolve(tree, problems)
    }

    /// Loads a config from text, as if it stood in a file of that name.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn from_toml(name: &Path, text: &str) -> Result<Self, ConfigErrors> {
        let mut problems = Vec::new();
        let tree = crate::tree::parse(&Arc::new(name.to_owned()), text, &mut problems);
        Self::resolve(tree, problems)
    }

    fn resolve(tree: Table, problems: Vec<Problem>) -> Result<Self, ConfigErrors> {
        let mut reader = Reader { problems };
        let node = crate::tree::Node {
            place: crate::problem::Place::Default,
            value: crate::tree::Value::Table(tree.clone()),
        };
        let mut root = Root::read(Some(&node), "", &mut reader);
        let named = tree.get("tenants");
        let demo = named.is_none_or(|node| node.table().is_some_and(Table::is_empty));
        if demo {
            add_demo_tenant(&mut root);
        }
        if root.models.is_empty() {
            let name = ModelName::new(DEMO_MODEL).expect("it keeps the rules for names");
            root.models.insert(name, Default::default());
        }
        let resolved =
            check::Checker { tree: &tree, root: &root, reader: &mut reader }.resolve(demo);
        ConfigErrors::check(reader.problems)?;
        let check::Resolved { plans, pools, tenants, models, issuers, prices } = resolved;
        Ok(Self { root, tree, plans, pools, tenants, models, issuers, prices, demo })
    }

    /// Where the instance keeps its data.
    pub fn data(&self) -> &Path {
        &self.root.data
    }

    /// The front door.
    pub fn gateway(&self) -> &Gateway {
        &self.root.gateway
    }

    /// The process around a device.
    pub fn worker(&self) -> &Worker {
        &self.root.worker
    }

    /// All plans.
    pub fn plans(&self) -> impl Iterator<Item = &Arc<Plan>> {
        self.plans.values()
    }

    /// One plan.
    pub fn plan(&self, name: &PlanName) -> Option<&Arc<Plan>> {
        self.plans.get(name)
    }

    /// All pools.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values()
    }

    /// All tenants; at least one.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.values()
    }

    /// One tenant.
    pub fn tenant(&self, name: &TenantId) -> Option<&Tenant> {
        self.tenants.get(name)
    }

    /// All models; at least one.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.models.values()
    }

    /// One model.
    pub fn model(&self, name: &ModelName) -> Option<&Model> {
        self.models.get(name)
    }

    /// The token issuers that are believed.
    pub fn issuers(&self) -> &[Issuer] {
        &self.issuers
    }

    /// What usage costs; `None` where no price list is given.
    pub fn prices(&self) -> Option<&PriceBook> {
        self.prices.as_ref()
    }

    /// Whether no tenant was named, so that the demo tenant is there.
    pub fn is_demo(&self) -> bool {
        self.demo
    }

    /// Every key and its value as TOML, each with the place it comes from.
    /// There are no secrets in it: config holds their paths only.
    pub fn show(&self) -> String {
        show::whole(&self.root, &self.tree)
    }

    /// The JSON schema of config files.
    pub fn schema() -> serde_json::Value {
        schema::whole()
    }

    /// A commented file with every key at its default.
    pub fn example() -> String {
        example::whole()
    }
}

/// The tenant of a first start, and its plan unless there is one of the name.
fn add_demo_tenant(root: &mut Root) {
    let plan = PlanName::new(DEMO).expect("it keeps the rules for names");
    let tenant = TenantId::new(DEMO).expect("it keeps the rules for names");
    root.plans.entry(plan.clone()).or_insert_with(|| RawPlan {
        requests_per_minute: Some(Rate::per_minute(600)),
        concurrent: Some(8),
        queued: Some(64),
        ..RawPlan::default()
    });
    root.tenants.insert(tenant, RawTenant { plan: Some(plan), ..RawTenant::default() });
}
