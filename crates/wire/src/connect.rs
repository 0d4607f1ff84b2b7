//! One connection to one worker over its Unix socket. The connection is never
//! renewed in silence: another process of another epoch may listen at the same
//! path, so the end of a connection ends everything learned over it.

use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

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
/// Time for connecting. A socket of this machine accepts at once.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Reasons why a worker cannot be connected.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The socket did not accept the connection in time.
    #[error("the worker's socket did not accept a connection in time")]
    Timeout,
    /// The socket cannot be reached.
    #[error("cannot connect to the worker's socket")]
    Socket(#[source] io::Error),
    /// The HTTP/2 connection over the socket could not be made.
    #[error("the connection to the worker broke")]
    Transport(#[source] tonic::transport::Error),
}

/// Connects to the worker that listens at `socket`.
///
/// # Errors
/// The socket cannot be reached in time, or no worker answers on it.
pub async fn connect(socket: &Path) -> Result<WorkerClient<Channel>, ConnectError> {
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(socket))
        .await
        .map_err(|_| ConnectError::Timeout)?
        .map_err(ConnectError::Socket)?;
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
        .connect_with_connector(connector)
        .await
        .map_err(ConnectError::Transport)?;
    Ok(WorkerClient::new(channel)
        .max_decoding_message_size(MOST_MESSAGE_BYTES)
        .max_encoding_message_size(MOST_MESSAGE_BYTES))
}
