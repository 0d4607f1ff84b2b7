//! The dispatcher: claims batches and runs their lines.
//!
//! Every run of a dispatcher claims its batches anew, so that whatever an earlier run
//! left behind is settled the same way, in the same process or after a crash. All
//! batches run inside the one future of [`Dispatcher::run`]: dropping it stops them at
//! whatever point they have reached.

mod answers;
mod ending;
mod held_bytes;
mod lease;
mod line_set;
mod run;
mod source;
mod takeover;
mod try_run;
mod window;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::stream::{FuturesUnordered, StreamExt};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tollgate_domain::{Caller, TenantId, UtcTime};

use self::run::{BatchRun, RunEnd};
pub(crate) use self::window::InFlightLines;
use self::window::SharedWindow;
use crate::batch::{BatchRow, BatchState};
use crate::claim::{Claim, ClaimSeed};
use crate::error::JobError;
use crate::ids::BatchId;
use crate::jobs::{BatchWait, HeldBatch, Jobs};
use crate::rules;
use crate::service::{CallerState, LineService};
use crate::store::{Most, Store, TriesLeft};
use crate::upload::random;

/// The settings of a [`Dispatcher`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatchOptions {
    /// Longest time of a try, once it is sent.
    pub line: Duration,
    /// Time for the lines on workers to end when the dispatcher stops.
    pub drain: Duration,
    /// The number of the gateway in request ids: 24 bits, 0 where there is one gateway.
    pub gateway: u32,
    /// Time between two renewals of a lease. A cancel through another gateway is noticed at the
    /// next renewal.
    pub renewal: Duration,
}

impl Default for DispatchOptions {
    fn default() -> Self {
        Self {
            line: Duration::from_secs(3_600),
            drain: Duration::from_secs(10),
            gateway: 0,
            renewal: Duration::from_secs(5),
        }
    }
}

/// The component that runs batches.
pub struct Dispatcher {
    claims: Claims,
    runs: FuturesUnordered<Running>,
}

/// The claims of a dispatcher, and its decisions about the next ones.
struct Claims {
    context: DispatchContext,
    /// The batches that are held, with their tenants.
    held: HashMap<BatchId, TenantId>,
    /// Batches that wait outside: until then they are not claimed again.
    parked: HashMap<BatchId, Instant>,
    /// Panics of the tasks of batches.
    panicked: BTreeMap<BatchId, u32>,
    /// Claims that the store did not give up, at most [`MOST_HELD`].
    unreleased: Vec<(Claim, TriesLeft)>,
}

/// The parts that the tasks of all batches use.
#[derive(Clone)]
struct DispatchContext {
    jobs: Jobs,
    service: Arc<dyn LineService>,
    options: DispatchOptions,
    window: SharedWindow,
    /// Checks of inputs at once: each reads a whole file.
    validations: Arc<Semaphore>,
    /// Bytes of answers that are not committed.
    answer_bytes: Arc<AtomicUsize>,
    /// Tenants with batches that find no place among the held ones.
    pressed: Arc<Mutex<HashSet<TenantId>>>,
    stop: CancellationToken,
}

type Running = Pin<Box<dyn Future<Output = RunDone> + Send>>;

/// The end of one run of a batch under one claim.
struct RunDone {
    claim: Claim,
    /// `None` after a panic.
    end: Option<Result<RunEnd, JobError>>,
    _held: HeldBatch,
}

/// Batches that one dispatcher holds.
const MOST_HELD: usize = 256;
/// Batches of a tenant that are held beside those that may have lines on workers: they
/// are checked, they end, or they wait for a model or a cap.
const HELD_BESIDE_RUNNING: u64 = 4;
/// Batches that are looked at in one search for work.
const MOST_LISTED: Most = Most(1_024);
/// Batches that one search claims at most: their runs begin after it.
const CLAIMS_OF_A_SEARCH: usize = 16;
/// Batches that wait outside at once.
const MOST_PARKED: usize = 10_000;
/// Inputs that are checked at once.
const VALIDATIONS: usize = 2;
/// Time between two searches for work; a new batch and a cancel start one at once.
const TICK: Duration = Duration::from_secs(1);
/// Time between two deletions of what has expired.
const SWEEP: Duration = Duration::from_secs(60);
/// Wait before a batch is claimed again after a failed run.
const FAILED_WAIT: Duration = Duration::from_secs(1);
/// Wait before an operation is repeated that found the store's queue full.
const BUSY_WAIT: Duration = Duration::from_millis(20);
/// Lost workers after which a line runs without other lines beside it.
const LOSSES_BEFORE_ALONE: u32 = 2;
/// Lost workers after which a line fails.
const MOST_LOSSES: u32 = 3;
/// Panics of a batch's task after which this run of the dispatcher leaves the batch alone.
const MOST_PANICS: u32 = 2;

