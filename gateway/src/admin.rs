//! The admin listener's routes: health and metrics for machines, everything
//! else for admins. `routes.rs` has the table of all routes, each with the right
//! that it asks for.

mod actor;
mod admins;
mod body;
mod checkpoint;
mod gateways;
mod health;
mod jobs;
mod keys;
mod live;
mod operations;
mod page;
mod penalties;
mod raises;
mod reload;
mod routes;
mod scrape;
mod tenants;
mod usage;
mod workers;

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use http::{HeaderMap, StatusCode, header};
use schemars::JsonSchema;
use serde::Serialize;
use subtle::ConstantTimeEq as _;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{MonotonicTime, RequestId};
use tollgate_edge::Peer;
use tollgate_edge::source::Source;
use tollgate_serving::Serving;
use tollgate_serving::workers::{DeviceLoad, WorkerReport};
use tower::ServiceExt as _;

use self::actor::Actor;
pub(crate) use self::gateways::Neighbours;
use self::health::Health;
pub(crate) use self::live::LiveState;
pub(crate) use self::routes::{DocumentedRoute, documented_routes};
use crate::api::BodyBudget;
use crate::api::jobs::JobsApi;
use crate::auth::{AdminSecret, AuthError, KeyStore};
use crate::read_limit::AdminReadLimit;
use crate::reload::Reloader;
use crate::reply::ApiError;
use crate::source_penalties::SourcePenalties;
use crate::stack::Routes;
use crate::telemetry::Metrics;

/// An error for an admin key that cannot be read or made.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the admin key in {path}")]
pub struct AdminKeyError {
    /// The file of the key.
    pub path: PathBuf,
    /// The cause.
    #[source]
    pub source: io::Error,
}

/// The secret that opens the admin listener. It is never shown and never
/// logged.
pub(crate) struct AdminKey(String);

impl AdminKey {
    /// Reads the key in `data/admin.key`. Makes the key on first use, in a file
    /// that only the owner can read.
    pub(crate) fn load(data: &Path) -> Result<Self, AdminKeyError> {
        let path = data.join(ADMIN_KEY_FILE);
        read_or_make(&path).map(Self).map_err(|source| AdminKeyError { path, source })
    }

    /// Returns true if `credential` is this key.
    fn is(&self, credential: &str) -> bool {
        // In constant time, so that timing tells nothing about the key.
        credential.as_bytes().ct_eq(self.0.as_bytes()).into()
    }
}

/// Returns the credential in `headers` if there is one and no other.
fn bearer(headers: &HeaderMap) -> Option<&str> {
    let mut shown = headers.get_all(header::AUTHORIZATION).iter();
    // Two credentials are ambiguous, so neither counts.
    let (Some(shown), None) = (shown.next(), shown.next()) else { return None };
    let (scheme, credential) = shown.to_str().ok()?.split_at_checked(BEARER.len())?;
    scheme.eq_ignore_ascii_case(BEARER).then_some(credential)
}

fn read_or_make(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(text) => {
            let key = text.trim();
            // An admin may have written the file; a short key could be guessed over the network.
            if key.len() < LEAST_KEY_CHARS {
                let words = format!("the key must have at least {LEAST_KEY_CHARS} characters");
                return Err(io::Error::new(io::ErrorKind::InvalidData, words));
            }
            Ok(key.to_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let key = AdminSecret::draw().map_err(io::Error::other)?;
            let key = key.expose().to_owned();
            let mut file =
                // `create_new` fails if another process has made the key in between.
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            writeln!(file, "{key}")?;
            // Synced, because an admin may use the key before the next sync.
            file.sync_all()?;
            Ok(key)
        }
        Err(error) => Err(error),
    }
}

/// The state that admin handlers read.
pub(crate) struct AdminState {
    pub(crate) key: AdminKey,
    /// The gateways that share a server; `None` where ledger and keys are files.
    pub(crate) neighbours: Option<Neighbours>,
    /// The keys of tenants and the named admins.
    pub(crate) keys: KeyStore,
    pub(crate) serving: Arc<Serving>,
    pub(crate) reloader: Reloader,
    /// The penalties of network sources.
    pub(crate) source_penalties: SourcePenalties,
    pub(crate) metrics: Arc<Metrics>,
    /// The memory for request bodies.
    pub(crate) bodies: BodyBudget,
    /// Files and batches.
    pub(crate) jobs: JobsApi,
    /// The history and the streams of the live view.
    pub(crate) live: LiveState,
    /// Cancelled once the gateway takes no new work.
    pub(crate) draining: CancellationToken,
    /// Cancelled once the admin listener closes.
    pub(crate) closing: CancellationToken,
}

impl AdminState {
    /// Returns the admin of the key in `headers`.
    fn admin_of(&self, headers: &HeaderMap) -> Result<Actor, AuthError> {
        if !headers.contains_key(header::AUTHORIZATION) {
            return Err(AuthError::Missing);
        }
        let credential = bearer(headers).ok_or(AuthError::Malformed)?;
        if self.key.is(credential) {
            return Ok(Actor::key_file());
        }
        // The key in the file needs no database, so an admin can act while the server is away.
        if !self.keys.is_confirmed() {
            return Err(AuthError::Unconfirmed);
        }
        self.keys.admin_of(credential).map(Actor::named).ok_or(AuthError::Rejected)
    }

