//! The whole gateway over real sockets, without a worker.

use std::net::Ipv4Addr;
use std::path::Path;

use http::{Request, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tollgate_config::{Flags, Sources};
use tollgate_domain::TenantId;
use tollgate_edge::source::Source;
use tollgate_ledger::Ledger;

use super::*;
use crate::admin::documented_routes;
use crate::auth::{AuthError, KeyOptions};

pub(crate) const CONFIG: &str = r#"
[gateway]
listen = "127.0.0.1:0"
admin_listen = "127.0.0.1:0"
[plans.open]
[tenants.acme]
plan = "open"
[models.tollgate-demo]
"#;

/// A running gateway.
pub(crate) struct RunningGateway {
    pub(crate) public: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) data: tempfile::TempDir,
    pub(crate) key: String,
    pub(crate) state: Arc<AdminState>,
    keys: KeyStore,
    shutdown: Shutdown,
    tasks: TaskTracker,
}

impl RunningGateway {
    pub(crate) async fn open() -> Self {
        Self::with_config(CONFIG).await
    }

    /// Opens a gateway with the config of these tests and `more`.
    pub(crate) async fn plain(more: &str) -> Self {
        Self::with_config(&format!("{CONFIG}{more}")).await
    }

    pub(crate) async fn with_config(config: &str) -> Self {
        Self::start(Config::from_toml(Path::new("test.toml"), config).unwrap()).await
    }

    /// Opens a gateway with the config in the file `path`, which a reload reads again.
    pub(crate) async fn with_file(path: &Path) -> Self {
        let sources = Sources {
            path: Some(path.to_owned()),
            environment: Vec::new(),
            flags: Flags::default(),
        };
        Self::start(Config::load(&sources).unwrap()).await
    }

    async fn start(config: Config) -> Self {
        let data = tempfile::tempdir().unwrap();
        let config = Arc::new(config);
        let keys = KeyStore::open(data.path()).unwrap();
        let clock = Clock::system();
        let acme = TenantId::new("acme").unwrap();
        let key = keys.create(&acme, KeyOptions::default(), clock.utc()).unwrap();
        let service = GatewayService::bind(GatewayOptions {
            slices: None,
            redis: None,
            config,
            data: data.path().to_owned(),
            workers: Vec::new(),
            ledger: Ledger::open(&data.path().join("ledger.db")).unwrap(),
            keys: keys.clone(),
            clock,
        })
        .await
        .unwrap();
        let (public, admin) = (service.local_addr(), service.admin_addr());
        let state = Arc::clone(&service.state);
        let (shutdown, tasks) = (Shutdown::default(), TaskTracker::new());
        tasks.spawn(service.run(shutdown.clone(), async {}));
        tasks.close();
        let key = key.secret.expose().to_owned();
        Self { public, admin, data, key, state, keys, shutdown, tasks }
    }

    /// Returns the records of the audit log whose text has `part`.
    pub(crate) fn recorded(&self, part: &str) -> Vec<String> {
        rusqlite::Connection::open(self.data.path().join("ledger.db"))
            .unwrap()
            .prepare("SELECT record FROM records WHERE instr(record, ?1)")
            .unwrap()
            .query_map([part], |row| row.get(0))
            .unwrap()
            .collect::<Result<_, _>>()
            .unwrap()
    }

    pub(crate) fn admin_key(&self) -> String {
        std::fs::read_to_string(self.data.path().join("admin.key")).unwrap().trim().to_owned()
    }

    /// One request on a connection of its own: status and body.
    async fn ask(&self, address: SocketAddr, ask: (&str, &str), key: Option<&str>) -> Answer {
        let body = if ask.0 == "POST" { CHAT } else { "" };
        self.send(address, ask, key, body).await
    }

    /// One request with a body on a connection of its own.
    pub(crate) async fn send(
        &self,
        address: SocketAddr,
        ask: (&str, &str),
        key: Option<&str>,
        body: &str,
    ) -> Answer {
        let (method, path) = ask;
        let mut request = Request::builder().method(method).uri(path);
        if let Some(key) = key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        let request = request.body(Full::<Bytes>::from(body.to_owned())).unwrap();
        let (parts, body) = self.begin(address, request).await.into_parts();
        let body = body.collect().await.unwrap().to_bytes();
        Answer { status: parts.status, body: String::from_utf8(body.to_vec()).unwrap() }
    }

