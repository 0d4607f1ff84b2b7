//! Tests of the engine's thread over the CPU backend and a tiny real model: answers do
//! not depend on other requests, and every nanosecond of the device belongs to an
//! account.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

use std::io;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, KeyId, MonotonicTime, RequestId, TenantId, Usage,
};
use tollgate_engine::backend::cpu::{CpuBackend, CpuOptions};
use tollgate_engine::model::ModelFiles;
use tollgate_engine::{
    CancelReason, Clock, Engine, EngineOptions, Flow, GeneratedToken, Owner, PromptLogprob,
    RequestFigures, RequestOutcome, SamplingParams, StepJournal, StepRecord, Submission,
    SystemClock, Tier, TokenSink, Totals, coarse,
};

#[test]
fn answers_do_not_depend_on_other_requests() {
    let lone: Vec<Vec<u32>> = (0..12).map(|number| run(&[number]).answers.remove(0)).collect();
    let together = run(&(0..12).collect::<Vec<_>>());
    assert_eq!(together.answers, lone);
    assert_eq!(lone[0][0], likeliest_after_the_golden_prompt());
}

/// In a pool so small that blocks change tenants all the time, every request gets the
/// answer of a fresh device. The engine's own tests check the same with preemptions, on
/// a device that marks every cell of its cache.
#[test]
fn reused_blocks_do_not_change_answers() {
    let numbers: Vec<u32> = (1..40).filter(|number| number % 7 != 6).collect();
    let together = run_in(&numbers, SMALL_POOL);
    for (&number, answer) in numbers.iter().zip(&together.answers) {
        assert_eq!(run(&[number]).answers[0], *answer, "request {number}");
    }
}

#[test]
fn device_time_is_attributed_completely() {
    let numbers: Vec<u32> = (0..24).collect();
    let Run { totals, steps, usages, .. } = run(&numbers);
    let busy: DeviceNanos = steps.iter().map(|step| step.busy).sum();
    let billed: DeviceNanos = usages.iter().map(|usage| usage.attributed).sum();
    assert_eq!(totals.busy(), busy);
    assert_eq!(totals.billed, billed);
    assert_eq!(totals.billed + totals.overhead, busy);
    let mut end = MonotonicTime(0);
    for step in &steps {
        assert!(step.started >= end);
        assert_eq!(step.billed + step.overhead, step.busy);
        end = MonotonicTime(step.started.0 + step.busy.nanos());
    }
}

/// The results of a run.
struct Run {
    answers: Vec<Vec<u32>>,
    usages: Vec<Usage>,
    steps: Vec<Step>,
    totals: Totals,
}

struct Step {
    started: MonotonicTime,
    busy: DeviceNanos,
    billed: DeviceNanos,
    overhead: DeviceNanos,
}

/// Runs the requests of these numbers together. Every seventh is cancelled after four
/// tokens.
fn run(numbers: &[u32]) -> Run {
    run_in(numbers, POOL)
}

/// Runs requests like [`run`], with a cache of `kv_tokens` tokens.
fn run_in(numbers: &[u32], kv_tokens: u32) -> Run {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let mut backend = backend(kv_tokens);
    let table = coarse(&mut backend, &*clock).expect("it measures").table;
    let steps = Arc::new(Mutex::new(Vec::new()));
    let engine = Engine::start(
        Box::new(backend),
        EngineOptions::new(table),
        clock,
        Box::new(Journal(Arc::clone(&steps))),
    )
    .expect("a thread");
    let handle = engine.handle();
    let hearing: Vec<Receiver<Heard>> = numbers
        .iter()
        .map(|&number| {
            let (sender, receiver) = sync_channel(1_024);
            handle.submit(submission(number, sender)).expect("there is room");
            receiver
        })
        .collect();
    let (mut answers, mut usages) = (Vec::new(), Vec::new());
    for (&number, receiver) in numbers.iter().zip(&hearing) {
        let mut answer = Vec::new();
        loop {
            match receiver.recv_timeout(Duration::from_secs(60)).expect("it goes on") {
                Heard::Token(token) => answer.push(token),
                Heard::Done(usage) => {
                    usages.push(usage);
                    break;
                }
            }
            if number % 7 == 6 && answer.len() == 4 {
                handle.cancel(&id(number), 0, CancelReason::Client);
            }
        }
        if number % 7 == 6 {
            answer.truncate(4);
        }
        answers.push(answer);
    }
    handle.drain();
    let totals = engine.join().expect("no fault");
    let steps = std::mem::take(&mut *steps.lock().expect("unpoisoned"));
    Run { answers, usages, steps, totals }
}

