//! `Idempotency-Key`: a request that is sent again is not run again.
//!
//! Within this process a repeat waits for the first and gets its answer. What
//! must outlive the process is on disk before a request can cost anything:
//! which request a key stands for. After a restart the ledger tells whether
//! that one was charged; if so, a repeat hears where its figures are, because
//! answers are never written to disk. So a key is never charged twice without
//! a word.
//!
//! Bounded: answers by bytes, keys by tenant and age, waiting repeats by key.

mod intents;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use aws_lc_rs::digest;
use axum::body::{Body, Bytes};
use axum::response::Response;
use http::{HeaderMap, HeaderName, HeaderValue};
use tokio::sync::watch;
use tollgate_config::Idempotency as Options;
use tollgate_domain::{Caller, RequestId, Usage, UtcTime};
use tollgate_ledger::{LedgerReader, RequestState};

pub use self::intents::IntentsError;

use self::intents::{Intent, Intents};
use crate::Clock;
use crate::reply::{ApiError, IdempotencyRefusal};

/// Whose key, and which: a digest of tenant, credential and key.
type Scope = [u8; 32];

/// The key of a request, as its header says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IdempotencyKey(String);

/// Which keys are in use. Clones share them.
#[derive(Clone)]
pub(crate) struct Idempotency {
    shared: Arc<Shared>,
}

struct Shared {
    options: Options,
    intents: Intents,
    ledger: LedgerReader,
    clock: Clock,
    /// When this process began: what an earlier one began may still come in.
    started: UtcTime,
    known: Mutex<Known>,
}

/// What is in memory.
#[derive(Default)]
struct Known {
    keys: HashMap<Scope, Entry>,
    /// The keys in the order in which they came; the oldest go first.
    order: BTreeMap<u64, Scope>,
    next: u64,
    /// Bytes of all answers.
    size: u64,
}

struct Entry {
    number: u64,
    fingerprint: [u8; 32],
    request: RequestId,
    began: UtcTime,
    outcome: Arc<watch::Sender<Outcome>>,
}

/// How the first request with a key went.
#[derive(Clone, Debug)]
enum Outcome {
    /// It is on its way.
    Pending,
    /// It has its answer.
    Answered(Arc<Answer>),
    /// It was charged, and its answer is gone or was too long to keep.
    Forgotten,
    /// It was not charged: whoever waited is told why, and the key is free.
    Failed(ApiError),
    /// It never came to anything: one of those that waited is first now.
    Released,
}

/// An answer to give again.
#[derive(Debug)]
pub(crate) struct Answer {
    /// Its headers, or the error that it was.
    pub(crate) head: Result<HeaderMap, ApiError>,
    /// Its body, a stream's too; empty where it was an error.
    pub(crate) body: Bytes,
}

/// What a request asks of its key.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) caller: Caller,
    pub(crate) key: IdempotencyKey,
    /// Of what is asked.
    pub(crate) fingerprint: [u8; 32],
    pub(crate) request: RequestId,
}

/// What a request is to its key.
pub(crate) enum Claimed {
    /// The first: it runs, and says how it went.
    First(First),
    /// A repeat of one that has its answer.
    Repeat(Result<Response, ApiError>),
}

/// The right to run with a key. Dropped without a word it frees the key.
pub(crate) struct First {
    keys: Idempotency,
    scope: Scope,
    ask: Ask,
    outcome: Arc<watch::Sender<Outcome>>,
}

impl IdempotencyKey {
    /// The key in `headers`, if there is one.
    ///
    /// # Errors
    /// 400 where there are several, or it is not 1 to 255 visible characters
    /// of ASCII.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Option<Self>, ApiError> {
        let mut values = headers.get_all(IDEMPOTENCY_KEY).iter();
        let Some(value) = values.next() else { return Ok(None) };
        let bytes = value.as_bytes();
        let fits = (1..=LONGEST_KEY).contains(&bytes.len())
            && bytes.iter().all(u8::is_ascii_graphic)
            && values.next().is_none();
        match std::str::from_utf8(bytes) {
            Ok(key) if fits => Ok(Some(Self(key.to_owned()))),
            _ => Err(ApiError::invalid(
                "Idempotency-Key",
                format!(
                    "'Idempotency-Key' must be one header of 1 to {LONGEST_KEY} visible ASCII \
                     characters."
                ),
            )),
        }
    }
}

