//! Tests of steps ahead: tokens and prices stay the same, and a request that ends in the
//! meantime pays for the step that it was in.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use tollgate_domain::{DeviceNanos, FinishReason};

use super::account::{Act, any_act, play};
use super::bench::{Bench, Ears, Heard, HeardSink, Setup, ask, ask_all, prompt};
use crate::engine::journal::Owner;
use crate::engine::submission::CancelReason;
use crate::engine::tick::Tick;
use crate::testing::Failure;

fn bench(blocks: u32) -> Bench {
    Bench::with(Setup { ahead: true, ..Setup::new(blocks) })
}

fn went_ahead(bench: &Bench) -> u64 {
    bench.ahead.load(Ordering::Relaxed)
}

/// Removes budgets that several choices share: the choice that gets the last of the budget
/// depends on timing.
fn without_a_shared_budget(mut act: Act) -> Act {
    if let Act::Submit { prompts, choices, budget, .. } = &mut act
        && *prompts * *choices > 1
    {
        *budget = None;
    }
    act
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn steps_ahead_give_the_same_tokens(
        acts in prop::collection::vec(any_act(), 1..30),
        blocks in 18u32..60,
    ) {
        let acts: Vec<Act> = acts.into_iter().map(without_a_shared_budget).collect();
        let mut plain = Bench::new(blocks);
        let mut ahead = bench(blocks);
        let (in_turn, before) = (play(&mut plain, &acts), play(&mut ahead, &acts));
        ahead.check_empty();
        prop_assert_eq!(in_turn.len(), before.len());
        for (number, heard) in &before {
            let (heard, expected) = (Heard::of(heard), Heard::of(&in_turn[number]));
            let choices = heard.choices.len().max(expected.choices.len());
            let cancelled = |heard: &Heard| heard.reasons.contains(&Some(FinishReason::Cancelled));
            for choice in 0..choices {
                let (said, expected) = (heard.tokens(choice), expected.tokens(choice));
                // The time at which a cancel takes effect differs.
                let same = said.len().min(expected.len());
                prop_assert_eq!(&said[..same], &expected[..same]);
            }
            if !cancelled(&heard) && !cancelled(&expected) {
                prop_assert_eq!(&heard.reasons, &expected.reasons);
                let (usage, expected) = (heard.usage(), expected.usage());
                prop_assert_eq!(usage.completion_tokens, expected.completion_tokens);
                prop_assert_eq!(usage.prompt_tokens, expected.prompt_tokens);
                prop_assert_eq!(usage.reference, expected.reference);
            }
        }
    }
}

#[test]
fn penalties_count_the_pending_token() {
    let asked = || {
        let (mut submission, heard) = ask(1, &prompt(1, 20), 60);
        submission.sampling.frequency_penalty = 2.0;
        submission.sampling.presence_penalty = 2.0;
        submission.sampling.repetition_penalty = 1.5;
        (submission, heard)
    };
    let mut ahead = bench(64);
    let heard = ahead.alone(asked());
    assert_eq!(heard.tokens(0), Bench::new(64).alone(asked()).tokens(0));
    assert_eq!(heard.tokens(0).len(), 60);
    // All steps but the first, which reads the prompt; no step follows the last.
    assert_eq!(went_ahead(&ahead), 59);
}

/// Returns the steps in which a request has a share, and the sum of the shares.
fn billed(bench: &Bench, number: u32) -> (Vec<u64>, DeviceNanos) {
    let (id, _) = ask(number, &[1], 1);
    let log = bench.log.lock();
    let shares = log.steps.iter().flat_map(|step| step.shares.iter().map(|it| (step.step, it)));
    let (steps, times): (Vec<u64>, Vec<DeviceNanos>) = shares
        .filter(|(_, share)| {
            matches!(&share.owner, Owner::Request { request, .. } if *request == id.request)
        })
        .map(|(step, share)| (step, share.attributed))
        .unzip();
    (steps, times.into_iter().sum())
}

/// Submits a request that stops at its third token.
fn stops_at_three(bench: &Bench) -> Ears {
    let (mut submission, heard) = ask(1, &prompt(1, 20), 100);
    let mut sink = HeardSink::new(heard.clone());
    sink.stop_at = Some(3);
    submission.sink = Box::new(sink);
    bench.handle.submit(submission).expect("it is taken");
    heard
}

#[test]
fn stopped_request_pays_for_its_step_ahead() {
    let mut bench = bench(64);
    let stops = stops_at_three(&bench);
    let stays = bench.submit(ask(2, &prompt(2, 20), 10));
    bench.run_steps(3);
    // The choice has ended, but the request is not closed yet.
    assert_eq!(Heard::of(&stops).reasons, [Some(FinishReason::Stop)]);
    assert_eq!(Heard::of(&stops).outcome, None);
    bench.run();
    let (stops, stays) = (Heard::of(&stops), Heard::of(&stays));
    assert_eq!((stops.tokens(0).len(), stays.tokens(0).len()), (3, 10));
    assert_eq!(billed(&bench, 1), (vec![1, 2, 3, 4], stops.usage().attributed));
    // The price is that of the delivered tokens.
    let mut plain = Bench::new(64);
    let heard = stops_at_three(&plain);
    plain.run();
    assert_eq!(stops.usage().reference, Heard::of(&heard).usage().reference);
    assert_eq!(stops.usage().completion_tokens, 3);
    assert_eq!(bench.totals().overhead, DeviceNanos::ZERO);
    bench.check_empty();
}

