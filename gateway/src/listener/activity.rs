//! What one connection is doing, and by when it must have done it.
//!
//! hyper's own timers cannot tell an idle connection from a head that comes
//! byte by byte, and have no deadline for a reader that stops reading. So the
//! bytes and the requests of a connection report here, and here alone is
//! decided when it is late.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use super::ListenerOptions;
use super::bad_head::BadHead;
use super::service::RequestRefusal;

/// The state of one connection. Shared by its bytes, its requests and the
/// task that closes it.
#[derive(Debug)]
pub(super) struct Activity {
    state: Mutex<State>,
    waker: AtomicWaker,
}

#[derive(Clone, Debug)]
struct State {
    opened: Instant,
    protocol: Protocol,
    /// Bytes of HTTP read so far.
    read: u64,
    /// Bytes written below TLS so far.
    written: u64,
    /// Requests begun.
    requests: u64,
    /// Requests whose response has not ended.
    in_flight: u32,
    /// Responses that ended before their end.
    cancelled: u32,
    /// When the last response ended, or the connection was opened.
    idle_since: Instant,
    /// When the first byte of the next head arrived. HTTP/1 only.
    head_since: Option<Instant>,
    /// Since when the socket takes no more bytes.
    blocked_since: Option<Instant>,
    /// Responses with a piece handed over and the next one not yet wanted.
    unread: u32,
    /// When a response's next piece was last wanted.
    wanted_at: Instant,
    /// The next head has begun to arrive and is not whole. HTTP/1 only.
    head_held: bool,
    /// The request whose head was refused, by its number. HTTP/1 only.
    refused: Option<(u64, BadHead)>,
    /// The peer sends frames that ask for nothing. HTTP/2 only.
    flooded: bool,
    /// A response ended the connection before its request was read.
    lingers: bool,
    /// Nothing new may begin.
    closing: bool,
}

/// Which HTTP a connection speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Why a connection is closed by us. Also a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// No first byte, or a head that does not end.
    Head,
    /// Nothing to do for too long.
    Idle,
    /// The peer does not read.
    Write,
    /// The connection is old: it may finish what runs.
    Age,
}

/// What a peer did too much of. Also a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abuse {
    /// Responses cut short.
    Cancels,
    /// Frames that ask for nothing.
    Frames,
}

impl Abuse {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Cancels => "cancels",
            Self::Frames => "frames",
        }
    }
}

impl Late {
    pub(super) fn as_str(self) -> &'static str {
        match self {
            Self::Head => "head_timeout",
            Self::Idle => "idle",
            Self::Write => "write_timeout",
            Self::Age => "age",
        }
    }
}

impl Activity {
    pub(super) fn new(protocol: Protocol, now: Instant) -> Self {
        Self {
            state: Mutex::new(State {
                opened: now,
                protocol,
                read: 0,
                written: 0,
                requests: 0,
                in_flight: 0,
                cancelled: 0,
                idle_since: now,
                head_since: None,
                blocked_since: None,
                unread: 0,
                wanted_at: now,
                head_held: false,
                refused: None,
                flooded: false,
                lingers: false,
                closing: false,
            }),
            waker: AtomicWaker::new(),
        }
    }

    /// The task to wake when a request ends, since that may happen in another.
    pub(super) fn watch(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    pub(super) fn read(&self, bytes: usize, now: Instant) {
        let mut state = self.state();
        state.read += bytes as u64;
        if state.in_flight == 0 && bytes > 0 {
            state.head_since.get_or_insert(now);
        }
    }

    pub(super) fn write_blocked(&self, now: Instant) {
        self.state().blocked_since.get_or_insert(now);
    }

    pub(super) fn wrote(&self, bytes: usize) {
        let mut state = self.state();
        state.written += bytes as u64;
        state.blocked_since = None;
    }

    /// Bytes written so far.
    pub(super) fn written(&self) -> u64 {
        self.state().written
    }

    /// The request that comes after `before` others is to be answered with
    /// what is wrong with its head.
    pub(super) fn refuse_request(&self, before: u64, bad: BadHead) {
        self.state().refused = Some((before, bad));
    }

    /// A request begins; what stands against it, if anything.
    pub(super) fn request_began(&self) -> Option<RequestRefusal> {
        let mut state = self.state();
        let bad = state.refused.filter(|(before, _)| *before == state.requests);
        let closing = state.closing.then_some(RequestRefusal::Closing);
        state.requests += 1;
        state.in_flight += 1;
        state.head_since = None;
        bad.map(|(_, bad)| RequestRefusal::BadHead(bad)).or(closing)
    }

    /// No request that begins from now on is taken.
    pub(super) fn close(&self) {
        self.state().closing = true;
    }

    /// The peer sends what asks for nothing, too much of it.
    pub(super) fn flood(&self) {
        self.state().flooded = true;
        self.waker.wake();
    }

    /// The last response was given before its request was read: the peer may
    /// still be sending and must not be reset, or it loses the response.
    pub(super) fn linger(&self) {
        self.state().lingers = true;
    }

    /// Whether what the peer still sends is to be read and dropped.
    pub(super) fn lingers(&self) -> bool {
        self.state().lingers
    }

    pub(super) fn request_ended(&self, whole: bool, now: Instant) {
        let mut state = self.state();
        state.in_flight -= 1;
        state.cancelled = state.cancelled.saturating_add(u32::from(!whole));
        state.idle_since = now;
        if state.head_held && state.in_flight == 0 {
            state.head_since.get_or_insert(now);
        }
        drop(state);
        self.waker.wake();
    }

    /// Whether a part of a head is held back until the rest comes.
    pub(super) fn head_held(&self, held: bool) {
        self.state().head_held = held;
    }

    /// A response's piece was handed over; nobody has asked for the next.
    pub(super) fn piece_handed(&self) {
        self.state().unread += 1;
        self.waker.wake();
    }

    /// The next piece is wanted, or the response has ended.
    pub(super) fn piece_wanted(&self, now: Instant) {
        let mut state = self.state();
        state.unread -= 1;
        state.wanted_at = now;
    }

    /// Since when no request is under way and nothing waits to be taken up, if
    /// that is so.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.in_flight == 0 && state.blocked_since.is_none()).then_some(state.idle_since)
    }

