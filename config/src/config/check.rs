//! The checks across keys: names that must exist and limits that must agree. A
//! contradiction names both keys.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tollgate_domain::{
    ByClass, DEFAULT_GRAMMAR_TIME, DeviceClass, DeviceNanos, HELD_GRAMMAR_TIME, ModelName,
    PlanLimits, PlanName, PoolName, PriceBook, Rate, TenantId,
};

use super::{Cluster, Model, Plan, Pool, Postgres, Redis, Tenant};
use crate::problem::Place;
use crate::read::{DeviceRate, Reader, join, show_duration};
use crate::sections::{
    ClientFrom, DEMO_MODEL, Issuer, JwtKeys, RawCluster, RawIssuer, RawModel, RawPlan, RawPool,
    RawPostgres, RawRedis, RawRemoteWorker, RawTenant, Root,
};
use crate::tree::{Table, find};

/// The resolved sections.
pub(super) struct Resolved {
    pub(super) plans: BTreeMap<PlanName, Arc<Plan>>,
    pub(super) pools: BTreeMap<PoolName, Pool>,
    pub(super) tenants: BTreeMap<TenantId, Tenant>,
    pub(super) models: BTreeMap<ModelName, Model>,
    pub(super) issuers: Vec<Issuer>,
    pub(super) prices: Option<PriceBook>,
    pub(super) cluster: Option<Cluster>,
    pub(super) postgres: Option<Postgres>,
    pub(super) redis: Option<Redis>,
}

pub(super) struct Checker<'a> {
    pub(super) tree: &'a Table,
    pub(super) root: &'a Root,
    pub(super) reader: &'a mut Reader,
}

