//! Bytes and bodies that report what they do to the connection's [`Activity`].

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::activity::Activity;
use super::gate::Peer;
use super::pass::writes_pass_on;
use super::service::RequestRefusal;

/// A connection's socket, below TLS: reports when it takes no more, and is
/// read on after the connection's end where that must not reset the peer.
pub(super) struct Socket {
    /// There until it is dropped.
    stream: Option<TcpStream>,
    activity: Option<Arc<Activity>>,
    lingering: Lingering,
}

/// Where sockets linger, and whose they are.
#[derive(Clone)]
pub(super) struct Lingering {
    pub(super) tasks: TaskTracker,
    /// Keeps the connection's place until the socket is closed.
    pub(super) peer: Peer,
}

impl Socket {
    /// Silent until [`Self::report_to`]: the handshake has its own deadline.
    pub(super) fn new(stream: TcpStream, lingering: Lingering) -> Self {
        Self { stream: Some(stream), activity: None, lingering }
    }

    pub(super) fn report_to(&mut self, activity: Arc<Activity>) {
        self.activity = Some(activity);
    }

    fn stream(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(self.stream.as_mut().expect("it is there until it is dropped"))
    }

    fn report(&self, written: &Poll<io::Result<usize>>) {
        if let Some(activity) = &self.activity {
            match written {
                Poll::Ready(written) => activity.wrote(*written.as_ref().unwrap_or(&0)),
                Poll::Pending => activity.write_blocked(Instant::now()),
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        let lingers = self.activity.as_ref().is_some_and(|activity| activity.lingers());
        if lingers
            && let Some(stream) = self.stream.take()
            // None only where the runtime itself ends.
            && tokio::runtime::Handle::try_current().is_ok()
        {
            let Lingering { tasks, peer } = self.lingering.clone();
            tasks.spawn(async move {
                // A peer that sends on and on, or nothing, is reset after all.
                let _ = timeout(LINGER, linger(stream)).await;
                drop(peer);
            });
        }
    }
}

/// Reads and drops what the peer still sends. A socket that is closed with
/// bytes unread resets the connection, and the peer may lose the response
/// that it has not read yet.
async fn linger(mut stream: TcpStream) -> io::Result<()> {
    stream.shutdown().await?;
    let mut dropped = 0;
    let mut space = [0; 4 * 1024];
    while dropped < LINGER_BYTES {
        match stream.read(&mut space).await? {
            0 => break,
            read => dropped += read,
        }
    }
    Ok(())
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.stream().poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = self.stream().poll_write(cx, bytes);
        self.report(&written);
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = self.stream().poll_write_vectored(cx, slices);
        self.report(&written);
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(TcpStream::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream().poll_shutdown(cx)
    }
}

/// Bytes above TLS: reports what arrives.
pub(super) struct WatchedReads<I> {
    io: I,
    activity: Arc<Activity>,
}

impl<I> WatchedReads<I> {
    pub(super) fn new(io: I, activity: Arc<Activity>) -> Self {
        Self { io, activity }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for WatchedReads<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buffer);
        if read.is_ready() {
            self.activity.read(buffer.filled().len() - before, Instant::now());
        }
        read
    }
}

writes_pass_on!(WatchedReads);

/// One request in flight, from its head to the end of its response. Dropped
/// before [`RequestInFlight::whole`], it counts as cancelled.
pub(super) struct RequestInFlight {
    activity: Arc<Activity>,
    whole: bool,
    /// A piece was handed over and the next is not yet wanted.
    unread: bool,
}

impl RequestInFlight {
    /// And what stands against the request, if anything.
    pub(super) fn begin(activity: &Arc<Activity>) -> (Self, Option<RequestRefusal>) {
        let unwelcome = activity.request_began();
        (Self { activity: Arc::clone(activity), whole: false, unread: false }, unwelcome)
    }

    /// The connection ends with it, and what the peer still sends is read.
    pub(super) fn linger(&self) {
        self.activity.linger();
    }

    fn handed(&mut self) {
        if !self.unread {
            self.unread = true;
            self.activity.piece_handed();
        }
    }

    fn wanted(&mut self) {
        if self.unread {
            self.unread = false;
            self.activity.piece_wanted(Instant::now());
        }
    }
}

impl Drop for RequestInFlight {
    fn drop(&mut self) {
        self.wanted();
        self.activity.request_ended(self.whole, Instant::now());
    }
}

/// A response's body, and with it the end of its request.
pub(super) struct WatchedBody<B> {
    body: B,
    request: RequestInFlight,
}

impl<B: http_body::Body> WatchedBody<B> {
    /// `bodiless`: the response has none to read, as to HEAD.
    pub(super) fn new(body: B, mut request: RequestInFlight, bodiless: bool) -> Self {
        request.whole = bodiless || body.is_end_stream();
        Self { body, request }
    }
}

impl<B: http_body::Body + Unpin> http_body::Body for WatchedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        self.request.wanted();
        let frame = Pin::new(&mut self.body).poll_frame(cx);
        match &frame {
            Poll::Ready(Some(Ok(_))) => {
                self.request.whole = self.body.is_end_stream();
                if !self.request.whole {
                    self.request.handed();
                }
            }
            // An error of ours is no cancel of the client's.
            Poll::Ready(None | Some(Err(_))) => self.request.whole = true,
            Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// How long a socket lingers, and how many bytes it drops at most: more than
/// any body that is taken.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 4 << 20;
