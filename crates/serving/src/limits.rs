//! The limits that bind a caller: the scopes of a request, narrowest first, and,
//! at the start, the spending that each scope already has. A key's plan is
//! looked up by name; a key with a plan that the config does not define
//! is refused.

use std::sync::Arc;

use tollgate_admission::{Admission, AdmissionStatus, Period, Scope, ScopeLimits};
use tollgate_config::{Config, Plan, Tenant};
use tollgate_domain::{Caller, KeyId, ModelName, MonotonicTime, PlanName, PoolName, UtcDay};
use tollgate_ledger::{SpendRow, Spending};

use crate::error::Refusal;
use crate::keys::KeyDirectory;

/// The limits of all tenants. Clones share them.
#[derive(Clone)]
pub struct Limits {
    admission: Admission,
    config: Arc<Config>,
    keys: Arc<dyn KeyDirectory>,
}

/// A known caller with the tenant and the limits that bind each of the caller's
/// requests. [`Limits::caller_context`] is the only maker.
#[derive(Clone, Debug)]
pub struct CallerContext {
    caller: Caller,
    tenant: Arc<Tenant>,
    /// The scopes that bind every request of the caller, narrowest first.
    scopes: Vec<ScopeLimits>,
}

/// The limits that bind one request.
#[derive(Debug)]
pub(crate) struct BindingLimits {
    /// Every scope that limits the request, narrowest first.
    pub(crate) scopes: Vec<ScopeLimits>,
    /// The pool that owns the request's share of a contended device; `None` if the
    /// tenant owns the share.
    pub(crate) pool: Option<PoolName>,
    /// The weight of that share.
    pub(crate) weight: f64,
}

/// Spending of an earlier gateway that reached the ledger after this gateway had
/// read the ledger's sums.
#[derive(Clone, Debug)]
pub(crate) struct BackfilledSpend {
    /// The day on which the work ended.
    pub(crate) day: UtcDay,
    pub(crate) row: SpendRow,
}

impl CallerContext {
    /// Returns the caller.
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the caller's tenant.
    pub fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    /// Returns the name of the pool or tenant that owns the share of the devices on
    /// which the caller's requests run.
    pub fn share_owner(&self) -> &str {
        self.shared_pool().map_or(self.tenant.name.as_str(), PoolName::as_str)
    }

    /// Returns the tenant's pool if the tenant has no plan, and so no share, of
    /// its own.
    fn shared_pool(&self) -> Option<&PoolName> {
        match self.tenant.plan {
            None => self.tenant.pool.as_ref().map(|pool| &pool.name),
            Some(_) => None,
        }
    }
}

impl Limits {
    /// Makes the limits of `config` over `admission`. `keys` names the plan of
    /// each key.
    pub fn new(admission: Admission, config: Arc<Config>, keys: Arc<dyn KeyDirectory>) -> Self {
        Self { admission, config, keys }
    }

    /// Finds the limits that bind every request of `caller`, whatever the request
    /// asks for. `key_plan` is the plan of the caller's key.
    ///
    /// # Errors
    /// [`Refusal::PlanNotConfigured`]: a missing plan must not mean no limit.
    pub fn caller_context(
        &self,
        caller: Caller,
        key_plan: Option<&PlanName>,
        tenant: Arc<Tenant>,
    ) -> Result<CallerContext, Refusal> {
        // Narrowest first: the key's limits, the tenant's, the pool's. A refusal by a
        // narrow limit must not take from a wide one.
        let of_key = key_plan.map(|plan| {
            key_limits(&self.config, &caller.key, plan).ok_or_else(|| {
                // The plans known at the start are logged there. This is a key made
                // since then with a config that this process has not read.
                tracing::debug!(key = %caller.key, %plan, "config does not define a key's plan; the request is refused");
                Refusal::PlanNotConfigured { plan: plan.clone() }
            })
        });
        let scopes = of_key.transpose()?.into_iter().chain(tenant_limits(&tenant)).collect();
        Ok(CallerContext { caller, tenant, scopes })
    }

    /// Refuses a request that a spent rate of requests does not let pass now,
    /// whatever the request costs. Takes nothing.
    ///
    /// # Errors
    /// [`Refusal::Limit`].
    pub fn check_request_rate(
        &self,
        now: MonotonicTime,
        context: &CallerContext,
    ) -> Result<(), Refusal> {
        let refused = self.admission.check_request_rate(now, &context.scopes);
        refused.map_or(Ok(()), |refusal| Err(refusal.into()))
    }

