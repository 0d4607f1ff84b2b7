//! Idempotency keys: a request that is sent again is not run again.
//!
//! Within one process a repeat waits for the first request and gets its answer.
//! The request that a key stands for is on disk before the request can cost
//! anything. After a restart the ledger tells if that request was charged. If it
//! was, a repeat is told where to find the figures, because answers are never
//! written to disk. A key is therefore never charged twice without notice.
//!
//! Answers are bounded by bytes, keys by tenant and age, waiting repeats by key.

mod memory;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest;
use bytes::Bytes;
use tokio::sync::watch;
use tollgate_config::Idempotency as IdempotencyConfig;
use tollgate_domain::{Caller, RequestId, Usage, UtcTime};
use tollgate_ledger::{LedgerReader, RequestState};

use self::memory::{KeyTable, Outcome};
use crate::Clock;
use crate::error::{Fault, IdempotencyRefusal, RequestError};
pub use tollgate_ledger::idempotency::IdempotencyStoreError;
use tollgate_ledger::idempotency::{
    FoundRecord, IdempotencyRecord, IdempotencyStore, KeyDigest, PutRecord, RecordMaker,
};

/// The text of an idempotency key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IdempotencyKey(String);

/// The keys in use. Clones share them.
#[derive(Clone)]
pub struct Idempotency {
    shared: Arc<IdempotencyState>,
}

struct IdempotencyState {
    options: IdempotencyConfig,
    store: IdempotencyStore,
    ledger: LedgerReader,
    clock: Clock,
    /// The start of this process. Records of an earlier process may still come in.
    started: UtcTime,
    keys: Mutex<KeyTable>,
}

/// An answer that is kept for repeats. The front door writes and reads its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAnswer {
    /// The head of the answer, in a form of the front door's own.
    pub head: Bytes,
    /// The body of the answer; for a stream, all of it.
    pub body: Bytes,
}

/// The claim of a request to its key.
#[derive(Clone, Debug)]
pub struct IdempotencyClaim {
    /// The caller that owns the key.
    pub caller: Caller,
    /// The key.
    pub key: IdempotencyKey,
    /// The digest of the request, by [`fingerprint`].
    pub fingerprint: [u8; 32],
    /// The request.
    pub request: RequestId,
}

/// The result of claiming an idempotency key.
pub enum ClaimOutcome {
    /// The request is the first with its key and must run.
    First(IdempotencyGuard),
    /// The request repeats `first`, which ended like this.
    Repeat {
        /// The first request.
        first: RequestId,
        /// The first request's answer, or the error that it ended with.
        answer: Result<Arc<StoredAnswer>, RequestError>,
    },
}

/// The right to run a request with a key. Dropping the guard without a result
/// frees the key.
pub struct IdempotencyGuard {
    keys: Idempotency,
    digest: KeyDigest,
    claim: IdempotencyClaim,
    outcome: Arc<watch::Sender<Outcome>>,
    /// The request that the key stood for before. It is over and cost nothing.
    replaces: Option<RequestId>,
}

impl IdempotencyKey {
    /// Characters of the longest key.
    pub const LONGEST: usize = 255;

    /// Takes a key of 1 to [`Self::LONGEST`] visible ASCII characters. Returns
    /// `None` for other bytes.
    pub fn new(bytes: &[u8]) -> Option<Self> {
        let fits =
            (1..=Self::LONGEST).contains(&bytes.len()) && bytes.iter().all(u8::is_ascii_graphic);
        let text = std::str::from_utf8(bytes).ok().filter(|_| fits)?;
        Some(Self(text.to_owned()))
    }

    /// Returns the key's bytes, visible ASCII.
    pub fn as_bytes(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

/// Returns the digest of an endpoint and a body in one or more pieces. Equal requests
/// have equal digests, however their bodies are cut.
pub fn fingerprint<'a>(endpoint: &str, body: impl IntoIterator<Item = &'a [u8]>) -> [u8; 32] {
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(endpoint.as_bytes());
    hash.update(b"\n");
    body.into_iter().for_each(|piece| hash.update(piece));
    finish(hash)
}

fn finish(hash: digest::Context) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(hash.finish().as_ref());
    bytes
}

impl IdempotencyClaim {
    fn digest(&self) -> KeyDigest {
        let mut hash = digest::Context::new(&digest::SHA256);
        // A line feed separates the parts: names and visible ASCII hold none.
        for part in [self.caller.tenant.as_str(), self.caller.key.as_str(), &self.key.0] {
            hash.update(part.as_bytes());
            hash.update(b"\n");
        }
        finish(hash)
    }
}

/// The state of a key in memory, for one claim.
enum MemoryClaim {
    /// The key was free and is now the claim's.
    First(IdempotencyGuard),
    /// Another request has the key; the receiver reports its result.
    Waits(watch::Receiver<Outcome>, RequestId),
}

