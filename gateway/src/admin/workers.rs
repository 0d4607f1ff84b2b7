//! Workers at rest: a rested worker finishes its requests and gets no new ones.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;

use super::AdminState;
use super::actor::Actor;
use super::body::AdminPath;
use crate::audit;
use crate::reply::ApiError;
use tollgate_domain::WorkerName;
use tollgate_serving::workers::Rest;

/// The answer to a change.
#[derive(Serialize, JsonSchema)]
pub(super) struct Changed {
    #[schemars(with = "String")]
    worker: WorkerName,
    resting: bool,
}

/// Rests a worker.
pub(super) async fn rest(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
) -> Result<Json<Changed>, ApiError> {
    set(&state, &actor, &name, Rest::Resting).await
}

/// Ends the rest of a worker.
pub(super) async fn wake(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(name): AdminPath<String>,
) -> Result<Json<Changed>, ApiError> {
    set(&state, &actor, &name, Rest::Awake).await
}

async fn set(
    state: &AdminState,
    actor: &Actor,
    name: &str,
    rest: Rest,
) -> Result<Json<Changed>, ApiError> {
    let unknown = || ApiError::NotFound { what: "worker", id: name.to_owned() };
    let worker = WorkerName::new(name).map_err(|_| unknown())?;
    let workers = state.serving.workers();
    let now = workers.rest_of(&worker).ok_or_else(unknown)?;
    // A change that changes nothing leaves no record in the audit log.
    if now != rest {
        let at = state.serving.clock().utc();
        let action = audit::worker_rest(&worker, rest, (actor.as_record(), at));
        // Recorded first: no worker rests without a record.
        audit::record(state.serving.ledger(), action).await.map_err(|error| {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "cannot record the rest of a worker; the worker stays as it was"
            );
            ApiError::LedgerUnavailable
        })?;
        workers.set_rest(&worker, rest);
        let resting = rest == Rest::Resting;
        tracing::info!(actor = actor.as_record(), %worker, resting, "an admin changed the rest of a worker");
    }
    Ok(Json(Changed { worker, resting: rest == Rest::Resting }))
}
