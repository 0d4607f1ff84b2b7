//! The life of one connection, from its first byte to its last byte.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Method, Request, Response, header};
use http_body::Body as _;
use http_body_util::{Either, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::task::TaskTracker;

use super::activity::{Activity, MissedDeadline, Protocol};
use super::connection_limits::ConnectionPermit;
use super::connection_table::{Eviction, OpenConnection};
use super::frames::Frames;
use super::heads::Heads;
use super::instrumented_io::{
    InstrumentedBody, InstrumentedReads, Lingering, RequestInFlight, Socket,
};
use super::peer::Peer;
use super::pending_handshakes::{PeerWait, PendingHandshake};
use super::proxy::{self, ProxyHeader};
use super::response_progress::{StreamEnd, run_while_read};
use super::service::{Answer, HeadVerdict, RefusedHead, RequestRefusal, Service};
use super::{ListenerMetrics, ListenerOptions, ListenerStop, MOST_HEADERS, Shared, plain};
use crate::drain_body::{BoxError, UnwantedBody};
use crate::source::Source;

type Wire = TlsStream<Socket>;

/// A connection that passed the connection limits.
pub(super) struct Accepted {
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    pub(super) permit: ConnectionPermit,
    /// The options for this connection up to its end.
    pub(super) options: Arc<ListenerOptions>,
}

/// Serves a connection until it ends, by itself or by a deadline.
pub(super) async fn serve<S: Service>(
    shared: &Arc<Shared>,
    accepted: Accepted,
    service: Arc<S>,
    stop: ListenerStop,
) {
    let place = Arc::clone(accepted.permit.connection());
    let options = Arc::clone(&accepted.options);
    let opened = tokio::select! {
        () = stop.end.cancelled() => return,
        _ = place.evicted() => Err("displaced"),
        opened = open(shared, &*service, accepted) => opened,
    };
    match opened {
        Ok((wire, peer)) => {
            let terms = Terms { shared, options: &options, stop: &stop };
            let ended = speak(&terms, wire, peer, service).await;
            shared.metrics.connection_ended(ended);
        }
        Err(failed) => shared.metrics.handshake_failed(failed),
    }
}

/// The terms under which a connection speaks.
struct Terms<'a> {
    shared: &'a Arc<Shared>,
    options: &'a ListenerOptions,
    stop: &'a ListenerStop,
}

/// Runs a connection up to the end of its TLS handshake, once it has a place among the
/// handshakes. Returns the encrypted stream and the peer, or the reason of the failure
/// as a metric's label.
async fn open(
    shared: &Shared,
    service: &impl Service,
    accepted: Accepted,
) -> Result<(Wire, Peer), &'static str> {
    let source = Source::of(accepted.address.ip());
    // Its drop at the end frees the place for another connection.
    let pending = shared.pending_handshakes.begin(source).await.ok_or("crowded")?;
    tokio::select! {
        () = pending.displaced() => Err("displaced"),
        opened = identify(shared, service, accepted, &pending) => opened,
    }
}

/// Finds out the peer of a connection, and runs the TLS handshake with it.
async fn identify(
    shared: &Shared,
    service: &impl Service,
    accepted: Accepted,
    pending: &PendingHandshake,
) -> Result<(Wire, Peer), &'static str> {
    let Accepted { mut stream, address, permit, options } = accepted;
    let proxies = &options.proxies;
    let mut client = address;
    if proxies.proxy_protocol && proxies.trusts(address.ip()) {
        let header = timeout(options.first_byte, proxy::read(&mut stream));
        match pending.peer().during(header).await {
            Err(_) => return Err("silent"),
            Ok(Err(proxy::InvalidHeader)) => return Err("proxy_header"),
            // A health check of the proxy has no client, so it counts against the total alone.
            Ok(Ok(ProxyHeader::Proxy)) => {}
            Ok(Ok(ProxyHeader::Client(named))) => {
                // The source is known only now; so far the connection counts
                // against the total alone. It gives way to others while it waits.
                let source = Source::of(named.ip());
                pending.set_source(source);
                if let Err(reached) = permit.count_named(named.ip()).await {
                    shared.refuse(source, reached);
                    return Err("refused");
                }
                client = named;
            }
        }
    }
    let peer = Peer::new(client, Arc::clone(&options), permit);
    let wire = shake_hands(shared, &options, service, (stream, pending.peer()), &peer).await?;
    Ok((wire, peer))
}

