//! The places of a limit (`concurrent` or `queued`) that several gateways share, as one gateway
//! counts them. Places are parts of the limit that move between gateways, like those of a rate. The
//! rules are in `tollgate-cluster`.

use std::num::NonZeroU32;

use tollgate_cluster::parts::{PartAnswer, PartAsk, PartMode, WHOLE};
use tollgate_domain::MonotonicTime;

use crate::lease::{CallReason, IDLE, SILENCE};

/// The places of which the parts are rounded so that all of them can be used. With more places, each
/// gateway may lose one.
const MOST_EXACT: u32 = 1_024;
/// The part of the places for which a gateway asks beyond those that it lacks, as a divisor.
const SPARE: u64 = 8;
/// The time to fill for the store, in milliseconds: places have no level.
const FILL: u64 = 1;

/// The parts of one number of places that a gateway has.
#[derive(Clone, Debug)]
pub(crate) struct PlaceLease {
    mode: PartMode,
    /// This gateway's parts, of [`WHOLE`].
    part: u64,
    /// The parts that new requests may use. It is less than `part` while others lack places and
    /// this gateway has more than an equal share: what becomes free goes to them.
    usable: u64,
    /// True if the gateway gave places back for others at the newest beat.
    yields: bool,
    /// The newest call; zero if there was none.
    newest: u64,
    /// True if that call has no answer yet. The store may count more parts than the gateway.
    is_unanswered: bool,
    /// The parts that the store knows to be lacking here: its newest answer gave less.
    lacking: u64,
    /// True if a request was refused since the newest beat because places are lacking.
    has_refused: bool,
    /// The newest answer.
    told: PartAnswer,
    used: MonotonicTime,
    called: MonotonicTime,
}

/// The use of a number of places on this gateway.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct PlaceUse {
    /// Value of the limit: the places of all gateways.
    pub(crate) limit: u32,
    /// Places that are taken here, also by requests that arrive.
    pub(crate) taken: u64,
    /// Places of these that are taken for longer.
    pub(crate) held: u64,
    /// Requests here that wait for such a place.
    pub(crate) waiting: u64,
}

impl PlaceLease {
    pub(crate) fn new(mode: PartMode) -> Self {
        Self {
            mode,
            part: 0,
            usable: WHOLE,
            yields: false,
            newest: 0,
            is_unanswered: false,
            lacking: 0,
            has_refused: false,
            told: PartAnswer::default(),
            used: MonotonicTime::default(),
            called: MonotonicTime::default(),
        }
    }

    /// Changes the way in which the places may be used.
    pub(crate) fn enter(&mut self, mode: PartMode, gateways: NonZeroU32) {
        self.mode = mode;
        let equal = WHOLE / u64::from(gateways.get());
        match mode {
            PartMode::Leased => return,
            PartMode::Ended => self.part = 0,
            PartMode::Narrowed => self.part = self.part.min(equal),
            // Claimed as soon as the store answers again.
            PartMode::Divided => self.part = equal,
        }
        (self.lacking, self.has_refused, self.usable) = (0, false, WHOLE);
    }

    /// Returns the places of `limit` that new requests may use here.
    pub(crate) fn places(&self, limit: u32, gateways: NonZeroU32) -> u32 {
        match self.mode {
            PartMode::Leased | PartMode::Ended => places_in(self.part.min(self.usable), limit),
            PartMode::Narrowed => places_in(self.part, limit).min(equal_places(limit, gateways)),
            PartMode::Divided => equal_places(limit, gateways),
        }
    }

    /// Returns the places of `limit` that this gateway or no gateway has, as far as is known.
    pub(crate) fn known_places(&self, limit: u32, gateways: NonZeroU32) -> u32 {
        match self.mode {
            PartMode::Leased if self.newest == 0 => limit,
            PartMode::Leased => places_in((self.part + self.told.free).min(WHOLE), limit),
            _ => self.places(limit, gateways),
        }
    }

