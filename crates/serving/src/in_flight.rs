//! The requests that run or have just ended.
//!
//! A query for the usage of such a request waits for the ledger, instead of
//! being told that the request does not exist. Requests of a revoked key are
//! ended through this map. An entry lives from admission until the ledger has
//! the request's record, or for a while after the request's end if no record
//! comes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tollgate_domain::block::Attempt;
use tollgate_domain::{Caller, KeyId, RequestId, TenantId};

/// Time that an ended request is remembered while its record is awaited.
const RECORD_TIMEOUT: Duration = Duration::from_secs(30);

/// The requests in flight; clones share them. Admission bounds the number of
/// running requests, and the private `RECORD_TIMEOUT` the life of ended ones.
#[derive(Clone, Debug, Default)]
pub struct InFlight {
    entries: Arc<Mutex<HashMap<RequestId, Entry>>>,
}

#[derive(Debug)]
struct Entry {
    caller: Caller,
    /// Cancelled when the caller's key was revoked and the request must end.
    revoked: CancellationToken,
    stage: watch::Sender<Stage>,
    /// The number of the latest placement; `None` before the first.
    attempt: Option<u32>,
    /// The time when the request's task ended.
    ended: Option<Instant>,
}

/// The progress of a request towards its record in the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The request's task runs.
    Running,
    /// The task has ended; the ledger does not have the record yet.
    Ended,
    /// The ledger has the record.
    Recorded,
}

/// The entry of a request in flight, held by the request's task. Dropping the
/// entry notes that the task has ended.
#[derive(Debug)]
pub struct InFlightTask {
    in_flight: InFlight,
    id: RequestId,
    revoked: CancellationToken,
}

impl InFlight {
    /// Notes that the task of request `id` begins.
    pub fn begin(&self, id: RequestId, caller: Caller) -> InFlightTask {
        let (stage, _) = watch::channel(Stage::Running);
        let revoked = CancellationToken::new();
        let entry = Entry { caller, revoked: revoked.clone(), stage, attempt: None, ended: None };
        self.lock().insert(id.clone(), entry);
        InFlightTask { in_flight: self.clone(), id, revoked }
    }

    /// Ends the running requests of every key for which `must_end` is true. The
    /// sweeper calls this once a second.
    pub fn end_revoked(&self, must_end: impl Fn(&KeyId) -> bool) {
        for entry in self.lock().values().filter(|entry| entry.ended.is_none()) {
            if must_end(&entry.caller.key) {
                entry.revoked.cancel();
            }
        }
    }

    /// Notes that the ledger has the end of `attempt`. The end of an attempt
    /// before the latest one does not change the request's stage.
    pub fn recorded(&self, attempt: &Attempt) {
        let mut entries = self.lock();
        let id = &attempt.request;
        let Some(entry) = entries.get(id).filter(|entry| entry.attempt <= Some(attempt.attempt))
        else {
            return;
        };
        // `send` would keep the old stage if no query waits.
        entry.stage.send_replace(Stage::Recorded);
        if entry.ended.is_some() {
            entries.remove(id);
        }
    }

    /// Returns the stage of `tenant`'s request `id` if the request is in flight.
    /// The receiver reports later stages.
    pub fn stage(&self, tenant: &TenantId, id: &RequestId) -> Option<watch::Receiver<Stage>> {
        let entries = self.lock();
        // Another tenant's request must look like one that does not exist.
        let entry = entries.get(id).filter(|entry| entry.caller.tenant == *tenant)?;
        Some(entry.stage.subscribe())
    }

    /// True if `id` is in flight.
    pub fn contains(&self, id: &RequestId) -> bool {
        self.lock().contains_key(id)
    }

