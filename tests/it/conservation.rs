//! An hour of device time in virtual time, through every part that counts it: the real
//! engine on a synthetic device, the worker's journal on disk, and the ledger. Tenants
//! overload the device, cancel requests and pause; the worker dies twice within a step.
//! For every span of blocks, the accounts sum to the elapsed time to the nanosecond,
//! and each tenant's share is the sum of the engine's steps.

use futures_executor::block_on;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tollgate_domain::{
    Caller, Device, DeviceClass, FinishReason, KeyId, ModelName, MonotonicTime, RequestId,
    TenantId, Usage, UtcTime, WorkerEpoch, WorkerName,
};
use tollgate_engine::backend::synthetic::{
    Pace, StepCost, SyntheticBackend, SyntheticOptions, SyntheticText,
};
use tollgate_engine::{
    CancelReason, Clock, EngineOptions, Flow, GeneratedToken, ManualEngine, Owner, PromptLogprob,
    RequestFigures, RequestOutcome, SamplingParams, StepJournal, StepRecord, Submission, Tick,
    Tier, TokenSink, VirtualClock,
};
use tollgate_ledger::{FaultCap, Ledger, LedgerHandle, Posted, Submitted};
use tollgate_worker::test_harness::{HarnessOptions, JournalHarness, OsDisk};

const SECOND: u64 = 1_000_000_000;
const HOUR: u64 = 3_600 * SECOND;
/// The time between two readings of the journal, on the device's clock.
const TAKEN_EVERY: u64 = 20 * SECOND;
const TENANTS: u64 = 5;
/// The start, 2026-11-20 23:30, so that midnight falls into the hour.
const BEGAN: u64 = 1_795_217_400 * SECOND;

/// The host's clock, which follows the virtual clock.
static HOST: AtomicU64 = AtomicU64::new(BEGAN);

fn utc() -> UtcTime {
    UtcTime(HOST.load(Ordering::Relaxed))
}

#[test]
fn hour_of_mixed_load_is_booked_exactly() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("ledger.db");
    let ledger = Ledger::open(&path).expect("a ledger");
    let clock = VirtualClock::default();
    let mut load = Load::new();
    let mut lives = Vec::new();
    for (number, end) in [(1, HOUR / 3), (2, HOUR / 3 * 2), (3, HOUR)] {
        let mut life = Incarnation::begin(folder.path(), WorkerEpoch(number), &clock);
        life.run(&ledger, &mut load, end);
        lives.push(if number < 3 { life.crash() } else { life.close(&ledger) });
        // Time without a worker is in no account.
        clock.advance_to(MonotonicTime(clock.now().0 + 2 * SECOND));
    }
    assert!(load.cancelled > 50 && load.number > 1_000, "a mixed load: {load:?}");

    let blocks = read_blocks(&path);
    assert!(blocks.len() > 1_000, "{} blocks", blocks.len());
    for trace in &lives {
        let mine: Vec<&LedgerBlock> =
            blocks.iter().filter(|seen| seen.epoch == trace.epoch.to_string()).collect();
        trace.compare(&mine);
    }
    // Corrections move whole amounts from a tenant to the platform's loss.
    let reader = ledger.reader();
    assert_eq!(reader.check(), vec![]);
    let balances: Vec<_> =
        lives.iter().map(|trace| reader.balance(trace.epoch).expect("reads")).collect();
    assert!(balances.iter().all(tollgate_ledger::Balance::is_exact), "{balances:?}");
    let sum = |of: fn(&tollgate_ledger::Balance) -> i64| balances.iter().map(of).sum::<i64>();
    let (wall, lost) = (sum(|it| it.wall_ns), sum(|it| it.loss_ns));
    assert!(wall > (HOUR - 10 * SECOND) as i64 && lost > 0, "{balances:?}");
    assert!(sum(|it| it.overhead_ns) > 0, "nothing was preempted: {balances:?}");
    assert!(sum(|it| it.idle_ns) > 60 * SECOND as i64, "never idle: {balances:?}");
}

/// The steps that the engine reported for one incarnation of the worker, and its start
/// and end.
struct Trace {
    epoch: WorkerEpoch,
    began: u64,
    /// The end of its last record, known after a close or a crash.
    ended: u64,
    steps: Vec<Step>,
}

struct Step {
    started: u64,
    busy: u64,
    overhead: u64,
    tenants: BTreeMap<String, u64>,
}

