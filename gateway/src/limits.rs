//! Whose limits: the scopes that bind a request, narrowest first, and, at the
//! start, what each of them has spent already. A key's plan is looked up by
//! name; one that config no longer has admits nothing.

use std::sync::Arc;

use tollgate_admission::{Admission, Period, Scope, ScopeLimits};
use tollgate_config::{Config, Plan, Tenant};
use tollgate_domain::{KeyId, ModelName, PlanName, PoolName, UtcDay};
use tollgate_ledger::{SpendRow, Spending};

use crate::auth::{AuthenticatedCaller, KeyStore};
use crate::reply::ApiError;

/// What binds a request. Only [`bind`] makes one.
#[derive(Debug)]
pub(crate) struct Bound {
    /// Every scope that limits it, narrowest first.
    pub(crate) scopes: Vec<ScopeLimits>,
    /// The pool on whose share of a contended device it runs: that of a tenant
    /// without a plan of its own. `None`: the share is the tenant's.
    pub(crate) pool: Option<PoolName>,
    /// The weight of that share.
    pub(crate) weight: f64,
}

/// What binds a request of a caller that `scopes` bind, by [`of_caller`], and
/// whose tenant is `tenant`, for `model`.
pub(crate) fn bind(
    config: &Config,
    mut scopes: Vec<ScopeLimits>,
    tenant: &Tenant,
    model: &ModelName,
) -> Bound {
    scopes.extend(of_model(config, model));
    let pool = match &tenant.plan {
        None => tenant.pool.as_ref().map(|pool| pool.name.clone()),
        Some(_) => None,
    };
    Bound { scopes, pool, weight: tenant.weight }
}

/// What binds every request of `caller`, whatever it asks for, narrowest first.
///
/// # Errors
/// When the key's plan is not in config: nobody is unlimited by accident.
pub(crate) fn of_caller(
    config: &Config,
    caller: &AuthenticatedCaller,
    tenant: &Tenant,
) -> Result<Vec<ScopeLimits>, ApiError> {
    let key = match caller.plan() {
        None => None,
        Some(plan) => {
            Some(of_key(config, caller.key(), plan).ok_or_else(|| plan_is_gone(caller, plan))?)
        }
    };
    Ok(key.into_iter().chain(of_tenant(tenant)).collect())
}

/// Tells admission what was spent on `today` and in its month, for every scope
/// that has such a cap. Who is no longer in config has no limit to keep.
pub(crate) fn restore_spend(
    admission: &Admission,
    config: &Config,
    keys: &KeyStore,
    spending: Spending,
    today: UtcDay,
) {
    let Spending { day, month } = spending;
    for (period, rows) in [(Period::Day(today), day), (Period::Month(today.month()), month)] {
        for row in &rows {
            restore_row(admission, config, keys, period, row);
        }
    }
}

/// Enters into admission what was spent before this gateway began and comes
/// to the ledger only now, from the journal of a worker.
pub(crate) struct LateSpend {
    pub(crate) admission: Admission,
    pub(crate) config: Arc<Config>,
    pub(crate) keys: KeyStore,
}

impl LateSpend {
    /// Adds `rows`, each spent on the day beside it. Call it once for each;
    /// of a day or month that is over admission keeps nothing.
    pub(crate) fn add(&self, rows: &[(UtcDay, SpendRow)]) {
        for (day, row) in rows {
            for period in [Period::Day(*day), Period::Month(day.month())] {
                restore_row(&self.admission, &self.config, &self.keys, period, row);
            }
        }
    }
}

/// Adds what `row` says to every scope that has such a cap.
fn restore_row(
    admission: &Admission,
    config: &Config,
    keys: &KeyStore,
    period: Period,
    row: &SpendRow,
) {
    let SpendRow { caller, model, class, reference } = row;
    let key = keys.plan_of(&caller.key).and_then(|plan| of_key(config, &caller.key, &plan));
    let tenant = config.tenant(&caller.tenant).into_iter().flat_map(|tenant| of_tenant(tenant));
    for ScopeLimits { scope, limits } in
        key.into_iter().chain(tenant).chain(of_model(config, model))
    {
        let cap = match period {
            Period::Day(_) => &limits.device_time_per_day,
            Period::Month(_) => &limits.device_time_per_month,
        };
        if cap.limit(class).is_some() {
            admission.restore_spend(scope, class, period, *reference);
        }
    }
}

/// Logs each plan that is gone and binds keys, which admit nothing for it.
pub(crate) fn tell_of_missing_plans(config: &Config, keys: &KeyStore) {
    for (plan, keys) in keys.plans() {
        if config.plan(&plan).is_none() {
            tracing::error!(
                %plan, keys,
                "a plan of keys is not in the config: their requests are refused"
            );
        }
    }
}

fn of_key(config: &Config, key: &KeyId, plan: &PlanName) -> Option<ScopeLimits> {
    Some(bound(Scope::Key(key.clone()), config.plan(plan)?))
}

/// The tenant's own limits, then its pool's.
fn of_tenant(tenant: &Tenant) -> impl Iterator<Item = ScopeLimits> {
    let own = tenant.plan.as_ref().map(|plan| bound(Scope::Tenant(tenant.name.clone()), plan));
    let shared = tenant.pool.as_ref().map(|pool| bound(Scope::Pool(pool.name.clone()), &pool.plan));
    own.into_iter().chain(shared)
}

fn of_model(config: &Config, model: &ModelName) -> Option<ScopeLimits> {
    Some(bound(Scope::Model(model.clone()), config.model(model)?.plan.as_ref()?))
}

fn bound(scope: Scope, plan: &Plan) -> ScopeLimits {
    ScopeLimits { scope, limits: Arc::clone(&plan.limits) }
}

fn plan_is_gone(caller: &AuthenticatedCaller, plan: &PlanName) -> ApiError {
    // Those known at the start are logged there. A key made since then, with a
    // config that this process has not read, is told by its answers.
    tracing::debug!(key = %caller.key(), %plan, "the plan of a key is not in the config");
    ApiError::Permission {
        message: format!("The plan '{plan}' that limits this key is not configured here.").into(),
    }
}

#[cfg(test)]
mod tests;
