//! The limits that bind a caller, with what is left of each. Reading them takes nothing.

use std::collections::BTreeSet;

use axum::Json;
use axum::response::{IntoResponse as _, Response};
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_admission::{Limit, LimitState, Moment};
use tollgate_domain::DeviceClass;
use tollgate_serving::limits::{batch_limits, model_limits};

use super::{Api, Call, KnownCaller, models};
use crate::reply::ApiError;

/// The body of the response of `GET /v1/limits`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LimitList {
    object: &'static str,
    tenant: String,
    key: String,
    data: Vec<LimitBody>,
}

/// One limit. Amounts are in `unit`.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Limit")]
struct LimitBody {
    object: &'static str,
    /// The name of the limit in a plan.
    limit: &'static str,
    /// `key`, `tenant`, `pool`, `model`, `tenant_batches` or `pool_batches`.
    scope: &'static str,
    /// The name of the key, tenant, pool or model.
    name: String,
    device_class: Option<String>,
    /// `requests`, `tokens`, `device_ns`, `host_ns`, or `nano_units` of the currency.
    unit: &'static str,
    currency: Option<String>,
    value: u64,
    /// The amount that a full rate gives at once; null if the limit is no rate.
    burst: Option<u64>,
    used: u64,
    remaining: u64,
    /// The time until the limit is whole if nothing more is used; null if no time helps.
    refills_in_ms: Option<u64>,
}

impl From<LimitState> for LimitBody {
    fn from(state: LimitState) -> Self {
        let LimitState { scope, limit, class, currency, value, burst, used, remaining, refills } =
            state;
        Self {
            object: "limit",
            limit: limit.as_str(),
            scope: scope.kind(),
            name: scope.name().to_owned(),
            device_class: class.map(|class| class.to_string()),
            unit: match limit {
                Limit::Tokens => "tokens",
                Limit::BudgetPerMonth => "nano_units",
                Limit::GrammarTime => "host_ns",
                _ if limit.is_device_time() => "device_ns",
                _ => "requests",
            },
            currency: currency.map(|currency| currency.to_string()),
            value,
            burst,
            used,
            remaining,
            // Rounded up: a client that waits as told must not come too early.
            refills_in_ms: refills
                .map(|time| u64::try_from(time.as_nanos().div_ceil(1_000_000)).unwrap_or(u64::MAX)),
        }
    }
}

/// Answers `GET /v1/limits`.
pub(crate) async fn list(api: Api, call: Call) -> Result<Response, ApiError> {
    let known = &call.caller;
    let KnownCaller { caller, tenant, context: _ } = known;
    let (limits, clock) = (api.serving.limits(), api.serving.clock());
    let mut scopes = limits.caller_scopes(caller.caller(), caller.plan(), tenant)?;
    let config = tenant.config();
    scopes.extend(batch_limits(config, tenant.tenant()));
    scopes.extend(models::usable(&api, known).filter_map(|name| model_limits(config, &name)));
    // Limits on device time belong to a class; those without a device bind nobody now.
    let classes: BTreeSet<DeviceClass> =
        api.serving.workers().connected().map(|worker| worker.identity.class.clone()).collect();
    let classes: Vec<DeviceClass> = classes.into_iter().collect();
    let states = limits.states(Moment::new(clock.now(), clock.utc()), &scopes, &classes);
    Ok(Json(LimitList {
        object: "list",
        tenant: tenant.tenant().name.to_string(),
        key: caller.caller().key.to_string(),
        data: states.into_iter().map(LimitBody::from).collect(),
    })
    .into_response())
}
