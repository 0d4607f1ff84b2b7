//! One connection to one worker over its Unix socket. It is never renewed in
//! silence: behind the same path may stand another process of another epoch,
//! so the end of a connection is the end of everything learned over it.

use std::io;
use std::path::Path;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tollgate_wire::v1::worker_client::WorkerClient;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::UpstreamError;

/// What a worker's messages may weigh: a block of the journal is the largest.
const MOST_MESSAGE_BYTES: usize = 16 * 1024 * 1024;
/// Unread events of one request, bytes.
const STREAM_WINDOW: u32 = 64 * 1024;
/// Unread events of all requests together: a thousand stalled readers must
/// not stop the others.
const CONNECTION_WINDOW: u32 = 64 * 1024 * 1024;
/// A worker that does not answer a ping ...
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// ... within this time is gone.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Connecting to a socket of this machine takes no time at all.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Connects to the worker that listens at `socket`.
pub(super) async fn connect(socket: &Path) -> Result<WorkerClient<Channel>, UpstreamError> {
    let stream = tokio::time::timeout(CONNECT_TIMEOUT, UnixStream::connect(socket))
        .await
        .map_err(|_| UpstreamError::Silent("connecting"))?
        .map_err(UpstreamError::Connect)?;
    let mut only = Some(stream);
    let connector = service_fn(move |_| {
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
        .map_err(UpstreamError::Transport)?;
    Ok(WorkerClient::new(channel)
        .max_decoding_message_size(MOST_MESSAGE_BYTES)
        .max_encoding_message_size(MOST_MESSAGE_BYTES))
}
