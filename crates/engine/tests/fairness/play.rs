//! Runs a workload through the whole engine on a virtual clock: the real inbox, scheduler,
//! cache, meter and journal, over a device that only passes time.

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, KeyId, MonotonicTime, PoolName, RequestId, TenantId,
};
use tollgate_engine::backend::synthetic::{
    Pace, SyntheticBackend, SyntheticOptions, SyntheticText,
};
use tollgate_engine::{
    CancelReason, Clock, EngineOptions, Flow, GeneratedToken, ManualEngine, Owner, PromptLogprob,
    RequestFigures, RequestOutcome, SamplingParams, SchedulePolicy, StepJournal, StepRecord,
    Submission, Tick, TokenSink, Totals, VirtualClock, step_time_budget,
};

use crate::workload::{Ask, Device, Size, Workload};

/// Tokens of a prompt and its answer at most.
pub(crate) const CONTEXT: u32 = 8_192;
const STEP_TOKENS: u32 = 512;
/// Longest time budget of a step, which is the default of the config.
const LONGEST_STEP: Duration = Duration::from_millis(80);

/// Longest wait for answers after the last request.
const PATIENCE: Duration = Duration::from_secs(60);

/// The condition that ends a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Until {
    /// The time of the workload is over; waiting requests are ignored.
    TimeIsUp,
    /// Every victim has its first token, or [`PATIENCE`] has run out.
    VictimsServed,
    /// Nothing is left to do.
    Done,
}

/// The results of a run.
pub(crate) struct Played {
    /// Results of each request, in the order of the workload.
    pub(crate) requests: Vec<Seen>,
    pub(crate) account: Account,
    pub(crate) totals: Totals,
    /// Clock at the end of the run.
    pub(crate) ended: Duration,
    /// Clock at the end of the last step.
    pub(crate) booked: Duration,
}

/// The result of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) ask: Ask,
    /// Time of the first token; absent if none came before the end of the run.
    pub(crate) first_token: Option<Duration>,
    /// Time of the last token before the end of the run.
    pub(crate) last_token: Option<Duration>,
    pub(crate) tokens: u32,
    pub(crate) refused: bool,
}

/// The records of the journal, summed.
#[derive(Default)]
pub(crate) struct Account {
    /// End of each step, and each tenant's device time so far.
    pub(crate) steps: Vec<(Duration, Vec<u64>)>,
    /// Device time of recomputation.
    pub(crate) overhead: u64,
    /// Sum of all shares.
    pub(crate) shares: u128,
    /// Sum of the times of all steps.
    pub(crate) busy: u128,
    /// Every record as text, if requested.
    pub(crate) written: Option<String>,
}

impl Played {
    /// Returns the wait for the first token, or the wait so far if none came.
    pub(crate) fn first_token(&self, seen: &Seen) -> Duration {
        seen.first_token.unwrap_or(self.ended).saturating_sub(seen.ask.at)
    }

    /// Returns prompt and answer tokens of all answered requests, per second.
    pub(crate) fn tokens_per_second(&self) -> f64 {
        let answered = self.requests.iter().filter(|seen| seen.first_token.is_some());
        let tokens: u64 =
            answered.map(|seen| u64::from(seen.ask.size.prompt) + u64::from(seen.tokens)).sum();
        tokens as f64 / self.ended.as_secs_f64()
    }
}

/// Runs `workload`.
pub(crate) fn play(workload: &Workload, policy: SchedulePolicy, until: Until) -> Played {
    Player::new(workload, policy, false).play(until)
}

/// Runs `workload` and writes every record of the journal as text.
pub(crate) fn play_written(workload: &Workload, policy: SchedulePolicy, until: Until) -> Played {
    Player::new(workload, policy, true).play(until)
}

struct Player<'a> {
    workload: &'a Workload,
    clock: VirtualClock,
    engine: ManualEngine,
    ears: Vec<Arc<Ears>>,
    tenants: Vec<TenantId>,
    /// Requests of each tenant that are under way.
    open: Vec<Arc<AtomicU32>>,
    account: Arc<Mutex<Account>>,
    /// Requests that a client will cancel, by the time of the cancel.
    cancels: BTreeSet<(Duration, usize)>,
}

