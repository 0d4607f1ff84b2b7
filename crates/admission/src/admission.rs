//! The core behind one mutex, and the values that callers hold. A decision takes
//! microseconds, so a lock costs less than a message to another task.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::num::NonZeroU32;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tollgate_cluster::parts::PartMode;
use tollgate_domain::{
    DeviceClass, DeviceNanos, ExactAmount, MonotonicTime, RequestId, TenantId, UtcMonth, UtcTime,
};

use crate::core::{Bounds, Core, Reserved};
use crate::figures::Figures;
use crate::places::Requester;
use crate::refusal::Refusal;
use crate::reload::NewLimits;
use crate::scope::{Period, Scope, ScopeLimits};
use crate::terms::{
    AdmissionOptions, AdmissionStatus, HeldRequests, HoldState, LimitState, Moment, Reserve,
    ReserveError, ResolveError, Settlement, Spent, Swept,
};

/// The admission state of one gateway. Clones share the state.
#[derive(Clone)]
pub struct Admission {
    guarded: Arc<Mutex<Guarded>>,
}

/// The state behind the mutex.
pub(crate) struct Guarded {
    pub(crate) core: Core,
    /// Wakers of waiting holds. An entry is removed when the hold may run or ends.
    wakers: HashMap<RequestId, Waker>,
    /// Returns the way in which parts may be used now, if they move between gateways.
    pub(crate) part_mode: Option<PartModeSource>,
}

/// The source of the way in which parts may be used.
pub(crate) type PartModeSource = Box<dyn Fn() -> PartMode + Send>;

/// Wakes the holds of `ids` after it has released the lock, because a waker may call into
/// admission again.
pub(crate) fn wake<'a>(
    mut guarded: MutexGuard<'_, Guarded>,
    ids: impl IntoIterator<Item = &'a RequestId>,
) {
    let woken: Vec<Waker> = ids.into_iter().filter_map(|id| guarded.wakers.remove(id)).collect();
    drop(guarded);
    woken.into_iter().for_each(Waker::wake);
}

impl Admission {
    /// Creates an admission without spend; see [`Self::restore_spend`].
    pub fn new(options: AdmissionOptions) -> Self {
        // One mutex for core and wakers: a promotion and its waker must change together.
        let guarded = Guarded { core: Core::new(options), wakers: HashMap::new(), part_mode: None };
        Self { guarded: Arc::new(Mutex::new(guarded)) }
    }

    /// Takes every limit of the request, or none.
    ///
    /// # Errors
    ///
    /// [`ReserveError::Refused`] with the refusal that binds longest, or
    /// [`ReserveError::AlreadyHeld`] if the id was used before.
    pub fn reserve(
        &self,
        now: MonotonicTime,
        utc: UtcTime,
        request: Reserve,
    ) -> Result<Hold, ReserveError> {
        self.reserve_locked(self.lock_at(now), (now, utc), request, None)
    }

    /// Takes every limit of a request that has arrived, or none. The request runs or
    /// waits in the place that it held while it arrived.
    ///
    /// # Errors
    ///
    /// As [`Self::reserve`]. The place is returned then.
    pub fn reserve_arrived(
        &self,
        now: MonotonicTime,
        utc: UtcTime,
        request: Reserve,
        arrival: Arrival,
    ) -> Result<Hold, ReserveError> {
        self.reserve_locked(self.lock_at(now), (now, utc), request, Some(arrival))
    }

    pub(crate) fn reserve_locked(
        &self,
        mut guarded: MutexGuard<'_, Guarded>,
        (now, utc): (MonotonicTime, UtcTime),
        request: Reserve,
        arrival: Option<Arrival>,
    ) -> Result<Hold, ReserveError> {
        let id = request.id.clone();
        if let Some(arrival) = arrival {
            let (requester, scopes) = arrival.into_parts();
            // Under one lock, so that no other request takes the place in between.
            guarded.core.leave(&requester, &scopes);
        }
        let reserved = guarded.core.reserve(now, utc, request)?;
        wake(guarded, &reserved.gave_way);
        Ok(self.hold(id, reserved))
    }

