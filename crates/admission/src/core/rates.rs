//! Parts of rates that move between gateways: what a request lacks, and the calls that ask the
//! store for it.

use std::collections::{HashMap, HashSet};

use tollgate_cluster::rates::{PartAnswer, RateMode};
use tollgate_domain::{DeviceClass, MonotonicTime, Tier, UtcTime};

use super::Core;
use crate::bucket::Demand;
use crate::lease::CallReason;
use crate::rates::{RateCall, RateName, RateWant};
use crate::refusal::Limit;
use crate::scope::{ScopeLimits, ScopeState};
use crate::terms::Reserve;

/// The calls of this gateway.
#[derive(Debug, Default)]
pub(super) struct PartCalls {
    newest: u64,
    /// The rates of which requests lacked more than the store had.
    starved: HashSet<RateName>,
}

impl Core {
    /// Makes the parts of every rate move between gateways. This one has none at first.
    pub(crate) fn lease_rates(&mut self) {
        self.parts = Some(PartCalls::default());
        self.shared.mode = Some((RateMode::Ended, MonotonicTime::default()));
    }

    /// Returns true if a request may wait for an answer of the store.
    fn may_ask_store(&self) -> bool {
        matches!(self.shared.mode, Some((RateMode::Leased | RateMode::Ended, _)))
    }

    /// Changes the way in which rates may be used.
    pub(crate) fn enter_rate_mode(&mut self, now: MonotonicTime, mode: RateMode) {
        if self.shared.mode.is_none_or(|(current, _)| current == mode) {
            return;
        }
        self.shared.mode = Some((mode, now));
        self.share(now);
    }

    /// Applies the terms on which gateways share rates and places to all scopes.
    pub(super) fn share(&mut self, now: MonotonicTime) {
        let shared = self.shared;
        self.scopes.values_mut().for_each(|state| state.share(shared, now));
    }

    /// Returns the parts of rates that a request lacks.
    pub(crate) fn rates_lacking(
        &mut self,
        now: MonotonicTime,
        utc: UtcTime,
        request: &Reserve,
    ) -> Vec<RateWant> {
        if !self.may_ask_store() {
            return Vec::new();
        }
        self.see(utc);
        let period = (self.day, self.month);
        let mut wants = Vec::new();
        for (index, limited) in request.scopes.iter().enumerate() {
            // Where there is no room for a state, the reservation that follows is refused.
            if self.make_room(now, std::slice::from_ref(limited)).is_err() {
                continue;
            }
            let state = self.scope(limited.scope.clone());
            state.refresh(limited, &request.class, now, period);
            let counts_request = index >= request.counted && !request.is_line;
            state.rates_lacking(request, counts_request, &mut wants, limited);
        }
        self.worth_asking(wants)
    }