/// Runs the TLS handshake within its deadline.
async fn shake_hands(
    shared: &Shared,
    options: &ListenerOptions,
    service: &impl Service,
    (stream, peer_wait): (TcpStream, &PeerWait),
    peer: &Peer,
) -> Result<Wire, &'static str> {
    // Peeked, not read: the TLS library must see these bytes.
    let mut first = [0; proxy::SIGNATURE.len()];
    let peeked = peer_wait.during(timeout(options.first_byte, stream.peek(&mut first)));
    let seen = match peeked.await {
        Err(_) => return Err("silent"),
        Ok(Ok(0) | Err(_)) => return Err("closed"),
        Ok(Ok(seen)) => &first[..seen],
    };
    // At least one byte was seen, because a peek of none means that the peer has closed.
    if seen[0] != plain::TLS_HANDSHAKE {
        if proxy::SIGNATURE.starts_with(seen) {
            // A PROXY header from an address that config does not trust.
            return Err("proxy_header");
        }
        plain::refuse(stream, service.plain_http_body()).await;
        return Err("plain");
    }
    // The peer travels with the socket, so that a lingering socket stays counted.
    let lingering = Lingering { tasks: shared.streams.clone(), peer: peer.clone() };
    let acceptor = TlsAcceptor::from(Arc::clone(&shared.tls));
    let handshake = acceptor.accept(Socket::new(stream, lingering));
    match shared.handshake_slots.run(handshake, peer_wait, options.handshake).await {
        Err(_) => Err("timeout"),
        Ok(Err(_)) => Err("tls"),
        Ok(Ok(wire)) => Ok(wire),
    }
}

/// Speaks HTTP/1 or HTTP/2, as ALPN chose; a client that offered no protocol
/// gets HTTP/1. Returns the reason of the end as a metric's label.
#[expect(
    clippy::disallowed_methods,
    reason = "the deadlines of a connection are on the system's clock"
)]
async fn speak<S: Service>(
    terms: &Terms<'_>,
    mut wire: Wire,
    peer: Peer,
    service: Arc<S>,
) -> &'static str {
    let Terms { shared, options, .. } = *terms;
    let is_http2 = wire.get_ref().1.alpn_protocol() == Some(b"h2");
    let protocol = if is_http2 { Protocol::Http2 } else { Protocol::Http1 };
    let activity = Activity::new(protocol, Instant::now(), options.write_progress);
    let activity = Arc::new(activity);
    // From here on the activity's deadlines replace that of the handshake.
    wire.get_mut().0.report_to(Arc::clone(&activity));
    let place = Arc::clone(peer.open_connection());
    place.report(Arc::clone(&activity));
    let bytes = InstrumentedReads::new(wire, Arc::clone(&activity));
    let answers = service_fn({
        let (tasks, activity) = (shared.streams.clone(), Arc::clone(&activity));
        let answers = Answers { service, tasks, peer, activity };
        move |request| answers.answer(request)
    });
    let watch = Watch { activity: &activity, terms, place: &place };
    match protocol {
        Protocol::Http1 => {
            let limit = options.header_list as usize;
            let heads = TokioIo::new(Heads::new(bytes, Arc::clone(&activity), limit));
            let connection = http1_builder(options).serve_connection(heads, answers);
            watch.over(connection, |connection| connection.graceful_shutdown()).await
        }
        Protocol::Http2 => {
            let rate = options.idle_frames;
            let now = Instant::now();
            let frames = TokioIo::new(Frames::new(bytes, Arc::clone(&activity), rate, now));
            let streams = Streams {
                tasks: shared.streams.clone(),
                activity: Arc::clone(&activity),
                metrics: Arc::clone(&shared.metrics),
            };
            let connection = http2_builder(options, streams).serve_connection(frames, answers);
            watch.over(connection, |connection| connection.graceful_shutdown()).await
        }
    }
}

fn http1_builder(options: &ListenerOptions) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        // The activity has a deadline for heads and needs no timer per request.
        .header_read_timeout(None)
        // `Heads` has checked both bounds; 2 bytes for an empty line in front.
        .max_headers(MOST_HEADERS)
        .max_header_size(options.header_list as usize + 2)
        .max_buf_size(HTTP1_BUFFER)
        .keep_alive(true);
    builder
}

