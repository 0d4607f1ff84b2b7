//! One connection, from its first byte to its last.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::body::Body;
use axum::response::{IntoResponse, Response};
use http::{Method, Request};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt as _;

use super::activity::{Activity, Late, Protocol};
use super::gate::Peer;
use super::watched::{RequestInFlight, WatchedBody, WatchedReads, WatchedWrites};
use super::{ListenerOptions, RequestService, Shared, plain};
use crate::reply::ApiError;

type Wire = TlsStream<WatchedWrites<TcpStream>>;
type Bytes = TokioIo<WatchedReads<Wire>>;

/// Serves a connection until it ends, of itself or by a deadline.
pub(super) async fn serve(
    shared: &Arc<Shared>,
    stream: TcpStream,
    peer: Peer,
    service: RequestService,
    draining: CancellationToken,
) {
    let opening = async {
        match shake_hands(shared, stream).await {
            Ok(wire) => Some(wire),
            Err(failed) => {
                shared.metrics.handshake_failed(failed);
                None
            }
        }
    };
    let wire = tokio::select! {
        () = draining.cancelled() => return,
        wire = opening => wire,
    };
    if let Some(wire) = wire {
        let ended = speak(shared, wire, peer, service, &draining).await;
        shared.metrics.connection_ended(ended);
    }
}

/// TLS, within its deadline. A silent connection waits for its first byte
/// without a place among the handshakes, so that silence keeps nobody out.
async fn shake_hands(shared: &Shared, stream: TcpStream) -> Result<Wire, &'static str> {
    let options = &shared.options;
    let mut first = [0];
    match timeout(options.first_byte, stream.peek(&mut first)).await {
        Err(_) => return Err("silent"),
        Ok(Ok(0) | Err(_)) => return Err("closed"),
        Ok(Ok(_)) => {}
    }
    if first[0] != plain::TLS_HANDSHAKE {
        plain::refuse(stream).await;
        return Err("plain");
    }
    let handshake = async {
        let _place = shared.handshakes.acquire().await.map_err(|_| "closed")?;
        let acceptor = TlsAcceptor::from(Arc::clone(&shared.tls));
        acceptor.accept(WatchedWrites::new(stream)).await.map_err(|_| "tls")
    };
    timeout(options.handshake, handshake).await.unwrap_or(Err("timeout"))
}

/// HTTP/1 or HTTP/2, as ALPN chose; a client that offered nothing gets
/// HTTP/1. Returns how it ended, as a metric's label.
async fn speak(
    shared: &Arc<Shared>,
    mut wire: Wire,
    peer: Peer,
    service: RequestService,
    draining: &CancellationToken,
) -> &'static str {
    let options = &shared.options;
    let is_http2 = wire.get_ref().1.alpn_protocol() == Some(b"h2");
    let protocol = if is_http2 { Protocol::Http2 } else { Protocol::Http1 };
    let activity = Arc::new(Activity::new(protocol, Instant::now()));
    wire.get_mut().0.report_to(Arc::clone(&activity));
    let bytes: Bytes = TokioIo::new(WatchedReads::new(wire, Arc::clone(&activity)));
    // Cancelled when nothing new may begin on this connection.
    let closing = CancellationToken::new();
    let answers = service_fn({
        let (activity, closing) = (Arc::clone(&activity), closing.clone());
        move |request| answer(service.clone(), peer.clone(), &activity, &closing, request)
    });
    let watch = Watch { activity: &activity, options, draining, closing: &closing };
    match protocol {
        Protocol::Http1 => {
            let connection = http1_builder(options).serve_connection(bytes, answers);
            watch.over(connection, |connection| connection.graceful_shutdown()).await
        }
        Protocol::Http2 => {
            let tasks = Streams(shared.streams.clone());
            let connection = http2_builder(options, tasks).serve_connection(bytes, answers);
            watch.over(connection, |connection| connection.graceful_shutdown()).await
        }
    }
}

fn http1_builder(options: &ListenerOptions) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        // The activity's deadlines are finer; this one stands behind them.
        .header_read_timeout(options.idle + options.head)
        .max_headers(MOST_HEADERS)
        // The buffer alone is a soft bound: a read may overshoot it.
        .max_header_size(options.header_list as usize)
        .max_buf_size(HTTP1_BUFFER)
        .keep_alive(true);
    builder
}

fn http2_builder(options: &ListenerOptions, tasks: Streams) -> http2::Builder<Streams> {
    let mut builder = http2::Builder::new(tasks);
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(options.streams)
        .max_pending_accept_reset_streams(options.pending_accept_resets)
        .max_local_error_reset_streams(options.local_error_resets)
        .max_header_list_size(options.header_list)
        .max_send_buf_size(HTTP2_SEND_BUFFER)
        .initial_stream_window_size(HTTP2_STREAM_WINDOW)
        .initial_connection_window_size(HTTP2_CONNECTION_WINDOW)
        .keep_alive_interval(options.ping_interval)
        .keep_alive_timeout(options.ping_answer);
    builder
}

