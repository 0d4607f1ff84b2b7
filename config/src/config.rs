//! The checked config. Every name that a section refers to exists, no limit
//! contradicts another, and the demo tenant exists only if no other tenant does.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::{
    ClusterName, ModelName, PlanLimits, PlanName, PoolName, PriceBook, Rate, TenantId, ToolFormat,
    WorkerName,
};

use crate::problem::{ConfigErrors, Place, Problem};
use crate::read::{Reader, Section};
use crate::sections::{
    BatchQuotas, DEMO_MODEL, DeviceSelector, Gateway, HostPort, Issuer, RawPlan, RawTenant, Root,
    Worker,
};
use crate::source::{FilesHash, Gathered, Loaded, Sources};
use crate::tree::{Node, Table, Value};
use crate::{example, reference, schema, show};

mod check;
mod prices;
mod reload;

pub(crate) use check::{grammar_time, plan_limits};
pub use reload::Reload;

/// The name of the demo tenant and of its plan.
const DEMO: &str = "demo";

/// A checked config. It never changes: share it in an `Arc`.
#[derive(Clone, Debug)]
pub struct Config {
    data: PathBuf,
    gateway: Gateway,
    worker: Worker,
    plans: BTreeMap<PlanName, Arc<Plan>>,
    pools: BTreeMap<PoolName, Pool>,
    /// The tenants, sorted by name.
    pub(crate) tenants: Vec<Arc<Tenant>>,
    /// The index of each tenant in `tenants`. Every request looks its tenant up,
    /// and there may be a hundred thousand tenants.
    pub(crate) tenant_places: HashMap<TenantId, usize>,
    /// The tenants with raised limits, as the files have them.
    pub(crate) unraised: BTreeMap<TenantId, Arc<Tenant>>,
    models: BTreeMap<ModelName, Model>,
    issuers: Vec<Issuer>,
    prices: Option<PriceBook>,
    cluster: Option<Arc<Cluster>>,
    postgres: Option<Postgres>,
    redis: Option<Redis>,
    demo: bool,
    loaded: Loaded,
    /// The sections as they were read, which a reload compares with the next ones.
    root: Arc<Root>,
    /// The sources to read again; `None` for a config from text.
    sources: Option<Sources>,
    /// The hash of the files when they were loaded.
    files_at_load: [u8; 32],
    /// The number of reloads before this config.
    pub(crate) revision: u64,
}

/// A named set of limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Its name.
    pub name: PlanName,
    /// The plan's limits. If `concurrent` is given, so is `queued`.
    pub limits: Arc<PlanLimits>,
    /// The largest number of authenticated connections of the key, tenant or pool.
    pub connections: Option<u32>,
    /// True if requests may run in the batch tier.
    pub flex: bool,
    /// The quotas of batches and of their files.
    pub batches: BatchQuotas,
    /// The rate at which files and batches are made, as a rate of requests.
    pub made: Arc<PlanLimits>,
    /// The cap on the device time of the lines of batches, and no other limit.
    pub batch_caps: Arc<PlanLimits>,
    /// Its share of a contended device, relative to others; above zero.
    pub weight: f64,
}

impl Plan {
    /// Returns the plan without its limit on grammar time.
    pub(crate) fn without_grammar_time(&self) -> Self {
        let limits = PlanLimits { grammar_time: None, ..(*self.limits).clone() };
        Self { limits: Arc::new(limits), ..self.clone() }
    }
}

/// A pool: tenants that share limits.
#[derive(Clone, Debug, PartialEq)]
pub struct Pool {
    /// Its name.
    pub name: PoolName,
    /// The plan with the limits for the pool's tenants together.
    pub plan: Arc<Plan>,
}

/// A tenant. Its own plan, its pool's plan, or both limit it.
#[derive(Clone, Debug, PartialEq)]
pub struct Tenant {
    /// Its name.
    pub name: TenantId,
    /// The tenant's own plan, if it has one.
    pub plan: Option<Arc<Plan>>,
    /// The tenant's pool, if it has one.
    pub pool: Option<Pool>,
    /// The share of a contended device: the weight of the tenant's own plan, or
    /// else of its pool's plan.
    pub weight: f64,
    /// The models that the tenant may use; `None` means all.
    pub models: Option<BTreeSet<ModelName>>,
}

impl Tenant {
    /// Returns the plan that sets the tenant's prices: its own plan, or else its
    /// pool's.
    pub fn priced_as(&self) -> Option<&Arc<Plan>> {
        self.plan.as_ref().or(self.pool.as_ref().map(|pool| &pool.plan))
    }

    /// Returns true if the tenant may use `model`.
    pub fn allows(&self, model: &ModelName) -> bool {
        self.models.as_ref().is_none_or(|models| models.contains(model))
    }
}

/// A model to serve.
#[derive(Clone, Debug, PartialEq)]
pub struct Model {
    /// The model's name in requests.
    pub name: ModelName,
    /// The model's folder; `None` for the demo model.
    pub path: Option<PathBuf>,
    /// The devices that run the model; at least one.
    pub devices: Vec<DeviceSelector>,
    /// The plan with the limits for all callers of the model together, if any.
    pub plan: Option<Arc<Plan>>,
    /// The form in which the model writes calls of tools, if the config names one.
    pub tool_format: Option<ToolFormat>,
}