impl Dispatcher {
    /// Makes a dispatcher over `jobs` that runs lines with `service`.
    pub fn new(jobs: Jobs, service: Arc<dyn LineService>, options: DispatchOptions) -> Self {
        let (sized, counted) = (Arc::clone(&service), jobs.clone());
        let window = SharedWindow::new(move |in_flight| {
            // The window calls this after each change, so the metric follows the lines on workers.
            counted.shared().set_in_flight(in_flight);
            sized.capacity()
        });
        let context = DispatchContext {
            jobs,
            service,
            options,
            window,
            validations: Arc::new(Semaphore::new(VALIDATIONS)),
            answer_bytes: Arc::default(),
            pressed: Arc::default(),
            stop: CancellationToken::new(),
        };
        let claims = Claims {
            context,
            held: HashMap::new(),
            parked: HashMap::new(),
            panicked: BTreeMap::new(),
            unreleased: Vec::new(),
        };
        Self { claims, runs: FuturesUnordered::new() }
    }

    /// Runs batches until `stop` is cancelled. Lines on workers may then end, and all
    /// claims are given up.
    pub async fn run(self, stop: CancellationToken) {
        let Self { mut claims, mut runs } = self;
        let jobs = claims.context.jobs.clone();
        let mut changed = std::pin::pin!(jobs.shared().changed.notified());
        let mut waits_ended = jobs.shared().waits_ended.subscribe();
        let (mut sweep, mut done) = (now(), Vec::new());
        while !stop.is_cancelled() {
            // Enabled before the search: a batch that comes during the search is not missed.
            changed.as_mut().enable();
            if now() >= sweep {
                sweep = now() + SWEEP;
                beside(&mut runs, &mut done, claims.sweep()).await;
            }
            let new = beside(&mut runs, &mut done, claims.search()).await;
            // A full search may have left batches behind.
            let is_full = new.len() >= CLAIMS_OF_A_SEARCH;
            runs.extend(new);
            // The number of workers may have changed.
            claims.context.window.grant();
            if done.is_empty() && !is_full {
                tokio::select! {
                    () = stop.cancelled() => {}
                    Some(ended) = runs.next() => done.push(ended),
                    () = changed.as_mut() => changed.set(jobs.shared().changed.notified()),
                    // The next search claims what was parked.
                    Ok(()) = waits_ended.changed() => claims.parked.clear(),
                    () = tokio::time::sleep(TICK) => {}
                }
            }
            // Taken out, because more runs can end while these are handled.
            for ended in std::mem::take(&mut done) {
                beside(&mut runs, &mut done, claims.ended(ended)).await;
            }
        }
        // Each run now gives its claim up: a claim that just dies counts against its batch.
        claims.context.stop.cancel();
        while let Some(ended) = runs.next().await {
            done.push(ended);
            for ended in std::mem::take(&mut done) {
                beside(&mut runs, &mut done, claims.ended(ended)).await;
            }
        }
    }
}

/// Does `act` while the runs go on. Runs that end meanwhile are added to `done`.
async fn beside<T>(
    runs: &mut FuturesUnordered<Running>,
    done: &mut Vec<RunDone>,
    act: impl Future<Output = T>,
) -> T {
    let mut act = std::pin::pin!(act);
    loop {
        tokio::select! {
            biased;
            acted = &mut act => return acted,
            // Without runs this branch is disabled, so that the loop does not spin.
            Some(ended) = runs.next() => done.push(ended),
        }
    }
}

impl Claims {
    async fn sweep(&self) {
        if let Err(error) = self.context.jobs.sweep().await {
            let error = crate::error::with_causes(&error);
            tracing::warn!(error, "expired files stay on the disk; the next sweep tries again");
        }
    }

