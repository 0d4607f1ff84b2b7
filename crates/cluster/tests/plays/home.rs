//! A gateway with its data folder: what it remembers, what its workers have done, and what the
//! ledger has of it.

use std::collections::BTreeMap;

use tollgate_cluster::{Answer, Order, Slice, Taken, Wanted};

use crate::database::Call;
use crate::omission::Omission;

/// The seconds for which a slice may be spent after the newest answered call was sent.
const USABLE: u64 = 90;

/// A gateway and its data folder.
#[derive(Clone, Debug, Default)]
pub(crate) struct Home {
    pub(crate) index: usize,
    pub(crate) is_running: bool,
    /// The period by the clock of the machine.
    pub(crate) period: u32,
    pub(crate) slice: Slice,
    /// The cost of the requests that ended in the period, as the gateway knows.
    used: u64,
    /// The worst-case cost of the requests that run.
    pub(crate) held: Vec<u64>,
    /// The worst-case cost of work that runs on, although its gateway has stopped.
    pub(crate) left: Vec<u64>,
    /// The period in which the oldest work was placed.
    placed_in: u32,
    /// The cost of all that has ended, by period.
    pub(crate) spent: BTreeMap<u32, u64>,
    /// The part of it that the ledger has.
    posted: BTreeMap<u32, u64>,
    /// The journals of this life, and those of earlier lives.
    journal: Vec<(u32, u64)>,
    earlier: Vec<(u32, u64)>,
    /// Journals of earlier lives that others have posted since this one began.
    unread: Vec<(u32, u64)>,
    /// True if the journals of earlier lives are in the ledger.
    pub(crate) is_settled: bool,
    newest: Order,
    sent: u64,
    usable_until: u64,
    /// The time until which no call of it arrives.
    pub(crate) cut_until: u64,
    /// The life that other gateways take for lost: no worker takes its work.
    pub(crate) lost_life: Option<u64>,
    pub(crate) is_freed: bool,
    omitted: Option<Omission>,
}

impl Home {
    pub(crate) fn new(index: usize, omitted: Option<Omission>) -> Self {
        Self { index, period: 1, omitted, ..Self::default() }
    }

    fn taken(&self) -> Taken {
        Taken { used: self.used, held: self.held.iter().sum() }
    }

    /// Returns what a request may take at `now`.
    pub(crate) fn spare(&self, now: u64) -> u64 {
        let is_usable = self.is_running && now < self.usable_until && !self.is_refused();
        if is_usable { self.slice.spare(self.taken()) } else { 0 }
    }

    /// Returns true if it was not answered for so long that others may take it for lost.
    pub(crate) fn is_silent(&self, now: u64) -> bool {
        !self.is_running || now >= self.usable_until + 10
    }

    /// Takes the present life for lost.
    pub(crate) fn retire(&mut self) {
        self.lost_life = Some(self.newest.life);
        self.is_freed = false;
    }

    /// Returns true if the life that was taken for lost is the newest one.
    pub(crate) fn is_lost(&self) -> bool {
        self.lost_life == Some(self.newest.life)
    }

    fn is_refused(&self) -> bool {
        self.is_lost() && self.omitted != Some(Omission::RetiredWork)
    }

    /// Posts all journals, which any gateway can do. Returns what was spent of each period.
    pub(crate) fn post_all(&mut self) -> &BTreeMap<u32, u64> {
        self.post();
        for (period, cost) in std::mem::take(&mut self.earlier) {
            *self.posted.entry(period).or_default() += cost;
            // A life that has begun reads it when it settles.
            self.unread.push((period, cost));
        }
        &self.posted
    }

    /// Ends a request.
    pub(crate) fn end(&mut self, at: usize, part: u64) {
        let cost = self.held.swap_remove(at) * part / 100;
        self.used += cost;
        *self.spent.entry(self.period).or_default() += cost;
        self.journal.push((self.period, cost));
    }