    /// Returns the admin of the key in `headers`. Counts a wrong key against the source of the
    /// request, as a wrong API key on the public listener.
    fn admitted(&self, headers: &HeaderMap, origin: Origin) -> Result<Actor, ApiError> {
        self.admin_of(headers).map_err(|error| {
            let Origin { source, now } = origin;
            match self.source_penalties.failed_authentication(now, source, error) {
                penalty @ ApiError::Penalty { .. } => penalty,
                ApiError::LedgerUnavailable => ApiError::LedgerUnavailable,
                // One answer for a missing and for a wrong key.
                _ => ApiError::InvalidCredential,
            }
        })
    }

    /// Returns true for each condition that requests need to succeed.
    pub(crate) fn readiness(&self) -> Readiness {
        Readiness {
            worker: self.serving.workers().is_ready(),
            ledger: self.serving.may_begin_work(),
            draining: self.draining.is_cancelled(),
        }
    }

    /// Returns a report on each worker.
    pub(crate) fn worker_reports(&self) -> Vec<WorkerReport> {
        self.serving.workers().report()
    }
}

/// The routes of the admin listener, for its stack.
pub(crate) struct AdminRoutes(Router);

impl AdminRoutes {
    pub(crate) fn new(state: Arc<AdminState>, limit: AdminReadLimit) -> Self {
        Self(routes::router(state, limit))
    }
}

/// The origin of a request, for the guard of closed routes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    /// `None` without a connection, as in tests.
    source: Option<Source>,
    now: MonotonicTime,
}

impl Routes for AdminRoutes {
    type Target = Origin;

    fn label(&self, path: &str) -> &'static str {
        routes::label(path)
    }

    fn check_head<B>(
        &self,
        request: &http::Request<B>,
        peer: Option<&Peer>,
        now: MonotonicTime,
    ) -> Result<Origin, ApiError> {
        // The guard of the router checks the key.
        let source = peer.map(|peer| Source::of(peer.client(request.headers())));
        Ok(Origin { source, now })
    }

    async fn answer(&self, origin: Origin, mut request: Request, _id: RequestId) -> Response {
        // A middleware of axum gets facts by extensions alone.
        request.extensions_mut().insert(origin);
        self.0.clone().oneshot(request).await.unwrap_or_else(|never| match never {})
    }
}

/// Answers as long as the process lives and its runtime makes progress.
async fn healthz() -> &'static str {
    "ok\n"
}

/// Answers 200 if requests will succeed; otherwise 503 and the obstacles.
async fn readyz(State(state): State<Arc<AdminState>>) -> Response {
    let readiness = state.readiness();
    let status =
        if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness)).into_response()
}

/// The conditions under which requests succeed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Readiness {
    /// True if a worker takes requests.
    pub worker: bool,
    /// True if usage can be recorded.
    pub ledger: bool,
    /// True if the gateway is about to stop.
    pub draining: bool,
}

impl Readiness {
    /// Returns true if every condition holds.
    pub fn is_ready(self) -> bool {
        let Self { worker, ledger, draining } = self;
        worker && ledger && !draining
    }
}

#[derive(Serialize, JsonSchema)]
struct Status {
    ready: bool,
    workers: Vec<WorkerStatus>,
}

#[derive(Serialize, JsonSchema)]
struct WorkerStatus {
    name: String,
    ready: bool,
    /// True if an admin lets the worker rest: it gets no new requests.
    resting: bool,
    /// True if the worker sent an invalid report. The gateway places nothing on
    /// it until the worker is restarted.
    distrusted: bool,
    device_class: Option<String>,
    models: Vec<String>,
    queued: u32,
    running: u32,
    backlog_ns: u64,
    /// The work and the memory of the engine; null while the worker is not connected.
    engine: Option<EngineLoad>,
    /// The figures of the device's driver; null if the device is not watched.
    health: Option<Health>,
}

/// The work of an engine since its process started, and its KV cache.
#[derive(Serialize, JsonSchema)]
struct EngineLoad {
    steps: u64,
    /// Device time of the steps.
    busy_ns: u64,
    kv_blocks_used: u32,
    kv_blocks_free: u32,
}

impl From<DeviceLoad> for EngineLoad {
    fn from(load: DeviceLoad) -> Self {
        // The counts and the waiting work are figures of the metrics.
        let DeviceLoad { kv_blocks_used, kv_blocks_free, steps, busy, .. } = load;
        Self { steps, busy_ns: busy.nanos(), kv_blocks_used, kv_blocks_free }
    }
}

impl From<WorkerReport> for WorkerStatus {
    fn from(report: WorkerReport) -> Self {
        Self {
            name: report.name.to_string(),
            ready: report.ready,
            resting: report.resting,
            distrusted: report.distrusted,
            device_class: report.class.map(|class| class.to_string()),
            models: report.models.iter().map(ToString::to_string).collect(),
            queued: report.queued,
            running: report.running,
            backlog_ns: report.backlog.nanos(),
            engine: report.load.map(EngineLoad::from),
            health: report.health.map(Health::from),
        }
    }
}

/// Answers with the state of each worker.
async fn status(State(state): State<Arc<AdminState>>) -> Response {
    let workers = state.worker_reports().into_iter().map(WorkerStatus::from).collect();
    Json(Status { ready: state.readiness().is_ready(), workers }).into_response()
}

const ADMIN_KEY_FILE: &str = "admin.key";
/// Characters of the shortest key that is accepted.
const LEAST_KEY_CHARS: usize = 32;
const BEARER: &str = "bearer ";

#[cfg(test)]
mod tests;
