//! The core behind one mutex, and the values that callers hold. A decision
//! takes microseconds, so a lock is shorter than any message.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tollgate_domain::{DeviceClass, DeviceNanos, MonotonicTime, RequestId, UtcTime};

use crate::core::Core;
use crate::figures::Figures;
use crate::refusal::Refusal;
use crate::scope::{Period, Scope, ScopeLimits};
use crate::terms::{
    AdmissionOptions, AdmissionStatus, HoldState, Reserve, ReserveError, ResolveError, Settlement,
    Spent, Swept,
};

/// Admission for one gateway; clones share the same state.
#[derive(Clone)]
pub struct Admission {
    guarded: Arc<Mutex<Guarded>>,
}

struct Guarded {
    core: Core,
    /// Of those that wait for a place; gone when the hold ends or runs.
    wakers: HashMap<RequestId, Waker>,
}

impl Admission {
    /// An admission that knows no spend yet: see [`Self::restore_spend`].
    pub fn new(options: AdmissionOptions) -> Self {
        let guarded = Guarded { core: Core::new(options), wakers: HashMap::new() };
        Self { guarded: Arc::new(Mutex::new(guarded)) }
    }

    /// Takes every limit of the request, or none.
    ///
    /// # Errors
    /// The refusal that binds longest, or an id that was used before.
    pub fn reserve(
        &self,
        now: MonotonicTime,
        utc: UtcTime,
        request: Reserve,
    ) -> Result<Hold, ReserveError> {
        let id = request.id.clone();
        let reserved = self.lock().core.reserve(now, utc, request)?;
        Ok(Hold {
            admission: self.clone(),
            id,
            hold_state: reserved.hold_state,
            budget: reserved.budget,
            figures: reserved.figures,
            open: true,
        })
    }

    /// Whether the rate of requests of one of `scopes` is spent already, so
    /// that no request of theirs can pass now, whatever it costs. Takes
    /// nothing: who is not refused here may still be by [`Self::reserve`].
    pub fn check_request_rate(
        &self,
        now: MonotonicTime,
        scopes: &[ScopeLimits],
    ) -> Option<Box<Refusal>> {
        self.lock().core.check_request_rate(now, scopes)
    }

    /// Whether one of `scopes` has no place for a request to run and none to
    /// wait, whatever it costs. Takes nothing, as [`Self::check_request_rate`].
    pub fn check_concurrency(&self, scopes: &[ScopeLimits]) -> Option<Box<Refusal>> {
        self.lock().core.check_concurrency(scopes)
    }

    /// Posts the true cost of a hold by its id, also where the hold has
    /// expired: late usage is charged, once.
    ///
    /// # Errors
    /// [`ResolveError`] where it has been resolved before or is not known.
    pub fn settle(
        &self,
        now: MonotonicTime,
        id: &RequestId,
        spent: Spent,
    ) -> Result<Settlement, ResolveError> {
        self.resolve(id, |core| core.settle(now, id, spent))
    }

    /// Gives all of a hold back, by its id: it never ran, or its end was our
    /// fault.
    ///
    /// # Errors
    /// [`ResolveError`] where it has ended before or is not known.
    pub fn void(&self, now: MonotonicTime, id: &RequestId) -> Result<Settlement, ResolveError> {
        self.resolve(id, |core| core.void(now, id))
    }

    /// Ends what is overdue and forgets what is idle; call it about once a
    /// second. This alone prunes.
    pub fn expire(&self, now: MonotonicTime) -> Swept {
        let mut guarded = self.lock();
        let swept = guarded.core.expire(now);
        let woken: Vec<Waker> = swept
            .timed_out
            .iter()
            .chain(&swept.expired)
            .chain(&swept.promoted)
            .filter_map(|id| guarded.wakers.remove(id))
            .collect();
        drop(guarded);
        woken.into_iter().for_each(Waker::wake);
        swept
    }

    /// Adds spend that the ledger knows of this day or month: at start, before
    /// the first admission, each amount once (they add up). Restore scopes that
    /// have a cap only, since what is restored is remembered until its period
    /// is over.
    pub fn restore_spend(
        &self,
        scope: Scope,
        class: &DeviceClass,
        period: Period,
        spent: DeviceNanos,
    ) {
        self.lock().core.restore_spend(scope, class, period, spent);
    }

