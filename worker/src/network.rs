//! The worker's address on the network. A connection counts once its TLS handshake has
//! proved which gateway of the cluster it is.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;
use tollgate_domain::{GatewayName, WorkerName};
use tollgate_wire::{LinkFiles, LinkOwner};
use tonic::transport::server::Connected;

use crate::WorkerError;
use crate::served::{GatewayLink, ServedGateways};

/// Open connections of gateways. Each gateway needs one; a restart leaves an old one for a
/// moment.
const CONNECTIONS: usize = 256;
/// Handshakes at once. Further connections wait in the kernel's queue.
const HANDSHAKES: usize = 256;
/// Time that a handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// The time between two log lines about refused connections: strangers choose how many
/// there are.
const REFUSALS_TOLD: Duration = Duration::from_secs(10);
/// The pause after an error of the listener, such as too many open files.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Binds `address`. Fails on a certificate that does not belong to the worker `name`.
pub(crate) async fn listen(
    address: SocketAddr,
    files: &LinkFiles,
    name: &WorkerName,
) -> Result<TcpListener, WorkerError> {
    files.check(Some(&LinkOwner::Worker(name.clone())))?;
    let failed = |source| WorkerError::Address { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    tracing::info!(worker = %name, %address, "listening for gateways");
    Ok(listener)
}

/// Accepts connections on `tasks` until the returned stream is dropped.
pub(crate) fn accept(
    listener: TcpListener,
    files: LinkFiles,
    tasks: &TaskTracker,
) -> ReceiverStream<io::Result<GatewayConnection>> {
    let (sender, accepted) = mpsc::channel(1);
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES));
    let arrivals = Arc::new(Arrivals {
        files,
        sender,
        places: Arc::new(Semaphore::new(CONNECTIONS)),
        served: Arc::default(),
        refusals: Refusals::default(),
    });
    let shaking = tasks.clone();
    tasks.spawn(async move {
        loop {
            let Ok(place) = Arc::clone(&handshakes).acquire_owned().await else { return };
            let stream = tokio::select! {
                () = arrivals.sender.closed() => return,
                stream = listener.accept() => stream,
            };
            let (stream, peer) = match stream {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection; trying again");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let arrivals = Arc::clone(&arrivals);
            shaking.spawn(async move {
                tokio::select! {
                    () = arrivals.sender.closed() => {}
                    () = arrivals.admit(stream, peer) => {}
                }
                // Kept until the handshake has ended, so that the number of handshakes is bounded.
                drop(place);
            });
        }
    });
    ReceiverStream::new(accepted)
}

/// The state that all arriving connections share.
struct Arrivals {
    files: LinkFiles,
    sender: mpsc::Sender<io::Result<GatewayConnection>>,
    places: Arc<Semaphore>,
    served: Arc<ServedGateways>,
    refusals: Refusals,
}

impl Arrivals {
    /// Hands the connection to the server if a gateway of the cluster opened it.
    #[expect(clippy::disallowed_methods, reason = "the log lines about refusals are spaced")]
    async fn admit(&self, stream: TcpStream, peer: SocketAddr) {
        let shaken = timeout(HANDSHAKE, handshake(stream, &self.files)).await;
        let shaken = shaken.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let placed = shaken.and_then(|(stream, gateway)| {
            // After the handshake, so that strangers take no place from gateways.
            let place = Arc::clone(&self.places).try_acquire_owned().map_err(|_| {
                io::Error::other(format!("{CONNECTIONS} connections are open, which is the limit"))
            })?;
            let link = GatewayLink::new(gateway, Arc::clone(&self.served));
            Ok(GatewayConnection { stream, link, _place: place })
        });
        match placed {
            // The server is gone at shutdown, and the connection with it.
            Ok(connection) => _ = self.sender.send(Ok(connection)).await,
            Err(error) => {
                if let Some(count) = self.refusals.count(Instant::now()) {
                    tracing::warn!(%peer, %error, count, "refused connections; a gateway needs a certificate of the cluster's authority");
                }
            }
        }
    }
}

/// The count of refused connections that no log line has told yet.
#[derive(Debug, Default)]
struct Refusals {
    state: Mutex<(Option<Instant>, u64)>,
}

impl Refusals {
    /// Counts a refusal at `now`. Returns the count if a log line is due.
    fn count(&self, now: Instant) -> Option<u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (told, count) = &mut *state;
        *count += 1;
        let is_due = told.is_none_or(|told| now.duration_since(told) >= REFUSALS_TOLD);
        is_due.then(|| {
            *told = Some(now);
            std::mem::take(count)
        })
    }
}

async fn handshake(
    stream: TcpStream,
    files: &LinkFiles,
) -> io::Result<(TlsStream<TcpStream>, GatewayName)> {
    // Tokens are small and must not wait for the next one.
    stream.set_nodelay(true)?;
    let settings = files.server().map_err(io::Error::other)?;
    let stream = TlsAcceptor::from(Arc::new(settings)).accept(stream).await?;
    let (_, session) = stream.get_ref();
    let leaf = session.peer_certificates().and_then(|chain| chain.first());
    let gateway = leaf.and_then(|leaf| files.gateway(leaf)).ok_or_else(|| {
        let cluster = &files.cluster;
        io::Error::other(format!("the certificate names no gateway of the cluster {cluster}"))
    })?;
    Ok((stream, gateway))
}

/// An open connection of a gateway.
pub(crate) struct GatewayConnection {
    stream: TlsStream<TcpStream>,
    link: GatewayLink,
    _place: OwnedSemaphorePermit,
}

impl Connected for GatewayConnection {
    type ConnectInfo = GatewayLink;

    fn connect_info(&self) -> GatewayLink {
        self.link.clone()
    }
}

impl AsyncRead for GatewayConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for GatewayConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test reports")]

    use super::*;

    #[test]
    #[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
    fn refused_connections_share_log_lines() {
        let (refusals, now) = (Refusals::default(), Instant::now());
        assert_eq!(refusals.count(now), Some(1));
        for _ in 0..1_000 {
            assert_eq!(refusals.count(now), None);
        }
        assert_eq!(refusals.count(now + REFUSALS_TOLD), Some(1_001));
    }
}