    /// Returns `None` if no part of the store gives one more of `limit` places. Otherwise returns
    /// true if the store may have one. A request for which the store has none is noted, so that
    /// the next beat asks for it. Call this when every place here is taken.
    pub(crate) fn lacks(&mut self, limit: u32) -> Option<bool> {
        let may_grow = self.part < WHOLE && limit > 0;
        if !matches!(self.mode, PartMode::Leased | PartMode::Ended) || !may_grow {
            return None;
        }
        let is_starved = self.is_starved() || self.usable < self.part || self.yields;
        self.has_refused |= is_starved;
        Some(!is_starved)
    }

    /// Returns true if the store had less than was lacking.
    pub(crate) fn is_starved(&self) -> bool {
        self.lacking > 0
    }

    /// Begins the call `number`, if one is due for the reason. What it gives back must not be used
    /// from now on.
    pub(crate) fn ask(
        &mut self,
        number: u64,
        now: MonotonicTime,
        reason: CallReason,
        places: PlaceUse,
    ) -> Option<PartAsk> {
        if places.taken > 0 {
            self.used = now;
        }
        let needed = parts_of(places.taken, places.limit);
        let mut lacked = 0;
        // Requests that began with parts which have ended. They are not claimed: another gateway
        // may have these parts.
        let is_over = self.part < parts_of(places.held, places.limit)
            && matches!(reason, CallReason::Beat(_));
        match reason {
            // Beside those that are counted as taken.
            CallReason::Lacking(requests) => lacked = requests.expected,
            CallReason::Claim => {}
            CallReason::Stop => self.part = 0,
            CallReason::Beat(wanted) => {
                lacked = places.waiting.max(std::mem::take(&mut self.has_refused).into());
                let others = wanted.saturating_sub(self.lacking);
                let before = self.part;
                self.usable = WHOLE;
                if places.taken == 0 && lacked == 0 && now.since(self.used) >= IDLE {
                    self.part = 0;
                } else if others > 0 {
                    // In whole places: parts of one are of no use, here or elsewhere.
                    let equal = places_in(WHOLE / self.told.users.max(2), places.limit);
                    self.usable = parts_of(equal.into(), places.limit);
                    let kept = if lacked > 0 { self.usable.max(needed) } else { needed };
                    self.part -= self.part.saturating_sub(kept).min(others);
                }
                let is_silent = self.part > 0 && now.since(self.called) >= SILENCE;
                let is_due = self.is_unanswered || self.lacking > 0 || is_silent || is_over;
                // What others lack is for them: this gateway asks again at the next beat.
                self.yields = self.part < before && others > 0;
                if self.yields {
                    lacked = 0;
                }
                if self.part == before && lacked == 0 && !is_due {
                    return None;
                }
            }
        }
        let target = places.taken.saturating_add(lacked).min(places.limit.into());
        let asks = lacked > 0 || is_over || matches!(reason, CallReason::Lacking(_));
        let is_lacking = asks && self.part <= self.usable;
        let need_parts = match is_lacking {
            true => parts_of(target, places.limit).saturating_sub(self.part),
            false => 0,
        };
        // Another call would get nothing.
        if matches!(reason, CallReason::Lacking(_)) && need_parts == 0 {
            return None;
        }
        let spare = if need_parts > 0 { WHOLE / SPARE } else { 0 };
        let one_more = u64::from(places_in(self.part, places.limit)) + 1;
        let least = parts_of(one_more, places.limit).saturating_sub(self.part).min(need_parts);
        (self.newest, self.is_unanswered, self.called) = (number, true, now);
        Some(PartAsk {
            call: number,
            claim: self.part,
            need_parts,
            least,
            spare,
            fill: FILL,
            size: places.limit.into(),
            ..PartAsk::default()
        })
    }

    /// Adopts the answer to `ask`, if no newer call was made.
    pub(crate) fn answered(&mut self, ask: &PartAsk, answer: &PartAnswer) {
        // An answer that comes after the parts have ended gives none.
        if self.newest != ask.call || self.mode != PartMode::Leased {
            return;
        }
        self.is_unanswered = false;
        self.told = *answer;
        let granted = answer.parts.saturating_sub(ask.claim);
        self.lacking = ask.lacking(granted, answer.level, answer.parts);
        self.part = answer.parts;
        if granted > 0 {
            self.usable = WHOLE;
        }
    }