fn http2_builder(options: &ListenerOptions, streams: Streams) -> http2::Builder<Streams> {
    let mut builder = http2::Builder::new(streams);
    builder
        // hyper panics if it has PINGs to send and no timer.
        .timer(TokioTimer::new())
        .max_concurrent_streams(options.streams)
        // Bounds against rapid reset and MadeYouReset, in which streams cost the peer nothing.
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

/// The part of a connection that answers its requests.
struct Answers<S> {
    service: Arc<S>,
    tasks: TaskTracker,
    peer: Peer,
    activity: Arc<Activity>,
}

/// A request with a checked head, or a request with a check that needs its own
/// task.
enum Checked<P> {
    Verdict(HeadVerdict<P, Incoming>),
    Unchecked(Request<Incoming>, Option<RequestRefusal>),
}

impl<S: Service> Answers<S> {
    /// Answers one request and observes it from its head to the end of its
    /// response.
    fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Answering<S::Body, impl Future<Output = Answered<S::Body>> + use<S>> {
        let (in_flight, refusal) = RequestInFlight::begin(&self.activity);
        let end = ResponseEnd {
            in_flight,
            is_bodiless: request.method() == Method::HEAD,
            has_body: !request.body().is_end_stream(),
            is_bad: matches!(refusal, Some(RequestRefusal::BadHead(_))),
        };
        // A costly check gets its own task, or it would hold up the connection's other requests.
        if self.service.is_costly(request.headers()) {
            return self.run(end, Checked::Unchecked(request, refusal));
        }
        match self.service.check_head(request, &self.peer, refusal) {
            HeadVerdict::Refused(RefusedHead { response, unwanted })
                if unwanted.as_ref().is_none_or(UnwantedBody::may_answer_first) =>
            {
                let rest = unwanted.map(|unwanted| (unwanted, self.tasks.clone()));
                Answering::Refused(Some(Box::new((end.wrap(response.map(whole)), rest))))
            }
            verdict => self.run(end, Checked::Verdict(verdict)),
        }
    }

    /// Answers a request that waits: for its check, its handler or its body.
    fn run(
        &self,
        end: ResponseEnd,
        checked: Checked<S::Passed>,
    ) -> Answering<S::Body, impl Future<Output = Answered<S::Body>> + use<S>> {
        let service = Arc::clone(&self.service);
        let (tasks, peer) = (self.tasks.clone(), self.peer.clone());
        // Boxed, because hyper moves this future several times before it runs.
        Answering::Running(Box::pin(async move {
            let verdict = match checked {
                Checked::Verdict(verdict) => verdict,
                Checked::Unchecked(request, refusal) => service.check_head(request, &peer, refusal),
            };
            let Answer { response, leftover } = service.answer(verdict).await;
            // A tracked task, so that the listener can wait for it when it stops.
            if let Some(leftover) = leftover {
                tasks.spawn(leftover.drop_slowly());
            }
            Ok(end.wrap(response.map(Either::Right)))
        }))
    }
}

type Answered<B> = Result<Response<Content<B>>, std::convert::Infallible>;

/// The body of a response: in one piece for a refusal, the service's otherwise.
type Content<B> = InstrumentedBody<Either<Full<Bytes>, B>, BoxError>;

/// An answer under way.
enum Answering<B, F> {
    /// The response is complete; a part of its request may still have to be
    /// dropped. `None` once the response was given.
    Refused(Option<BoxedRefusal<B>>),
    Running(Pin<Box<F>>),
}

/// A complete refusal, boxed because the enum would be as large as its largest
/// variant.
type BoxedRefusal<B> = Box<(Response<Content<B>>, Option<UndrainedBody>)>;

/// The rest of a request, and the tasks that drop it.
type UndrainedBody = (UnwantedBody<Incoming>, TaskTracker);

impl<B: Unpin, F: Future<Output = Answered<B>>> Future for Answering<B, F> {
    type Output = Answered<B>;

    #[expect(clippy::expect_used, reason = "a future is not polled again after it was ready")]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Answered<B>> {
        match &mut *self {
            Self::Running(running) => running.as_mut().poll(cx),
            Self::Refused(refused) => {
                let (response, rest) =
                    *refused.take().expect("a future is not polled after it is ready");
                // Bytes that came together with the head are here by now.
                if let Some((mut unwanted, tasks)) = rest
                    && !unwanted.drop_arrived(cx)
                {
                    tasks.spawn(unwanted.into_leftover().drop_slowly());
                }
                Poll::Ready(Ok(response))
            }
        }
    }
}