    /// Ends a request whose gateway has stopped.
    pub(crate) fn end_left(&mut self, part: u64) {
        let Some(worst) = self.left.pop() else { return };
        let cost = worst * part / 100;
        *self.spent.entry(self.period).or_default() += cost;
        self.earlier.push((self.period, cost));
    }

    /// Posts the journals of this life.
    pub(crate) fn post(&mut self) {
        for (period, cost) in std::mem::take(&mut self.journal) {
            *self.posted.entry(period).or_default() += cost;
        }
    }

    /// Posts the journals of earlier lives.
    pub(crate) fn settle(&mut self) {
        if self.is_settled || !self.left.is_empty() {
            return;
        }
        for (period, cost) in std::mem::take(&mut self.earlier) {
            *self.posted.entry(period).or_default() += cost;
            self.unread.push((period, cost));
        }
        for (period, cost) in std::mem::take(&mut self.unread) {
            self.used += if period == self.period { cost } else { 0 };
        }
        self.is_settled = true;
        self.slice.settled();
    }

    pub(crate) fn ask(&mut self, now: u64, wanted: Wanted) -> Call {
        self.newest.call += 1;
        self.sent = now;
        let taken = self.taken();
        let mut ask;
        if self.omitted == Some(Omission::GivenBackFirst) {
            ask = self.slice.ask(self.newest, taken, Wanted { keep: u64::MAX, ..wanted });
            let less = |claim: u64| claim.min(taken.all().saturating_add(wanted.keep));
            ask.claim = ask.claim.map(less);
        } else {
            ask = self.slice.ask(self.newest, taken, wanted);
        }
        if self.omitted == Some(Omission::KeptSlice) {
            ask.claim = ask.claim.or(Some(taken.all()));
        }
        Call { home: self.index, period: self.period, ask }
    }

    pub(crate) fn answered(&mut self, call: &Call, answer: &Answer) {
        let is_of_this_life = self.is_running && answer.order.life == self.newest.life;
        if !is_of_this_life || call.period != self.period {
            return;
        }
        let is_settled = self.is_settled || self.omitted == Some(Omission::UnknownWork);
        self.slice.answered(answer, call.ask.used, is_settled);
        if answer.order == self.newest {
            self.usable_until = self.sent + USABLE;
        }
    }

    /// Stops without a word.
    pub(crate) fn kill(&mut self) {
        self.is_running = false;
        self.left.append(&mut self.held);
        self.earlier.append(&mut self.journal);
    }

    /// Places a request with this worst-case cost.
    pub(crate) fn place(&mut self, worst: u64) {
        if !self.has_work() {
            self.placed_in = self.period;
        }
        self.held.push(worst);
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.held.is_empty() || !self.left.is_empty()
    }

    /// Returns true if no work runs since before `period`. A request lasts minutes, and a period
    /// at least a day.
    pub(crate) fn has_no_work_before(&self, period: u32) -> bool {
        !self.has_work() || self.placed_in >= period
    }

    /// Starts with what the ledger has of this data folder, in a life after `newest`.
    pub(crate) fn start(&mut self, newest: u64) {
        self.is_running = true;
        self.unread.clear();
        self.slice = Slice::default();
        self.used = self.posted.get(&self.period).copied().unwrap_or(0);
        self.is_settled = false;
        self.newest = Order { life: self.newest.life.max(newest) + 1, call: 0 };
        self.usable_until = 0;
    }

    /// Enters the next period.
    pub(crate) fn roll(&mut self) {
        self.period += 1;
        self.slice.roll();
        self.used = 0;
    }

    /// Returns what may be spent of `period` with what was spent.
    pub(crate) fn most(&self, period: u32) -> u64 {
        let spent = self.spent.get(&period).copied().unwrap_or(0);
        let held: u64 = self.held.iter().chain(&self.left).sum();
        let may_spend = self.is_running && !self.is_refused();
        let spare = if may_spend { self.slice.spare(self.taken()) } else { 0 };
        // What runs or may still start can end in the next period.
        if period == self.period || period == self.period + 1 {
            spent + held + spare
        } else {
            spent
        }
    }
}
