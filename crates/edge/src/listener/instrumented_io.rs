//! Streams and bodies that report their progress to the connection's
//! [`Activity`].

use std::io;
use std::mem::take;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use hyper::body::Bytes;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::activity::Activity;
use super::forward_write::forward_write;
use super::peer::Peer;
use super::response_progress::ResponseProgress;
use super::service::RequestRefusal;

/// The socket of a connection, below TLS. It reports when it accepts no more
/// bytes. After the end of the connection it may linger, so that the peer is
/// not reset.
pub(super) struct Socket {
    /// `Some` until the value is dropped.
    stream: Option<TcpStream>,
    activity: Option<Arc<Activity>>,
    lingering: Lingering,
}

/// The context that a lingering socket needs.
#[derive(Clone)]
pub(super) struct Lingering {
    /// The tasks that read lingering sockets.
    pub(super) tasks: TaskTracker,
    /// The peer, which keeps the connection counted until the socket is closed.
    pub(super) peer: Peer,
}

impl Socket {
    /// Wraps `stream`. The socket reports nothing until [`Self::report_to`],
    /// because the handshake has its own deadline.
    pub(super) fn new(stream: TcpStream, lingering: Lingering) -> Self {
        Self { stream: Some(stream), activity: None, lingering }
    }

    /// Sets the activity to report to.
    pub(super) fn report_to(&mut self, activity: Arc<Activity>) {
        self.activity = Some(activity);
    }

    #[expect(clippy::expect_used, reason = "only the drop takes the stream")]
    fn stream(&mut self) -> Pin<&mut TcpStream> {
        Pin::new(self.stream.as_mut().expect("the stream is there until the drop"))
    }

