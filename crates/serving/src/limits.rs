//! The limits that bind a caller: the scopes of a request, narrowest first, and,
//! at the start, the spending that each scope already has. A key's plan is
//! looked up by name; a key with a plan that the config does not define
//! is refused.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use tollgate_admission::{
    Admission, AdmissionOptions, AdmissionStatus, HeldRequests, LimitChange, LimitState, Moment,
    NewLimits, PastSpend, Period, Requester, Scope, ScopeLimits,
};
use tollgate_config::{Config, LiveConfig, Plan, Tenant};
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, KeyId, ModelName, MonotonicTime, PlanLimits, PlanName,
    PoolName, Priced, TenantId, Tier, UtcDay,
};
use tollgate_ledger::{PricedRow, SpendRow, Spending};

use crate::error::Refusal;
use crate::keys::KeyDirectory;

mod money;

pub(crate) use self::money::prices;

/// The limits of all tenants. Clones share them.
#[derive(Clone)]
pub struct Limits {
    admission: Admission,
    config: LiveConfig,
    keys: Arc<dyn KeyDirectory>,
}

/// A tenant and the config that defines it. A request keeps both to its end, also if a
/// reload replaces the config.
#[derive(Clone, Debug)]
pub struct ConfiguredTenant {
    config: Arc<Config>,
    tenant: Arc<Tenant>,
}

/// A known caller with the tenant and the limits that bind a request of the caller.
/// [`Limits::caller_context`] makes it for a request, and [`Limits::line_context`] for a line of
/// a batch, which takes nothing from the request rates.
#[derive(Clone, Debug)]
pub struct CallerContext {
    caller: Caller,
    tenant: ConfiguredTenant,
    /// The scopes that bind every request of the caller, narrowest first.
    scopes: Vec<ScopeLimits>,
    /// False if the request rates have not counted the request, because this gateway lacks
    /// parts of them.
    is_counted: bool,
}

/// The owner of a share of the devices, with its kind: a pool and a tenant may have
/// the same name.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ShareOwner {
    /// The tenants of a pool that have no plan of their own.
    Pool(PoolName),
    /// A tenant with a plan of its own, or without a pool.
    Tenant(TenantId),
}

/// The limits that bind one request.
#[derive(Debug)]
pub(crate) struct BindingLimits {
    /// Every scope that limits the request, narrowest first.
    pub(crate) scopes: Vec<ScopeLimits>,
    /// Number of scopes, from the first, whose request rate has counted the request.
    pub(crate) counted: usize,
    /// The pool that owns the request's share of a contended device; `None` if the
    /// tenant owns the share.
    pub(crate) pool: Option<PoolName>,
    /// The weight of that share.
    pub(crate) weight: f64,
}

/// The spending of the lines of a tenant's batches on one class of device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSpend {
    /// The tenant.
    pub tenant: TenantId,
    /// The class of the devices.
    pub class: DeviceClass,
    /// The reference cost.
    pub reference: DeviceNanos,
}

/// The spending of a day and its month that a reload counts.
#[derive(Clone, Debug)]
pub struct PastSpending {
    /// The sums of the ledger.
    pub ledger: Spending,
    /// The part of the day that is from lines of batches.
    pub batches: Vec<BatchSpend>,
}

/// Spending of an earlier gateway that reached the ledger after this gateway had
/// read the ledger's sums.
#[derive(Clone, Debug)]
pub(crate) struct BackfilledSpend {
    /// The day on which the work ended.
    pub(crate) day: UtcDay,
    pub(crate) row: SpendRow,
    pub(crate) tier: Tier,
    /// The figures that have a price.
    pub(crate) used: Priced,
}

impl ConfiguredTenant {
    /// Finds the tenant `name` in `config`.
    pub fn find(config: &Arc<Config>, name: &TenantId) -> Option<Self> {
        let tenant = Arc::clone(config.tenant(name)?);
        Some(Self { config: Arc::clone(config), tenant })
    }