    /// Claims batches and returns their runs.
    async fn search(&mut self) -> Vec<Running> {
        // First, because a batch cannot be claimed again while its last claim has a lease.
        for (claim, tries) in std::mem::take(&mut self.unreleased) {
            // Logged when it failed for the first time.
            _ = self.release(claim, tries).await;
        }
        // Leases and windows are on the wall clock, which a restart keeps; waits are on the
        // runtime's.
        let utc = self.context.jobs.now();
        let listed = self.context.store(move |store| store.claimable(utc, MOST_LISTED)).await;
        let listed = match listed {
            Ok(listed) => listed,
            Err(error) => {
                let error = crate::error::with_causes(&error);
                tracing::warn!(error, "store of jobs gave no batches; the next search tries again");
                return Vec::new();
            }
        };
        let now = now();
        let mut runs = Vec::new();
        self.parked.retain(|_, until| *until > now);
        let mut pressed = HashSet::new();
        for batch in listed {
            if self.held.len() >= MOST_HELD || runs.len() >= CLAIMS_OF_A_SEARCH {
                break;
            }
            // A batch that is held here is listed if its lease ran out, for example while the
            // machine slept. One process must not run it twice.
            let is_left = self.panicked.get(&batch.id).is_some_and(|count| *count >= MOST_PANICS);
            if is_left || self.held.contains_key(&batch.id) {
                continue;
            }
            let is_parked = self.parked.contains_key(&batch.id);
            let caller = self.caller(&batch);
            // A batch that only ends needs no worker, so neither a wait nor its tenant's quota
            // delays it.
            match must_end(&batch, caller, utc) {
                true => {}
                false if is_parked || caller == CallerState::Unknown => continue,
                false if self.is_full(&batch.tenant) => {
                    pressed.insert(batch.tenant);
                    continue;
                }
                false => {}
            }
            runs.extend(self.claim(batch).await);
        }
        // Waiting runs of these tenants park, so that the tenant's other batches get their places.
        *lock(&self.context.pressed) = pressed;
        runs
    }

    fn caller(&self, batch: &BatchRow) -> CallerState {
        let caller = Caller { tenant: batch.tenant.clone(), key: batch.key.clone() };
        self.context.service.caller(&caller)
    }

    /// Returns true if a tenant holds as many batches as it may.
    fn is_full(&self, tenant: &TenantId) -> bool {
        let held = self.held.values().filter(|held| *held == tenant).count() as u64;
        let quotas = self.context.service.quotas(tenant);
        let running = quotas.iter().map(|scoped| scoped.quotas.running).min();
        // Many of a tenant's batches may be held only while few tenants hold any.
        let most = (MOST_HELD / 4) as u64;
        held >= running.unwrap_or(0).saturating_add(HELD_BESIDE_RUNNING).min(most)
    }

    /// Claims a batch and returns its run.
    async fn claim(&mut self, batch: BatchRow) -> Option<Running> {
        let (context, id) = (&self.context, batch.id);
        let claimed = async {
            let seed = seed(context.jobs.now(), context.options.gateway)?;
            let now = context.jobs.now();
            let lease = rules::after(now, lease::LEASE);
            let claimed = context.store(move |store| store.claim(now, id, seed, lease)).await?;
            Ok::<_, JobError>(claimed.map(|claimed| (claimed, lease)))
        };
        let (claimed, lease) = match claimed.await {
            Ok(Some(claimed)) => claimed,
            // Another dispatcher was faster.
            Ok(None) => return None,
            Err(error) => {
                let error = crate::error::with_causes(&error);
                tracing::warn!(batch = %id, error, "a batch was not claimed; the next search tries again");
                self.wait_after_failure(id);
                return None;
            }
        };
        let claim = claimed.claim;
        // The wait of a batch that was parked is over; the run notes the next one.
        context.jobs.shared().set_wait(id, None);
        let held = context.jobs.hold(claim);
        let has_panicked = self.panicked.contains_key(&id);
        let run = BatchRun::new(context.clone(), claimed, lease, held.ending(), has_panicked);
        // All batches run inside one future, which an uncaught panic would end.
        let run = AssertUnwindSafe(run.run()).catch_unwind();
        self.held.insert(id, batch.tenant);
        Some(Box::pin(async move {
            // The parts that a panic may leave half done belong to the run and go with it.
            RunDone { claim, end: run.await.ok(), _held: held }
        }))
    }

