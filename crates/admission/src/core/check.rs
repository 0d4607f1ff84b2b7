//! Checks of all limits for one request, without taking anything. All scopes are checked,
//! narrowest first. The refusal returned is the one that binds longest, so its
//! `retry_after` holds for all limits.

use std::time::Duration;

use tollgate_domain::{
    Currency, DeviceClass, DeviceNanos, ExactAmount, PlanLimits, Tier, UtcDay, UtcMonth, UtcTime,
};

use super::Core;
use super::budget::{Bounds, budget_of};
use super::holds::HoldRecord;
use crate::bucket::{Bucket, Demand, Fit, NEXT_BEAT};
use crate::cap::Spend;
use crate::figures::{CapFigures, Figures, RateFigures, tighten};
use crate::places::Requester;
use crate::refusal::{Limit, Refusal};
use crate::scope::{ClassState, Scope, ScopeState};
use crate::terms::{Estimate, HoldState, Reserve};

/// The amounts to take: the state of the hold, the amounts to hold against all caps, if any
/// applies, and the requests that lose their places.
pub(super) struct Decision {
    pub(super) hold_state: HoldState,
    pub(super) bounds: Bounds,
    /// Tickets of the waiting requests that give way to this one, each with the scope whose
    /// queue is full.
    pub(super) give_way: Vec<(u64, Scope)>,
}

/// Returns true if a cap applies to this class of device.
pub(crate) fn is_capped(limits: &PlanLimits, class: &DeviceClass) -> bool {
    limits.device_time_per_day.limit(class).is_some()
        || limits.device_time_per_month.limit(class).is_some()
}

/// One of the gateway's own bounds, and its use.
pub(super) struct Capacity {
    pub(super) bound: usize,
    pub(super) used: usize,
    pub(super) asked: usize,
}

/// Returns the refusal for one of the gateway's own bounds.
pub(super) fn capacity_refusal(capacity: Capacity) -> Refusal {
    let Capacity { bound, used, asked } = capacity;
    Found {
        limit: Limit::Capacity,
        value: bound as u64,
        largest: bound as u64,
        asked: asked as u64,
        remaining: bound.saturating_sub(used) as u64,
        until: Until::Someone,
        currency: None,
    }
    .refusal(&Scope::Gateway, None)
}

impl Core {
    /// Checks every limit of a request but the caps.
    pub(super) fn passes_without_caps(&self, utc: UtcTime, request: &Reserve) -> bool {
        self.check_limits(utc, request, Caps::Ignored).is_ok()
    }

    /// Checks every limit of a request.
    pub(super) fn check(&self, utc: UtcTime, request: &Reserve) -> Result<Decision, Box<Refusal>> {
        self.check_limits(utc, request, Caps::Checked)
    }