impl Checker<'_> {
    /// Resolves the sections. Records a problem for each part that cannot be
    /// resolved.
    pub(super) fn resolve(mut self, demo: bool) -> Resolved {
        self.listeners(demo);
        self.gateway();
        self.worker();
        let root = self.root;
        // Plans come first, because models, pools and tenants refer to them.
        let plans: BTreeMap<_, _> =
            root.plans.iter().map(|(name, raw)| self.plan(name, raw)).collect();
        let models = root.models.iter().map(|(name, raw)| self.model(name, raw, &plans)).collect();
        let pools: BTreeMap<_, _> =
            root.pools.iter().filter_map(|(name, raw)| self.pool(name, raw, &plans)).collect();
        let tenants = root
            .tenants
            .iter()
            .filter_map(|(name, raw)| self.tenant(name, raw, &plans, &pools))
            .collect();
        // Runs after tenants are resolved, because only a tenant connects a plan
        // with a pool.
        self.plans_fit_pools(&tenants);
        let mut issuers = Vec::new();
        for (name, raw) in &root.auth.jwt {
            if let Some(issuer) = self.issuer(name.as_str(), raw) {
                self.issuer_is_new(&issuers, &issuer);
                issuers.push(issuer);
            }
        }
        let prices = self.prices(&plans);
        self.budgets_have_prices();
        let cluster = self.cluster();
        let postgres = self.postgres();
        let redis = self.redis();
        self.shared_jobs();
        Resolved { plans, pools, tenants, models, issuers, prices, cluster, postgres, redis }
    }

    /// Returns the place of a key.
    pub(super) fn place(&self, keys: &[&str]) -> Place {
        find(self.tree, keys).map_or(Place::Default, |node| node.place.clone())
    }

    pub(super) fn is_given(&self, keys: &[&str]) -> bool {
        find(self.tree, keys).is_some()
    }

    pub(super) fn problem(&mut self, keys: &[&str], message: impl Into<String>) {
        // A missing key is reported at the place of its table.
        let mut place = Place::Default;
        for depth in 1..=keys.len() {
            if let Some(node) = find(self.tree, &keys[..depth]) {
                place = node.place.clone();
            }
        }
        self.reader.problem(&place, &dotted(keys), message);
    }

    fn listeners(&mut self, demo: bool) {
        let gateway = &self.root.gateway;
        let (listen, admin) = (gateway.listen, gateway.admin_listen);
        if collide(listen, admin) {
            let place = self.place(&["gateway", "listen"]);
            self.problem(
                &["gateway", "admin_listen"],
                format!("{admin} is already used by gateway.listen, {listen} ({place})"),
            );
        }
        // No admin chose the demo tenant, so only this host may reach it.
        if demo && !listen.ip().is_loopback() {
            self.problem(
                &["gateway", "listen"],
                format!(
                    "{listen} can be reached from other hosts, but no tenant is configured; the demo \
                     tenant is for loopback only: configure tenants or listen on 127.0.0.1"
                ),
            );
        }
    }

    fn gateway(&mut self) {
        let gateway = &self.root.gateway;
        // A certificate cannot be used without its key, and a key not without its
        // certificate.
        match (&gateway.tls.certificate, &gateway.tls.key) {
            (Some(_), None) => {
                self.problem(&["gateway", "tls", "certificate"], "also needs gateway.tls.key");
            }
            (None, Some(_)) => {
                self.problem(&["gateway", "tls", "key"], "also needs gateway.tls.certificate");
            }
            _ => {}
        }
        let files = [("certificate", &gateway.tls.certificate), ("key", &gateway.tls.key)];
        for (key, path) in files {
            self.exists(&["gateway", "tls", key], path.as_slice());
        }
        let webhook = &gateway.webhook;
        if webhook.url.is_some() && webhook.secret.is_none() {
            self.problem(&["gateway", "webhook", "url"], "also needs gateway.webhook.secret");
        }
        for (key, path) in [("secret", &webhook.secret), ("ca", &webhook.ca)] {
            self.exists(&["gateway", "webhook", key], path.as_slice());
        }
        // Each pair of limits is checked here, because each key alone can be valid.
        let (queue, request) = (gateway.deadlines.queue, gateway.deadlines.request);
        // A request that may wait longer than its deadline would always end in the
        // queue.
        if queue > request {
            let place = self.place(&["gateway", "deadlines", "request"]);
            self.problem(
                &["gateway", "deadlines", "queue"],
                format!(
                    "{queue:?} is longer than gateway.deadlines.request, {request:?} ({place})"
                ),
            );
        }
        if gateway.proxies.client_from == ClientFrom::ProxyV2 && gateway.proxies.trusted.is_empty()
        {
            self.problem(
                &["gateway", "proxies", "client_from"],
                "also needs gateway.proxies.trusted; otherwise no proxy is trusted",
            );
        }
        let (source, total) = (gateway.connections.per_source, gateway.connections.total);
        // A limit of one source above the total would never apply.
        if source > total {
            let place = self.place(&["gateway", "connections", "total"]);
            self.problem(
                &["gateway", "connections", "per_source"],
                format!("{source} is more than gateway.connections.total, {total} ({place})"),
            );
        }
    }

    fn worker(&mut self) {
        let synthetic = &self.root.worker.synthetic;
        let (sequence, prefill) = (synthetic.sequence, synthetic.prefill_token);
        if sequence < prefill {
            let place = self.place(&["worker", "synthetic", "prefill_token"]);
            self.problem(
                &["worker", "synthetic", "sequence"],
                format!(
                    "{} is less than worker.synthetic.prefill_token, {} ({place}); a sampled \
                     token costs at least as much as a prompt token",
                    show_duration(sequence.as_nanos() as u64),
                    show_duration(prefill.as_nanos() as u64),
                ),
            );
        }
    }

    fn cluster(&mut self) -> Option<Cluster> {
        let root = self.root;
        // The example file has the empty table, which means nothing.
        let keys = ["name", "ca", "certificate", "key", "workers"];
        if !keys.iter().any(|key| self.is_given(&["cluster", key])) {
            return None;
        }
        let RawCluster { name, ca, certificate, key, workers, postgres: _, redis: _ } =
            &root.cluster;
        for (field, path) in [("ca", ca), ("certificate", certificate), ("key", key)] {
            self.exists(&["cluster", field], path.as_slice());
            if path.is_none() && !self.is_given(&["cluster", field]) {
                self.problem(&["cluster", field], "is required in [cluster]");
            }
        }
        match name {
            // The slash would make the names in certificates ambiguous.
            Some(name) if name.as_str().contains(['/', ':']) => {
                self.problem(&["cluster", "name"], format!("{name} must not contain / or :"));
            }
            None if !self.is_given(&["cluster", "name"]) => {
                self.problem(&["cluster", "name"], "is required in [cluster]");
            }
            _ => {}
        }
        let mut addresses = BTreeMap::new();
        for (worker, RawRemoteWorker { address }) in workers {
            let keys = ["cluster", "workers", worker.as_str(), "address"];
            match address {
                Some(address) => _ = addresses.insert(worker.clone(), address.clone()),
                None if self.is_given(&keys) => {}
                None => self.problem(&keys, "is required: the worker's host and port"),
            }
        }
        Some(Cluster {
            name: name.clone()?,
            ca: ca.clone()?,
            certificate: certificate.clone()?,
            key: key.clone()?,
            workers: addresses,
        })
    }

    fn postgres(&mut self) -> Option<Postgres> {
        let RawPostgres { url, password, ca } = &self.root.cluster.postgres;
        let keys = |key| ["cluster", "postgres", key];
        self.exists(&keys("password"), password.as_slice());
        self.exists(&keys("ca"), ca.as_slice());
        let is_given = ["url", "password", "ca"].iter().any(|key| self.is_given(&keys(key)));
        if is_given && !self.is_given(&keys("url")) {
            self.problem(&keys("url"), "is required in [cluster.postgres]");
        }
        Some(Postgres { url: url.clone()?, password: password.clone(), ca: ca.clone() })
    }

    fn redis(&mut self) -> Option<Redis> {
        let RawRedis { url, password, ca } = &self.root.cluster.redis;
        let keys = |key| ["cluster", "redis", key];
        self.exists(&keys("password"), password.as_slice());
        self.exists(&keys("ca"), ca.as_slice());
        let is_given = ["url", "password", "ca"].iter().any(|key| self.is_given(&keys(key)));
        if is_given && !self.is_given(&keys("url")) {
            self.problem(&keys("url"), "is required in [cluster.redis]");
        }
        let url = url.clone()?;
        if !self.is_given(&["cluster", "postgres", "url"]) {
            self.problem(
                &keys("url"),
                "also needs [cluster.postgres], which has the number of each gateway",
            );
        }
        Some(Redis { url, password: password.clone(), ca: ca.clone() })
    }

    /// Refuses a shared folder of batches without the server that lists them: two gateways with
    /// lists of their own would delete each other's files.
    fn shared_jobs(&mut self) {
        let is_given = self.is_given(&["cluster", "postgres", "url"]);
        if self.root.gateway.jobs.folder.is_some() && !is_given {
            self.problem(
                &["gateway", "jobs", "folder"],
                "also needs [cluster.postgres], which has the list of files and batches",
            );
        }
    }

    /// Records a problem for each path that does not exist.
    fn exists(&mut self, keys: &[&str], paths: &[PathBuf]) {
        for path in paths {
            // A wrong path must fail the start, not the first request.
            if !path.exists() {
                self.problem(keys, format!("{} does not exist", path.display()));
            }
        }
    }

    fn model(
        &mut self,
        name: &ModelName,
        raw: &RawModel,
        plans: &BTreeMap<PlanName, Arc<Plan>>,
    ) -> (ModelName, Model) {
        let RawModel { path, devices, plan, tool_format } = raw;
        let keys = ["models", name.as_str(), "path"];
        match path {
            // Other servers take such an id and download the model.
            Some(path) if !path.exists() && is_hub_id(path) => {
                let path = path.display();
                self.problem(
                    &keys,
                    format!(
                        "{path} does not exist; models are not downloaded: name the folder of one"
                    ),
                );
            }
            Some(path) => self.exists(&keys, std::slice::from_ref(path)),
            None if name.as_str() == DEMO_MODEL || self.is_given(&keys) => {}
            None => self.problem(
                &keys,
                format!(
                    "is required; only {DEMO_MODEL} is part of the program and needs no folder"
                ),
            ),
        }
        let keys = ["models", name.as_str(), "plan"];
        let plan = plan.as_ref().and_then(|plan| self.named_plan(&keys, Some(plan), plans));
        let plan = plan.map(|plan| {
            // The default is for one tenant; all tenants together share a model.
            match self.is_given(&["plans", plan.name.as_str(), GRAMMAR_TIME]) {
                true => plan,
                false => Arc::new(plan.without_grammar_time()),
            }
        });
        let (path, devices) = (path.clone(), devices.clone());
        let tool_format = *tool_format;
        (name.clone(), Model { name: name.clone(), path, devices, plan, tool_format })
    }

    fn plan(&mut self, name: &PlanName, raw: &RawPlan) -> (PlanName, Arc<Plan>) {
        let RawPlan {
            requests_per_minute: _,
            tokens_per_minute: _,
            concurrent,
            queued,
            connections,
            largest_job,
            device_time_per_minute,
            grammar_time_per_minute,
            device_time_per_day,
            device_time_per_month,
            budget_per_month: _,
            flex,
            weight,
            batches,
        } = raw;
        // An invalid `concurrent` is reported already, so only a missing one counts
        // here.
        if concurrent.is_none()
            && queued.is_some()
            && !self.is_given(&["plans", name.as_str(), "concurrent"])
        {
            self.problem(
                &["plans", name.as_str(), "queued"],
                "also needs concurrent: without a limit no request waits",
            );
        }
        let held = HELD_GRAMMAR_TIME.as_nanos() as u64;
        if grammar_time_per_minute.is_some_and(|DeviceRate(rate)| rate.burst < held) {
            self.problem(
                &["plans", name.as_str(), GRAMMAR_TIME],
                format!(
                    "must allow {} at once: a request whose answer has a form takes that much in advance",
                    show_duration(held)
                ),
            );
        }
        let bursts = convert(device_time_per_minute, |DeviceRate(rate)| DeviceNanos(rate.burst));
        let (largest, day): (&[&str], &[&str]) = (&["largest_job"], &["device_time_per_day"]);
        let (minute, month): (&[&str], &[&str]) =
            (&["device_time_per_minute"], &["device_time_per_month"]);
        let of_batches: &[&str] = &["batches", "device_time_per_day"];
        // A value above the other limit could never be reached.
        for (small, large) in [
            ((largest, largest_job), (day, device_time_per_day)),
            ((largest, largest_job), (month, device_time_per_month)),
            ((largest, largest_job), (minute, &bursts)),
            ((day, device_time_per_day), (month, device_time_per_month)),
            ((of_batches, &batches.device_time_per_day), (day, device_time_per_day)),
            ((of_batches, &batches.device_time_per_day), (month, device_time_per_month)),
        ] {
            let (small_key, small) = small;
            let (large_key, large) = large;
            self.at_most((name, small_key, small), (name, large_key, large), "");
        }
        let plan = Plan {
            name: name.clone(),
            limits: Arc::new(plan_limits(raw)),
            connections: *connections,
            flex: *flex,
            batches: batches.clone(),
            made: Arc::new(PlanLimits {
                requests: Some(batches.made_per_minute),
                ..PlanLimits::default()
            }),
            batch_caps: Arc::new(PlanLimits {
                device_time_per_day: batches.device_time_per_day.clone(),
                ..PlanLimits::default()
            }),
            weight: *weight,
        };
        (name.clone(), Arc::new(plan))
    }

    /// A request that a tenant's own plan admits must be possible under its pool's
    /// plan. Each pair of plans is reported once.
    fn plans_fit_pools(&mut self, tenants: &BTreeMap<TenantId, Tenant>) {
        let mut seen = BTreeSet::new();
        for tenant in tenants.values() {
            let (Some(own), Some(pool)) = (&tenant.plan, &tenant.pool) else { continue };
            // A plan is compared with itself where it is read.
            if own.name == pool.plan.name || !seen.insert((&own.name, &pool.plan.name)) {
                continue;
            }
            let shared = &pool.plan.limits;
            let bursts = convert(&shared.device_time, |rate| DeviceNanos(rate.burst));
            let both = format!("; {} has both", dotted(&["tenants", tenant.name.as_str()]));
            for (key, large) in [
                ("device_time_per_day", &shared.device_time_per_day),
                ("device_time_per_month", &shared.device_time_per_month),
                ("device_time_per_minute", &bursts),
            ] {
                self.at_most(
                    (&own.name, &["largest_job"], &own.limits.largest_job),
                    (&pool.plan.name, &[key], large),
                    &both,
                );
            }
        }
    }

    /// Checks that for every class `small` is at most `large`. `reason` is added to
    /// the message to say why both limits apply.
    fn at_most(
        &mut self,
        (small_plan, small_keys, small): PlanKey<'_>,
        (large_plan, large_keys, large): PlanKey<'_>,
        reason: &str,
    ) {
        // A class that one key does not name has the default of that key.
        let named: BTreeSet<&DeviceClass> =
            small.classes.keys().chain(large.classes.keys()).collect();
        let mut cases = vec![("every other class".to_owned(), small.default, large.default)];
        for class in named {
            cases.push((format!("class {class}"), small.limit(class), large.limit(class)));
        }
        for (class, small, large) in cases {
            // A missing limit allows everything, so it contradicts nothing.
            let (Some(small), Some(large)) = (small, large) else { continue };
            if small <= large {
                continue;
            }
            let large_path = [&["plans", large_plan.as_str()], large_keys].concat();
            let (place, large_path) = (self.place(&large_path), dotted(&large_path));
            self.problem(
                &[&["plans", small_plan.as_str()], small_keys].concat(),
                format!(
                    "{} for {class} is more than {large_path} allows, {} ({place}){reason}",
                    show_duration(small.nanos()),
                    show_duration(large.nanos()),
                ),
            );
            return; // one contradiction between two keys is one problem
        }
    }

    fn pool(
        &mut self,
        name: &PoolName,
        raw: &RawPool,
        plans: &BTreeMap<PlanName, Arc<Plan>>,
    ) -> Option<(PoolName, Pool)> {
        let RawPool { plan } = raw;
        let keys = ["pools", name.as_str(), "plan"];
        let plan = self.named_plan(&keys, plan.as_ref(), plans)?;
        Some((name.clone(), Pool { name: name.clone(), plan }))
    }

    pub(super) fn named_plan(
        &mut self,
        keys: &[&str],
        plan: Option<&PlanName>,
        plans: &BTreeMap<PlanName, Arc<Plan>>,
    ) -> Option<Arc<Plan>> {
        let Some(plan) = plan else {
            // A value that is given but invalid is reported already.
            if !self.is_given(keys) {
                self.problem(keys, "is required");
            }
            return None;
        };
        let found = plans.get(plan).cloned();
        if found.is_none() {
            self.unknown("plan", keys, plan.as_str(), plans.keys().map(PlanName::as_str));
        }
        found
    }

    fn unknown<'n>(
        &mut self,
        kind: &str,
        keys: &[&str],
        name: &str,
        known: impl Iterator<Item = &'n str>,
    ) {
        self.problem(keys, unknown_text(kind, name, known));
    }

    fn tenant(
        &mut self,
        name: &TenantId,
        raw: &RawTenant,
        plans: &BTreeMap<PlanName, Arc<Plan>>,
        pools: &BTreeMap<PoolName, Pool>,
    ) -> Option<(TenantId, Tenant)> {
        let RawTenant { plan, pool, models } = raw;
        let tenant = name.as_str();
        for model in models.iter().flatten() {
            if !self.root.models.contains_key(model) {
                let known = self.root.models.keys().map(ModelName::as_str);
                self.unknown("model", &["tenants", tenant, "models"], model.as_str(), known);
            }
        }
        let given = |key| self.is_given(&["tenants", tenant, key]);
        if !given("plan") && !given("pool") && plan.is_none() && pool.is_none() {
            self.problem(&["tenants", tenant], "needs plan or pool");
        }
        let own = plan
            .as_ref()
            .and_then(|plan| self.named_plan(&["tenants", tenant, "plan"], Some(plan), plans));
        let shared = pool.as_ref().and_then(|pool| self.named_pool(tenant, pool, pools));
        // A name that was not found is recorded already. The tenant is dropped, so
        // that it never gets fewer limits than its config gives.
        if own.is_some() != plan.is_some() || shared.is_some() != pool.is_some() {
            return None;
        }
        let weight = own.as_ref().or(shared.as_ref().map(|pool| &pool.plan))?.weight;
        let models = models.clone();
        Some((name.clone(), Tenant { name: name.clone(), plan: own, pool: shared, weight, models }))
    }

    fn named_pool(
        &mut self,
        tenant: &str,
        pool: &PoolName,
        pools: &BTreeMap<PoolName, Pool>,
    ) -> Option<Pool> {
        let found = pools.get(pool).cloned();
        // A pool that exists but could not be resolved has its own problem.
        if found.is_none() && !self.root.pools.contains_key(pool) {
            let known = self.root.pools.keys().map(PoolName::as_str);
            self.unknown("pool", &["tenants", tenant, "pool"], pool.as_str(), known);
        }
        found
    }

    fn issuer(&mut self, name: &str, raw: &RawIssuer) -> Option<Issuer> {
        let RawIssuer { issuer, audience, algorithms, tenant_claim, tenants, leeway, .. } = raw;
        for (key, missing) in [
            ("issuer", issuer.is_none()),
            ("audience", audience.is_none()),
            ("algorithms", algorithms.is_empty()),
        ] {
            // A value that is given but invalid is reported already.
            if missing && !self.is_given(&["auth", "jwt", name, key]) {
                self.problem(&["auth", "jwt", name, key], "is required");
            }
        }
        // A typing error here would lock the tenant out without a message.
        for tenant in tenants.iter().flatten() {
            if !self.root.tenants.contains_key(tenant) {
                let known = self.root.tenants.keys().map(TenantId::as_str);
                let keys = ["auth", "jwt", name, "tenants"];
                self.unknown("tenant", &keys, tenant.as_str(), known);
            }
        }
        let keys = self.issuer_keys(name, raw)?;
        let is_pem = matches!(keys, JwtKeys::Pem(_));
        let families: BTreeSet<&str> = algorithms.iter().map(|known| known.family()).collect();
        if is_pem && families.len() > 1 {
            let families: Vec<&str> = families.into_iter().collect();
            self.problem(
                &["auth", "jwt", name, "algorithms"],
                format!(
                    "needs one issuer for each key family ({}): one set of keys has one family",
                    families.join(", ")
                ),
            );
        }
        Some(Issuer {
            name: name.to_owned(),
            issuer: issuer.clone()?,
            audience: audience.clone()?,
            algorithms: algorithms.clone(),
            keys,
            tenant_claim: tenant_claim.clone(),
            tenants: tenants.clone(),
            leeway: *leeway,
        })
    }

    /// Returns the source of an issuer's keys. Exactly one source must be given.
    fn issuer_keys(&mut self, name: &str, raw: &RawIssuer) -> Option<JwtKeys> {
        let RawIssuer { keys, jwks, jwks_url, jwks_ca, jwks_refresh, .. } = raw;
        let at = |key| ["auth", "jwt", name, key];
        self.exists(&at("keys"), keys);
        self.exists(&at("jwks"), jwks.as_slice());
        self.exists(&at("jwks_ca"), jwks_ca.as_slice());
        let pem = (!keys.is_empty()).then(|| ("keys", JwtKeys::Pem(keys.clone())));
        let file = jwks.as_ref().map(|path| ("jwks", JwtKeys::Jwks(path.clone())));
        let url = jwks_url.as_ref().map(|url| {
            let (url, ca, refresh) = (url.clone(), jwks_ca.clone(), *jwks_refresh);
            ("jwks_url", JwtKeys::Url { url, ca, refresh })
        });
        if url.is_none() && jwks_ca.is_some() && !self.is_given(&at("jwks_url")) {
            self.problem(&at("jwks_ca"), "also needs jwks_url");
        }
        let mut found = [pem, file, url].into_iter().flatten();
        let Some((key, keys)) = found.next() else {
            // A source that is given but invalid is reported already.
            if !["keys", "jwks", "jwks_url"].iter().any(|key| self.is_given(&at(key))) {
                self.problem(&["auth", "jwt", name], "needs keys, jwks or jwks_url");
            }
            return None;
        };
        if let Some((other, _)) = found.next() {
            let place = self.place(&at(other));
            let other = dotted(&at(other));
            self.problem(
                &at(key),
                format!("conflicts with {other} ({place}); an issuer has one source of keys"),
            );
            return None;
        }
        Some(keys)
    }

    /// Checks that a token can have only one issuer.
    fn issuer_is_new(&mut self, known: &[Issuer], new: &Issuer) {
        let same =
            known.iter().find(|known| known.issuer == new.issuer && known.audience == new.audience);
        if let Some(same) = same {
            let place = self.place(&["auth", "jwt", &same.name, "issuer"]);
            let other = dotted(&["auth", "jwt", &same.name, "issuer"]);
            self.problem(
                &["auth", "jwt", &new.name, "issuer"],
                format!("{:?} with the same audience is also {other} ({place})", new.issuer),
            );
        }
    }
}

