//! The listener: the accept loop, and the life of each connection.
//!
//! A connection passes the connection limits, finishes its TLS handshake within
//! a deadline, and then speaks HTTP/1 or HTTP/2 as ALPN chose. From its first
//! byte to its last byte a connection is always inside some deadline. Nothing
//! here waits without a bound, and no connection outlives [`Listener::serve`].

mod activity;
mod bad_head;
mod connection;
mod connection_limits;
mod connection_table;
mod forward_write;
mod frames;
mod handshake_slots;
pub(crate) mod heads;
mod instrumented_io;
mod lines;
mod peer;
mod pending_handshakes;
mod plain;
pub(crate) mod proxy;
mod refusals;
mod response_progress;
mod service;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use self::bad_head::BadHead;
use self::connection::Accepted;
pub use self::connection_limits::ConnectionLimitOptions;
use self::connection_limits::{ConnectionLimits, ConnectionPermit, Full, LimitReached};
pub use self::connection_table::{
    BoundReached, ConnectionCounts, ConnectionOwners, OwnerBound, OwnerId,
};
use self::handshake_slots::HandshakeSlots;
pub use self::peer::Peer;
use self::pending_handshakes::PendingHandshakes;
use self::refusals::Refusals;
pub use self::service::{Answer, HeadVerdict, RefusedHead, RequestRefusal, Service};
use crate::source::{Proxies, Source};

/// Bounds and deadlines of a listener and its connections. Each deadline
/// counts from the start of its own phase.
#[derive(Clone, Debug)]
pub struct ListenerOptions {
    /// The listener's label in metrics.
    pub name: &'static str,
    /// Limits on the number and the rate of connections.
    pub connection_limits: ConnectionLimitOptions,
    /// The proxies that may name a client.
    pub proxies: Proxies,
    /// Connections with an unfinished TLS handshake. Beyond this number newcomers of
    /// the busiest source wait, and those of others displace its oldest connection.
    pub handshakes: usize,
    /// Time for the peer's part of the TLS handshake, from its first byte.
    pub handshake: Duration,
    /// Time from the connection to its first byte, and from the handshake to
    /// the first byte of the first request.
    pub first_byte: Duration,
    /// Time from the first byte of a request to the end of its head.
    pub head: Duration,
    /// Time without a request.
    pub idle: Duration,
    /// Age at which a connection is drained.
    pub connection_age: Duration,
    /// Time in which the requests of an aged connection must end.
    pub age_grace: Duration,
    /// Time in which the peer must take a ready piece of a response. Over HTTP/2
    /// the response ends alone; a socket that takes no byte, and HTTP/1, end the
    /// connection.
    pub write_progress: Duration,
    /// Silence after which an HTTP/2 peer is sent a PING.
    pub ping_interval: Duration,
    /// Time in which the peer must answer the PING.
    pub ping_answer: Duration,
    /// Time in which requests must end once the listener drains.
    pub drain: Duration,
    /// Concurrent HTTP/2 streams of a connection.
    pub streams: u32,
    /// HTTP/2 streams that the peer may reset before they are accepted.
    pub pending_accept_resets: usize,
    /// HTTP/2 streams that may be reset for errors of the peer.
    pub local_error_resets: usize,
    /// Bytes of all headers of a request; a larger head gets 431.
    pub header_list: u32,
    /// Responses that the peer may cancel; then the connection is closed.
    pub cancels: u32,
    /// HTTP/2 frames a second that carry no request; beyond this rate the
    /// connection is closed.
    pub idle_frames: u32,
}

