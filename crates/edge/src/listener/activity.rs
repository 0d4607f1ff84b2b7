//! The activity of one connection, and the deadlines that follow from it.
//!
//! hyper's own timers cannot tell an idle connection from a head that arrives
//! byte by byte, and they have no deadline for a reader that stops reading. So
//! the streams and the requests of a connection report to this module, which
//! alone decides when the connection is late. `response_progress.rs` decides when
//! one response over HTTP/2 is late.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;
use std::time::Duration;

use futures_util::task::AtomicWaker;
use tokio::time::Instant;

use super::ListenerOptions;
use super::bad_head::BadHead;
use super::response_progress::{PIECE, ResponseProgress};
use super::service::RequestRefusal;

/// The activity of one connection, shared by its streams, its requests and the
/// task that closes it.
#[derive(Debug)]
pub(super) struct Activity {
    opened: Instant,
    protocol: Protocol,
    /// Time in which the peer must take a piece of a response.
    write_progress: Duration,
    state: Mutex<ActivityState>,
    waker: AtomicWaker,
}

#[derive(Clone, Debug)]
struct ActivityState {
    /// Bytes of HTTP read so far.
    read: u64,
    /// Bytes written below TLS so far.
    written: u64,
    /// Requests that began so far.
    requests: u64,
    /// Requests without a complete response.
    in_flight: u32,
    /// Responses that the peer cancelled or did not read.
    cancelled: u32,
    /// The time of the last response's end, or of the connection's start.
    idle_since: Instant,
    /// The arrival of the first byte of the next head. HTTP/1 only.
    head_since: Option<Instant>,
    /// The time at which the socket stopped taking bytes.
    blocked_since: Option<Instant>,
    /// The response of the request that began last.
    latest: Option<Arc<ResponseProgress>>,
    /// True while a part of the next head is held back. HTTP/1 only.
    head_held: bool,
    /// The number of the request with a refused head. HTTP/1 only.
    refused: Option<(u64, BadHead)>,
    /// True once the peer sent too many idle frames. HTTP/2 only.
    flooded: bool,
    /// True once a response ends the connection before its request was read.
    lingers: bool,
    /// True once no new request may begin.
    closing: bool,
}

/// The HTTP version of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// The deadline for which the listener closes a connection; a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MissedDeadline {
    /// The first byte did not arrive, or a head did not end.
    Head,
    /// There was no request for too long.
    Idle,
    /// The peer does not read its responses.
    Write,
    /// The connection is old; running requests may end.
    Age,
}

/// The abuse for which the listener closes a connection; a metric's label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Abuse {
    /// The peer cancelled too many responses.
    Cancels,
    /// The peer sent too many idle frames.
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

impl MissedDeadline {
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
    /// Creates the activity of a connection that opens `now`. The peer must take a
    /// piece of a response within `write_progress`.
    pub(super) fn new(protocol: Protocol, now: Instant, write_progress: Duration) -> Self {
        Self {
            opened: now,
            protocol,
            write_progress,
            state: Mutex::new(ActivityState {
                read: 0,
                written: 0,
                requests: 0,
                in_flight: 0,
                cancelled: 0,
                idle_since: now,
                head_since: None,
                blocked_since: None,
                latest: None,
                head_held: false,
                refused: None,
                flooded: false,
                lingers: false,
                closing: false,
            }),
            waker: AtomicWaker::new(),
        }
    }

    /// Sets the task to wake when a request ends, because a request may end in
    /// another task.
    pub(super) fn watch(&self, waker: &Waker) {
        self.waker.register(waker);
    }

    /// Reports bytes that arrived above TLS.
    pub(super) fn read(&self, bytes: usize, now: Instant) {
        let mut state = self.state();
        state.read += bytes as u64;
        // While a request runs, bytes belong to its body and not to a head.
        if state.in_flight == 0 && bytes > 0 {
            // Kept from the first byte on, so that a head that arrives byte by byte wins no time.
            state.head_since.get_or_insert(now);
        }
    }

    /// Reports that the socket takes no more bytes.
    pub(super) fn write_blocked(&self, now: Instant) {
        // Kept from the first failure on: another attempt to write is no progress of the peer.
        self.state().blocked_since.get_or_insert(now);
    }

    /// Reports bytes that the socket took.
    pub(super) fn wrote(&self, bytes: usize) {
        let mut state = self.state();
        state.written += bytes as u64;
        state.blocked_since = None;
    }

    /// Returns the bytes written so far.
    pub(super) fn written(&self) -> u64 {
        self.state().written
    }

