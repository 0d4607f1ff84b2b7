//! Raises of limits: made and ended early.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use http::StatusCode;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tollgate_domain::{TenantId, UtcDay, UtcTime};

use super::AdminState;
use super::actor::Actor;
use super::body::{AdminBody, AdminPath, AdminQuery, sentence};
use crate::raises::RaisedLimit;
use crate::reload::RaiseRefusal;
use crate::reply::ApiError;

/// The body of a request for higher limits.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct WantedRaise {
    /// The limits with their keys and values of a plan.
    limits: Map<String, Value>,
    /// The first UTC day without the raise.
    until: Option<String>,
    /// The time after which the raise ends.
    seconds: Option<u64>,
}

/// The query of the end of raises.
#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct EndedQuery {
    /// The limit; all limits of the tenant if there is none.
    limit: Option<String>,
}

/// Raises of a tenant.
#[derive(Serialize, JsonSchema)]
pub(super) struct RaisesOfTenant {
    raises: Vec<RaisedLimit>,
}

/// Raises limits of a tenant.
pub(super) async fn create(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
    AdminBody(wanted): AdminBody<WantedRaise>,
) -> Result<(StatusCode, Json<RaisesOfTenant>), ApiError> {
    let tenant = tenant_of(&name)?;
    let until = end_of(&wanted, state.serving.clock().utc())?;
    let raised = state.reloader.raise(actor.as_record(), tenant, wanted.limits, until).await;
    let raises = raised.map_err(refusal)?;
    Ok((StatusCode::CREATED, Json(RaisesOfTenant { raises })))
}

/// Ends raises of a tenant before their time, and returns them.
pub(super) async fn end(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
    AdminQuery(EndedQuery { limit }): AdminQuery<EndedQuery>,
) -> Result<Json<RaisesOfTenant>, ApiError> {
    let tenant = tenant_of(&name)?;
    let ended = state.reloader.end_raises(actor.as_record(), tenant, limit).await;
    Ok(Json(RaisesOfTenant { raises: ended.map_err(refusal)? }))
}

/// Returns the raises of `tenant`.
pub(super) fn of_tenant(state: &AdminState, tenant: &TenantId) -> Vec<RaisedLimit> {
    let raises = state.reloader.raises();
    raises.iter().filter(|raise| raise.tenant == *tenant).cloned().collect()
}

fn tenant_of(name: &str) -> Result<TenantId, ApiError> {
    TenantId::new(name).map_err(|_| unknown_tenant(name))
}

fn unknown_tenant(name: &str) -> ApiError {
    ApiError::NotFound { what: "tenant", id: name.to_owned() }
}

/// Returns the end of a raise.
fn end_of(wanted: &WantedRaise, now: UtcTime) -> Result<UtcTime, ApiError> {
    match (&wanted.until, wanted.seconds) {
        (Some(day), None) => {
            let wrong = |_| ApiError::invalid("until", "'until' must be a day like 2026-12-01.");
            day.parse().map(UtcDay::start).map_err(wrong)
        }
        (None, Some(seconds)) => {
            // An end beyond the range is refused like every end that is too far away.
            let span = seconds.saturating_mul(1_000_000_000);
            Ok(UtcTime(now.0.saturating_add(span)))
        }
        _ => Err(ApiError::invalid("until", "Give one of 'until' and 'seconds'.")),
    }
}

/// Makes the answer to a raise that was not made or ended.
fn refusal(refusal: RaiseRefusal) -> ApiError {
    match refusal {
        RaiseRefusal::UnknownTenant(tenant) => unknown_tenant(tenant.as_str()),
        RaiseRefusal::NoRaise(limit) => ApiError::NotFound { what: "raise", id: limit },
        RaiseRefusal::Limits(error) => ApiError::invalid("limits", sentence(&error)),
        RaiseRefusal::TooMany => ApiError::invalid("limits", sentence(&refusal)),
        RaiseRefusal::Until => ApiError::invalid("until", sentence(&refusal)),
        RaiseRefusal::Ledger(_) => ApiError::LedgerUnavailable,
        RaiseRefusal::Jobs(error) => error.into(),
        RaiseRefusal::Stopping => ApiError::Draining,
        RaiseRefusal::File(error) => {
            let error = &error as &dyn std::error::Error;
            tracing::error!(error, "cannot keep raises; an admin request was answered with 500");
            ApiError::Internal
        }
    }
}