    #[expect(clippy::disallowed_methods, reason = "the activity gets the time of this write")]
    fn report(&self, written: &Poll<io::Result<usize>>) {
        if let Some(activity) = &self.activity {
            match written {
                // After a failed write the connection ends by its error and not by a deadline.
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
            // There is no runtime only while the process ends.
            && tokio::runtime::Handle::try_current().is_ok()
        {
            let Lingering { tasks, peer } = self.lingering.clone();
            tasks.spawn(async move {
                // Beyond these bounds the peer is reset: it sends without end,
                // or nothing.
                let _ = timeout(LINGER, linger(stream)).await;
                drop(peer);
            });
        }
    }
}

/// Reads and drops the bytes that the peer still sends. Closing a socket with
/// unread bytes resets the connection, and the peer may lose a response that it
/// has not read yet.
async fn linger(mut stream: TcpStream) -> io::Result<()> {
    // Our side is closed first, so that the peer sees the end of the response.
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

/// The stream above TLS; it reports the bytes that arrive.
pub(super) struct InstrumentedReads<I> {
    io: I,
    activity: Arc<Activity>,
}

impl<I> InstrumentedReads<I> {
    pub(super) fn new(io: I, activity: Arc<Activity>) -> Self {
        Self { io, activity }
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for InstrumentedReads<I> {
    #[expect(clippy::disallowed_methods, reason = "the activity gets the time of this read")]
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.io).poll_read(cx, buffer);
        // Also for an error or the end, which arrive as zero bytes.
        if read.is_ready() {
            self.activity.read(buffer.filled().len() - before, Instant::now());
        }
        read
    }
}

forward_write!(InstrumentedReads);

/// One request in flight, from its head to the end of its response. A drop
/// before the response is complete counts as a cancel by the peer.
pub(super) struct RequestInFlight {
    activity: Arc<Activity>,
    response: Arc<ResponseProgress>,
    /// True once the response is complete.
    complete: bool,
}

impl RequestInFlight {
    /// Reports a new request; returns the reason to refuse it, if any.
    pub(super) fn begin(activity: &Arc<Activity>) -> (Self, Option<RequestRefusal>) {
        let (response, refusal) = activity.request_began();
        (Self { activity: Arc::clone(activity), response, complete: false }, refusal)
    }

    /// Marks the response as complete without a body, as for HEAD.
    pub(super) fn complete_without_body(&mut self) {
        self.complete = true;
    }

    /// Makes the socket linger after the connection, because this response ends
    /// the connection while the peer may still be sending.
    pub(super) fn linger(&self) {
        self.activity.linger();
    }
}

impl Drop for RequestInFlight {
    #[expect(clippy::disallowed_methods, reason = "the activity gets the time of the end")]
    fn drop(&mut self) {
        let now = Instant::now();
        // hyper asks for nothing after the last piece, so the wait for the peer stops here.
        self.response.piece_wanted(now);
        self.activity.request_ended(self.complete, now);
    }
}

/// The body of a response; its drop ends the request. It goes out in pieces, so
/// that the progress of a large one shows. Over HTTP/2 a piece is asked for when the
/// peer's window has room for all pieces before it. So a long piece at the end is cut
/// once more: the request ends when the peer has taken all but [`TAIL`] bytes.
pub(super) struct InstrumentedBody<B, E> {
    body: B,
    /// The part of the body's last frame that was not handed over yet.
    rest: Bytes,
    /// The frame or the error after that part, if the body gave it early.
    next: Option<Result<Frame<Bytes>, E>>,
    /// True once the body has given its last frame.
    ended: bool,
    /// Bytes of the largest piece.
    largest: usize,
    request: RequestInFlight,
}

impl<B: http_body::Body> InstrumentedBody<B, B::Error> {
    /// Wraps the body of a response.
    pub(super) fn new(body: B, mut request: RequestInFlight) -> Self {
        // hyper does not poll an empty body, so its end is noted here.
        request.complete |= body.is_end_stream();
        let largest = request.activity.largest_piece();
        Self { body, rest: Bytes::new(), next: None, ended: false, largest, request }
    }
}

impl<B> InstrumentedBody<B, B::Error>
where
    B: http_body::Body<Data = Bytes, Error: Unpin> + Unpin,
{
    /// Returns the next frame: the one that came early, or the body's next one.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        if let Some(next) = self.next.take() {
            return Poll::Ready(Some(next));
        }
        // A stream must not be asked again after its end.
        if self.ended {
            return Poll::Ready(None);
        }
        Pin::new(&mut self.body).poll_frame(cx)
    }

    /// Keeps back the part of `data` that is not in the next piece.
    fn cut(&mut self, mut data: Bytes, cx: &mut Context<'_>) -> Bytes {
        let mut piece = data.len().min(self.largest);
        // Over HTTP/1 the socket shows the end.
        let is_cut = self.largest < usize::MAX && piece == data.len() && piece > TAIL;
        if is_cut && self.is_last(cx) {
            piece -= TAIL;
        }
        let first = data.split_to(piece);
        self.rest = data;
        first
    }

    /// Returns true if the body has no more frames. Looks at the next one if it is
    /// ready: a stream tells its end only when it is asked.
    fn is_last(&mut self, cx: &mut Context<'_>) -> bool {
        if self.next.is_none() && !self.ended && !self.body.is_end_stream() {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(None) => self.ended = true,
                // Kept for the next call, because a body gives each frame once.
                Poll::Ready(next) => self.next = next,
                Poll::Pending => return false,
            }
        }
        self.next.is_none()
    }
}

