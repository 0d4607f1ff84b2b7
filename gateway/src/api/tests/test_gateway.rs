//! A gateway without its listeners, for tests: routes, limits, ledger and keys are
//! real, and the workers are fakes.

use std::path::Path;
use std::sync::Arc;

use axum::body::Body;
use axum::response::IntoResponse as _;
use http::{Request, Response, StatusCode, header};
use http_body_util::BodyExt;
use serde_json::Value;
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;
use tollgate_admission::{Admission, AdmissionOptions};
use tollgate_config::{Config, LiveConfig};
use tollgate_domain::{RequestId, TenantId};
use tollgate_jobs::{JobLimits, Jobs, JobsOptions, JobsPlace};
use tollgate_ledger::{Ledger, LedgerHandle};
use tollgate_serving::idempotency::Idempotency;
use tollgate_serving::test_support::FakeWorker;
use tollgate_serving::{Observer, Serving, ServingOptions, SharedLedger};

use crate::Clock;
use crate::access_log::AccessLog;
use crate::api::jobs::JobsApi;
use crate::api::{Api, BodyBudget, body_budget_options};
use crate::auth::{AuthenticatedCaller, Authenticator, KeyOptions, KeyStore};
use crate::client_ids::ClientIdTable;
use crate::connection_owners::OwnerNumbers;
use crate::members::Peers;
use crate::read_limit::ReadLimit;
use crate::reply::ApiError;
use crate::routes::PublicRoutes;
use crate::source_penalties::SourcePenalties;
use crate::stack::Routes as _;
use crate::telemetry::Metrics;

/// Tenants `acme` and `other`, without limits.
pub(crate) const PLAIN: &str = r#"
[plans.open]
[tenants.acme]
plan = "open"
[tenants.other]
plan = "open"
"#;

pub(crate) struct TestGateway {
    pub(crate) api: Api,
    pub(crate) admission: Admission,
    /// Cancelled to end running requests at once.
    pub(crate) stopping: CancellationToken,
    pub(crate) ledger: LedgerHandle,
    _folder: TempDir,
    routes: PublicRoutes,
    keys: Vec<(&'static str, String)>,
    drawn: std::sync::atomic::AtomicU64,
}

impl TestGateway {
    /// Makes a folder for sockets, before there is a gateway.
    pub(crate) fn folder() -> TempDir {
        tempfile::tempdir().expect("a folder")
    }

    /// Opens a gateway by `config` and waits until all `workers` are connected.
    pub(crate) async fn open(folder: TempDir, config: &str, workers: &[&FakeWorker]) -> Self {
        Self::open_at_once(folder, config, workers).connected(workers).await
    }

    /// Opens a gateway that shares its ledger and its workers, and waits until all `workers` are
    /// connected. Its number is 0, which is in the ids of its requests.
    pub(crate) async fn open_shared(
        folder: TempDir,
        config: &str,
        workers: &[&FakeWorker],
    ) -> Self {
        let shared = SharedLedger { name: "books".to_owned(), number: 0, earlier: Vec::new() };
        Self::open_as(folder, config, workers, Some(shared)).connected(workers).await
    }

    /// Opens a gateway and does not wait for its workers.
    pub(crate) fn open_at_once(folder: TempDir, config: &str, workers: &[&FakeWorker]) -> Self {
        Self::open_as(folder, config, workers, None)
    }

    async fn connected(self, workers: &[&FakeWorker]) -> Self {
        while self.api.serving.workers().connected().count() < workers.len() {
            self.api.serving.workers().changed().await;
        }
        self
    }

    fn open_as(
        folder: TempDir,
        config: &str,
        workers: &[&FakeWorker],
        shared: Option<SharedLedger>,
    ) -> Self {
        let config = Arc::new(Config::from_toml(Path::new("test.toml"), config).expect("a config"));
        let clock = Clock::system();
        let store = KeyStore::open(folder.path()).expect("keys");
        let keys = ["acme", "other"].map(|tenant| {
            let name = TenantId::new(tenant).expect("a name");
            let key = store.create(&name, KeyOptions::default(), clock.utc()).expect("a key");
            (tenant, key.secret.expose().to_owned())
        });
        let ledger = Ledger::open(&folder.path().join("ledger.db")).expect("a ledger");
        let (metrics, stopping) = (Metrics::new(Clock::system()), CancellationToken::new());
        let admission = Admission::new(AdmissionOptions::default());
        let serving = Serving::start(ServingOptions {
            workers: workers.iter().map(|worker| worker.endpoint.clone()).collect(),
            ledger: ledger.clone(),
            admission: admission.clone(),
            config: LiveConfig::new(Arc::clone(&config)),
            keys: Arc::new(store.clone()),
            idempotency: Idempotency::open(
                folder.path(),
                config.gateway().idempotency.clone(),
                ledger.reader().clone(),
                clock.clone(),
            )
            .expect("an idempotency store"),
            clock,
            observer: Arc::clone(&metrics) as Arc<dyn Observer>,
            stopping: stopping.clone(),
            shared,
            caps: None,
            rates: None,
        });
        let authenticator = Authenticator::new(store, Vec::new()).expect("no issuers");
        let source_penalties =
            SourcePenalties::new(&config.gateway().penalties, Arc::clone(&metrics));
        let draining = CancellationToken::new();
        let bodies = BodyBudget::new(body_budget_options(&config.gateway().requests));
        let owner_numbers = OwnerNumbers::default();
        let live = LiveConfig::new(Arc::clone(&config));
        let access_log = AccessLog::new(live, serving.clock().clone());
        let api = Api {
            serving,
            access_log,
            client_ids: ClientIdTable::default(),
            config: LiveConfig::new(Arc::clone(&config)),
            authenticator,
            source_penalties,
            owner_numbers,
            metrics,
            bodies,
            jobs: JobsApi::new(jobs(folder.path()), Peers::new(Clock::system()), false),
            draining,
        };
        Self {
            routes: PublicRoutes::new(api.clone(), ReadLimit::new(&config.gateway().reads)),
            api,
            admission,
            stopping,
            ledger,
            _folder: folder,
            keys: keys.to_vec(),
            drawn: Default::default(),
        }
    }

