//! Test bench: the engine's core, run tick by tick, with recorders for everything that it
//! reports.

use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, KeyId, MonotonicTime, RequestId, TenantId, Tier, Usage,
};

use crate::backend::Backend;
use crate::clock::Clock;
use crate::engine::batch::Sequence;
use crate::engine::inbox::{EngineHandle, Inbox};
use crate::engine::journal::{RequestFigures, StepJournal, StepRecord, StepShare};
use crate::engine::submission::{
    Flow, GeneratedToken, PromptLogprob, Refusal, RequestOutcome, Submission, TokenSink,
};
use crate::engine::tick::{Core, Tick};
use crate::engine::{EngineError, EngineOptions, assemble};
use crate::meter::Totals;
use crate::sample::SamplingParams;
use crate::schedule::{SchedulePolicy, Seat};
use crate::testing::{AheadBackend, Failure, FakeBackend, FakeClock, SeenStep, table};

pub(super) struct Bench {
    pub(super) handle: EngineHandle,
    pub(super) clock: FakeClock,
    pub(super) log: JournalLog,
    pub(super) seen: Arc<Mutex<Vec<SeenStep>>>,
    /// Number of steps that started before the previous one was finished.
    pub(super) ahead: Arc<AtomicU64>,
    /// Busy time by the device's own clock, ns, if the device has one.
    pub(super) device_busy: Arc<AtomicU64>,
    inbox: Arc<Inbox>,
    core: Core,
}

/// Differences from the default bench.
pub(super) struct Setup {
    pub(super) blocks: u32,
    pub(super) fails_at: Option<(u64, Failure)>,
    pub(super) keeps_time: bool,
    /// True if the device supports steps ahead.
    pub(super) ahead: bool,
    pub(super) options: EngineOptions,
    pub(super) journal_fails_at: Option<u64>,
}

impl Setup {
    pub(super) fn new(blocks: u32) -> Self {
        let options = EngineOptions::new(table());
        Self {
            blocks,
            fails_at: None,
            keeps_time: false,
            ahead: false,
            options,
            journal_fails_at: None,
        }
    }
}

impl Bench {
    pub(super) fn new(blocks: u32) -> Self {
        Self::with(Setup::new(blocks))
    }

    pub(super) fn with(setup: Setup) -> Self {
        let clock = FakeClock::default();
        let mut backend = FakeBackend::new(setup.blocks, clock.clone());
        backend.fails_at = setup.fails_at;
        backend.keeps_time = setup.keeps_time;
        let seen = Arc::clone(&backend.seen);
        let (mut ahead, mut device_busy) = (Arc::default(), Arc::default());
        let backend: Box<dyn Backend> = match setup.ahead {
            false => Box::new(backend),
            true => {
                let backend = AheadBackend::new(backend);
                ahead = Arc::clone(&backend.ahead);
                device_busy = Arc::clone(&backend.busy);
                Box::new(backend)
            }
        };
        let log = JournalLog::default();
        let journal = RecordingJournal {
            fails_at: setup.journal_fails_at,
            ..RecordingJournal::new(log.clone())
        };
        let (core, inbox) =
            assemble(backend, setup.options, Arc::new(clock.clone()), Box::new(journal));
        let handle = EngineHandle::new(Arc::clone(&inbox));
        Self { handle, clock, log, seen, ahead, device_busy, inbox, core }
    }

    pub(super) fn submit(&self, (submission, heard): (Submission, Ears)) -> Ears {
        self.handle.submit(submission).expect("it is taken");
        heard
    }

    pub(super) fn tick(&mut self) -> Result<Tick, EngineError> {
        let commands = self.inbox.collect();
        self.core.tick(commands)
    }

    /// Runs ticks until nothing is left to do. Returns the last tick.
    pub(super) fn run(&mut self) -> Tick {
        for _ in 0..100_000 {
            match self.tick().expect("no fault") {
                Tick::Worked => {}
                tick => return tick,
            }
        }
        panic!("it never ends");
    }

    /// Runs ticks until the device has run `steps` more steps.
    pub(super) fn run_steps(&mut self, steps: usize) {
        let goal = self.log.lock().steps.len() + steps;
        while self.log.lock().steps.len() < goal {
            assert_eq!(self.tick().expect("no fault"), Tick::Worked);
        }
    }

