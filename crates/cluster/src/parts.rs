//! Rules by which several gateways share the rates and the places of tenants, keys and models.
//!
//! A rate is divided into [`WHOLE`] parts. A gateway that has some parts has a token bucket with
//! that part of the burst and of the refill, so it decides alone about most requests. The
//! *store* keeps the parts that no gateway has, with a *level* of its own: the units in them.
//! A gateway that lacks units asks the store for parts and level. One that has more than it uses
//! gives some back when another one lacks them. Levels are counted in parts of the burst, so the
//! store needs no unit.
//!
//! The parts of all gateways and of the store add up to the whole, and each level is at most its
//! parts. So in any time *t* all gateways together admit at most the burst and the refill of *t*.
//! A number of places is divided in the same way, without levels.
//!
//! The store may lose everything at any moment. So it believes what gateways claim to have, and
//! after a loss it grants nothing until all of them have claimed ([`Beat::told`]), or until what
//! they had has ended: parts are valid for [`LIFE`] after the beat that was answered last was
//! sent. If the store does not answer any more, each of *n* gateways uses an *n*th part of each
//! limit ([`Tenure`]).

use std::time::Duration;

#[cfg(feature = "test-support")]
pub mod model;

/// The parts of a limit: a multiple of all numbers up to 16.
pub const WHOLE: u64 = 720_720;

/// The time for which parts are valid after a beat.
pub const LIFE: Duration = Duration::from_secs(3);

/// The birth of a store in which all rates begin with a full burst.
pub const BORN_FULL: u64 = 1;

/// A call of a gateway for parts of one limit. Levels are in parts of the burst.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartAsk {
    /// The place of the call among all calls of the gateway, from 1. A call that is not newer
    /// than one before it changes nothing.
    pub call: u64,
    /// The parts that the gateway has, less what it gives back with this call.
    pub claim: u64,
    /// The level that it gives back.
    pub give: u64,
    /// The level that the claimed parts have room for.
    pub room: u64,
    /// The level without which a request cannot start; zero if none waits.
    pub need_level: u64,
    /// The parts without which that level has no room; zero if none are lacking.
    pub need_parts: u64,
    /// The parts without which a grant is of no use: less is not granted.
    pub least: u64,
    /// The parts beyond `need_parts` that the gateway expects to use.
    pub spare: u64,
    /// The time in which an empty bucket of the whole rate fills, in milliseconds; zero if it
    /// never does.
    pub fill: u64,
    /// The burst of the rate, in its unit, or the number of places.
    pub size: u64,
}

impl PartAsk {
    /// Returns the parts that the gateway still lacks once it has been granted `granted` parts and
    /// `level`, and has `parts`: zero if no request lacks any. Then it also wants its spare parts.
    pub fn lacking(&self, granted: u64, level: u64, parts: u64) -> u64 {
        let level = self.need_level - self.need_level.min(level);
        let needed = self.need_parts - self.need_parts.min(granted);
        if level == 0 && needed == 0 {
            return 0;
        }
        let spare = granted - granted.min(self.need_parts);
        let spare = self.spare - self.spare.min(spare);
        level.max(needed).saturating_add(spare).min(WHOLE - parts.min(WHOLE))
    }
}

/// The answer to a [`PartAsk`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartAnswer {
    /// The parts that the gateway has after the call.
    pub parts: u64,
    /// The level that it gets.
    pub level: u64,
    /// The parts that no gateway has.
    pub free: u64,
    /// The level of these.
    pub pooled: u64,
    /// The number of gateways that have or want some.
    pub users: u64,
}

/// A gateway's word that it runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// The number of the gateway, which no earlier start had.
    pub number: u32,
    /// The number of gateways that run.
    pub gateways: u32,
    /// True until a beat of this gateway was answered.
    pub is_first: bool,
    /// The birth of the store to which the gateway has claimed all that it has; zero if none.
    pub told: u64,
}

/// The answer to a [`Beat`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BeatAnswer {
    /// The birth of the store: the time since which it knows all grants.
    pub born: u64,
    /// True if the store does not count what the gateway has claimed before.
    pub must_claim: bool,
    /// Names of the limits of which gateways lack some, each with the parts that they lack.
    pub wanted: Vec<(String, u64)>,
}