    /// Sends `request` on a connection of its own and returns the response, whose body may
    /// still come. The connection ends with the body.
    pub(crate) async fn begin(
        &self,
        address: SocketAddr,
        mut request: Request<Full<Bytes>>,
    ) -> http::Response<hyper::body::Incoming> {
        let mut roots = rustls::RootCertStore::empty();
        let authority = std::fs::read(self.data.path().join("tls/ca.pem")).unwrap();
        roots.add(CertificateDer::from_pem_slice(&authority).unwrap()).unwrap();
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        let stream = TcpStream::connect(address).await.unwrap();
        let stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connections = TaskTracker::new();
        connections.spawn(connection);
        request.headers_mut().insert(header::HOST, "localhost".parse().unwrap());
        sender.send_request(request).await.unwrap()
    }

    /// Makes a key of `tenant`, as `tollgate keys create` does.
    pub(crate) fn new_key(&self, tenant: &str) -> String {
        let tenant = TenantId::new(tenant).unwrap();
        let key = self.keys.create(&tenant, KeyOptions::default(), Clock::system().utc()).unwrap();
        key.secret.expose().to_owned()
    }

    pub(crate) async fn close(self) {
        self.shutdown.drain.cancel();
        timeout(Duration::from_secs(20), self.tasks.wait()).await.expect("it stops");
    }
}

pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) fn code(&self) -> Option<String> {
        let body: Value = serde_json::from_str(&self.body).ok()?;
        Some(body["error"]["code"].as_str()?.to_owned())
    }
}

/// T54: without the admin key only the probes answer, and unknown paths look like
/// closed ones.
#[tokio::test]
async fn admin_listener_denies_by_default() {
    let gateway = RunningGateway::open().await;
    let admin_key = gateway.admin_key();
    for (path, key, status) in [
        ("/healthz", None, 200),
        ("/metrics", None, 200),
        ("/readyz", None, 503), // there is no worker
        ("/v1/status", None, 401),
        ("/v1/status", Some("wrong"), 401),
        ("/v1/status", Some(gateway.key.as_str()), 401), // a tenant is no admin
        ("/v1/status", Some(admin_key.as_str()), 200),
        ("/v1/penalties", None, 401),
        ("/v1/penalties", Some(gateway.key.as_str()), 401),
        ("/v1/penalties", Some(admin_key.as_str()), 200),
        ("/audit/checkpoint", None, 401),
        ("/audit/checkpoint", Some(gateway.key.as_str()), 401),
        ("/audit/checkpoint", Some(admin_key.as_str()), 404), // this ledger is not signed
        ("/audit/key", None, 401),
        ("/audit/key", Some(admin_key.as_str()), 404),
        ("/nothing", None, 401),
        ("/", None, 401),
        ("/nothing", Some(admin_key.as_str()), 404),
        ("/v1/chat/completions", Some(gateway.key.as_str()), 401),
    ] {
        let answer = gateway.ask(gateway.admin, ("GET", path), key).await;
        assert_eq!(answer.status.as_u16(), status, "{path} {}", answer.body);
    }
    for path in ["/healthz", "/readyz", "/metrics", "/v1/status"] {
        let answer = gateway.ask(gateway.public, ("GET", path), Some(&admin_key)).await;
        assert_eq!(answer.status, StatusCode::NOT_FOUND, "{path} is not public");
    }
    gateway.close().await;
}

#[tokio::test]
async fn public_listener_authenticates_and_reports_missing_worker() {
    let gateway = RunningGateway::open().await;
    let key = gateway.key.clone();
    for (ask, key, status, code) in [
        (("GET", "/v1/models"), None, 401, Some("invalid_api_key")),
        (("GET", "/v1/models"), Some("wrong"), 401, Some("invalid_api_key")),
        (("GET", "/v1/models"), Some(key.as_str()), 200, None),
        (("POST", "/v1/chat/completions"), None, 401, Some("invalid_api_key")),
        (("POST", "/v1/chat/completions"), Some(key.as_str()), 503, Some("overloaded")),
        (("GET", "/v1/chat/completions"), Some(key.as_str()), 405, Some("method_not_allowed")),
        (("GET", "/"), Some(key.as_str()), 404, Some("unknown_url")),
    ] {
        let answer = gateway.ask(gateway.public, ask, key).await;
        assert_eq!(answer.status.as_u16(), status, "{ask:?} {}", answer.body);
        assert_eq!(answer.code().as_deref(), code, "{ask:?} {}", answer.body);
    }
    gateway.close().await;
}

