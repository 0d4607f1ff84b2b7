//! One connection to one worker, over its Unix socket or over the network. The
//! connection is never renewed in silence: another process of another epoch may
//! listen at the same address, so the end of a connection ends everything learned
//! over it.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tollgate_domain::WorkerName;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use crate::link::{LinkError, LinkFiles};
use crate::v1::worker_client::WorkerClient;

/// Bytes of the largest message: a block of the journal.
const MOST_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// Unread events of one request, bytes.
const STREAM_WINDOW: u32 = 64 * 1024;
/// Unread events of all requests together, bytes. A thousand clients that do not
/// read must not stop the other streams of the connection.
const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// Time between two pings of an idle connection.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Time within which a worker must answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for connecting, for the TLS handshake, and for the HTTP/2 connection each.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// The place where a worker listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerAddress {
    /// A Unix socket of this machine.
    Socket(PathBuf),
    /// An address of the network.
    Remote(RemoteWorker),
}

/// A worker that is reached over the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteWorker {
    /// The worker's name, which its certificate must have.
    pub name: WorkerName,
    /// The host and port, as in `10.0.0.7:7443`.
    pub address: String,
    /// The certificates of the gateway.
    pub files: Arc<LinkFiles>,
}

/// Reasons why a worker cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The worker did not accept the connection in time.
    #[error("{0} did not accept a connection in time")]
    Timeout(String),
    /// The worker cannot be reached.
    #[error("cannot connect to {address}")]
    Unreachable {
        /// The socket or the network address.
        address: String,
        /// The error of the network.
        source: io::Error,
    },
    /// The gateway's own certificates cannot be used.
    #[error("the certificates for workers cannot be used")]
    Files(#[from] LinkError),
    /// The worker's certificate or the gateway's was refused.
    #[error("the TLS handshake with {address} failed")]
    Handshake {
        /// The network address.
        address: String,
        /// The reason.
        source: io::Error,
    },
    /// The HTTP/2 connection could not be made.
    #[error("the connection to the worker broke")]
    Transport(#[source] tonic::transport::Error),
}

/// The path of the socket, or the host and port.
impl fmt::Display for WorkerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Socket(path) => path.display().fmt(f),
            Self::Remote(worker) => f.write_str(&worker.address),
        }
    }
}

/// The gRPC client of one connection.
pub type Client = WorkerClient<Channel>;

/// Connects to the worker that listens at `address`.
///
/// # Errors
/// The address cannot be reached in time, the other side is not the expected worker, or
/// the gateway's certificates cannot be used.
pub async fn connect(address: &WorkerAddress) -> Result<Client, ConnectError> {
    match address {
        WorkerAddress::Socket(path) => {
            let stream = in_time(address, UnixStream::connect(path)).await?;
            client(stream.map_err(|source| unreachable(address, source))?).await
        }
        WorkerAddress::Remote(worker) => {
            // Read before the network is asked: the wrong files are no fault of the worker.
            let settings = Arc::new(worker.files.client(&worker.name)?);
            let stream = in_time(address, TcpStream::connect(worker.address.as_str())).await?;
            let stream = stream.map_err(|source| unreachable(address, source))?;
            // Tokens are small and must not wait for the next one.
            stream.set_nodelay(true).map_err(|source| unreachable(address, source))?;
            // The constant is a host name, so this error does not happen.
            let name = ServerName::try_from(UNUSED_NAME).map_err(|_| {
                unreachable(address, io::Error::other("the constant name is not a host name"))
            })?;
            let stream =
                in_time(address, TlsConnector::from(settings).connect(name, stream)).await?;
            let stream = stream.map_err(|source| ConnectError::Handshake {
                address: address.to_string(),
                source,
            })?;
            client(stream).await
        }
    }
}

/// The host name that the TLS library asks for. The worker's certificate is checked by its
/// URI instead.
const UNUSED_NAME: &str = "worker.tollgate.internal";

async fn in_time<T>(
    address: &WorkerAddress,
    step: impl Future<Output = io::Result<T>>,
) -> Result<io::Result<T>, ConnectError> {
    timeout(CONNECT_TIMEOUT, step).await.map_err(|_| ConnectError::Timeout(address.to_string()))
}

fn unreachable(address: &WorkerAddress, source: io::Error) -> ConnectError {
    ConnectError::Unreachable { address: address.to_string(), source }
}

/// Makes the gRPC client over `stream`.
async fn client(
    stream: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
) -> Result<Client, ConnectError> {
    let mut only = Some(stream);
    let connector = service_fn(move |_| {
        // The channel asks for a second stream when the first ends, and gets none.
        let stream = only.take().map(TokioIo::new);
        async move { stream.ok_or_else(|| io::Error::other("this connection has ended")) }
    });
    // The name is never resolved: the connector has the stream already.
    let channel = Endpoint::from_static("http://worker")
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_timeout(CONNECT_TIMEOUT)
        .connect_with_connector(connector)
        .await
        .map_err(ConnectError::Transport)?;
    // The library's default of 4 MiB would refuse a large block.
    Ok(WorkerClient::new(channel)
        .max_decoding_message_size(MOST_MESSAGE_BYTES)
        .max_encoding_message_size(MOST_MESSAGE_BYTES))
}
