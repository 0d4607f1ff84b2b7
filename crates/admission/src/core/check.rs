//! Checks of all limits for one request, without taking anything. All scopes are checked,
//! narrowest first. The refusal returned is the one that binds longest, so its
//! `retry_after` holds for all limits.

use std::time::Duration;

use tollgate_domain::{
    DeviceClass, DeviceNanos, MonotonicTime, PlanLimits, Rate, UtcDay, UtcMonth, UtcTime,
};

use super::Core;
use crate::bucket::Bucket;
use crate::cap::Spend;
use crate::figures::{CapFigures, Figures, RateFigures, tighten};
use crate::refusal::{Limit, Refusal};
use crate::scope::{Scope, ScopeState};
use crate::terms::{HoldState, Reserve};

/// The amounts to take: the state of the hold, and the amount to hold against all caps, if
/// any applies.
pub(super) struct Decision {
    pub(super) hold_state: HoldState,
    pub(super) capped: Option<DeviceNanos>,
}

/// Returns true if a cap applies to this class of device.
pub(super) fn is_capped(limits: &PlanLimits, class: &DeviceClass) -> bool {
    limits.device_time_per_day.limit(class).is_some()
        || limits.device_time_per_month.limit(class).is_some()
}

/// Returns the refusal for one of the gateway's own bounds.
pub(super) fn capacity_refusal(bound: usize, used: usize, asked: usize) -> Refusal {
    Found {
        limit: Limit::Capacity,
        value: bound as u64,
        largest: bound as u64,
        asked: asked as u64,
        remaining: bound.saturating_sub(used) as u64,
        until: Until::Someone,
    }
    .refusal(&Scope::Gateway, None)
}

impl Core {
    pub(super) fn check(&self, utc: UtcTime, request: &Reserve) -> Result<Decision, Box<Refusal>> {
        let states: Vec<(&Scope, &ScopeState)> = request
            .scopes
            .iter()
            // `reserve` has created the state of every scope.
            .filter_map(|limited| self.scopes.get_key_value(&limited.scope))
            .collect();
        // A request runs only if every scope has a place for it.
        let hold_state = if states.iter().all(|(_, state)| state.has_place()) {
            HoldState::Running
        } else {
            HoldState::Queued
        };
        let mut worst: Option<Refusal> = None;
        let mut longest: Option<Duration> = None;
        for (scope, state) in &states {
            let look = Look { state, request, day: self.day, month: self.month, utc };
            let mut found = Vec::new();
            look.places(hold_state, &mut found);
            look.rates(&mut found);
            look.amounts(&mut found);
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
            refusal.figures = self.figures(scopes, &request.class, utc);
            return Err(Box::new(refusal));
        }
        let left = states
            .iter()
            .flat_map(|(_, state)| caps(state, &request.class, self.day, self.month))
            // The tightest cap is the budget: the worker stops before any cap is exceeded.
            .map(|cap| cap.remaining)
            .min();
        Ok(Decision { hold_state, capped: left.map(|left| left.min(request.estimate.worst)) })
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
            if let Some(of_class) = state.classes.get(class) {
                tighten(&mut figures.device_time, of(&of_class.device_time), |rate| rate.remaining);
            }
            for cap in caps(state, class, self.day, self.month) {
                let kept = match cap.limit {
                    Limit::DeviceTimePerDay => &mut figures.day,
                    _ => &mut figures.month,
                };
                let found =
                    CapFigures { cap: cap.cap, remaining: cap.remaining, resets: cap.resets(utc) };
                tighten(kept, Some(found), |cap| cap.remaining);
            }
        }
        figures
    }
}

/// The limits of one scope, seen by one request.
struct Look<'a> {
    state: &'a ScopeState,
    request: &'a Reserve,
    day: UtcDay,
    month: UtcMonth,
    utc: UtcTime,
}