    fn check_limits(
        &self,
        utc: UtcTime,
        request: &Reserve,
        caps: Caps,
    ) -> Result<Decision, Box<Refusal>> {
        let states: Vec<(&Scope, &ScopeState)> = request
            .scopes
            .iter()
            // `reserve` has created the state of every scope.
            .filter_map(|limited| self.scopes.get_key_value(&limited.scope))
            .collect();
        // A request runs only if every scope has a place for it.
        let hold_state = if request.is_line || states.iter().all(|(_, state)| state.has_place()) {
            HoldState::Running
        } else {
            HoldState::Queued
        };
        let mut worst: Option<Refusal> = None;
        let mut longest: Option<Duration> = None;
        let mut give_way: Vec<(u64, Scope)> = Vec::new();
        for (index, (scope, state)) in states.iter().enumerate() {
            let is_counted = index < request.counted;
            let waits_with_others = hold_state == HoldState::Queued && scope.is_shared();
            let (day, month) = (self.day, self.month);
            let look = Look { state, request, is_counted, waits_with_others, day, month, utc };
            if is_counted
                && !request.is_line
                && let Some(bucket) = &state.requests
                && let Fit::After(wait) = bucket.fit(Demand::exact(1))
            {
                // A refused request comes again as a new request, which these rates must
                // allow too.
                longest = longest.max(Some(wait));
            }
            let mut found = Vec::new();
            if hold_state == HoldState::Queued {
                match self.room_to_wait(scope, state, &request.requester, &give_way) {
                    Room::Free => {}
                    Room::After(ticket) => give_way.push((ticket, (*scope).clone())),
                    Room::None(refused) => found.push(refused),
                }
            }
            look.rates(&mut found);
            look.largest_job(&mut found);
            if caps == Caps::Checked {
                look.caps(&mut found);
                look.budget(&mut found);
            }
            for found in found {
                let refusal = found.refusal(scope, Some(&request.class));
                // A scope that refuses longer may not be the worst one: a permanent refusal
                // has no time.
                longest = longest.max(refusal.retry_after);
                // Strictly greater, so that the narrower scope wins a tie.
                if worst.as_ref().is_none_or(|worst| refusal.weight() > worst.weight()) {
                    worst = Some(refusal);
                }
            }
        }
        if let Some(mut refusal) = worst {
            // No time is given if time alone does not help.
            refusal.retry_after = refusal.retry_after.and(longest);
            let scopes = states.iter().map(|(scope, _)| *scope);
            refusal.figures = self.figures(scopes, &request.class, utc).of(&request.estimate);
            return Err(Box::new(refusal));
        }
        let left = states
            .iter()
            .flat_map(|(_, state)| caps_of(state, &request.class, (self.day, self.month)))
            // The tightest cap is the budget: the worker stops before any cap is exceeded.
            .map(|cap| cap.remaining)
            .min();
        let time = left.map(|left| left.min(request.estimate.worst));
        let money = states.iter().filter_map(|(_, state)| budget_of(state, (self.day, self.month)));
        let money = money.map(|budget| budget.remaining).min();
        let bounds = Bounds::within(&request.estimate, time, money);
        Ok(Decision { hold_state, bounds, give_way })
    }

    /// Looks for room to wait in `scope`. The requests of `give_way` will leave it.
    fn room_to_wait(
        &self,
        scope: &Scope,
        state: &ScopeState,
        requester: &Requester,
        give_way: &[(u64, Scope)],
    ) -> Room {
        if state.has_room() {
            return Room::Free;
        }
        // A request that gives way in one scope leaves all of its scopes.
        let leaves = |ticket| {
            let record = self.tickets.get(ticket).and_then(|id| self.holds.get(id));
            record.is_some_and(|record| record.scopes.iter().any(|held| held.scope == *scope))
        };
        if give_way.iter().any(|(ticket, _)| leaves(ticket)) {
            return Room::Free;
        }
        let ticket = state.places.gives_way_to(&requester.member_of(scope));
        ticket.map_or_else(|| Room::None(state.without_room()), Room::After)
    }

    /// Returns the refusal for a waiting request that gives way in `scope`.
    pub(super) fn gave_way(&self, scope: &Scope, record: &HoldRecord, utc: UtcTime) -> Refusal {
        let queued = self.scopes.get(scope).and_then(|state| state.limits.queued).unwrap_or(0);
        let mut refusal = ScopeState::queue_is_full(queued).refusal(scope, None);
        let scopes = record.scopes.iter().map(|held| &held.scope);
        refusal.figures = self.figures(scopes, &record.class, utc).of(&record.estimate);
        refusal
    }

    /// Returns the tightest figures over several scopes.
    pub(super) fn figures<'a>(
        &self,
        scopes: impl Iterator<Item = &'a Scope>,
        class: &DeviceClass,
        utc: UtcTime,
    ) -> Figures {
        let mut figures = Figures::default();
        for state in scopes.filter_map(|scope| self.scopes.get(scope)) {
            let of = |bucket: &Option<Bucket>| bucket.as_ref().map(RateFigures::of);
            tighten(&mut figures.requests, of(&state.requests), |rate| rate.remaining);
            tighten(&mut figures.tokens, of(&state.tokens), |rate| rate.remaining);
            tighten(&mut figures.grammar_time, of(&state.grammar_time), |rate| rate.remaining);
            if let Some(of_class) = state.classes.get(class) {
                tighten(&mut figures.device_time, of(&of_class.device_time), |rate| rate.remaining);
            }
            for cap in caps_of(state, class, (self.day, self.month)) {
                let kept = match cap.limit {
                    Limit::DeviceTimePerDay => &mut figures.day,
                    _ => &mut figures.month,
                };
                let reset = Duration::from_nanos(cap.resets(utc).0.saturating_sub(utc.0));
                let found = CapFigures { cap: cap.cap, remaining: cap.of_all, reset };
                tighten(kept, Some(found), |cap| cap.remaining);
            }
        }
        figures
    }
}