/// T20: failing credentials throttle failing requests of their source alone. An
/// admin sees and lifts the penalty.
#[tokio::test]
async fn admin_lists_and_lifts_penalties() {
    let config = "[gateway.penalties]\nfailed_authentications_per_minute = 2\n";
    let gateway = RunningGateway::with_config(&format!("{CONFIG}{config}")).await;
    let models = ("GET", "/v1/models");
    let fail = async || gateway.ask(gateway.public, models, Some("wrong")).await.status.as_u16();
    for expected in [401, 401, 429, 429] {
        assert_eq!(fail().await, expected);
    }
    let good = gateway.ask(gateway.public, models, Some(&gateway.key)).await;
    assert_eq!(good.status, StatusCode::OK, "a good key of the same source");
    let admin_key = gateway.admin_key();
    let admin =
        async |method, path| gateway.ask(gateway.admin, (method, path), Some(&admin_key)).await;
    let listed: Value = serde_json::from_str(&admin("GET", "/v1/penalties").await.body).unwrap();
    let [row] = &listed["penalties"].as_array().unwrap()[..] else { panic!("{listed}") };
    assert_eq!(
        (&row["kind"], &row["name"], &row["offence"], &row["offences"]),
        (&"source".into(), &"127.0.0.1".into(), &"failed_authentication".into(), &4.into())
    );
    for (path, status) in [
        ("/v1/penalties/source/192.0.2.1", 404),
        ("/v1/penalties/source/nonsense", 404),
        ("/v1/penalties/tenant/acme", 404),
        ("/v1/penalties/source/127.0.0.1", 200),
        ("/v1/penalties/source/127.0.0.1", 404),
    ] {
        let answer = admin("DELETE", path).await;
        assert_eq!(answer.status.as_u16(), status, "{path} {}", answer.body);
    }
    assert_eq!(fail().await, 401, "it was lifted");
    let metrics = gateway.ask(gateway.admin, ("GET", "/metrics"), None).await.body;
    let counted = r#"tollgate_penalties_total{reason="failed_authentication"} 1"#;
    assert!(metrics.contains(counted), "{metrics}");
    // The removal is recorded once; removals of nothing are not recorded.
    let recorded = gateway.recorded("penalty.lifted");
    let said = r#""actor":"admin key""#;
    let of = r#""detail":{"offender":"127.0.0.1"}"#;
    assert!(
        recorded.len() == 1 && recorded[0].contains(said) && recorded[0].contains(of),
        "{recorded:?}"
    );
    gateway.close().await;
}

/// The list of penalties is cut at 1,000.
#[tokio::test]
async fn lifted_penalty_outside_list_is_recorded() {
    let config = "[gateway.penalties]\nfailed_authentications_per_minute = 2\n";
    let gateway = RunningGateway::plain(config).await;
    let now = gateway.state.serving.clock().now();
    for number in 0..=1_000 {
        // The first source has the shortest penalty, which the list leaves out.
        let attempts = if number == 0 { 3 } else { 4 };
        let source = Source::of(Ipv4Addr::from(0xc633_0000 + number).into());
        for _ in 0..attempts {
            let penalties = &gateway.state.source_penalties;
            penalties.failed_authentication(now, Some(source), AuthError::Rejected);
        }
    }
    let metrics = gateway.ask(gateway.admin, ("GET", "/metrics"), None).await.body;
    let held = r#"tollgate_penalties_held{kind="failed_authentication"} 1001"#;
    assert!(metrics.contains(held), "{metrics}");
    let admin_key = gateway.admin_key();
    let lift = ("DELETE", "/v1/penalties/source/198.51.0.0");
    let answer = gateway.ask(gateway.admin, lift, Some(&admin_key)).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    assert_eq!(gateway.recorded("penalty.lifted").len(), 1);
    gateway.close().await;
}

