//! Reading a body from the wire. Its size is bounded before it is kept, and its
//! progress and its mean rate are watched, so that a slow client cannot hold a
//! request and its place for long.

use std::error::Error;
use std::time::Duration;

use axum::body::Body;
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError};
use tokio::time::{Instant, timeout_at};
use tollgate_serving::FullQueue;

use super::body_budget::{BodyBytes, BudgetRefusal};
use crate::reply::ApiError;

/// Bounds on the size and the slowness of a body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BodyLimits {
    /// Bytes of the largest body.
    pub(crate) size: u64,
    /// Length of a window of time.
    pub(crate) window: Duration,
    /// Bytes that must arrive in each window, unless the body ends.
    pub(crate) progress: u64,
}

/// The reason for which a body was not read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyRefusal {
    /// The body is larger than this limit in bytes.
    TooLarge(u64),
    /// The body arrived too slowly.
    TooSlow,
    /// The connection failed or the client left.
    Broken,
    /// The bodies that are on their way hold too much memory.
    NoMemory(BudgetRefusal),
}

impl From<BodyRefusal> for ApiError {
    fn from(refusal: BodyRefusal) -> Self {
        match refusal {
            BodyRefusal::TooLarge(limit) => Self::BodyTooLarge { limit },
            BodyRefusal::TooSlow => Self::BodyTooSlow,
            BodyRefusal::Broken => Self::malformed("The body ended before its length."),
            BodyRefusal::NoMemory(BudgetRefusal::Owner(limit)) => Self::BodyMemory { limit },
            BodyRefusal::NoMemory(BudgetRefusal::All) => {
                Self::Overloaded { full: FullQueue::BodyMemory, retry_after: None }
            }
        }
    }
}

impl From<BudgetRefusal> for BodyRefusal {
    fn from(refusal: BudgetRefusal) -> Self {
        Self::NoMemory(refusal)
    }
}

/// Returns true if `body` may have more bytes than an ordinary chat.
pub(super) fn may_be_large(body: &Body) -> bool {
    body.size_hint().upper().is_none_or(|bytes| bytes > SMALL_BODY as u64)
}

/// A body that has arrived, in segments that never move. A buffer that grows would
/// leave its earlier allocations to the allocator, which keeps each for a second.
#[derive(Debug, Default)]
pub(crate) struct ReceivedBody {
    segments: Vec<Vec<u8>>,
    length: usize,
    /// Bytes of all segments, filled or not.
    taken: usize,
}

impl ReceivedBody {
    /// Returns the number of bytes that have arrived.
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    /// Returns the bytes in their order.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &[u8]> {
        self.segments.iter().map(Vec::as_slice)
    }

    /// Joins the segments. Each is freed once it is copied, so that the whole takes
    /// one segment more than the body.
    pub(crate) fn into_bytes(mut self) -> Vec<u8> {
        if self.segments.len() == 1 {
            return self.segments.swap_remove(0);
        }
        let mut bytes = Vec::with_capacity(self.length);
        for segment in self.segments {
            bytes.extend_from_slice(&segment);
        }
        bytes
    }

    /// Appends `data` to a body of `most` bytes at most. Each new segment is held
    /// whole, because all of it can become memory.
    fn append(
        &mut self,
        mut data: &[u8],
        most: usize,
        held: &mut BodyBytes,
    ) -> Result<(), BudgetRefusal> {
        while !data.is_empty() {
            match self.segments.last_mut() {
                Some(last) if last.len() < last.capacity() => {
                    let (now, later) = data.split_at(data.len().min(last.capacity() - last.len()));
                    last.extend_from_slice(now);
                    self.length += now.len();
                    data = later;
                }
                _ => {
                    // At least the data: a segment without room would never end the loop.
                    let rest = most.saturating_sub(self.length).max(data.len());
                    let size = rest.min(SEGMENT);
                    // A request needs memory of its own while it waits to be tokenized.
                    held.grow_to(((self.taken + size) as u64).max(LEAST_HELD))?;
                    self.taken += size;
                    self.segments.push(Vec::with_capacity(size));
                }
            }
        }
        Ok(())
    }
}

