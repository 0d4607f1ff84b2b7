//! The decision itself: every limit is looked at, then all are taken or none.
//!
//! The states of a hold are those of [`holds`]. No clock is read, nothing
//! blocks, and no amount is anything but an integer.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tollgate_domain::{
    DeviceClass, DeviceNanos, MonotonicTime, RequestId, UtcDay, UtcMonth, UtcTime,
};

use crate::figures::{Figures, RateFigures, tighten};
use crate::refusal::Refusal;
use crate::scope::{Period, Scope, ScopeLimits, ScopeState};
use crate::terms::{
    AdmissionOptions, AdmissionStatus, HoldState, Reserve, ReserveError, ResolveError, Settlement,
    Spent, Swept,
};

use self::holds::{HeldScope, HoldRecord, Holds, Posting};

mod check;
mod holds;

/// A reservation as the core makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) hold_state: HoldState,
    pub(crate) budget: Option<DeviceNanos>,
    pub(crate) figures: Figures,
}

/// How often idle scopes are looked for: the scan is the only work here that
/// grows with the number of scopes.
const PRUNE_INTERVAL: Duration = Duration::from_secs(60);
/// The least time between two scans when the map is full.
const PRUNE_PRESSED: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub(crate) struct Core {
    options: AdmissionOptions,
    scopes: HashMap<Scope, ScopeState>,
    holds: Holds,
    due: BTreeSet<(MonotonicTime, RequestId)>,
    tickets: BTreeMap<u64, RequestId>,
    next_ticket: u64,
    /// The latest day and month seen; the calendar never goes back.
    day: UtcDay,
    month: UtcMonth,
    /// One moment by both clocks, the latest that a reservation told, so that
    /// the day of a settlement is known too.
    moment: (MonotonicTime, UtcTime),
    pruned: MonotonicTime,
}

impl Core {
    pub(crate) fn new(options: AdmissionOptions) -> Self {
        Self {
            options,
            scopes: HashMap::new(),
            holds: Holds::new(options.max_resolved),
            due: BTreeSet::new(),
            tickets: BTreeMap::new(),
            next_ticket: 0,
            day: UtcDay::default(),
            month: UtcMonth::default(),
            moment: Default::default(),
            pruned: MonotonicTime::default(),
        }
    }

    pub(crate) fn reserve(
        &mut self,
        now: MonotonicTime,
        utc: UtcTime,
        request: Reserve,
    ) -> Result<Reserved, ReserveError> {
        if self.holds.knows(&request.id) {
            return Err(ReserveError::AlreadyHeld);
        }
        self.moment = (now, utc);
        self.see(utc);
        self.make_room(now, &request).map_err(ReserveError::Refused)?;
        for ScopeLimits { scope, limits } in &request.scopes {
            self.scopes.entry(scope.clone()).or_insert_with(ScopeState::new).refresh(
                limits,
                &request.class,
                now,
                (self.day, self.month),
            );
        }
        let decision = self.check(utc, &request).map_err(ReserveError::Refused)?;
        Ok(self.take(request, decision, utc))
    }