    /// Forgets ended requests without a record in time. The sweeper
    /// calls this once a second.
    #[expect(
        clippy::disallowed_methods,
        reason = "the memory of ended requests is on the runtime's clock"
    )]
    pub fn sweep(&self) {
        let now = Instant::now();
        self.lock().retain(|_, entry| entry.ended.is_none_or(|ended| now - ended < RECORD_TIMEOUT));
    }

    /// Returns the number of remembered requests.
    pub fn len(&self) -> usize {
        self.lock().len()
    }

    /// True if no request is remembered.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    #[expect(
        clippy::disallowed_methods,
        reason = "the memory of ended requests is on the runtime's clock"
    )]
    fn ended(&self, id: &RequestId) {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(id) else { return };
        // A request that was never placed leaves no record to wait for.
        if *entry.stage.borrow() == Stage::Recorded || entry.attempt.is_none() {
            entries.remove(id);
            return;
        }
        entry.ended = Some(Instant::now());
        entry.stage.send_replace(Stage::Ended);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Entry>> {
        // Every change under the lock is complete before a panic could happen.
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InFlightTask {
    /// Returns a token that is cancelled when the request's key was revoked and
    /// the request must end.
    pub fn revoked(&self) -> CancellationToken {
        self.revoked.clone()
    }

    /// Notes placement `number` of the request.
    pub fn placed(&self, number: u32) {
        if let Some(entry) = self.in_flight.lock().get_mut(&self.id) {
            entry.attempt = Some(number);
            // The record of an earlier placement may have come; the request waits for this one's.
            entry.stage.send_replace(Stage::Running);
        }
    }

    /// Notes that the request's task has ended.
    pub fn end(self) {
        // `Drop` does the work, so that a task that panics has ended as well.
    }
}

impl Drop for InFlightTask {
    fn drop(&mut self) {
        self.in_flight.ended(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names() -> (Caller, TenantId, RequestId) {
        let tenant = |name| TenantId::new(name).expect("a name");
        let key = KeyId::new("0123456789").expect("a name");
        let acme = Caller { tenant: tenant("acme"), key };
        (acme, tenant("other"), RequestId::from_random(7))
    }

    fn attempt(id: &RequestId, attempt: u32) -> Attempt {
        Attempt { request: id.clone(), attempt }
    }

    #[tokio::test(start_paused = true)]
    async fn in_flight_entry_lives_until_recorded_and_ended() {
        let (acme, other, id) = names();
        for recorded_first in [true, false] {
            let in_flight = InFlight::default();
            let task = in_flight.begin(id.clone(), acme.clone());
            assert!(in_flight.stage(&other, &id).is_none(), "the entry belongs to another tenant");
            let stage = in_flight.stage(&acme.tenant, &id).expect("in flight");
            task.placed(1);
            in_flight.recorded(&attempt(&id, 0));
            assert_eq!(
                *stage.borrow(),
                Stage::Running,
                "an earlier attempt must not change the stage"
            );
            if recorded_first {
                in_flight.recorded(&attempt(&id, 1));
                task.end();
            } else {
                task.end();
                assert_eq!(*stage.borrow(), Stage::Ended);
                in_flight.recorded(&attempt(&id, 1));
            }
            assert_eq!(*stage.borrow(), Stage::Recorded);
            assert_eq!(in_flight.len(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn in_flight_entry_expires_without_record() {
        let (acme, _, id) = names();
        let in_flight = InFlight::default();
        in_flight.begin(id.clone(), acme.clone()).end();
        assert_eq!(in_flight.len(), 0, "a request without a placement has no record to wait for");
        let task = in_flight.begin(id.clone(), acme.clone());
        task.placed(0);
        tokio::time::advance(RECORD_TIMEOUT * 10).await;
        in_flight.sweep();
        assert_eq!(in_flight.len(), 1, "the request still runs");
        task.end();
        in_flight.sweep();
        assert_eq!(in_flight.len(), 1, "the request has just ended");
        tokio::time::advance(RECORD_TIMEOUT).await;
        in_flight.sweep();
        assert_eq!(in_flight.len(), 0);
    }
}
