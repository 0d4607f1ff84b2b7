//! The second listener: health and metrics for machines, the rest for whoever
//! holds the admin key. Deny by default: a route is open only if it is in the
//! short list of `routes`.

mod checkpoint;
mod health;
mod penalties;

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use http::{HeaderMap, StatusCode, header};
use serde::Serialize;
use subtle::ConstantTimeEq as _;

use self::health::Health;
pub(crate) use self::health::concerns;
use crate::gateway::Gateway;
use crate::reply::ApiError;
use crate::stack::{method_not_allowed, unknown_route};

/// The admin key cannot be read or made.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the admin key in {path}")]
pub struct AdminKeyError {
    /// Its file.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: io::Error,
}

/// The secret that opens the admin listener. Never shown, never logged.
pub(crate) struct AdminKey(String);

impl AdminKey {
    /// The key in `data/admin.key`, made on first use, readable by the owner
    /// alone.
    pub(crate) fn load(data: &Path) -> Result<Self, AdminKeyError> {
        let path = data.join(ADMIN_KEY_FILE);
        read_or_make(&path).map(Self).map_err(|source| AdminKeyError { path, source })
    }

    fn opens(&self, headers: &HeaderMap) -> bool {
        let mut shown = headers.get_all(header::AUTHORIZATION).iter();
        let (Some(shown), None) = (shown.next(), shown.next()) else { return false };
        let Some((scheme, key)) = shown.as_bytes().split_at_checked(BEARER.len()) else {
            return false;
        };
        scheme.eq_ignore_ascii_case(BEARER) && key.ct_eq(self.0.as_bytes()).into()
    }
}

fn read_or_make(path: &Path) -> io::Result<String> {
    match fs::read_to_string(path) {
        Ok(text) => {
            let key = text.trim();
            if key.len() < LEAST_KEY_CHARS {
                let words = format!("it must have at least {LEAST_KEY_CHARS} characters");
                return Err(io::Error::new(io::ErrorKind::InvalidData, words));
            }
            Ok(key.to_owned())
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let mut bits = [0; 32];
            aws_lc_rs::rand::fill(&mut bits).map_err(|_| io::Error::other("no random bytes"))?;
            let key =
                bits.iter().fold(String::from("tga-"), |text, byte| format!("{text}{byte:02x}"));
            let mut file =
                OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
            writeln!(file, "{key}")?;
            file.sync_all()?;
            Ok(key)
        }
        Err(error) => Err(error),
    }
}

/// All admin routes.
pub(crate) fn routes(gateway: Arc<Gateway>) -> Router {
    let guarded = Router::new()
        .route("/v1/status", get(status))
        .route("/audit/checkpoint", get(checkpoint::newest))
        .route("/audit/key", get(checkpoint::key))
        .merge(penalties::routes())
        // For what is added here, and for what is not there: who has no key
        // does not learn which.
        .fallback(unknown_route)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(from_fn_with_state(Arc::clone(&gateway), require_key));
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(method_not_allowed)
        .fallback_service(guarded.with_state(Arc::clone(&gateway)))
        .with_state(gateway)
}

async fn require_key(
    State(gateway): State<Arc<Gateway>>,
    request: Request,
    next: Next,
) -> Response {
    if gateway.admin_key.opens(request.headers()) {
        next.run(request).await
    } else {
        ApiError::InvalidCredential.into_response()
    }
}

/// The process lives and its runtime turns.
async fn healthz() -> &'static str {
    "ok\n"
}

/// Requests will succeed; else 503 and why not.
async fn readyz(State(gateway): State<Arc<Gateway>>) -> Response {
    let readiness = gateway.readiness();
    let status =
        if readiness.is_ready() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(readiness)).into_response()
}

async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    let text = gateway.scrape();
    ([(header::CONTENT_TYPE, OPENMETRICS)], text).into_response()
}

/// Whether requests will succeed, and what stands in the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Readiness {
    /// A worker takes requests.
    pub worker: bool,
    /// Usage can be recorded.
    pub ledger: bool,
    /// It is about to stop.
    pub draining: bool,
}

impl Readiness {
    /// All of it together.
    pub fn is_ready(self) -> bool {
        let Self { worker, ledger, draining } = self;
        worker && ledger && !draining
    }
}

#[derive(Serialize)]
struct Status {
    ready: bool,
    workers: Vec<WorkerStatus>,
}

#[derive(Serialize)]
struct WorkerStatus {
    name: String,
    ready: bool,
    /// It lied and gets nothing until it is started anew.
    distrusted: bool,
    device_class: Option<String>,
    models: Vec<String>,
    queued: u32,
    running: u32,
    backlog_ns: u64,
    /// What its driver tells of the device; null where it is not watched.
    health: Option<Health>,
}

/// The workers as they stand.
async fn status(State(gateway): State<Arc<Gateway>>) -> Response {
    let workers = gateway
        .worker_reports()
        .into_iter()
        .map(|report| WorkerStatus {
            name: report.name.to_string(),
            ready: report.ready,
            distrusted: report.distrusted,
            device_class: report.class.map(|class| class.to_string()),
            models: report.models.iter().map(ToString::to_string).collect(),
            queued: report.queued,
            running: report.running,
            backlog_ns: report.backlog.nanos(),
            health: report.health.map(Health::from),
        })
        .collect();
    Json(Status { ready: gateway.readiness().is_ready(), workers }).into_response()
}

/// Admin routes, for metrics.
pub(crate) fn endpoint(path: &str) -> &'static str {
    match path {
        "/healthz" => "healthz",
        "/readyz" => "readyz",
        "/metrics" => "metrics",
        "/v1/status" => "admin_status",
        "/audit/checkpoint" | "/audit/key" => "admin_audit",
        "/v1/penalties" => "admin_penalties",
        _ if path.starts_with("/v1/penalties/") => "admin_penalties",
        _ => "admin_other",
    }
}

const ADMIN_KEY_FILE: &str = "admin.key";
const LEAST_KEY_CHARS: usize = 32;
const BEARER: &[u8] = b"bearer ";
const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

#[cfg(test)]
mod tests;