/// Tokens of cache that hold a few of the requests, and hardly more than one.
const POOL: u32 = 1_024;
const SMALL_POOL: u32 = 96;

fn backend(kv_tokens: u32) -> CpuBackend {
    let files = ModelFiles::open(&folder()).expect("the folder is whole");
    let options = CpuOptions { threads: 2, kv_tokens, step_tokens: 128, instructions: None };
    CpuBackend::new(&files, &options).expect("it fits")
}

fn folder() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama3-f32")
}

fn id(number: u32) -> RequestId {
    RequestId::new(&format!("req-{number}")).expect("a name")
}

/// Builds a request. Request 0 is the golden prompt with greedy sampling; other
/// requests use parts of it with random sampling.
fn submission(number: u32, sender: SyncSender<Heard>) -> Submission {
    let golden = golden_tokens();
    let prompt = match number {
        0 => golden,
        _ => golden[(number as usize * 5) % 20..].to_vec(),
    };
    Submission {
        request: id(number),
        attempt: 0,
        caller: Caller {
            tenant: TenantId::new(&format!("tenant-{}", number % 3)).expect("a name"),
            key: KeyId::new("key").expect("a name"),
        },
        pool: None,
        tier: Tier::Interactive,
        weight: 1.0,
        prompts: vec![prompt],
        choices: 1,
        max_tokens: 8 + number % 5,
        sampling: SamplingParams {
            temperature: if number == 0 { 0.0 } else { 1.0 },
            top_p: 0.9,
            ..SamplingParams::greedy(number.into())
        },
        budget: None,
        // Longer than any test on a loaded machine.
        queue_deadline: Duration::from_secs(3_600),
        echo_logprobs: false,
        sink: Box::new(Sink(sender)),
    }
}

fn golden_tokens() -> Vec<u32> {
    let text = std::fs::read(folder().join("golden.json")).expect("it is there");
    let json: serde_json::Value = serde_json::from_slice(&text).expect("it is JSON");
    serde_json::from_value(json["tokens"].clone()).expect("a list of tokens")
}

fn likeliest_after_the_golden_prompt() -> u32 {
    let bytes = std::fs::read(folder().join("golden.safetensors")).expect("it is there");
    let tensors = safetensors_data(&bytes);
    let logits: Vec<f32> =
        tensors.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let vocabulary = logits.len() / golden_tokens().len();
    let row = &logits[logits.len() - vocabulary..];
    let best = (0..vocabulary).max_by(|&a, &b| row[a].total_cmp(&row[b])).expect("a vocabulary");
    best as u32
}

/// Returns the data behind the header of a file that holds one tensor.
fn safetensors_data(bytes: &[u8]) -> &[u8] {
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a header");
    &rest[u64::from_le_bytes(*length) as usize..]
}

enum Heard {
    Token(u32),
    Done(Usage),
}

struct Sink(SyncSender<Heard>);

impl TokenSink for Sink {
    fn prompt_logprobs(&mut self, _: u32, _: Vec<PromptLogprob>) {}

    fn token(&mut self, _: u32, token: GeneratedToken) -> Flow {
        self.0.try_send(Heard::Token(token.token)).expect("the test keeps up");
        Flow::Continue
    }

    fn finished(&mut self, _: u32, reason: FinishReason, _: u32) {
        assert_ne!(reason, FinishReason::Fault);
    }

    fn done(&mut self, outcome: RequestOutcome) {
        let RequestOutcome::Finished { usage, .. } = outcome else { panic!("{outcome:?}") };
        self.0.try_send(Heard::Done(usage)).expect("the test keeps up");
    }
}

struct Journal(Arc<Mutex<Vec<Step>>>);

impl StepJournal for Journal {
    fn step(&mut self, record: &StepRecord<'_>) -> io::Result<()> {
        let of = |wanted: fn(&Owner) -> bool| -> DeviceNanos {
            let shares = record.shares.iter().filter(|share| wanted(&share.owner));
            shares.map(|share| share.attributed).sum()
        };
        self.0.lock().expect("unpoisoned").push(Step {
            started: record.started,
            busy: record.busy,
            billed: of(|owner| *owner != Owner::Overhead),
            overhead: of(|owner| *owner == Owner::Overhead),
        });
        Ok(())
    }

    fn finished(&mut self, _: MonotonicTime, _: &[RequestFigures]) -> io::Result<()> {
        Ok(())
    }

    fn idle(&mut self, _: MonotonicTime) -> io::Result<()> {
        Ok(())
    }
}
