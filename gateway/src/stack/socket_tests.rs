//! The stack behind a listener of the edge, over real sockets and with short
//! deadlines: every misbehaving peer is closed, and every other one is served.

mod conformance;
mod drain_body;
mod held;
mod hostile;
mod proxied;
mod served;
mod windows;

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{get, post};
use http::Request;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::task::TaskTracker;
use tollgate_edge::listener::{ConnectionLimitOptions, ListenerControl, ListenerStop};
use tollgate_edge::source::{SourceOptions, SourceRing};
use tollgate_edge::tls::{TlsIdentity, TlsSource, development_authority};
use tollgate_edge::{Listener, ListenerMetrics, ListenerOptions};

use super::tests::TestRoutes;
use super::{Stack, StackOptions};
use crate::telemetry::Metrics;

/// A bound on every wait of a test, far beyond all deadlines under test.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of each piece of the endless response of `/small`.
const SMALL_PIECE: usize = 64;

/// A listener with a stack of test routes, and its observations.
struct TestListener {
    address: SocketAddr,
    metrics: Arc<Metrics>,
    stop: ListenerStop,
    control: ListenerControl,
    /// Lets `/gated` answer.
    gate: Arc<Notify>,
    /// Notified when `/gated` or `/never` was reached.
    reached: Arc<Notify>,
    client: Arc<rustls::ClientConfig>,
    tasks: TaskTracker,
    _data: tempfile::TempDir,
}

/// Deadlines a hundred times shorter than the real ones.
fn quick() -> ListenerOptions {
    ListenerOptions {
        handshake: Duration::from_millis(200),
        first_byte: Duration::from_millis(200),
        head: Duration::from_millis(200),
        idle: Duration::from_millis(400),
        write_progress: Duration::from_millis(300),
        ping_interval: Duration::from_millis(300),
        ping_answer: Duration::from_millis(300),
        drain: Duration::from_millis(300),
        connection_limits: generous(),
        ..ListenerOptions::default()
    }
}

/// The real deadlines, which no test reaches.
fn patient() -> ListenerOptions {
    ListenerOptions { connection_limits: generous(), ..ListenerOptions::default() }
}

fn generous() -> ConnectionLimitOptions {
    let many = NonZeroU32::new(10_000).unwrap();
    ConnectionLimitOptions {
        connections: 1_000,
        per_source: 1_000,
        authenticated_per_source: 1_000,
        new_per_second: many,
        new_burst: many,
    }
}

impl TestListener {
    fn open(options: ListenerOptions) -> Self {
        Self::with_sources(options, None)
    }

    fn with_sources(options: ListenerOptions, sources: Option<SourceOptions>) -> Self {
        let data = tempfile::tempdir().unwrap();
        let tls = TlsIdentity::load(TlsSource::Development { folder: data.path().into() }).unwrap();
        let metrics = Metrics::new(tollgate_serving::Clock::system());
        let listener = Listener::bind(
            ([127, 0, 0, 1], 0).into(),
            options,
            tls.server_config().unwrap(),
            Arc::clone(&metrics) as Arc<dyn ListenerMetrics>,
        )
        .unwrap();
        let address = listener.local_addr().unwrap();
        let (gate, reached) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let service = Stack::new(
            TestRoutes::new(routes(&gate, &reached)),
            StackOptions {
                metrics: Arc::clone(&metrics),
                access_log: crate::access_log::AccessLog::off(),
                sources: sources.as_ref().map(SourceRing::new),
                cors: None,
                largest_body: crate::doors::LargestBody::new(2 << 20),
                gateway: 0,
            },
            crate::Clock::system(),
        );
        let control = listener.control();
        let (stop, tasks) = (ListenerStop::default(), TaskTracker::new());
        tasks.spawn(listener.serve(service, stop.clone()));
        tasks.close();
        let client = trusting(data.path());
        Self { address, metrics, stop, control, gate, reached, client, tasks, _data: data }
    }

    async fn tcp(&self) -> TcpStream {
        TcpStream::connect(self.address).await.unwrap()
    }

    /// Opens a connection that offers `protocols`, up to the end of the handshake.
    async fn tls(&self, protocols: &[&str]) -> TlsStream<TcpStream> {
        self.try_tls(protocols).await.unwrap()
    }

    async fn try_tls(&self, protocols: &[&str]) -> io::Result<TlsStream<TcpStream>> {
        let mut config = (*self.client).clone();
        config.alpn_protocols = protocols.iter().map(|name| name.as_bytes().to_vec()).collect();
        let name = ServerName::try_from("localhost").unwrap();
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, self.tcp().await);
        timeout(PATIENCE, connecting).await.unwrap()
    }

    /// Waits until the listener has ended with all its connections.
    async fn ended(&self) {
        timeout(PATIENCE, self.tasks.wait()).await.expect("the listener ends");
    }

    /// A counter's value, as a scrape says it.
    fn count(&self, series: &str) -> u64 {
        let text = self.metrics.text();
        let value = text.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
        value.map_or(0, |value| value.parse().unwrap())
    }

    /// Waits until a counter has reached `least`.
    async fn counted(&self, series: &str, least: u64) {
        let reached = async {
            while self.count(series) < least {
                tokio::task::yield_now().await;
            }
        };
        if timeout(PATIENCE, reached).await.is_err() {
            panic!("{series} stays at {}:\n{}", self.count(series), self.metrics.text());
        }
    }
}

fn routes(gate: &Arc<Notify>, reached: &Arc<Notify>) -> Router {
    let (gate, at_gate, at_never) = (Arc::clone(gate), Arc::clone(reached), Arc::clone(reached));
    let endless = || async {
        let piece = || Ok::<_, io::Error>(vec![b'x'; 16 * 1024]);
        Body::from_stream(futures_util::stream::repeat_with(piece))
    };
    let small = || async {
        let piece = || Ok::<_, io::Error>(vec![b'x'; SMALL_PIECE]);
        Body::from_stream(futures_util::stream::repeat_with(piece))
    };
    Router::new()
        .route("/small", get(small))
        .route("/hello", get(|| async { "hello" }))
        .route("/echo", post(|body: axum::body::Bytes| async move { body }))
        .route("/endless", get(endless))
        .route(
            "/gated",
            get(move || async move {
                at_gate.notify_one();
                gate.notified().await;
                "let through"
            }),
        )
        .route(
            "/never",
            get(move || async move {
                at_never.notify_one();
                std::future::pending::<&str>().await
            }),
        )
}

fn trusting(folder: &Path) -> Arc<rustls::ClientConfig> {
    let mut roots = rustls::RootCertStore::empty();
    let authority = std::fs::read(development_authority(folder)).unwrap();
    roots.add(CertificateDer::from_pem_slice(&authority).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// Everything until the peer closes, which it must.
async fn until_closed(mut stream: impl AsyncRead + Unpin) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is a close, too.
    let _ = timeout(PATIENCE, stream.read_to_end(&mut bytes)).await.expect("the peer closes");
    bytes
}