impl Idempotency {
    /// Opens the records in folder `data`.
    ///
    /// # Errors
    /// [`IdempotencyStoreError`].
    pub fn open(
        data: &Path,
        options: IdempotencyConfig,
        ledger: LedgerReader,
        clock: Clock,
    ) -> Result<Self, IdempotencyStoreError> {
        let store = IdempotencyStore::open(data, options.kept, options.keys_per_tenant)?;
        Ok(Self::over(store, options, ledger, clock))
    }

    /// Keeps the records in `store`, which was opened with the same options.
    pub fn over(
        store: IdempotencyStore,
        options: IdempotencyConfig,
        ledger: LedgerReader,
        clock: Clock,
    ) -> Self {
        let started = clock.utc();
        let keys = Mutex::default();
        let state = IdempotencyState { options, store, ledger, clock, started, keys };
        Self { shared: Arc::new(state) }
    }

    /// Claims a key for a request. A repeat waits here for the first request.
    /// `let_go` is called before each wait: it gives back what a repeat does not need,
    /// and returns true if the request can still run if the first one leaves no
    /// result.
    ///
    /// # Errors
    /// The key stands for another body, for a request that was charged without a
    /// kept answer, or for a request that is not settled yet; or the first request left
    /// no result and this one cannot run any more.
    pub async fn claim(
        &self,
        claim: IdempotencyClaim,
        mut let_go: impl FnMut() -> bool,
    ) -> Result<ClaimOutcome, RequestError> {
        loop {
            let (mut outcome, first) = match self.claim_in_memory(&claim)? {
                MemoryClaim::First(mut guard) => {
                    guard.replaces = self.check_store(&guard).await?;
                    return Ok(ClaimOutcome::First(guard));
                }
                MemoryClaim::Waits(outcome, first) => (outcome, first),
            };
            let can_run = let_go();
            let ended = outcome.wait_for(|outcome| !matches!(outcome, Outcome::Pending)).await;
            // A dropped sender means that the first request left no result.
            match ended.map_or(Outcome::Released, |ended| ended.clone()) {
                Outcome::Answered(answer) => {
                    return Ok(ClaimOutcome::Repeat { first, answer: Ok(answer) });
                }
                Outcome::Charged(error) => {
                    return Ok(ClaimOutcome::Repeat { first, answer: Err(error) });
                }
                Outcome::Forgotten => {
                    return Err(IdempotencyRefusal::Charged { request: first }.into());
                }
                Outcome::Failed(error) => return Err(error),
                // The client sends the request again, with what this one has let go.
                Outcome::Released | Outcome::Pending if !can_run => {
                    return Err(IdempotencyRefusal::Unsettled { request: first }.into());
                }
                // One of the waiting requests becomes the first now.
                Outcome::Released | Outcome::Pending => {}
            }
        }
    }

    /// Returns the bytes of the longest body that is kept.
    pub fn largest_answer(&self) -> usize {
        self.shared.options.largest_answer.0 as usize
    }

    fn claim_in_memory(&self, claim: &IdempotencyClaim) -> Result<MemoryClaim, RequestError> {
        let digest = claim.digest();
        // Read before the lock, so that the lock is held for less time.
        let began = self.shared.clock.utc();
        let mut keys = self.lock();
        // No sweeper cleans the table, so each claim forgets what is too old.
        keys.forget_before(UtcTime(began.0.saturating_sub(self.kept_ns())));
        if let Some(entry) = keys.get(&digest) {
            if entry.fingerprint != claim.fingerprint {
                return Err(IdempotencyRefusal::OtherBody.into());
            }
            // Each repeat that waits holds a connection and a small body.
            if entry.outcome.receiver_count() >= MOST_WAITING {
                let request = entry.request.clone();
                return Err(IdempotencyRefusal::Unsettled { request }.into());
            }
            return Ok(MemoryClaim::Waits(entry.outcome.subscribe(), entry.request.clone()));
        }
        let outcome = keys.insert(digest, claim.fingerprint, claim.request.clone(), began);
        let (keys, claim) = (self.clone(), claim.clone());
        let replaces = None;
        Ok(MemoryClaim::First(IdempotencyGuard { keys, digest, claim, outcome, replaces }))
    }

    /// Looks in the durable store for keys from earlier processes, for those of other gateways,
    /// and for keys evicted from memory. Returns the request that the key stood for, if it is
    /// over and cost nothing.
    async fn check_store(
        &self,
        guard: &IdempotencyGuard,
    ) -> Result<Option<RequestId>, RequestError> {
        let shared = Arc::clone(&self.shared);
        let (digest, fingerprint) = (guard.digest, guard.claim.fingerprint);
        let tenant = guard.claim.caller.tenant.clone();
        // On the blocking pool, because the store and the ledger wait for the disk.
        let checked = tokio::task::spawn_blocking(move || {
            let found = shared.store.find(&digest, shared.clock.utc()).map_err(unavailable)?;
            let Some(FoundRecord { record, maker }) = found else { return Ok(None) };
            let IdempotencyRecord { fingerprint: before, request } = record;
            // The answer to another body would be wrong.
            if before != fingerprint {
                return Err(IdempotencyRefusal::OtherBody.into());
            }
            let row = shared.ledger.request(&tenant, &request).map_err(unavailable)?;
            let age = shared.clock.utc().0.saturating_sub(shared.started.0);
            let (never_ran, cost_nothing) = match row {
                None => (true, false),
                Some(row) if row.state != RequestState::Posted => (false, false),
                Some(row) if row.usage == Usage::default() => (false, true),
                Some(_) => return Err(IdempotencyRefusal::Charged { request }.into()),
            };
            let is_over = match maker {
                // Every worker has reported by then.
                RecordMaker::ThisGateway => {
                    cost_nothing || never_ran && age >= SETTLING.as_nanos() as u64
                }
                // It may still run, or have a second attempt.
                RecordMaker::OtherGateway => false,
                RecordMaker::SettledGateway => cost_nothing || never_ran,
            };
            if is_over {
                return Ok(Some(request));
            }
            Err(IdempotencyRefusal::Unsettled { request }.into())
        });
        checked.await.unwrap_or(Err(RequestError::INTERNAL))
    }