    /// Returns the config that defines the tenant.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Returns the tenant.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Returns the owner of the share of the devices on which the tenant's requests run.
    pub fn share_owner(&self) -> ShareOwner {
        match self.shared_pool() {
            Some(pool) => ShareOwner::Pool(pool.clone()),
            None => ShareOwner::Tenant(self.tenant.name.clone()),
        }
    }

    /// Returns the tenant's pool if the tenant has no plan, and so no share, of its own.
    fn shared_pool(&self) -> Option<&PoolName> {
        match self.tenant.plan {
            None => self.tenant.pool.as_ref().map(|pool| &pool.name),
            Some(_) => None,
        }
    }
}

impl CallerContext {
    /// Returns the caller.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the caller's tenant.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant.tenant
    }

    /// Returns the scopes that bind every request of the caller, narrowest first.
    pub(crate) fn scopes(&self) -> &[ScopeLimits] {
        &self.scopes
    }

    /// Returns true if the request rates have counted the request.
    pub(crate) fn is_counted(&self) -> bool {
        self.is_counted
    }

    /// Returns the config that the request keeps to its end.
    pub fn config(&self) -> &Config {
        &self.tenant.config
    }

    /// Returns the owner of the share of the devices on which the caller's requests
    /// run.
    pub fn share_owner(&self) -> ShareOwner {
        self.tenant.share_owner()
    }

    /// Returns the tenant, and the pool whose share it has, for the queues of shared limits.
    pub(crate) fn requester(&self) -> Requester {
        Requester { tenant: self.tenant().name.clone(), pool: self.shared_pool().cloned() }
    }

    fn shared_pool(&self) -> Option<&PoolName> {
        self.tenant.shared_pool()
    }
}

impl Limits {
    /// Makes the limits of `config` over `admission`. `keys` names the plan of
    /// each key.
    pub fn new(admission: Admission, config: LiveConfig, keys: Arc<dyn KeyDirectory>) -> Self {
        Self { admission, config, keys }
    }

    /// Finds the limits that bind every request of `caller`, whatever the request
    /// asks for, and takes one request from each of their request rates, or from
    /// none. The request stays taken, whatever becomes of it. `key_plan` is the plan
    /// of the caller's key. If this gateway lacks parts of a rate that it may get, nothing is
    /// taken, and the request must be [counted](crate::Serving::count) before it is admitted.
    ///
    /// # Errors
    /// [`Refusal::PlanNotConfigured`]: a missing plan must not mean no limit.
    /// [`Refusal::Limit`]: a request rate is spent.
    pub fn caller_context(
        &self,
        now: MonotonicTime,
        caller: Caller,
        key_plan: Option<&PlanName>,
        tenant: ConfiguredTenant,
    ) -> Result<CallerContext, Refusal> {
        let scopes = self.caller_scopes(&caller, key_plan, &tenant)?;
        let is_counted = match self.admission.take_request_or_ask(now, &scopes) {
            Ok(taken) => taken.map(|()| true)?,
            Err(_) => false,
        };
        Ok(CallerContext { caller, tenant, scopes, is_counted })
    }

    /// Finds the limits that bind every line of a batch of `caller`. Takes nothing.
    ///
    /// # Errors
    /// [`Refusal::PlanNotConfigured`]: a missing plan must not mean no limit.
    pub fn line_context(
        &self,
        caller: Caller,
        key_plan: Option<&PlanName>,
        tenant: ConfiguredTenant,
    ) -> Result<CallerContext, Refusal> {
        let mut scopes = self.caller_scopes(&caller, key_plan, &tenant)?;
        scopes.extend(batch_limits(&tenant.config, &tenant.tenant));
        Ok(CallerContext { caller, tenant, scopes, is_counted: true })
    }

