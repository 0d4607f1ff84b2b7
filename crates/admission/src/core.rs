//! The admission decision: all limits are checked first, then all are taken or none.
//!
//! [`holds`] defines the states of a hold. The core reads no clock, never blocks, and
//! computes with integers only.

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

/// The result of a reservation in the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) hold_state: HoldState,
    pub(crate) budget: Option<DeviceNanos>,
    pub(crate) figures: Figures,
}

/// Interval of the scan for idle scopes. The cost of the scan grows with the number of
/// scopes; no other operation's does.
const PRUNE_INTERVAL: Duration = Duration::from_secs(60);
/// Shortest time between two scans if the map of scopes is full.
const PRUNE_PRESSED: Duration = Duration::from_secs(1);

#[derive(Debug)]
/// The state of admission: scopes, holds and the calendar.
pub(crate) struct Core {
    options: AdmissionOptions,
    scopes: HashMap<Scope, ScopeState>,
    holds: Holds,
    due: BTreeSet<(MonotonicTime, RequestId)>,
    tickets: BTreeMap<u64, RequestId>,
    next_ticket: u64,
    /// Latest day and month seen. The calendar never goes back.
    day: UtcDay,
    month: UtcMonth,
    /// Time of the latest reservation on both clocks. Settlements use it to derive the
    /// calendar day.
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
        // A second hold under the same id would charge the request twice.
        if self.holds.knows(&request.id) {
            return Err(ReserveError::AlreadyHeld);
        }
        // Stored even if the request is refused: it is the latest known time.
        self.moment = (now, utc);
        self.see(utc);
        // Before any state is created for the scopes, so that a flood of new scopes stays
        // bounded.
        self.make_room(now, &request).map_err(ReserveError::Refused)?;
        for ScopeLimits { scope, limits } in &request.scopes {
            // Refreshed before the check, so that the check sees the limits of this moment.
            self.scopes.entry(scope.clone()).or_insert_with(ScopeState::new).refresh(
                limits,
                &request.class,
                now,
                (self.day, self.month),
            );
        }
        // From here on nothing can fail: either every limit is taken or none.
        let decision = self.check(utc, &request).map_err(ReserveError::Refused)?;
        Ok(self.take(request, decision, utc))
    }

    /// Returns a refusal if the request rate of one of `scopes` is exhausted now. Takes
    /// nothing and ignores the cost of the request.
    pub(crate) fn check_request_rate(
        &mut self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Option<Box<Refusal>> {
        let mut worst: Option<Refusal> = None;
        for ScopeLimits { scope, limits } in scopes {
            // A scope without state has used nothing, and a scope without a request rate
            // refuses nothing here.
            let (Some(rate), Some(state)) = (limits.requests, self.scopes.get_mut(scope)) else {
                continue;
            };
            let Some(refusal) = state.requests_are_spent(rate, now, scope) else { continue };
            // The strongest refusal tells the client the longest wait.
            if worst.as_ref().is_none_or(|worst| refusal.weight() > worst.weight()) {
                worst = Some(refusal);
            }
        }
        worst.map(|refusal| self.with_requests_left(refusal, scopes))
    }

    /// Returns a refusal if one of `scopes` has no room to run and none to wait. Takes
    /// nothing and ignores the cost of the request.
    pub(crate) fn check_concurrency(&self, scopes: &[ScopeLimits]) -> Option<Box<Refusal>> {
        let full = scopes.iter().find_map(|ScopeLimits { scope, limits: _ }| {
            // A scope without state has room.
            self.scopes.get(scope)?.is_full(scope)
        });
        full.map(|refusal| self.with_requests_left(refusal, scopes))
    }

    /// Adds the tightest request rate of `scopes` to the figures of the refusal.
    fn with_requests_left(&self, mut refusal: Refusal, scopes: &[ScopeLimits]) -> Box<Refusal> {
        for state in scopes.iter().filter_map(|scope| self.scopes.get(&scope.scope)) {
            let requests = state.requests.as_ref().map(RateFigures::of);
            tighten(&mut refusal.figures.requests, requests, |rate| rate.remaining);
        }
        Box::new(refusal)
    }

    /// Advances the calendar to `utc`.
    fn see(&mut self, utc: UtcTime) {
        self.day = self.day.max(utc.day());
        self.month = self.month.max(self.day.month());
    }

    /// Advances the calendar to `now`, counted from the latest reservation.
    fn see_now(&mut self, now: MonotonicTime) {
        let (then, utc) = self.moment;
        let passed = now.0.saturating_sub(then.0);
        self.see(UtcTime(utc.0.saturating_add(passed)));
    }

    /// Checks the gateway's own bounds, and scans for idle scopes if the map is full.
    fn make_room(&mut self, now: MonotonicTime, request: &Reserve) -> Result<(), Box<Refusal>> {
        let new = |core: &Self| {
            request.scopes.iter().filter(|s| !core.scopes.contains_key(&s.scope)).count()
        };
        if self.scopes.len() + new(self) > self.options.max_scopes
            // A full map is scanned at most once a second, because an attacker can keep it
            // full.
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
            // Tickets grow, so their order is the order of arrival in every scope.
            self.tickets.insert(self.next_ticket, id.clone());
            self.next_ticket
        });
        let mut held_scopes = Vec::with_capacity(scopes.len());
        for ScopeLimits { scope, limits } in scopes {
            let state = self.scopes.get_mut(&scope).expect("reserve has refreshed every scope");
            let scope_capped = check::is_capped(&limits, &class);
            if let Some(bucket) = &mut state.requests {
                // The buckets were refilled in `reserve`, and the check has proved that
                // they suffice.
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
        // Every hold has an entry here, so a hold that its owner loses still ends.
        self.due.insert((due, id.clone()));
        // Read after everything was taken, so that the headers count this request.
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

    /// Posts the true cost of a hold, also after the hold has expired.
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

    /// Returns everything that a hold took, including the request itself.
    pub(crate) fn void(
        &mut self,
        now: MonotonicTime,
        id: &RequestId,
    ) -> Result<Settlement, ResolveError> {
        let record = self.holds.void(id)?;
        Ok(self.void_record(now, id, &record))
    }

    /// Returns the amounts of a voided hold to all scopes.
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
                // A voided request never ran, so the request rate gets its unit back.
                bucket.settle(1, 0);
            }
        }
        let promoted = self.release(id, record);
        Settlement { held: record.expected, promoted, ..Settlement::default() }
    }

    /// Ends overdue holds and forgets idle scopes. Call this about once a second: without
    /// it a lost hold would hold its limits forever.
    pub(crate) fn expire(&mut self, now: MonotonicTime) -> Swept {
        let mut swept = Swept::default();
        while let Some((due, id)) = self.due.first().cloned()
            && due <= now
        {
            // A waiting hold never ran, so it is voided and not expired.
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
                self.due.pop_first(); // unreachable while both maps agree; prevents an endless loop
            }
        }
        if now.since(self.pruned) >= PRUNE_INTERVAL {
            self.see_now(now);
            swept.scopes_forgotten = self.forget_idle_scopes(now);
        }
        // A request that was promoted early in this sweep may have expired later in the
        // sweep.
        swept.promoted.retain(|id| self.holds.get(id).is_some());
        swept
    }

    /// Adds spend from the ledger, before the first admission.
    pub(crate) fn restore_spend(
        &mut self,
        scope: Scope,
        class: &DeviceClass,
        period: Period,
        spent: DeviceNanos,
    ) {
        let state = self.scopes.entry(scope).or_insert_with(ScopeState::new).class(class);
        let (spend, index) = match period {
            // Restored spend also advances the calendar, so that old spend is never counted
            // as today's.
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

    /// Returns the state of an open hold, or `None` if no such hold is open.
    pub(crate) fn state(&self, id: &RequestId) -> Option<HoldState> {
        let record = self.holds.get(id)?;
        Some(if record.ticket.is_some() { HoldState::Queued } else { HoldState::Running })
    }

    pub(crate) fn status(&self) -> AdmissionStatus {
        AdmissionStatus {
            // Every waiting hold has exactly one ticket.
            running: self.holds.held() - self.tickets.len(),
            queued: self.tickets.len(),
            scopes: self.scopes.len(),
            resolved: self.holds.ended(),
        }
    }

    /// Replaces the held amounts by the spent amounts in every scope of a hold. A rate
    /// without state is full, so nothing needs correction. Spend against a cap always
    /// counts, even if its scope was forgotten.
    fn charge(&mut self, now: MonotonicTime, record: &HoldRecord, charge: Charge) {
        let (tokens, expected, capped) = match charge.held {
            Held::Open => (record.tokens, record.expected, record.capped),
            Held::Released => Default::default(),
        };
        let Spent { tokens: spent_tokens, reference } = charge.spent;
        self.see_now(now);
        for held in &record.scopes {
            // Late usage may concern a scope that was idle and was forgotten.
            if held.capped && reference > DeviceNanos::ZERO {
                self.scopes.entry(held.scope.clone()).or_insert_with(ScopeState::new);
            }
            let Some(state) = self.scopes.get_mut(&held.scope) else { continue };
            if let Some(bucket) = &mut state.tokens {
                // Refilled before the correction: the excess is a debt as of now.
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

    /// Releases the place of a hold, running or waiting, and promotes waiting requests.
    fn release(&mut self, id: &RequestId, record: &HoldRecord) -> Vec<RequestId> {
        self.due.remove(&(record.due, id.clone()));
        if let Some(ticket) = record.ticket {
            self.tickets.remove(&ticket);
        }
        for held in &record.scopes {
            let Some(state) = self.scopes.get_mut(&held.scope) else { continue };
            match record.ticket {
                Some(ticket) => _ = state.waiting.remove(&ticket),
                // Saturating: a wrong count must not block the scope forever.
                None => state.running = state.running.saturating_sub(1),
            }
        }
        match record.ticket {
            Some(_) => Vec::new(), // a waiting request occupied no place
            None => self.promote(record),
        }
    }

    /// Promotes waiting requests into the places that `freed` released. The widest scope
    /// comes first, then the order of arrival. A request that another of its scopes blocks
    /// is skipped. Scopes without a limit on concurrency block no request, so their waiting
    /// requests are not scanned.
    fn promote(&mut self, freed: &HoldRecord) -> Vec<RequestId> {
        let mut promoted = Vec::new();
        // The widest scope is last; it concerns the most waiting requests.
        for held in freed.scopes.iter().rev() {
            if !self.scopes.get_mut(&held.scope).is_some_and(ScopeState::may_have_blocked) {
                continue;
            }
            let mut from = 0;
            while let Some(state) = self.scopes.get(&held.scope)
                && state.has_place()
                && let Some(&ticket) = state.waiting.range(from..).next()
            {
                // Each ticket is tried once, so the loop ends.
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

    /// Promotes one waiting request if all its scopes have room.
    fn run(&mut self, id: &RequestId, ticket: u64) -> bool {
        let Some(record) = self.holds.get_mut(id) else { return false };
        let free =
            |held: &HeldScope| self.scopes.get(&held.scope).is_none_or(ScopeState::has_place);
        // A place in every scope, or none.
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

/// A change from held amounts to spent amounts.
struct Charge {
    held: Held,
    spent: Spent,
}

/// The amounts of a hold: still held, or released before.
enum Held {
    Open,
    Released,
}

/// Returns the amount by which the true cost exceeded what the caps held; zero without a
/// cap.
fn overrun(record: &HoldRecord, spent: Spent) -> DeviceNanos {
    if record.scopes.iter().any(|held| held.capped) {
        spent.reference.saturating_sub(record.capped)
    } else {
        DeviceNanos::ZERO
    }
}
