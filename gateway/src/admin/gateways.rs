//! The gateways that share a database server, and the end of one that never starts again.

use std::sync::{Arc, Mutex, PoisonError};

use axum::Json;
use axum::extract::State;
use schemars::JsonSchema;
use serde::Serialize;
use tokio_util::sync::CancellationToken;
use tollgate_ledger::caps::Slices;
use tollgate_ledger::gateways::{Freed, GatewayHome, GatewayHomes, HomeState, MembershipError};

use super::AdminState;
use super::actor::Actor;
use super::body::AdminPath;
use crate::audit;
use crate::reply::{ApiError, JobsError};

/// The gateways that share a server with this one. Clones share the connection.
#[derive(Clone)]
pub(crate) struct Neighbours {
    homes: Arc<Mutex<GatewayHomes>>,
    /// The id of this gateway's data folder.
    own: String,
    /// Cancelled once another gateway has taken this one for lost.
    pub(crate) retired: CancellationToken,
}

impl Neighbours {
    pub(crate) fn of(slices: &Slices) -> Self {
        let homes = Arc::new(Mutex::new(GatewayHomes::on(slices.address())));
        let (own, retired) = (slices.home().id.clone(), CancellationToken::new());
        Self { homes, own, retired }
    }

    /// Runs a call on the server.
    pub(crate) async fn call<T: Send + 'static>(
        &self,
        call: impl FnOnce(&mut GatewayHomes) -> Result<T, MembershipError> + Send + 'static,
    ) -> Result<T, MembershipError> {
        let homes = Arc::clone(&self.homes);
        // The server's answer is waited for in a blocking call. A panic leaves the connection whole
        // or closed.
        let called = tokio::task::spawn_blocking(move || {
            call(&mut homes.lock().unwrap_or_else(PoisonError::into_inner))
        });
        match called.await {
            Ok(called) => called,
            // A blocking task fails only while the runtime stops, and nobody waits then.
            Err(_) => std::future::pending().await,
        }
    }
}

/// A gateway as admins read it.
#[derive(Serialize, JsonSchema)]
pub(super) struct HomeRow {
    /// The id in `gateway.id` of its data folder.
    home: String,
    /// Its machine and its address for callers; null before its first start with this version.
    name: Option<String>,
    /// `running`, `stopped`, or `silent`: killed, or cut off from the server.
    state: &'static str,
    /// Milliseconds since it was last heard, by the server's clock.
    silent_ms: Option<u64>,
    /// The number of caps of which it has an unspent part.
    caps: u32,
    /// True for the gateway that answers.
    is_this: bool,
}

#[derive(Serialize, JsonSchema)]
pub(super) struct HomeRows {
    /// Empty where ledger and keys are files.
    gateways: Vec<HomeRow>,
}

/// The answer to a freed gateway.
#[derive(Serialize, JsonSchema)]
pub(super) struct FreedHome {
    home: String,
    /// The number of caps whose unspent parts are free.
    caps: u32,
}

/// Lists the gateways that share the database server.
pub(super) async fn list(State(state): State<Arc<AdminState>>) -> Result<Json<HomeRows>, ApiError> {
    let listed = on_server(&state, GatewayHomes::list).await?.unwrap_or_default();
    let own = state.neighbours.as_ref().map(|neighbours| &neighbours.own);
    let row = |GatewayHome { home, name, state, silent_ms, caps }| HomeRow {
        is_this: own == Some(&home),
        home,
        name,
        state: HomeState::as_str(state),
        silent_ms,
        caps,
    };
    Ok(Json(HomeRows { gateways: listed.into_iter().map(row).collect() }))
}

/// Frees what a gateway that never starts again has of the caps.
pub(super) async fn free(
    State(state): State<Arc<AdminState>>,
    actor: Actor,
    AdminPath(home): AdminPath<String>,
) -> Result<Json<FreedHome>, ApiError> {
    let unknown = || ApiError::NotFound { what: "gateway", id: home.clone() };
    let listed = on_server(&state, GatewayHomes::list).await?.unwrap_or_default();
    let found = listed.into_iter().find(|row| row.home == home).ok_or_else(unknown)?;
    if found.may_run() {
        return Err(may_run());
    }
    // Recorded first: nothing is freed without a record.
    let at = state.serving.clock().utc();
    let action = audit::gateway_freed(&found, (actor.as_record(), at));
    audit::record(state.serving.ledger(), action).await.map_err(|error| {
        tracing::error!(
            error = &error as &dyn std::error::Error,
            "cannot record the end of a gateway; it keeps its part of the caps"
        );
        ApiError::LedgerUnavailable
    })?;
    let id = home.clone();
    let freed = on_server(&state, move |homes| homes.free(&id)).await?;
    match freed.unwrap_or(Freed::Unknown) {
        Freed::Caps(caps) => {
            tracing::info!(
                actor = actor.as_record(),
                home,
                caps,
                "an admin freed what a gateway had of the caps"
            );
            Ok(Json(FreedHome { home, caps }))
        }
        Freed::MayRun => Err(may_run()),
        Freed::Unknown => Err(unknown()),
    }
}

fn may_run() -> ApiError {
    let message =
        "The gateway may still run: it was heard within the last 100 s. Stop it, or wait.";
    JobsError::Conflict { code: "gateway_may_run", message }.into()
}

/// Runs a call on the server; `None` where there is none.
async fn on_server<T: Send + 'static>(
    state: &AdminState,
    call: impl FnOnce(&mut GatewayHomes) -> Result<T, MembershipError> + Send + 'static,
) -> Result<Option<T>, ApiError> {
    let Some(neighbours) = &state.neighbours else { return Ok(None) };
    match neighbours.call(call).await {
        Ok(answer) => Ok(Some(answer)),
        Err(error) => {
            tracing::error!(
                error = &error as &dyn std::error::Error,
                "the database server does not tell of its gateways; the admin gets 503"
            );
            Err(ApiError::LedgerUnavailable)
        }
    }
}