/// The key of the limit on grammar time.
const GRAMMAR_TIME: &str = "grammar_time_per_minute";

/// A limit by class, with its plan and the keys within the plan.
type PlanKey<'a> = (&'a PlanName, &'a [&'a str], &'a ByClass<DeviceNanos>);

pub(super) fn dotted(keys: &[&str]) -> String {
    keys.iter().fold(String::new(), |path, key| join(&path, key))
}

/// Returns the message about a name that the config does not define.
pub(super) fn unknown_text<'n>(
    kind: &str,
    name: &str,
    known: impl Iterator<Item = &'n str>,
) -> String {
    // The first few are enough to notice a typing error; there may be thousands.
    let known: Vec<&str> = known.take(8).collect();
    let known = if known.is_empty() { "none".to_owned() } else { known.join(", ") };
    format!("unknown {kind} {name:?}; known: {known}")
}

/// Returns the limits of a plan.
pub(crate) fn plan_limits(raw: &RawPlan) -> PlanLimits {
    PlanLimits {
        requests: raw.requests_per_minute,
        tokens: raw.tokens_per_minute,
        device_time: convert(&raw.device_time_per_minute, |DeviceRate(rate)| *rate),
        grammar_time: grammar_time(raw).or(Some(DEFAULT_GRAMMAR_TIME)),
        device_time_per_day: raw.device_time_per_day.clone(),
        device_time_per_month: raw.device_time_per_month.clone(),
        budget_per_month: raw.budget_per_month,
        concurrent: raw.concurrent,
        // A limit on running requests without a queue means that no request
        // waits.
        queued: raw.queued.or(raw.concurrent.map(|_| 0)),
        largest_job: raw.largest_job.clone(),
    }
}

/// Returns the limit on grammar time that a plan sets.
pub(crate) fn grammar_time(raw: &RawPlan) -> Option<Rate> {
    raw.grammar_time_per_minute.map(|DeviceRate(rate)| rate)
}

/// Returns true if `path` could be the id of a model on a hub: `OWNER/NAME`.
fn is_hub_id(path: &Path) -> bool {
    path.is_relative() && path.components().count() == 2
}

/// Returns true if two listeners need the same port of the same address.
fn collide(a: SocketAddr, b: SocketAddr) -> bool {
    // An unspecified address includes every address of the host.
    let same_address = a.ip() == b.ip() || a.ip().is_unspecified() || b.ip().is_unspecified();
    // Port 0 takes a free port, so it never collides.
    a.port() != 0 && a.port() == b.port() && same_address
}

fn convert<T, U>(limits: &ByClass<T>, to: impl Fn(&T) -> U) -> ByClass<U> {
    ByClass {
        default: limits.default.as_ref().map(&to),
        classes: limits.classes.iter().map(|(class, value)| (class.clone(), to(value))).collect(),
    }
}
