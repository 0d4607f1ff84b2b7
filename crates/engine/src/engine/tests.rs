//! Tests of the engine on a fake device, one tick at a time.

mod account;
mod ahead;
mod bench;
mod endings;
mod fair;
mod grammars;
mod tokens;

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use tollgate_domain::FinishReason;

use self::bench::{Bench, Heard, HeardSink, JournalLog, RecordingJournal, ask};
use super::submission::{Flow, GeneratedToken, PromptLogprob, RequestOutcome, TokenSink};
use super::{Engine, EngineOptions};
use crate::clock::SystemClock;
use crate::testing::{FakeBackend, FakeClock, table};

#[test]
fn engine_thread_serves_drains_and_ends() {
    struct Last(HeardSink, std::sync::mpsc::SyncSender<()>);
    impl TokenSink for Last {
        fn prompt_logprobs(&mut self, prompt: u32, logprobs: Vec<PromptLogprob>) {
            self.0.prompt_logprobs(prompt, logprobs);
        }
        fn token(&mut self, choice: u32, token: GeneratedToken) -> Flow {
            self.0.token(choice, token)
        }
        fn finished(&mut self, choice: u32, reason: FinishReason, completion_tokens: u32) {
            self.0.finished(choice, reason, completion_tokens);
        }
        fn done(&mut self, outcome: RequestOutcome) {
            self.0.done(outcome);
            self.1.send(()).expect("the test listens");
        }
    }

    let log = JournalLog::default();
    let engine = Engine::start(
        Box::new(FakeBackend::new(64, FakeClock::default())),
        EngineOptions::new(table()),
        Arc::new(SystemClock::new()),
        Box::new(RecordingJournal::new(log.clone())),
    )
    .expect("a thread");
    let handle = engine.handle();
    let (sender, receiver) = sync_channel(3);
    let mut sinks = Vec::new();
    for number in 0..3 {
        let (mut submission, heard) = ask(number, &[1, 2, 3], 5);
        submission.sink = Box::new(Last(HeardSink::new(heard.clone()), sender.clone()));
        handle.submit(submission).expect("there is room");
        sinks.push(heard);
    }
    for _ in 0..3 {
        receiver.recv_timeout(Duration::from_secs(30)).expect("each is answered");
    }
    handle.drain();
    let totals = engine.join().expect("it ends well");
    for (heard, number) in sinks.iter().zip(0..) {
        let alone = Bench::new(64).alone(ask(number, &[1, 2, 3], 5));
        assert_eq!(Heard::of(heard).tokens(0), alone.tokens(0));
    }
    let log = log.lock();
    assert_eq!(log.steps.len() as u64, totals.steps);
    assert_eq!(log.finished.len(), 3);
}

#[test]
fn engine_thread_ends_with_fault_on_panic() {
    let mut backend = FakeBackend::new(64, FakeClock::default());
    backend.fails_at = Some((2, crate::testing::Failure::Panic));
    let engine = Engine::start(
        Box::new(backend),
        EngineOptions::new(table()),
        Arc::new(SystemClock::new()),
        Box::new(RecordingJournal::new(JournalLog::default())),
    )
    .expect("a thread");
    let (submission, heard) = ask(1, &[1, 2, 3], 5);
    let handle = engine.handle();
    handle.submit(submission).expect("there is room");
    let error = engine.join().expect_err("it failed");
    assert_eq!(error.to_string(), "the engine panicked: it panicked");
    assert_eq!(Heard::of(&heard).reasons, [Some(FinishReason::Fault)]);
    let (submission, _) = ask(2, &[1], 1);
    assert_eq!(
        handle.submit(submission).expect_err("it has ended"),
        super::submission::SubmitError::Stopped
    );
}
