//! The world of played tests: a store, a disk, a ledger and workers that outlive the
//! processes of the gateway, all in one runtime with paused time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tollgate_domain::{
    Caller, DeviceClass, DeviceNanos, KeyId, ModelName, PlanName, RequestId, TenantId, UtcDay,
    UtcTime,
};

use super::chance::Chance;
use super::disk::{Fuse, Moment, SimDisk};
use crate::batch::{BatchUsage, NewBatch, SpentByBatches, TryCost, TryUsage};
use crate::claim::{Claim, ClaimSeed, Claimed};
use crate::error::{JobError, StorageError};
use crate::file::{BlobRange, FilePage, FinishedFile, NewFile, Page};
use crate::jobs::JobLimits;
use crate::service::{CapRequest, FailureReply, LineAnswer, LineFailure, ServiceFuture, Waiting};
use crate::store::{Answer, GatewayStored, Most, Released, StoredFigures, TriesLeft};
use crate::{
    BatchId, BatchPage, BatchRow, BlobId, CallerState, Cause, DispatchOptions, Dispatcher,
    Endpoint, FileId, FileRow, InputError, Jobs, LineRequest, LineService, NewUpload, QuotaScope,
    Quotas, ScopedQuotas, SqlStore, Store, TryOutcome,
};

/// The time at which each play begins.
const START: u64 = 1_800_000_000_000_000_000;

pub(super) fn tenant(name: &str) -> TenantId {
    TenantId::new(name).expect("a name")
}

pub(super) fn quotas_of(name: &str, quotas: Quotas) -> Vec<ScopedQuotas> {
    let plan = PlanName::new("team").expect("a name");
    vec![ScopedQuotas { scope: QuotaScope::Tenant(tenant(name)), plan, quotas }]
}

/// The parts that no death of a process touches.
#[derive(Clone)]
pub(super) struct World {
    store: Arc<Mutex<SqlStore>>,
    pub(super) disk: SimDisk,
    pub(super) workers: Workers,
    start: tokio::time::Instant,
    /// Failures of the store, in percent of its operations.
    store_fails: Arc<Mutex<(u64, Chance)>>,
}

/// One process of the gateway.
pub(super) struct Process {
    pub(super) jobs: Jobs,
    pub(super) fuse: Fuse,
    workers: Workers,
}

impl World {
    #[expect(clippy::disallowed_methods, reason = "the clock of a play is the runtime's")]
    pub(super) fn new(seed: u64) -> Self {
        Self {
            store: Arc::new(Mutex::new(SqlStore::in_memory().expect("memory"))),
            disk: SimDisk::new(Fuse::default()),
            workers: Workers::new(seed),
            start: tokio::time::Instant::now(),
            store_fails: Arc::new(Mutex::new((0, Chance::new(seed)))),
        }
    }

    /// Starts a process. Processes before it are dead.
    pub(super) fn start(&self) -> Process {
        let fuse = Fuse::default();
        let store = FusedStore {
            inner: Arc::clone(&self.store),
            fuse: fuse.clone(),
            fails: Arc::clone(&self.store_fails),
        };
        let start = self.start;
        let utc = move || UtcTime(START + start.elapsed().as_nanos() as u64);
        let disk = Arc::new(self.disk.of(fuse.clone()));
        let limits = JobLimits { spare: 1_000, ..JobLimits::default() };
        let jobs = Jobs::open_played(Box::new(store), disk, limits, Arc::new(utc)).expect("opens");
        Process { jobs, fuse, workers: self.workers.clone() }
    }

    /// Runs processes until every batch has ended. `plan` is given each new process.
    pub(super) async fn run_all(&self, plan: impl FnMut(&Process)) {
        self.run_through(plan, || {}).await;
    }

    /// Runs processes until every batch has ended. `between` runs after each death.
    pub(super) async fn run_through(
        &self,
        mut plan: impl FnMut(&Process),
        mut between: impl FnMut(),
    ) {
        for _ in 0..10_000 {
            let process = self.start();
            plan(&process);
            let stop = CancellationToken::new();
            let dispatcher = process.dispatcher(DispatchOptions::default()).run(stop.clone());
            let ended = async {
                while self.open_batches() > 0 {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            };
            tokio::select! {
                biased;
                () = process.fuse.died() => {}
                () = dispatcher => panic!("the dispatcher stopped by itself"),
                () = ended => return,
                () = tokio::time::sleep(Duration::from_secs(86_500)) => panic!("it never ended"),
            }
            drop(process);
            between();
        }
        panic!("the processes died too often");
    }

    /// Returns the store, as another connection would see it.
    pub(super) fn store(&self) -> MutexGuard<'_, SqlStore> {
        self.store.lock().expect("no panic")
    }