impl Trace {
    /// Compares spans of blocks with the steps in them: each block alone, all blocks,
    /// and a hundred random spans.
    fn compare(&self, blocks: &[&LedgerBlock]) {
        let wall: u64 = blocks.iter().map(|seen| seen.wall).sum();
        assert_eq!(wall, self.ended - self.began, "{}: all of it", self.epoch);
        let steps: u64 = blocks.iter().map(|seen| seen.steps.1).max().expect("steps");
        assert_eq!(steps, self.steps.len() as u64, "{}", self.epoch);
        let mut random = Random(self.epoch.0 as u64);
        let drawn = (0..100).map(|_| {
            let (a, b) = (random.below(blocks.len() as u64), random.below(blocks.len() as u64));
            (a.min(b) as usize, a.max(b) as usize)
        });
        let alone = (0..blocks.len()).map(|block| (block, block));
        for (from, to) in alone.chain(drawn).chain([(0, blocks.len() - 1)]) {
            self.compare_span(blocks, from, to);
        }
    }

    fn compare_span(&self, blocks: &[&LedgerBlock], from: usize, to: usize) {
        let span = &blocks[from..=to];
        let sum = |of: fn(&LedgerBlock) -> u64| span.iter().map(|seen| of(seen)).sum::<u64>();
        let (wall, idle, loss) = (sum(|it| it.wall), sum(|it| it.idle), sum(|it| it.loss));
        let mut tenants: BTreeMap<&str, u64> = BTreeMap::new();
        for (tenant, ns) in span.iter().flat_map(|seen| &seen.tenants) {
            *tenants.entry(tenant).or_default() += ns;
        }
        let overhead = sum(|it| it.overhead);
        let owned = tenants.values().sum::<u64>() + overhead + idle + loss;
        assert_eq!(owned, wall, "{} {from} to {to}", self.epoch);

        // The engine's steps must give the same sums.
        let first = span.iter().map(|it| it.steps.0).find(|step| *step > 0);
        let last = span.iter().map(|it| it.steps.1).max().unwrap_or(0);
        let steps = first.map_or(&[][..], |first| &self.steps[first as usize - 1..last as usize]);
        let mut said: BTreeMap<&str, u64> = BTreeMap::new();
        for (tenant, ns) in steps.iter().flat_map(|step| &step.tenants) {
            *said.entry(tenant).or_default() += ns;
        }
        assert_eq!(tenants, said, "{} {from} to {to}", self.epoch);
        assert_eq!(overhead, steps.iter().map(|step| step.overhead).sum::<u64>());
        let busy: u64 = steps.iter().map(|step| step.busy).sum();
        assert_eq!(wall - idle - loss, busy);
        // The end of the span must lie between its last step and the next step.
        let before: u64 = blocks[..from].iter().map(|seen| seen.wall).sum();
        let end = self.began + before + wall;
        if let Some(step) = steps.last() {
            assert!(end >= step.started + step.busy, "{} {from} to {to}", self.epoch);
        }
        if let Some(next) = self.steps.get(last as usize).filter(|_| last > 0) {
            assert!(end <= next.started, "{} {from} to {to}", self.epoch);
        }
    }
}

/// A block in the ledger; amounts in nanoseconds.
#[derive(Default)]
struct LedgerBlock {
    epoch: String,
    steps: (u64, u64),
    wall: u64,
    overhead: u64,
    idle: u64,
    loss: u64,
    tenants: BTreeMap<String, u64>,
}

/// Reads all blocks, by incarnation and number, with SQL and not with the ledger's
/// code.
fn read_blocks(path: &Path) -> Vec<LedgerBlock> {
    let connection = rusqlite::Connection::open(path).expect("opens");
    let mut statement = connection
        .prepare(
            "SELECT epoch_id, block, epoch, first_step, blocks.last_step, account,
               coalesce(tenant, ''), sum(amount_ns)
             FROM blocks JOIN epochs ON epochs.id = epoch_id
             JOIN entries USING (epoch_id, block) LEFT JOIN callers ON callers.id = caller_id
             WHERE kind = 0 GROUP BY 1, 2, 6, 7 ORDER BY 1, 2",
        )
        .expect("prepares");
    let mut rows = statement.query([]).expect("reads");
    let mut blocks: BTreeMap<(i64, i64), LedgerBlock> = BTreeMap::new();
    while let Some(row) = rows.next().expect("reads") {
        let key = (row.get(0).expect("an id"), row.get(1).expect("a number"));
        let seen = blocks.entry(key).or_default();
        seen.epoch = row.get(2).expect("text");
        seen.steps = (row.get(3).expect("a step"), row.get(4).expect("a step"));
        let ns = row.get::<_, i64>(7).expect("a sum").unsigned_abs();
        match row.get::<_, u32>(5).expect("an account") {
            0 => seen.wall = ns,
            1 => drop(seen.tenants.insert(row.get(6).expect("text"), ns)),
            2 => seen.overhead = ns,
            3 => seen.idle = ns,
            _ => seen.loss = ns,
        }
    }
    blocks.into_values().collect()
}

