//! The list of penalties that hold, and their early removal.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use tollgate_admission::ListedPenalty;
use tollgate_domain::{TenantId, UtcTime};

use super::AdminState;
use super::actor::Actor;
use super::body::AdminPath;
use crate::audit::{self, penalty_lifted};
use crate::reply::ApiError;
use tollgate_edge::source::Source;

/// A penalty as admins read it.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct PenaltyRow {
    /// `tenant` or `source`.
    kind: &'static str,
    name: String,
    offence: &'static str,
    /// Number of offences since the first one at `since_ns` (Unix, UTC).
    offences: u64,
    #[schemars(with = "u64")]
    since_ns: UtcTime,
    /// Milliseconds until the penalty ends, if no offence is added.
    left_ms: u64,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Penalties {
    penalties: Vec<PenaltyRow>,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct Lifted {
    lifted: usize,
}

/// Lists the penalties that hold.
pub(super) async fn list(State(state): State<Arc<AdminState>>) -> Json<Penalties> {
    let now = state.serving.clock().now();
    let tenants = state.serving.penalties().list(now);
    let mut rows: Vec<PenaltyRow> =
        tenants.into_iter().map(|listed| row(&state, "tenant", listed)).collect();
    let sources = state.source_penalties.list(now);
    rows.extend(sources.into_iter().map(|listed| row(&state, "source", listed)));
    Json(Penalties { penalties: rows })
}

/// Returns the penalties of one tenant.
pub(super) fn of_tenant(state: &AdminState, name: &TenantId) -> Vec<PenaltyRow> {
    let listed = state.serving.penalties().list_of(state.serving.clock().now(), name);
    listed.into_iter().map(|listed| row(state, "tenant", listed)).collect()
}

fn row<K: ToString>(
    state: &AdminState,
    kind: &'static str,
    listed: ListedPenalty<K>,
) -> PenaltyRow {
    let ListedPenalty { offender, penalty, offences, since } = listed;
    let clock = state.serving.clock();
    // The book keeps monotonic times, because a step of the wall clock must not end a penalty.
    let ago = clock.now().since(since).as_nanos();
    let since = clock.utc().0.saturating_sub(u64::try_from(ago).unwrap_or(u64::MAX));
    PenaltyRow {
        kind,
        name: offender.to_string(),
        offence: penalty.offence.as_str(),
        offences,
        since_ns: UtcTime(since),
        left_ms: u64::try_from(penalty.left.as_millis()).unwrap_or(u64::MAX),
    }
}

/// Lifts the penalties of a tenant.
pub(super) async fn lift_tenant(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
) -> Result<Json<Lifted>, ApiError> {
    // Text that is no name has no penalty, so the answer is that of any unknown name.
    let tenant = TenantId::new(&name).map_err(|_| none_held(&name))?;
    let penalties = state.serving.penalties();
    let now = state.serving.clock().now();
    // A removal that removes nothing leaves no record in the audit log.
    if penalties.list_of(now, &tenant).is_empty() {
        return Err(none_held(&name));
    }
    record(&state, &actor, Some(&tenant), &name).await?;
    lifted(&name, penalties.lift(now, &tenant))
}

/// Lifts the penalties of a network source.
pub(super) async fn lift_source(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
) -> Result<Json<Lifted>, ApiError> {
    let source: Source = name.parse().map_err(|_| none_held(&name))?;
    let penalties = &state.source_penalties;
    let now = state.serving.clock().now();
    if penalties.list_of(now, source).is_empty() {
        return Err(none_held(&name));
    }
    record(&state, &actor, None, &name).await?;
    lifted(&name, penalties.lift(now, source))
}

/// Records the removal in the audit log, before the removal happens: no
/// penalty is lifted without a record.
async fn record(
    state: &AdminState,
    actor: &Actor,
    tenant: Option<&TenantId>,
    offender: &str,
) -> Result<(), ApiError> {
    let at = state.serving.clock().utc();
    let action = penalty_lifted(tenant, offender, (actor.as_record(), at));
    audit::record(state.serving.ledger(), action).await.map_err(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot record the removal of a penalty; the penalty stays"
        );
        ApiError::LedgerUnavailable
    })
}

fn lifted(name: &str, lifted: usize) -> Result<Json<Lifted>, ApiError> {
    if lifted == 0 {
        return Err(none_held(name));
    }
    // Logged, because admins act seldom.
    tracing::info!(offender = name, lifted, "an admin lifted penalties");
    Ok(Json(Lifted { lifted }))
}

fn none_held(name: &str) -> ApiError {
    ApiError::NotFound { what: "penalty", id: name.to_owned() }
}
