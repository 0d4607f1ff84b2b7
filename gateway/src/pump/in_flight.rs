//! Which requests are running or have just ended: so that whoever asks for
//! the usage of one is told to wait for the ledger rather than that it never
//! was, and so that those of a revoked key can be ended. An entry lives from admission until the ledger has its record, or a
//! while after its end where no record will come.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tollgate_domain::block::Attempt;
use tollgate_domain::{Caller, KeyId, RequestId, TenantId};

/// How long an ended request is remembered for a record to come.
const MEMORY: Duration = Duration::from_secs(30);

/// The requests in flight; clones share them. Admission bounds how many run,
/// [`MEMORY`] how long the others stay.
#[derive(Clone, Debug, Default)]
pub(crate) struct InFlight {
    entries: Arc<Mutex<HashMap<RequestId, Entry>>>,
}

#[derive(Debug)]
struct Entry {
    caller: Caller,
    /// Cancelled when its key was revoked and its requests have to end.
    revoked: CancellationToken,
    stage: watch::Sender<Stage>,
    /// Its latest placement; none while it has none.
    attempt: Option<u32>,
    /// Set when its task ended.
    ended: Option<Instant>,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its task runs.
    Running,
    /// Its task has ended; the ledger does not know yet.
    Ended,
    /// The ledger has its record.
    Recorded,
}

/// A request in flight: its task's side.
#[derive(Debug)]
pub(crate) struct Open {
    in_flight: InFlight,
    id: RequestId,
    revoked: CancellationToken,
}

impl InFlight {
    /// Notes that `id` begins.
    pub(crate) fn begin(&self, id: RequestId, caller: Caller) -> Open {
        let (stage, _) = watch::channel(Stage::Running);
        let revoked = CancellationToken::new();
        let entry = Entry { caller, revoked: revoked.clone(), stage, attempt: None, ended: None };
        self.lock().insert(id.clone(), entry);
        Open { in_flight: self.clone(), id, revoked }
    }

    /// Ends the requests of every key that `has_to_end`; call it each second.
    pub(crate) fn end_revoked(&self, has_to_end: impl Fn(&KeyId) -> bool) {
        for entry in self.lock().values().filter(|entry| entry.ended.is_none()) {
            if has_to_end(&entry.caller.key) {
                entry.revoked.cancel();
            }
        }
    }

    /// Notes that the ledger knows how `attempt` ended. Of an attempt that is
    /// not the last one that says nothing about the request.
    pub(crate) fn recorded(&self, attempt: &Attempt) {
        let mut entries = self.lock();
        let id = &attempt.request;
        let Some(entry) = entries.get(id).filter(|entry| entry.attempt <= Some(attempt.attempt))
        else {
            return;
        };
        entry.stage.send_replace(Stage::Recorded);
        if entry.ended.is_some() {
            entries.remove(id);
        }
    }

    /// Where `tenant`'s request `id` is, if it is in flight; follow the
    /// receiver to wait for its record.
    pub(crate) fn stage(
        &self,
        tenant: &TenantId,
        id: &RequestId,
    ) -> Option<watch::Receiver<Stage>> {
        let entries = self.lock();
        let entry = entries.get(id).filter(|entry| entry.caller.tenant == *tenant)?;
        Some(entry.stage.subscribe())
    }

    /// Whether `id` is in flight.
    pub(crate) fn knows(&self, id: &RequestId) -> bool {
        self.lock().contains_key(id)
    }

    /// Forgets those whose record has not come in time; call it each second.
    pub(crate) fn sweep(&self) {
        let now = Instant::now();
        self.lock().retain(|_, entry| entry.ended.is_none_or(|ended| now - ended < MEMORY));
    }

    /// How many are remembered.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    fn ended(&self, id: &RequestId) {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(id) else { return };
        // One that was never placed leaves no record to wait for.
        if *entry.stage.borrow() == Stage::Recorded || entry.attempt.is_none() {
            entries.remove(id);
            return;
        }
        entry.ended = Some(Instant::now());
        entry.stage.send_replace(Stage::Ended);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<RequestId, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    /// Cancelled when the request has to end for its key was revoked.
    pub(crate) fn revoked(&self) -> CancellationToken {
        self.revoked.clone()
    }

    /// Notes that it is placed for the `number`th time.
    pub(crate) fn placed(&self, number: u32) {
        if let Some(entry) = self.in_flight.lock().get_mut(&self.id) {
            entry.attempt = Some(number);
            entry.stage.send_replace(Stage::Running);
        }
    }

    /// Notes that its task has ended.
    pub(crate) fn end(self) {
        // Dropping says it: a task that panicked has ended as well.
    }
}

impl Drop for Open {
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
    async fn an_entry_lives_until_it_is_recorded_and_ended() {
        let (acme, other, id) = names();
        for recorded_first in [true, false] {
            let in_flight = InFlight::default();
            let open = in_flight.begin(id.clone(), acme.clone());
            assert!(in_flight.stage(&other, &id).is_none(), "another tenant's");
            let stage = in_flight.stage(&acme.tenant, &id).expect("in flight");
            open.placed(1);
            in_flight.recorded(&attempt(&id, 0));
            assert_eq!(*stage.borrow(), Stage::Running, "the attempt before says nothing");
            if recorded_first {
                in_flight.recorded(&attempt(&id, 1));
                open.end();
            } else {
                open.end();
                assert_eq!(*stage.borrow(), Stage::Ended);
                in_flight.recorded(&attempt(&id, 1));
            }
            assert_eq!(*stage.borrow(), Stage::Recorded);
            assert_eq!(in_flight.len(), 0);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_that_is_never_recorded_is_forgotten() {
        let (acme, _, id) = names();
        let in_flight = InFlight::default();
        in_flight.begin(id.clone(), acme.clone()).end();
        assert_eq!(in_flight.len(), 0, "never placed, nothing to wait for");
        let open = in_flight.begin(id.clone(), acme.clone());
        open.placed(0);
        tokio::time::advance(MEMORY * 10).await;
        in_flight.sweep();
        assert_eq!(in_flight.len(), 1, "it still runs");
        open.end();
        in_flight.sweep();
        assert_eq!(in_flight.len(), 1, "it has just ended");
        tokio::time::advance(MEMORY).await;
        in_flight.sweep();
        assert_eq!(in_flight.len(), 0);
    }
}
