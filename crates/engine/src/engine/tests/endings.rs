//! Tests of requests and engines that end early.

use std::time::Duration;

use tollgate_domain::{DeviceNanos, FinishReason};

use super::bench::{Bench, Heard, HeardSink, Setup, ask, ask_all, prompt};
use crate::engine::EngineError;
use crate::engine::submission::{CancelReason, RefusedReason, SubmitError};
use crate::engine::tick::Tick;
use crate::testing::Failure;

#[test]
fn cancel_takes_effect_at_next_step() {
    for (reason, expected) in [
        (CancelReason::Client, FinishReason::Cancelled),
        (CancelReason::Deadline, FinishReason::Deadline),
    ] {
        let mut bench = Bench::new(64);
        let gone = bench.submit(ask_all(1, &[&prompt(1, 20)], 2, 100));
        let other = bench.submit(ask(2, &prompt(2, 20), 10));
        bench.run_steps(4);
        let (id, _) = ask(1, &[1], 1);
        bench.handle.cancel(&id.request, 1, reason); // another attempt: not ours
        bench.handle.cancel(&id.request, 0, reason);
        bench.run();
        let heard = Heard::of(&gone);
        assert_eq!(heard.reasons, [Some(expected); 2]);
        assert_eq!((heard.tokens(0).len(), heard.tokens(1).len()), (4, 4));
        assert_eq!(heard.usage().completion_tokens, 8);
        assert_eq!(Heard::of(&other).tokens(0).len(), 10);
        bench.handle.cancel(&id.request, 0, reason); // long gone
        bench.check_empty();
    }
}

#[test]
fn request_cancelled_while_waiting_costs_nothing() {
    let mut bench = Bench::new(64);
    let (submission, heard) = ask_all(1, &[&[1], &[2]], 2, 10);
    let id = submission.request.clone();
    bench.handle.submit(submission).expect("it is taken");
    bench.handle.cancel(&id, 0, CancelReason::Client);
    bench.run();
    let heard = Heard::of(&heard);
    assert_eq!(heard.reasons, [Some(FinishReason::Cancelled); 4]);
    assert_eq!(heard.usage(), tollgate_domain::Usage::default());
    assert_eq!(bench.log.lock().finished.len(), 1);
    assert!(bench.log.lock().steps.is_empty());
    bench.check_empty();
}

#[test]
fn sink_can_stop_its_choice() {
    let (mut submission, heard) = ask_all(1, &[&prompt(1, 20)], 3, 100);
    let mut sink = HeardSink::new(heard.clone());
    sink.stop_at = Some(3);
    submission.sink = Box::new(sink);
    let mut bench = Bench::new(64);
    bench.handle.submit(submission).expect("it is taken");
    bench.run();
    let heard = Heard::of(&heard);
    assert_eq!(heard.reasons, [Some(FinishReason::Stop); 3]);
    assert_eq!(heard.usage().completion_tokens, 9);
    assert_eq!(bench.totals().steps, 3);
    bench.check_empty();
}

#[test]
fn request_waiting_past_deadline_is_refused() {
    for ahead in [false, true] {
        let mut setup = Setup { ahead, ..Setup::new(64) };
        setup.options.max_sequences = 1;
        let mut bench = Bench::with(setup);
        let first = bench.submit(ask(1, &prompt(1, 20), 50));
        bench.run_steps(1);
        let (mut submission, late) = ask(2, &prompt(2, 20), 5);
        submission.queue_deadline = Duration::from_millis(3);
        bench.handle.submit(submission).expect("it is taken");
        assert_eq!(bench.handle.status().queued, 1);
        // The place is free only much later.
        bench.run_steps(35);
        assert_eq!(Heard::of(&late).refusal().reason, RefusedReason::Deadline, "{ahead}");
        bench.run();
        assert_eq!(Heard::of(&first).tokens(0).len(), 50);
        assert_eq!(bench.log.lock().finished.len(), 1, "a refusal is no account's");
        bench.check_empty();
    }
}

#[test]
fn predicted_wait_beyond_deadline_is_refused_at_once() {
    let bench = Bench::new(64);
    let mut taken = 0;
    let predicted = loop {
        let (mut submission, _) = ask(taken, &prompt(1, 500), 500);
        submission.queue_deadline = Duration::from_millis(20);
        match bench.handle.submit(submission) {
            Ok(()) => taken += 1,
            Err(SubmitError::Deadline { predicted }) => break predicted,
            Err(other) => panic!("{other}"),
        }
    };
    assert!(taken > 1);
    assert!(predicted > Duration::from_millis(20) && predicted < Duration::from_millis(60));
}