/// Counters of a listener. Each `reason` is from a closed set, fit for the
/// label of a metric.
pub trait ListenerMetrics: Send + Sync + 'static {
    /// Sets the numbers of open connections of `listener`.
    fn connections_open(&self, listener: &'static str, counts: ConnectionCounts);
    /// Counts a connection that was closed when it was accepted.
    fn connection_refused(&self, reason: &'static str);
    /// Counts a connection that ended after its handshake.
    fn connection_ended(&self, reason: &'static str);
    /// Counts a response over HTTP/2 that ended because the peer did not read it.
    fn response_unread(&self);
    /// Counts a connection that ended before its handshake did.
    fn handshake_failed(&self, reason: &'static str);
}

impl Default for ListenerOptions {
    fn default() -> Self {
        Self {
            name: "public",
            connection_limits: ConnectionLimitOptions::default(),
            proxies: Proxies::default(),
            handshakes: 256,
            handshake: Duration::from_secs(5),
            first_byte: Duration::from_secs(5),
            head: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            connection_age: Duration::from_secs(3_600),
            age_grace: Duration::from_secs(630),
            write_progress: Duration::from_secs(15),
            ping_interval: Duration::from_secs(15),
            ping_answer: Duration::from_secs(10),
            drain: Duration::from_secs(30),
            streams: 100,
            pending_accept_resets: 20,
            local_error_resets: 64,
            header_list: 16 * 1024,
            cancels: 200,
            idle_frames: 100,
        }
    }
}

/// The two steps in which a listener stops.
#[derive(Clone, Debug, Default)]
pub struct ListenerStop {
    /// Cancelled to refuse: running requests go on, and each further request, on an
    /// open connection or a new one, is refused and ends its connection.
    pub refuse: CancellationToken,
    /// Cancelled to end: no connection is accepted any more, and open ones end as soon
    /// as their requests have ended.
    pub end: CancellationToken,
}

/// A bound socket that is ready to serve.
pub struct Listener {
    socket: TcpListener,
    shared: Arc<Shared>,
}

/// A handle for changing the options of a listener while it serves. Clones change the
/// same listener.
#[derive(Clone)]
pub struct ListenerControl {
    shared: Arc<Shared>,
}

/// The state that all connections of a listener share.
struct Shared {
    /// The options for new connections. A connection takes them once and keeps them to
    /// its end.
    options: ArcSwap<ListenerOptions>,
    name: &'static str,
    tls: Arc<rustls::ServerConfig>,
    connection_limits: Arc<ConnectionLimits>,
    pending_handshakes: Arc<PendingHandshakes>,
    handshake_slots: HandshakeSlots,
    refusals: Refusals,
    metrics: Arc<dyn ListenerMetrics>,
    /// The tasks of HTTP/2 streams and of sockets that linger, so that
    /// [`Listener::serve`] can wait for them.
    streams: TaskTracker,
}

impl Listener {
    /// Binds `address`.
    ///
    /// # Errors
    /// The address is in use or belongs to another machine.
    pub fn bind(
        address: SocketAddr,
        options: ListenerOptions,
        tls: Arc<rustls::ServerConfig>,
        metrics: Arc<dyn ListenerMetrics>,
    ) -> io::Result<Self> {
        let shared = Shared {
            connection_limits: ConnectionLimits::new(options.connection_limits.clone()),
            // Half the deadline, because a peer that is quiet for all of it is ended anyway.
            pending_handshakes: PendingHandshakes::new(options.handshakes, options.handshake / 2),
            handshake_slots: HandshakeSlots::for_this_machine(),
            refusals: Refusals::default(),
            streams: TaskTracker::new(),
            name: options.name,
            options: ArcSwap::from_pointee(options),
            tls,
            metrics,
        };
        Ok(Self { socket: bind(address)?, shared: Arc::new(shared) })
    }

    /// Returns the address of the socket, with the real port if port 0 was bound.
    ///
    /// # Errors
    /// The system does not give the address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Returns a handle for changing the options.
    pub fn control(&self) -> ListenerControl {
        ListenerControl { shared: Arc::clone(&self.shared) }
    }

    /// Serves until `stop` asks for the end, then lets running requests end
    /// within the drain's bound. Returns when the last connection is closed.
    #[expect(clippy::disallowed_methods, reason = "a sweep happens now")]
    pub async fn serve<S: Service>(self, service: Arc<S>, stop: ListenerStop) {
        let Self { socket, shared } = self;
        let connections = TaskTracker::new();
        let mut sweeps = interval(SWEEP);
        // One sweep after a stall finds everything, so missed ones are not made up for.
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                // In this order, so that a flood of connections delays neither the end nor a sweep.
                biased;
                () = stop.end.cancelled() => break,
                _ = sweeps.tick() => {
                    let now = Instant::now();
                    shared.connection_limits.sweep(now);
                    shared.refusals.log(shared.name, now);
                    let counts = shared.connection_limits.counts();
                    shared.metrics.connections_open(shared.name, counts);
                }
                accepted = socket.accept() => match accepted {
                    Ok((stream, address)) => {
                        let acceptor =
                            Acceptor { shared: &shared, service: &service, stop: &stop };
                        acceptor.accept(&connections, stream, address);
                    }
                    Err(error) => {
                        // Most likely out of descriptors: wait for some to close,
                        // since the next attempt would fail at once, too.
                        shared.metrics.connection_refused("accept");
                        tracing::warn!(%error, "cannot accept a connection; trying again shortly");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // Last of all: until now a new connection got an answer, and not a reset.
        drop(socket);
        connections.close();
        connections.wait().await;
        // Streams end with their connections; lingering sockets may end later.
        shared.streams.close();
        shared.streams.wait().await;
        shared.metrics.connections_open(shared.name, ConnectionCounts::default());
    }
}

impl ListenerControl {
    /// Puts `options` in force; the name of the listener stays. Open connections keep
    /// their deadlines, proxies and HTTP/2 bounds, except the time to end, which counts as
    /// it is when they begin to end. Every bound on the number of connections counts from
    /// now on. A lower one refuses newcomers until it is kept, and a lower total also ends
    /// idle connections beyond it, first those of the holder with most. A changed rate of
    /// new connections begins with a full burst.
    pub fn adopt(&self, options: ListenerOptions) {
        let Shared { connection_limits, pending_handshakes, .. } = &*self.shared;
        connection_limits.adopt(options.connection_limits.clone());
        pending_handshakes.adopt(options.handshakes, options.handshake / 2);
        self.shared.options.store(Arc::new(options));
    }
}

/// The part of the accept loop that starts connections.
struct Acceptor<'a, S> {
    shared: &'a Arc<Shared>,
    service: &'a Arc<S>,
    stop: &'a ListenerStop,
}

impl<S: Service> Acceptor<'_, S> {
    /// Spawns the task of a connection. A connection that exceeds a limit waits in
    /// line, or is closed.
    fn accept(&self, connections: &TaskTracker, stream: TcpStream, address: SocketAddr) {
        let limits = &self.shared.connection_limits;
        let source = limits.source_of(address.ip());
        // Taken once: the trust in a proxy must not change between here and its header.
        let options = self.shared.options.load_full();
        let full = match self.permit(&options, address, source) {
            Ok(permit) => {
                connections.spawn(self.serve(Accepted { stream, address, permit, options }));
                return;
            }
            Err(full) => full,
        };
        let line = match limits.enter_line(source, full) {
            Ok(line) => line,
            // The drop of the stream closes the connection.
            Err(reached) => return self.shared.refuse(source, reached),
        };
        let (shared, limits) = (Arc::clone(self.shared), Arc::clone(limits));
        let end = self.stop.end.clone();
        let (service, stop) = (Arc::clone(self.service), self.stop.clone());
        connections.spawn(async move {
            let permit = tokio::select! {
                () = end.cancelled() => return,
                permit = limits.wait_in_line(source, (line, full)) => permit,
            };
            let acceptor = Acceptor { shared: &shared, service: &service, stop: &stop };
            match permit {
                Ok(permit) => {
                    acceptor.serve(Accepted { stream, address, permit, options }).await;
                }
                Err(reached) => shared.refuse(source, reached),
            }
        });
    }

    /// Returns the task of a connection.
    fn serve(&self, accepted: Accepted) -> impl Future<Output = ()> + Send + use<S> {
        set_socket_options(&accepted.stream);
        let (shared, service) = (Arc::clone(self.shared), Arc::clone(self.service));
        let stop = self.stop.clone();
        async move { connection::serve(&shared, accepted, service, stop).await }
    }

    /// Takes a permit. The connection of a trusted proxy counts only against
    /// the total, because the proxy names the source later.
    fn permit(
        &self,
        options: &ListenerOptions,
        address: SocketAddr,
        source: Source,
    ) -> Result<ConnectionPermit, Full> {
        let limits = &self.shared.connection_limits;
        match options.proxies.trusts(address.ip()) {
            true => limits.permit_uncounted(),
            false => limits.permit(source),
        }
    }
}

impl Shared {
    /// Counts a connection of `source` that is closed at once.
    fn refuse(&self, source: Source, reached: LimitReached) {
        self.metrics.connection_refused(reached.as_str());
        self.refusals.count(source, reached);
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restart must not wait for connections in TIME_WAIT.
    socket.set_reuse_address(true)?;
    // tokio takes over a socket as it is, and one that blocks would stop a whole thread.
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// Sets a small send buffer, so that a reader that stops is noticed early and
/// costs little memory, and turns off Nagle's algorithm, so that tokens are not
/// delayed.
fn set_socket_options(stream: &TcpStream) {
    // If the peer has left, the call fails here and again at the first read.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_send_buffer_size(SEND_BUFFER);
}

/// Connections that the kernel queues before they are accepted.
const BACKLOG: i32 = 1_024;

/// Bytes of the send buffer; Linux doubles the number for its own overhead.
const SEND_BUFFER: usize = 32 * 1024;

/// Headers of an HTTP/1 request; a request with more gets 431.
const MOST_HEADERS: usize = 64;

/// Interval at which the connection limits drop idle sources.
const SWEEP: Duration = Duration::from_secs(1);

/// Pause after a failed accept; without the pause the loop would spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