/// The room for a request to wait in one scope.
enum Room {
    /// There is room.
    Free,
    /// There is room if the request with this ticket gives way.
    After(u64),
    /// There is none.
    None(Found),
}

/// The part of the caps in a check.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Caps {
    Checked,
    Ignored,
}

/// The limits of one scope, seen by one request.
struct Look<'a> {
    state: &'a ScopeState,
    request: &'a Reserve,
    /// True if the scope's request rate has counted the request before.
    is_counted: bool,
    /// True if the request must wait, and the scope is not one tenant's alone.
    waits_with_others: bool,
    day: UtcDay,
    month: UtcMonth,
    utc: UtcTime,
}

impl Look<'_> {
    fn rates(&self, found: &mut Vec<Found>) {
        let estimate = &self.request.estimate;
        let device_time = self
            .state
            .classes
            .get(&self.request.class)
            .and_then(|of_class| of_class.device_time.as_ref());
        let takes_request = !self.is_counted && !self.request.is_line;
        let requests = self.state.requests.as_ref().filter(|_| takes_request);
        // Batch work takes nothing from these rates: it uses only what interactive work leaves.
        let costs = self.request.tier == Tier::Interactive;
        let has_form = !estimate.grammar_time.is_zero();
        for (limit, bucket, asked) in [
            (Limit::Requests, requests, Demand::exact(1)),
            (
                Limit::Tokens,
                self.state.tokens.as_ref().filter(|_| costs),
                estimate.demand_of_tokens(),
            ),
            (Limit::DeviceTime, device_time.filter(|_| costs), estimate.demand_of_time()),
            (
                Limit::GrammarTime,
                // A debt of forms refuses no request without one.
                self.state.grammar_time.as_ref().filter(|_| has_form),
                estimate.demand_of_grammar_time(),
            ),
        ] {
            let Some(bucket) = bucket else { continue };
            let refused = refused_by(limit, bucket, asked).or_else(|| {
                let may_wait = !self.waits_with_others || bucket.may_wait(asked);
                (!may_wait).then(|| found_in(limit, bucket, asked, Until::Someone))
            });
            found.extend(refused);
        }
    }

    fn largest_job(&self, found: &mut Vec<Found>) {
        let Reserve { class, estimate, .. } = self.request;
        if let Some(largest) = self.state.limits.largest_job.limit(class)
            && estimate.worst > largest
        {
            found.push(Found {
                limit: Limit::LargestJob,
                value: largest.nanos(),
                largest: largest.nanos(),
                asked: estimate.worst.nanos(),
                remaining: largest.nanos(),
                until: Until::Never,
                currency: None,
            });
        }
    }

    /// Checks the caps in device time.
    fn caps(&self, found: &mut Vec<Found>) {
        let Reserve { class, estimate, .. } = self.request;
        // At least 1 ns, so that an exhausted cap also refuses a request without cost.
        let least = estimate.least.max(DeviceNanos(1));
        for cap in caps_of(self.state, class, (self.day, self.month)) {
            if cap.remaining >= least {
                continue;
            }
            // A request larger than the whole cap does not fit in any period.
            let until = if least > cap.cap {
                Until::Never
            } else if self.request.is_line && cap.without_holds >= least {
                // The lines that run hold their longest answers, and most give much of it back.
                Until::Someone
            } else if cap.may_get_more {
                // Other gateways give back what they do not need at their next beats.
                Until::Wait(NEXT_BEAT)
            } else {
                Until::Reset(cap.resets(self.utc), self.utc)
            };
            found.push(Found {
                limit: cap.limit,
                value: cap.cap.nanos(),
                largest: cap.cap.nanos(),
                asked: least.nanos(),
                remaining: cap.remaining.nanos(),
                until,
                currency: None,
            });
        }
    }

    /// Checks the budget.
    fn budget(&self, found: &mut Vec<Found>) {
        let Some(budget) = budget_of(self.state, (self.day, self.month)) else { return };
        let Estimate { least, money, .. } = &self.request.estimate;
        // At least something, so that an exhausted budget also refuses a request without cost.
        let least = money.cost(*least, money.least_output).max(ExactAmount(1));
        if budget.remaining >= least {
            return;
        }
        let until = if least > ExactAmount::of_nanos(budget.budget.nanos) {
            Until::Never
        } else if self.request.is_line && budget.without_holds >= least {
            Until::Someone
        } else if budget.may_get_more {
            Until::Wait(NEXT_BEAT)
        } else {
            Until::Reset(budget.resets(self.utc), self.utc)
        };
        found.push(Found {
            limit: Limit::BudgetPerMonth,
            value: budget.budget.nanos,
            largest: budget.budget.nanos,
            // Rounded up, and the rest down: the shown figures must not say that the request fits.
            asked: u64::try_from(least.ceil().0).unwrap_or(u64::MAX),
            remaining: budget.remaining_nanos(),
            until,
            currency: Some(budget.budget.currency),
        });
    }
}