#[test]
fn queue_capacity_is_bounded() {
    let mut setup = Setup::new(64);
    setup.options.queue_capacity = 3;
    setup.options.queue_tokens = 100;
    let mut bench = Bench::with(setup);
    for number in 0..3 {
        bench.submit(ask(number, &[1], 1));
    }
    let full = |bench: &Bench, number: u32, asked: &[u32]| {
        let error = bench.handle.submit(ask(number, asked, 1).0).expect_err("it is full");
        assert!(matches!(error, SubmitError::Full { .. }), "{error}");
    };
    full(&bench, 9, &[1]);
    bench.run();
    bench.submit(ask(5, &prompt(5, 90), 1));
    full(&bench, 8, &prompt(6, 11)); // of the same tenant
    bench.submit(ask(6, &prompt(6, 10), 1));
    bench.check_empty();
}

#[test]
fn full_queue_displaces_from_longest_queue() {
    let mut setup = Setup::new(64);
    setup.options.queue_capacity = 4;
    setup.options.max_sequences = 1;
    let mut bench = Bench::with(setup);
    let running = bench.submit(ask(0, &prompt(1, 20), 5));
    bench.run_steps(1);
    // One request of tenant-0 runs and three wait; one of tenant-1 waits.
    let flood: Vec<_> = [3, 6, 9].map(|number| bench.submit(ask(number, &[1, 2], 3))).into();
    let modest = bench.submit(ask(1, &[1, 2], 3));
    // The queue is full and its own queue is the longest, so the next request is refused.
    let refused = bench.handle.submit(ask(12, &[1, 2], 3).0).expect_err("it is full");
    assert!(matches!(refused, SubmitError::Full { .. }), "{refused}");
    // A tenant with fewer waiting requests is admitted, and the newest of the longest queue
    // is displaced.
    let second = bench.submit(ask(4, &[1, 2], 3));
    assert_eq!(bench.handle.status().queued, 4);
    // Now two requests of each tenant wait.
    let refused = bench.handle.submit(ask(7, &[1, 2], 3).0).expect_err("it is full");
    assert!(matches!(refused, SubmitError::Full { .. }), "{refused}");
    let other = bench.submit(ask(2, &[1, 2], 3));
    bench.run();
    let all = flood.iter().chain([&modest, &second]);
    let refusals: Vec<_> = all.filter(|ears| Heard::of(ears).tokens(0).is_empty()).collect();
    assert_eq!(refusals.len(), 2);
    for ears in refusals {
        let refusal = Heard::of(ears).refusal();
        assert_eq!(refusal.reason, RefusedReason::Overloaded);
        assert!(refusal.retry_after >= Some(Duration::from_secs(1)), "{refusal:?}");
    }
    assert!(Heard::of(&flood[2]).tokens(0).is_empty(), "the newest went first");
    for ears in [&running, &flood[0], &modest, &other] {
        assert_eq!(Heard::of(ears).reasons, [Some(FinishReason::Length)]);
    }
    bench.check_empty();
}

#[test]
fn flood_does_not_lengthen_predicted_wait_of_others() {
    let mut setup = Setup::new(64);
    setup.options.queue_capacity = 1_000;
    let mut bench = Bench::with(setup);
    let soon = |number| {
        let (mut submission, ears) = ask(number, &prompt(1, 500), 400);
        submission.queue_deadline = Duration::from_millis(100);
        (submission, ears)
    };
    let mut refused = 0;
    for number in 0..60 {
        refused += u32::from(bench.handle.submit(soon(number * 3).0).is_err());
    }
    assert!(refused > 0, "the flood has more waiting than fits its deadline");
    bench.handle.submit(soon(1).0).expect("another tenant's line is its own");
    bench.handle.submit(soon(2).0).expect("and so is a third's");
    bench.handle.cancel(&ask(0, &[1], 1).0.request, 0, CancelReason::Client);
    bench.check_empty();
}

