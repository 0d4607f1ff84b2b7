//! Frames of HTTP/2, counted before h2 reads them. A peer may ask much; what
//! it may not is keep us busy with frames that ask for nothing. h2 bounds the
//! memory of such floods and some of their kinds, not their work.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::Instant;

use super::activity::Activity;
use super::pass::writes_pass_on;

/// Bytes of HTTP/2, whose frames are counted as they pass.
pub(super) struct Frames<I> {
    io: I,
    activity: Arc<Activity>,
    count: Count,
    /// There were too many: nothing more is read.
    flooded: bool,
}

/// Where in its frames a connection is, and how many were idle.
#[derive(Debug)]
struct Count {
    /// Bytes that are not looked at: of the preface, then of payloads.
    skip: usize,
    /// The header that is being read.
    header: [u8; HEADER],
    have: usize,
    budget: Budget,
    /// Grants of window, of which every response needs some.
    grants: u64,
    /// The first frame has come. h2 does not mind which it is.
    opened: bool,
}

/// What is wrong with the frames so far.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Bad {
    /// The first is not SETTINGS (RFC 9113, 3.4).
    Opening,
    /// Too many ask for nothing.
    Flood,
}

/// A bucket of idle frames, as the time until which it is filled (GCRA).
#[derive(Debug)]
struct Budget {
    each: Duration,
    filled: Instant,
}

/// What a frame is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// A request, or a part of one.
    Useful,
    /// Room for a response.
    Grant,
    /// Neither.
    Idle,
}

impl<I> Frames<I> {
    /// `per_second` idle frames are taken, and ten times as many at once.
    pub(super) fn new(io: I, activity: Arc<Activity>, per_second: u32, now: Instant) -> Self {
        Self { io, activity, count: Count::new(per_second, now), flooded: false }
    }
}

impl Count {
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
    ) -> Result<(), Bad> {
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
                if !self.opened && kind != SETTINGS {
                    return Err(Bad::Opening);
                }
                self.opened = true;
                // Frames too large are h2's to refuse.
                self.skip = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
                within &= match classify(kind, flags, self.skip) {
                    Kind::Useful => true,
                    Kind::Idle => self.budget.take(now()),
                    Kind::Grant => {
                        self.grants += 1;
                        let earned = FREE_GRANTS + written() / BYTES_A_GRANT;
                        self.grants <= earned || self.budget.take(now())
                    }
                };
            }
        }
        if within { Ok(()) } else { Err(Bad::Flood) }
    }
}

impl Budget {
    fn take(&mut self, now: Instant) -> bool {
        self.filled = self.filled.max(now) + self.each;
        self.filled <= now + BURST
    }
}

/// By type, flags and length of the payload (RFC 9113, 6).
fn classify(kind: u8, flags: u8, length: usize) -> Kind {
    const DATA: u8 = 0;
    const HEADERS: u8 = 1;
    const WINDOW_UPDATE: u8 = 8;
    const END_STREAM: u8 = 1;
    match kind {
        DATA if length == 0 && flags & END_STREAM == 0 => Kind::Idle,
        DATA | HEADERS => Kind::Useful,
        WINDOW_UPDATE => Kind::Grant,
        // SETTINGS, PING, PRIORITY, RST_STREAM, CONTINUATION, unknown ones.
        _ => Kind::Idle,
    }
}

impl<I: AsyncRead + Unpin> AsyncRead for Frames<I> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if this.flooded {
            return Poll::Pending; // the listener closes it
        }
        let before = buffer.filled().len();
        ready!(Pin::new(&mut this.io).poll_read(cx, buffer))?;
        let fresh = &buffer.filled()[before..];
        match this.count.take(fresh, || this.activity.written(), Instant::now) {
            Ok(()) => {}
            Err(Bad::Opening) => return Poll::Ready(Err(io::ErrorKind::InvalidData.into())),
            Err(Bad::Flood) => {
                this.flooded = true;
                this.activity.flood();
            }
        }
        Poll::Ready(Ok(()))
    }
}

writes_pass_on!(Frames);

/// `PRI * HTTP/2.0 ...`
const PREFACE: usize = 24;

/// The type of the first frame.
const SETTINGS: u8 = 4;

/// Bytes of a frame's header.
const HEADER: usize = 9;

/// So much time's worth of idle frames may come at once.
const BURST: Duration = Duration::from_secs(10);

/// Grants of window that a peer may make before it was sent anything ...
const FREE_GRANTS: u64 = 1_000;

/// ... and one for so many bytes. Clients grant every few KiB at most.
const BYTES_A_GRANT: u64 = 512;

#[cfg(test)]
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

    /// How many of `frame` pass before the count says no.
    fn passing(frame: &[u8], written: u64) -> usize {
        let now = Instant::now();
        let mut count = Count::new(10, now);
        assert_eq!(count.take(&opening(), || 0, || now), Ok(()));
        (0..5_000).take_while(|_| count.take(frame, || written, || now).is_ok()).count()
    }

    /// T07
    #[test]
    fn what_asks_for_nothing_is_bounded() {
        // The opening's SETTINGS is one of the hundred.
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
    fn the_budget_refills() {
        let start = Instant::now();
        let mut count = Count::new(10, start);
        let ping = frame(6, 0, 8);
        let bytes = [opening(), ping.repeat(99)].concat();
        assert_eq!(count.take(&bytes, || 0, || start), Ok(()));
        let later = start + Duration::from_secs(1);
        assert_eq!(count.take(&ping.repeat(10), || 0, || later), Ok(()));
        assert_eq!(count.take(&ping, || 0, || later), Err(Bad::Flood));
    }

    #[test]
    fn frames_are_found_however_the_bytes_are_cut() {
        let now = Instant::now();
        let mut bytes = opening();
        for _ in 0..60 {
            bytes.extend(frame(0, 0, 300)); // useful, and full of what looks like headers
            bytes.extend(frame(4, 0, 12));
        }
        for size in [1, 2, 7, 9, 10, 64, 309, 4_096] {
            let mut count = Count::new(10, now);
            let mut take = |bytes: &[u8]| {
                bytes.chunks(size).try_for_each(|piece| count.take(piece, || 0, || now))
            };
            assert_eq!(take(&bytes), Ok(()), "{size}: 61 of 100");
            assert_eq!(take(&frame(4, 0, 12).repeat(40)), Err(Bad::Flood), "{size}");
        }
    }

    #[test]
    fn settings_come_first() {
        let now = Instant::now();
        for kind in (0..12).filter(|kind| *kind != SETTINGS) {
            let mut count = Count::new(10, now);
            let bytes = [vec![0; PREFACE], frame(kind, 0, 8)].concat();
            assert_eq!(count.take(&bytes, || 0, || now), Err(Bad::Opening), "{kind}");
        }
    }
}
