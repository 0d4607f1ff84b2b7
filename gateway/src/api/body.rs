//! Reading a body from the wire. Its size is bounded before it is kept, and its
//! progress is watched, so that a slow client cannot hold a request for long.

use std::error::Error;
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::Body as _;
use http_body_util::{BodyExt, LengthLimitError};
use tokio::time::{Instant, timeout_at};

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
}

impl From<BodyRefusal> for ApiError {
    fn from(refusal: BodyRefusal) -> Self {
        match refusal {
            BodyRefusal::TooLarge(limit) => Self::BodyTooLarge { limit },
            BodyRefusal::TooSlow => Self::BodyTooSlow,
            BodyRefusal::Broken => Self::malformed("The body ended before its length."),
        }
    }
}

/// Reads the whole body within `limits`.
pub(crate) async fn read(mut body: Body, limits: BodyLimits) -> Result<Bytes, BodyRefusal> {
    let limit = limits.size;
    let expected = body.size_hint();
    // A declared length beyond the limit is refused before a byte is read.
    if expected.lower() > limit {
        return Err(BodyRefusal::TooLarge(limit));
    }
    // A declared length is only a claim, so little is reserved ahead.
    let mut bytes = Vec::with_capacity((expected.lower() as usize).min(64 * 1024));
    let mut window = Window::open(0, limits);
    loop {
        // The deadline is that of the window, so that many tiny frames cannot prolong it.
        let frame = match timeout_at(window.end, body.frame()).await {
            Err(_) => return Err(BodyRefusal::TooSlow),
            Ok(None) => return Ok(bytes.into()),
            Ok(Some(Err(error))) if is_over_limit(&error) => {
                return Err(BodyRefusal::TooLarge(limit));
            }
            Ok(Some(Err(_))) => return Err(BodyRefusal::Broken),
            Ok(Some(Ok(frame))) => frame,
        };
        // Trailers hold nothing that the gateway reads.
        let Ok(data) = frame.into_data() else { continue };
        // Checked before the copy, so that the buffer never exceeds the limit.
        if (bytes.len() + data.len()) as u64 > limit {
            return Err(BodyRefusal::TooLarge(limit));
        }
        bytes.extend_from_slice(&data);
        if (bytes.len() - window.from) as u64 >= limits.progress {
            window = Window::open(bytes.len(), limits);
        }
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

/// A window of time, and the bytes that had arrived at its start.
struct Window {
    from: usize,
    end: Instant,
}

impl Window {
    fn open(from: usize, limits: BodyLimits) -> Self {
        Self { from, end: Instant::now() + limits.window }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::stream;

    use super::*;

    fn limits(size: u64) -> BodyLimits {
        BodyLimits { size, window: Duration::from_secs(5), progress: 1024 }
    }

    #[tokio::test]
    async fn body_is_refused_above_its_limit() {
        for (chunks, expected) in [
            (vec!["ab", "cd"], Ok(Bytes::from("abcd"))),
            (vec!["ab", "cde"], Err(BodyRefusal::TooLarge(4))),
            (vec![], Ok(Bytes::new())),
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
        let slow = stream::unfold(0, |sent| async move {
            tokio::time::sleep(Duration::from_secs(4)).await;
            (sent < 10).then(|| (Ok::<_, std::io::Error>(vec![b' '; 1024]), sent + 1))
        });
        let body = read(Body::from_stream(slow), limits(1 << 20)).await.expect("it made progress");
        assert_eq!(body.len(), 10 * 1024);
    }
}
