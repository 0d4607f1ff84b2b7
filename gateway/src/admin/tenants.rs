//! Tenants with the state of their limits: how much of each limit is used, and when it is
//! whole again.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_admission::{HeldRequests, LimitState, Moment};
use tollgate_config::Tenant;
use tollgate_domain::{DeviceClass, PlanName, PoolName, TenantId};
use tollgate_serving::limits::{batch_limits, tenant_limits};

use super::AdminState;
use super::body::{AdminPath, AdminQuery};
use super::keys::{KeyListRow, page as page_of_keys};
use super::page::{Page, PageQuery};
use super::penalties::{PenaltyRow, of_tenant};
use super::raises;
use crate::raises::RaisedLimit;
use crate::reply::ApiError;
use crate::telemetry::RefusedRow;

/// A tenant in a list.
#[derive(Serialize, JsonSchema)]
pub(super) struct TenantRow {
    #[schemars(with = "String")]
    tenant: TenantId,
    #[schemars(with = "Option<String>")]
    plan: Option<PlanName>,
    #[schemars(with = "Option<String>")]
    pool: Option<PoolName>,
    weight: f64,
    /// Requests that run.
    running: u64,
    /// Requests that wait for a place.
    waiting: u64,
}

/// A tenant with everything that bears on the requests of the tenant.
#[derive(Serialize, JsonSchema)]
pub(super) struct TenantState {
    #[serde(flatten)]
    row: TenantRow,
    limits: Vec<LimitRow>,
    raises: Vec<RaisedLimit>,
    /// The refusals of the last hour.
    refusals: Vec<RefusedRow>,
    penalties: Vec<PenaltyRow>,
    /// The first page of the keys; `/v1/keys?tenant=NAME` has all of them.
    keys: Page<KeyListRow>,
}

/// The state of one limit. Amounts are in the unit of the limit: requests, tokens or device
/// nanoseconds.
#[derive(Serialize, JsonSchema)]
struct LimitRow {
    /// The owner of the limit: `tenant acme`, or `pool trials` for a shared one.
    scope: String,
    limit: &'static str,
    #[schemars(with = "Option<String>")]
    device_class: Option<DeviceClass>,
    currency: Option<String>,
    /// The bound; of a rate, the units a minute.
    value: u64,
    burst: Option<u64>,
    /// Amount in use, spent and held.
    used: u64,
    remaining: u64,
    /// Milliseconds until the limit is whole if nothing more is taken; null if no time
    /// refills it.
    refills_ms: Option<u64>,
}

/// Lists the tenants of the config in force.
pub(super) async fn list(
    State(state): State<Arc<AdminState>>,
    AdminQuery(query): AdminQuery<PageQuery>,
) -> Json<Page<TenantRow>> {
    let config = state.reloader.config();
    let held = state.serving.limits().held_by_tenant();
    let mut tenants: Vec<&Tenant> = config.tenants().collect();
    // In one order at all times, because a page begins after the last name of the page before.
    tenants.sort_unstable_by(|a, b| a.name.cmp(&b.name));
    let Page { rows, next } = query.cut(tenants, |tenant| tenant.name.to_string());
    let row = |tenant: &Tenant| TenantRow::of(tenant, held.get(&tenant.name).copied());
    Json(Page { rows: rows.into_iter().map(row).collect(), next })
}

/// The refusals of all tenants.
#[derive(Serialize, JsonSchema)]
pub(super) struct Refusals {
    refusals: Vec<RefusedRow>,
}

/// Lists the refusals of the last hour, most first.
pub(super) async fn refusals(State(state): State<Arc<AdminState>>) -> Json<Refusals> {
    Json(Refusals { refusals: state.metrics.refused().list(None) })
}

/// Shows one tenant.
pub(super) async fn show(
    State(state): State<Arc<AdminState>>,
    AdminPath(name): AdminPath<String>,
) -> Result<Json<TenantState>, ApiError> {
    let unknown = || ApiError::NotFound { what: "tenant", id: name.clone() };
    let name = TenantId::new(&name).map_err(|_| unknown())?;
    let config = state.reloader.config();
    let tenant = config.tenant(&name).ok_or_else(unknown)?;
    let (limits, clock) = (state.serving.limits(), state.serving.clock());
    let scopes: Vec<_> =
        tenant_limits(&config, tenant).chain(batch_limits(&config, tenant)).collect();
    let states = limits.states(Moment::new(clock.now(), clock.utc()), &scopes, &classes(&state));
    let held = limits.held_by_tenant().get(&name).copied();
    Ok(Json(TenantState {
        row: TenantRow::of(tenant, held),
        limits: states.into_iter().map(LimitRow::from).collect(),
        raises: raises::of_tenant(&state, &name),
        refusals: state.metrics.refused().list(Some(&name)),
        penalties: of_tenant(&state, &name),
        keys: page_of_keys(&state, Some(name), None).await?,
    }))
}

/// Returns the classes of the connected devices, each once.
fn classes(state: &AdminState) -> Vec<DeviceClass> {
    let mut classes: Vec<DeviceClass> =
        state.worker_reports().into_iter().filter_map(|report| report.class).collect();
    classes.sort_unstable();
    classes.dedup();
    classes
}

impl TenantRow {
    pub(super) fn of(tenant: &Tenant, held: Option<HeldRequests>) -> Self {
        let HeldRequests { running, waiting } = held.unwrap_or_default();
        Self {
            tenant: tenant.name.clone(),
            plan: tenant.plan.as_ref().map(|plan| plan.name.clone()),
            pool: tenant.pool.as_ref().map(|pool| pool.name.clone()),
            weight: tenant.weight,
            running,
            waiting,
        }
    }
}

impl From<LimitState> for LimitRow {
    fn from(state: LimitState) -> Self {
        let LimitState { scope, limit, class, currency, value, burst, used, remaining, refills } =
            state;
        let millis =
            |time: std::time::Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
        Self {
            scope: scope.to_string(),
            limit: limit.as_str(),
            device_class: class,
            currency: currency.map(|currency| currency.to_string()),
            value,
            burst,
            used,
            remaining,
            refills_ms: refills.map(millis),
        }
    }
}