impl<'a> Player<'a> {
    fn new(workload: &'a Workload, policy: SchedulePolicy, written: bool) -> Self {
        let clock = VirtualClock::default();
        let Device { cost, kv_tokens } = workload.device;
        let table = cost.table().expect("a table");
        let backend = SyntheticBackend::new(
            SyntheticOptions {
                cost,
                kv_tokens,
                context: CONTEXT,
                step_tokens: STEP_TOKENS,
                text: SyntheticText::bytes(),
            },
            Pace::Virtual(clock.clone()),
        )
        .expect("a model");
        let options = EngineOptions {
            // The flood waits here; the benchmark looks at its effect on others.
            queue_capacity: workload.asks.len().max(1),
            queue_tokens: usize::MAX,
            policy,
            step_time_budget: step_time_budget(&table, LONGEST_STEP),
            ..EngineOptions::new(table)
        };
        let tenants: Vec<TenantId> = workload
            .tenants
            .iter()
            .map(|tenant| TenantId::new(&tenant.name).expect("a name"))
            .collect();
        let account = Arc::new(Mutex::new(Account {
            written: written.then(String::new),
            ..Account::default()
        }));
        let journal = Journal {
            account: Arc::clone(&account),
            index: tenants.iter().cloned().zip(0..).collect(),
            so_far: vec![0; tenants.len()],
        };
        let engine = ManualEngine::new(
            Box::new(backend),
            options,
            Arc::new(clock.clone()),
            Box::new(journal),
        );
        let cancels = BTreeSet::new();
        let open = workload.tenants.iter().map(|_| Arc::default()).collect();
        Self { workload, clock, engine, ears: Vec::new(), tenants, open, account, cancels }
    }

    fn play(mut self, until: Until) -> Played {
        let end = self.workload.lasts;
        while !self.is_over(until, end) {
            self.submit_what_is_due();
            self.cancel_what_is_due();
            let next = self.workload.asks.get(self.ears.len()).map(|ask| ask.at);
            match (self.engine.tick().expect("no fault"), next) {
                (Tick::Worked, _) => {}
                (Tick::Idle, Some(next)) => self.clock.advance_to(time(next)),
                (Tick::Idle, None) if until == Until::Done => break,
                (Tick::Idle, None) => self.clock.advance_to(time(end + PATIENCE)),
                (Tick::Ended, _) => unreachable!("nobody asked it to end"),
            }
        }
        let ended = now(&self.clock);
        let totals = self.engine.totals();
        let requests = self.workload.asks.iter().zip(&self.ears);
        let requests = requests.map(|(ask, ears)| ears.seen(*ask)).collect();
        let account = std::mem::take(&mut *lock(&self.account));
        let booked = account.steps.last().map_or(Duration::ZERO, |(at, _)| *at);
        Played { requests, account, totals, ended, booked }
    }

    fn is_over(&self, until: Until, end: Duration) -> bool {
        let now = now(&self.clock);
        match until {
            Until::TimeIsUp => now >= end,
            Until::VictimsServed => {
                now >= end + PATIENCE
                    || now >= end
                        && self.ears.len() == self.workload.asks.len()
                        && self.workload.asks.iter().zip(&self.ears).all(|(ask, ears)| {
                            !self.workload.tenants[ask.tenant].is_victim || ears.has_begun()
                        })
            }
            Until::Done => false,
        }
    }

    fn submit_what_is_due(&mut self) {
        let now = now(&self.clock);
        while let Some(ask) = self.workload.asks.get(self.ears.len()).filter(|ask| ask.at <= now) {
            let open = Arc::clone(&self.open[ask.tenant]);
            let is_full = !self.workload.tenants[ask.tenant].is_victim
                && self.workload.most_open.is_some_and(|most| open.load(Ordering::Relaxed) >= most);
            let ears = Arc::new(Ears::new(self.clock.clone(), open));
            if is_full {
                ears.refused.store(1, Ordering::Relaxed);
                self.ears.push(ears);
                continue;
            }
            ears.open.fetch_add(1, Ordering::Relaxed);
            let submission = self.submission(ask, Arc::clone(&ears));
            self.engine.handle().submit(submission).expect("there is room");
            if let Some(patience) = ask.patience {
                self.cancels.insert((ask.at + patience, self.ears.len()));
            }
            self.ears.push(ears);
        }
    }

    fn cancel_what_is_due(&mut self) {
        let now = now(&self.clock);
        while let Some((_, number)) = self.cancels.first().filter(|(at, _)| *at <= now) {
            self.engine.handle().cancel(&request(*number), 0, CancelReason::Client);
            self.cancels.pop_first();
        }
    }

    fn submission(&self, ask: &Ask, ears: Arc<Ears>) -> Submission {
        let number = self.ears.len();
        Submission {
            request: request(number),
            attempt: 0,
            caller: Caller {
                tenant: self.tenants[ask.tenant].clone(),
                key: KeyId::new(&format!("key-{}-{}", ask.tenant, ask.key)).expect("a name"),
            },
            pool: self.workload.tenants[ask.tenant]
                .pool
                .map(|pool| PoolName::new(pool).expect("a name")),
            tier: self.workload.tenants[ask.tenant].tier,
            weight: self.workload.tenants[ask.tenant].weight,
            prompts: vec![prompt(ask.size)],
            choices: ask.choices,
            max_tokens: ask.size.max_tokens,
            sampling: SamplingParams::greedy(0),
            budget: None,
            queue_deadline: Duration::from_secs(1_000_000),
            echo_logprobs: false,
            sink: Box::new(Sink(ears)),
        }
    }
}

