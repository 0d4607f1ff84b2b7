//! Bodies that no handler reads. A refusal goes out before the body is read.
//! A small rest is then read and dropped, so that the connection can be used
//! again; a large rest ends the connection. The rest of a body is never left
//! where the next request is parsed.

use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{HeaderValue, Request, Response, Version, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt as _, Limited};
use hyper::body::Bytes;
use tokio::time::timeout;

/// The error type of boxed bodies.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A body of a request, as this module handles it.
pub trait RequestBody: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static {}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Send + Unpin + 'static> RequestBody for B {}

/// Lends the body of `request`, of at most `largest` bytes, to a handler. The
/// second value gets back what the handler leaves unread; it is `None`, and so
/// is the body, if the request has no body.
pub fn lend<B: RequestBody>(
    request: Request<B>,
    largest: u64,
) -> (Request<Option<LentBody<B>>>, Option<UnreadBody<B>>) {
    let Some(framing) = BodyFraming::of(&request) else { return (request.map(|_| None), None) };
    let left = Left::default();
    let rest = Rest::Lent(Arc::clone(&left));
    let request = request.map(|body| Some(LentBody { body: Some(limit(body, largest)), left }));
    (request, Some(UnreadBody { framing, rest }))
}

/// The properties of a request that decide how its body is drained.
struct BodyFraming {
    is_http1: bool,
    /// Over HTTP/1 a chunked request is the last on its connection, because
    /// request smuggling hides in what follows the chunks.
    is_chunked: bool,
    /// The client sends its body only after `100 Continue`.
    is_expecting: bool,
}

impl BodyFraming {
    /// Returns `None` if the request has no body.
    fn of<B: Body>(request: &Request<B>) -> Option<Self> {
        let headers = request.headers();
        let is_http1 = request.version() < Version::HTTP_2;
        let is_chunked = is_http1 && headers.contains_key(header::TRANSFER_ENCODING);
        // Bytes may also follow an empty chunked body, so its connection must end as well.
        if request.body().is_end_stream() && !is_chunked {
            return None;
        }
        Some(Self { is_http1, is_chunked, is_expecting: headers.contains_key(header::EXPECT) })
    }
}

/// The body of a request that no handler will read.
pub struct UnwantedBody<B> {
    framing: BodyFraming,
    body: B,
    largest: u64,
}

impl<B: RequestBody> UnwantedBody<B> {
    /// Takes the body out of `request`; `None` if it has no body. `largest`
    /// bounds the bytes that are read of it.
    pub fn of(request: Request<B>, largest: u64) -> Option<Self> {
        let framing = BodyFraming::of(&request)?;
        Some(Self { framing, body: request.into_body(), largest })
    }

    /// Returns true if the response may go out before the body has arrived.
    pub fn may_answer_first(&self) -> bool {
        // Over HTTP/1 the next request stands behind this body.
        !self.framing.is_http1
    }

    /// Drops the bytes that have arrived, within bounds. Returns true if the
    /// body has ended.
    pub(crate) fn drop_arrived(&mut self, cx: &mut Context<'_>) -> bool {
        // Bounded, so that a flood of frames cannot keep the task from its other work.
        for _ in 0..FRAMES_AT_ONCE {
            match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Ready(Some(Ok(_))) if !self.body.is_end_stream() => {}
                // After an error nothing more arrives, so the body has ended as well.
                Poll::Ready(_) => return true,
                Poll::Pending => return false,
            }
        }
        false
    }

    /// Turns the rest into bytes to drop while the response goes out.
    pub(crate) fn into_leftover(self) -> Leftover {
        Leftover::new(limit(self.body, self.largest))
    }
}

impl<B: RequestBody> From<UnwantedBody<B>> for UnreadBody<B> {
    fn from(unwanted: UnwantedBody<B>) -> Self {
        let UnwantedBody { framing, body, largest } = unwanted;
        Self { framing, rest: Rest::Kept(limit(body, largest)) }
    }
}

/// The part of a body that is still unread when the response is known.
pub struct UnreadBody<B> {
    framing: BodyFraming,
    rest: Rest<B>,
}

/// The place of a body's unread part.
enum Rest<B> {
    /// No handler had the body.
    Kept(Limited<B>),
    /// A handler has the body, and leaves its unread part here.
    Lent(Left<B>),
}

type Left<B> = Arc<Mutex<Option<Limited<B>>>>;