    /// Notes that the request after `before` others is answered with the error of
    /// its head.
    pub(super) fn refuse_request(&self, before: u64, bad: BadHead) {
        self.state().refused = Some((before, bad));
    }

    /// Reports a new request. Returns the progress of its response, and the reason to
    /// refuse the request, if any.
    pub(super) fn request_began(&self) -> (Arc<ResponseProgress>, Option<RequestRefusal>) {
        let response = Arc::new(ResponseProgress::new(self.opened, self.write_progress));
        let mut state = self.state();
        state.latest = Some(Arc::clone(&response));
        // hyper answers pipelined requests in order, and those before the refused one are served.
        let bad = state.refused.filter(|(before, _)| *before == state.requests);
        let closing = state.closing.then_some(RequestRefusal::Closing);
        state.requests += 1;
        state.in_flight += 1;
        // The head is complete; the next one has its own deadline.
        state.head_since = None;
        (response, bad.map(|(_, bad)| RequestRefusal::BadHead(bad)).or(closing))
    }

    /// Returns true if the connection may be asked to end: over HTTP/1 while a request
    /// runs, because an idle connection would close at once, while a request may be on
    /// its way. Over HTTP/2 a GOAWAY says which requests are served, but it can follow
    /// a first request only.
    pub(super) fn may_wind_down(&self) -> bool {
        let state = self.state();
        match self.protocol {
            Protocol::Http1 => state.in_flight > 0,
            Protocol::Http2 => state.requests > 0,
        }
    }

    /// Makes every request that begins from now on refused.
    pub(super) fn close(&self) {
        self.state().closing = true;
    }

    /// Reports that the peer sent too many idle frames.
    pub(super) fn flood(&self) {
        self.state().flooded = true;
        self.waker.wake();
    }

    /// Makes the socket linger. The last response was given before its request
    /// was read, so a reset would make the peer lose the response.
    pub(super) fn linger(&self) {
        self.state().lingers = true;
    }

    /// Returns true if the socket must read and drop what the peer still sends.
    pub(super) fn lingers(&self) -> bool {
        self.state().lingers
    }

    /// Reports the end of a request, complete or cancelled.
    pub(super) fn request_ended(&self, complete: bool, now: Instant) {
        let mut state = self.state();
        state.in_flight -= 1;
        state.cancelled = state.cancelled.saturating_add(u32::from(!complete));
        state.idle_since = now;
        // A pipelined head gets its time only now, because it could not pass
        // before the response ended.
        if state.head_held && state.in_flight == 0 {
            state.head_since.get_or_insert(now);
        }
        // Released first: the woken task takes the same lock.
        drop(state);
        self.waker.wake();
    }

    /// Sets whether a part of a head is held back until its rest arrives.
    pub(super) fn head_held(&self, held: bool) {
        self.state().head_held = held;
    }

    /// Takes the response of the request that began last. HTTP/2 only: there a
    /// response has a task of its own, which watches the response's progress.
    pub(super) fn take_response(&self) -> Option<Arc<ResponseProgress>> {
        self.state().latest.take()
    }

    /// Returns the bytes of the largest piece of a response that the connection
    /// gets at once.
    pub(super) fn largest_piece(&self) -> usize {
        match self.protocol {
            // The socket shows the progress of its bytes.
            Protocol::Http1 => usize::MAX,
            // Windows are not visible here, only whole pieces that were taken.
            Protocol::Http2 => PIECE,
        }
    }

    /// Returns the time since when no request runs and no byte waits to be
    /// written; `None` while there is such a request or byte.
    pub(super) fn quiet_since(&self) -> Option<Instant> {
        let state = self.state();
        (state.in_flight == 0 && state.blocked_since.is_none()).then_some(state.idle_since)
    }

    /// Returns true if a request is in flight, and the time of the last use: the end
    /// of the last response, or the start of the connection.
    pub(super) fn last_use(&self) -> (bool, Instant) {
        let state = self.state();
        (state.in_flight > 0, state.idle_since)
    }

    /// Returns true if other responses may be ready at the same moment: over
    /// HTTP/2, with requests in flight.
    pub(super) fn more_may_come(&self) -> bool {
        self.protocol == Protocol::Http2 && self.state().in_flight > 0
    }

    /// Returns the abuse for which the connection must be closed, if any.
    pub(super) fn abuse(&self, options: &ListenerOptions) -> Option<Abuse> {
        let state = self.state();
        if state.flooded {
            Some(Abuse::Frames)
        } else {
            (state.cancelled > options.cancels).then_some(Abuse::Cancels)
        }
    }