    fn hold(&self, id: RequestId, reserved: Reserved) -> Hold {
        let Reserved { hold_state, bounds, figures, gave_way: _ } = reserved;
        Hold { admission: self.clone(), id, hold_state, bounds, figures, open: true }
    }

    /// Takes one request from the request rate of every scope, or from none. The request
    /// stays taken, whatever becomes of it; [`Self::reserve`] may still refuse it.
    ///
    /// # Errors
    ///
    /// The refusal that binds longest.
    pub fn take_request(
        &self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Result<(), Box<Refusal>> {
        self.lock_at(now).core.take_request(now, scopes)
    }

    /// Takes a place for a request that is still arriving, in every scope or in none. The
    /// place is one of those to run or to wait. If all are taken, a request may arrive all
    /// the same if another member of the scope has two places more.
    ///
    /// # Errors
    ///
    /// The refusal of a scope without room to run and to wait.
    pub fn arrive(
        &self,
        now: MonotonicTime,
        requester: &Requester,
        scopes: &[ScopeLimits],
    ) -> Result<Arrival, Box<Refusal>> {
        // Plans without such limits need no lock.
        if scopes.iter().any(ScopeLimits::bounds_places) {
            self.lock_at(now).core.arrive(now, requester, scopes)?;
        }
        Ok(self.arrival(requester, scopes))
    }

    /// Returns the place of a request that the core has counted as arriving.
    pub(crate) fn arrival(&self, requester: &Requester, scopes: &[ScopeLimits]) -> Arrival {
        // Only these scopes count the arrival, so the drop returns a place in these alone.
        let bounded = scopes.iter().filter(|limited| limited.bounds_places());
        let scopes = bounded.cloned().collect();
        Arrival { admission: self.clone(), requester: requester.clone(), scopes }
    }

    /// Posts the true cost of a hold by its id. If the hold has expired, the late usage is
    /// charged once.
    ///
    /// # Errors
    ///
    /// [`ResolveError`] if the hold was resolved before or is unknown.
    pub fn settle(
        &self,
        now: MonotonicTime,
        id: &RequestId,
        spent: Spent,
    ) -> Result<Settlement, ResolveError> {
        self.resolve(now, id, |core| core.settle(now, id, spent))
    }

    /// Returns everything that a hold took, by its id, because the request never ran or
    /// failed by our fault.
    ///
    /// # Errors
    ///
    /// [`ResolveError`] if the hold has ended before or is unknown.
    pub fn void(&self, now: MonotonicTime, id: &RequestId) -> Result<Settlement, ResolveError> {
        self.resolve(now, id, |core| core.void(now, id, Duration::ZERO))
    }

    /// Ends overdue holds, forgets idle scopes, and runs waiting requests that may run since the
    /// way in which parts may be used has changed. Call this about once a second; no other call
    /// does so.
    pub fn expire(&self, now: MonotonicTime) -> Swept {
        let mut guarded = self.lock_at(now);
        let swept = guarded.core.expire(now);
        // Ended holds are woken too, so that a wait for a place ends with an error.
        wake(guarded, swept.timed_out.iter().chain(&swept.expired).chain(&swept.promoted));
        swept
    }

    /// Adds spend that the ledger knows for the current day or month. Call this at start,
    /// before the first admission, once for each amount, because amounts add up. Restore
    /// only scopes that have a cap: restored spend is remembered until its period ends.
    pub fn restore_spend(
        &self,
        scope: Scope,
        class: &DeviceClass,
        period: Period,
        spent: DeviceNanos,
    ) {
        self.lock().core.restore_spend(scope, class, period, spent);
    }

    /// Adds money that the ledger knows for the current month, as [`Self::restore_spend`]
    /// adds device time. Restore only scopes that have a budget.
    pub fn restore_cost(&self, scope: Scope, month: UtcMonth, cost: ExactAmount) {
        self.lock().core.restore_cost(scope, month, cost);
    }

    /// Applies the limits of a new config to every scope in memory. Taken units stay taken,
    /// and buckets keep their level, at most their new burst. Waiting requests that may run
    /// now are woken. Call this before a request brings limits of the new revision.
    pub fn adopt(&self, now: MonotonicTime, new_limits: &NewLimits<'_>) {
        let mut guarded = self.lock_at(now);
        let promoted = guarded.core.adopt(now, new_limits);
        wake(guarded, &promoted);
    }

    /// Changes the number of gateways that share the limits. Each gateway has its part of
    /// every rate, and of the places at least one; caps are not shared. Taken units stay
    /// taken. Waiting requests that may run now are woken.
    pub fn share_among(&self, now: MonotonicTime, gateways: NonZeroU32) {
        let mut guarded = self.lock_at(now);
        let promoted = guarded.core.share_among(now, gateways);
        wake(guarded, &promoted);
    }

    /// Returns the number of holds and scopes in memory.
    pub fn status(&self) -> AdmissionStatus {
        self.lock().core.status()
    }

    /// Returns the state of every limit of `scopes`, in the order of the scopes, and of the
    /// limits by device class for each of `classes`. Takes nothing.
    pub fn limit_states(
        &self,
        moment: Moment,
        scopes: &[ScopeLimits],
        classes: &[DeviceClass],
    ) -> Vec<LimitState> {
        self.lock_at(moment.now).core.limit_states(moment, scopes, classes)
    }

    /// Returns the number of open holds of each tenant that has any. Reads every open hold.
    pub fn held_by_tenant(&self) -> HashMap<TenantId, HeldRequests> {
        self.lock().core.held_by_tenant()
    }

    fn resolve(
        &self,
        now: MonotonicTime,
        id: &RequestId,
        act: impl FnOnce(&mut Core) -> Result<Settlement, ResolveError>,
    ) -> Result<Settlement, ResolveError> {
        let mut guarded = self.lock_at(now);
        let settlement = act(&mut guarded.core)?;
        // The hold itself may still wait: the owner must see that it was ended by its id.
        wake(guarded, settlement.promoted.iter().chain([id]));
        Ok(settlement)
    }

    /// Locks the state for a decision at `now`, and enters the way in which parts may be used
    /// now: the machine may have slept for any time.
    pub(crate) fn lock_at(&self, now: MonotonicTime) -> MutexGuard<'_, Guarded> {
        let mut guarded = self.lock();
        if let Some(mode) = guarded.part_mode.as_ref().map(|source| source()) {
            guarded.core.enter_part_mode(now, mode);
        }
        guarded
    }