    /// Refuses a request that can neither run nor wait, because one of the
    /// caller's scopes is full. Takes nothing.
    ///
    /// # Errors
    /// [`Refusal::Limit`].
    pub fn check_concurrency(&self, context: &CallerContext) -> Result<(), Refusal> {
        let refused = self.admission.check_concurrency(&context.scopes);
        refused.map_or(Ok(()), |refusal| Err(refusal.into()))
    }

    /// Adds the model's limits to the caller's and chooses the share on which the
    /// request runs.
    pub(crate) fn bind(&self, context: &CallerContext, model: &ModelName) -> BindingLimits {
        let mut scopes = context.scopes.clone();
        // All tenants share the model's limits, so they are the widest.
        scopes.extend(model_limits(&self.config, model));
        let pool = context.shared_pool().cloned();
        BindingLimits { scopes, pool, weight: context.tenant.weight }
    }

    /// Restores the spending of `today` and its month in every scope that has such
    /// a cap. Tenants and plans that the config no longer has keep no limit.
    pub fn restore_spend(&self, spending: Spending, today: UtcDay) {
        let Spending { day, month } = spending;
        for (period, rows) in [(Period::Day(today), day), (Period::Month(today.month()), month)] {
            for row in &rows {
                self.restore_row(period, row);
            }
        }
    }

    /// Adds spending that was not in the sums of [`Self::restore_spend`]. Call this
    /// once for each row.
    pub(crate) fn backfill(&self, rows: &[BackfilledSpend]) {
        for BackfilledSpend { day, row } in rows {
            // Admission ignores a day or month that is over.
            for period in [Period::Day(*day), Period::Month(day.month())] {
                self.restore_row(period, row);
            }
        }
    }

    /// True if `caller` can have asked this or an earlier gateway.
    pub(crate) fn may_have_asked(&self, caller: &Caller) -> bool {
        self.keys.may_have_asked(caller)
    }

    /// Logs each plan that limits keys and that the config does not define.
    pub fn log_missing_plans(&self) {
        for (plan, keys) in self.keys.plans() {
            if self.config.plan(&plan).is_none() {
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

    /// Adds `row` to every scope that has a cap for `period`.
    fn restore_row(&self, period: Period, row: &SpendRow) {
        let SpendRow { caller, model, class, reference } = row;
        let plan = self.keys.plan_of(&caller.key);
        let key = plan.and_then(|plan| key_limits(&self.config, &caller.key, &plan));
        let tenant = self.config.tenant(&caller.tenant).into_iter();
        let tenant = tenant.flat_map(|tenant| tenant_limits(tenant));
        for ScopeLimits { scope, limits } in
            key.into_iter().chain(tenant).chain(model_limits(&self.config, model))
        {
            let cap = match period {
                Period::Day(_) => &limits.device_time_per_day,
                Period::Month(_) => &limits.device_time_per_month,
            };
            // A scope without such a cap would be remembered for nothing.
            if cap.limit(class).is_some() {
                self.admission.restore_spend(scope, class, period, *reference);
            }
        }
    }
}

/// Returns the limits of `plan` for one key; `None` if the config has no such plan.
fn key_limits(config: &Config, key: &KeyId, plan: &PlanName) -> Option<ScopeLimits> {
    Some(scope_limits(Scope::Key(key.clone()), config.plan(plan)?))
}

/// Returns the tenant's own limits, then its pool's.
fn tenant_limits(tenant: &Tenant) -> impl Iterator<Item = ScopeLimits> {
    let own =
        tenant.plan.as_ref().map(|plan| scope_limits(Scope::Tenant(tenant.name.clone()), plan));
    let pool =
        tenant.pool.as_ref().map(|pool| scope_limits(Scope::Pool(pool.name.clone()), &pool.plan));
    own.into_iter().chain(pool)
}

fn model_limits(config: &Config, model: &ModelName) -> Option<ScopeLimits> {
    Some(scope_limits(Scope::Model(model.clone()), config.model(model)?.plan.as_ref()?))
}

fn scope_limits(scope: Scope, plan: &Plan) -> ScopeLimits {
    ScopeLimits { scope, limits: Arc::clone(&plan.limits) }
}

#[cfg(test)]
mod tests;
