//! The admission decision: all limits are checked first, then all are taken or none.
//!
//! [`holds`] defines the states of a hold. The core reads no clock, never blocks, and
//! computes with integers only.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use tollgate_domain::{DeviceNanos, MonotonicTime, RequestId, UtcDay, UtcMonth, UtcTime};

use crate::bucket::Demand;
use crate::figures::{Figures, RateFigures, tighten};
use crate::places::Requester;
use crate::refusal::Refusal;
use crate::scope::{Scope, ScopeLimits, ScopeState, ShareTerms};
use crate::terms::{
    AdmissionOptions, AdmissionStatus, CapReached, HoldState, Reserve, ReserveError, ResolveError,
    Settlement, Spent, Swept,
};

pub(crate) use self::budget::Bounds;
use self::check::Capacity;
use self::holds::{HeldScope, HoldRecord, Holds, Posting};
use self::parts::PartCalls;
use self::slices::SliceCalls;
use self::spend::{Charge, Held, overrun};

mod budget;
mod check;
mod holds;
mod parts;
mod slices;
mod spend;
mod states;

pub(crate) use self::check::is_capped;

/// The result of a reservation in the core.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reserved {
    pub(crate) hold_state: HoldState,
    pub(crate) bounds: Bounds,
    pub(crate) figures: Figures,
    /// Waiting requests of others that gave way. Each of them has ended.
    pub(crate) gave_way: Vec<RequestId>,
}

/// Interval of the scan for idle scopes. The cost of the scan grows with the number of
/// scopes; no other operation's does.
const PRUNE_INTERVAL: Duration = Duration::from_secs(60);
/// Shortest time between two scans if the map of scopes is full.
const PRUNE_PRESSED: Duration = Duration::from_secs(1);