impl<B> http_body::Body for InstrumentedBody<B, B::Error>
where
    B: http_body::Body<Data = Bytes, Error: Unpin> + Unpin,
{
    type Data = Bytes;
    type Error = B::Error;

    #[expect(clippy::disallowed_methods, reason = "the response gets the time of this piece")]
    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let now = Instant::now();
        self.request.response.piece_wanted(now);
        let frame = match take(&mut self.rest) {
            rest if rest.is_empty() => self.poll_body(cx),
            rest => Poll::Ready(Some(Ok(Frame::data(rest)))),
        };
        let frame = frame.map_ok(|frame| match frame.into_data() {
            Ok(data) => Frame::data(self.cut(data, cx)),
            // Trailers are not cut.
            Err(trailers) => trailers,
        });
        match &frame {
            Poll::Ready(Some(Ok(frame))) => {
                // hyper may not ask again after the last frame, and that is no cancel.
                self.request.complete = self.is_end_stream();
                // Also for the last piece: over HTTP/2 hyper keeps it, and this body,
                // until the peer grants a window. The drop ends the deadline.
                let bytes = frame.data_ref().map_or(0, Bytes::len);
                self.request.response.piece_handed(bytes, now);
            }
            // An error of the service is no cancel by the client.
            Poll::Ready(None | Some(Err(_))) => self.request.complete = true,
            Poll::Pending => {}
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        let ended = self.ended || self.body.is_end_stream();
        self.rest.is_empty() && self.next.is_none() && ended
    }

    fn size_hint(&self) -> SizeHint {
        let next = self.next.as_ref().and_then(|next| next.as_ref().ok()?.data_ref());
        let next = next.map_or(0, Bytes::len);
        let (body, rest) = (self.body.size_hint(), (self.rest.len() + next) as u64);
        let mut hint = SizeHint::new();
        if let Some(upper) = body.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(body.lower().saturating_add(rest));
        hint
    }
}

/// Bytes of the last piece of a response over HTTP/2, at most. A shorter piece would
/// cost every short response a frame more.
const TAIL: usize = 1_024;

/// Time for which a socket lingers, and bytes that it drops at most: more than
/// any body that is accepted.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 4 << 20;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use std::convert::Infallible;

    use futures_util::stream;
    use http_body_util::{BodyExt as _, Full, StreamBody};

    use super::super::activity::Protocol;
    use super::*;

    /// Returns the lengths of the pieces of `body`, and whether the body said after each
    /// one that it was the last.
    async fn pieces<B>(protocol: Protocol, body: B) -> Vec<(usize, bool)>
    where
        B: http_body::Body<Data = Bytes, Error = Infallible> + Unpin,
    {
        let activity = Arc::new(Activity::new(protocol, Instant::now(), Duration::MAX));
        let (request, _) = RequestInFlight::begin(&activity);
        let mut body = InstrumentedBody::new(body, request);
        let mut pieces = Vec::new();
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame;
            let length = frame.data_ref().expect("data").len();
            pieces.push((length, http_body::Body::is_end_stream(&body)));
        }
        pieces
    }

    /// A stream of frames of these lengths.
    fn streamed(
        lengths: &'static [usize],
    ) -> impl http_body::Body<Data = Bytes, Error = Infallible> + Unpin {
        let frames = lengths.iter().map(|length| Ok(Frame::data(Bytes::from(vec![b'x'; *length]))));
        StreamBody::new(stream::iter(frames))
    }

    #[tokio::test]
    async fn http2_body_ends_with_a_short_piece() {
        let whole = |length| Full::new(Bytes::from(vec![b'x'; length]));
        assert_eq!(pieces(Protocol::Http2, whole(1_024)).await, [(1_024, true)]);
        assert_eq!(
            pieces(Protocol::Http2, whole(9_000)).await,
            [(4_096, false), (4_096, false), (808, true)]
        );
        assert_eq!(
            pieces(Protocol::Http2, whole(6_000)).await,
            [(4_096, false), (880, false), (1_024, true)]
        );
        // The end of a stream is known only after its last frame.
        assert_eq!(
            pieces(Protocol::Http2, streamed(&[2_000, 10, 3_000])).await,
            [(2_000, false), (10, false), (1_976, false), (1_024, true)]
        );
        // The control: over HTTP/1 nothing is cut.
        assert_eq!(pieces(Protocol::Http1, whole(9_000)).await, [(9_000, true)]);
        assert_eq!(pieces(Protocol::Http1, streamed(&[2_000])).await, [(2_000, false)]);
    }
}
