//! The whole config, checked: what a section names exists, no limit
//! contradicts another, and the demo tenant is there only when nobody else is.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::{ModelName, PlanLimits, PlanName, PoolName, PriceBook, Rate, TenantId};

use crate::problem::{ConfigErrors, Place, Problem};
use crate::read::{Reader, Section};
use crate::sections::{DeviceSelector, Gateway, Issuer, RawPlan, RawTenant, Root, Worker};
use crate::source::{Loaded, Sources};
use crate::tree::{Node, Table, Value};
use crate::{example, reference, schema, show};

mod check;
mod prices;

/// The model that comes along.
pub(crate) const DEMO_MODEL: &str = "tollgate-demo";
/// The tenant and plan of a first start.
const DEMO: &str = "demo";

/// A config that is whole. It never changes: share it in an `Arc`.
#[derive(Clone, Debug)]
pub struct Config {
    data: PathBuf,
    gateway: Gateway,
    worker: Worker,
    plans: BTreeMap<PlanName, Arc<Plan>>,
    pools: BTreeMap<PoolName, Pool>,
    /// By name.
    tenants: Vec<Arc<Tenant>>,
    /// Where each stands: every request asks, and there may be a hundred
    /// thousand.
    tenant_places: HashMap<TenantId, usize>,
    models: BTreeMap<ModelName, Model>,
    issuers: Vec<Issuer>,
    prices: Option<PriceBook>,
    demo: bool,
    loaded: Loaded,
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
        let (tree, loaded) = sources.gather(&mut problems);
        let (config, _) = resolve(tree, problems)?;
        Ok(Self { loaded, ..config })
    }

    /// Every key and its value as TOML, each with the place it comes from.
    /// There are no secrets in it: config holds their paths only.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn show(sources: &Sources) -> Result<String, ConfigErrors> {
        let mut problems = Vec::new();
        let (tree, _) = sources.gather(&mut problems);
        let (_, Written { root, tree }) = resolve(tree, problems)?;
        Ok(show::whole(&root, &tree))
    }

    /// What [`Self::show`] says of text, as if it stood in a file of that name.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn show_toml(name: &Path, text: &str) -> Result<String, ConfigErrors> {
        let mut problems = Vec::new();
        let tree = crate::tree::parse(&Arc::new(name.to_owned()), text, &mut problems);
        let (_, Written { root, tree }) = resolve(tree, problems)?;
        Ok(show::whole(&root, &tree))
    }

    /// Loads a config from text, as if it stood in a file of that name.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn from_toml(name: &Path, text: &str) -> Result<Self, ConfigErrors> {
        let mut problems = Vec::new();
        let tree = crate::tree::parse(&Arc::new(name.to_owned()), text, &mut problems);
        let (config, _) = resolve(tree, problems)?;
        Ok(Self { loaded: Loaded::of_text(text), ..config })
    }

    /// What it was made of.
    pub fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// Where the instance keeps its data.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// The front door.
    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// The process around a device.
    pub fn worker(&self) -> &Worker {
        &self.worker
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

    /// All tenants, by name; at least one.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().map(Arc::as_ref)
    }

    /// One tenant.
    pub fn tenant(&self, name: &TenantId) -> Option<&Arc<Tenant>> {
        self.tenant_places.get(name).map(|&place| &self.tenants[place])
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

    /// The JSON schema of config files.
    pub fn schema() -> serde_json::Value {
        schema::whole()
    }

    /// A commented file with every key at its default.
    pub fn example() -> String {
        example::whole()
    }

    /// Returns the reference page of every key, in Markdown.
    pub fn reference() -> String {
        reference::whole()
    }
}

/// What was written and where: a config keeps none of it, since there may be a
/// hundred thousand tenants in it.
struct Written {
    root: Root,
    tree: Table,
}

fn resolve(tree: Table, problems: Vec<Problem>) -> Result<(Config, Written), ConfigErrors> {
    let mut reader = Reader { problems };
    let node = Node { place: Place::Default, value: Value::Table(tree) };
    let mut root = Root::read(Some(&node), "", &mut reader);
    let Value::Table(tree) = node.value else { unreachable!("it was made a table") };
    let named = tree.get("tenants");
    let demo = named.is_none_or(|node| node.table().is_some_and(Table::is_empty));
    if demo {
        add_demo_tenant(&mut root);
    }
    if root.models.is_empty() {
        let name = ModelName::new(DEMO_MODEL).expect("it keeps the rules for names");
        root.models.insert(name, Default::default());
    }
    let resolved = check::Checker { tree: &tree, root: &root, reader: &mut reader }.resolve(demo);
    ConfigErrors::check(reader.problems)?;
    let check::Resolved { plans, pools, tenants, models, issuers, prices } = resolved;
    let (data, gateway, worker) = (root.data.clone(), root.gateway.clone(), root.worker.clone());
    let tenants: Vec<Arc<Tenant>> = tenants.into_values().map(Arc::new).collect();
    let tenant_places =
        tenants.iter().enumerate().map(|(place, tenant)| (tenant.name.clone(), place)).collect();
    let config = Config {
        data,
        gateway,
        worker,
        plans,
        pools,
        tenants,
        tenant_places,
        models,
        issuers,
        prices,
        demo,
        loaded: Loaded::default(),
    };
    Ok((config, Written { root, tree }))
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