    fn kept_ns(&self) -> u64 {
        u64::try_from(self.shared.options.kept.as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, KeyTable> {
        // Every change under the lock is complete before a panic could happen.
        self.shared.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IdempotencyGuard {
    /// Writes to disk which request the key stands for. Call this before the
    /// request can cost anything.
    ///
    /// # Errors
    /// The disk does not take the record, or the tenant has too many keys.
    pub async fn record(&self) -> Result<(), RequestError> {
        let shared = Arc::clone(&self.keys.shared);
        let (digest, claim, replaces) = (self.digest, self.claim.clone(), self.replaces.clone());
        let recorded = tokio::task::spawn_blocking(move || {
            let IdempotencyClaim { caller, key: _, fingerprint, request } = claim;
            let record = IdempotencyRecord { fingerprint, request };
            let limit = shared.options.keys_per_tenant;
            let (put, now) = ((&record, replaces.as_ref()), shared.clock.utc());
            match shared.store.put(&digest, &caller.tenant, put, now).map_err(unavailable)? {
                PutRecord::Taken => Ok(()),
                PutRecord::TooMany => Err(IdempotencyRefusal::TooManyKeys { limit }.into()),
                // Another gateway was faster.
                PutRecord::Other(request) => Err(IdempotencyRefusal::Unsettled { request }.into()),
            }
        });
        recorded.await.unwrap_or(Err(RequestError::INTERNAL))
    }

    /// Keeps the request's answer for its repeats.
    pub fn answered(self, answer: StoredAnswer) {
        self.keep(Outcome::Answered(Arc::new(answer)));
    }

    /// Keeps `error` as the answer of a request that failed and was charged.
    pub fn charged(self, error: RequestError) {
        self.keep(Outcome::Charged(error));
    }

    /// Frees the key of a request that failed and cost nothing. Requests that wait
    /// get `error`.
    pub async fn free(self, error: RequestError) {
        self.outcome.send_replace(Outcome::Failed(error));
        // The key stays taken until the record is gone: the guard is dropped after this.
        self.forget().await;
    }

    /// Frees the key of a request that never ran. One of the requests that wait becomes
    /// the first.
    pub async fn release(self) {
        // Before the drop of the guard: the next first request looks on the disk.
        self.forget().await;
    }

    /// Waits until no repeat waits for the request's result.
    pub async fn unawaited(&self) {
        self.outcome.closed().await;
    }

    /// Deletes the key's record from the disk.
    async fn forget(&self) {
        let (shared, digest) = (Arc::clone(&self.keys.shared), self.digest);
        let request = self.claim.request.clone();
        let removed = tokio::task::spawn_blocking(move || shared.store.remove(&digest, &request));
        if let Ok(Err(error)) = removed.await {
            // Not fatal: the ledger has no charge for the request, so a later repeat
            // runs once the ledger is settled.
            let error = &error as &dyn std::error::Error;
            tracing::warn!(
                error,
                "failed to delete an idempotency record; repeats may be refused for a while"
            );
        }
    }

    fn keep(self, outcome: Outcome) {
        let options = &self.keys.shared.options;
        self.keys.lock().keep(&self.digest, outcome, options);
    }
}

impl Drop for IdempotencyGuard {
    fn drop(&mut self) {
        // A copy: `keep` locks the keys and then the outcome, so the reverse order could deadlock.
        let outcome = self.outcome.borrow().clone();
        if outcome.is_kept() {
            return;
        }
        self.keys.lock().remove(&self.digest);
        // Requests that wait compete for the key again.
        self.outcome.send_if_modified(|outcome| {
            let is_pending = matches!(outcome, Outcome::Pending);
            if is_pending {
                *outcome = Outcome::Released;
            }
            is_pending
        });
    }
}

fn unavailable(error: impl std::error::Error + 'static) -> RequestError {
    let error = &error as &dyn std::error::Error;
    tracing::error!(error, "cannot look up an idempotency key; the request is refused");
    Fault::LedgerUnavailable.into()
}

/// Repeats of one request that wait for it at once.
const MOST_WAITING: usize = 512;
/// Time after its start in which a gateway waits for the workers' records of its
/// predecessor's requests.
const SETTLING: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