/// The section `cluster`: this machine's part in it, and its workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// The name that every certificate of the cluster has.
    pub name: ClusterName,
    /// The PEM file with the authority's certificates.
    pub ca: PathBuf,
    /// The PEM file with this machine's certificate chain.
    pub certificate: PathBuf,
    /// The PEM file with the certificate's private key.
    pub key: PathBuf,
    /// The workers on other machines, each with its host and port.
    pub workers: BTreeMap<WorkerName, HostPort>,
}

/// The section `cluster.postgres`: the server that has ledger and API keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Postgres {
    /// The URL of the database, without the password.
    pub url: String,
    /// The file with the password.
    pub password: Option<PathBuf>,
    /// The PEM file with the authority of the server's certificate.
    pub ca: Option<PathBuf>,
}

/// The section `cluster.redis`: the server on which gateways share rates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Redis {
    /// The URL of the server, without the password.
    pub url: String,
    /// The file with the password.
    pub password: Option<PathBuf>,
    /// The PEM file with the authority of the server's certificate.
    pub ca: Option<PathBuf>,
}

impl Config {
    /// Loads a config.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn load(sources: &Sources) -> Result<Self, ConfigErrors> {
        let mut problems = Vec::new();
        let gathered = sources.gather(&mut problems);
        Self::of_gathered(sources, gathered, problems)
    }

    /// Checks what was read from `sources`.
    fn of_gathered(
        sources: &Sources,
        gathered: Gathered,
        problems: Vec<Problem>,
    ) -> Result<Self, ConfigErrors> {
        let Gathered { tree, loaded, files } = gathered;
        let (config, _) = resolve(tree, problems)?;
        let config = Self { loaded, sources: Some(sources.clone()), ..config };
        Ok(config.with_files_at_load(files))
    }

    /// Returns every key with its value and place, as TOML. The output has no
    /// secrets, because a config contains only their paths.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn show(sources: &Sources) -> Result<String, ConfigErrors> {
        let mut problems = Vec::new();
        let Gathered { tree, .. } = sources.gather(&mut problems);
        let (config, tree) = resolve(tree, problems)?;
        Ok(show::whole(&config.root, &tree))
    }

    /// Returns the result of [`Self::show`] for a file of this name and text.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn show_toml(name: &Path, text: &str) -> Result<String, ConfigErrors> {
        let mut problems = Vec::new();
        let tree = crate::tree::parse(&Arc::new(name.to_owned()), text, &mut problems);
        let (config, tree) = resolve(tree, problems)?;
        Ok(show::whole(&config.root, &tree))
    }

    /// Loads a config from a text, as if it were in a file of this name.
    ///
    /// # Errors
    /// Every mistake in it, with place and key.
    pub fn from_toml(name: &Path, text: &str) -> Result<Self, ConfigErrors> {
        let mut problems = Vec::new();
        let tree = crate::tree::parse(&Arc::new(name.to_owned()), text, &mut problems);
        let (config, _) = resolve(tree, problems)?;
        let config = Self { loaded: Loaded::of_text(text), ..config };
        Ok(config.with_files_at_load(FilesHash::default()))
    }

    /// Returns the record of the config's sources.
    pub fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// Returns the number of reloads before this config. Of two configs of one gateway, the
    /// one with the larger number is the later one.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns the config file or folder that was named at the start.
    pub fn path(&self) -> Option<&Path> {
        self.sources.as_ref()?.path.as_deref()
    }

    /// Returns the data folder.
    pub fn data(&self) -> &Path {
        &self.data
    }

    /// Returns the section `gateway`.
    pub fn gateway(&self) -> &Gateway {
        &self.gateway
    }

    /// Returns the section `worker`.
    pub fn worker(&self) -> &Worker {
        &self.worker
    }

    /// Returns all plans.
    pub fn plans(&self) -> impl Iterator<Item = &Arc<Plan>> {
        self.plans.values()
    }

    /// Returns the plan of this name.
    pub fn plan(&self, name: &PlanName) -> Option<&Arc<Plan>> {
        self.plans.get(name)
    }

    /// Returns all pools.
    pub fn pools(&self) -> impl Iterator<Item = &Pool> {
        self.pools.values()
    }

    /// Returns the pool of this name.
    pub fn pool(&self, name: &PoolName) -> Option<&Pool> {
        self.pools.get(name)
    }

    /// Returns all tenants, sorted by name; at least one.
    pub fn tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().map(Arc::as_ref)
    }

    /// Returns the tenant of this name.
    pub fn tenant(&self, name: &TenantId) -> Option<&Arc<Tenant>> {
        self.tenant_places.get(name).map(|&place| &self.tenants[place])
    }

    /// Returns all models; at least one.
    pub fn models(&self) -> impl Iterator<Item = &Model> {
        self.models.values()
    }

    /// Returns the model of this name.
    pub fn model(&self, name: &ModelName) -> Option<&Model> {
        self.models.get(name)
    }

    /// Returns the token issuers.
    pub fn issuers(&self) -> &[Issuer] {
        &self.issuers
    }

    /// Returns the price book; `None` if there is no price list.
    pub fn prices(&self) -> Option<&PriceBook> {
        self.prices.as_ref()
    }

    /// Returns the server that has the ledger; `None` if a file has it.
    pub fn postgres(&self) -> Option<&Postgres> {
        self.postgres.as_ref()
    }

    /// Returns the section `cluster.redis`; `None` if it names no server.
    pub fn redis(&self) -> Option<&Redis> {
        self.redis.as_ref()
    }

    /// Returns the section `cluster`; `None` if it was not configured.
    pub fn cluster(&self) -> Option<&Arc<Cluster>> {
        self.cluster.as_ref()
    }

    /// Returns true if no tenant was configured, so that the demo tenant exists.
    pub fn is_demo(&self) -> bool {
        self.demo
    }

    /// Returns the JSON schema of config files.
    pub fn schema() -> serde_json::Value {
        schema::whole()
    }

    /// Returns a commented file with every key at its default.
    pub fn example() -> String {
        example::whole()
    }

    /// Returns the reference page of every key, in Markdown.
    pub fn reference() -> String {
        reference::whole()
    }
}

