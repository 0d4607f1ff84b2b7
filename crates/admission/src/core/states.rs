//! The state of limits for readers: what each limit allows, how much of it is used, and when
//! it is whole again. Nothing here changes a decision.

use std::collections::HashMap;
use std::time::Duration;

use tollgate_domain::{
    DeviceClass, MonotonicTime, PlanLimits, Rate, TenantId, UtcDay, UtcMonth, UtcTime,
};

use super::Core;
use super::budget::budget;
use super::check::caps;
use crate::bucket::Bucket;
use crate::refusal::Limit;
use crate::scope::{Scope, ScopeLimits, ScopeState};
use crate::terms::{HeldRequests, LimitState, Moment};

impl Core {
    /// Returns the state of every limit of `scopes`, in the order of the scopes. Limits by
    /// device class are returned for each of `classes`.
    pub(crate) fn limit_states(
        &self,
        moment: Moment,
        scopes: &[ScopeLimits],
        classes: &[DeviceClass],
    ) -> Vec<LimitState> {
        // A scope that nobody has used yet has no state in memory.
        let unused = ScopeState::new(self.shared, self.slices.is_some());
        let mut states = Vec::new();
        for ScopeLimits { scope, limits, .. } in scopes {
            let state = self.scopes.get(scope).unwrap_or(&unused);
            let view = StateView { core: self, moment, scope, limits, state };
            view.counts(&mut states);
            view.budget(&mut states);
            classes.iter().for_each(|class| view.device_time(class, &mut states));
        }
        states
    }

    /// Returns the number of open holds of each tenant that has any.
    pub(crate) fn held_by_tenant(&self) -> HashMap<TenantId, HeldRequests> {
        let mut held: HashMap<TenantId, HeldRequests> = HashMap::new();
        for record in self.holds.open() {
            let tenant = &record.requester.tenant;
            // Looked up by reference first, so that only a tenant's first hold pays for a clone.
            if !held.contains_key(tenant) {
                held.insert(tenant.clone(), HeldRequests::default());
            }
            let Some(requests) = held.get_mut(tenant) else { continue };
            match record.ticket {
                Some(_) => requests.waiting += 1,
                None => requests.running += 1,
            }
        }
        held
    }
}

/// The limits of one scope with their state.
struct StateView<'a> {
    core: &'a Core,
    moment: Moment,
    scope: &'a Scope,
    /// The limits as configured now, which the state may not have seen yet.
    limits: &'a PlanLimits,
    state: &'a ScopeState,
}

impl StateView<'_> {
    /// Adds the limits that no device class divides.
    fn counts(&self, states: &mut Vec<LimitState>) {
        let PlanLimits { requests, tokens, grammar_time, concurrent, queued, .. } = *self.limits;
        let places = &self.state.places;
        let running = u64::from(places.running());
        states.extend(requests.map(|rate| self.rate(Limit::Requests, rate, &self.state.requests)));
        states.extend(tokens.map(|rate| self.rate(Limit::Tokens, rate, &self.state.tokens)));
        let forms = &self.state.grammar_time;
        states.extend(grammar_time.map(|rate| self.rate(Limit::GrammarTime, rate, forms)));
        states.extend(concurrent.map(|most| self.places(Limit::Concurrent, most, running)));
        // Requests that arrive have a place to run or to wait; which one is open yet.
        let waiting = places.taken().saturating_sub(running);
        states.extend(queued.map(|most| self.places(Limit::Queued, most, waiting)));
    }

    /// Adds the budget.
    fn budget(&self, states: &mut Vec<LimitState>) {
        let Some(left) = budget(self.limits, self.state, self.period()) else { return };
        let remaining = left.nanos_of_all();
        states.push(LimitState {
            currency: Some(left.budget.currency),
            value: left.budget.nanos,
            used: left.budget.nanos.saturating_sub(remaining),
            remaining,
            refills: Some(since(left.resets(self.moment.utc), self.moment.utc)),
            ..self.empty(Limit::BudgetPerMonth)
        });
    }

    /// Returns the calendar day and month of the moment.
    fn period(&self) -> (UtcDay, UtcMonth) {
        // The calendar of the core advances with requests, and may lie a day behind.
        let day = self.core.day.max(self.moment.utc.day());
        (day, self.core.month.max(day.month()))
    }

    /// Adds the limits on the time of devices of `class`.
    fn device_time(&self, class: &DeviceClass, states: &mut Vec<LimitState>) {
        let of_class = |state: LimitState| LimitState { class: Some(class.clone()), ..state };
        if let Some(largest) = self.limits.largest_job.limit(class) {
            let largest = largest.nanos();
            states.push(of_class(LimitState {
                value: largest,
                remaining: largest,
                ..self.empty(Limit::LargestJob)
            }));
        }
        if let Some(rate) = self.limits.device_time.limit(class) {
            let bucket = self.state.classes.get(class).and_then(|it| it.device_time.as_ref());
            states.push(of_class(self.rate(Limit::DeviceTime, rate, &bucket.cloned())));
        }
        let utc = self.moment.utc;
        for cap in caps(self.limits, self.state.classes.get(class), class, self.period()) {
            states.push(of_class(LimitState {
                value: cap.cap.nanos(),
                used: cap.cap.saturating_sub(cap.of_all).nanos(),
                remaining: cap.of_all.nanos(),
                refills: Some(since(cap.resets(utc), utc)),
                ..self.empty(cap.limit)
            }));
        }
    }

    fn rate(&self, limit: Limit, rate: Rate, bucket: &Option<Bucket>) -> LimitState {
        let now = self.moment.now;
        // On a copy: a read must not change the state on which decisions depend.
        let mut bucket = bucket.clone().unwrap_or_else(|| self.core.shared.bucket(rate, now));
        bucket.refill(now);
        bucket.adopt(rate);
        let remaining = bucket.remaining();
        LimitState {
            value: rate.per_minute,
            burst: Some(rate.burst),
            used: rate.burst.saturating_sub(remaining),
            remaining,
            // A rate of zero never refills.
            refills: Some(bucket.reset()).filter(|reset| *reset < Duration::MAX),
            ..self.empty(limit)
        }
    }

    fn places(&self, limit: Limit, most: u32, used: u64) -> LimitState {
        let value = u64::from(most);
        let used = used + u64::from(self.state.places_of_others(limit));
        LimitState { value, used, remaining: value.saturating_sub(used), ..self.empty(limit) }
    }

    fn empty(&self, limit: Limit) -> LimitState {
        LimitState {
            scope: self.scope.clone(),
            limit,
            class: None,
            currency: None,
            value: 0,
            burst: None,
            used: 0,
            remaining: 0,
            refills: None,
        }
    }
}

/// Returns the time from `utc` to `later`, or zero if that is past.
fn since(later: UtcTime, utc: UtcTime) -> Duration {
    Duration::from_nanos(later.0.saturating_sub(utc.0))
}

impl Moment {
    /// Makes a moment of the two clocks.
    pub fn new(now: MonotonicTime, utc: UtcTime) -> Self {
        Self { now, utc }
    }
}