    pub(super) fn open_batches(&self) -> u64 {
        let figures = self.store().figures().expect("memory");
        figures.validating + figures.running + figures.ending
    }

    /// Returns the time since the play began.
    pub(super) fn elapsed(&self) -> Duration {
        self.start.elapsed()
    }

    /// Makes a store fail in `percent` of its operations. Half of those are done.
    pub(super) fn fail_store(&self, percent: u64) {
        self.store_fails.lock().expect("no panic").0 = percent;
    }
}

impl Process {
    /// Makes a process over other files and batches.
    pub(super) fn over(&self, jobs: Jobs) -> Self {
        Self { jobs, fuse: self.fuse.clone(), workers: self.workers.clone() }
    }

    /// Returns the service over the workers of this world.
    pub(super) fn service(&self) -> Arc<dyn LineService> {
        Arc::new(Service { workers: self.workers.clone(), fuse: self.fuse.clone() })
    }

    pub(super) fn dispatcher(&self, options: DispatchOptions) -> Dispatcher {
        Dispatcher::new(self.jobs.clone(), self.service(), options)
    }

    pub(super) async fn upload(&self, name: &str, input: &str) -> FileRow {
        let new = NewUpload {
            id: None,
            tenant: tenant(name),
            pool: None,
            declared: Some(input.len() as u64),
            quotas: quotas_of(name, Quotas::default()),
        };
        let mut upload = self.jobs.upload(new).await.expect("begins");
        upload.write(input.as_bytes().to_vec()).await.expect("writes");
        upload.finish("input.jsonl".to_owned(), None).await.expect("finishes")
    }

    pub(super) async fn batch(&self, name: &str, input: &str) -> BatchRow {
        let file = self.upload(name, input).await;
        let new = new_batch(name, file.id);
        let quotas = quotas_of(name, Quotas::default());
        self.jobs.create_batch(new, quotas).await.expect("created")
    }

    pub(super) async fn row(&self, batch: &BatchRow) -> BatchRow {
        self.jobs.batch(batch.tenant.clone(), batch.id).await.expect("there")
    }

    /// Reads a result file as lines of JSON.
    pub(super) async fn lines(&self, name: &str, file: Option<FileId>) -> Vec<serde_json::Value> {
        let Some(file) = file else { return Vec::new() };
        let mut content = self.jobs.read(tenant(name), file).await.expect("there");
        let mut bytes = Vec::new();
        while let Some(part) = content.next().await.expect("reads") {
            bytes.extend(part);
        }
        let text = String::from_utf8(bytes).expect("text");
        text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
    }

    /// Checks that each line of a batch is in one file once, and returns the request ids
    /// of the lines that were paid.
    pub(super) async fn check(&self, batch: &BatchRow) -> Paid {
        let row = self.row(batch).await;
        let name = row.tenant.as_str();
        let (output, error) =
            (self.lines(name, row.output).await, self.lines(name, row.error).await);
        assert_eq!(row.counts.completed as usize, output.len(), "{row:?}");
        assert_eq!(row.counts.failed as usize, error.len(), "{row:?}");
        assert_eq!(row.counts.completed + row.counts.failed, row.counts.total, "{row:?}");
        let ids: BTreeSet<String> =
            output.iter().chain(&error).map(|line| line["custom_id"].to_string()).collect();
        assert_eq!(ids.len() as u64, row.counts.total, "a line is missing or there twice");
        let request = |line: &serde_json::Value| {
            line["id"].as_str().expect("a text").replace("batch_req_", "req-")
        };
        let tokens: u64 = output
            .iter()
            .filter_map(|line| line["response"]["body"]["usage"]["completion_tokens"].as_u64())
            .sum();
        Paid {
            answered: output.iter().map(request).collect(),
            failed: error.iter().map(request).collect(),
            tokens,
            row,
        }
    }
}

/// The request ids in the files of a batch.
pub(super) struct Paid {
    pub(super) answered: BTreeSet<String>,
    pub(super) failed: BTreeSet<String>,
    /// Tokens of the lines in the output file.
    pub(super) tokens: u64,
    pub(super) row: BatchRow,
}

pub(super) fn new_batch(name: &str, input: FileId) -> NewBatch {
    NewBatch {
        id: BatchId::from_random(crate::upload::random().expect("random")),
        tenant: tenant(name),
        pool: None,
        key: KeyId::new("key-1").expect("a name"),
        input,
        endpoint: Endpoint::ChatCompletions,
        metadata: None,
        window: Duration::from_secs(86_400),
        results_kept: None,
    }
}