/// The way in which a gateway may use limits that are shared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartMode {
    /// The gateway has parts of the store.
    Leased,
    /// The parts have ended, and others may have them: the gateway must hear from the store
    /// first.
    Ended,
    /// The parts have ended because the store does not answer. At most an equal part of each limit
    /// may be used, and no more than the gateway had: another one may have parts a moment longer.
    Narrowed,
    /// The store does not answer, and all parts have ended everywhere. An equal part of each
    /// limit may be used.
    Divided,
}

/// The time for which a gateway may use what it has of the store. Times are those of a clock that
/// also runs while the machine sleeps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tenure {
    /// The birth of the store to which everything was claimed.
    born: u64,
    /// The time at which the beat was sent that was answered last and confirms what the gateway has.
    confirmed: Option<Duration>,
    /// The times of the first and the last beat that failed since.
    failing: Option<(Duration, Duration)>,
    /// The time at which the beat was sent after which everything is being claimed, and the birth
    /// of the store that answered it.
    claiming: Option<(Duration, u64)>,
}

/// The longest time between two beats of a gateway that was not stopped between them.
const LONGEST_STEP: Duration = Duration::from_secs(1);

impl Tenure {
    /// Returns the way in which shared limits may be used at `now`.
    pub fn mode(&self, now: Duration) -> PartMode {
        // A gateway that was stopped while it claimed does not know what others have by now.
        if self.claiming.is_some_and(|(sent, _)| now < sent + LIFE) {
            return PartMode::Leased;
        }
        let end = self.confirmed.map(|confirmed| confirmed + LIFE);
        if end.is_some_and(|end| now < end) {
            return PartMode::Leased;
        }
        let failing = self.failing.filter(|(_, last)| now < *last + LONGEST_STEP);
        match (failing, end) {
            // The gateway has tried all the time, so the store was gone when the parts ended.
            (Some((since, _)), Some(end)) if since < end => match now < end + LIFE {
                true => PartMode::Narrowed,
                false => PartMode::Divided,
            },
            (Some((since, _)), _) if now >= since + LIFE => PartMode::Divided,
            // The gateway was stopped, or has just started.
            _ => PartMode::Ended,
        }
    }

    /// Returns the birth of the store to which everything was claimed; zero if none, or if what was
    /// claimed has ended at `now`.
    pub fn told(&self, now: Duration) -> u64 {
        if self.mode(now) == PartMode::Leased { self.born } else { 0 }
    }

    /// Returns true if no beat was answered yet.
    pub fn is_new(&self) -> bool {
        self.confirmed.is_none()
    }

    /// Adopts the answer to a beat that was sent at `sent` and came at `now`. Returns true if
    /// everything must be claimed first, between [`Self::begin_claim`] and [`Self::claimed`].
    pub fn beaten(&mut self, sent: Duration, now: Duration, answer: &BeatAnswer) -> bool {
        let is_known = !answer.must_claim && answer.born == self.born;
        if is_known && self.mode(now) == PartMode::Leased {
            (self.confirmed, self.failing) = (Some(sent), None);
            return false;
        }
        true
    }

    /// Notes that everything is being claimed after the beat that was sent at `sent`. What has
    /// ended must be given up before.
    pub fn begin_claim(&mut self, sent: Duration, born: u64) {
        self.claiming = Some((sent, born));
    }

    /// Returns the birth of the store for which calls are meant.
    pub fn born(&self) -> u64 {
        self.claiming.map_or(self.born, |(_, born)| born)
    }

    /// Notes that the claim was not answered.
    pub fn end_claim(&mut self) {
        self.claiming = None;
    }

    /// Notes that everything was claimed after the beat that was sent at `sent`.
    pub fn claimed(&mut self, sent: Duration, born: u64) {
        *self = Self { born, confirmed: Some(sent), failing: None, claiming: None };
    }

    /// Notes that the store has not answered a beat, as was found at `now`.
    pub fn failed(&mut self, now: Duration) {
        let failing = self.failing.filter(|(_, last)| now < *last + LONGEST_STEP);
        self.failing = Some((failing.map_or(now, |(since, _)| since), now));
        self.claiming = None;
    }
}
