//! A budget for idle HTTP/2 frames, counted before h2 reads them. A peer may ask
//! for much, but must not keep the gateway busy with frames that ask for
//! nothing. h2 bounds the memory of such floods and some of their kinds, but not
//! their work.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

use super::activity::Activity;
use super::forward_write::forward_write;

/// A stream of HTTP/2 that counts the frames which pass.
pub(super) struct Frames<I> {
    io: I,
    activity: Arc<Activity>,
    count: FrameCounter,
    /// True once there were too many; then nothing more is read.
    flooded: bool,
}

/// The position of a connection within its frames, and the count of idle ones.
#[derive(Debug)]
struct FrameCounter {
    /// Bytes to skip: of the preface, then of payloads.
    skip: usize,
    /// The header of the current frame, as far as it was read.
    header: [u8; HEADER],
    have: usize,
    budget: Budget,
    /// Grants of window; every response needs some.
    grants: u64,
    /// True once the first frame arrived. h2 does not check its type.
    opened: bool,
}

/// An error in the sequence of frames.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameError {
    /// The first frame is not SETTINGS (RFC 9113, 3.4).
    Opening,
    /// Too many frames are idle.
    Flood,
}

/// A token bucket of idle frames, kept as the time until which it is full
/// (GCRA).
#[derive(Debug)]
struct Budget {
    each: Duration,
    filled: Instant,
}

/// The purpose of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FrameKind {
    /// A request, or a part of one.
    Useful,
    /// A grant of window for responses.
    Grant,
    /// Any frame of another purpose.
    Idle,
}

impl<I> Frames<I> {
    /// Allows `per_second` idle frames a second, and ten times as many at once.
    pub(super) fn new(io: I, activity: Arc<Activity>, per_second: u32, now: Instant) -> Self {
        Self { io, activity, count: FrameCounter::new(per_second, now), flooded: false }
    }
}

impl FrameCounter {
    fn new(per_second: u32, now: Instant) -> Self {
        let budget = Budget { each: Duration::from_secs(1) / per_second.max(1), filled: now };
        Self { skip: PREFACE, header: [0; HEADER], have: 0, budget, grants: 0, opened: false }
    }