/// T20: wrong admin keys earn the penalty that wrong API keys earn. A valid admin key of the
/// same source still opens the listener, and probes need no key.
#[tokio::test]
async fn guessed_admin_keys_penalise_their_source() {
    let config = "[gateway.penalties]\nfailed_authentications_per_minute = 2\n";
    let gateway = RunningGateway::with_config(&format!("{CONFIG}{config}")).await;
    let ask =
        async |path, key| gateway.ask(gateway.admin, ("GET", path), key).await.status.as_u16();
    // A request without a key is no guess, and an open route checks no key.
    for (path, key) in [("/v1/status", None), ("/metrics", Some("wrong")), ("/healthz", None)] {
        for _ in 0..4 {
            let expected = if path == "/v1/status" { 401 } else { 200 };
            assert_eq!(ask(path, key).await, expected, "{path}");
        }
    }
    for expected in [401, 401, 429, 429] {
        assert_eq!(ask("/v1/status", Some("wrong")).await, expected);
    }
    assert_eq!(ask("/v1/nothing", Some("wrong")).await, 429, "unknown paths are guarded, too");
    let admin_key = gateway.admin_key();
    assert_eq!(ask("/v1/status", Some(&admin_key)).await, 200, "a valid key of the same source");
    let wrong_key = gateway.ask(gateway.public, ("GET", "/v1/models"), Some("wrong")).await;
    assert_eq!(wrong_key.status, StatusCode::TOO_MANY_REQUESTS, "one count for both listeners");
    let listed = gateway.ask(gateway.admin, ("GET", "/v1/penalties"), Some(&admin_key)).await;
    assert!(listed.body.contains("failed_authentication"), "{}", listed.body);
    gateway.close().await;
}

#[tokio::test]
async fn admin_listener_limits_holders_of_the_key_only() {
    let reads = "[gateway.reads]\nrequests_per_second = 1\nrequest_burst = 2\n";
    let gateway = RunningGateway::with_config(&format!("{CONFIG}{reads}")).await;
    let admin_key = gateway.admin_key();
    let status = async |key| gateway.ask(gateway.admin, ("GET", "/v1/status"), key).await;
    // Wrong keys spend nothing of the rate.
    for _ in 0..4 {
        assert_eq!(status(Some("wrong")).await.status, StatusCode::UNAUTHORIZED);
    }
    let mut refused = None;
    // Two pass at once; the third follows within the second that a token takes,
    // unless the machine is slow, and then one of the next ones is refused.
    for _ in 0..50 {
        let answer = status(Some(admin_key.as_str())).await;
        if answer.status == StatusCode::TOO_MANY_REQUESTS {
            refused = Some(answer);
            break;
        }
    }
    let refused = refused.expect("fifty requests in a row exceed one a second");
    assert_eq!(refused.code().as_deref(), Some("rate_limit_exceeded"));
    let probe = gateway.ask(gateway.admin, ("GET", "/healthz"), None).await;
    assert_eq!(probe.status, StatusCode::OK, "probes are not limited");
    gateway.close().await;
}

/// A misspelt parameter would be ignored: a dry run would be a real one, and the end of one
/// raise the end of all.
#[tokio::test]
async fn admin_listener_refuses_unknown_query_parameters() {
    let gateway = RunningGateway::open().await;
    let admin_key = gateway.admin_key();
    let mut schemas = schemars::SchemaGenerator::default();
    let mut refused = 0;
    for route in documented_routes(&mut schemas) {
        if route.operation.is_none_or(|operation| operation.query.is_empty()) {
            continue;
        }
        let path = route.path.replace("{tenant}", "acme").replace("{month}", "2026-11");
        let ask = (route.method.as_str(), &*format!("{path}?no_such=1"));
        let answer = gateway.ask(gateway.admin, ask, Some(&admin_key)).await;
        assert_eq!(answer.status, StatusCode::BAD_REQUEST, "{ask:?} {}", answer.body);
        refused += 1;
    }
    assert!(refused > 7, "{refused}");
    gateway.close().await;
}

#[tokio::test]
async fn gateway_names_the_port_in_use() {
    let gateway = RunningGateway::open().await;
    let data = tempfile::tempdir().unwrap();
    let config = CONFIG.replacen("127.0.0.1:0", &gateway.public.to_string(), 1);
    let error = GatewayService::bind(GatewayOptions {
        slices: None,
        redis: None,
        config: Arc::new(Config::from_toml(Path::new("test.toml"), &config).unwrap()),
        data: data.path().to_owned(),
        workers: Vec::new(),
        ledger: Ledger::open(&data.path().join("ledger.db")).unwrap(),
        keys: KeyStore::open(data.path()).unwrap(),
        clock: Clock::system(),
    })
    .await
    .err()
    .expect("the port is in use");
    assert_eq!(error.to_string(), format!("cannot listen on {}", gateway.public));
    gateway.close().await;
}

const CHAT: &str = r#"{"model":"tollgate-demo","messages":[{"role":"user","content":"Hi"}]}"#;
