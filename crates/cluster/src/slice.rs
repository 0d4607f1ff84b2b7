//! A gateway's side of its slice.

use crate::{Ask, BootMillis, SliceRow, Timeline};

/// Milliseconds for which a slice may be used after the gateway sent a call that was answered.
/// Shorter than [`SILENCE`](crate::SILENCE), after which others retire the gateway.
pub const USABLE: u64 = 90_000;

/// The slice of one cap, as its gateway counts it.
#[derive(Clone, Debug, Default)]
pub struct Slice {
    /// `granted` of the row, as the newest answer had it.
    granted: u64,
    /// The cost of the requests that have ended.
    used: u64,
    /// The worst-case cost of the requests that run.
    held: u64,
    /// The amount that is being given back. It has left the slice; no answer has confirmed it.
    leaving: u64,
    /// The number of the newest call, and when it was sent.
    call: u64,
    sent: BootMillis,
    usable_until: BootMillis,
    timeline: Timeline,
}

/// The answer to a call: the row after it, and the history that the database is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The number of the call that is answered.
    pub call: u64,
    /// The slice's row.
    pub row: SliceRow,
    /// The history of the database.
    pub timeline: Timeline,
}

/// The amount that a slice lacks for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the slice lacks {missing} for this request")]
pub struct Short {
    /// The missing amount.
    pub missing: u64,
}

impl Slice {
    /// Creates an empty slice of a gateway that got its number in this history.
    pub fn new(timeline: Timeline) -> Self {
        Self { timeline, ..Self::default() }
    }

    /// Returns what further requests may use at `now`.
    pub fn rest(&self, now: BootMillis) -> u64 {
        // Checked at each use: the gateway may have been stopped for any time since the last
        // one.
        if now >= self.usable_until { 0 } else { self.spare() }
    }

    /// Holds the worst-case cost of a request.
    ///
    /// # Errors
    /// [`Short`]; the gateway should ask for what is missing.
    pub fn hold(&mut self, now: BootMillis, worst: u64) -> Result<(), Short> {
        let missing = worst.saturating_sub(self.rest(now));
        if missing > 0 {
            return Err(Short { missing });
        }
        self.held += worst;
        Ok(())
    }

    /// Ends a request that held `worst` and cost `cost`, which is at most `worst`.
    pub fn settle(&mut self, worst: u64, cost: u64) {
        self.held -= worst;
        self.used += cost.min(worst);
    }

    /// Begins a call at `now`. What is given back leaves the slice before the call, because
    /// others may have it as soon as the database has the call.
    pub fn ask(&mut self, now: BootMillis, need: u64, expected: u64, give_back: u64) -> Ask {
        let give_back = give_back.min(self.spare());
        self.leaving += give_back;
        self.call += 1;
        self.sent = now;
        Ask { call: self.call, give_back, need, expected }
    }

    /// Adopts the answer to the newest call. Returns the amount that the gateway has to tell
    /// the database if it forgot commits: `granted` as this gateway remembers it.
    #[must_use = "a database that lost commits grants nothing until it is told"]
    pub fn answered(&mut self, answer: Answer) -> Option<u64> {
        if answer.timeline > self.timeline {
            // The row may be older than what this gateway has heard before, so it is not
            // adopted: that would forget the only copy of a lost grant.
            return Some(self.remembered());
        }
        // An answer to an older call may be older than the row that was adopted since.
        if answer.call == self.call && answer.timeline == self.timeline {
            self.granted = answer.row.granted;
            self.leaving = 0;
            // From when the call was sent: the database may have heard it at once.
            self.usable_until = BootMillis(self.sent.0 + USABLE);
        }
        None
    }

    /// Enters a history of the database, after [`CapRow::learn`](crate::CapRow::learn) with
    /// what [`Self::answered`] returned. `row` is the row after it.
    pub fn told(&mut self, timeline: Timeline, row: SliceRow) {
        self.timeline = timeline;
        self.granted = row.granted;
        self.leaving = 0;
    }

    fn remembered(&self) -> u64 {
        self.granted - self.leaving
    }

    /// Returns the part of the slice that no request uses. Saturating: a row may have less
    /// than this gateway uses if the database lost commits.
    fn spare(&self) -> u64 {
        self.granted.saturating_sub(self.used + self.held + self.leaving)
    }
}