/// Returns an input of `count` lines. `body` gives the fields of each body beside the model.
pub(super) fn input(count: u64, body: impl Fn(u64) -> &'static str) -> String {
    (0..count)
        .map(|line| {
            format!(
                "{{\"custom_id\":\"line-{line}\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\
                 \"body\":{{\"model\":\"m\",\"max_tokens\":8{}}}}}\n",
                body(line)
            )
        })
        .collect()
}

/// Workers and ledger. They outlive each process of the gateway.
#[derive(Clone)]
pub(super) struct Workers {
    inner: Arc<Mutex<Yard>>,
}

pub(super) struct Yard {
    chance: Chance,
    /// Tries that ran on a worker, with the tokens that they computed.
    spent: BTreeMap<RequestId, u64>,
    capped: BTreeSet<RequestId>,
    /// Tries that were placed after their cap.
    pub(super) placed_late: usize,
    /// Lines on workers now.
    running: usize,
    /// The most lines that were on workers at once.
    pub(super) most: usize,
    /// Lines beside which a poisoned line ran, in turn.
    pub(super) beside_poison: Vec<usize>,
    /// In percent: each try is lost, not placed, refused by a worker, or known.
    pub(super) troubles: [u64; 4],
    pub(super) caller: CallerState,
    pub(super) capacity: usize,
    pub(super) quotas: Quotas,
    /// The reason for which no line with "no model" is placed.
    pub(super) holds: Option<Waiting>,
    /// Lines for which a cap has room at once.
    pub(super) room: usize,
    /// A planted bug: the ledger acknowledges caps and forgets them.
    pub(super) forgets_caps: bool,
    /// True if the ledger takes no cap now.
    pub(super) ledger_fails: bool,
    /// A line takes 1 to 20 of these.
    pub(super) step: Duration,
    /// Time that the ledger needs to record a line after its work.
    pub(super) record: Duration,
    /// A planted bug: a line keeps its place until it is recorded.
    pub(super) keeps_places: bool,
    /// The tries that were sent, in order: tenant and request.
    pub(super) sent: Vec<(TenantId, RequestId)>,
}

impl Workers {
    fn new(seed: u64) -> Self {
        let yard = Yard {
            chance: Chance::new(seed),
            spent: BTreeMap::new(),
            capped: BTreeSet::new(),
            placed_late: 0,
            running: 0,
            most: 0,
            beside_poison: Vec::new(),
            troubles: [0; 4],
            caller: CallerState::Active,
            capacity: 64,
            quotas: Quotas::default(),
            holds: None,
            room: usize::MAX,
            forgets_caps: false,
            ledger_fails: false,
            step: Duration::from_millis(20),
            record: Duration::ZERO,
            keeps_places: false,
            sent: Vec::new(),
        };
        Self { inner: Arc::new(Mutex::new(yard)) }
    }

    pub(super) fn yard(&self) -> MutexGuard<'_, Yard> {
        self.inner.lock().expect("no panic")
    }

    /// Returns the number of tries that ran on a worker.
    pub(super) fn spent(&self) -> usize {
        self.yard().spent.len()
    }

    /// Returns the tries that a tenant pays.
    pub(super) fn paid(&self) -> BTreeSet<String> {
        let yard = self.yard();
        let paid = yard.spent.keys().filter(|id| !yard.capped.contains(*id));
        paid.map(ToString::to_string).collect()
    }

    /// Returns the tokens of all paid tries.
    pub(super) fn paid_tokens(&self) -> u64 {
        let yard = self.yard();
        yard.spent.iter().filter(|(id, _)| !yard.capped.contains(*id)).map(|it| it.1).sum()
    }
}

/// The service of one process.
struct Service {
    workers: Workers,
    fuse: Fuse,
}

/// A line on a worker. A drop ends it, also when its process dies.
struct OnWorker(Workers);

impl Drop for OnWorker {
    fn drop(&mut self) {
        self.0.yard().running -= 1;
    }
}

