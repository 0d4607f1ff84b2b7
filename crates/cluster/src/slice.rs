//! A gateway's side of its slice.

use crate::{Answer, Ask, Order, Standing};

/// The slice of one cap in one period, as its gateway counts it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Slice {
    /// The amount that may be spent in the period, with what was spent.
    granted: u64,
    /// The part of `granted` that an earlier life of the gateway may have spent, as long as
    /// the journals of its workers are not all in the ledger.
    unknown: u64,
    /// The part of `unknown` that an earlier life has said to be spent.
    known_spent: u64,
    /// The newest call.
    newest: Order,
    /// True once a call of this life was answered.
    is_known: bool,
    standing: Standing,
}

/// The amounts that a gateway wants beside what requests have taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The spare amount that the gateway does not give back.
    pub keep: u64,
    /// The amount without which a request cannot start; zero if none waits.
    pub need: u64,
    /// The amount that the gateway expects to spend soon beyond `need`.
    pub expected: u64,
}

/// The part of a cap that requests have taken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Taken {
    /// The cost of the requests that have ended in the period.
    pub used: u64,
    /// The worst-case cost of the requests that run.
    pub held: u64,
}

impl Slice {
    /// Returns what further requests may take.
    pub fn spare(&self, taken: Taken) -> u64 {
        self.granted.saturating_sub(taken.all()).saturating_sub(self.unknown)
    }

    /// Returns true once a call of this life was answered.
    pub fn is_known(&self) -> bool {
        self.is_known
    }

    /// Returns true if a call was made for the slice in this period.
    pub fn was_asked_for(&self) -> bool {
        self.newest != Order::default()
    }

    /// Returns true if nothing of the cap can come back before the period ends, as far as the
    /// newest answer tells: no gateway has what it has not spent.
    pub fn is_at_end(&self) -> bool {
        let Standing { rest, idle_elsewhere, .. } = self.standing;
        self.is_known && self.unknown == 0 && rest == 0 && idle_elsewhere == 0
    }

    /// Returns the amount that may be spent in the period, with what was spent.
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Returns the state of the cap after the last answered call.
    pub fn standing(&self) -> Standing {
        self.standing
    }

    /// Begins a call, whose place is after those of all calls before it. Everything but `keep`
    /// that no request has taken is given back. It leaves the slice now, because others may
    /// have it as soon as the database has the call. An answer that never comes adds nothing.
    pub fn ask(&mut self, order: Order, taken: Taken, wanted: Wanted) -> Ask {
        let Wanted { keep, need, expected } = wanted;
        let needed = taken.all().saturating_add(self.unknown);
        // At least what requests have: those that run across a change of period go on.
        self.granted = self.granted.min(needed.saturating_add(keep)).max(needed);
        self.newest = order;
        let claim = self.is_known.then_some(self.granted);
        Ask { order, claim, used: taken.used, need, expected }
    }

    /// Adopts the answer to the newest call. `used` is what the call said, and `is_settled` is
    /// true if all work of earlier lives is in it.
    pub fn answered(&mut self, answer: &Answer, used: u64, is_settled: bool) {
        // An older answer may have what was given back since.
        if answer.order != self.newest {
            return;
        }
        self.granted = answer.granted;
        self.standing = answer.standing;
        if !self.is_known {
            self.is_known = true;
            if !is_settled {
                self.unknown = answer.claimed.saturating_sub(used);
                self.known_spent = answer.used.saturating_sub(used);
            }
        }
    }

    /// Enters a new period, in which nothing is granted yet.
    pub fn roll(&mut self) {
        let Self { unknown, known_spent, is_known, .. } = *self;
        // Only what is not spent can still be spent in the new period.
        let unknown = unknown.saturating_sub(known_spent);
        *self = Self { unknown, is_known, ..Self::default() };
    }

    /// Notes that all work of earlier lives is in `used`.
    pub fn settled(&mut self) {
        (self.unknown, self.known_spent) = (0, 0);
    }
}

impl Taken {
    /// Returns the whole amount.
    pub fn all(self) -> u64 {
        self.used.saturating_add(self.held)
    }
}
