//! Parts of rates that move between gateways: the calls that ask a store for them. The rules are
//! in `tollgate-cluster`.

use std::collections::HashMap;
use std::fmt;

use tollgate_cluster::rates::{PartAnswer, PartAsk, RateMode};
use tollgate_domain::{DeviceClass, MonotonicTime};

use crate::admission::Admission;
use crate::bucket::Demand;
use crate::refusal::{Limit, Refusal};
use crate::scope::{Scope, ScopeLimits};

/// The name of a rate.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RateName {
    /// Scope that the rate belongs to.
    pub scope: Scope,
    /// Kind of the rate.
    pub limit: Limit,
    /// Device class, for a rate by device class.
    pub class: Option<DeviceClass>,
}

/// A rate of which a request lacks some.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateWant {
    /// The rate.
    pub(crate) rate: RateName,
    /// The units that the request takes.
    pub(crate) demand: Demand,
    /// False if the store had nothing when it was asked last: the next beat asks again.
    pub(crate) should_ask: bool,
}

/// A call for parts of a rate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RateCall {
    /// The rate.
    pub rate: RateName,
    /// The call.
    pub ask: PartAsk,
}

impl RateName {
    /// Returns the name with this text, as `Display` writes it; `None` if there can be none.
    pub fn of(text: &str) -> Option<Self> {
        let mut words = text.splitn(4, ' ');
        let (limit, kind, class) = (words.next()?, words.next()?, words.next()?);
        let limits = [Limit::Requests, Limit::Tokens, Limit::DeviceTime, Limit::GrammarTime];
        let limit = limits.into_iter().find(|known| known.as_str() == limit)?;
        let class = match class {
            "-" => None,
            class => Some(DeviceClass::new(class).ok()?),
        };
        Some(Self { scope: Scope::of(kind, words.next()?)?, limit, class })
    }
}

/// Formats the name like `tokens_per_minute tenant - acme`.
impl fmt::Display for RateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scope, limit, class } = self;
        let class = class.as_ref().map_or("-", DeviceClass::as_str);
        write!(f, "{} {} {class} {}", limit.as_str(), scope.kind(), scope.name())
    }
}

impl Admission {
    /// Makes this gateway one of several between which the parts of rates move. It has none at
    /// first. Call this before the first admission.
    pub fn lease_rates(&self) {
        self.lock().core.lease_rates();
    }

    /// Changes the way in which rates may be used.
    pub fn enter_rate_mode(&self, now: MonotonicTime, mode: RateMode) {
        self.lock().core.enter_rate_mode(now, mode);
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
    ) -> Result<Result<(), Box<Refusal>>, Vec<RateWant>> {
        let mut guarded = self.lock();
        let wants = guarded.core.requests_lacking(now, scopes);
        if !wants.is_empty() {
            return Err(wants);
        }
        Ok(guarded.core.take_request(now, scopes))
    }

    /// Begins calls for what requests lack. Call [`Self::rates_answered`] with the answers.
    pub fn rate_calls_for(&self, now: MonotonicTime, wants: &[RateWant]) -> Vec<RateCall> {
        self.lock().core.rate_calls_for(now, wants)
    }

    /// Begins the calls of a beat. `wanted` are the parts that gateways lack, by rate. With
    /// `are_all`, every rate is looked at, so that what is idle goes back.
    pub fn rate_calls_at_beat(
        &self,
        now: MonotonicTime,
        wanted: &HashMap<RateName, u64>,
        are_all: bool,
    ) -> Vec<RateCall> {
        self.lock().core.rate_calls_at_beat(now, wanted, are_all)
    }

    /// Begins the calls that tell the store what this gateway has. From now on it uses these
    /// parts as the store's.
    pub fn rate_calls_to_claim(&self, now: MonotonicTime) -> Vec<RateCall> {
        self.lock().core.rate_calls_to_claim(now)
    }

    /// Begins the calls of a gateway that stops: everything goes back.
    pub fn rate_calls_at_stop(&self, now: MonotonicTime) -> Vec<RateCall> {
        self.lock().core.rate_calls_at_stop(now)
    }

    /// Adopts the answers to calls.
    pub fn rates_answered<'a>(
        &self,
        now: MonotonicTime,
        answers: impl IntoIterator<Item = (&'a RateCall, PartAnswer)>,
    ) {
        let mut guarded = self.lock();
        for (call, answer) in answers {
            guarded.core.rate_answered(now, call, &answer);
        }
    }
}