/// The state of admission: scopes, holds and the calendar.
#[derive(Debug)]
pub(crate) struct Core {
    options: AdmissionOptions,
    scopes: HashMap<Scope, ScopeState>,
    holds: Holds,
    // Ordered by time, so that a sweep reads only the holds that are due.
    due: BTreeSet<(MonotonicTime, RequestId)>,
    // Ordered, because a reload promotes the waiting requests in order of arrival.
    tickets: BTreeMap<u64, RequestId>,
    next_ticket: u64,
    /// Latest day and month seen. The calendar never goes back.
    day: UtcDay,
    month: UtcMonth,
    /// Time of the latest reservation on both clocks. Settlements use it to derive the
    /// calendar day.
    moment: (MonotonicTime, UtcTime),
    pruned: MonotonicTime,
    /// The terms on which gateways share rates and places.
    shared: ShareTerms,
    /// The calls for parts of limits; `None` if parts do not move between gateways.
    parts: Option<PartCalls>,
    /// The calls for slices of the caps; `None` if the whole caps are this gateway's.
    slices: Option<SliceCalls>,
    /// Thresholds of caps that were reached since the last sweep.
    reached: Vec<CapReached>,
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
            shared: ShareTerms::default(),
            parts: None,
            slices: None,
            reached: Vec::new(),
        }
    }

    /// Returns the state of a scope, which is made if there is none.
    fn scope(&mut self, scope: Scope) -> &mut ScopeState {
        let has_slices = self.slices.is_some();
        self.scopes.entry(scope).or_insert_with(|| ScopeState::new(self.shared, has_slices))
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
        self.make_room(now, &request.scopes).map_err(ReserveError::Refused)?;
        let (used, bound) = (self.holds.held(), self.options.max_holds);
        if used >= bound {
            let refusal = check::capacity_refusal(Capacity { bound, used, asked: 1 });
            return Err(ReserveError::Refused(Box::new(refusal)));
        }
        for limited in &request.scopes {
            // Refreshed before the check, so that the check sees the limits of this moment.
            let period = (self.day, self.month);
            self.scope(limited.scope.clone()).refresh(limited, &request.class, now, period);
        }
        // From here on nothing can fail: either every limit is taken or none.
        let mut decision = match self.check(utc, &request) {
            Ok(decision) => decision,
            Err(refusal) => {
                self.note_refusal(&refusal, &request.class);
                return Err(ReserveError::Refused(refusal));
            }
        };
        let give_way = std::mem::take(&mut decision.give_way);
        // First, so that the queues have room, and the figures count what was returned.
        let gave_way = self.end_waits(now, utc, give_way);
        Ok(Reserved { gave_way, ..self.take(request, decision, utc) })
    }

    /// Ends waiting requests that give way in the queue of a scope. Returns their ids.
    fn end_waits(
        &mut self,
        now: MonotonicTime,
        utc: UtcTime,
        give_way: Vec<(u64, Scope)>,
    ) -> Vec<RequestId> {
        let mut ended = Vec::with_capacity(give_way.len());
        for (ticket, scope) in give_way {
            let Some(id) = self.tickets.get(&ticket).cloned() else { continue };
            let Some(record) = self.holds.get(&id) else { continue };
            let refusal = self.gave_way(&scope, record, utc);
            let Some(record) = self.holds.give_way(&id, refusal) else { continue };
            // A waiting request has no place to run, so its end promotes no other request.
            self.void_record(now, (&id, &record), Duration::ZERO);
            ended.push(id);
        }
        ended
    }

    /// Takes one request from the request rate of every scope, or from none. Ignores the
    /// cost of the request. The request stays taken, whatever becomes of it.
    pub(crate) fn take_request(
        &mut self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Result<(), Box<Refusal>> {
        self.make_room(now, scopes)?;
        let mut worst: Option<Refusal> = None;
        for limited in scopes {
            let scope = &limited.scope;
            // A scope without a request rate needs no state here.
            if limited.limits.requests.is_none() {
                continue;
            }
            let refused = |state: &mut ScopeState| {
                state.refresh_requests(limited, now);
                state.requests_are_spent(scope)
            };
            let refused = match self.scopes.get_mut(scope) {
                Some(state) => refused(state),
                // Only a first request pays for the clone of the scope's name.
                None => refused(self.scope(scope.clone())),
            };
            let Some(refusal) = refused else { continue };
            // The strongest refusal tells the client the longest wait.
            if worst.as_ref().is_none_or(|worst| refusal.weight() > worst.weight()) {
                worst = Some(refusal);
            }
        }
        if let Some(refusal) = worst {
            return Err(self.with_requests_left(refusal, scopes));
        }
        for ScopeLimits { scope, limits, .. } in scopes {
            // A scope may keep a bucket of a limit that its plan no longer has.
            if limits.requests.is_some()
                && let Some(state) = self.scopes.get_mut(scope)
                && let Some(bucket) = &mut state.requests
            {
                bucket.take(Demand::exact(1));
            }
        }
        Ok(())
    }

    /// Takes a place for a request that is still arriving, in every scope or in none. The
    /// place is one of those to run or to wait, and ignores the cost of the request.
    pub(crate) fn arrive(
        &mut self,
        now: MonotonicTime,
        requester: &Requester,
        scopes: &[ScopeLimits],
    ) -> Result<(), Box<Refusal>> {
        self.make_room(now, scopes)?;
        for limited in scopes.iter().filter(|s| s.bounds_places()) {
            let scope = &limited.scope;
            let state = self.scope(scope.clone());
            state.refresh_requests(limited, now);
            if let Some(refusal) = state.is_full(scope, requester) {
                return Err(self.with_requests_left(refusal, scopes));
            }
        }
        // Only after every scope was checked, so that a refusal leaves no place taken.
        for ScopeLimits { scope, .. } in scopes.iter().filter(|s| s.bounds_places()) {
            if let Some(state) = self.scopes.get_mut(scope) {
                state.places.arrive(&requester.member_of(scope));
            }
        }
        Ok(())
    }

    /// Returns the places of a request that has arrived or will not.
    pub(crate) fn leave(&mut self, requester: &Requester, scopes: &[ScopeLimits]) {
        for ScopeLimits { scope, .. } in scopes.iter().filter(|s| s.bounds_places()) {
            if let Some(state) = self.scopes.get_mut(scope) {
                state.places.leave(&requester.member_of(scope));
            }
        }
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
        // Never back, even if the clock is set back: the spend of the earlier day was dropped.
        self.day = self.day.max(utc.day());
        self.month = self.month.max(self.day.month());
    }

    /// Advances the calendar to `now`, counted from the latest reservation.
    fn see_now(&mut self, now: MonotonicTime) {
        let (then, utc) = self.moment;
        // No reservation may have come for hours, and a settlement must still find its day.
        let passed = now.0.saturating_sub(then.0);
        self.see(UtcTime(utc.0.saturating_add(passed)));
    }

    /// Checks that the map of scopes has room for `scopes`, and scans for idle scopes if
    /// the map is full.
    fn make_room(
        &mut self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Result<(), Box<Refusal>> {
        let bound = self.options.max_scopes;
        // Decided without a lookup while the map is far from full.
        if self.scopes.len() + scopes.len() <= bound {
            return Ok(());
        }
        let new =
            |core: &Self| scopes.iter().filter(|s| !core.scopes.contains_key(&s.scope)).count();
        if self.scopes.len() + new(self) > bound
            // A full map is scanned at most once a second, because an attacker can keep it
            // full.
            && now.since(self.pruned) >= PRUNE_PRESSED
        {
            self.forget_idle_scopes(now);
        }
        let (used, asked) = (self.scopes.len(), new(self));
        if used + asked > bound {
            return Err(Box::new(check::capacity_refusal(Capacity { bound, used, asked })));
        }
        Ok(())
    }

    #[expect(
        clippy::expect_used,
        reason = "`reserve` refreshes every scope of a request before it takes from them"
    )]
    fn take(&mut self, request: Reserve, decision: check::Decision, utc: UtcTime) -> Reserved {
        let Reserve { id, requester, tier, is_line, scopes, counted, class, estimate, .. } =
            request;
        let (queue_deadline, expires) = (request.queue_deadline, request.expires);
        let check::Decision { hold_state, bounds, give_way: _ } = decision;
        let ticket = (hold_state == HoldState::Queued).then(|| {
            self.next_ticket += 1;
            // Tickets grow, so their order is the order of arrival in every scope.
            self.tickets.insert(self.next_ticket, id.clone());
            self.next_ticket
        });
        let mut held_scopes = Vec::with_capacity(scopes.len());
        for (index, ScopeLimits { scope, .. }) in scopes.into_iter().enumerate() {
            let state = self.scopes.get_mut(&scope).expect("reserve has refreshed every scope");
            // The limits of the check, which may be of a later config than the request's.
            let scope_capped = is_capped(&state.limits, &class);
            let budgeted = state.limits.budget_per_month.is_some();
            let counts_request = index >= counted && !is_line;
            if let Some(bucket) = state.requests.as_mut().filter(|_| counts_request) {
                // The buckets were refilled in `reserve`, and the check has proved that
                // they suffice.
                bucket.take(Demand::exact(1));
            }
            let of_class = state.class(&class);
            // The check saw the same limits, so a time is bounded where a cap applies.
            if scope_capped {
                of_class.day.hold(bounds.time.unwrap_or_default());
                of_class.month.hold(bounds.time.unwrap_or_default());
            }
            if budgeted {
                state.budget.hold(bounds.money);
            }
            let buckets = state.cost_buckets(tier, &class, &estimate);
            buckets.for_each(|(bucket, demand)| bucket.take(demand));
            let member = requester.member_of(&scope);
            match ticket {
                Some(ticket) => {
                    state.places.begin_wait(&member, ticket);
                    let shared = scope.is_shared();
                    let buckets = state.cost_buckets(tier, &class, &estimate).filter(|_| shared);
                    buckets.for_each(|(bucket, demand)| bucket.begin_wait(demand));
                }
                // A line of a batch takes no place, also not while it runs.
                None if is_line => {}
                None => state.places.start(&member),
            }
            held_scopes.push(HeldScope { scope, capped: scope_capped, budgeted, counts_request });
        }
        let due = if ticket.is_some() { queue_deadline.min(expires) } else { expires };
        // Every hold has an entry here, so a hold that its owner loses still ends.
        self.due.insert((due, id.clone()));
        // Read after everything was taken, so that the headers count this request.
        let figures = self.figures(held_scopes.iter().map(|held| &held.scope), &class, utc);
        let figures = figures.of(&estimate);
        let record = HoldRecord {
            requester,
            tier,
            is_line,
            scopes: held_scopes,
            class,
            estimate,
            capped: bounds.time.unwrap_or_default(),
            money: bounds.money,
            ticket,
            due,
            expires,
        };
        self.holds.hold(id, record);
        Reserved { hold_state, bounds, figures, gave_way: Vec::new() }
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
                let (held, overrun) = (record.estimate.expected, overrun(&record, spent));
                Settlement { held, spent, overrun, late: false, promoted }
            }
            Posting::Late(record) => {
                self.charge(now, &record, Charge { held: Held::Released, spent });
                let (held, overrun) = (DeviceNanos::ZERO, overrun(&record, spent));
                Settlement { held, spent, overrun, late: true, promoted: Vec::new() }
            }
        })
    }

    /// Returns everything that a hold took but the grammar time that was spent all the
    /// same. A request that was taken before the hold, by [`Self::take_request`], stays
    /// taken.
    pub(crate) fn void(
        &mut self,
        now: MonotonicTime,
        id: &RequestId,
        grammar_time: Duration,
    ) -> Result<Settlement, ResolveError> {
        let record = self.holds.void(id)?;
        Ok(self.void_record(now, (id, &record), grammar_time))
    }

    /// Returns the amounts of a voided hold to all scopes.
    fn void_record(
        &mut self,
        now: MonotonicTime,
        (id, record): (&RequestId, &HoldRecord),
        grammar_time: Duration,
    ) -> Settlement {
        let spent = Spent::of_grammar(grammar_time);
        self.charge(now, record, Charge { held: Held::Open, spent });
        for held in record.scopes.iter().filter(|held| held.counts_request) {
            if let Some(bucket) =
                self.scopes.get_mut(&held.scope).and_then(|state| state.requests.as_mut())
            {
                // A voided request never ran, so the request rate gets its unit back.
                bucket.settle(Demand::exact(1), 0);
            }
        }
        let promoted = self.release(id, record);
        Settlement { held: record.estimate.expected, spent, promoted, ..Settlement::default() }
    }

    /// Ends overdue holds and forgets idle scopes. Call this about once a second: without
    /// it a lost hold would hold its limits forever.
    pub(crate) fn expire(&mut self, now: MonotonicTime) -> Swept {
        let mut swept = Swept { reached: std::mem::take(&mut self.reached), ..Swept::default() };
        while let Some((due, id)) = self.due.first().cloned()
            && due <= now
        {
            // A waiting hold never ran, so it is voided and not expired.
            if self.state(&id) == Some(HoldState::Queued)
                && let Ok(record) = self.holds.void(&id)
            {
                // A waiting request reached no worker, so no grammar time was spent.
                let voided = self.void_record(now, (&id, &record), Duration::ZERO);
                swept.promoted.extend(voided.promoted);
                swept.timed_out.push(id);
            } else if let Some(record) = self.holds.expire(&id) {
                // Nothing for now: if the usage of the request comes later, it is posted as
                // late usage.
                let nothing = Charge { held: Held::Open, spent: Spent::default() };
                self.charge(now, &record, nothing);
                swept.promoted.extend(self.release(&id, &record));
                swept.expired.push(id);
            } else {
                self.due.pop_first(); // unreachable while both maps agree; prevents an endless loop
            }
        }
        swept.promoted.extend(self.run_after_change());
        if now.since(self.pruned) >= PRUNE_INTERVAL {
            // Between requests only settlements and this sweep advance the calendar.
            self.see_now(now);
            swept.scopes_forgotten = self.forget_idle_scopes(now);
        }
        // A request that was promoted early in this sweep may have expired later in the
        // sweep.
        swept.promoted.retain(|id| self.holds.get(id).is_some());
        swept
    }

    /// Returns the state of an open hold, or `None` if no such hold is open.
    pub(crate) fn state(&self, id: &RequestId) -> Option<HoldState> {
        let record = self.holds.get(id)?;
        Some(if record.ticket.is_some() { HoldState::Queued } else { HoldState::Running })
    }

    /// Returns the refusal of a request that waited and gave way.
    pub(crate) fn refusal_of(&self, id: &RequestId) -> Option<&Refusal> {
        self.holds.refusal_of(id)
    }

    pub(crate) fn status(&self) -> AdmissionStatus {
        AdmissionStatus {
            // Every waiting hold has exactly one ticket.
            running: self.holds.held() - self.tickets.len(),
            queued: self.tickets.len(),
            scopes: self.scopes.len(),
            resolved: self.holds.ended(),
            gateways: self.shared.gateways.get(),
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
            let member = record.requester.member_of(&held.scope);
            match record.ticket {
                Some(ticket) => {
                    state.places.end_wait(&member, ticket);
                    // In a scope of one tenant nothing was counted.
                    let buckets = state.cost_buckets(record.tier, &record.class, &record.estimate);
                    buckets.for_each(|(bucket, demand)| bucket.end_wait(demand));
                }
                None if record.is_line => {}
                None => state.places.end(&member),
            }
        }
        match record.ticket {
            Some(_) => Vec::new(), // a waiting request occupied no place
            None if record.is_line => Vec::new(),
            None => self.promote(record),
        }
    }

    /// Promotes waiting requests into the places that `freed` released. The widest scope
    /// comes first, then the member of the scope with the fewest running requests, then the
    /// order of arrival. A request that another of its scopes blocks is skipped. Scopes
    /// without a limit on concurrency block no request, so their waiting requests are not
    /// scanned.
    fn promote(&mut self, freed: &HoldRecord) -> Vec<RequestId> {
        let mut promoted = Vec::new();
        // The widest scope is last; it concerns the most waiting requests.
        for held in freed.scopes.iter().rev() {
            promoted.extend(self.promote_in(&held.scope));
        }
        promoted
    }

    /// Promotes waiting requests into the free places of a scope.
    fn promote_in(&mut self, scope: &Scope) -> Vec<RequestId> {
        let mut promoted = Vec::new();
        if !self.scopes.get_mut(scope).is_some_and(ScopeState::may_have_blocked) {
            return promoted;
        }
        let mut tried = HashMap::new();
        while let Some(state) = self.scopes.get(scope)
            && state.has_place()
            && let Some((member, ticket)) = state.places.next_waiting(&tried)
        {
            // Each ticket is tried once, so the loop ends.
            tried.insert(member, ticket);
            if let Some(id) = self.tickets.get(&ticket).cloned()
                && self.run(&id, ticket)
            {
                promoted.push(id);
            }
        }
        promoted
    }

    /// Promotes one waiting request if all its scopes have room.
    fn run(&mut self, id: &RequestId, ticket: u64) -> bool {
        let Some(record) = self.holds.get_mut(id) else { return false };
        // A scope without state runs nothing, so it has a place.
        let free =
            |held: &HeldScope| self.scopes.get(&held.scope).is_none_or(ScopeState::has_place);
        // A place in every scope, or none.
        if !record.scopes.iter().all(free) {
            return false;
        }
        for held in &record.scopes {
            if let Some(state) = self.scopes.get_mut(&held.scope) {
                let member = record.requester.member_of(&held.scope);
                state.places.end_wait(&member, ticket);
                state.places.start(&member);
                let buckets = state.cost_buckets(record.tier, &record.class, &record.estimate);
                buckets.for_each(|(bucket, demand)| bucket.end_wait(demand));
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