/// One incarnation of the worker.
struct Incarnation {
    epoch: WorkerEpoch,
    began: u64,
    clock: VirtualClock,
    journal_harness: Arc<Mutex<JournalHarness<OsDisk>>>,
    steps: Arc<Mutex<Vec<Step>>>,
    engine: ManualEngine,
}

impl Incarnation {
    fn begin(folder: &Path, epoch: WorkerEpoch, clock: &VirtualClock) -> Self {
        let cost = StepCost::default();
        let backend = SyntheticBackend::new(
            SyntheticOptions {
                cost,
                kv_tokens: 6_000, // short, so that some are preempted
                context: 4_096,
                step_tokens: 512,
                text: SyntheticText::bytes(),
            },
            Pace::Virtual(clock.clone()),
        )
        .expect("a model");
        let class = DeviceClass::new("synthetic").expect("a name");
        let journal_harness = JournalHarness::open(
            OsDisk,
            HarnessOptions {
                folder: folder.join("journal"),
                epoch,
                worker: WorkerName::new("0").expect("a name"),
                device: Device { class, name: "synthetic".into(), uuid: String::new() },
                model: ModelName::new("m").expect("a name"),
                calibration: "v1".into(),
                clock: Arc::new(clock.clone()),
                utc,
            },
        )
        .expect("a journal");
        let journal_harness = Arc::new(Mutex::new(journal_harness));
        let steps = Arc::<Mutex<Vec<Step>>>::default();
        let journal = RecordingJournal {
            journal_harness: Arc::clone(&journal_harness),
            steps: Arc::clone(&steps),
        };
        let began = clock.now().0;
        let engine = ManualEngine::new(
            Box::new(backend),
            EngineOptions::new(cost.table().expect("a table")),
            Arc::new(clock.clone()),
            Box::new(journal),
        );
        Self { epoch, began, clock: clock.clone(), journal_harness, steps, engine }
    }

    /// Serves `load` until `end` and reads the journal at intervals.
    fn run(&mut self, ledger: &LedgerHandle, load: &mut Load, end: u64) {
        let mut taken = self.clock.now().0;
        while self.clock.now().0 < end {
            let now = self.clock.now().0;
            HOST.store(BEGAN + now, Ordering::Relaxed);
            load.play(&self.engine, now);
            if now >= taken + TAKEN_EVERY {
                taken = now;
                self.take(ledger);
            }
            if self.engine.tick().expect("no fault") == Tick::Idle {
                let next = load.next.min(taken + TAKEN_EVERY).max(now + 1);
                self.clock.advance_to(MonotonicTime(next));
            }
        }
    }

    /// Acts as the gateway: posts every block to the ledger, then acknowledges it.
    /// Unfinished attempts of an ended incarnation are charged nothing.
    fn take(&self, ledger: &LedgerHandle) {
        let journal_harness = lock(&self.journal_harness);
        journal_harness.tick(1 << 20).expect("syncs");
        let mut reader = journal_harness.reader();
        let mut ended = Vec::new();
        let mut known = Vec::new();
        let mut answers = Vec::new();
        while let Some(block) = reader.next_block().expect("reads") {
            let parts = block.parts();
            if parts.last_of_epoch {
                ended.push(parts.epoch);
            }
            // Blocks that were not acknowledged to this process come again.
            let told = parts.number <= ledger.reader().last_block(parts.epoch).expect("reads");
            let expected = if told { Posted::Already } else { Posted::New };
            known.push((parts.epoch, parts.number));
            // About as many blocks share a commit; the first block is submitted twice.
            if answers.len() == 200 {
                assert_posted(&mut answers);
            }
            answers.push((expected, ledger.submit(block.clone())));
            if known.len() == 1 {
                let again = ledger.submit(block);
                answers.push((Posted::Already, again));
            }
        }
        assert_posted(&mut answers);
        for (epoch, number) in known {
            journal_harness.acknowledge(epoch, number);
        }
        for epoch in ended {
            for open in ledger.reader().open_attempts(epoch).expect("reads") {
                let cap = FaultCap {
                    caller: open.caller,
                    attempt: open.attempt,
                    model: open.model,
                    class: open.class,
                    payable: Usage::default(),
                    at: utc(),
                    tier: open.tier,
                };
                let mut answer = vec![(Posted::New, ledger.submit(cap))];
                assert_posted(&mut answer);
            }
        }
    }

    /// Crashes in a step that has lasted 40 ms, 25 ms after the last mark.
    fn crash(self) -> Trace {
        let mut journal_harness = lock(&self.journal_harness);
        let now = self.clock.now().0;
        journal_harness.engine().began(MonotonicTime(now)).expect("writes");
        journal_harness.tick(1 << 20).expect("syncs");
        self.clock.advance_to(MonotonicTime(now + 15_000_000));
        journal_harness.tick(1 << 20).expect("marks");
        self.clock.advance_to(MonotonicTime(now + 40_000_000));
        drop(journal_harness);
        let steps = std::mem::take(&mut *lock(&self.steps));
        Trace { epoch: self.epoch, began: self.began, ended: now + 15_000_000, steps }
    }