    pub(super) fn totals(&self) -> Totals {
        self.core.totals()
    }

    /// Returns the attributed and the predicted time of a tenant.
    pub(super) fn counted(&self, tenant: &TenantId) -> Option<(DeviceNanos, DeviceNanos)> {
        let caller = Caller { tenant: tenant.clone(), key: KeyId::new("key").expect("a name") };
        let seat = Seat::new(SchedulePolicy::Fair, Tier::Interactive, None, &caller, 1.0);
        self.core.shares.account(&seat)
    }

    /// Returns the predicted cost of reading the rest of a tenant's started prompts.
    pub(super) fn unread(&self, tenant: &TenantId) -> DeviceNanos {
        let of = |sequence: &&Sequence| {
            !sequence.preempted && self.core.requests[&sequence.request].caller.tenant == *tenant
        };
        let reading = self.core.sequences.values().filter(of);
        reading.map(|sequence| table().request([sequence.unread()], [])).sum()
    }

    /// Returns the results of a request that has the engine to itself.
    pub(super) fn alone(&mut self, asked: (Submission, Ears)) -> Heard {
        let heard = self.submit(asked);
        self.run();
        Heard::of(&heard)
    }

    /// Checks that an idle engine holds nothing.
    pub(super) fn check_empty(&mut self) {
        assert_ne!(self.run(), Tick::Worked);
        let status = self.handle.status();
        assert_eq!(status.kv_blocks_free, status.kv_blocks_total);
        assert_eq!((status.queued, status.running), (0, 0));
        assert_eq!(status.backlog, DeviceNanos::ZERO);
    }
}

/// Returns a request of tenant `tenant-<number mod 3>` and its recorder.
pub(super) fn ask(number: u32, prompt: &[u32], max_tokens: u32) -> (Submission, Ears) {
    ask_all(number, &[prompt], 1, max_tokens)
}

pub(super) fn ask_all(
    number: u32,
    prompts: &[&[u32]],
    choices: u32,
    max_tokens: u32,
) -> (Submission, Ears) {
    let heard = Ears::default();
    let submission = Submission {
        request: RequestId::new(&format!("req-{number}")).expect("a name"),
        attempt: 0,
        caller: Caller {
            tenant: TenantId::new(&format!("tenant-{}", number % 3)).expect("a name"),
            key: KeyId::new("key").expect("a name"),
        },
        pool: None,
        tier: Tier::Interactive,
        weight: 1.0,
        prompts: prompts.iter().map(|prompt| prompt.to_vec()).collect(),
        choices,
        max_tokens,
        sampling: SamplingParams {
            temperature: 1.0,
            // The end token appears only where a test wants it.
            logit_bias: vec![(crate::testing::END, -100.0)],
            ..SamplingParams::greedy(number.into())
        },
        budget: None,
        queue_deadline: Duration::from_secs(3_600),
        echo_logprobs: false,
        sink: Box::new(HeardSink::new(heard.clone())),
    };
    (submission, heard)
}

/// Returns a prompt that differs from all others.
pub(super) fn prompt(number: u32, length: u32) -> Vec<u32> {
    (0..length).map(|i| (number * 31 + i * 7) % 90).collect()
}

pub(super) type Ears = Arc<Mutex<Heard>>;

/// Everything that a sink received.
#[derive(Clone, Debug, Default)]
pub(super) struct Heard {
    pub(super) choices: Vec<Vec<GeneratedToken>>,
    pub(super) reasons: Vec<Option<FinishReason>>,
    pub(super) prompt_logprobs: Vec<(u32, Vec<PromptLogprob>)>,
    pub(super) outcome: Option<RequestOutcome>,
}

impl Heard {
    pub(super) fn of(ears: &Ears) -> Self {
        ears.lock().expect("nobody panics holding it").clone()
    }

    pub(super) fn tokens(&self, choice: usize) -> Vec<u32> {
        self.choices.get(choice).into_iter().flatten().map(|token| token.token).collect()
    }

    pub(super) fn usage(&self) -> Usage {
        match &self.outcome {
            Some(RequestOutcome::Finished { usage, .. }) => *usage,
            other => panic!("not finished: {other:?}"),
        }
    }

