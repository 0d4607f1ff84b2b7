//! Bodies that nobody reads. A refusal comes before the body is read; then a
//! small rest is read and dropped, so that the connection can be used again,
//! and a large one ends the connection. Never is the rest of a body left where
//! the next request is looked for.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::response::Response;
use http::{HeaderValue, Version, header};
use http_body::{Body as _, Frame, SizeHint};
use http_body_util::{BodyExt as _, Limited};
use tokio::time::timeout;

/// A body that is lent to a handler: what the handler leaves unread comes back.
pub(super) struct Unread {
    head: Head,
    rest: Rest,
}

/// How a body comes.
struct Head {
    is_http1: bool,
    /// Over HTTP/1 a chunked request is the last on its connection: what comes
    /// after chunks is where requests are smuggled.
    is_chunked: bool,
    /// The client waits to be told before it sends its body.
    is_expecting: bool,
}

impl Head {
    /// `None` where there is no body.
    fn of<B: http_body::Body>(request: &http::Request<B>) -> Option<Self> {
        let headers = request.headers();
        let is_http1 = request.version() < Version::HTTP_2;
        let is_chunked = is_http1 && headers.contains_key(header::TRANSFER_ENCODING);
        if request.body().is_end_stream() && !is_chunked {
            return None;
        }
        Some(Self { is_http1, is_chunked, is_expecting: headers.contains_key(header::EXPECT) })
    }
}

/// Where the body is.
enum Rest {
    /// Nobody has it.
    Kept(Limited<Body>),
    /// A handler has it, and leaves here what it has not read.
    Lent(Left),
}

/// The body of a request that nobody handles.
pub(crate) struct Unwanted<B> {
    head: Head,
    body: B,
    largest: u64,
}

impl<B> Unwanted<B>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    /// Nothing where the request has none.
    pub(super) fn of(request: http::Request<B>, largest: u64) -> Option<Self> {
        let head = Head::of(&request)?;
        Some(Self { head, body: request.into_body(), largest })
    }

    /// Whether the response may go out before the body has come.
    pub(crate) fn need_not_come(&self) -> bool {
        !self.head.is_http1
    }

    /// Drops what has come, within bounds; whether that was all.
    pub(crate) fn has_come(&mut self, cx: &mut Context<'_>) -> bool
    where
        B: Unpin,
    {
        for _ in 0..FRAMES_AT_ONCE {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(_))) if !self.body.is_end_stream() => {}
                Poll::Ready(_) => return true,
                Poll::Pending => return false,
            }
        }
        false
    }

    /// The rest, to be read and dropped while the response goes out.
    pub(crate) fn leave(self) -> Leftover {
        Leftover(within(Body::new(self.body), self.largest))
    }
}

impl<B> From<Unwanted<B>> for Unread
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    fn from(unwanted: Unwanted<B>) -> Self {
        let Unwanted { head, body, largest } = unwanted;
        Self { head, rest: Rest::Kept(within(Body::new(body), largest)) }
    }
}

type Left = Arc<Mutex<Option<Limited<Body>>>>;

impl Unread {
    /// Lends the request's body, of at most `largest` bytes; nothing where it
    /// has none.
    pub(super) fn lend(request: Request, largest: u64) -> (Request, Option<Self>) {
        let Some(head) = Head::of(&request) else { return (request, None) };
        let left = Left::default();
        let rest = Rest::Lent(Arc::clone(&left));
        let request =
            request.map(|body| Body::new(Lent { body: Some(within(body, largest)), left }));
        (request, Some(Self { head, rest }))
    }

    /// Deals with what was left, once there is a response. What is returned
    /// has to be read and dropped while the response goes out.
    pub(super) async fn end(self, response: &mut Response) -> Option<Leftover> {
        let rest = match self.rest {
            Rest::Kept(body) => Some(body).filter(|body| !body.is_end_stream()),
            Rest::Lent(left) => left.lock().unwrap_or_else(PoisonError::into_inner).take(),
        };
        let (is_read, rest) = match rest {
            None => (true, None),
            Some(rest) if self.head.is_expecting || self.head.is_chunked => {
                (rest.is_end_stream(), Some(rest))
            }
            Some(mut rest) => (drain(&mut rest).await, Some(rest)),
        };
        if !self.head.is_http1 {
            return rest.filter(|_| !is_read).map(Leftover);
        }
        if self.head.is_chunked || !is_read {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        None
    }
}

/// The rest of a large body over HTTP/2. Dropped at once it would reset its
/// stream, which is well (RFC 9113, 8.1), but some clients that still send
/// then lose the response that they have.
pub(crate) struct Leftover(Limited<Body>);

impl Leftover {
    /// Reads and drops it, within bounds.
    pub(crate) async fn drop_slowly(self) {
        let Self(mut rest) = self;
        let mut dropped = 0;
        let dropping = async {
            while let Some(Ok(frame)) = rest.frame().await {
                dropped += frame.data_ref().map_or(0, Bytes::len);
                if dropped > LEFTOVER_BYTES {
                    break;
                }
            }
        };
        // Who sends on and on is reset after all.
        let _ = timeout(LEFTOVER, dropping).await;
    }
}

/// The body, cut one byte beyond what there may be, so that a reader of its own
/// finds its limit exceeded rather than its body broken.
fn within(body: Body, largest: u64) -> Limited<Body> {
    Limited::new(body, usize::try_from(largest.saturating_add(1)).unwrap_or(usize::MAX))
}

/// Reads and drops a small rest; whether it came to its end.
async fn drain(rest: &mut Limited<Body>) -> bool {
    if rest.size_hint().upper().is_none_or(|left| left > SMALL) {
        return false;
    }
    let draining = async {
        while let Some(frame) = rest.frame().await {
            if frame.is_err() {
                return false;
            }
        }
        true
    };
    timeout(PATIENCE, draining).await.unwrap_or(false)
}

/// The body as the handler has it.
struct Lent {
    /// There until it is dropped.
    body: Option<Limited<Body>>,
    left: Left,
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}

impl http_body::Body for Lent {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let Some(body) = &mut self.body else { return Poll::Ready(None) };
        Pin::new(body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(http_body::Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(http_body::Body::size_hint).unwrap_or_default()
    }
}

/// Frames that are dropped before a response goes out.
const FRAMES_AT_ONCE: usize = 16;

/// Bytes that are read to keep a connection: the body of an ordinary chat.
const SMALL: u64 = 64 * 1024;

/// How long they may take to come.
const PATIENCE: Duration = Duration::from_secs(1);

/// How long a leftover is read, and how much of it: as for sockets that
/// linger, more than any body that is taken.
const LEFTOVER: Duration = Duration::from_secs(2);
const LEFTOVER_BYTES: usize = 4 << 20;