    /// Gives up the claim of a run that has ended, and decides when its batch is claimed
    /// again.
    async fn ended(&mut self, done: RunDone) {
        let RunDone { claim, end, _held } = done;
        let id = claim.batch;
        if let Some(tenant) = self.held.remove(&id) {
            self.context.window.forget(id, &tenant);
        }
        // A parked batch keeps its reason, so that clients still see why no line runs.
        if !matches!(end, Some(Ok(RunEnd::Parked(_)))) {
            self.context.jobs.shared().set_wait(id, None);
        }
        let tries = match end {
            Some(Ok(RunEnd::Ended)) => {
                // The commit of the end has ended the claim, too: there is nothing to release.
                self.panicked.remove(&id);
                return;
            }
            Some(Ok(RunEnd::Left(tries))) => tries,
            Some(Ok(RunEnd::Parked(until))) => {
                // Beyond the bound the next search claims the batch again: that costs work and
                // loses nothing.
                if self.parked.len() < MOST_PARKED {
                    self.parked.insert(id, until);
                }
                TriesLeft::None
            }
            Some(Err(JobError::StaleClaim)) => {
                tracing::info!(batch = %id, "another dispatcher has taken a batch over");
                return;
            }
            Some(Err(error)) => {
                let error = crate::error::with_causes(&error);
                tracing::warn!(batch = %id, error, "a batch stopped; it is claimed again");
                self.wait_after_failure(id);
                TriesLeft::Open
            }
            None => {
                *self.panicked.entry(id).or_default() += 1;
                tracing::error!(batch = %id, "the task of a batch panicked; the batch fails and keeps its answers");
                TriesLeft::Open
            }
        };
        if let Err(error) = self.release(claim, tries).await {
            let error = crate::error::with_causes(&error);
            tracing::warn!(batch = %id, error, "a claim was not given up; the next search tries again");
        }
    }

    /// Lets a batch wait after the store has failed.
    fn wait_after_failure(&mut self, id: BatchId) {
        self.parked.insert(id, now() + FAILED_WAIT);
        let until = rules::after(self.context.jobs.now(), FAILED_WAIT);
        self.context.jobs.shared().set_wait(id, Some(BatchWait { reason: "fault", until }));
    }

    /// Gives up a claim. A claim that the store keeps is given up by a later search.
    async fn release(&mut self, claim: Claim, tries: TriesLeft) -> Result<(), JobError> {
        match self.context.store(move |store| store.release(&claim, tries)).await {
            // A later claim has taken its place.
            Ok(()) | Err(JobError::StaleClaim) => Ok(()),
            Err(error) => {
                // Beyond the bound a claim ends with its lease.
                if self.unreleased.len() < MOST_HELD {
                    self.unreleased.push((claim, tries));
                }
                Err(error)
            }
        }
    }
}

impl DispatchContext {
    /// Runs `act` on the store, and again while the store's queue is full.
    async fn store<T: Send + 'static>(
        &self,
        act: impl Fn(&mut dyn Store) -> Result<T, JobError> + Send + Sync + 'static,
    ) -> Result<T, JobError> {
        let act = Arc::new(act);
        loop {
            let act = Arc::clone(&act);
            match self.jobs.call(move |store| act(store)).await {
                // `Busy` means that the act was not queued, so a repeat does nothing twice.
                Err(JobError::Busy) => tokio::time::sleep(BUSY_WAIT).await,
                done => return done,
            }
        }
    }

    fn is_pressed(&self, tenant: &TenantId) -> bool {
        lock(&self.pressed).contains(tenant)
    }
}

/// Returns true if no line of the batch will run any more.
fn must_end(batch: &BatchRow, caller: CallerState, now: UtcTime) -> bool {
    matches!(batch.state, BatchState::Ending(_))
        || batch.expires <= now
        || matches!(caller, CallerState::KeyRevoked | CallerState::TenantGone)
}

/// Draws the random part of a claim.
fn seed(now: UtcTime, gateway: u32) -> Result<ClaimSeed, JobError> {
    // The time comes first, as in the ids of the gateway: ids grow with time, and rows that are
    // written together stand together in the ledger's index.
    let millis = u128::from(now.0 / 1_000_000) & ((1 << 48) - 1);
    let gateway = u128::from(gateway) & ((1 << 24) - 1);
    Ok(ClaimSeed { bits: random()?, id_bits: millis << 80 | gateway << 56 })
}

/// Returns the time of the runtime, which tests may pause.
#[expect(clippy::disallowed_methods, reason = "waits are on the runtime's clock")]
fn now() -> Instant {
    Instant::now()
}

fn lock<T>(value: &Mutex<T>) -> MutexGuard<'_, T> {
    // Every change under a lock of this module is complete before a panic could happen.
    value.lock().unwrap_or_else(PoisonError::into_inner)
}