    /// Locks the state. The lock ignores poisoning: the core leaves no decision half made
    /// where it could panic, and a panic elsewhere must not refuse all requests.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("status", &self.status()).finish()
    }
}

/// The place of a request that is still arriving. The drop returns it.
#[derive(Debug)]
#[must_use = "a place that is dropped is returned"]
pub struct Arrival {
    admission: Admission,
    requester: Requester,
    /// The scopes that bound the number of requests, narrowest first.
    scopes: Vec<ScopeLimits>,
}

impl Arrival {
    /// Returns the requester and the scopes in which the place was taken. The caller returns
    /// the places.
    fn into_parts(mut self) -> (Requester, Vec<ScopeLimits>) {
        // Without scopes, the drop of `self` returns no place a second time.
        (self.requester.clone(), std::mem::take(&mut self.scopes))
    }
}

impl Drop for Arrival {
    fn drop(&mut self) {
        if !self.scopes.is_empty() {
            // A request that arrives has no place to run, so nothing is promoted and nothing
            // woken.
            self.admission.lock().core.leave(&self.requester, &self.scopes);
        }
    }
}

/// A hold on every limit of a request. Resolve it with [`Hold::settle`] or [`Hold::void`].
/// A hold that is dropped while it waits is voided, because the request never ran. A hold
/// that is dropped after that stays until it expires: a lost request must not be free.
#[derive(Debug)]
#[must_use = "a hold that nobody resolves blocks its limits until it expires"]
pub struct Hold {
    admission: Admission,
    id: RequestId,
    hold_state: HoldState,
    bounds: Bounds,
    figures: Figures,
    open: bool,
}