/// Reads the whole body within `limits`. `held` takes the memory of each segment before
/// its first byte is kept: at most [`SEGMENT`] bytes more than what has arrived.
pub(crate) async fn read(
    mut body: Body,
    limits: BodyLimits,
    held: &mut BodyBytes,
) -> Result<ReceivedBody, BodyRefusal> {
    let limit = limits.size;
    let expected = body.size_hint();
    // A declared length beyond the limit is refused before a byte is read.
    if expected.lower() > limit {
        return Err(BodyRefusal::TooLarge(limit));
    }
    // A length that has no room now is refused early. It takes nothing: a declaration
    // costs its client nothing, so it must not keep memory from others.
    held.check(expected.lower())?;
    let most = expected.upper().map_or(limit, |upper| upper.min(limit)) as usize;
    let mut received = ReceivedBody::default();
    let mut pace = Pace::begin(limits);
    loop {
        // The deadline is that of the pace, so that many tiny frames cannot prolong it.
        let frame = match timeout_at(pace.deadline(received.len()), body.frame()).await {
            Err(_) => return Err(BodyRefusal::TooSlow),
            Ok(None) => return Ok(received),
            Ok(Some(Err(error))) if is_over_limit(&error) => {
                return Err(BodyRefusal::TooLarge(limit));
            }
            Ok(Some(Err(_))) => return Err(BodyRefusal::Broken),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers hold nothing that the gateway reads.
        let Ok(data) = frame.into_data() else { continue };
        // Checked before the copy, so that the segments never exceed the limit.
        if (received.len() + data.len()) as u64 > limit {
            return Err(BodyRefusal::TooLarge(limit));
        }
        // Copied, because `data` can be a few bytes of a large buffer of the connection.
        received.append(&data, most, held)?;
        pace.arrived(received.len());
    }
}

/// Returns true if the limit of the stack, which has the same size, cut the body
/// off.
fn is_over_limit(error: &axum::Error) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(error) = cause {
        if error.is::<LengthLimitError>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// Bytes of an ordinary chat.
pub(super) const SMALL_BODY: usize = 64 * 1024;

/// Bytes of the largest segment: an ordinary chat needs one, and its bytes are never
/// joined.
const SEGMENT: usize = SMALL_BODY;

/// Bytes of the budget that the smallest body holds, so that the budget bounds the
/// number of requests that wait to be tokenized.
const LEAST_HELD: u64 = 1024;

/// Time that every body has in addition to that of its bytes. It covers a slow start
/// and a pause of the network.
const GRACE: Duration = Duration::from_secs(10);

/// Bytes a second that a body must bring on average after [`GRACE`]. The largest body,
/// 2 MiB by default, is whole within 53 s.
const MEAN_RATE: u64 = 48 * 1024;

/// The times by which more of a body must have arrived.
struct Pace {
    limits: BodyLimits,
    began: Instant,
    /// Bytes that had arrived when the window began.
    from: usize,
    window_end: Instant,
}

#[expect(clippy::disallowed_methods, reason = "the deadline of a body is on the runtime's clock")]
impl Pace {
    fn begin(limits: BodyLimits) -> Self {
        let began = Instant::now();
        Self { limits, began, from: 0, window_end: began + limits.window }
    }

    /// Returns the time at which a body of which `arrived` bytes have come is too slow.
    fn deadline(&self, arrived: usize) -> Instant {
        let of_bytes = Duration::from_millis(arrived as u64 * 1_000 / MEAN_RATE);
        self.window_end.min(self.began + GRACE + of_bytes)
    }

    /// Opens the next window if `arrived` bytes in all are enough for this one.
    fn arrived(&mut self, arrived: usize) {
        if (arrived - self.from) as u64 >= self.limits.progress {
            self.from = arrived;
            self.window_end = Instant::now() + self.limits.window;
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use futures_util::stream;

    use tollgate_domain::TenantId;
    use tollgate_serving::ShareOwner;

    use super::*;
    use crate::api::body_budget::{BodyBudget, BodyBudgetOptions};

    fn budget() -> BodyBudget {
        BodyBudget::new(BodyBudgetOptions {
            per_pooled_tenant: 2 << 20,
            per_owner: 2 << 20,
            total: 2 << 20,
        })
    }

    fn begin(budget: &BodyBudget) -> BodyBytes {
        let acme = TenantId::new("acme").expect("a name");
        budget.begin(ShareOwner::Tenant(acme.clone()), &acme)
    }

    async fn read(body: Body, limits: BodyLimits) -> Result<Vec<u8>, BodyRefusal> {
        let budget = budget();
        let mut held = begin(&budget);
        let read = super::read(body, limits, &mut held).await;
        if let Ok(body) = &read {
            let (taken, length) = (budget.taken(), body.len() as u64);
            assert!(taken >= length, "bytes are held until they are dropped");
            assert!(taken < length + SEGMENT as u64, "{taken} held for {length} bytes");
        }
        drop(held);
        assert_eq!(budget.taken(), 0);
        read.map(ReceivedBody::into_bytes)
    }

    fn limits(size: u64) -> BodyLimits {
        BodyLimits { size, window: Duration::from_secs(5), progress: 1024 }
    }

    #[tokio::test]
    async fn body_is_refused_above_its_limit() {
        for (chunks, expected) in [
            (vec!["ab", "cd"], Ok(b"abcd".to_vec())),
            (vec!["ab", "cde"], Err(BodyRefusal::TooLarge(4))),
            (vec![], Ok(Vec::new())),
        ] {
            let body = Body::from_stream(stream::iter(
                chunks.into_iter().map(|chunk| Ok::<_, std::io::Error>(chunk.to_owned())),
            ));
            assert_eq!(read(body, limits(4)).await, expected);
        }
        assert_eq!(read(Body::from("abcde"), limits(4)).await, Err(BodyRefusal::TooLarge(4)));
        let limited = Body::new(http_body_util::Limited::new(Body::from("abcde"), 4));
        assert_eq!(read(limited, limits(8)).await, Err(BodyRefusal::TooLarge(8)));
        let broken =
            Body::from_stream(stream::iter([Err::<String, _>(std::io::Error::other("gone"))]));
        assert_eq!(read(broken, limits(4)).await, Err(BodyRefusal::Broken));
    }

    #[tokio::test]
    async fn segments_join_in_order() {
        let sent: Vec<u8> = (0..300_000).map(|number: u32| (number % 251) as u8).collect();
        for size in [1_000, SEGMENT - 1, SEGMENT, SEGMENT + 1, 150_000, 300_000] {
            let chunks: Vec<_> =
                sent.chunks(size).map(|chunk| Ok::<_, std::io::Error>(chunk.to_vec())).collect();
            let body = Body::from_stream(stream::iter(chunks));
            assert!(read(body, limits(1 << 20)).await.expect("within the limit") == sent, "{size}");
        }
        // A body of a known length takes no more than its length.
        let mut received = ReceivedBody::default();
        let budget = budget();
        let mut held = begin(&budget);
        received.append(&sent[..70_000], 70_000, &mut held).expect("room");
        assert_eq!(budget.taken(), 70_000);
    }

    /// A declaration costs nothing, so that it takes nothing either.
    #[tokio::test(start_paused = true)]
    async fn declared_length_takes_no_memory_before_bytes() {
        struct Declared(bool);
        impl http_body::Body for Declared {
            type Data = axum::body::Bytes;
            type Error = std::io::Error;

            fn poll_frame(
                mut self: std::pin::Pin<&mut Self>,
                _: &mut std::task::Context<'_>,
            ) -> std::task::Poll<Option<Result<http_body::Frame<Self::Data>, Self::Error>>>
            {
                if !std::mem::take(&mut self.0) {
                    return std::task::Poll::Pending;
                }
                let byte = axum::body::Bytes::from_static(b"{");
                std::task::Poll::Ready(Some(Ok(http_body::Frame::data(byte))))
            }

            fn size_hint(&self) -> http_body::SizeHint {
                http_body::SizeHint::with_exact(2 << 20)
            }
        }
        for (sends_byte, expected) in [(false, 0), (true, SEGMENT as u64)] {
            let budget = budget();
            let mut held = begin(&budget);
            let reading = super::read(Body::new(Declared(sends_byte)), limits(2 << 20), &mut held);
            let waiting = tokio::time::timeout(Duration::from_secs(1), reading).await;
            assert!(waiting.is_err(), "the body does not end");
            assert_eq!(budget.taken(), expected);
        }
    }

    #[tokio::test]
    async fn undeclared_body_is_refused_beyond_its_memory() {
        let chunks = (0..40).map(|_| Ok::<_, std::io::Error>(vec![b' '; 64 * 1024]));
        let body = Body::from_stream(stream::iter(chunks));
        let refused = BudgetRefusal::Owner(2 << 20);
        assert_eq!(read(body, limits(4 << 20)).await, Err(BodyRefusal::NoMemory(refused)));
    }

    #[tokio::test(start_paused = true)]
    async fn body_that_trickles_is_refused() {
        let trickle = stream::unfold((), |()| async {
            tokio::time::sleep(Duration::from_millis(900)).await;
            Some((Ok::<_, std::io::Error>(vec![b' '; 100]), ()))
        });
        let started = Instant::now();
        assert_eq!(
            read(Body::from_stream(trickle), limits(1 << 20)).await,
            Err(BodyRefusal::TooSlow)
        );
        assert_eq!(started.elapsed(), Duration::from_secs(5));
    }

    /// A body of `count` pieces of `size` bytes with `pause` before each.
    fn paced(pause: Duration, size: usize, count: usize) -> Body {
        Body::from_stream(stream::unfold(0, move |sent| async move {
            tokio::time::sleep(pause).await;
            (sent < count).then(|| (Ok::<_, std::io::Error>(vec![b' '; size]), sent + 1))
        }))
    }

    /// Progress in every window is not enough: 1 KiB each 4 s would hold a place for more
    /// than two hours.
    #[tokio::test(start_paused = true)]
    async fn body_below_mean_rate_is_refused() {
        let started = Instant::now();
        let slow = paced(Duration::from_secs(4), 1024, 2048);
        assert_eq!(read(slow, limits(2 << 20)).await, Err(BodyRefusal::TooSlow));
        assert!(started.elapsed() < Duration::from_secs(11), "{:?}", started.elapsed());
        let below = paced(Duration::from_secs(1), 32 * 1024, 64);
        assert_eq!(read(below, limits(2 << 20)).await, Err(BodyRefusal::TooSlow));
    }

    #[tokio::test(start_paused = true)]
    async fn honest_slow_link_uploads_largest_body() {
        let started = Instant::now();
        let body = paced(Duration::from_secs(1), 64 * 1024, 32);
        assert_eq!(read(body, limits(2 << 20)).await.expect("64 KiB/s").len(), 2 << 20);
        assert!(started.elapsed() >= Duration::from_secs(32));
        let small = paced(Duration::from_secs(3), 1024, 2);
        assert_eq!(read(small, limits(2 << 20)).await.expect("within 10 s").len(), 2048);
    }
}