    /// Returns the limits that bind every request of `caller`, narrowest first. Takes
    /// nothing.
    ///
    /// # Errors
    /// [`Refusal::PlanNotConfigured`]: a missing plan must not mean no limit.
    pub fn caller_scopes(
        &self,
        caller: &Caller,
        key_plan: Option<&PlanName>,
        tenant: &ConfiguredTenant,
    ) -> Result<Vec<ScopeLimits>, Refusal> {
        let config = &tenant.config;
        // Narrowest first: the key's limits, the tenant's, the pool's. A refusal by a
        // narrow limit must not take from a wide one.
        let of_key = key_plan.map(|plan| {
            key_limits(config, &caller.key, plan).ok_or_else(|| {
                // The plans known at the start or a reload are logged there. This is a key
                // made since then with a config that this process has not read.
                tracing::debug!(key = %caller.key, %plan, "config does not define a key's plan; the request is refused");
                Refusal::PlanNotConfigured { plan: plan.clone() }
            })
        });
        Ok(of_key.transpose()?.into_iter().chain(tenant_limits(config, &tenant.tenant)).collect())
    }

    /// Returns the state of every limit of `scopes`, in their order, and of the limits by
    /// device class for each of `classes`. Takes nothing.
    pub fn states(
        &self,
        moment: Moment,
        scopes: &[ScopeLimits],
        classes: &[DeviceClass],
    ) -> Vec<LimitState> {
        self.admission.limit_states(moment, scopes, classes)
    }

    /// Returns the number of requests of each tenant that run and wait.
    pub fn held_by_tenant(&self) -> HashMap<TenantId, HeldRequests> {
        self.admission.held_by_tenant()
    }

    /// Adds the model's limits to the caller's and chooses the share on which the
    /// request runs.
    pub(crate) fn bind(&self, context: &CallerContext, model: &ModelName) -> BindingLimits {
        let mut scopes = context.scopes.clone();
        let counted = scopes.len();
        // All tenants share the model's limits, so they are the widest. The head of a
        // request does not name the model, so its rate has not counted the request.
        scopes.extend(model_limits(context.config(), model));
        let pool = context.shared_pool().cloned();
        BindingLimits { scopes, counted, pool, weight: context.tenant().weight }
    }

    /// Restores the spending of `today` and its month in every scope that has such
    /// a cap. Tenants and plans that the config no longer has keep no limit.
    pub fn restore_spend(&self, spending: Spending, today: UtcDay) {
        let config = self.config.current();
        for row in &spending.priced {
            self.restore_cost(&config, row);
        }
        for (period, row) in by_period(spending, today) {
            self.restore_row(&config, period, &row);
        }
    }

    /// Restores what the lines of batches have spent on `today`, in every scope that has a cap
    /// for them.
    pub fn restore_batches(&self, spent: &[BatchSpend], today: UtcDay) {
        let config = self.config.current();
        for BatchSpend { tenant, class, reference } in spent {
            let Some(tenant) = config.tenant(tenant) else { continue };
            for ScopeLimits { scope, limits, .. } in batch_limits(&config, tenant) {
                if has_cap(&limits, class) {
                    self.admission.restore_spend(scope, class, Period::Day(today), *reference);
                }
            }
        }
    }

    /// Applies the limits of `new` to admission, before `new` is in force. `past` is what was
    /// spent on `today` and in its month: it counts in the scopes that begin to have a cap.
    /// Call this for one reload at a time.
    pub fn adopt(&self, now: MonotonicTime, new: &Config, past: PastSpending, today: UtcDay) {
        let PastSpending { ledger: spending, batches } = past;
        let old = self.config.current();
        let change = |scope: &Scope| {
            let new = self.limits_of(new, scope)?;
            Some(LimitChange { old: self.limits_of(&old, scope), new })
        };
        let costs = self.past_costs(new, &spending.priced, |scope| {
            change(scope).is_some_and(|change| change.begins_budget())
        });
        let mut spent = Vec::new();
        for (period, row) in by_period(spending, today) {
            for ScopeLimits { scope, .. } in self.scopes_of(new, &row.caller, &row.model) {
                if change(&scope).is_some_and(|change| change.begins_cap(&row.class)) {
                    let (class, spent_now) = (row.class.clone(), row.reference);
                    spent.push(PastSpend { scope, class, period, spent: spent_now });
                }
            }
        }
        for BatchSpend { tenant, class, reference } in batches {
            let scopes = new.tenant(&tenant).into_iter();
            for ScopeLimits { scope, .. } in scopes.flat_map(|tenant| batch_limits(new, tenant)) {
                if change(&scope).is_some_and(|change| change.begins_cap(&class)) {
                    let (class, period) = (class.clone(), Period::Day(today));
                    spent.push(PastSpend { scope, class, period, spent: reference });
                }
            }
        }
        let revision = new.revision();
        self.admission.adopt(now, &NewLimits { revision, limits_of: &change, spent, costs });
    }