/// Of an endpoint and a body as it came: the same request has the same one.
pub(crate) fn fingerprint(endpoint: &str, body: &[u8]) -> [u8; 32] {
    let mut hash = digest::Context::new(&digest::SHA256);
    hash.update(endpoint.as_bytes());
    hash.update(b"\n");
    hash.update(body);
    digest_of(hash)
}

fn digest_of(hash: digest::Context) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes.copy_from_slice(hash.finish().as_ref());
    bytes
}

impl Ask {
    fn scope(&self) -> Scope {
        let mut hash = digest::Context::new(&digest::SHA256);
        // Names and visible ASCII hold no line feed.
        for part in [self.caller.tenant.as_str(), self.caller.key.as_str(), &self.key.0] {
            hash.update(part.as_bytes());
            hash.update(b"\n");
        }
        digest_of(hash)
    }
}

/// What a request finds in memory.
enum Entered {
    First(First),
    Waits(watch::Receiver<Outcome>, RequestId),
}

impl Idempotency {
    /// Opens what was recorded in `data`.
    ///
    /// # Errors
    /// [`IntentsError`].
    pub(crate) fn open(
        data: &Path,
        options: Options,
        ledger: LedgerReader,
        clock: Clock,
    ) -> Result<Self, IntentsError> {
        let intents = Intents::open(data, options.kept, options.keys_per_tenant)?;
        let started = clock.utc();
        let known = Mutex::default();
        let shared = Shared { options, intents, ledger, clock, started, known };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// What this request is to its key; a repeat waits here for the first.
    ///
    /// # Errors
    /// The key stands for another body, for a request that was charged and
    /// whose answer is gone, or for one that is not settled yet.
    pub(crate) async fn claim(&self, ask: Ask) -> Result<Claimed, ApiError> {
        loop {
            let (mut outcome, request) = match self.enter(&ask)? {
                Entered::First(first) => {
                    self.look_back(&first).await?;
                    return Ok(Claimed::First(first));
                }
                Entered::Waits(outcome, request) => (outcome, request),
            };
            let told = outcome.wait_for(|outcome| !matches!(outcome, Outcome::Pending)).await;
            match told.map_or(Outcome::Released, |told| told.clone()) {
                Outcome::Answered(answer) => {
                    return Ok(Claimed::Repeat(answer.again(&request)));
                }
                Outcome::Forgotten => return Err(IdempotencyRefusal::Charged { request }.into()),
                Outcome::Failed(error) => return Err(error),
                Outcome::Released | Outcome::Pending => {}
            }
        }
    }

    /// Bytes of the longest answer that is kept.
    pub(crate) fn largest_answer(&self) -> usize {
        self.shared.options.largest_answer.0 as usize
    }

    fn enter(&self, ask: &Ask) -> Result<Entered, ApiError> {
        let scope = ask.scope();
        let began = self.shared.clock.utc();
        let mut known = self.lock();
        known.forget_before(UtcTime(began.0.saturating_sub(self.kept_ns())));
        if let Some(entry) = known.keys.get(&scope) {
            if entry.fingerprint != ask.fingerprint {
                return Err(IdempotencyRefusal::OtherBody.into());
            }
            if entry.outcome.receiver_count() >= MOST_WAITING {
                let request = entry.request.clone();
                return Err(IdempotencyRefusal::Unsettled { request }.into());
            }
            return Ok(Entered::Waits(entry.outcome.subscribe(), entry.request.clone()));
        }
        let outcome = Arc::new(watch::channel(Outcome::Pending).0);
        known.insert(
            scope,
            Entry {
                number: 0, // given on the way in
                fingerprint: ask.fingerprint,
                request: ask.request.clone(),
                began,
                outcome: Arc::clone(&outcome),
            },
        );
        Ok(Entered::First(First { keys: self.clone(), scope, ask: ask.clone(), outcome }))
    }

    /// First in this process; what of those before, and of those that memory
    /// has let go?
    async fn look_back(&self, first: &First) -> Result<(), ApiError> {
        let shared = Arc::clone(&self.shared);
        let (scope, fingerprint) = (first.scope, first.ask.fingerprint);
        let tenant = first.ask.caller.tenant.clone();
        let looked = tokio::task::spawn_blocking(move || {
            let found = shared.intents.find(&scope, shared.clock.utc()).map_err(unavailable)?;
            let Some(Intent { fingerprint: before, request }) = found else { return Ok(()) };
            if before != fingerprint {
                return Err(IdempotencyRefusal::OtherBody.into());
            }
            let row = shared.ledger.request(&tenant, &request).map_err(unavailable)?;
            let age = shared.clock.utc().0.saturating_sub(shared.started.0);
            match row {
                Some(row) if row.state == RequestState::Posted => {
                    if row.usage == Usage::default() {
                        return Ok(()); // it failed, and nobody paid
                    }
                    Err(IdempotencyRefusal::Charged { request }.into())
                }
                None if age >= SETTLING.as_nanos() as u64 => Ok(()), // it never ran
                _ => Err(IdempotencyRefusal::Unsettled { request }.into()),
            }
        });
        looked.await.unwrap_or(Err(ApiError::Internal))
    }

    fn kept_ns(&self) -> u64 {
        u64::try_from(self.shared.options.kept.as_nanos()).unwrap_or(u64::MAX)
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.shared.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn insert(&mut self, scope: Scope, mut entry: Entry) {
        entry.number = self.next;
        self.next += 1;
        self.order.insert(entry.number, scope);
        self.keys.insert(scope, entry);
        if self.keys.len() > MOST_IN_MEMORY {
            // What is on disk answers for it; admission bounds those that run.
            let oldest = self.order.values().find(|scope| self.has_ended(scope)).copied();
            if let Some(scope) = oldest {
                self.remove(&scope);
            }
        }
    }

    fn remove(&mut self, scope: &Scope) {
        if let Some(entry) = self.keys.remove(scope) {
            self.order.remove(&entry.number);
            self.size -= entry.size();
        }
    }

    fn has_ended(&self, scope: &Scope) -> bool {
        let entry = self.keys.get(scope);
        entry.is_some_and(|entry| !matches!(*entry.outcome.borrow(), Outcome::Pending))
    }

    fn forget_before(&mut self, time: UtcTime) {
        while let Some(scope) = self.order.values().next().copied()
            && self.keys.get(&scope).is_some_and(|entry| entry.began < time)
            && self.has_ended(&scope)
        {
            self.remove(&scope);
        }
    }

    /// Keeps an answer; the oldest go where there is too much.
    fn keep(&mut self, scope: &Scope, answer: Answer, room: &Options) {
        let Some(entry) = self.keys.get(scope) else { return };
        if answer.body.len() as u64 > room.largest_answer.0 {
            entry.outcome.send_replace(Outcome::Forgotten);
            return;
        }
        entry.outcome.send_replace(Outcome::Answered(Arc::new(answer)));
        self.size += entry.size();
        for scope in self.order.values() {
            if self.size <= room.answers.0 {
                return;
            }
            let Some(entry) = self.keys.get(scope) else { continue };
            let size = entry.size();
            if size > 0 {
                self.size -= size;
                entry.outcome.send_replace(Outcome::Forgotten);
            }
        }
    }
}

impl Entry {
    /// Bytes that its answer takes.
    fn size(&self) -> u64 {
        match &*self.outcome.borrow() {
            Outcome::Answered(answer) => answer.body.len() as u64 + ANSWER_OVERHEAD,
            _ => 0,
        }
    }
}

impl Answer {
    /// The answer once more, with a header that says so.
    fn again(&self, request: &RequestId) -> Result<Response, ApiError> {
        let head = self.head.clone()?;
        let mut response = Response::new(Body::from(self.body.clone()));
        *response.headers_mut() = head;
        if let Ok(request) = HeaderValue::from_str(request.as_str()) {
            response.headers_mut().insert(REPLAY_OF, request);
        }
        Ok(response)
    }
}

impl First {
    /// Puts on disk which request the key stands for, before that can cost
    /// anything.
    ///
    /// # Errors
    /// The disk does not take it, or the tenant has too many keys.
    pub(crate) async fn record(&self) -> Result<(), ApiError> {
        let shared = Arc::clone(&self.keys.shared);
        let (scope, ask) = (self.scope, self.ask.clone());
        let recorded = tokio::task::spawn_blocking(move || {
            let Ask { caller, key: _, fingerprint, request } = ask;
            let intent = Intent { fingerprint, request };
            let limit = shared.options.keys_per_tenant;
            match shared.intents.put(&scope, &caller.tenant, &intent, shared.clock.utc()) {
                Ok(true) => Ok(()),
                Ok(false) => Err(IdempotencyRefusal::TooManyKeys { limit }.into()),
                Err(error) => Err(unavailable(error)),
            }
        });
        recorded.await.unwrap_or(Err(ApiError::Internal))
    }

    /// It has its answer, for all who ask again.
    pub(crate) fn answered(self, answer: Answer) {
        let shared = &self.keys.shared;
        self.keys.lock().keep(&self.scope, answer, &shared.options);
    }

    /// It failed, and the tenant pays for what was done: this is its answer.
    pub(crate) fn charged(self, error: ApiError) {
        self.answered(Answer { head: Err(error), body: Bytes::new() });
    }

    /// It failed and cost nothing: the key is free again.
    pub(crate) async fn free(self, error: ApiError) {
        self.outcome.send_replace(Outcome::Failed(error));
        let (shared, scope) = (Arc::clone(&self.keys.shared), self.scope);
        let request = self.ask.request.clone();
        // Where the disk keeps it all the same, the ledger knows of no charge.
        let removed = tokio::task::spawn_blocking(move || shared.intents.remove(&scope, &request));
        if let Ok(Err(error)) = removed.await {
            tracing::warn!(error = &error as &dyn std::error::Error, "an intent stays");
        }
    }
}

impl Drop for First {
    fn drop(&mut self) {
        let outcome = self.outcome.borrow().clone();
        if matches!(outcome, Outcome::Answered(_) | Outcome::Forgotten) {
            return;
        }
        self.keys.lock().remove(&self.scope);
        self.outcome.send_if_modified(|outcome| {
            let is_pending = matches!(outcome, Outcome::Pending);
            if is_pending {
                *outcome = Outcome::Released;
            }
            is_pending
        });
    }
}

fn unavailable(error: impl std::error::Error + 'static) -> ApiError {
    tracing::error!(error = &error as &dyn std::error::Error, "keys cannot be looked up");
    ApiError::LedgerUnavailable
}

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
/// Names the request whose answer a repeat is given.
const REPLAY_OF: HeaderName = HeaderName::from_static("x-tollgate-replay-of");
/// Characters of a key.
const LONGEST_KEY: usize = 255;
/// Repeats of one request that wait for it at once.
const MOST_WAITING: usize = 512;
/// Keys in memory; beyond it those that ended longest ago are on disk alone.
const MOST_IN_MEMORY: usize = 16_384;
/// What an answer takes beside its body, bytes.
const ANSWER_OVERHEAD: u64 = 1_024;
/// How long after its start a gateway waits for what workers have to report
/// of its predecessor's requests.
const SETTLING: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests;