impl LineService for Service {
    fn run(&self, mut line: LineRequest) -> ServiceFuture<TryOutcome> {
        let (workers, fuse) = (self.workers.clone(), self.fuse.clone());
        Box::pin(async move {
            let placed = fuse.step(|| workers.place(&line));
            let (duration, fate, on_worker) = match placed {
                Some(Ok(placed)) => placed,
                Some(Err(outcome)) => return outcome,
                None => std::future::pending().await,
            };
            assert!(!line.body.contains("panic"), "a planted panic");
            let is_silent = line.body.contains("silent");
            tokio::select! {
                biased;
                () = line.cancel.cancelled(), if !is_silent => {
                    let usage = eight_tokens();
                    return TryOutcome::Cancelled { is_paid: true, usage };
                }
                () = tokio::time::sleep(duration) => {}
            }
            if is_silent {
                std::future::pending::<()>().await;
            }
            drop(on_worker);
            let (record, keeps_place) = {
                let yard = workers.yard();
                (yard.record, yard.keeps_places)
            };
            if !keeps_place && let Some(place) = line.place.take() {
                place.give_back();
            }
            if !record.is_zero() {
                tokio::time::sleep(record).await;
            }
            fate
        })
    }

    fn cap(&self, cap: CapRequest) -> ServiceFuture<bool> {
        let done = self.fuse.step(|| {
            let mut yard = self.workers.yard();
            if yard.ledger_fails {
                return false;
            }
            if !yard.forgets_caps {
                yard.capped.insert(cap.request);
            }
            true
        });
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(2)).await;
            done.unwrap_or(false)
        })
    }

    fn failure(&self, failure: LineFailure) -> FailureReply {
        match failure {
            LineFailure::Late(_) => {
                FailureReply { status: 504, body: "{\"error\":\"late\"}".to_owned() }
            }
            LineFailure::WorkersLost => {
                FailureReply { status: 500, body: "{\"error\":\"lost\"}".to_owned() }
            }
        }
    }

    fn caller(&self, _: &Caller) -> CallerState {
        self.workers.yard().caller
    }

    fn quotas(&self, tenant: &TenantId) -> Vec<ScopedQuotas> {
        quotas_of(tenant.as_str(), self.workers.yard().quotas.clone())
    }

    fn capacity(&self) -> usize {
        self.workers.yard().capacity
    }
}

type PlacedLine = (Duration, TryOutcome, OnWorker);

impl Workers {
    /// Places a line, or says why not.
    fn place(&self, line: &LineRequest) -> Result<PlacedLine, TryOutcome> {
        let mut yard = self.yard();
        yard.sent.push((line.caller.tenant.clone(), line.request.clone()));
        if let Some(holds) = yard.holds.as_ref().filter(|_| line.body.contains("no model")) {
            return Err(TryOutcome::NotPlaced(holds.clone()));
        }
        let waiting = Waiting {
            reason: "overloaded",
            retry_after: Duration::from_millis(300),
            holds_batch: false,
        };
        if line.body.contains("refused") {
            return Err(TryOutcome::Answered(LineAnswer {
                status: 400,
                body: "{\"error\":\"refused\"}".to_owned(),
                is_paid: false,
                usage: TryUsage::default(),
                model: None,
            }));
        }
        if yard.running >= yard.room {
            return Err(TryOutcome::HeldBack { reason: "cap_held" });
        }
        let roll = yard.chance.below(100);
        let [lost, unplaced, refused, known] = yard.troubles;
        let is_lost = roll < lost || line.body.contains("poison");
        if !is_lost {
            let outcome = match roll.saturating_sub(lost) {
                roll if roll < unplaced => Some(TryOutcome::NotPlaced(waiting)),
                roll if roll < unplaced + refused => Some(TryOutcome::RefusedByWorker(waiting)),
                roll if roll < unplaced + refused + known => Some(TryOutcome::IdKnown),
                _ => None,
            };
            if let Some(outcome) = outcome {
                return Err(outcome);
            }
        }
        if line.body.contains("poison") {
            let beside = yard.running;
            yard.beside_poison.push(beside);
        }
        yard.running += 1;
        yard.most = yard.most.max(yard.running);
        yard.placed_late += usize::from(yard.capped.contains(&line.request));
        // Whatever becomes of the process, the worker has worked.
        let earlier = yard.spent.insert(line.request.clone(), 8);
        assert_eq!(earlier, None, "a request id ran twice");
        let steps = 1 + yard.chance.below(20) as u32;
        let duration = match line.body.contains("slow") {
            true => Duration::from_secs(7_200),
            false => yard.step * steps,
        };
        let fate = match is_lost {
            true => TryOutcome::Lost,
            false => TryOutcome::Answered(LineAnswer {
                status: 200,
                body: "{\"usage\":{\"completion_tokens\":8}}".to_owned(),
                is_paid: true,
                usage: eight_tokens(),
                model: Some(ModelName::new("m").expect("a name")),
            }),
        };
        drop(yard);
        Ok((duration, fate, OnWorker(self.clone())))
    }
}

/// A store of a process that may die at each operation.
struct FusedStore {
    inner: Arc<Mutex<SqlStore>>,
    fuse: Fuse,
    fails: Arc<Mutex<(u64, Chance)>>,
}