    /// Returns true if the store was never asked, and the gateway has nothing.
    pub(crate) fn is_unused(&self) -> bool {
        self.newest == 0 && self.part == 0
    }

    /// Returns true if a new lease is as good.
    pub(crate) fn can_be_forgotten(&self) -> bool {
        let has_nothing = self.part == 0 && !self.is_unanswered && self.lacking == 0;
        match self.mode {
            PartMode::Leased => has_nothing,
            PartMode::Divided => true,
            PartMode::Ended | PartMode::Narrowed => self.is_unused(),
        }
    }
}

/// Returns a gateway's equal part of `limit` places: at least one, if there are any.
pub(crate) fn equal_places(limit: u32, gateways: NonZeroU32) -> u32 {
    (limit / gateways).max(limit.min(1))
}

/// Returns the places in `parts`. All places of a limit can be used: each gateway has at least the
/// parts of its places rounded down, so its places are rounded up. The sum over *n* gateways is
/// still at most the limit while *n* times the limit is less than [`WHOLE`].
fn places_in(parts: u64, limit: u32) -> u32 {
    let slack = if limit <= MOST_EXACT { u128::from(limit.saturating_sub(1)) } else { 0 };
    let places = (u128::from(parts) * u128::from(limit) + slack) / u128::from(WHOLE);
    u32::try_from(places).unwrap_or(limit).min(limit)
}

/// Returns the parts of which [`places_in`] finds this many places.
fn parts_of(places: u64, limit: u32) -> u64 {
    let (whole, limit) = (u128::from(WHOLE), u128::from(limit.max(1)));
    let places = u128::from(places).min(limit);
    let parts = match limit <= u128::from(MOST_EXACT) {
        true => places * whole / limit,
        false => (places * whole).div_ceil(limit),
    };
    parts as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bucket::Demand;

    #[test]
    fn places_of_parts_add_up() {
        for limit in [1, 2, 3, 7, 11, 17, 100, 1_000, 1_024] {
            for first in 0..=u64::from(limit) {
                let parts = parts_of(first, limit);
                assert_eq!(u64::from(places_in(parts, limit)), first, "of {limit}");
                // The rest is there for others, and no more than the rest.
                let rest = places_in(WHOLE - parts, limit);
                assert_eq!(u64::from(rest), u64::from(limit) - first, "of {limit}");
            }
        }
        for limit in [1_025, 5_000, 1_000_000, u32::MAX] {
            for first in [0, 1, 7, 1_000, u64::from(limit)] {
                let parts = parts_of(first, limit);
                let places = places_in(parts, limit) + places_in(WHOLE - parts, limit);
                assert!(u64::from(places_in(parts, limit)) >= first && places <= limit);
            }
        }
    }

    #[test]
    fn places_of_odd_parts_never_exceed_limit() {
        for limit in [1, 2, 3, 7, 97, 1_024] {
            for gateways in [2, 3, 16, 100] {
                for step in [1, 7, 4_099, 123_457] {
                    let (mut left, mut sum) = (WHOLE, 0);
                    for gateway in 1..gateways {
                        let parts = (gateway * step) % (left + 1);
                        left -= parts;
                        sum += places_in(parts, limit);
                    }
                    assert!(sum + places_in(left, limit) <= limit, "{gateways} of {limit}");
                }
            }
        }
    }

    #[test]
    fn late_answer_gives_no_places() {
        let mut lease = PlaceLease::new(PartMode::Leased);
        let places = PlaceUse { limit: 4, ..PlaceUse::default() };
        let ask = lease
            .ask(1, MonotonicTime(0), CallReason::Lacking(Demand::exact(1)), places)
            .expect("asks");
        let answer = PartAnswer { parts: ask.need_parts, ..PartAnswer::default() };
        lease.enter(PartMode::Ended, NonZeroU32::MIN);
        lease.answered(&ask, &answer);
        assert_eq!(lease.places(4, NonZeroU32::MIN), 0);
    }
}