/// The facts about a request that its response needs on this connection.
struct ResponseEnd {
    in_flight: RequestInFlight,
    /// True if the response has a head alone, as for HEAD.
    is_bodiless: bool,
    /// True if the request has a body, which may be unread.
    has_body: bool,
    /// True if the head was refused, so that the connection cannot go on.
    is_bad: bool,
}

impl ResponseEnd {
    /// Wraps `response` so that its end ends the request.
    fn wrap<B>(mut self, mut response: Response<Either<Full<Bytes>, B>>) -> Response<Content<B>>
    where
        B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
    {
        // Only now: a stream that is reset before its response counts as a cancel.
        if self.is_bodiless {
            self.in_flight.complete_without_body();
        }
        if self.is_bad {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        // The peer may still be sending; a close with unread bytes would cost it the response.
        if self.is_bad || self.has_body && ends_connection(&response) {
            self.in_flight.linger();
        }
        response.map(|body| InstrumentedBody::new(body, self.in_flight))
    }
}

fn whole<B>(body: Bytes) -> Either<Full<Bytes>, B> {
    Either::Left(Full::new(body))
}

fn ends_connection<B>(response: &Response<B>) -> bool {
    response.headers().get(header::CONNECTION).is_some_and(|value| value == "close")
}

/// The supervision of a connection: its deadlines, its abuse and the drain.
struct Watch<'a> {
    activity: &'a Activity,
    terms: &'a Terms<'a>,
    place: &'a OpenConnection,
}

impl Watch<'_> {
    /// Runs `connection` to its end. `wind_down` asks the connection to begin
    /// nothing new. Returns the reason of the end as a metric's label.
    #[expect(
        clippy::disallowed_methods,
        reason = "the deadlines of a connection are on the system's clock"
    )]
    async fn over<C>(&self, connection: C, wind_down: impl Fn(Pin<&mut C>)) -> &'static str
    where
        C: Future<Output = hyper::Result<()>>,
    {
        let mut connection = pin!(connection);
        let mut stopping = pin!(self.stopping());
        let mut evicted = pin!(self.place.evicted());
        // Any time will do, because the first poll sets the right one.
        let mut alarm = pin!(sleep_until(Instant::now()));
        let mut end: Option<End> = None;
        let mut gathered = false;
        poll_fn(|cx| {
            // Registered before the state is read, so that no report is lost.
            self.activity.watch(cx.waker());
            gathered = !gathered && self.activity.more_may_come();
            if gathered {
                // Gathers the responses of several streams into one write: waking
                // itself puts this task behind the other ready streams. With
                // `yield_now` the next stream that ends would wake it at once.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            loop {
                if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                    let ended = if result.is_ok() { "closed" } else { "broken" };
                    // A refused connection may end before its eviction was seen here.
                    let eviction = self.place.eviction().map(Eviction::as_str);
                    return Poll::Ready(end.map(|end| end.why).or(eviction).unwrap_or(ended));
                }
                // Decided once: a second decision would begin the time to end anew.
                if end.is_some() {
                    break;
                }
                end = self.demanded_end(cx, stopping.as_mut(), evicted.as_mut());
                if end.is_none() {
                    break;
                }
                self.activity.close();
                // hyper acts on this at its next poll, so the loop polls the connection once more.
                wind_down(connection.as_mut());
            }
            loop {
                let (mut due, missed) = self.activity.deadline(self.terms.options);
                let at = end.map(|end| end.due(self.activity.quiet_since()));
                // A due age stays due, so from the end on the time to end stands in its place.
                if let Some(at) = at
                    && (missed == MissedDeadline::Age || at < due)
                {
                    due = at;
                }
                if Instant::now() < due {
                    // An early alarm rings once more; moving it always costs more.
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
                    None if missed == MissedDeadline::Age => {
                        // The grace of today, because requests have the deadlines of today.
                        let grace = self.terms.shared.options.load().age_grace;
                        end = Some(End::within(grace, missed.as_str()));
                        self.activity.close();
                        wind_down(connection.as_mut());
                        cx.waker().wake_by_ref();
                        return Poll::Pending;
                    }
                    // The peer is late or has no request, so a grace would serve nobody.
                    _ => return Poll::Ready(missed.as_str()),
                }
            }
        })
        .await
    }

    /// Wakes this task at each step in which the listener stops. Never returns.
    async fn stopping(&self) {
        let ListenerStop { refuse, end } = self.terms.stop;
        tokio::select! {
            () = refuse.cancelled() => {}
            () = end.cancelled() => {}
        }
        // The wake-up of the first step is used up; this registers for the second one.
        end.cancelled().await;
        std::future::pending().await
    }

    /// Returns the end that the drain, an eviction or an abuse demands, if any.
    fn demanded_end(
        &self,
        cx: &mut Context<'_>,
        stopping: Pin<&mut impl Future<Output = ()>>,
        evicted: Pin<&mut impl Future<Output = Eviction>>,
    ) -> Option<End> {
        // Polled for its wake-ups alone; the state is read below.
        let _ = stopping.poll(cx);
        let Terms { shared, options, stop } = *self.terms;
        let refuses = stop.refuse.is_cancelled();
        if refuses {
            self.activity.close();
        }
        // A connection without a request yet gets an answer to its first one.
        if stop.end.is_cancelled() || refuses && self.activity.may_wind_down() {
            // The gateway waits for the drain of today.
            return Some(End::within(shared.options.load().drain, "drained"));
        }
        if let Poll::Ready(eviction) = evicted.poll(cx) {
            let grace = match eviction {
                // Another connection waits for the place.
                Eviction::Displaced | Eviction::Replaced => GOODBYE,
                // The refusal must go out, and requests of others may end.
                Eviction::OverBound => options.write_progress,
            };
            return Some(End::within(grace, eviction.as_str()));
        }
        let abuse = self.activity.abuse(options)?;
        Some(End::within(ABUSE_GRACE, abuse.as_str()))
    }
}

