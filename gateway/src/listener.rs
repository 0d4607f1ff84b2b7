//! From the socket to a request: the accept loop, and each connection's life.
//!
//! A connection passes the gate, shakes hands within a deadline, and is then
//! HTTP/1 or HTTP/2 as ALPN chose; from its first byte to its last it is
//! always inside some deadline. Nothing here waits without a bound, and no
//! connection outlives the listener's `Listener::serve`.

mod activity;
mod bad_head;
mod connection;
mod drain_body;
mod frames;
pub(crate) mod fuzz;
mod gate;
mod heads;
mod opening;
mod pass;
mod plain;
mod proxy;
mod request_ids;
mod service;
mod turns;
mod watched;

use std::io;
use std::net::SocketAddr;
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, Type};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::gate::{Gate, Permit};
use self::opening::Openings;
use self::turns::Turns;
use crate::source::Proxies;
use crate::telemetry::Metrics;

pub use self::bad_head::BadHead;
pub use self::drain_body::{Leftover, LentBody, RequestBody, UnreadBody, UnwantedBody, lend};
pub use self::gate::{GateOptions, Peer};
pub use self::request_ids::RequestIds;
pub use self::service::{Answer, BoxError, HeadVerdict, RefusedHead, RequestRefusal, Service};

/// Bounds and deadlines of a listener and its connections. Each deadline
/// counts from the start of its own phase.
#[derive(Clone, Debug)]
pub struct ListenerOptions {
    /// Who may connect.
    pub gate: GateOptions,
    /// Who is believed about the client behind a connection.
    pub proxies: Proxies,
    /// Connections that have not shaken hands yet; beyond, the oldest goes.
    pub handshakes: usize,
    /// The TLS handshake, from its first byte.
    pub handshake: Duration,
    /// From the connection to its first byte, and from the handshake to the
    /// first byte of the first request.
    pub first_byte: Duration,
    /// From the first byte of a request to the end of its head.
    pub head: Duration,
    /// Between requests.
    pub idle: Duration,
    /// A connection's whole life; then it is drained.
    pub connection_age: Duration,
    /// How long an aged connection's requests may go on.
    pub age_grace: Duration,
    /// A response must be taken up, in part at least, in every such span.
    pub write_progress: Duration,
    /// An HTTP/2 peer that was silent for so long is asked for a sign.
    pub ping_interval: Duration,
    /// How long it may take to give one.
    pub ping_answer: Duration,
    /// How long requests may go on once the listener drains.
    pub drain: Duration,
    /// HTTP/2 streams at once.
    pub streams: u32,
    /// HTTP/2 streams reset before they were accepted.
    pub pending_accept_resets: usize,
    /// HTTP/2 streams that were reset for the peer's errors.
    pub local_error_resets: usize,
    /// Bytes of all headers of a request; beyond: 431.
    pub header_list: u32,
    /// Responses that the peer may cut short; then the connection is closed.
    pub cancels: u32,
    /// HTTP/2 frames a second that ask for nothing; then likewise.
    pub idle_frames: u32,
}