impl ScopeState {
    /// Returns true if one more request may run or wait.
    pub(super) fn has_room(&self) -> bool {
        let has_room = |queued| (self.places.waiting() as u64) < u64::from(queued);
        self.has_place() || self.queued().is_none_or(has_room)
    }

    /// Returns the reason of a refusal if there is no room to run and none to wait.
    fn without_room(&self) -> Found {
        // The limits of all gateways: the parts of this one concern no client.
        let queued = self.limits.queued.unwrap_or(0);
        match self.limits.concurrent {
            // No queue is set, so the refusal names the limit on running requests.
            Some(concurrent) if queued == 0 => {
                let (limit, value) = (Limit::Concurrent, u64::from(concurrent));
                let until = Until::Someone;
                Found {
                    limit,
                    value,
                    largest: value,
                    asked: 1,
                    remaining: 0,
                    until,
                    currency: None,
                }
            }
            _ => Self::queue_is_full(queued),
        }
    }

    /// Returns the reason of a refusal if `queued` requests wait.
    fn queue_is_full(queued: u32) -> Found {
        let (limit, until, value) = (Limit::Queued, Until::Someone, u64::from(queued));
        Found { limit, value, largest: value, asked: 1, remaining: 0, until, currency: None }
    }

    /// Returns the refusal if the requests that run, wait and arrive have every place to
    /// run and to wait, and no other member of the scope has more of them than `requester`.
    pub(super) fn is_full(&self, scope: &Scope, requester: &Requester) -> Option<Refusal> {
        let (concurrent, queued) = (self.concurrent()?, self.queued()?);
        let places = u64::from(concurrent) + u64::from(queued);
        let is_full = self.places.taken() >= places
            && !self.places.yields_to_arrival_of(&requester.member_of(scope));
        is_full.then(|| self.without_room().refusal(scope, None))
    }

    /// Returns the refusal if the request rate allows no request. The bucket must have
    /// been refreshed.
    pub(super) fn requests_are_spent(&self, scope: &Scope) -> Option<Refusal> {
        let found = refused_by(Limit::Requests, self.requests.as_ref()?, Demand::exact(1))?;
        Some(found.refusal(scope, None))
    }
}

/// Returns the reason for which a bucket cannot give a demand, or `None` if it can.
fn refused_by(limit: Limit, bucket: &Bucket, demand: Demand) -> Option<Found> {
    let until = match bucket.fit(demand) {
        Fit::Now => return None,
        Fit::After(wait) => Until::Wait(wait),
        Fit::AfterAnother => Until::Someone,
        Fit::Never => Until::Never,
        // The most of the request is too large, and not its expected cost.
        Fit::NeverSoMuch => {
            let (asked, largest) = (demand.most, bucket.largest_most());
            return Some(Found { asked, largest, ..found_in(limit, bucket, demand, Until::Never) });
        }
    };
    Some(found_in(limit, bucket, demand, until))
}

/// Returns a refusal by a bucket with the figures of the bucket.
fn found_in(limit: Limit, bucket: &Bucket, demand: Demand, until: Until) -> Found {
    let (rate, remaining) = (bucket.rate(), bucket.remaining());
    let (value, largest, asked) = (rate.per_minute, rate.burst, demand.expected);
    Found { limit, value, largest, asked, remaining, until, currency: None }
}