/// Reads and checks the sections of `tree`. Also returns the tree for the places of its
/// values. A config does not keep the tree, since there may be a hundred thousand tenants.
fn resolve(tree: Table, problems: Vec<Problem>) -> Result<(Config, Table), ConfigErrors> {
    let mut reader = Reader { problems };
    let (root, tree, demo) = read_sections(tree, &mut reader);
    let resolved = check::Checker { tree: &tree, root: &root, reader: &mut reader }.resolve(demo);
    // All checks run before the first error is returned, so that all mistakes are
    // reported.
    ConfigErrors::check(reader.problems)?;
    Ok((Config::new(root, resolved, demo), tree))
}

/// Reads the sections of `tree`, and adds the demo tenant and the demo model if no other
/// ones are named. The last value is true if there is a demo tenant.
#[expect(clippy::expect_used, reason = "the demo model has a constant name that follows the rules")]
fn read_sections(tree: Table, reader: &mut Reader) -> (Root, Table, bool) {
    let node = Node { place: Place::Default, value: Value::Table(tree) };
    let mut root = Root::read(Some(&node), "", reader);
    // The reader only borrowed the tree. The checks need it again for the places.
    let Value::Table(tree) = node.value else { unreachable!("it was made a table") };
    let named = tree.get("tenants");
    // A section of tenants with mistakes must not open the gateway to the demo
    // tenant.
    let demo = named.is_none_or(|node| node.table().is_some_and(Table::is_empty));
    if demo {
        add_demo_tenant(&mut root);
    }
    // A first start needs no files, because the demo model is part of the program.
    if root.models.is_empty() {
        let name = ModelName::new(DEMO_MODEL).expect("the name follows the rules");
        root.models.insert(name, Default::default());
    }
    (root, tree, demo)
}

impl Config {
    /// Makes the config of checked sections.
    fn new(root: Root, resolved: check::Resolved, demo: bool) -> Self {
        let check::Resolved {
            plans,
            pools,
            tenants,
            models,
            issuers,
            prices,
            cluster,
            postgres,
            redis,
        } = resolved;
        let (data, gateway, worker) =
            (root.data.clone(), root.gateway.clone(), root.worker.clone());
        // The map is in the order of names, which the list promises.
        let tenants: Vec<Arc<Tenant>> = tenants.into_values().map(Arc::new).collect();
        let places = tenants.iter().enumerate();
        let tenant_places = places.map(|(place, tenant)| (tenant.name.clone(), place)).collect();
        Self {
            data,
            gateway,
            worker,
            plans,
            pools,
            tenants,
            tenant_places,
            unraised: BTreeMap::new(),
            models,
            issuers,
            prices,
            cluster: cluster.map(Arc::new),
            postgres,
            redis,
            demo,
            loaded: Loaded::default(),
            root: Arc::new(root),
            sources: None,
            files_at_load: [0; 32],
            revision: 0,
        }
    }
}

/// Adds the demo tenant, and the demo plan unless a plan has that name already.
#[expect(
    clippy::expect_used,
    reason = "the demo tenant and its plan have a constant name that follows the rules"
)]
fn add_demo_tenant(root: &mut Root) {
    let plan = PlanName::new(DEMO).expect("the name follows the rules");
    let tenant = TenantId::new(DEMO).expect("the name follows the rules");
    root.plans.entry(plan.clone()).or_insert_with(|| RawPlan {
        requests_per_minute: Some(Rate::per_minute(600)),
        concurrent: Some(8),
        queued: Some(64),
        ..RawPlan::default()
    });
    root.tenants.insert(tenant, RawTenant { plan: Some(plan), ..RawTenant::default() });
}