    /// How much is being kept.
    pub fn status(&self) -> AdmissionStatus {
        self.lock().core.status()
    }

    fn resolve(
        &self,
        id: &RequestId,
        act: impl FnOnce(&mut Core) -> Result<Settlement, ResolveError>,
    ) -> Result<Settlement, ResolveError> {
        let mut guarded = self.lock();
        let settlement = act(&mut guarded.core)?;
        let woken: Vec<Waker> = settlement
            .promoted
            .iter()
            .chain([id])
            .filter_map(|id| guarded.wakers.remove(id))
            .collect();
        drop(guarded); // a waker may run code that comes back here
        woken.into_iter().for_each(Waker::wake);
        Ok(settlement)
    }

    /// A panic elsewhere must not close the gate: the core leaves no decision
    /// half made where it could panic.
    fn lock(&self) -> MutexGuard<'_, Guarded> {
        self.guarded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Admission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Admission").field("status", &self.status()).finish()
    }
}

/// Every limit, taken. Resolve it by [`Hold::settle`] or [`Hold::void`]. One
/// that is dropped while it waits is voided, since it never ran; one that may
/// have run keeps holding until it expires: a lost request is never silently
/// free.
#[derive(Debug)]
#[must_use = "a hold that nobody resolves blocks its limits until it expires"]
pub struct Hold {
    admission: Admission,
    id: RequestId,
    hold_state: HoldState,
    budget: Option<DeviceNanos>,
    figures: Figures,
    open: bool,
}

impl Hold {
    /// Whose hold it is.
    pub fn id(&self) -> &RequestId {
        &self.id
    }

    /// Whether it could run at once when it was made.
    pub fn state(&self) -> HoldState {
        self.hold_state
    }

    /// The most reference cost that it may spend, where a cap applies.
    pub fn budget(&self) -> Option<DeviceNanos> {
        self.budget
    }

    /// Where the limits stood after this request was taken.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// Waits for a place to run; ready at once where it has one.
    pub fn queue_ticket(&self) -> QueueTicket<'_> {
        QueueTicket { hold: self }
    }

    /// Posts the true cost.
    ///
    /// # Errors
    /// [`ResolveError`] where the hold was resolved by its id before.
    pub fn settle(mut self, now: MonotonicTime, spent: Spent) -> Result<Settlement, ResolveError> {
        self.open = false;
        self.admission.settle(now, &self.id, spent)
    }

    /// Gives all of it back.
    ///
    /// # Errors
    /// [`ResolveError`] where the hold was resolved by its id before, or has
    /// expired.
    pub fn void(mut self, now: MonotonicTime) -> Result<Settlement, ResolveError> {
        self.open = false;
        self.admission.void(now, &self.id)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        // Only what never ran is given back here. There is no clock at hand, and
        // none is needed: at time zero buckets do not refill.
        let mut guarded = self.admission.lock();
        guarded.wakers.remove(&self.id);
        if guarded.core.state(&self.id) == Some(HoldState::Queued) {
            // It is queued, so there is a hold to void and nobody to promote.
            let _ = guarded.core.void(MonotonicTime::default(), &self.id);
        }
    }
}

/// The wait of a [`Hold`] for a place to run.
#[derive(Debug)]
#[must_use = "a turn does nothing unless awaited"]
pub struct QueueTicket<'a> {
    hold: &'a Hold,
}

/// Why a waiting hold will never run: its queue deadline passed, or it was
/// resolved by its id. Nothing is held any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the hold ended while it waited for a place")]
pub struct QueueTicketLost;

impl Future for QueueTicket<'_> {
    type Output = Result<(), QueueTicketLost>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let hold = self.hold;
        let mut guarded = hold.admission.lock();
        match guarded.core.state(&hold.id) {
            Some(HoldState::Running) => Poll::Ready(Ok(())),
            None => Poll::Ready(Err(QueueTicketLost)),
            Some(HoldState::Queued) => {
                guarded.wakers.insert(hold.id.clone(), context.waker().clone());
                Poll::Pending
            }
        }
    }
}
