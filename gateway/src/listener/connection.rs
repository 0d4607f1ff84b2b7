//! One connection, from its first byte to its last.

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
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::activity::{Activity, Late, Protocol};
use super::drain_body::UnwantedBody;
use super::frames::Frames;
use super::gate::{Peer, Permit};
use super::heads::Heads;
use super::opening::Opening;
use super::proxy::{self, Named};
use super::service::{Answer, BoxError, HeadVerdict, RefusedHead, RequestRefusal, Service};
use super::watched::{Lingering, RequestInFlight, Socket, WatchedBody, WatchedReads};
use super::{ListenerOptions, MOST_HEADERS, Shared, plain};
use crate::source::Source;

type Wire = TlsStream<Socket>;

/// A connection that has passed the gate.
pub(super) struct Accepted {
    pub(super) stream: TcpStream,
    pub(super) address: SocketAddr,
    pub(super) permit: Permit,
}

/// Serves a connection until it ends, of itself or by a deadline.
pub(super) async fn serve<S: Service>(
    shared: &Arc<Shared>,
    accepted: Accepted,
    service: Arc<S>,
    draining: CancellationToken,
) {
    let opening = shared.openings.begin(Source::of(accepted.address.ip()));
    let opened = tokio::select! {
        () = draining.cancelled() => return,
        () = opening.displaced() => Err("displaced"),
        opened = open(shared, &*service, accepted, &opening) => opened,
    };
    drop(opening);
    match opened {
        Ok((wire, peer)) => {
            let ended = speak(shared, wire, peer, service, &draining).await;
            shared.metrics.connection_ended(ended);
        }
        Err(failed) => shared.metrics.handshake_failed(failed),
    }
}

/// From the connection to the end of the TLS handshake: who it is, and what
/// to talk over.
async fn open(
    shared: &Shared,
    service: &impl Service,
    accepted: Accepted,
    opening: &Opening,
) -> Result<(Wire, Peer), &'static str> {
    let Accepted { mut stream, address, permit } = accepted;
    let proxies = &shared.proxies;
    let mut client = address;
    if proxies.proxy_protocol && proxies.trusts(address.ip()) {
        match timeout(shared.options.first_byte, proxy::read(&mut stream)).await {
            Err(_) => return Err("silent"),
            Ok(Err(proxy::BadHeader)) => return Err("proxy_header"),
            Ok(Ok(Named::Proxy)) => {}
            Ok(Ok(Named::Client(named))) => {
                if let Err(refused) = permit.count(named.ip()) {
                    shared.metrics.connection_refused(refused.as_str());
                    return Err("refused");
                }
                opening.belongs_to(Source::of(named.ip()));
                client = named;
            }
        }
    }
    let peer = Peer::new(client, Arc::clone(proxies), permit);
    let wire = shake_hands(shared, service, stream, &peer).await?;
    Ok((wire, peer))
}

/// TLS, within its deadline.
async fn shake_hands(
    shared: &Shared,
    service: &impl Service,
    stream: TcpStream,
    peer: &Peer,
) -> Result<Wire, &'static str> {
    let options = &shared.options;
    let mut first = [0; proxy::SIGNATURE.len()];
    let seen = match timeout(options.first_byte, stream.peek(&mut first)).await {
        Err(_) => return Err("silent"),
        Ok(Ok(0) | Err(_)) => return Err("closed"),
        Ok(Ok(seen)) => &first[..seen],
    };
    if seen[0] != plain::TLS_HANDSHAKE {
        if proxy::SIGNATURE.starts_with(seen) {
            // Whoever it is, config does not trust it to say who it is.
            return Err("proxy_header");
        }
        plain::refuse(stream, service.plain_http_body()).await;
        return Err("plain");
    }
    let lingering = Lingering { tasks: shared.streams.clone(), peer: peer.clone() };
    let acceptor = TlsAcceptor::from(Arc::clone(&shared.tls));
    let handshake = acceptor.accept(Socket::new(stream, lingering));
    match timeout(options.handshake, shared.turns.take(handshake)).await {
        Err(_) => Err("timeout"),
        Ok(Err(_)) => Err("tls"),
        Ok(Ok(wire)) => Ok(wire),
    }
}

/// HTTP/1 or HTTP/2, as ALPN chose; a client that offered nothing gets
/// HTTP/1. Returns how it ended, as a metric's label.
async fn speak<S: Service>(
    shared: &Arc<Shared>,
    mut wire: Wire,
    peer: Peer,
    service: Arc<S>,
    draining: &CancellationToken,
) -> &'static str {
    let options = &shared.options;
    let is_http2 = wire.get_ref().1.alpn_protocol() == Some(b"h2");
    let protocol = if is_http2 { Protocol::Http2 } else { Protocol::Http1 };
    let activity = Arc::new(Activity::new(protocol, Instant::now()));
    wire.get_mut().0.report_to(Arc::clone(&activity));
    let bytes = WatchedReads::new(wire, Arc::clone(&activity));
    let answers = service_fn({
        let (tasks, activity) = (shared.streams.clone(), Arc::clone(&activity));
        let answers = Answers { service, tasks, peer, activity };
        move |request| answers.answer(request)
    });
    let watch = Watch { activity: &activity, options, draining };
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
            let tasks = Streams(shared.streams.clone());
            let connection = http2_builder(options, tasks).serve_connection(frames, answers);
            watch.over(connection, |connection| connection.graceful_shutdown()).await
        }
    }
}

fn http1_builder(options: &ListenerOptions) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        // The activity has deadlines for both, and costs no timer a request.
        .header_read_timeout(None)
        // Heads that pass are within both bounds; an empty line may stand before.
        .max_headers(MOST_HEADERS)
        .max_header_size(options.header_list as usize + 2)
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