fn request(number: usize) -> RequestId {
    RequestId::new(&format!("req-{number}")).expect("a name")
}

/// Returns a prompt with the requested number of tokens. If the answer must end before
/// `max_tokens`, the prompt contains that length.
fn prompt(size: Size) -> Vec<u32> {
    let mut text = String::new();
    if size.answer < size.max_tokens {
        let _ = write!(text, "[{} tokens]", size.answer);
    }
    assert!(text.len() <= size.prompt as usize, "a wish fits its prompt");
    text.bytes().chain(std::iter::repeat(b'x')).take(size.prompt as usize).map(u32::from).collect()
}

/// The sink of a request.
struct Ears {
    clock: VirtualClock,
    /// Time of the first token; 0 means none yet.
    first_token: AtomicU64,
    /// Time of the last token; 0 means none yet.
    last_token: AtomicU64,
    tokens: AtomicU32,
    refused: AtomicU32,
    /// Requests of the tenant that are under way.
    open: Arc<AtomicU32>,
}

struct Sink(Arc<Ears>);

impl Ears {
    fn new(clock: VirtualClock, open: Arc<AtomicU32>) -> Self {
        Self {
            clock,
            first_token: AtomicU64::new(0),
            last_token: AtomicU64::new(0),
            tokens: AtomicU32::new(0),
            refused: AtomicU32::new(0),
            open,
        }
    }

    fn has_begun(&self) -> bool {
        self.first_token.load(Ordering::Relaxed) > 0 || self.refused.load(Ordering::Relaxed) > 0
    }

    fn seen(&self, ask: Ask) -> Seen {
        let time = |token: &AtomicU64| {
            let token = token.load(Ordering::Relaxed);
            (token > 0).then(|| Duration::from_nanos(token))
        };
        Seen {
            ask,
            first_token: time(&self.first_token),
            last_token: time(&self.last_token),
            tokens: self.tokens.load(Ordering::Relaxed),
            refused: self.refused.load(Ordering::Relaxed) > 0,
        }
    }
}

impl TokenSink for Sink {
    fn prompt_logprobs(&mut self, _: u32, _: Vec<PromptLogprob>) {}

    fn token(&mut self, _: u32, _: GeneratedToken) -> Flow {
        let Ears { clock, first_token, last_token, tokens, .. } = &*self.0;
        let now = clock.now().0;
        if tokens.fetch_add(1, Ordering::Relaxed) == 0 {
            first_token.store(now, Ordering::Relaxed);
        }
        last_token.store(now, Ordering::Relaxed);
        Flow::Continue
    }

    fn finished(&mut self, _: u32, _: FinishReason, _: u32) {}

    fn done(&mut self, outcome: RequestOutcome) {
        self.0.open.fetch_sub(1, Ordering::Relaxed);
        if let RequestOutcome::Refused(_) = outcome {
            self.0.refused.store(1, Ordering::Relaxed);
        }
    }
}

struct Journal {
    account: Arc<Mutex<Account>>,
    index: HashMap<TenantId, usize>,
    so_far: Vec<u64>,
}

impl StepJournal for Journal {
    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let StepRecord { step, started, busy, shares } = *record;
        let mut account = lock(&self.account);
        let mut sum = DeviceNanos::ZERO;
        for share in shares {
            sum += share.attributed;
            match &share.owner {
                Owner::Request { caller, .. } => {
                    self.so_far[self.index[&caller.tenant]] += share.attributed.nanos();
                }
                Owner::Overhead => account.overhead += share.attributed.nanos(),
            }
        }
        assert_eq!(sum, busy, "the shares of step {step} sum to it");
        account.shares += u128::from(sum.nanos());
        account.busy += u128::from(busy.nanos());
        let ended = Duration::from_nanos(started.0 + busy.nanos());
        account.steps.push((ended, self.so_far.clone()));
        if let Some(written) = &mut account.written {
            let _ = writeln!(written, "{step} {} {} {shares:?}", started.0, busy.nanos());
        }
        Ok(())
    }

    fn finished(&mut self, at: MonotonicTime, requests: &[RequestFigures]) -> io::Result<()> {
        if let Some(written) = &mut lock(&self.account).written {
            let _ = writeln!(written, "{} {requests:?}", at.0);
        }
        Ok(())
    }

    fn idle(&mut self, _: MonotonicTime) -> io::Result<()> {
        Ok(())
    }
}

fn lock(account: &Mutex<Account>) -> MutexGuard<'_, Account> {
    account.lock().expect("nobody panics holding it")
}

fn now(clock: &VirtualClock) -> Duration {
    Duration::from_nanos(clock.now().0)
}

fn time(at: Duration) -> MonotonicTime {
    MonotonicTime(at.as_nanos() as u64)
}