impl Look<'_> {
    /// Checks the room to wait. A request that may run needs no room in the queue.
    fn places(&self, hold_state: HoldState, found: &mut Vec<Found>) {
        if hold_state == HoldState::Queued {
            found.extend(self.state.has_no_room());
        }
    }

    fn rates(&self, found: &mut Vec<Found>) {
        let estimate = &self.request.estimate;
        let device_time = self
            .state
            .classes
            .get(&self.request.class)
            .and_then(|of_class| of_class.device_time.as_ref());
        for (limit, bucket, asked) in [
            (Limit::Requests, self.state.requests.as_ref(), 1),
            (Limit::Tokens, self.state.tokens.as_ref(), estimate.tokens),
            (Limit::DeviceTime, device_time, estimate.expected.nanos()),
        ] {
            found.extend(bucket.and_then(|bucket| refused_by(limit, bucket, asked)));
        }
    }

    /// Checks the largest job and the caps.
    fn amounts(&self, found: &mut Vec<Found>) {
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
            });
        }
        // At least 1 ns, so that an exhausted cap also refuses a request without cost.
        let least = estimate.least.max(DeviceNanos(1));
        for cap in caps(self.state, class, self.day, self.month) {
            if cap.remaining >= least {
                continue;
            }
            // A request larger than the whole cap does not fit in any period.
            let until = if least > cap.cap {
                Until::Never
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
            });
        }
    }
}

impl ScopeState {
    /// Returns the limit that leaves no room to run and none to wait, if there is one.
    fn has_no_room(&self) -> Option<Found> {
        let queued = self.limits.queued.map(u64::from)?;
        if self.has_place() || (self.waiting.len() as u64) < queued {
            return None;
        }
        let (limit, value) = match self.limits.concurrent {
            Some(concurrent) if queued == 0 => (Limit::Concurrent, u64::from(concurrent)),
            _ => (Limit::Queued, queued),
        };
        let until = Until::Someone;
        Some(Found { limit, value, largest: value, asked: 1, remaining: 0, until })
    }

    /// Returns the refusal if there is no room to run and none to wait.
    pub(super) fn is_full(&self, scope: &Scope) -> Option<Refusal> {
        self.has_no_room().map(|found| found.refusal(scope, None))
    }

    /// Returns the refusal if the request rate allows no request at `now`.
    pub(super) fn requests_are_spent(
        &mut self,
        rate: Rate,
        now: MonotonicTime,
        scope: &Scope,
    ) -> Option<Refusal> {
        // A bucket of another rate is replaced at the next reservation; until then it
        // proves nothing.
        let bucket = self.requests.as_mut().filter(|bucket| bucket.rate() == rate)?;
        bucket.refill(now);
        let found = refused_by(Limit::Requests, bucket, 1)?;
        Some(found.refusal(scope, None))
    }
}

/// Returns the reason for which a bucket cannot give `asked` units, or `None` if it can.
fn refused_by(limit: Limit, bucket: &Bucket, asked: u64) -> Option<Found> {
    let until = if bucket.never_fits(asked) {
        Until::Never
    } else {
        match bucket.wait_for(asked) {
            Some(Duration::ZERO) => return None,
            Some(wait) => Until::Wait(wait),
            None => Until::Never,
        }
    };
    let (rate, remaining) = (bucket.rate(), bucket.remaining());
    let (value, largest) = (rate.per_minute, rate.burst);
    Some(Found { limit, value, largest, asked, remaining, until })
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
}

impl Found {
    fn refusal(self, scope: &Scope, class: Option<&DeviceClass>) -> Refusal {
        let Self { limit, value, largest, asked, remaining, until } = self;
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
struct Cap {
    limit: Limit,
    cap: DeviceNanos,
    remaining: DeviceNanos,
    next: UtcDay,
}

impl Cap {
    /// Returns the start of the next period, but never a time before `utc`.
    fn resets(&self, utc: UtcTime) -> UtcTime {
        self.next.start().max(utc)
    }
}

fn caps(
    state: &ScopeState,
    class: &DeviceClass,
    day: UtcDay,
    month: UtcMonth,
) -> impl Iterator<Item = Cap> {
    let of_class = state.classes.get(class);
    let remaining = |spend: Option<&Spend>, cap| spend.map_or(cap, |spend| spend.remaining(cap));
    let of_day = state.limits.device_time_per_day.limit(class).map(|cap| Cap {
        limit: Limit::DeviceTimePerDay,
        cap,
        remaining: remaining(of_class.map(|class| &class.day), cap),
        next: UtcDay(day.0.saturating_add(1)),
    });
    let of_month = state.limits.device_time_per_month.limit(class).map(|cap| Cap {
        limit: Limit::DeviceTimePerMonth,
        cap,
        remaining: remaining(of_class.map(|class| &class.month), cap),
        next: first_day_after(day, month),
    });
    of_day.into_iter().chain(of_month)
}

/// Returns the first day of the month after `month`. `day` is a day in `month`.
fn first_day_after(day: UtcDay, month: UtcMonth) -> UtcDay {
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