impl Hold {
    /// Returns the id of the request.
    pub fn id(&self) -> &RequestId {
        &self.id
    }

    /// Returns the state of the hold when it was made.
    pub fn state(&self) -> HoldState {
        self.hold_state
    }

    /// Returns the largest reference cost that the request may spend, if a cap or a budget
    /// applies.
    pub fn budget(&self) -> Option<DeviceNanos> {
        self.bounds.time
    }

    /// Returns the largest number of tokens of all answers, if a budget allows less than the
    /// request asks for.
    pub fn most_output(&self) -> Option<u64> {
        self.bounds.output
    }

    /// Returns the figures of the limits after this request was taken.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Waits until the request may run. Ready at once if it may run now.
    pub fn queue_ticket(&self) -> QueueTicket<'_> {
        QueueTicket { hold: self }
    }

    /// Posts the true cost.
    ///
    /// # Errors
    ///
    /// [`ResolveError`] if the hold was resolved by its id before.
    pub fn settle(mut self, now: MonotonicTime, spent: Spent) -> Result<Settlement, ResolveError> {
        // Set first: the drop must not void a hold that is resolved here.
        self.open = false;
        self.admission.settle(now, &self.id, spent)
    }

    /// Returns everything that the hold took.
    ///
    /// # Errors
    ///
    /// [`ResolveError`] if the hold was resolved by its id before, or has expired.
    pub fn void(mut self, now: MonotonicTime) -> Result<Settlement, ResolveError> {
        self.open = false;
        self.admission.void(now, &self.id)
    }

    /// Returns everything that the hold took, and takes the host time that the form of the
    /// answer was worked on before the worker refused the form.
    ///
    /// # Errors
    ///
    /// As [`Self::void`].
    pub fn void_form(
        mut self,
        now: MonotonicTime,
        grammar_time: Duration,
    ) -> Result<Settlement, ResolveError> {
        self.open = false;
        self.admission.resolve(now, &self.id, |core| core.void(now, &self.id, grammar_time))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        // Only holds that never ran are returned here. No clock is at hand and none is
        // needed: at time zero buckets do not refill.
        let mut guarded = self.admission.lock();
        // The void below does not go through `wake`, which would remove the waker.
        guarded.wakers.remove(&self.id);
        if guarded.core.state(&self.id) == Some(HoldState::Queued) {
            // The hold is queued, so the void succeeds and promotes no other request.
            let _ = guarded.core.void(MonotonicTime::default(), &self.id, Duration::ZERO);
        }
    }
}

/// The wait of a [`Hold`] in its queue. The future is ready when the request may run.
#[derive(Debug)]
#[must_use = "a turn does nothing unless awaited"]
pub struct QueueTicket<'a> {
    hold: &'a Hold,
}

/// The reason for which a waiting hold will never run. Nothing is held any more.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueTicketLost {
    /// The queue deadline passed, or the hold was resolved by its id.
    #[error("the hold ended while it waited for a place")]
    Ended,
    /// The queue of a shared scope was full, and a request of a tenant with fewer waiting
    /// requests came.
    #[error("the hold gave its place in the queue of {} to another tenant", .0.scope)]
    GaveWay(Box<Refusal>),
}

impl Future for QueueTicket<'_> {
    type Output = Result<(), QueueTicketLost>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let hold = self.hold;
        let mut guarded = hold.admission.lock();
        match guarded.core.state(&hold.id) {
            Some(HoldState::Running) => Poll::Ready(Ok(())),
            None => Poll::Ready(Err(guarded
                .core
                .refusal_of(&hold.id)
                .map_or(QueueTicketLost::Ended, |refusal| {
                    QueueTicketLost::GaveWay(Box::new(refusal.clone()))
                }))),
            Some(HoldState::Queued) => {
                // Stored under the same lock that read the state, so no promotion can be
                // missed.
                guarded.wakers.insert(hold.id.clone(), context.waker().clone());
                Poll::Pending
            }
        }
    }
}
