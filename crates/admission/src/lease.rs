//! The parts of a rate that move between gateways, as one gateway counts them. The rules are in
//! `tollgate-cluster`.

use std::time::Duration;

use tollgate_cluster::parts::{PartAnswer, PartAsk, PartMode, WHOLE};
use tollgate_domain::MonotonicTime;

use crate::bucket::{Bucket, Demand, scaled};

/// The time over which use is measured.
const WINDOW: Duration = Duration::from_secs(2);
/// The time without use after which all parts go back.
pub(crate) const IDLE: Duration = Duration::from_secs(10);
/// The longest time between two calls of a gateway that has parts: the store forgets a rate that
/// no gateway calls for.
pub(crate) const SILENCE: Duration = Duration::from_secs(20);
/// The parts that a gateway asks for beyond what it lacks, at least.
const SPARE: u64 = WHOLE / 8;

/// The state of one rate's parts beside the bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Lease {
    mode: PartMode,
    /// The newest call; zero if there was none.
    newest: u64,
    /// True if that call has no answer yet. The store may count more parts than the gateway.
    is_unanswered: bool,
    /// The parts that the store knows to be lacking here: its newest answer gave less.
    lacking: u64,
    /// The largest demand that was refused since.
    refused: Option<Demand>,
    /// The newest answer.
    told: PartAnswer,
    usage: Usage,
    called: MonotonicTime,
}

/// The units taken in the last two windows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Usage {
    begun: MonotonicTime,
    now: u64,
    before: u64,
    newest: MonotonicTime,
}

/// The reason for a call.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CallReason {
    /// Requests lack this sum of demands.
    Lacking(Demand),
    /// A beat. Gateways lack this many parts, this one included.
    Beat(u64),
    /// The store must hear what the gateway has.
    Claim,
    /// The gateway stops.
    Stop,
}

impl Lease {
    pub(crate) fn new(mode: PartMode) -> Self {
        Self {
            mode,
            newest: 0,
            is_unanswered: false,
            lacking: 0,
            refused: None,
            told: PartAnswer::default(),
            usage: Usage::default(),
            called: MonotonicTime::default(),
        }
    }

    pub(crate) fn mode(&self) -> PartMode {
        self.mode
    }

    /// Returns the level that the store has, as far as its newest answer tells.
    pub(crate) fn pooled(&self) -> u64 {
        self.told.pooled
    }

    /// Returns true if the store was never asked.
    pub(crate) fn is_new(&self) -> bool {
        self.newest == 0
    }

    /// Returns true if the store counts nothing for this gateway, which has `part`.
    pub(crate) fn is_over(&self, part: u64) -> bool {
        let has_nothing = part == 0 && !self.is_unanswered && self.lacking == 0;
        has_nothing && self.mode == PartMode::Leased
    }

    /// Returns true if the store had less than was lacking.
    fn is_starved(&self) -> bool {
        self.lacking > 0
    }

    /// Counts units that were taken.
    pub(crate) fn count(&mut self, units: u64, now: MonotonicTime) {
        self.usage.advance(now);
        self.usage.newest = now;
        self.usage.now = self.usage.now.saturating_add(units);
    }

    /// Replaces counted units by the true cost.
    pub(crate) fn correct(&mut self, held: u64, true_cost: u64) {
        let now = self.usage.now.saturating_add(true_cost);
        self.usage.now = now.saturating_sub(held);
    }

    /// Notes a demand that was refused, and for which the store has nothing more at present.
    fn note(&mut self, demand: Demand) {
        let refused = self.refused.unwrap_or_default();
        let (expected, most) = (refused.expected, refused.most);
        let (expected, most) = (expected.max(demand.expected), most.max(demand.most));
        self.refused = Some(Demand { expected, most });
    }
}

impl Usage {
    fn advance(&mut self, now: MonotonicTime) {
        let passed = now.since(self.begun);
        if passed >= WINDOW {
            self.before = if passed < 2 * WINDOW { self.now } else { 0 };
            (self.now, self.begun) = (0, now);
        }
    }

    fn most(&self) -> u64 {
        self.before.max(self.now)
    }
}

impl Bucket {
    /// Makes the parts of the bucket move between gateways.
    pub(crate) fn begin_lease(&mut self, mode: PartMode) {
        self.lease = Some(Lease::new(mode));
    }