/// One request, watched from its head to the end of its response.
fn answer(
    service: RequestService,
    peer: Peer,
    activity: &Arc<Activity>,
    closing: &CancellationToken,
    request: Request<Incoming>,
) -> impl Future<Output = Result<Response<WatchedBody>, std::convert::Infallible>> + use<> {
    let in_flight = RequestInFlight::begin(activity);
    let is_closing = closing.is_cancelled();
    async move {
        let bodiless = request.method() == Method::HEAD;
        let response = if is_closing {
            ApiError::Draining.into_response()
        } else {
            let mut request = request.map(Body::new);
            request.extensions_mut().insert(peer);
            service.oneshot(request).await?
        };
        Ok(response.map(|body| WatchedBody::new(body, in_flight, bodiless)))
    }
}

/// What watches over a connection.
struct Watch<'a> {
    activity: &'a Activity,
    options: &'a ListenerOptions,
    draining: &'a CancellationToken,
    closing: &'a CancellationToken,
}

impl Watch<'_> {
    /// Runs `connection` to its end. `wind_down` asks it to begin nothing new.
    /// Returns how it ended.
    async fn over<C>(&self, connection: C, wind_down: impl Fn(Pin<&mut C>)) -> &'static str
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let mut connection = pin!(connection);
        let mut draining = pin!(self.draining.cancelled());
        let mut alarm = pin!(sleep_until(Instant::now()));
        let mut end: Option<End> = None;
        poll_fn(|cx| {
            self.activity.watch(cx.waker());
            loop {
                if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                    let ended = if result.is_ok() { "closed" } else { "broken" };
                    return Poll::Ready(end.map_or(ended, |end| end.why));
                }
                if end.is_none() && draining.as_mut().poll(cx).is_ready() {
                    end = Some(End::within(self.options.drain, "drained"));
                } else if end.is_none() && self.activity.cancelled() > self.options.cancels {
                    end = Some(End::within(CANCELS_GRACE, "cancels"));
                } else {
                    break;
                }
                self.closing.cancel();
                wind_down(connection.as_mut());
            }
            loop {
                let (mut due, late) = self.activity.deadline(self.options);
                let at = end.map(|end| end.due(self.activity.quiet_since()));
                if let Some(at) = at
                    && (late == Late::Age || at < due)
                {
                    due = at;
                }
                if Instant::now() < due {
                    // Later than armed is found out when the alarm rings.
                    if alarm.is_elapsed() || due < alarm.deadline() {
                        alarm.as_mut().reset(due);
                    }
                    match alarm.as_mut().poll(cx) {
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(()) => continue,
                    }
                }
                match end {
                    Some(end) if at.is_some_and(|at| at <= due) => return Poll::Ready(end.why),
                    None if late == Late::Age => {
                        end = Some(End::within(self.options.age_grace, late.as_str()));
                        self.closing.cancel();
                        wind_down(connection.as_mut());
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    _ => return Poll::Ready(late.as_str()),
                }
            }
        })
        .await
    }
}

/// How a connection that winds down will end.
#[derive(Clone, Copy)]
struct End {
    began: Instant,
    latest: Instant,
    /// A metric's label.
    why: &'static str,
}

impl End {
    fn within(grace: Duration, why: &'static str) -> Self {
        let began = Instant::now();
        Self { began, latest: began + grace, why }
    }

    /// When it is closed, whatever the peer does: soon after its last response,
    /// since a peer that sleeps never says goodbye.
    fn due(self, quiet_since: Option<Instant>) -> Instant {
        match quiet_since {
            Some(since) => self.latest.min(since.max(self.began) + GOODBYE),
            None => self.latest,
        }
    }
}

/// Runs hyper's HTTP/2 streams where the listener waits for them.
#[derive(Clone)]
struct Streams(TaskTracker);

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// Headers of an HTTP/1 request; beyond: 431.
const MOST_HEADERS: usize = 64;

/// Bytes that HTTP/1 buffers either way.
const HTTP1_BUFFER: usize = 64 * 1024;

/// Bytes of answers that one stream may have waiting.
const HTTP2_SEND_BUFFER: usize = 64 * 1024;

/// Bytes of body that one stream, and all together, may send ahead of being
/// read.
const HTTP2_STREAM_WINDOW: u32 = 64 * 1024;
const HTTP2_CONNECTION_WINDOW: u32 = 1024 * 1024;

/// A peer that cancels too much is told so, and gone within this time.
const CANCELS_GRACE: Duration = Duration::from_millis(100);

/// How long a peer with nothing under way may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);