/// The end of a connection that winds down.
#[derive(Clone, Copy)]
struct End {
    began: Instant,
    latest: Instant,
    /// The reason, as a metric's label.
    why: &'static str,
}

impl End {
    #[expect(
        clippy::disallowed_methods,
        reason = "the deadlines of a connection are on the system's clock"
    )]
    fn within(grace: Duration, why: &'static str) -> Self {
        let began = Instant::now();
        Self { began, latest: began + grace, why }
    }

    /// Returns the time at which the connection is closed, whatever the peer
    /// does: soon after its last response, because a sleeping peer never closes.
    fn due(self, quiet_since: Option<Instant>) -> Instant {
        match quiet_since {
            // It may have been quiet for long, and must still have time to read the end.
            Some(since) => self.latest.min(since.max(self.began) + GOODBYE),
            None => self.latest,
        }
    }
}

/// An executor that runs hyper's HTTP/2 streams in a tracker, so that the
/// listener can wait for them, and ends a stream that its peer does not read.
#[derive(Clone)]
struct Streams {
    tasks: TaskTracker,
    activity: Arc<Activity>,
    metrics: Arc<dyn ListenerMetrics>,
}

impl<F> hyper::rt::Executor<F> for Streams
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, stream: F) {
        // hyper calls the service for a stream and then hands over its task, both
        // in one poll of the connection, so the response that began last is that
        // of this stream.
        let Some(response) = self.activity.take_response() else {
            // Not a request's task.
            self.tasks.spawn(stream);
            return;
        };
        let metrics = Arc::clone(&self.metrics);
        // Boxed, because the task below would hold it three times and be moved twice.
        let stream = Box::pin(stream);
        self.tasks.spawn(async move {
            if run_while_read(stream, &response).await == StreamEnd::Unread {
                metrics.response_unread();
            }
        });
    }
}

/// Bytes that HTTP/1 buffers in each direction.
const HTTP1_BUFFER: usize = 64 * 1024;

/// Bytes of responses that one stream buffers.
const HTTP2_SEND_BUFFER: usize = 64 * 1024;

/// Bytes of unread bodies that one stream and one connection may send.
const HTTP2_STREAM_WINDOW: u32 = 64 * 1024;
const HTTP2_CONNECTION_WINDOW: u32 = 1024 * 1024;

/// Time in which an abusive peer can read its GOAWAY before it is closed.
const ABUSE_GRACE: Duration = Duration::from_millis(100);

/// Time in which a peer without open requests must close the connection.
const GOODBYE: Duration = Duration::from_secs(1);
