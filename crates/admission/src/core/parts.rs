//! Parts of rates and places that move between gateways: what a request lacks, and the calls that
//! ask the store for it.

use std::collections::{HashMap, HashSet};

use tollgate_cluster::parts::{PartAnswer, PartAsk, PartMode};
use tollgate_domain::{DeviceClass, MonotonicTime, RequestId, Tier, UtcTime};

use super::Core;
use crate::bucket::Demand;
use crate::lease::CallReason;
use crate::parts::{Chance, PartCall, PartWant, SharedLimit};
use crate::place_lease::PlaceUse;
use crate::places::Requester;
use crate::refusal::Limit;
use crate::scope::{ScopeLimits, ScopeState};
use crate::terms::Reserve;

/// The calls of this gateway.
#[derive(Debug, Default)]
pub(super) struct PartCalls {
    newest: u64,
    /// The limits of which requests lacked more than the store had.
    starved: HashSet<SharedLimit>,
    /// True if the way in which parts may be used has changed since the newest sweep.
    has_changed: bool,
}

impl Core {
    /// Makes the parts of every rate and of all places move between gateways. This one has none
    /// at first.
    pub(crate) fn lease_parts(&mut self) {
        self.parts = Some(PartCalls::default());
        self.shared.mode = Some((PartMode::Ended, MonotonicTime::default()));
    }

    /// Returns true if a request may wait for an answer of the store.
    fn may_ask_store(&self) -> bool {
        matches!(self.shared.mode, Some((PartMode::Leased | PartMode::Ended, _)))
    }

    /// Changes the way in which parts may be used. Waiting requests that may run then are run by
    /// the next [`Self::expire`].
    pub(crate) fn enter_part_mode(&mut self, now: MonotonicTime, mode: PartMode) {
        if self.shared.mode.is_none_or(|(current, _)| current == mode) {
            return;
        }
        self.shared.mode = Some((mode, now));
        self.share(now);
        if let Some(parts) = &mut self.parts {
            parts.has_changed = true;
        }
    }

    /// Runs the waiting requests that may since the way in which parts may be used has changed.
    pub(super) fn run_after_change(&mut self) -> Vec<RequestId> {
        let changed = self.parts.as_mut().is_some_and(|it| std::mem::take(&mut it.has_changed));
        if changed { self.run_all_that_may() } else { Vec::new() }
    }

    /// Applies the terms on which gateways share rates and places to all scopes.
    pub(super) fn share(&mut self, now: MonotonicTime) {
        let shared = self.shared;
        self.scopes.values_mut().for_each(|state| state.share(shared, now));
    }