impl Default for ListenerOptions {
    fn default() -> Self {
        Self {
            gate: GateOptions::default(),
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

impl From<&tollgate_config::Gateway> for ListenerOptions {
    fn from(config: &tollgate_config::Gateway) -> Self {
        let tollgate_config::Gateway { timeouts, connections, http2, deadlines, proxies, .. } =
            config;
        let positive = |value: u32| NonZeroU32::new(value).unwrap_or(NonZeroU32::MIN);
        Self {
            gate: GateOptions {
                connections: connections.total as usize,
                per_source: connections.per_source,
                new_per_second: positive(connections.new_per_second),
                new_burst: positive(connections.new_burst),
            },
            proxies: proxies.into(),
            handshakes: connections.handshakes as usize,
            handshake: timeouts.handshake,
            first_byte: timeouts.first_byte,
            head: timeouts.headers,
            idle: timeouts.idle,
            connection_age: timeouts.connection_age,
            // Whatever began on an old connection may end on it.
            age_grace: deadlines.request + timeouts.drain,
            write_progress: timeouts.write_progress,
            ping_interval: timeouts.ping_interval,
            ping_answer: timeouts.ping_answer,
            drain: timeouts.drain,
            streams: http2.streams,
            pending_accept_resets: http2.pending_accept_resets as usize,
            local_error_resets: http2.local_error_resets as usize,
            header_list: u32::try_from(http2.header_size.0).unwrap_or(u32::MAX),
            cancels: http2.cancels,
            idle_frames: http2.idle_frames_per_second,
        }
    }
}

/// A bound socket and what its connections need.
pub struct Listener {
    socket: TcpListener,
    shared: Arc<Shared>,
}

/// What all connections of a listener share.
pub(crate) struct Shared {
    options: ListenerOptions,
    tls: Arc<rustls::ServerConfig>,
    gate: Arc<Gate>,
    openings: Arc<Openings>,
    turns: Turns,
    proxies: Arc<Proxies>,
    metrics: Arc<Metrics>,
    /// Streams of HTTP/2, which hyper runs as tasks of their own, and sockets
    /// that linger.
    streams: TaskTracker,
}

impl Listener {
    /// Binds `address`.
    ///
    /// # Errors
    /// When the address is in use or not ours.
    pub fn bind(
        address: SocketAddr,
        options: ListenerOptions,
        tls: Arc<rustls::ServerConfig>,
        metrics: Arc<Metrics>,
    ) -> io::Result<Self> {
        let gate = Gate::new(options.gate.clone());
        let openings = Openings::new(options.handshakes);
        let proxies = Arc::new(options.proxies.clone());
        let streams = TaskTracker::new();
        let turns = Turns::for_this_machine();
        let shared = Shared { options, tls, gate, openings, turns, proxies, metrics, streams };
        Ok(Self { socket: bind(address)?, shared: Arc::new(shared) })
    }

    /// Where it listens; the port is the real one where 0 was asked for.
    ///
    /// # Errors
    /// When the system does not say.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.socket.local_addr()
    }

    /// Serves until `draining`, then lets running requests end within the
    /// drain's bound. Returns when the last connection is closed.
    pub async fn serve<S: Service>(self, service: Arc<S>, draining: CancellationToken) {
        let Self { socket, shared } = self;
        let connections = TaskTracker::new();
        let mut sweeps = interval(SWEEP);
        sweeps.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = draining.cancelled() => break,
                _ = sweeps.tick() => {
                    shared.gate.sweep();
                    shared.metrics.connections_open(shared.gate.open());
                }
                accepted = socket.accept() => match accepted {
                    Ok((stream, address)) => {
                        let door = Door { shared: &shared, service: &service, draining: &draining };
                        door.admit(&connections, stream, address);
                    }
                    Err(error) => {
                        // Out of descriptors, most likely: wait for some to close.
                        shared.metrics.connection_refused("accept");
                        tracing::warn!(%error, "cannot accept a connection");
                        sleep(ACCEPT_PAUSE).await;
                    }
                },
            }
        }
        // Closed at once, so that a balancer's next connection goes elsewhere.
        drop(socket);
        connections.close();
        connections.wait().await;
        shared.streams.close();
        shared.streams.wait().await;
        shared.metrics.connections_open(0);
    }
}

/// What a connection finds when it is accepted.
struct Door<'a, S> {
    shared: &'a Arc<Shared>,
    service: &'a Arc<S>,
    draining: &'a CancellationToken,
}

impl<S: Service> Door<'_, S> {
    /// Past the gate a connection is a task; before it, it is dropped.
    fn admit(&self, connections: &TaskTracker, stream: TcpStream, address: SocketAddr) {
        let permit = match self.pass(address) {
            Ok(permit) => permit,
            Err(refused) => return self.shared.metrics.connection_refused(refused),
        };
        shape(&stream);
        let (shared, service) = (Arc::clone(self.shared), Arc::clone(self.service));
        let draining = self.draining.clone();
        let accepted = connection::Accepted { stream, address, permit };
        connections.spawn(async move {
            connection::serve(&shared, accepted, service, draining).await;
        });
    }

    /// A trusted proxy's connection counts among all only: whose it is, the
    /// proxy says.
    fn pass(&self, address: SocketAddr) -> Result<Permit, &'static str> {
        let permit = self.shared.gate.enter().map_err(gate::Refused::as_str)?;
        if !self.shared.proxies.trusts(address.ip()) {
            permit.count(address.ip()).map_err(gate::Refused::as_str)?;
        }
        Ok(permit)
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, Some(Protocol::TCP))?;
    // A restart must not wait for the last connections' TIME_WAIT.
    socket.set_reuse_address(true)?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    TcpListener::from_std(socket.into())
}

/// A small send buffer, so that a reader that stops is noticed early and
/// costs little; small tokens must not wait for larger ones.
fn shape(stream: &TcpStream) {
    // A peer that is gone already fails here and again at the first read.
    let _ = stream.set_nodelay(true);
    let _ = SockRef::from(stream).set_send_buffer_size(SEND_BUFFER);
}

/// Connections that the kernel keeps before we accept them.
const BACKLOG: i32 = 1_024;

/// Bytes; Linux doubles it for its own books.
const SEND_BUFFER: usize = 32 * 1024;

/// Headers of an HTTP/1 request; beyond: 431.
const MOST_HEADERS: usize = 64;

/// How often the gate forgets.
const SWEEP: Duration = Duration::from_secs(1);

/// A pause after a failed accept, which would otherwise spin.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

#[cfg(test)]
mod tests;