    /// Uses another key for `tenant`.
    pub(crate) fn with_key(mut self, tenant: &'static str, key: &str) -> Self {
        self.keys.retain(|(name, _)| *name != tenant);
        self.keys.push((tenant, key.to_owned()));
        self
    }

    /// Answers a request of `tenant`.
    pub(crate) async fn ask(
        &self,
        tenant: &str,
        method: &str,
        path: &str,
        body: &str,
    ) -> Response<Body> {
        self.ask_again(tenant, method, path, body, None).await
    }

    /// Answers a request of `tenant` with an idempotency key.
    pub(crate) async fn ask_again(
        &self,
        tenant: &str,
        method: &str,
        path: &str,
        body: &str,
        again: Option<&str>,
    ) -> Response<Body> {
        let number = self.drawn.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (_, key) = self.keys.iter().find(|(name, _)| *name == tenant).expect("a tenant");
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::AUTHORIZATION, format!("Bearer {key}"))
            .body(Body::from(body.to_owned()))
            .expect("a request");
        if let Some(again) = again {
            let again = again.parse().expect("a header's value");
            request.headers_mut().insert("idempotency-key", again);
        }
        self.answer(request, RequestId::from_random(u128::from(number))).await
    }

    /// Answers `request`, whose credential is in its headers.
    pub(crate) async fn answer(&self, request: Request<Body>, id: RequestId) -> Response<Body> {
        let now = self.api.serving.clock().now();
        match self.routes.check_head(&request, None, now) {
            Ok(target) => self.routes.answer(target, request, id).await,
            Err(error) => ApiError::into_response(error),
        }
    }

    /// Returns the authenticated caller with `tenant`'s key.
    pub(crate) fn caller(&self, tenant: &str) -> AuthenticatedCaller {
        let (_, key) = self.keys.iter().find(|(name, _)| *name == tenant).expect("a tenant");
        let credential = format!("Bearer {key}").parse().expect("a header's value");
        let headers = http::HeaderMap::from_iter([(header::AUTHORIZATION, credential)]);
        let now = self.api.serving.clock().utc();
        self.api.authenticator.authenticate(&headers, None, now).expect("a valid key")
    }

    /// Returns the secret of `tenant`'s key.
    pub(crate) fn key(&self, tenant: &str) -> &str {
        &self.keys.iter().find(|(name, _)| *name == tenant).expect("a tenant").1
    }

    /// Returns the public id of `tenant`'s key.
    pub(crate) fn key_id(&self, tenant: &str) -> String {
        let name = TenantId::new(tenant).expect("a name");
        self.api.authenticator.keys().list(Some(&name)).expect("keys")[0].id.to_string()
    }

    /// Asks for a chat with more `fields`.
    pub(crate) async fn chat(&self, fields: &str) -> Response<Body> {
        let comma = if fields.is_empty() { "" } else { "," };
        let body = format!(
            r#"{{"model":"fake","messages":[{{"role":"user","content":"Hello there"}}]{comma}{fields}}}"#
        );
        self.ask("acme", "POST", "/v1/chat/completions", &body).await
    }

    /// Waits until every request's task has ended.
    pub(crate) async fn settled(&self) {
        self.api.serving.tasks().close();
        self.api.serving.tasks().wait().await;
        self.api.serving.tasks().reopen();
        assert_eq!(self.api.serving.limits().status().running, 0, "a hold is open");
        assert_eq!(self.api.serving.limits().status().queued, 0, "a hold waits");
    }
}

/// Returns the status and the body as JSON.
pub(crate) async fn json(response: Response<Body>) -> (StatusCode, Value) {
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.expect("a body").to_bytes();
    (parts.status, serde_json::from_slice(&bytes).expect("JSON"))
}

/// Returns the status and the body as text.
pub(crate) async fn text(response: Response<Body>) -> (StatusCode, String) {
    let (parts, body) = response.into_parts();
    let bytes = body.collect().await.expect("a body").to_bytes();
    (parts.status, String::from_utf8(bytes.to_vec()).expect("text"))
}

/// Returns the value of header `name`.
pub(crate) fn header<'a>(response: &'a Response<Body>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().expect("text"))
}

/// Opens files and batches in a folder of a test.
fn jobs(folder: &Path) -> Jobs {
    let clock = Clock::system();
    let folder = folder.join("jobs");
    Jobs::open(JobsOptions {
        place: JobsPlace::Own { folder, before_open: Arc::new(|_| Ok(())) },
        limits: JobLimits::default(),
        utc: Arc::new(move || clock.utc()),
    })
    .expect("a folder that can be written")
}