    /// Returns the parts of rates and places that a request lacks.
    pub(crate) fn parts_lacking(
        &mut self,
        now: MonotonicTime,
        utc: UtcTime,
        (request, has_arrived): (&Reserve, bool),
    ) -> Vec<PartWant> {
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
            state.parts_lacking(request, counts_request, &mut wants, limited);
            if !request.is_line {
                // A request that has arrived is counted among the taken places.
                let is_counted = has_arrived && index < request.counted && limited.bounds_places();
                state.place_lacking(limited, u64::from(!is_counted), &mut wants);
            }
        }
        self.worth_asking(wants)
    }

    /// Returns the parts of rates of requests that one more request of `scopes` lacks.
    pub(crate) fn requests_lacking(
        &mut self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Vec<PartWant> {
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

    /// Returns the parts of places that a request lacks to arrive in `scopes`.
    pub(crate) fn arrival_lacking(
        &mut self,
        now: MonotonicTime,
        requester: &Requester,
        scopes: &[ScopeLimits],
    ) -> Vec<PartWant> {
        if !self.may_ask_store() {
            return Vec::new();
        }
        let mut wants = Vec::new();
        for limited in scopes.iter().filter(|limited| limited.bounds_places()) {
            if self.make_room(now, std::slice::from_ref(limited)).is_err() {
                continue;
            }
            let state = self.scope(limited.scope.clone());
            state.refresh_requests(limited, now);
            if state.is_full(&limited.scope, requester).is_some() {
                let want = state.lacks_place(limited, Limit::Concurrent, 1);
                let want = want.filter(|want| want.chance == Chance::Ask);
                wants.extend(want.or_else(|| state.lacks_place(limited, Limit::Queued, 1)));
            }
        }
        self.worth_asking(wants)
    }

    /// Returns those of `wants` that the store may have. If it may not have all that the request
    /// cannot wait for, the request is refused, and the next beat asks for it.
    fn worth_asking(&mut self, wants: Vec<PartWant>) -> Vec<PartWant> {
        let Some(parts) = &mut self.parts else { return Vec::new() };
        for PartWant { shared, .. } in wants.iter().filter(|want| want.chance != Chance::Ask) {
            // Looked up first, so that a flood of refused requests copies no name.
            if !parts.starved.contains(shared) {
                parts.starved.insert(shared.clone());
            }
        }
        if wants.iter().any(|want| want.chance == Chance::Refused) {
            return Vec::new();
        }
        wants.into_iter().filter(|want| want.chance == Chance::Ask).collect()
    }

    /// Begins calls for what requests lack.
    pub(crate) fn part_calls_for(
        &mut self,
        now: MonotonicTime,
        wants: &[PartWant],
    ) -> Vec<PartCall> {
        let mut sums: HashMap<&SharedLimit, Demand> = HashMap::new();
        for PartWant { shared, demand, .. } in wants {
            let sum = sums.entry(shared).or_default();
            sum.expected = sum.expected.saturating_add(demand.expected);
            sum.most = sum.most.saturating_add(demand.most);
        }
        let sums = sums.into_iter();
        sums.filter_map(|(shared, sum)| self.part_call(now, shared, CallReason::Lacking(sum)))
            .collect()
    }

    /// Begins the calls of a beat. `wanted` are the parts that gateways lack, by limit. With
    /// `are_all`, every limit is looked at, so that what is idle goes back.
    pub(crate) fn part_calls_at_beat(
        &mut self,
        now: MonotonicTime,
        wanted: &HashMap<SharedLimit, u64>,
        are_all: bool,
    ) -> Vec<PartCall> {
        let Some(parts) = &mut self.parts else { return Vec::new() };
        let starved = std::mem::take(&mut parts.starved);
        let of = |shared: &SharedLimit| CallReason::Beat(wanted.get(shared).copied().unwrap_or(0));
        if are_all {
            return self.calls_of_all(now, |shared| match wanted.is_empty() {
                // Most beats need no names.
                true => CallReason::Beat(0),
                false => of(&shared()),
            });
        }
        let names: HashSet<&SharedLimit> = starved.iter().chain(wanted.keys()).collect();
        names.into_iter().filter_map(|shared| self.part_call(now, shared, of(shared))).collect()
    }

    /// Begins the calls that tell the store what this gateway has.
    pub(crate) fn part_calls_to_claim(&mut self, now: MonotonicTime) -> Vec<PartCall> {
        self.calls_of_all(now, |_| CallReason::Claim)
    }

    /// Begins the calls of a gateway that stops: everything goes back.
    pub(crate) fn part_calls_at_stop(&mut self, now: MonotonicTime) -> Vec<PartCall> {
        self.calls_of_all(now, |_| CallReason::Stop)
    }

    fn calls_of_all(
        &mut self,
        now: MonotonicTime,
        reason: impl Fn(&dyn Fn() -> SharedLimit) -> CallReason,
    ) -> Vec<PartCall> {
        let Some(calls) = &mut self.parts else { return Vec::new() };
        let mut made = Vec::new();
        for (scope, state) in &mut self.scopes {
            for (limit, class, bucket) in state.buckets().filter(|it| !it.2.is_unused()) {
                let name = || SharedLimit { scope: scope.clone(), limit, class: class.cloned() };
                let Some(ask) = bucket.ask(calls.newest + 1, now, reason(&name)) else {
                    continue;
                };
                calls.newest += 1;
                made.push(PartCall { shared: name(), ask });
            }
            for limit in [Limit::Concurrent, Limit::Queued] {
                let name = || SharedLimit { scope: scope.clone(), limit, class: None };
                let number = calls.newest + 1;
                let ask = state.ask_places(limit, number, now, || reason(&name));
                if let Some(ask) = ask {
                    calls.newest += 1;
                    made.push(PartCall { shared: name(), ask });
                }
            }
        }
        made
    }

    /// Adopts the answer to a call. Returns the waiting requests that run now.
    pub(crate) fn part_answered(
        &mut self,
        now: MonotonicTime,
        call: &PartCall,
        answer: &PartAnswer,
    ) -> Vec<RequestId> {
        let PartCall { shared: SharedLimit { scope, limit, class }, ask } = call;
        let Some(state) = self.scopes.get_mut(scope) else { return Vec::new() };
        if let Some(lease) = state.place_lease(*limit) {
            lease.answered(ask, answer);
            // Requests may wait for what is lacking, so the next beat asks again.
            if lease.is_starved()
                && let Some(parts) = &mut self.parts
            {
                parts.starved.insert(call.shared.clone());
            }
            return self.promote_in(scope);
        }
        if let Some(bucket) = state.bucket(*limit, class.as_ref()) {
            bucket.answered(now, ask, answer);
        }
        Vec::new()
    }

    fn part_call(
        &mut self,
        now: MonotonicTime,
        shared: &SharedLimit,
        reason: CallReason,
    ) -> Option<PartCall> {
        let calls = self.parts.as_mut()?;
        let SharedLimit { scope, limit, class } = shared;
        let (state, number) = (self.scopes.get_mut(scope)?, calls.newest + 1);
        let ask = match limit {
            Limit::Concurrent | Limit::Queued => {
                state.ask_places(*limit, number, now, || reason)?
            }
            _ => state.bucket(*limit, class.as_ref())?.ask(number, now, reason)?,
        };
        calls.newest += 1;
        Some(PartCall { shared: shared.clone(), ask })
    }
}

impl ScopeState {
    /// Adds the parts of rates that a request lacks here.
    fn parts_lacking(
        &mut self,
        request: &Reserve,
        counts_request: bool,
        wants: &mut Vec<PartWant>,
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
        wants: &mut Vec<PartWant>,
    ) {
        let bucket = self.bucket(limit, class);
        if let Some(should_ask) = bucket.and_then(|bucket| bucket.lacks(demand)) {
            let (scope, class) = (limited.scope.clone(), class.cloned());
            let chance = if should_ask { Chance::Ask } else { Chance::Refused };
            wants.push(PartWant { shared: SharedLimit { scope, limit, class }, demand, chance });
        }
    }

    /// Adds the part of places without which a request can neither run nor wait here. `more` is zero
    /// for a request that is counted among those that arrive.
    fn place_lacking(&mut self, limited: &ScopeLimits, more: u64, wants: &mut Vec<PartWant>) {
        if self.has_place() {
            return;
        }
        let running = self.lacks_place(limited, Limit::Concurrent, more);
        if let Some(want) = running {
            let may_get = want.chance == Chance::Ask;
            // Without a place now, the request waits for one.
            let chance = if may_get { Chance::Ask } else { Chance::Waits };
            wants.push(PartWant { chance, ..want });
            if may_get {
                return;
            }
        }
        if !self.has_room() {
            wants.extend(self.lacks_place(limited, Limit::Queued, 1));
        }
    }

    /// Returns the part of a limit on places that one more request lacks, if every place of this
    /// gateway is taken and other gateways or the store have more.
    fn lacks_place(&mut self, limited: &ScopeLimits, limit: Limit, more: u64) -> Option<PartWant> {
        let most = self.place_limit(limit)?;
        let should_ask = self.place_lease(limit)?.lacks(most)?;
        let shared = SharedLimit { scope: limited.scope.clone(), limit, class: None };
        let chance = if should_ask { Chance::Ask } else { Chance::Refused };
        Some(PartWant { shared, demand: Demand::exact(more), chance })
    }

    /// Begins a call for parts of a limit on places, if one is due.
    fn ask_places(
        &mut self,
        limit: Limit,
        number: u64,
        now: MonotonicTime,
        reason: impl FnOnce() -> CallReason,
    ) -> Option<PartAsk> {
        // What is left of a limit that a reload has removed is idle, and goes back.
        let removed = PlaceUse { limit: 1, ..PlaceUse::default() };
        let places = self.place_use(limit).unwrap_or(removed);
        let lease = self.place_lease(limit)?;
        // A limit that was never used here needs no call. Only a request begins one.
        let reason = reason();
        let is_new = lease.is_unused() && places.taken == 0;
        if is_new && !matches!(reason, CallReason::Lacking(_)) {
            return None;
        }
        lease.ask(number, now, reason, places)
    }
}
