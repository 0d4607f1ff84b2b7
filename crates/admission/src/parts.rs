//! Parts of rates and places that move between gateways: the calls that ask a store for them. The
//! rules are in `tollgate-cluster`.

use std::collections::HashMap;
use std::fmt;

use tollgate_cluster::parts::{PartAnswer, PartAsk, PartMode};
use tollgate_domain::{DeviceClass, MonotonicTime};

use crate::admission::{Admission, Arrival, wake};
use crate::bucket::Demand;
use crate::places::Requester;
use crate::refusal::{Limit, Refusal};
use crate::scope::{Scope, ScopeLimits};

/// The name of a rate or of a number of places.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SharedLimit {
    /// Scope that the limit belongs to.
    pub scope: Scope,
    /// Kind of the limit.
    pub limit: Limit,
    /// Device class, for a rate by device class.
    pub class: Option<DeviceClass>,
}

/// A limit of which a request lacks some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartWant {
    /// The limit.
    pub(crate) shared: SharedLimit,
    /// The units that the request takes.
    pub(crate) demand: Demand,
    /// The chance to get some.
    pub(crate) chance: Chance,
}

/// The chance of a request to get the parts that it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chance {
    /// The store may have them.
    Ask,
    /// The store had nothing when it was asked last. The next beat asks again.
    Refused,
    /// The store had nothing when it was asked last, but the request may wait for a place.
    Waits,
}

/// A call for parts of a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartCall {
    /// The limit.
    pub shared: SharedLimit,
    /// The call.
    pub ask: PartAsk,
}

impl SharedLimit {
    /// Returns the name with this text, as `Display` writes it; `None` if there can be none.
    pub fn of(text: &str) -> Option<Self> {
        let mut words = text.splitn(4, ' ');
        let (limit, kind, class) = (words.next()?, words.next()?, words.next()?);
        let rates = [Limit::Requests, Limit::Tokens, Limit::DeviceTime, Limit::GrammarTime];
        let limits = rates.into_iter().chain([Limit::Concurrent, Limit::Queued]);
        let limit = { limits }.find(|known| known.as_str() == limit)?;
        let class = match class {
            "-" => None,
            class => Some(DeviceClass::new(class).ok()?),
        };
        Some(Self { scope: Scope::of(kind, words.next()?)?, limit, class })
    }
}

/// Formats the name like `tokens_per_minute tenant - acme`.
impl fmt::Display for SharedLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, limit, class } = self;
        let class = class.as_ref().map_or("-", DeviceClass::as_str);
        write!(f, "{} {} {class} {}", limit.as_str(), scope.kind(), scope.name())
    }
}

impl Admission {
    /// Makes this gateway one of several between which the parts of rates and places move. It has
    /// none at first. `mode` returns the way in which they may be used now, and is called at each
    /// use. Call this before the first admission.
    pub fn lease_parts(&self, mode: impl Fn() -> PartMode + Send + 'static) {
        let mut guarded = self.lock();
        guarded.core.lease_parts();
        guarded.part_mode = Some(Box::new(mode));
    }

    /// Enters the way in which parts may be used now. Each use does so. Call this also after each
    /// call without an answer, and before the source of the mode says that parts which may have
    /// ended are leased again: what has ended must be given up first.
    pub fn enter_part_mode(&self, now: MonotonicTime) {
        drop(self.lock_at(now));
    }

    /// Takes one request from the request rate of every scope, as [`Self::take_request`], if the
    /// parts of this gateway suffice.
    ///
    /// # Errors
    ///
    /// The parts that are lacking, if the store may have them. The inner error is that of
    /// [`Self::take_request`].
    pub fn take_request_or_ask(
        &self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Result<Result<(), Box<Refusal>>, Vec<PartWant>> {
        let mut guarded = self.lock_at(now);
        let wants = guarded.core.requests_lacking(now, scopes);
        if !wants.is_empty() {
            return Err(wants);
        }
        Ok(guarded.core.take_request(now, scopes))
    }

    /// Takes a place for a request that is still arriving, as [`Self::arrive`], if the parts of
    /// this gateway suffice.
    ///
    /// # Errors
    ///
    /// The parts that are lacking, if the store may have them. The inner error is that of
    /// [`Self::arrive`].
    pub fn arrive_or_ask(
        &self,
        now: MonotonicTime,
        requester: &Requester,
        scopes: &[ScopeLimits],
    ) -> Result<Result<Arrival, Box<Refusal>>, Vec<PartWant>> {
        // Plans without such limits need no lock.
        if scopes.iter().any(ScopeLimits::bounds_places) {
            let mut guarded = self.lock_at(now);
            let wants = guarded.core.arrival_lacking(now, requester, scopes);
            if !wants.is_empty() {
                return Err(wants);
            }
            // Under the same lock, so that no other request takes what is there.
            if let Err(refusal) = guarded.core.arrive(now, requester, scopes) {
                return Ok(Err(refusal));
            }
        }
        Ok(Ok(self.arrival(requester, scopes)))
    }

    /// Begins calls for what requests lack. Call [`Self::parts_answered`] with the answers.
    pub fn part_calls_for(&self, now: MonotonicTime, wants: &[PartWant]) -> Vec<PartCall> {
        self.lock_at(now).core.part_calls_for(now, wants)
    }

    /// Begins the calls of a beat. `wanted` are the parts that gateways lack, by limit. With
    /// `are_all`, every limit is looked at, so that what is idle goes back.
    pub fn part_calls_at_beat(
        &self,
        now: MonotonicTime,
        wanted: &HashMap<SharedLimit, u64>,
        are_all: bool,
    ) -> Vec<PartCall> {
        self.lock_at(now).core.part_calls_at_beat(now, wanted, are_all)
    }

    /// Begins the calls that tell the store what this gateway has. From now on it uses these
    /// parts as the store's.
    pub fn part_calls_to_claim(&self, now: MonotonicTime) -> Vec<PartCall> {
        self.lock_at(now).core.part_calls_to_claim(now)
    }

    /// Begins the calls of a gateway that stops: everything goes back.
    pub fn part_calls_at_stop(&self, now: MonotonicTime) -> Vec<PartCall> {
        self.lock_at(now).core.part_calls_at_stop(now)
    }

    /// Adopts the answers to calls. Waiting requests that may run now are woken.
    pub fn parts_answered<'a>(
        &self,
        now: MonotonicTime,
        answers: impl IntoIterator<Item = (&'a PartCall, PartAnswer)>,
    ) {
        let mut guarded = self.lock_at(now);
        let mut promoted = Vec::new();
        for (call, answer) in answers {
            promoted.extend(guarded.core.part_answered(now, call, &answer));
        }
        wake(guarded, &promoted);
    }
}