    pub(super) fn refusal(&self) -> Refusal {
        match &self.outcome {
            Some(RequestOutcome::Refused(refusal)) => refusal.clone(),
            other => panic!("not refused: {other:?}"),
        }
    }
}

pub(super) struct HeardSink {
    heard: Ears,
    /// Number of tokens after which the sink stops a choice.
    pub(super) stop_at: Option<usize>,
}

impl HeardSink {
    pub(super) fn new(heard: Ears) -> Self {
        Self { heard, stop_at: None }
    }
}

impl TokenSink for HeardSink {
    fn prompt_logprobs(&mut self, prompt: u32, logprobs: Vec<PromptLogprob>) {
        self.heard.lock().expect("unpoisoned").prompt_logprobs.push((prompt, logprobs));
    }

    fn token(&mut self, choice: u32, token: GeneratedToken) -> Flow {
        let mut heard = self.heard.lock().expect("unpoisoned");
        assert!(heard.outcome.is_none(), "a token after the end");
        let choice = choice as usize;
        if heard.choices.len() <= choice {
            heard.choices.resize(choice + 1, Vec::new());
        }
        assert!(heard.reasons.get(choice).is_none_or(Option::is_none), "a token after its end");
        heard.choices[choice].push(token);
        if self.stop_at == Some(heard.choices[choice].len()) { Flow::Stop } else { Flow::Continue }
    }

    fn finished(&mut self, choice: u32, reason: FinishReason, completion_tokens: u32) {
        let mut heard = self.heard.lock().expect("unpoisoned");
        let choice = choice as usize;
        assert_eq!(heard.tokens(choice).len(), completion_tokens as usize);
        if heard.reasons.len() <= choice {
            heard.reasons.resize(choice + 1, None);
        }
        assert_eq!(heard.reasons[choice].replace(reason), None, "a choice ends once");
    }

    fn done(&mut self, outcome: RequestOutcome) {
        let mut heard = self.heard.lock().expect("unpoisoned");
        assert_eq!(heard.outcome.replace(outcome), None, "a request ends once");
    }
}

/// Everything that a journal received.
#[derive(Default)]
pub(super) struct Journalled {
    pub(super) steps: Vec<JournalledStep>,
    pub(super) finished: Vec<(MonotonicTime, RequestFigures)>,
}

pub(super) struct JournalledStep {
    pub(super) step: u64,
    pub(super) started: MonotonicTime,
    pub(super) busy: DeviceNanos,
    pub(super) shares: Vec<StepShare>,
}

#[derive(Clone, Default)]
pub(super) struct JournalLog(Arc<Mutex<Journalled>>);

impl JournalLog {
    pub(super) fn lock(&self) -> MutexGuard<'_, Journalled> {
        self.0.lock().expect("nobody panics holding it")
    }
}

pub(super) struct RecordingJournal {
    log: JournalLog,
    fails_at: Option<u64>,
    /// Start of the step in progress.
    began: MonotonicTime,
}

impl RecordingJournal {
    pub(super) fn new(log: JournalLog) -> Self {
        Self { log, fails_at: None, began: MonotonicTime(0) }
    }
}

impl StepJournal for RecordingJournal {
    fn began(&mut self, at: MonotonicTime) -> io::Result<()> {
        self.began = at;
        Ok(())
    }

    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let StepRecord { step, started, busy, shares } = *record;
        // The time until this point was reported as idle.
        assert!(self.began <= started, "step {step} was booked from before it was said to begin");
        if self.fails_at == Some(step) {
            return Err(io::Error::other("the disk is full"));
        }
        self.log.lock().steps.push(JournalledStep { step, started, busy, shares: shares.to_vec() });
        Ok(())
    }

    fn finished(&mut self, at: MonotonicTime, requests: &[RequestFigures]) -> io::Result<()> {
        self.log.lock().finished.extend(requests.iter().map(|figures| (at, figures.clone())));
        Ok(())
    }

    fn idle(&mut self, _: MonotonicTime) -> io::Result<()> {
        Ok(())
    }
}

impl FakeClock {
    /// Returns the clock's nanoseconds.
    pub(super) fn nanos(&self) -> u64 {
        self.now().0
    }
}