/// The condition under which a refused request can pass.
enum Until {
    /// Never.
    Never,
    /// Another request must end first.
    Someone,
    /// Enough time must pass.
    Wait(Duration),
    /// The next calendar period must begin. The second value is the time now.
    Reset(UtcTime, UtcTime),
}

/// A limit that refuses the request.
struct Found {
    limit: Limit,
    value: u64,
    largest: u64,
    asked: u64,
    remaining: u64,
    until: Until,
    currency: Option<Currency>,
}

impl Found {
    fn refusal(self, scope: &Scope, class: Option<&DeviceClass>) -> Refusal {
        let Self { limit, value, largest, asked, remaining, until, currency } = self;
        let (retry_after, resets, permanent) = match until {
            Until::Never => (None, None, true),
            Until::Someone => (None, None, false),
            Until::Wait(wait) => (Some(wait), None, false),
            Until::Reset(resets, utc) => {
                let wait = Duration::from_nanos(resets.0.saturating_sub(utc.0));
                // Permanent for this period: a retry before the reset is useless.
                (Some(wait), Some(resets), true)
            }
        };
        Refusal {
            limit,
            scope: scope.clone(),
            // Only limits of device time belong to a class.
            class: class.filter(|_| limit.is_device_time()).cloned(),
            currency,
            value,
            largest,
            asked,
            remaining,
            retry_after,
            resets,
            permanent,
            figures: Figures::default(),
        }
    }
}

/// One calendar cap of a scope and the rest of it.
pub(super) struct Cap {
    pub(super) limit: Limit,
    pub(super) cap: DeviceNanos,
    pub(super) remaining: DeviceNanos,
    /// The rest if every open hold is given back unused.
    without_holds: DeviceNanos,
    /// The rest for all gateways together.
    pub(super) of_all: DeviceNanos,
    /// True if the database may have more of the cap later in the period.
    may_get_more: bool,
    next: UtcDay,
}

impl Cap {
    /// Returns the start of the next period, but never a time before `utc`.
    pub(super) fn resets(&self, utc: UtcTime) -> UtcTime {
        self.next.start().max(utc)
    }
}

/// Returns the caps of a scope for `class` in this calendar period.
fn caps_of(
    state: &ScopeState,
    class: &DeviceClass,
    period: (UtcDay, UtcMonth),
) -> impl Iterator<Item = Cap> {
    caps(&state.limits, state.classes.get(class), class, period)
}

/// Returns the caps of `limits` for `class` in this calendar period. `of_class` has the spend.
pub(super) fn caps(
    limits: &PlanLimits,
    of_class: Option<&ClassState>,
    class: &DeviceClass,
    (day, month): (UtcDay, UtcMonth),
) -> impl Iterator<Item = Cap> {
    let rest = |limit, cap, (spend, period): (Option<&Spend<DeviceNanos>>, u32), next| {
        // The state may not have seen the period yet.
        let spend = spend.map_or_else(|| Spend::default().view(period), |spend| spend.view(period));
        Cap {
            limit,
            cap,
            remaining: spend.remaining(cap),
            without_holds: spend.remaining_without_holds(cap),
            of_all: spend.remaining_of_all(cap),
            may_get_more: spend.may_get_more(),
            next,
        }
    };
    let of_day = limits.device_time_per_day.limit(class).map(|cap| {
        let spend = (of_class.map(|class| &class.day), day.0);
        rest(Limit::DeviceTimePerDay, cap, spend, UtcDay(day.0.saturating_add(1)))
    });
    let of_month = limits.device_time_per_month.limit(class).map(|cap| {
        let spend = (of_class.map(|class| &class.month), month.0);
        rest(Limit::DeviceTimePerMonth, cap, spend, first_day_after(day, month))
    });
    of_day.into_iter().chain(of_month)
}

/// Returns the first day of the month after `month`. `day` is a day in `month`.
pub(super) fn first_day_after(day: UtcDay, month: UtcMonth) -> UtcDay {
    let mut next = day;
    // At most 31 rounds; none if the calendar is ahead of the day.
    for _ in 0..31 {
        if next.month() > month {
            break;
        }
        next = UtcDay(next.0.saturating_add(1));
    }
    next
}
