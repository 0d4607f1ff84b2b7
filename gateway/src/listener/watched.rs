//! Bytes and bodies that report what they do to the connection's [`Activity`].

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use http_body::{Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::activity::Activity;

/// Bytes below TLS: reports when the socket takes no more.
pub(super) struct WatchedWrites<I> {
    io: I,
    activity: Option<Arc<Activity>>,
}

impl<I> WatchedWrites<I> {
    /// Silent until [`Self::report_to`]: the handshake has its own deadline.
    pub(super) fn new(io: I) -> Self {
        Self { io, activity: None }
    }

    pub(super) fn report_to(&mut self, activity: Arc<Activity>) {
        self.activity = Some(activity);
    }

    fn report(&self, done: bool) {
        if let Some(activity) = &self.activity {
            if done { activity.wrote() } else { activity.write_blocked(Instant::now()) }
        }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for WatchedWrites<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl<I: AsyncWrite + Unpin> AsyncWrite for WatchedWrites<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, bytes);
        self.report(written.is_ready());
        written
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, slices);
        self.report(written.is_ready());
        written
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
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

impl<I: AsyncWrite + Unpin> AsyncWrite for WatchedReads<I> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

/// One request in flight, from its head to the end of its response. Dropped
/// before [`RequestInFlight::whole`], it counts as cancelled.
pub(super) struct RequestInFlight {
    activity: Arc<Activity>,
    whole: bool,
    /// A piece was handed over and the next is not yet wanted.
    unread: bool,
}

impl RequestInFlight {
    pub(super) fn begin(activity: &Arc<Activity>) -> Self {
        activity.request_began();
        Self { activity: Arc::clone(activity), whole: false, unread: false }
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
pub(super) struct WatchedBody {
    body: Body,
    request: RequestInFlight,
}

impl WatchedBody {
    /// `bodiless`: the response has none to read, as to HEAD.
    pub(super) fn new(body: Body, mut request: RequestInFlight, bodiless: bool) -> Self {
        request.whole = bodiless || http_body::Body::is_end_stream(&body);
        Self { body, request }
    }
}

impl http_body::Body for WatchedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
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
