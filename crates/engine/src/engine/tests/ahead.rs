//! Steps that begin before the last is finished: what is said and billed is
//! the same, and what ran for nothing is nobody's.

use std::sync::atomic::Ordering;

use proptest::prelude::*;
use tollgate_domain::{DeviceNanos, FinishReason};

use super::account::{Act, any_act, play};
use super::bench::{Bench, Heard, HeardSink, Setup, ask, ask_all, prompt};
use crate::engine::submission::CancelReason;
use crate::engine::turn::Turn;
use crate::testing::Failure;

fn bench(blocks: u32) -> Bench {
    Bench::with(Setup { ahead: true, ..Setup::new(blocks) })
}

fn went_ahead(bench: &Bench) -> u64 {
    bench.ahead.load(Ordering::Relaxed)
}

/// Of what shares without an owner came to.
fn for_nothing(bench: &Bench) -> DeviceNanos {
    bench.totals().overhead
}

/// Which of several choices has the last of a budget is a matter of time.
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
    fn what_is_said_is_the_same(
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
                // When a cancel comes is a matter of time, which differs.
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
fn penalties_know_the_token_that_is_not_here_yet() {
    let asked = || {
        let (mut submission, heard) = ask(1, &prompt(1, 20), 60);
        submission.sampling.frequency_penalty = 2.0;
        submission.sampling.presence_penalty = 2.0;
        (submission, heard)
    };
    let mut ahead = bench(64);
    let heard = ahead.alone(asked());
    assert_eq!(heard.tokens(0), Bench::new(64).alone(asked()).tokens(0));
    assert_eq!(heard.tokens(0).len(), 60);
    // All but the prompt's own step, and none behind the last.
    assert_eq!(went_ahead(&ahead), 59);
    assert_eq!(for_nothing(&ahead), DeviceNanos::ZERO);
}

#[test]
fn who_stops_meanwhile_ran_for_nothing_once() {
    let (mut submission, stops) = ask(1, &prompt(1, 20), 100);
    let mut sink = HeardSink::new(stops.clone());
    sink.stop_at = Some(3);
    submission.sink = Box::new(sink);
    let mut bench = bench(64);
    bench.handle.submit(submission).expect("it is taken");
    let stays = bench.submit(ask(2, &prompt(2, 20), 10));
    bench.run();
    let (stops, stays) = (Heard::of(&stops), Heard::of(&stays));
    assert_eq!((stops.tokens(0).len(), stays.tokens(0).len()), (3, 10));
    assert_eq!(stops.reasons, [Some(FinishReason::Stop)]);
    // The fourth step ran for both, and only one of them was there yet.
    let log = bench.log.lock();
    let of_nobody: Vec<u64> = log
        .steps
        .iter()
        .filter(|step| step.shares.iter().any(|it| it.owner == crate::Owner::Overhead))
        .map(|step| step.step)
        .collect();
    assert_eq!(of_nobody, [4]);
    assert_eq!(log.steps[3].shares.len(), 2);
    drop(log);
    let billed = stops.usage().attributed + stays.usage().attributed;
    assert_eq!(bench.totals().billed, billed);
    assert!(for_nothing(&bench) > DeviceNanos::ZERO);
    bench.check_empty();
}

#[test]
fn the_last_to_stop_leaves_a_step_that_is_finished_for_nobody() {
    let (mut submission, heard) = ask(1, &prompt(1, 20), 100);
    let mut sink = HeardSink::new(heard.clone());
    sink.stop_at = Some(3);
    submission.sink = Box::new(sink);
    let mut bench = bench(64);
    bench.handle.submit(submission).expect("it is taken");
    assert_eq!(bench.run(), Turn::Idle);
    assert_eq!(bench.totals().steps, 4);
    assert_eq!(Heard::of(&heard).usage().completion_tokens, 3);
    assert_eq!(bench.totals().billed, Heard::of(&heard).usage().attributed);
    bench.check_empty();
}

#[test]
fn who_cancels_meanwhile_pays_for_what_was_finished() {
    let mut bench = bench(64);
    let gone = bench.submit(ask_all(1, &[&prompt(1, 20)], 1, 100));
    let stays = bench.submit(ask(2, &prompt(2, 20), 12));
    bench.run_steps(4);
    let (id, _) = ask(1, &[1], 1);
    bench.handle.cancel(&id.request, 0, CancelReason::Client);
    bench.run();
    assert_eq!(Heard::of(&gone).usage().completion_tokens, 4);
    assert_eq!(Heard::of(&stays).tokens(0).len(), 12);
    assert!(for_nothing(&bench) > DeviceNanos::ZERO);
    bench.check_empty();
}

#[test]
fn nobody_runs_ahead_while_others_wait_or_are_read() {
    let mut setup = Setup::new(64);
    (setup.ahead, setup.options.max_sequences) = (true, 1);
    let mut bench = Bench::with(setup);
    let first = bench.submit(ask(1, &prompt(1, 5), 8));
    let second = bench.submit(ask(2, &prompt(2, 5), 8));
    bench.run();
    assert_eq!((Heard::of(&first).tokens(0).len(), Heard::of(&second).tokens(0).len()), (8, 8));
    // Only the second had nobody waiting for its place.
    assert_eq!(went_ahead(&bench), 7);
    bench.check_empty();
}

#[test]
fn a_step_that_fails_ahead_ends_the_engine_with_what_was_done() {
    let setup = Setup { ahead: true, fails_at: Some((4, Failure::Error)), ..Setup::new(64) };
    let mut bench = Bench::with(setup);
    let heard = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(2);
    // The fourth is begun before the third is finished, of which nothing is
    // known then.
    assert_eq!(bench.turn().expect_err("it failed").to_string(), "the device failed");
    let heard = Heard::of(&heard);
    assert_eq!(heard.reasons, [Some(FinishReason::Fault)]);
    assert_eq!(heard.usage().completion_tokens, 2);
    assert_eq!(bench.log.lock().steps.len(), 3);
    assert_eq!(bench.totals().billed, heard.usage().attributed);
}

#[test]
fn a_row_of_no_numbers_is_a_fault_of_its_requests_alone() {
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
fn stopping_finishes_the_step_that_the_device_has() {
    let mut bench = bench(64);
    let heard = bench.submit(ask(1, &[1, 2], 10));
    bench.run_steps(2);
    bench.handle.stop();
    assert_eq!(bench.run(), Turn::Ended);
    assert_eq!(Heard::of(&heard).usage().completion_tokens, 3);
    assert_eq!(bench.totals().steps, 3);
    assert_eq!(bench.totals().billed, Heard::of(&heard).usage().attributed);
}