impl<B: RequestBody> UnreadBody<B> {
    /// Drains a small rest, or marks `response` as the last on its connection.
    /// The value returned has to be dropped slowly while the response goes
    /// out.
    pub async fn settle<T>(self, response: &mut Response<T>) -> Option<Leftover> {
        let Self { framing, rest } = self;
        let rest = match rest {
            Rest::Kept(body) => Some(body).filter(|body| !body.is_end_stream()),
            // Each holder of the lock makes one assignment, so a panic leaves nothing half done.
            Rest::Lent(left) => left.lock().unwrap_or_else(PoisonError::into_inner).take(),
        };
        let (is_read, rest) = match rest {
            None => (true, None),
            // Draining would ask an expecting client for the body, and the
            // connection of a chunked request ends in any case.
            Some(rest) if framing.is_expecting || framing.is_chunked => {
                (rest.is_end_stream(), Some(rest))
            }
            Some(mut rest) => (drain(&mut rest).await, Some(rest)),
        };
        // A stream of HTTP/2 carries one request, so its rest cannot be read as another.
        if !framing.is_http1 {
            return rest.filter(|_| !is_read).map(Leftover::new);
        }
        if framing.is_chunked || !is_read {
            let close = HeaderValue::from_static("close");
            response.headers_mut().insert(header::CONNECTION, close);
        }
        None
    }
}

/// The rest of a large body over HTTP/2. Dropping that body at once would
/// reset its stream, as RFC 9113, 8.1 allows; but some clients that are still
/// sending then lose the response that they already have.
pub struct Leftover(Pin<Box<dyn Future<Output = ()> + Send>>);

impl Leftover {
    fn new<B: RequestBody>(mut rest: Limited<B>) -> Self {
        Self(Box::pin(async move {
            let mut dropped = 0;
            let dropping = async {
                while let Some(Ok(frame)) = rest.frame().await {
                    dropped += frame.data_ref().map_or(0, Bytes::len);
                    if dropped > LEFTOVER_BYTES {
                        break;
                    }
                }
            };
            // A client that keeps sending beyond these bounds is reset.
            let _ = timeout(LEFTOVER_TIME, dropping).await;
        }))
    }

    /// Reads and drops the rest, within bounds.
    pub(crate) async fn drop_slowly(self) {
        self.0.await;
    }
}

/// Limits `body` to one byte more than `largest`, so that a reader with a limit
/// of its own finds that limit exceeded and not a broken body.
fn limit<B: RequestBody>(body: B, largest: u64) -> Limited<B> {
    Limited::new(body, usize::try_from(largest.saturating_add(1)).unwrap_or(usize::MAX))
}

/// Reads and drops a small rest. Returns true if the body ended.
async fn drain<B: RequestBody>(rest: &mut Limited<B>) -> bool {
    // A body of unknown length may be endless.
    if rest.size_hint().upper().is_none_or(|left| left > SMALL_BODY) {
        return false;
    }
    let draining = async {
        while let Some(frame) = rest.frame().await {
            // After a body that breaks off, the start of the next request is not certain.
            if frame.is_err() {
                return false;
            }
        }
        true
    };
    // A slow rest ends the connection, which costs less than the wait.
    timeout(DRAIN_TIMEOUT, draining).await.unwrap_or(false)
}

/// A body in the hands of a handler; its drop returns the unread part.
pub struct LentBody<B: RequestBody> {
    /// `Some` until the value is dropped.
    body: Option<Limited<B>>,
    left: Left<B>,
}

impl<B: RequestBody> Drop for LentBody<B> {
    fn drop(&mut self) {
        if let Some(body) = self.body.take().filter(|body| !body.is_end_stream()) {
            *self.left.lock().unwrap_or_else(PoisonError::into_inner) = Some(body);
        }
    }
}

impl<B: RequestBody> Body for LentBody<B> {
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
        self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.as_ref().map(Body::size_hint).unwrap_or_default()
    }
}

/// Frames that are dropped before a response goes out.
const FRAMES_AT_ONCE: usize = 16;

/// Bytes that are read to keep a connection usable: the body of an ordinary
/// chat.
const SMALL_BODY: u64 = 64 * 1024;

/// Time in which a small body must arrive.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Bounds on reading a leftover, equal to those of sockets that linger: more
/// than any body that is accepted.
const LEFTOVER_TIME: Duration = Duration::from_secs(2);
const LEFTOVER_BYTES: usize = 4 << 20;