    /// Changes the way in which the rate may be used. Call [`Self::refill`] first.
    pub(crate) fn enter(&mut self, mode: PartMode) {
        let Some(lease) = &mut self.lease else { return };
        lease.mode = mode;
        if mode == PartMode::Leased {
            return;
        }
        (lease.refused, lease.lacking) = (None, 0);
        self.share_among(self.gateways);
    }

    /// Returns true if the bucket has nothing, and the store counts nothing for it.
    pub(crate) fn is_unused(&self) -> bool {
        self.lease.as_ref().is_none_or(|lease| lease.is_new() && self.part == 0)
    }

    /// Returns `None` if `demand` fits now, or if no part of the rate helps. Otherwise returns
    /// true if the store may have what is lacking. A demand for which the store has nothing is
    /// noted, so that the next beat asks for it.
    pub(crate) fn lacks(&mut self, demand: Demand) -> Option<bool> {
        let whole = scaled(self.rate.burst);
        let needed = demand.needs(self.capacity(), self.risk);
        let fits = needed <= self.capacity() && needed <= self.level;
        let may_fit = demand.needs(whole, 0) <= whole;
        let lease = self.lease.as_mut()?;
        let is_whole = self.part == WHOLE && lease.told.pooled == 0;
        if fits || !may_fit || is_whole || whole == 0 {
            return None;
        }
        if lease.is_starved() {
            lease.note(demand);
        }
        Some(!lease.is_starved())
    }

    /// Begins the call `number`, if one is due for the reason. What it gives back leaves the
    /// bucket now, because others may have it as soon as the store has the call.
    pub(crate) fn ask(
        &mut self,
        number: u64,
        now: MonotonicTime,
        reason: CallReason,
    ) -> Option<PartAsk> {
        self.refill(now);
        let (mut lacked, mut keep) = (None, self.part);
        let lease = self.lease.as_mut()?;
        lease.usage.advance(now);
        match reason {
            CallReason::Lacking(demand) => lacked = Some(demand),
            // Also without parts: the store may still count some.
            CallReason::Claim => {}
            CallReason::Stop => keep = 0,
            CallReason::Beat(wanted) => {
                let refused = lease.refused.take();
                let others = wanted.saturating_sub(lease.lacking);
                let is_silent = now.since(lease.called) >= SILENCE && self.part > 0;
                let is_due = lease.is_unanswered || lease.lacking > 0 || is_silent;
                let is_idle = now.since(lease.usage.newest) >= IDLE;
                lacked = refused;
                if is_idle && self.risk == 0 && self.level >= 0 && lacked.is_none() {
                    keep = 0;
                } else if others > 0 {
                    keep = self.part - self.excess(lacked.is_some()).min(others);
                }
                if keep == self.part && lacked.is_none() && !is_due {
                    return None;
                }
            }
        }
        let give = self.give_parts(keep);
        Some(self.call(number, now, give, lacked.unwrap_or_default()))
    }

    /// Returns the parts that the gateway does not use. If requests lack units here, too, these
    /// are the parts beyond an equal share.
    fn excess(&self, is_short: bool) -> u64 {
        let Some(lease) = &self.lease else { return 0 };
        let kept = if is_short {
            WHOLE / lease.told.users.max(2)
        } else {
            let used = self.used_parts(lease.usage.most());
            // A bucket that is half full has enough for what is used beyond the mean.
            match self.level >= self.capacity() / 2 {
                true => used,
                false => used.saturating_mul(5) / 4,
            }
        };
        // The debt of the open demands must stay within half of the part.
        let at_risk = self.parts_up(self.risk.saturating_mul(2));
        self.part.saturating_sub(kept.max(at_risk))
    }

    /// Returns the parts of which the refill gives `units` in each window.
    fn used_parts(&self, units: u64) -> u64 {
        let refill = u128::from(self.rate.per_minute) * WINDOW.as_millis();
        let used = u128::from(units) * u128::from(WHOLE) * 60_000;
        used.div_ceil(refill.max(1)).min(WHOLE.into()) as u64
    }