#[test]
fn impossible_requests_are_refused_at_submission() {
    let mut setup = Setup::new(8); // 128 tokens
    setup.options.max_sequences = 4;
    setup.options.max_prompts = 2;
    let bench = Bench::with(setup);
    let long = prompt(1, 1_000);
    let cases = [
        (ask_all(1, &[], 1, 1), "a request has 1 to 2 prompts"),
        (ask_all(1, &[&[1], &[1], &[1]], 1, 1), "a request has 1 to 2 prompts"),
        (ask_all(1, &[&[1]], 0, 1), "a prompt has 1 to 4 choices"),
        (ask_all(1, &[&[1]], 5, 1), "a prompt has 1 to 4 choices"),
        (ask(1, &[], 1), "a prompt has no tokens"),
        (ask(1, &[1, 97], 1), "token 97 is not in the vocabulary of 97"),
        (ask(1, &long, 25), "a prompt of 1000 tokens and max_tokens 25 exceed the context of 1024"),
        (
            ask(1, &long[..100], 29),
            "a prompt of 100 tokens and max_tokens 29 exceed the 128 that the KV cache holds",
        ),
        (
            ask(1, &[1], u32::MAX),
            "a prompt of 1 tokens and max_tokens 4294967295 exceed the context of 1024",
        ),
    ];
    for ((submission, _), expected) in cases {
        let error = bench.handle.submit(submission).expect_err(expected);
        assert_eq!(error.to_string(), expected);
        assert!(matches!(error, SubmitError::Invalid(_)));
    }
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let (mut submission, _) = ask(1, &[1], 1);
        submission.weight = weight;
        assert!(bench.handle.submit(submission).is_err(), "{weight}");
    }
    bench.submit(ask(1, &[1], 1));
    let twice = bench.handle.submit(ask(1, &[1], 1).0).expect_err("it is here already");
    assert_eq!(twice.to_string(), "request req-1 attempt 0 is already in the engine");
}

#[test]
fn drain_finishes_accepted_requests() {
    let mut bench = Bench::new(64);
    let running = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(2);
    let queued = bench.submit(ask(2, &[1, 2], 10));
    bench.handle.drain();
    assert!(bench.handle.status().draining);
    let refused = bench.handle.submit(ask(3, &[1], 1).0).expect_err("it drains");
    assert_eq!(refused, SubmitError::Draining);
    assert_eq!(bench.run(), Tick::Ended);
    for heard in [running, queued] {
        assert_eq!(Heard::of(&heard).usage().completion_tokens, 10);
    }
}

#[test]
fn stop_faults_running_and_refuses_waiting_requests() {
    let mut setup = Setup::new(64);
    setup.options.max_sequences = 1;
    let mut bench = Bench::with(setup);
    let running = bench.submit(ask(1, &[1, 2], 10));
    let queued = bench.submit(ask(2, &[1, 2], 10));
    bench.run_steps(2);
    bench.handle.stop();
    assert_eq!(bench.run(), Tick::Ended);
    assert_eq!(Heard::of(&running).reasons, [Some(FinishReason::Fault)]);
    assert_eq!(Heard::of(&running).usage().completion_tokens, 2);
    assert_eq!(Heard::of(&queued).refusal().reason, RefusedReason::Draining);
    assert_eq!(bench.log.lock().finished.len(), 1);
}

#[test]
fn step_fault_is_journalled_and_ends_engine() {
    for (failure, expected) in [
        (Failure::Error, "the device failed"),
        (Failure::Panic, "the engine panicked: it panicked"),
    ] {
        let mut bench = Bench::with(Setup { fails_at: Some((3, failure)), ..Setup::new(64) });
        let heard = bench.submit(ask_all(1, &[&[1, 2]], 2, 10));
        bench.run_steps(2);
        let error = bench.tick().expect_err("it failed");
        assert_eq!(error.to_string(), expected);
        let heard = Heard::of(&heard);
        assert_eq!(heard.reasons, [Some(FinishReason::Fault); 2]);
        assert_eq!(heard.usage().completion_tokens, 4, "the last step gave none");
        let log = bench.log.lock();
        assert_eq!(log.steps.len(), 3, "the step's time is on record");
        let shares: DeviceNanos =
            log.steps.iter().flat_map(|step| &step.shares).map(|share| share.attributed).sum();
        assert_eq!(heard.usage().attributed, shares);
        assert_eq!(log.finished[0].1.reason, FinishReason::Fault);
    }
}

#[test]
fn row_without_numbers_faults_only_its_request() {
    let setup = Setup { fails_at: Some((3, Failure::NoNumbers)), ..Setup::new(64) };
    let mut bench = Bench::with(setup);
    let broken = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(3);
    let whole = bench.submit(ask(2, &[1, 2], 10));
    bench.run();
    assert_eq!(Heard::of(&broken).reasons, [Some(FinishReason::Fault)]);
    assert_eq!(Heard::of(&broken).usage().completion_tokens, 2);
    assert_eq!(Heard::of(&whole).usage().completion_tokens, 10);
    bench.check_empty();
}

#[test]
fn unjournalled_tokens_reach_no_sink() {
    let mut bench = Bench::with(Setup { journal_fails_at: Some(3), ..Setup::new(64) });
    let heard = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(2);
    assert!(matches!(bench.tick(), Err(EngineError::Journal(_))));
    assert_eq!(Heard::of(&heard).tokens(0).len(), 2);
    assert_eq!(Heard::of(&heard).outcome, None);
}
