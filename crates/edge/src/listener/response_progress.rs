//! The progress of each response, and the end of a response that the peer does
//! not read.
//!
//! Over HTTP/2 a peer can stop reading one stream while others go on. hyper then
//! does not ask for the next piece of that stream, and waits without a bound. So
//! each stream's task has an alarm of its own.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The progress of one response. A response that waits for its service is not
/// unread, however long it waits.
#[derive(Debug)]
pub(super) struct ResponseProgress {
    opened: Instant,
    /// The time since when a piece waits for the peer, in nanoseconds after `opened`, or
    /// [`NOTHING_WAITS`]. A number and no lock, because each response writes it several
    /// times. It stands for no other data, so relaxed order is enough.
    unread_since: AtomicU64,
}

impl ResponseProgress {
    /// Creates the progress of a response on a connection that opened at `opened`.
    pub(super) fn new(opened: Instant) -> Self {
        Self { opened, unread_since: AtomicU64::new(NOTHING_WAITS) }
    }

    /// Reports that the connection got a piece of the response.
    pub(super) fn piece_handed(&self, now: Instant) {
        let since = now.saturating_duration_since(self.opened).as_nanos();
        // 64 bits of nanoseconds are 584 years.
        self.unread_since.store(since as u64, Ordering::Relaxed);
    }

    /// Reports that the connection asks for the next piece, or that the response
    /// has ended. Until then the peer has not taken the last piece.
    pub(super) fn piece_wanted(&self) {
        self.unread_since.store(NOTHING_WAITS, Ordering::Relaxed);
    }

    /// Returns the time since when a piece waits for the peer, if one waits.
    pub(super) fn unread_since(&self) -> Option<Instant> {
        match self.unread_since.load(Ordering::Relaxed) {
            NOTHING_WAITS => None,
            since => Some(self.opened + Duration::from_nanos(since)),
        }
    }
}

/// No time: the peer has taken every piece.
const NOTHING_WAITS: u64 = u64::MAX;

/// The end of a stream's task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum StreamEnd {
    /// The task ended by itself.
    Done,
    /// The peer left a piece of the response unread for too long.
    Unread,
}

/// Runs `stream`, the task of one HTTP/2 stream with this response, until its end
/// or until a piece of the response waits for the peer for `longest`. The drop of
/// the task resets the stream, and h2 then drops what it has buffered for it.
pub(super) async fn run_while_read(
    stream: impl Future,
    response: &ResponseProgress,
    longest: Duration,
) -> StreamEnd {
    let mut stream = pin!(stream);
    // Boxed and made late, because nearly every response is read in time.
    let mut alarm = None;
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(StreamEnd::Done);
        }
        let Some(since) = response.unread_since() else { return Poll::Pending };
        let due = since + longest;
        let alarm = alarm.get_or_insert_with(|| Box::pin(sleep_until(due)));
        if alarm.deadline() != due {
            alarm.as_mut().reset(due);
        }
        alarm.as_mut().poll(cx).map(|()| StreamEnd::Unread)
    })
    .await
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use std::cell::Cell;
    use std::future::pending;

    use tokio::time::sleep;

    use super::*;

    const LONGEST: Duration = Duration::from_secs(15);

    #[tokio::test(start_paused = true)]
    async fn unread_response_ends_at_its_deadline() {
        let started = Instant::now();
        let response = ResponseProgress::new(started);
        let stream = async {
            // Every piece is taken late, but in time.
            for _ in 0..3 {
                sleep(Duration::from_secs(20)).await; // the service waits for its turn
                response.piece_handed(Instant::now());
                sleep(Duration::from_secs(14)).await;
                response.piece_wanted();
            }
            response.piece_handed(Instant::now());
            pending::<()>().await;
        };
        let end = run_while_read(stream, &response, LONGEST).await;
        assert_eq!(end, StreamEnd::Unread);
        assert_eq!(started.elapsed(), Duration::from_secs(3 * 34 + 15));
    }

    #[tokio::test(start_paused = true)]
    async fn response_that_waits_for_service_never_ends() {
        let response = ResponseProgress::new(Instant::now());
        let done = Cell::new(false);
        let stream = async {
            sleep(LONGEST * 100).await;
            done.set(true);
        };
        assert_eq!(run_while_read(stream, &response, LONGEST).await, StreamEnd::Done);
        assert!(done.get());
    }
}