#[test]
fn last_stopped_request_closes_after_step_ahead() {
    let mut bench = bench(64);
    let heard = stops_at_three(&bench);
    assert_eq!(bench.run(), Tick::Idle);
    assert_eq!(billed(&bench, 1), (vec![1, 2, 3, 4], Heard::of(&heard).usage().attributed));
    assert_eq!(bench.totals().billed, Heard::of(&heard).usage().attributed);
    bench.check_empty();
}

#[test]
fn cancelled_request_pays_for_its_step_ahead() {
    let mut bench = bench(64);
    let gone = bench.submit(ask_all(1, &[&prompt(1, 20)], 1, 100));
    let stays = bench.submit(ask(2, &prompt(2, 20), 12));
    bench.run_steps(4);
    let (id, _) = ask(1, &[1], 1);
    bench.handle.cancel(&id.request, 0, CancelReason::Client);
    bench.run();
    assert_eq!(Heard::of(&gone).usage().completion_tokens, 4);
    assert_eq!(Heard::of(&stays).tokens(0).len(), 12);
    let (steps, time) = billed(&bench, 1);
    assert_eq!((steps, time), (vec![1, 2, 3, 4, 5], Heard::of(&gone).usage().attributed));
    bench.check_empty();
}

#[test]
fn full_batch_runs_ahead_until_a_slot_frees() {
    let mut setup = Setup::new(64);
    (setup.ahead, setup.options.max_sequences) = (true, 2);
    let mut bench = Bench::with(setup);
    let lengths = [8, 12, 6];
    let asked = lengths.into_iter().zip(1..);
    let heard: Vec<Ears> = asked
        .map(|(tokens, number)| bench.submit(ask(number, &prompt(number, 5), tokens)))
        .collect();
    // The first step reads prompts into both places. A decided step follows it. No request
    // can join before the eighth step.
    bench.run_steps(7);
    assert_eq!(went_ahead(&bench), 6);
    assert_eq!(Heard::of(&heard[2]).tokens(0).len(), 0);
    // The eighth step is the last of the first request. The waiting request joins the next
    // one.
    bench.run_steps(2);
    assert_eq!(Heard::of(&heard[0]).reasons, [Some(FinishReason::Length)]);
    assert_eq!(Heard::of(&heard[2]).tokens(0).len(), 1);
    bench.run();
    for (heard, tokens) in heard.iter().zip(lengths) {
        assert_eq!(Heard::of(heard).tokens(0).len(), tokens as usize);
    }
    bench.check_empty();
}

/// Checks that a request that arrives during a step ahead joins the step after it.
#[test]
fn arrival_waits_for_the_step_ahead() {
    let mut bench = bench(64);
    let stays = bench.submit(ask(1, &prompt(1, 5), 30));
    bench.run_steps(5);
    let comes = bench.submit(ask(2, &prompt(2, 5), 4));
    bench.run_steps(1);
    assert_eq!(Heard::of(&comes).tokens(0).len(), 0);
    bench.run_steps(1);
    assert_eq!(Heard::of(&comes).tokens(0).len(), 1);
    bench.run();
    assert_eq!((Heard::of(&stays).tokens(0).len(), Heard::of(&comes).tokens(0).len()), (30, 4));
    bench.check_empty();
}

#[test]
fn failed_step_ahead_ends_engine_with_finished_work() {
    let setup = Setup { ahead: true, fails_at: Some((4, Failure::Error)), ..Setup::new(64) };
    let mut bench = Bench::with(setup);
    let heard = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(2);
    // The fourth step starts before the third is finished, so its failure drops the third.
    assert_eq!(bench.tick().expect_err("it failed").to_string(), "the device failed");
    let heard = Heard::of(&heard);
    assert_eq!(heard.reasons, [Some(FinishReason::Fault)]);
    assert_eq!(heard.usage().completion_tokens, 2);
    assert_eq!(bench.log.lock().steps.len(), 3);
    assert_eq!(bench.totals().billed, heard.usage().attributed);
}

#[test]
fn row_without_numbers_faults_only_its_request() {
    let setup = Setup { ahead: true, fails_at: Some((3, Failure::NoNumbers)), ..Setup::new(64) };
    let mut bench = Bench::with(setup);
    let broken = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(3);
    let whole = bench.submit(ask(2, &[1, 2], 10));
    bench.run();
    assert_eq!(Heard::of(&broken).usage().completion_tokens, 2);
    assert_eq!(Heard::of(&whole).usage().completion_tokens, 10);
    bench.check_empty();
}

#[test]
fn stop_finishes_the_step_ahead() {
    let mut bench = bench(64);
    let heard = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(2);
    bench.handle.stop();
    assert_eq!(bench.run(), Tick::Ended);
    assert_eq!(Heard::of(&heard).usage().completion_tokens, 3);
    assert_eq!(bench.totals().steps, 3);
    assert_eq!(bench.totals().billed, Heard::of(&heard).usage().attributed);
}