    fn close(self, ledger: &LedgerHandle) -> Trace {
        lock(&self.journal_harness).close().expect("closes");
        let ended = self.clock.now().0;
        self.take(ledger);
        let steps = std::mem::take(&mut *lock(&self.steps));
        Trace { epoch: self.epoch, began: self.began, ended, steps }
    }
}

/// A journal that also records the engine's steps.
struct RecordingJournal {
    journal_harness: Arc<Mutex<JournalHarness<OsDisk>>>,
    steps: Arc<Mutex<Vec<Step>>>,
}

impl StepJournal for RecordingJournal {
    fn began(&mut self, at: MonotonicTime) -> io::Result<()> {
        lock(&self.journal_harness).engine().began(at)
    }

    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let mut step = Step {
            started: record.started.0,
            busy: record.busy.nanos(),
            overhead: 0,
            tenants: BTreeMap::new(),
        };
        for share in record.shares {
            let ns = share.attributed.nanos();
            match &share.owner {
                Owner::Overhead => step.overhead += ns,
                Owner::Request { caller, .. } => {
                    *step.tenants.entry(caller.tenant.to_string()).or_default() += ns;
                }
            }
        }
        lock(&self.steps).push(step);
        lock(&self.journal_harness).engine().step(record)
    }

    fn finished(&mut self, at: MonotonicTime, requests: &[RequestFigures]) -> io::Result<()> {
        lock(&self.journal_harness).engine().finished(at, requests)
    }

    fn idle(&mut self, now: MonotonicTime) -> io::Result<()> {
        lock(&self.journal_harness).engine().idle(now)
    }
}

/// A random load of requests and cancellations.
#[derive(Debug)]
struct Load {
    random: Random,
    number: u64,
    cancelled: u64,
    /// The time of the next request, ns.
    next: u64,
    /// The times of cancellations and their requests.
    leaving: Vec<(u64, RequestId)>,
}

impl Load {
    fn new() -> Self {
        let random = Random(0x2545_f491_4f6c_dd1d);
        Self { random, number: 0, cancelled: 0, next: 0, leaving: Vec::new() }
    }

    fn play(&mut self, engine: &ManualEngine, now: u64) {
        while self.next <= now {
            let request = RequestId::new(&format!("req-{}", self.number)).expect("a name");
            let submission = self.submission(request.clone());
            self.number += 1;
            // A full queue refuses some requests.
            let taken = engine.handle().submit(submission).is_ok();
            if taken && self.random.below(8) == 0 {
                self.leaving.push((now + self.random.below(20 * SECOND), request));
            }
            self.next += self.random.below(2 * SECOND);
            // One minute in ten has no new requests, so that the device becomes idle.
            if self.next / (60 * SECOND) % 10 == 9 {
                self.next += 60 * SECOND;
            }
        }
        for (_, request) in self.leaving.extract_if(.., |(at, _)| *at <= now) {
            engine.handle().cancel(&request, 0, CancelReason::Client);
            self.cancelled += 1;
        }
    }

    fn submission(&mut self, request: RequestId) -> Submission {
        let tenant = self.random.below(TENANTS);
        let prompt = 16 + self.random.below(500) as usize;
        Submission {
            request,
            attempt: 0,
            caller: Caller {
                tenant: TenantId::new(&format!("t{tenant}")).expect("a name"),
                key: KeyId::new(&format!("k{}", self.random.below(2))).expect("a name"),
            },
            pool: None,
            tier: Tier::Interactive,
            weight: 1.0 + tenant as f64,
            prompts: vec![vec![u32::from(b'x'); prompt]],
            choices: 1 + self.random.below(2) as u32,
            max_tokens: 1 + self.random.below(400) as u32,
            sampling: SamplingParams::greedy(0),
            budget: None,
            queue_deadline: Duration::from_secs(1_000),
            echo_logprobs: false,
            sink: Box::new(DiscardingSink),
        }
    }
}

struct DiscardingSink;

impl TokenSink for DiscardingSink {
    fn prompt_logprobs(&mut self, _: u32, _: Vec<PromptLogprob>) {}

    fn token(&mut self, _: u32, _: GeneratedToken) -> Flow {
        Flow::Continue
    }

    fn finished(&mut self, _: u32, _: FinishReason, _: u32) {}

    fn done(&mut self, _: RequestOutcome) {}
}

/// A xorshift generator with a fixed seed.
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn assert_posted(answers: &mut Vec<(Posted, Submitted)>) {
    for (expected, answer) in answers.drain(..) {
        assert_eq!(block_on(answer).expect("posts"), expected);
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().expect("no thread panicked")
}