/// The part of a connection that answers its requests.
struct Answers<S> {
    service: Arc<S>,
    tasks: TaskTracker,
    peer: Peer,
    activity: Arc<Activity>,
}

/// A request whose head was checked, or one whose check needs its own task.
enum Checked<P> {
    Verdict(HeadVerdict<P, Incoming>),
    Unchecked(Request<Incoming>, Option<RequestRefusal>),
}

impl<S: Service> Answers<S> {
    /// Answers one request and watches it from its head to the end of its
    /// response.
    fn answer(
        &self,
        request: Request<Incoming>,
    ) -> Answering<S::Body, impl Future<Output = Answered<S::Body>> + use<S>> {
        let (in_flight, refusal) = RequestInFlight::begin(&self.activity);
        let end = Ending {
            in_flight,
            bodiless: request.method() == Method::HEAD,
            has_body: !request.body().is_end_stream(),
            is_bad: matches!(refusal, Some(RequestRefusal::BadHead(_))),
        };
        if self.service.is_costly(request.headers()) {
            return self.run(end, Checked::Unchecked(request, refusal));
        }
        match self.service.check_head(request, &self.peer, refusal) {
            HeadVerdict::Refused(RefusedHead { response, unwanted })
                if unwanted.as_ref().is_none_or(UnwantedBody::may_answer_first) =>
            {
                let rest = unwanted.map(|unwanted| (unwanted, self.tasks.clone()));
                Answering::Refused(Some(Box::new((end.of(response.map(whole)), rest))))
            }
            verdict => self.run(end, Checked::Verdict(verdict)),
        }
    }

    /// Answers a request that waits: for its check, its handler or its body.
    fn run(
        &self,
        end: Ending,
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
            if let Some(leftover) = leftover {
                tasks.spawn(leftover.drop_slowly());
            }
            Ok(end.of(response.map(Either::Right)))
        }))
    }
}

type Answered<B> = Result<Response<Content<B>>, std::convert::Infallible>;

/// The body of a response: in one piece for a refusal, the service's otherwise.
type Content<B> = WatchedBody<Either<Full<Bytes>, B>>;

/// An answer under way.
enum Answering<B, F> {
    /// The response is complete; a part of its request may still have to be
    /// dropped. `None` once the response was given.
    Refused(Option<Box<(Response<Content<B>>, Option<Rest>)>>),
    Running(Pin<Box<F>>),
}

/// The rest of a request, and the tasks that drop it.
type Rest = (UnwantedBody<Incoming>, TaskTracker);

impl<B: Unpin, F: Future<Output = Answered<B>>> Future for Answering<B, F> {
    type Output = Answered<B>;

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
struct Ending {
    in_flight: RequestInFlight,
    /// The response to HEAD has no body.
    bodiless: bool,
    has_body: bool,
    is_bad: bool,
}

impl Ending {
    fn of<B>(self, mut response: Response<Either<Full<Bytes>, B>>) -> Response<Content<B>>
    where
        B: http_body::Body<Data = Bytes, Error: Into<BoxError>>,
    {
        if self.is_bad {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.is_bad || self.has_body && ends_connection(&response) {
            self.in_flight.linger();
        }
        response.map(|body| WatchedBody::new(body, self.in_flight, self.bodiless))
    }
}

fn whole<B>(body: Bytes) -> Either<Full<Bytes>, B> {
    Either::Left(Full::new(body))
}

fn ends_connection<B>(response: &Response<B>) -> bool {
    response.headers().get(header::CONNECTION).is_some_and(|value| value == "close")
}

/// What watches over a connection.
struct Watch<'a> {
    activity: &'a Activity,
    options: &'a ListenerOptions,
    draining: &'a CancellationToken,
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
        let mut gathered = false;
        poll_fn(|cx| {
            self.activity.watch(cx.waker());
            gathered = !gathered && self.activity.more_may_come();
            if gathered {
                // The runtime runs this task right after the first of the streams
                // that wake it, and each answer would be a write of its own. So
                // it goes to the end of the queue, behind the others. Not by
                // `yield_now`: until that came round, the next stream to end
                // would wake this task at once again.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            loop {
                if let Poll::Ready(result) = connection.as_mut().poll(cx) {
                    let ended = if result.is_ok() { "closed" } else { "broken" };
                    return Poll::Ready(end.map_or(ended, |end| end.why));
                }
                if end.is_none() && draining.as_mut().poll(cx).is_ready() {
                    end = Some(End::within(self.options.drain, "drained"));
                } else if end.is_none()
                    && let Some(abuse) = self.activity.abuse(self.options)
                {
                    end = Some(End::within(ABUSE_GRACE, abuse.as_str()));
                } else {
                    break;
                }
                self.activity.close();
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
                        self.activity.close();
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

/// Bytes that HTTP/1 buffers either way.
const HTTP1_BUFFER: usize = 64 * 1024;

/// Bytes of answers that one stream may have waiting.
const HTTP2_SEND_BUFFER: usize = 64 * 1024;

/// Bytes of body that one stream, and all together, may send ahead of being
/// read.
const HTTP2_STREAM_WINDOW: u32 = 64 * 1024;
const HTTP2_CONNECTION_WINDOW: u32 = 1024 * 1024;

/// A peer that does too much of something is told so, and gone within this
/// time.
const ABUSE_GRACE: Duration = Duration::from_millis(100);

/// How long a peer with nothing under way may take to say goodbye.
const GOODBYE: Duration = Duration::from_secs(1);