    /// Returns the same limits over a new admission, which knows of no request.
    pub(crate) fn apart(&self) -> Self {
        Self { admission: Admission::new(AdmissionOptions::default()), ..self.clone() }
    }

    /// Makes this gateway one of several that share the caps. See [`Admission::share_caps`].
    pub fn share_caps(&self, life: u64) {
        self.admission.share_caps(life);
    }

    /// Divides every rate and every number of places by the number of gateways. See
    /// [`Admission::share_among`].
    pub fn share_among(&self, now: MonotonicTime, gateways: NonZeroU32) {
        self.admission.share_among(now, gateways);
    }

    /// Returns the limits that `config` sets for a scope.
    fn limits_of(&self, config: &Config, scope: &Scope) -> Option<Arc<PlanLimits>> {
        let plan = match scope {
            Scope::Key(key) => config.plan(&self.keys.plan_of(key)?)?,
            Scope::Tenant(name) => config.tenant(name)?.plan.as_ref()?,
            Scope::Pool(name) => &config.pool(name)?.plan,
            Scope::Model(name) => config.model(name)?.plan.as_ref()?,
            // The gateway has bounds of its own and no plan.
            Scope::Gateway => return None,
            Scope::TenantBatches(name) => {
                return Some(Arc::clone(&config.tenant(name)?.plan.as_ref()?.batch_caps));
            }
            Scope::PoolBatches(name) => {
                return Some(Arc::clone(&config.pool(name)?.plan.batch_caps));
            }
        };
        Some(Arc::clone(&plan.limits))
    }

    /// Adds spending that was not in the sums of [`Self::restore_spend`]. Call this
    /// once for each row.
    pub(crate) fn backfill(&self, rows: &[BackfilledSpend]) {
        let config = self.config.current();
        for BackfilledSpend { day, row, tier, used } in rows {
            let SpendRow { caller, model, class, reference: _ } = row.clone();
            self.restore_cost(
                &config,
                // The ledger has no plan for these rows, so the prices are those of the
                // tenant's plan now.
                &PricedRow {
                    caller,
                    model,
                    class,
                    tier: *tier,
                    day: *day,
                    plan: None,
                    used: *used,
                },
            );
            // Admission ignores a day or month that is over.
            for period in [Period::Day(*day), Period::Month(day.month())] {
                self.restore_row(&config, period, row);
            }
        }
    }

    /// True if `caller` can have asked this or an earlier gateway.
    pub(crate) fn may_have_asked(&self, caller: &Caller) -> bool {
        self.keys.may_have_asked(caller)
    }

    /// Logs each plan that limits keys and that the config does not define.
    pub fn log_missing_plans(&self) {
        let config = self.config.current();
        for (plan, keys) in self.keys.plans() {
            if config.plan(&plan).is_none() {
                tracing::error!(
                    %plan, keys,
                    "keys refer to a plan that the config does not define; their requests are refused"
                );
            }
        }
    }