    /// Whether other responses may be ready at this moment: over HTTP/2, with
    /// requests under way.
    pub(super) fn more_may_come(&self) -> bool {
        let state = self.state();
        state.protocol == Protocol::Http2 && state.in_flight > 0
    }

    /// Why the peer has lost its welcome, if it has.
    pub(super) fn abuse(&self, options: &ListenerOptions) -> Option<Abuse> {
        let state = self.state();
        if state.flooded {
            Some(Abuse::Frames)
        } else {
            (state.cancelled > options.cancels).then_some(Abuse::Cancels)
        }
    }

    /// The earliest deadline, and what it means to miss it.
    pub(super) fn deadline(&self, options: &ListenerOptions) -> (Instant, Late) {
        let state = self.state();
        let mut due = (state.opened + options.connection_age, Late::Age);
        let mut sooner = |at: Instant, late: Late| {
            if at < due.0 {
                due = (at, late);
            }
        };
        if let Some(since) = state.blocked_since {
            sooner(since + options.write_progress, Late::Write);
        }
        if state.in_flight > 0 {
            // With HTTP/2 a peer that grants no window blocks no socket. Late
            // only when every response waits for it: the others prove it alive.
            if state.unread == state.in_flight {
                sooner(state.wanted_at + options.write_progress, Late::Write);
            }
            return due;
        }
        match (state.protocol, state.head_since) {
            (Protocol::Http1, Some(since)) => sooner(since + options.head, Late::Head),
            (Protocol::Http1, None) if state.requests == 0 => {
                sooner(state.opened + options.first_byte, Late::Head);
            }
            // A head that stalls within frames also stalls the answer to PING.
            (Protocol::Http2, _) if state.read < HTTP2_OPENING => {
                sooner(state.opened + options.head, Late::Head);
            }
            _ => sooner(state.idle_since + options.idle, Late::Idle),
        }
        due
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No code that holds it can panic half-way.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The preface and an empty SETTINGS frame: less is no HTTP/2.
const HTTP2_OPENING: u64 = 24 + 9;

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn options() -> ListenerOptions {
        ListenerOptions {
            first_byte: Duration::from_secs(4),
            head: Duration::from_secs(5),
            idle: Duration::from_secs(60),
            connection_age: Duration::from_secs(3_600),
            write_progress: Duration::from_secs(15),
            ..ListenerOptions::default()
        }
    }

    #[test]
    fn each_phase_has_its_deadline() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let activity = Activity::new(Protocol::Http1, start);
        let check = |seconds, late| {
            assert_eq!(activity.deadline(&options()), (at(seconds), late));
        };
        check(4, Late::Head); // no byte yet
        activity.read(1, at(2));
        check(7, Late::Head); // the head began at 2
        activity.read(1, at(6));
        check(7, Late::Head); // and a further byte does not prolong it
        assert_eq!(activity.request_began(), None);
        check(3_600, Late::Age); // the handler's own deadlines rule
        activity.piece_handed();
        check(15, Late::Write);
        activity.piece_wanted(at(10));
        activity.piece_handed();
        check(25, Late::Write);
        activity.write_blocked(at(9));
        check(24, Late::Write); // the socket is full since 9
        activity.wrote(1);
        activity.piece_wanted(at(20));
        activity.request_ended(true, at(20));
        check(80, Late::Idle);
        // The next head began while the last response was on its way.
        assert_eq!(activity.request_began(), None);
        activity.head_held(true);
        activity.request_ended(true, at(30));
        check(35, Late::Head);
        assert_eq!(activity.abuse(&ListenerOptions { cancels: 0, ..options() }), None);
    }

    #[test]
    fn http2_opens_soon_and_idles_long() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let activity = Activity::new(Protocol::Http2, start);
        let check = |seconds, late| {
            assert_eq!(activity.deadline(&options()), (at(seconds), late));
        };
        activity.read(10, at(1));
        check(5, Late::Head);
        activity.read(23, at(2));
        check(60, Late::Idle);
        assert!(!activity.more_may_come());
        // One stream waits for window, another for its handler.
        activity.request_began();
        activity.request_began();
        assert!(activity.more_may_come());
        activity.piece_handed();
        check(3_600, Late::Age);
        activity.request_ended(false, at(30));
        check(15, Late::Write);
        let cancelled = |cancels| activity.abuse(&ListenerOptions { cancels, ..options() });
        assert_eq!((cancelled(0), cancelled(1)), (Some(Abuse::Cancels), None));
        activity.flood();
        assert_eq!(cancelled(1), Some(Abuse::Frames));
    }
}