    /// Returns the parts of rates of requests that one more request of `scopes` lacks.
    pub(crate) fn requests_lacking(
        &mut self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Vec<RateWant> {
        if !self.may_ask_store() {
            return Vec::new();
        }
        let mut wants = Vec::new();
        for limited in scopes.iter().filter(|limited| limited.limits.requests.is_some()) {
            if self.make_room(now, std::slice::from_ref(limited)).is_err() {
                continue;
            }
            let state = match self.scopes.get_mut(&limited.scope) {
                Some(state) => state,
                // Only a first request pays for the clone of the scope's name.
                None => self.scope(limited.scope.clone()),
            };
            state.refresh_requests(limited, now);
            state.lacks(limited, (Limit::Requests, None), Demand::exact(1), &mut wants);
        }
        self.worth_asking(wants)
    }

    /// Returns `wants` if the store may have all of them. Otherwise the request is refused, and
    /// the next beat asks for it.
    fn worth_asking(&mut self, wants: Vec<RateWant>) -> Vec<RateWant> {
        let Some(parts) = &mut self.parts else { return Vec::new() };
        let mut is_starved = false;
        for RateWant { rate, .. } in wants.iter().filter(|want| !want.should_ask) {
            is_starved = true;
            // Looked up first, so that a flood of refused requests copies no name.
            if !parts.starved.contains(rate) {
                parts.starved.insert(rate.clone());
            }
        }
        if is_starved { Vec::new() } else { wants }
    }

    /// Begins calls for what requests lack.
    pub(crate) fn rate_calls_for(
        &mut self,
        now: MonotonicTime,
        wants: &[RateWant],
    ) -> Vec<RateCall> {
        let mut sums: HashMap<&RateName, Demand> = HashMap::new();
        for RateWant { rate, demand, .. } in wants {
            let sum = sums.entry(rate).or_default();
            sum.expected = sum.expected.saturating_add(demand.expected);
            sum.most = sum.most.saturating_add(demand.most);
        }
        let sums = sums.into_iter();
        sums.filter_map(|(rate, sum)| self.rate_call(now, rate, CallReason::Lacking(sum))).collect()
    }

    /// Begins the calls of a beat. `wanted` are the parts that gateways lack, by rate. With
    /// `are_all`, every rate is looked at, so that what is idle goes back.
    pub(crate) fn rate_calls_at_beat(
        &mut self,
        now: MonotonicTime,
        wanted: &HashMap<RateName, u64>,
        are_all: bool,
    ) -> Vec<RateCall> {
        let Some(parts) = &mut self.parts else { return Vec::new() };
        let starved = std::mem::take(&mut parts.starved);
        let of = |rate: &RateName| CallReason::Beat(wanted.get(rate).copied().unwrap_or(0));
        if are_all {
            return self.calls_of_all(now, |rate| match wanted.is_empty() {
                // Most beats need no names.
                true => CallReason::Beat(0),
                false => of(&rate()),
            });
        }
        let names: HashSet<&RateName> = starved.iter().chain(wanted.keys()).collect();
        names.into_iter().filter_map(|rate| self.rate_call(now, rate, of(rate))).collect()
    }

    /// Begins the calls that tell the store what this gateway has. The parts may be used as the
    /// store's from now on.
    pub(crate) fn rate_calls_to_claim(&mut self, now: MonotonicTime) -> Vec<RateCall> {
        self.enter_rate_mode(now, RateMode::Leased);
        self.calls_of_all(now, |_| CallReason::Claim)
    }

    /// Begins the calls of a gateway that stops: everything goes back.
    pub(crate) fn rate_calls_at_stop(&mut self, now: MonotonicTime) -> Vec<RateCall> {
        self.calls_of_all(now, |_| CallReason::Stop)
    }

    fn calls_of_all(
        &mut self,
        now: MonotonicTime,
        reason: impl Fn(&dyn Fn() -> RateName) -> CallReason,
    ) -> Vec<RateCall> {
        let Some(calls) = &mut self.parts else { return Vec::new() };
        let mut made = Vec::new();
        for (scope, state) in &mut self.scopes {
            for (limit, class, bucket) in state.buckets().filter(|it| !it.2.is_unused()) {
                let name = || RateName { scope: scope.clone(), limit, class: class.cloned() };
                let Some(ask) = bucket.ask(calls.newest + 1, now, reason(&name)) else {
                    continue;
                };
                calls.newest += 1;
                made.push(RateCall { rate: name(), ask });
            }
        }
        made
    }

    /// Adopts the answer to a call.
    pub(crate) fn rate_answered(
        &mut self,
        now: MonotonicTime,
        call: &RateCall,
        answer: &PartAnswer,
    ) {
        let RateCall { rate: RateName { scope, limit, class }, ask } = call;
        let Some(state) = self.scopes.get_mut(scope) else { return };
        let Some(bucket) = state.bucket(*limit, class.as_ref()) else { return };
        bucket.answered(now, ask, answer);
    }

    fn rate_call(
        &mut self,
        now: MonotonicTime,
        rate: &RateName,
        reason: CallReason,
    ) -> Option<RateCall> {
        let calls = self.parts.as_mut()?;
        let RateName { scope, limit, class } = rate;
        let bucket = self.scopes.get_mut(scope)?.bucket(*limit, class.as_ref())?;
        let ask = bucket.ask(calls.newest + 1, now, reason)?;
        calls.newest += 1;
        Some(RateCall { rate: rate.clone(), ask })
    }
}

impl ScopeState {
    /// Adds the parts of rates that a request lacks here.
    fn rates_lacking(
        &mut self,
        request: &Reserve,
        counts_request: bool,
        wants: &mut Vec<RateWant>,
        limited: &ScopeLimits,
    ) {
        let Reserve { estimate, class, .. } = request;
        if counts_request {
            self.lacks(limited, (Limit::Requests, None), Demand::exact(1), wants);
        }
        if request.tier == Tier::Interactive {
            let time = (Limit::DeviceTime, Some(class));
            self.lacks(limited, (Limit::Tokens, None), estimate.demand_of_tokens(), wants);
            self.lacks(limited, time, estimate.demand_of_time(), wants);
        }
        if !estimate.grammar_time.is_zero() {
            let demand = estimate.demand_of_grammar_time();
            self.lacks(limited, (Limit::GrammarTime, None), demand, wants);
        }
    }

    /// Adds the parts that `demand` lacks of a limit.
    fn lacks(
        &mut self,
        limited: &ScopeLimits,
        (limit, class): (Limit, Option<&DeviceClass>),
        demand: Demand,
        wants: &mut Vec<RateWant>,
    ) {
        let bucket = self.bucket(limit, class);
        if let Some(should_ask) = bucket.and_then(|bucket| bucket.lacks(demand)) {
            let (scope, class) = (limited.scope.clone(), class.cloned());
            wants.push(RateWant { rate: RateName { scope, limit, class }, demand, should_ask });
        }
    }
}