    /// Reduces the part to `keep`. Returns the level that leaves with the rest.
    fn give_parts(&mut self, keep: u64) -> u64 {
        let part = self.part;
        if keep >= part {
            return 0;
        }
        // In proportion. A debt stays here.
        let kept = match self.level > 0 {
            true => self.level.saturating_mul(keep.into()) / i128::from(part),
            false => self.level,
        };
        let given = self.parts_down(self.level - kept);
        self.level = kept;
        self.set_part(keep);
        given
    }

    fn call(&mut self, number: u64, now: MonotonicTime, give: u64, lacked: Demand) -> PartAsk {
        let (full, whole) = (self.capacity(), scaled(self.rate.burst));
        // The part that is large enough for the demand and all open ones.
        let wanted = scaled(lacked.expected).saturating_add(self.risk + lacked.risk());
        let is_lacking = lacked != Demand::default();
        let target = if is_lacking { full.max(wanted.min(whole)) } else { full };
        let needed = lacked.needs(target, self.risk).min(target);
        let need_level = match is_lacking {
            true => self.parts_up(needed.saturating_sub(self.level)),
            false => 0,
        };
        let need_parts = self.parts_up(target - full).min(WHOLE - self.part);
        let spare = match &self.lease {
            Some(lease) if is_lacking => {
                let used = self.used_parts(lease.usage.most()).saturating_mul(5) / 4;
                // While others have the rest, an equal share.
                let fair = if lease.is_starved() { WHOLE / lease.told.users.max(2) } else { 0 };
                used.max(fair).saturating_sub(self.part).clamp(SPARE, WHOLE)
            }
            _ => 0,
        };
        let room = self.parts_down(full.saturating_sub(self.level));
        let rate = self.rate;
        let fill = u128::from(rate.burst) * 60_000;
        let fill = fill.div_ceil(u128::from(rate.per_minute.max(1))).max(1);
        // A bucket that fills slower than the store can count does not refill there.
        let fill = u64::try_from(fill).unwrap_or(u64::MAX);
        let fill = if rate.per_minute == 0 || fill > MOST_FILL { 0 } else { fill };
        if let Some(lease) = &mut self.lease {
            (lease.newest, lease.is_unanswered, lease.called) = (number, true, now);
        }
        PartAsk {
            call: number,
            claim: self.part,
            give,
            room: room.min(MOST_LEVEL),
            need_level: need_level.min(MOST_LEVEL),
            need_parts,
            least: 0,
            spare,
            fill,
            size: rate.burst.min(MOST_SIZE),
        }
    }

    /// Adopts the answer to `ask`, if no newer call was made.
    pub(crate) fn answered(&mut self, now: MonotonicTime, ask: &PartAsk, answer: &PartAnswer) {
        self.refill(now);
        // An answer that comes after the parts have ended gives none.
        let is_of = |lease: &&mut Lease| lease.newest == ask.call && lease.mode == PartMode::Leased;
        let Some(lease) = self.lease.as_mut().filter(is_of) else { return };
        lease.is_unanswered = false;
        lease.told = *answer;
        let granted = answer.parts.saturating_sub(ask.claim);
        lease.lacking = ask.lacking(granted, answer.level, answer.parts);
        if !lease.is_starved() {
            lease.refused = None;
        }
        self.set_part(answer.parts);
        let level = self.level.saturating_add(self.units(answer.level));
        self.level = level.min(self.capacity());
    }

    /// Returns the parts of the burst in `level`, rounded down.
    fn parts_down(&self, level: i128) -> u64 {
        let whole = scaled(self.rate.burst).max(1);
        let parts = level.max(0).saturating_mul(WHOLE.into()) / whole;
        u64::try_from(parts).unwrap_or(u64::MAX)
    }

    /// Returns the parts of the burst in `level`, rounded up.
    fn parts_up(&self, level: i128) -> u64 {
        let whole = scaled(self.rate.burst).max(1);
        let level = level.max(0).saturating_mul(WHOLE.into());
        u64::try_from((level + (whole - 1)) / whole).unwrap_or(u64::MAX)
    }
}

/// The longest time to fill a bucket that the store counts exactly, in milliseconds: its numbers
/// have 53 bits.
const MOST_FILL: u64 = 10_000_000_000;
/// The largest level in a call, beyond every debt that a bucket can have.
const MOST_LEVEL: u64 = 1_000 * WHOLE;
/// The largest burst in a call.
const MOST_SIZE: u64 = 1 << 53;