    /// Whether the rate of requests of one of `scopes` allows none now. Takes
    /// nothing, and knows nothing of what a request would cost.
    pub(crate) fn check_request_rate(
        &mut self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Option<Box<Refusal>> {
        let mut worst: Option<Refusal> = None;
        for ScopeLimits { scope, limits } in scopes {
            // A scope that nobody has asked for yet has taken nothing, and one
            // without the limit refuses nothing here.
            let (Some(rate), Some(state)) = (limits.requests, self.scopes.get_mut(scope)) else {
                continue;
            };
            let Some(refusal) = state.requests_are_spent(rate, now, scope) else { continue };
            if worst.as_ref().is_none_or(|worst| refusal.weight() > worst.weight()) {
                worst = Some(refusal);
            }
        }
        worst.map(|refusal| self.with_requests_left(refusal, scopes))
    }

    /// Whether one of `scopes` has no place to run and none to wait. Takes
    /// nothing, and knows nothing of what a request would cost.
    pub(crate) fn check_concurrency(&self, scopes: &[ScopeLimits]) -> Option<Box<Refusal>> {
        let full = scopes.iter().find_map(|ScopeLimits { scope, limits: _ }| {
            // One that nobody has asked for yet has room.
            self.scopes.get(scope)?.is_full(scope)
        });
        full.map(|refusal| self.with_requests_left(refusal, scopes))
    }

    /// With the tightest rate of requests of `scopes`.
    fn with_requests_left(&self, mut refusal: Refusal, scopes: &[ScopeLimits]) -> Box<Refusal> {
        for state in scopes.iter().filter_map(|scope| self.scopes.get(&scope.scope)) {
            let requests = state.requests.as_ref().map(RateFigures::of);
            tighten(&mut refusal.figures.requests, requests, |rate| rate.remaining);
        }
        Box::new(refusal)
    }

    /// Moves the calendar on to `utc`.
    fn see(&mut self, utc: UtcTime) {
        self.day = self.day.max(utc.day());
        self.month = self.month.max(self.day.month());
    }

    /// Moves the calendar on to `now`, by what has passed since a reservation.
    fn see_now(&mut self, now: MonotonicTime) {
        let (then, utc) = self.moment;
        let passed = now.0.saturating_sub(then.0);
        self.see(UtcTime(utc.0.saturating_add(passed)));
    }

    /// Looks for room under the gateway's own bounds.
    fn make_room(&mut self, now: MonotonicTime, request: &Reserve) -> Result<(), Box<Refusal>> {
        let new = |core: &Self| {
            request.scopes.iter().filter(|s| !core.scopes.contains_key(&s.scope)).count()
        };
        if self.scopes.len() + new(self) > self.options.max_scopes
            && now.since(self.pruned) >= PRUNE_PRESSED
        {
            self.forget_idle_scopes(now);
        }
        for (used, asked, bound) in [
            (self.holds.held(), 1, self.options.max_holds),
            (self.scopes.len(), new(self), self.options.max_scopes),
        ] {
            if used + asked > bound {
                return Err(Box::new(check::capacity_refusal(bound, used, asked)));
            }
        }
        Ok(())
    }

    fn take(&mut self, request: Reserve, decision: check::Decision, utc: UtcTime) -> Reserved {
        let Reserve { id, scopes, class, estimate, queue_deadline, expires } = request;
        let check::Decision { hold_state, capped } = decision;
        let ticket = (hold_state == HoldState::Queued).then(|| {
            self.next_ticket += 1;
            self.tickets.insert(self.next_ticket, id.clone());
            self.next_ticket
        });
        let mut held_scopes = Vec::with_capacity(scopes.len());
        for ScopeLimits { scope, limits } in scopes {
            let state = self.scopes.get_mut(&scope).expect("reserve has refreshed every scope");
            let scope_capped = check::is_capped(&limits, &class);
            if let Some(bucket) = &mut state.requests {
                bucket.take(1);
            }
            if let Some(bucket) = &mut state.tokens {
                bucket.take(estimate.tokens);
            }
            let of_class = state.class(&class);
            if let Some(bucket) = &mut of_class.device_time {
                bucket.take(estimate.expected.nanos());
            }
            if scope_capped {
                of_class.day.hold(capped.unwrap_or_default());
                of_class.month.hold(capped.unwrap_or_default());
            }
            match ticket {
                Some(ticket) => _ = state.waiting.insert(ticket),
                None => state.running += 1,
            }
            held_scopes.push(HeldScope { scope, capped: scope_capped });
        }
        let due = if ticket.is_some() { queue_deadline.min(expires) } else { expires };
        self.due.insert((due, id.clone()));
        let figures = self.figures(held_scopes.iter().map(|held| &held.scope), &class, utc);
        let record = HoldRecord {
            scopes: held_scopes,
            class,
            tokens: estimate.tokens,
            expected: estimate.expected,
            capped: capped.unwrap_or_default(),
            ticket,
            due,
            expires,
        };
        self.holds.hold(id, record);
        Reserved { hold_state, budget: capped, figures }
    }

    /// Posts the true cost of a hold, also of one that expired before.
    pub(crate) fn settle(
        &mut self,
        now: MonotonicTime,
        id: &RequestId,
        spent: Spent,
    ) -> Result<Settlement, ResolveError> {
        Ok(match self.holds.post(id)? {
            Posting::InTime(record) => {
                self.charge(now, &record, Charge { held: Held::Open, spent });
                let promoted = self.release(id, &record);
                let (held, overrun) = (record.expected, overrun(&record, spent));
                Settlement { held, spent, overrun, late: false, promoted }
            }
            Posting::Late(record) => {
                self.charge(now, &record, Charge { held: Held::Released, spent });
                let (held, overrun) = (DeviceNanos::ZERO, overrun(&record, spent));
                Settlement { held, spent, overrun, late: true, promoted: Vec::new() }
            }
        })
    }

    /// Gives all of a hold back, the request itself included.
    pub(crate) fn void(
        &mut self,
        now: MonotonicTime,
        id: &RequestId,
    ) -> Result<Settlement, ResolveError> {
        let record = self.holds.void(id)?;
        Ok(self.void_record(now, id, &record))
    }

    /// Gives back what a hold that is voided held.
    fn void_record(
        &mut self,
        now: MonotonicTime,
        id: &RequestId,
        record: &HoldRecord,
    ) -> Settlement {
        self.charge(now, record, Charge { held: Held::Open, spent: Spent::default() });
        for held in &record.scopes {
            if let Some(bucket) =
                self.scopes.get_mut(&held.scope).and_then(|state| state.requests.as_mut())
            {
                bucket.settle(1, 0);
            }
        }
        let promoted = self.release(id, record);
        Settlement { held: record.expected, promoted, ..Settlement::default() }
    }

    /// Ends what is overdue and forgets what is idle. Call it about once a
    /// second: it is what keeps a lost hold from holding for ever.
    pub(crate) fn expire(&mut self, now: MonotonicTime) -> Swept {
        let mut swept = Swept::default();
        while let Some((due, id)) = self.due.first().cloned()
            && due <= now
        {
            if self.state(&id) == Some(HoldState::Queued)
                && let Ok(record) = self.holds.void(&id)
            {
                swept.promoted.extend(self.void_record(now, &id, &record).promoted);
                swept.timed_out.push(id);
            } else if let Some(record) = self.holds.expire(&id) {
                let nothing = Charge { held: Held::Open, spent: Spent::default() };
                self.charge(now, &record, nothing);
                swept.promoted.extend(self.release(&id, &record));
                swept.expired.push(id);
            } else {
                self.due.pop_first(); // unreachable while both agree; never a loop
            }
        }
        if now.since(self.pruned) >= PRUNE_INTERVAL {
            self.see_now(now);
            swept.scopes_forgotten = self.forget_idle_scopes(now);
        }
        // One that was promoted early in this sweep may have expired late in it.
        swept.promoted.retain(|id| self.holds.get(id).is_some());
        swept
    }

    /// Adds spend that the ledger knows, before the first admission.
    pub(crate) fn restore_spend(
        &mut self,
        scope: Scope,
        class: &DeviceClass,
        period: Period,
        spent: DeviceNanos,
    ) {
        let state = self.scopes.entry(scope).or_insert_with(ScopeState::new).class(class);
        let (spend, index) = match period {
            Period::Day(day) => {
                self.day = self.day.max(day);
                (&mut state.day, day.0)
            }
            Period::Month(month) => {
                self.month = self.month.max(month);
                (&mut state.month, month.0)
            }
        };
        spend.restore(index, spent);
    }

    /// Whether a hold is open, and where it stands.
    pub(crate) fn state(&self, id: &RequestId) -> Option<HoldState> {
        let record = self.holds.get(id)?;
        Some(if record.ticket.is_some() { HoldState::Queued } else { HoldState::Running })
    }

    pub(crate) fn status(&self) -> AdmissionStatus {
        AdmissionStatus {
            running: self.holds.held() - self.tickets.len(),
            queued: self.tickets.len(),
            scopes: self.scopes.len(),
            resolved: self.holds.ended(),
        }
    }

    /// Replaces what is held by what was spent, in every scope of a hold. A
    /// rate that was forgotten is full again, with nothing left to correct; what
    /// was spent against a cap counts whether its scope is remembered or not.
    fn charge(&mut self, now: MonotonicTime, record: &HoldRecord, charge: Charge) {
        let (tokens, expected, capped) = match charge.held {
            Held::Open => (record.tokens, record.expected, record.capped),
            Held::Released => Default::default(),
        };
        let Spent { tokens: spent_tokens, reference } = charge.spent;
        self.see_now(now);
        for held in &record.scopes {
            // Late usage may find that its scope was idle and was forgotten.
            if held.capped && reference > DeviceNanos::ZERO {
                self.scopes.entry(held.scope.clone()).or_insert_with(ScopeState::new);
            }
            let Some(state) = self.scopes.get_mut(&held.scope) else { continue };
            if let Some(bucket) = &mut state.tokens {
                bucket.refill(now);
                bucket.settle(tokens, spent_tokens);
            }
            let of_class = state.class(&record.class);
            if let Some(bucket) = &mut of_class.device_time {
                bucket.refill(now);
                bucket.settle(expected.nanos(), reference.nanos());
            }
            if held.capped {
                of_class.day.roll(self.day.0);
                of_class.month.roll(self.month.0);
                of_class.day.settle(capped, reference);
                of_class.month.settle(capped, reference);
            }
        }
    }

    /// Gives up a hold's place, running or waiting, and lets others run.
    fn release(&mut self, id: &RequestId, record: &HoldRecord) -> Vec<RequestId> {
        self.due.remove(&(record.due, id.clone()));
        if let Some(ticket) = record.ticket {
            self.tickets.remove(&ticket);
        }
        for held in &record.scopes {
            let Some(state) = self.scopes.get_mut(&held.scope) else { continue };
            match record.ticket {
                Some(ticket) => _ = state.waiting.remove(&ticket),
                None => state.running = state.running.saturating_sub(1),
            }
        }
        match record.ticket {
            Some(_) => Vec::new(), // it kept nobody from running
            None => self.promote(record),
        }
    }

    /// Lets waiting requests run in the places that `freed` gave up: the
    /// widest scope first, in order of arrival, passing over those that
    /// another of their scopes still holds back. Nobody waits for a scope
    /// that has places without end, so its waiting ones are not looked at.
    fn promote(&mut self, freed: &HoldRecord) -> Vec<RequestId> {
        let mut promoted = Vec::new();
        for held in freed.scopes.iter().rev() {
            if !self.scopes.get_mut(&held.scope).is_some_and(ScopeState::may_have_blocked) {
                continue;
            }
            let mut from = 0;
            while let Some(state) = self.scopes.get(&held.scope)
                && state.has_place()
                && let Some(&ticket) = state.waiting.range(from..).next()
            {
                from = ticket + 1;
                if let Some(id) = self.tickets.get(&ticket).cloned()
                    && self.run(&id, ticket)
                {
                    promoted.push(id);
                }
            }
        }
        promoted
    }

    /// Lets one waiting request run if every scope of it has a place.
    fn run(&mut self, id: &RequestId, ticket: u64) -> bool {
        let Some(record) = self.holds.get_mut(id) else { return false };
        let free =
            |held: &HeldScope| self.scopes.get(&held.scope).is_none_or(ScopeState::has_place);
        if !record.scopes.iter().all(free) {
            return false;
        }
        for held in &record.scopes {
            if let Some(state) = self.scopes.get_mut(&held.scope) {
                state.waiting.remove(&ticket);
                state.running += 1;
            }
        }
        record.ticket = None;
        self.due.remove(&(record.due, id.clone()));
        record.due = record.expires;
        self.due.insert((record.due, id.clone()));
        self.tickets.remove(&ticket);
        true
    }

    fn forget_idle_scopes(&mut self, now: MonotonicTime) -> usize {
        let before = self.scopes.len();
        let today = (self.day, self.month);
        self.scopes.retain(|_, state| !state.is_idle(now, today));
        self.pruned = now;
        before - self.scopes.len()
    }
}

/// What a charge replaces, and by what.
struct Charge {
    held: Held,
    spent: Spent,
}

/// Whether the amounts of a hold still stand.
enum Held {
    Open,
    Released,
}

/// How far the true cost went beyond what the caps held; without a cap there
/// was nothing to exceed.
fn overrun(record: &HoldRecord, spent: Spent) -> DeviceNanos {
    if record.scopes.iter().any(|held| held.capped) {
        spent.reference.saturating_sub(record.capped)
    } else {
        DeviceNanos::ZERO
    }
}