    /// Returns the number of holds in admission.
    pub fn status(&self) -> AdmissionStatus {
        self.admission.status()
    }

    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Adds `row` to every scope that has a cap. The spend of both periods is kept if
    /// either has a cap, so that a later cap on the other one finds its spend.
    fn restore_row(&self, config: &Config, period: Period, row: &SpendRow) {
        for ScopeLimits { scope, limits, .. } in self.scopes_of(config, &row.caller, &row.model) {
            // A scope without a cap would be remembered for nothing.
            if has_cap(&limits, &row.class) {
                self.admission.restore_spend(scope, &row.class, period, row.reference);
            }
        }
    }

    /// Returns every scope of `config` that the spend of `caller` on `model` counts in.
    fn scopes_of(&self, config: &Config, caller: &Caller, model: &ModelName) -> Vec<ScopeLimits> {
        let plan = self.keys.plan_of(&caller.key);
        let key = plan.and_then(|plan| key_limits(config, &caller.key, &plan));
        let tenant = config.tenant(&caller.tenant).into_iter();
        let tenant = tenant.flat_map(|tenant| tenant_limits(config, tenant));
        key.into_iter().chain(tenant).chain(model_limits(config, model)).collect()
    }
}

/// Returns the rows of spending with their periods.
fn by_period(spending: Spending, today: UtcDay) -> impl Iterator<Item = (Period, SpendRow)> {
    let Spending { day, month, priced: _ } = spending;
    let day = day.into_iter().map(move |row| (Period::Day(today), row));
    day.chain(month.into_iter().map(move |row| (Period::Month(today.month()), row)))
}

/// Returns true if devices of `class` have a cap.
fn has_cap(limits: &PlanLimits, class: &DeviceClass) -> bool {
    let PlanLimits { device_time_per_day, device_time_per_month, .. } = limits;
    device_time_per_day.limit(class).or(device_time_per_month.limit(class)).is_some()
}

/// Returns the limits of `plan` for one key; `None` if the config has no such plan.
fn key_limits(config: &Config, key: &KeyId, plan: &PlanName) -> Option<ScopeLimits> {
    Some(scope_limits(config, Scope::Key(key.clone()), config.plan(plan)?))
}

/// Returns the tenant's own limits, then its pool's.
pub fn tenant_limits(config: &Config, tenant: &Tenant) -> impl Iterator<Item = ScopeLimits> {
    let of = |scope, plan| scope_limits(config, scope, plan);
    let own = tenant.plan.as_ref().map(|plan| of(Scope::Tenant(tenant.name.clone()), plan));
    let pool = tenant.pool.as_ref().map(|pool| of(Scope::Pool(pool.name.clone()), &pool.plan));
    own.into_iter().chain(pool)
}

/// Returns the caps on the lines of a tenant's batches: its own, then its pool's. Plans without
/// such a cap are left out.
pub fn batch_limits(config: &Config, tenant: &Tenant) -> impl Iterator<Item = ScopeLimits> {
    let of = |scope, plan: &Arc<Plan>| ScopeLimits {
        scope,
        limits: Arc::clone(&plan.batch_caps),
        revision: config.revision(),
    };
    let own = tenant.plan.as_ref().map(|plan| of(Scope::TenantBatches(tenant.name.clone()), plan));
    let pool = tenant.pool.as_ref();
    let pool = pool.map(|pool| of(Scope::PoolBatches(pool.name.clone()), &pool.plan));
    let is_capped = |limited: &ScopeLimits| {
        let caps = &limited.limits.device_time_per_day;
        caps.default.is_some() || !caps.classes.is_empty()
    };
    own.into_iter().chain(pool).filter(is_capped)
}

/// Returns the limits of all callers of `model` together, if the model has any.
pub fn model_limits(config: &Config, model: &ModelName) -> Option<ScopeLimits> {
    let plan = config.model(model)?.plan.as_ref()?;
    Some(scope_limits(config, Scope::Model(model.clone()), plan))
}

fn scope_limits(config: &Config, scope: Scope, plan: &Plan) -> ScopeLimits {
    ScopeLimits { scope, limits: Arc::clone(&plan.limits), revision: config.revision() }
}

#[cfg(test)]
mod tests;