    /// Returns the earliest deadline and its kind.
    pub(super) fn deadline(&self, options: &ListenerOptions) -> (Instant, MissedDeadline) {
        let state = self.state();
        let mut due = (self.opened + options.connection_age, MissedDeadline::Age);
        let mut sooner = |at: Instant, missed: MissedDeadline| {
            if at < due.0 {
                due = (at, missed);
            }
        };
        if let Some(since) = state.blocked_since {
            sooner(since + options.write_progress, MissedDeadline::Write);
        }
        if state.in_flight > 0 {
            // Over HTTP/1 there is one response at a time. Over HTTP/2 the task of
            // each response has this deadline, and ends the response alone.
            if self.protocol == Protocol::Http1
                && let Some(due) = state.latest.as_ref().and_then(|it| it.due())
            {
                sooner(due, MissedDeadline::Write);
            }
            return due;
        }
        match (self.protocol, state.head_since) {
            (Protocol::Http1, Some(since)) => sooner(since + options.head, MissedDeadline::Head),
            (Protocol::Http1, None) if state.requests == 0 => {
                sooner(self.opened + options.first_byte, MissedDeadline::Head);
            }
            // Later heads need no deadline: a head that stalls within its frames
            // also stalls the answer to PING.
            (Protocol::Http2, _) if state.read < HTTP2_OPENING => {
                sooner(self.opened + options.head, MissedDeadline::Head);
            }
            _ => sooner(state.idle_since + options.idle, MissedDeadline::Idle),
        }
        due
    }

    fn state(&self) -> MutexGuard<'_, ActivityState> {
        // No code that holds the lock can panic between two updates.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of the preface and an empty SETTINGS frame, with which every HTTP/2
/// connection begins.
const HTTP2_OPENING: u64 = 24 + 9;

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test may read the system's clock")]
mod tests {
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
    fn http1_phases_have_their_deadlines() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let activity = Activity::new(Protocol::Http1, start, options().write_progress);
        let check = |seconds, late| {
            assert_eq!(activity.deadline(&options()), (at(seconds), late));
        };
        check(4, MissedDeadline::Head); // no byte yet
        activity.read(1, at(2));
        check(7, MissedDeadline::Head); // the head began at 2
        activity.read(1, at(6));
        check(7, MissedDeadline::Head); // and a further byte does not prolong it
        let (response, refusal) = activity.request_began();
        assert_eq!(refusal, None);
        check(3_600, MissedDeadline::Age); // the handler's own deadlines rule
        response.piece_handed(PIECE, at(0));
        check(15, MissedDeadline::Write);
        response.piece_wanted(at(9));
        response.piece_handed(PIECE, at(10));
        check(25, MissedDeadline::Write);
        activity.write_blocked(at(9));
        check(24, MissedDeadline::Write); // the socket is full since 9
        activity.wrote(1);
        response.piece_wanted(at(20));
        activity.request_ended(true, at(20));
        check(80, MissedDeadline::Idle);
        // The next head began while the last response was on its way.
        assert_eq!(activity.request_began().1, None);
        activity.head_held(true);
        activity.request_ended(true, at(30));
        check(35, MissedDeadline::Head);
        assert_eq!(activity.abuse(&ListenerOptions { cancels: 0, ..options() }), None);
    }

    #[test]
    fn http2_phases_have_their_deadlines() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let activity = Activity::new(Protocol::Http2, start, options().write_progress);
        let check = |seconds, late| {
            assert_eq!(activity.deadline(&options()), (at(seconds), late));
        };
        activity.read(10, at(1));
        check(5, MissedDeadline::Head);
        activity.read(23, at(2));
        check(60, MissedDeadline::Idle);
        assert!(!activity.more_may_come());
        // A stream that waits for window has its own deadline.
        let (response, _) = activity.request_began();
        assert!(activity.more_may_come());
        response.piece_handed(PIECE, at(3));
        check(3_600, MissedDeadline::Age);
        activity.request_began();
        activity.request_ended(false, at(30));
        check(3_600, MissedDeadline::Age);
        let cancelled = |cancels| activity.abuse(&ListenerOptions { cancels, ..options() });
        assert_eq!((cancelled(0), cancelled(1)), (Some(Abuse::Cancels), None));
        activity.flood();
        assert_eq!(cancelled(1), Some(Abuse::Frames));
    }
}