impl FusedStore {
    /// Returns the moment at which the next operation fails, if it fails.
    fn failure(&self) -> Option<Moment> {
        let mut fails = self.fails.lock().expect("no panic");
        let percent = fails.0;
        let fails = &mut fails.1;
        let moment = if fails.percent(50) { Moment::Before } else { Moment::After };
        fails.percent(percent).then_some(moment)
    }
}

fn broken(what: &str) -> JobError {
    JobError::Storage(StorageError::damaged(what.to_owned()))
}

macro_rules! fused {
    ($(fn $name:ident($($argument:ident: $type:ty),*) -> $result:ty;)*) => {
        impl Store for FusedStore {
            $(fn $name(&mut self, $($argument: $type),*) -> Result<$result, JobError> {
                let failure = self.failure();
                if failure == Some(Moment::Before) {
                    return Err(broken("nothing was done"));
                }
                let act = || self.inner.lock().expect("no panic").$name($($argument),*);
                let done = self.fuse.step(act).unwrap_or_else(|| Err(broken("it is dead")));
                match failure {
                    Some(_) => Err(broken("it was done")),
                    None => done,
                }
            })*
        }
    };
}

fused! {
    fn reserve(new: &NewFile, quotas: &[ScopedQuotas], all: GatewayStored) -> ();
    fn grow(upload: &NewFile, bytes: u64, quotas: &[ScopedQuotas], all: GatewayStored) -> ();
    fn finish(now: UtcTime, upload: &NewFile, finished: &FinishedFile, quotas: &[ScopedQuotas]) -> FileRow;
    fn is_upload(blob: BlobId) -> bool;
    fn abandon(upload: BlobId) -> ();
    fn file(now: UtcTime, tenant: &TenantId, id: FileId) -> FileRow;
    fn files(now: UtcTime, tenant: &TenantId, page: &FilePage) -> Page<FileRow>;
    fn ranges(now: UtcTime, tenant: &TenantId, id: FileId) -> (FileRow, Vec<BlobRange>);
    fn delete_file(now: UtcTime, tenant: &TenantId, id: FileId) -> Vec<Released>;
    fn forget(blob: BlobId) -> ();
    fn create_batch(now: UtcTime, new: &NewBatch, quotas: &[ScopedQuotas]) -> BatchRow;
    fn batch(tenant: &TenantId, id: BatchId) -> BatchRow;
    fn batches(tenant: &TenantId, page: &BatchPage) -> Page<BatchRow>;
    fn cancel(now: UtcTime, tenant: &TenantId, id: BatchId) -> BatchRow;
    fn quota_use(scope: &QuotaScope) -> crate::quota::QuotaUse;
    fn claimable(now: UtcTime, most: Most) -> Vec<BatchRow>;
    fn claim(now: UtcTime, batch: BatchId, seed: ClaimSeed, lease: UtcTime) -> Option<Claimed>;
    fn renew(claim: &Claim, lease: UtcTime) -> BatchRow;
    fn claimed(claim: &Claim) -> BatchRow;
    fn release(claim: &Claim, tries: TriesLeft) -> ();
    fn end_leases() -> ();
    fn capped(claim: &Claim) -> ();
    fn validated(now: UtcTime, claim: &Claim, errors: &[InputError]) -> BatchRow;
    fn begin(claim: &Claim, begun: u64, room: u64, quotas: &[ScopedQuotas]) -> ();
    fn begin_again(claim: &Claim, tries: &[(u64, u32)]) -> ();
    fn add_segment(claim: &Claim, segment: BlobId) -> ();
    fn commit(claim: &Claim, answers: &[Answer], room: u64) -> BatchRow;
    fn spent(day: UtcDay) -> Vec<SpentByBatches>;
    fn begin_end(now: UtcTime, claim: &Claim, cause: Cause) -> BatchRow;
    fn end(now: UtcTime, claim: &Claim, output: FileId, error: FileId) -> BatchRow;
    fn figures() -> StoredFigures;
    fn sweep(now: UtcTime) -> Vec<Released>;
    fn start() -> Vec<BlobId>;
}

/// The day of every answer.
pub(super) const TODAY: UtcDay = UtcDay(20_000);

/// Returns the work of a try: eight tokens, each of which costs 1 ns.
fn eight_tokens() -> TryUsage {
    TryUsage {
        tokens: BatchUsage { completion_tokens: 8, ..BatchUsage::default() },
        cost: Some(TryCost { day: TODAY, class: DeviceClass::cpu(), reference: DeviceNanos(8) }),
    }
}
