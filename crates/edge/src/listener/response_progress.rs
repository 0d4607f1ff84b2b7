//! The progress of each response, and the end of a response that the peer does
//! not read.
//!
//! Over HTTP/2 a peer can stop reading one stream while others go on. hyper then
//! does not ask for the next piece of that stream, and waits without a bound. So
//! each stream's task has an alarm of its own.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// The progress of one response. A response that waits for its service is not
/// unread, however long it waits.
///
/// The peer has a patience of `longest`. Time in which a piece waits for the peer
/// uses the patience up, and each piece earns time for its bytes: a peer that takes
/// [`PIECE`] bytes in `longest` keeps it. A peer that takes each small piece late
/// runs out of it.
#[derive(Debug)]
pub(super) struct ResponseProgress {
    opened: Instant,
    longest: Duration,
    /// The time since when a piece waits for the peer, in nanoseconds after `opened`, or
    /// [`NOTHING_WAITS`]. A number and no lock, because each response writes it several
    /// times. One task writes all three numbers, and they stand for no other data, so
    /// relaxed order is enough.
    unread_since: AtomicU64,
    /// Bytes of the piece that the connection got last.
    piece: AtomicUsize,
    /// The patience that is used up, in nanoseconds.
    used: AtomicU64,
}

impl ResponseProgress {
    /// Creates the progress of a response on a connection that opened at `opened`. The
    /// peer may leave a piece unread for `longest`.
    pub(super) fn new(opened: Instant, longest: Duration) -> Self {
        Self {
            opened,
            longest,
            unread_since: AtomicU64::new(NOTHING_WAITS),
            piece: AtomicUsize::new(0),
            used: AtomicU64::new(0),
        }
    }

    /// Reports that the connection got a piece of this many `bytes` of the response.
    pub(super) fn piece_handed(&self, bytes: usize, now: Instant) {
        self.piece.store(bytes, Ordering::Relaxed);
        self.unread_since
            .store(nanos(now.saturating_duration_since(self.opened)), Ordering::Relaxed);
    }

    /// Reports that the connection asks for the next piece, or that the response
    /// has ended. Until then the peer has not taken the last piece.
    pub(super) fn piece_wanted(&self, now: Instant) {
        let since = self.unread_since.swap(NOTHING_WAITS, Ordering::Relaxed);
        // A response that waits for its service is asked for more than once.
        if since == NOTHING_WAITS {
            return;
        }
        let waited = nanos(now.saturating_duration_since(self.opened)).saturating_sub(since);
        let bytes = self.piece.load(Ordering::Relaxed) as u64;
        let earned = nanos(self.longest).saturating_mul(bytes) / PIECE as u64;
        let used = self.used.load(Ordering::Relaxed).saturating_add(waited);
        self.used.store(used.saturating_sub(earned), Ordering::Relaxed);
    }

    /// Returns the time at which the peer must have taken the piece that waits for it,
    /// if one waits.
    pub(super) fn due(&self) -> Option<Instant> {
        let since = match self.unread_since.load(Ordering::Relaxed) {
            NOTHING_WAITS => return None,
            since => self.opened + Duration::from_nanos(since),
        };
        let used = Duration::from_nanos(self.used.load(Ordering::Relaxed));
        Some(since + self.longest.saturating_sub(used))
    }
}

fn nanos(duration: Duration) -> u64 {
    // 64 bits of nanoseconds are 584 years.
    duration.as_nanos() as u64
}

/// Bytes of a piece of a response over HTTP/2. A peer must take as many within the
/// deadline, again and again. A smaller piece asks less of a slow peer, and costs more
/// frames.
pub(super) const PIECE: usize = 4 * 1024;

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
/// or until the peer's patience with a piece of the response is used up. The drop of
/// the task resets the stream, and h2 then drops what it has buffered for it.
pub(super) async fn run_while_read(stream: impl Future, response: &ResponseProgress) -> StreamEnd {
    let mut stream = pin!(stream);
    // Boxed and made late, because nearly every response is read in time.
    let mut alarm = None;
    poll_fn(|cx| {
        if stream.as_mut().poll(cx).is_ready() {
            return Poll::Ready(StreamEnd::Done);
        }
        // Read after the poll, in which the connection may have asked for the next piece.
        let Some(due) = response.due() else { return Poll::Pending };
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

    /// Hands over `pieces` of this many bytes, each of which the peer takes after
    /// `taken`, and then one that it never takes.
    async fn take_late(
        response: &ResponseProgress,
        (pieces, bytes): (u32, usize),
        taken: Duration,
    ) {
        for _ in 0..pieces {
            sleep(Duration::from_secs(20)).await; // the service waits for its turn
            response.piece_handed(bytes, Instant::now());
            sleep(taken).await;
            response.piece_wanted(Instant::now());
        }
        response.piece_handed(bytes, Instant::now());
        pending::<()>().await;
    }

    /// Runs a response whose pieces are taken like this, and returns the time until it
    /// ended unread.
    async fn ends_after(pieces: (u32, usize), taken: Duration) -> Duration {
        let started = Instant::now();
        let response = ResponseProgress::new(started, LONGEST);
        let stream = take_late(&response, pieces, taken);
        assert_eq!(run_while_read(stream, &response).await, StreamEnd::Unread);
        started.elapsed()
    }

    #[tokio::test(start_paused = true)]
    async fn unread_response_ends_at_its_deadline() {
        // Every piece is taken late, but in time.
        let ended = ends_after((3, PIECE), Duration::from_secs(14)).await;
        assert_eq!(ended, Duration::from_secs(3 * 34 + 15));
    }

    /// A peer with a small window takes every small piece in time, and all of them too
    /// slowly.
    #[tokio::test(start_paused = true)]
    async fn small_pieces_taken_late_use_the_patience_up() {
        // Each earns an eighth of 15 s and waits for 14 s, so the second one is not
        // taken any more.
        let ended = ends_after((100, PIECE / 8), Duration::from_secs(14)).await;
        let left = LONGEST - Duration::from_secs(14) + LONGEST / 8;
        assert_eq!(ended, Duration::from_secs(2 * 20 + 14) + left);
        // The control: small pieces that are taken at the lowest rate.
        let ended = ends_after((100, PIECE / 8), LONGEST / 8).await;
        assert_eq!(ended, 100 * (Duration::from_secs(20) + LONGEST / 8) + LONGEST);
    }

    #[tokio::test(start_paused = true)]
    async fn response_that_waits_for_service_never_ends() {
        let response = ResponseProgress::new(Instant::now(), LONGEST);
        let done = Cell::new(false);
        let stream = async {
            sleep(LONGEST * 100).await;
            done.set(true);
        };
        assert_eq!(run_while_read(stream, &response).await, StreamEnd::Done);
        assert!(done.get());
    }
}