    /// Takes in what was read. `written` says how many bytes have gone the
    /// other way.
    fn take(
        &mut self,
        mut bytes: &[u8],
        written: impl Fn() -> u64,
        now: impl Fn() -> Instant,
    ) -> Result<(), FrameError> {
        let mut within = true;
        while !bytes.is_empty() {
            if self.skip > 0 {
                let skipped = self.skip.min(bytes.len());
                self.skip -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            let take = (HEADER - self.have).min(bytes.len());
            self.header[self.have..self.have + take].copy_from_slice(&bytes[..take]);
            self.have += take;
            bytes = &bytes[take..];
            if self.have == HEADER {
                self.have = 0;
                let [a, b, c, kind, flags, ..] = self.header;
                // h2 accepts other first frames, so the check is here.
                if !self.opened && kind != SETTINGS {
                    return Err(FrameError::Opening);
                }
                self.opened = true;
                // h2 refuses frames that are too large.
                self.skip = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                within &= match classify(kind, flags, self.skip) {
                    FrameKind::Useful => true,
                    FrameKind::Idle => self.budget.take(now()),
                    FrameKind::Grant => {
                        self.grants += 1;
                        // A peer grants window for bytes that it gets, so those earn grants.
                        let earned = FREE_GRANTS + written() / BYTES_A_GRANT;
                        self.grants <= earned || self.budget.take(now())
                    }
                };
            }
        }
        if within { Ok(()) } else { Err(FrameError::Flood) }
    }
}

impl Budget {
    fn take(&mut self, now: Instant) -> bool {
        // An empty bucket fills from now on; the past earns no extra credit.
        self.filled = self.filled.max(now) + self.each;
        self.filled <= now + BURST
    }
}

/// Classifies a frame by its type, its flags and its length (RFC 9113, 6).
fn classify(kind: u8, flags: u8, length: usize) -> FrameKind {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const WINDOW_UPDATE: u8 = 8;
    const END_STREAM: u8 = 1;
    match kind {
        // Such frames cost work and carry nothing (CVE-2019-9518).
        DATA if length == 0 && flags & END_STREAM == 0 => FrameKind::Idle,
        DATA | HEADERS => FrameKind::Useful,
        WINDOW_UPDATE => FrameKind::Grant,
        // SETTINGS, PING, PRIORITY, RST_STREAM, CONTINUATION, unknown types.
        _ => FrameKind::Idle,
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Frames<I> {
    #[expect(clippy::disallowed_methods, reason = "the count gets the time at which bytes came")]
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.flooded {
            return Poll::Pending; // the listener closes the connection
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buffer))?;
        let fresh = &buffer.filled()[before..];
        match this.count.take(fresh, || this.activity.written(), Instant::now) {
            Ok(()) => {}
            Err(FrameError::Opening) => return Poll::Ready(Err(io::ErrorKind::InvalidData.into())),
            Err(FrameError::Flood) => {
                this.flooded = true;
                this.activity.flood();
            }
        }
        Poll::Ready(Ok(()))
    }
}

forward_write!(Frames);

/// `PRI * HTTP/2.0 ...`
const PREFACE: usize = 24;

/// The type that the first frame must have.
const SETTINGS: u8 = 4;

/// Bytes of the header of a frame.
const HEADER: usize = 9;

/// Time that is worth the idle frames which may arrive at once.
const BURST: Duration = Duration::from_secs(10);

/// Grants of window that a peer may send before it was sent any byte.
const FREE_GRANTS: u64 = 1_000;

/// Bytes for which the peer may send one further grant. Clients grant at most
/// every few KiB.
const BYTES_A_GRANT: u64 = 512;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        let mut bytes = vec![length[1], length[2], length[3], kind, flags, 0, 0, 0, 1];
        bytes.resize(HEADER + payload, 0xff);
        bytes
    }

    /// The preface and a first SETTINGS.
    fn opening() -> Vec<u8> {
        [vec![0; PREFACE], frame(4, 0, 0)].concat()
    }

    /// Returns how many times `frame` passes before the budget is spent.
    fn passing(frame: &[u8], written: u64) -> usize {
        let now = Instant::now();
        let mut count = FrameCounter::new(10, now);
        assert_eq!(count.take(&opening(), || 0, || now), Ok(()));
        (0..5_000).take_while(|_| count.take(frame, || written, || now).is_ok()).count()
    }

    /// T07
    #[test]
    fn frames_that_ask_for_nothing_are_bounded() {
        // The first SETTINGS is one of the hundred.
        for (name, frame, expected) in [
            ("SETTINGS", frame(4, 0, 6), 99),
            ("PING", frame(6, 0, 8), 99),
            ("PING, answered", frame(6, 1, 8), 99),
            ("PRIORITY", frame(2, 0, 5), 99),
            ("RST_STREAM", frame(3, 0, 4), 99),
            ("CONTINUATION", frame(9, 0, 1), 99),
            ("empty DATA", frame(0, 0, 0), 99),
            ("unknown", frame(0xee, 0, 100), 99),
            ("WINDOW_UPDATE", frame(8, 0, 4), 1_099),
            ("the last DATA", frame(0, 1, 0), 5_000),
            ("DATA", frame(0, 0, 1), 5_000),
            ("HEADERS", frame(1, 4, 20), 5_000),
        ] {
            assert_eq!(passing(&frame, 0), expected, "{name}");
        }
        assert_eq!(passing(&frame(8, 0, 4), 512 * 2_000), 3_099);
    }

    #[test]
    fn frames_budget_refills() {
        let start = Instant::now();
        let mut count = FrameCounter::new(10, start);
        let ping = frame(6, 0, 8);
        let bytes = [opening(), ping.repeat(99)].concat();
        assert_eq!(count.take(&bytes, || 0, || start), Ok(()));
        let later = start + Duration::from_secs(1);
        assert_eq!(count.take(&ping.repeat(10), || 0, || later), Ok(()));
        assert_eq!(count.take(&ping, || 0, || later), Err(FrameError::Flood));
    }

    #[test]
    fn frames_are_found_at_any_split() {
        let now = Instant::now();
        let mut bytes = opening();
        for _ in 0..60 {
            bytes.extend(frame(0, 0, 300)); // useful, and full of what looks like headers
            bytes.extend(frame(4, 0, 12));
        }
        for size in [1, 2, 7, 9, 10, 64, 309, 4_096] {
            let mut count = FrameCounter::new(10, now);
            let mut take = |bytes: &[u8]| {
                bytes.chunks(size).try_for_each(|piece| count.take(piece, || 0, || now))
            };
            assert_eq!(take(&bytes), Ok(()), "{size}: 61 of 100");
            assert_eq!(take(&frame(4, 0, 12).repeat(40)), Err(FrameError::Flood), "{size}");
        }
    }

    #[test]
    fn frames_must_begin_with_settings() {
        let now = Instant::now();
        for kind in (0..12).filter(|kind| *kind != SETTINGS) {
            let mut count = FrameCounter::new(10, now);
            let bytes = [vec![0; PREFACE], frame(kind, 0, 8)].concat();
            assert_eq!(count.take(&bytes, || 0, || now), Err(FrameError::Opening), "{kind}");
        }
    }
}
