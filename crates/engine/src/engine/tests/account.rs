//! Tests of the account of device time, to the nanosecond.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use tollgate_domain::{DeviceNanos, FinishReason, PromptWork, SequenceId, Transfers};

use super::bench::{Bench, Ears, Heard, Setup, ask, ask_all, prompt};
use crate::engine::journal::{Owner, StepShare};
use crate::engine::submission::{CancelReason, RequestOutcome, SubmitError};
use crate::testing::{Failure, table};

/// An event of a simulated run.
#[derive(Clone, Debug)]
pub(super) enum Act {
    Submit { length: u32, prompts: u32, choices: u32, max_tokens: u32, budget: Option<u64> },
    Cancel { request: u32 },
    Turns(u32),
    Wait(u64),
}

pub(super) fn any_act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (1u32..150, 1u32..4, 1u32..4, 0u32..400, prop::option::of(100_000u64..3_000_000))
            .prop_map(|(length, prompts, choices, max_tokens, budget)| {
                Act::Submit { length, prompts, choices, max_tokens, budget }
            }),
        1 => (0u32..20).prop_map(|request| Act::Cancel { request }),
        3 => (1u32..40).prop_map(Act::Turns),
        1 => (1u64..1_000_000).prop_map(Act::Wait),
    ]
}

/// Applies the acts and runs to the end. Returns the results of each request.
pub(super) fn play(bench: &mut Bench, acts: &[Act]) -> BTreeMap<u32, Ears> {
    let mut asked = BTreeMap::new();
    for (number, act) in (0u32..).zip(acts) {
        match *act {
            Act::Submit { length, prompts, choices, max_tokens, budget } => {
                let texts: Vec<Vec<u32>> =
                    (0..prompts).map(|i| prompt(number + i, length + i)).collect();
                let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
                let (mut submission, heard) = ask_all(number, &texts, choices, max_tokens);
                submission.budget = budget.map(DeviceNanos);
                submission.sampling.logit_bias = vec![(crate::testing::END, 1.0)];
                match bench.handle.submit(submission) {
                    Ok(()) => drop(asked.insert(number, heard)),
                    Err(SubmitError::Budget { .. } | SubmitError::Invalid(_)) => {}
                    Err(other) => panic!("{other}"),
                }
            }
            Act::Cancel { request } => {
                let (id, _) = ask(request, &[1], 1);
                bench.handle.cancel(&id.request, 0, CancelReason::Client);
            }
            Act::Turns(count) => {
                for _ in 0..count {
                    bench.tick().expect("no fault");
                }
            }
            Act::Wait(nanos) => bench.clock.advance(DeviceNanos(nanos)),
        }
    }
    bench.run();
    asked
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn billed_overhead_and_idle_sum_to_wall_time(
        acts in prop::collection::vec(any_act(), 1..40),
        blocks in 18u32..60,
        ahead in any::<bool>(),
    ) {
        let mut bench = Bench::with(Setup { ahead, ..Setup::new(blocks) });
        let asked = play(&mut bench, &acts);
        bench.check_empty();
        let totals = bench.totals();
        let log = bench.log.lock();

        // Steps are in order, complete, and never overlap.
        let mut end = 0;
        let (mut billed, mut overhead) = (BTreeMap::new(), DeviceNanos::ZERO);
        let mut owners: BTreeMap<SequenceId, Owner> = BTreeMap::new();
        for (number, step) in (1..).zip(&log.steps) {
            prop_assert_eq!(step.step, number);
            prop_assert!(step.started.0 >= end);
            end = step.started.0 + step.busy.nanos();
            let sum: DeviceNanos = step.shares.iter().map(|share| share.attributed).sum();
            prop_assert_eq!(sum, step.busy);
            for share in &step.shares {
                // A sequence has one owner for its whole life.
                let owner = owners.entry(share.sequence).or_insert_with(|| share.owner.clone());
                prop_assert_eq!(&*owner, &share.owner);
                match &share.owner {
                    Owner::Request { request, .. } => {
                        *billed.entry(request.clone()).or_insert(DeviceNanos::ZERO) += share.attributed;
                    }
                    Owner::Overhead => overhead += share.attributed,
                }
            }
        }
        prop_assert_eq!(totals.billed, billed.values().copied().sum());
        prop_assert_eq!(totals.overhead, overhead);
        prop_assert_eq!(totals.busy() + totals.idle, DeviceNanos(end));
        prop_assert_eq!(totals.steps, log.steps.len() as u64);
        if ahead {
            // The sum equals the busy time that the device reports, to the nanosecond.
            let device = bench.device_busy.load(Ordering::Relaxed);
            prop_assert_eq!(totals.busy(), DeviceNanos(device));
        }

        // Each request received the sum of its shares, once, at its end.
        prop_assert_eq!(log.finished.len(), asked.len());
        for (at, figures) in &log.finished {
            let shares = billed.get(&figures.request).copied().unwrap_or_default();
            prop_assert_eq!(figures.usage.attributed, shares);
            let stages = figures.stages;
            prop_assert!(stages.queue_ns + stages.prefill_ns + stages.decode_ns <= at.0);
        }
        for (number, ears) in &asked {
            let heard = Heard::of(ears);
            let (id, _) = ask(*number, &[1], 1);
            let figures = log.finished.iter().find(|(_, f)| f.request == id.request).map(|(_, f)| f);
            let figures = figures.expect("every request is on record");
            prop_assert_eq!(heard.usage(), figures.usage);
            prop_assert!(heard.reasons.iter().all(Option::is_some));
            if let Some(Act::Submit { budget: Some(budget), .. }) = acts.get(*number as usize) {
                prop_assert!(figures.usage.reference.nanos() <= *budget);
            }
            // The reported amounts only grew during the request.
            let mut last = DeviceNanos::ZERO;
            for token in heard.choices.iter().filter_map(|tokens| tokens.last()) {
                last = last.max(token.attributed);
                prop_assert!(token.reference <= figures.usage.reference);
            }
            prop_assert!(last <= figures.usage.attributed);
        }
    }

    #[test]
    fn reference_cost_ignores_other_requests(
        lengths in prop::collection::vec((1u32..200, 1u32..40), 1..12),
        blocks in 20u32..80,
    ) {
        let mut bench = Bench::new(blocks);
        let asked: Vec<Ears> = (0..)
            .zip(&lengths)
            .map(|(number, &(length, max_tokens))| {
                bench.submit(ask(number, &prompt(number, length), max_tokens))
            })
            .collect();
        bench.run();
        for (heard, (length, max_tokens)) in asked.iter().zip(lengths) {
            let (length, tokens) = (u64::from(length), u64::from(max_tokens));
            let expected = table().request([(length, 0)], [(length, tokens)]);
            prop_assert_eq!(Heard::of(heard).usage().reference, expected);
        }
    }
}

#[test]
fn budget_is_used_fully_and_never_exceeded() {
    let cost = |tokens| table().request([(20, 0)], [(20, tokens)]);
    let budgets = [
        (cost(1), 1),
        (cost(7), 7),
        (DeviceNanos(cost(7).nanos() - 1), 6),
        (DeviceNanos(cost(7).nanos() + 1), 7),
        (DeviceNanos::from_secs(1), 30),
    ];
    let both = budgets.into_iter().flat_map(|budget| [(budget, false), (budget, true)]);
    for ((budget, expected), ahead) in both {
        let (mut submission, ears) = ask(1, &prompt(1, 20), 30);
        submission.budget = Some(budget);
        let mut bench = Bench::with(Setup { ahead, ..Setup::new(64) });
        let heard = bench.alone((submission, ears));
        assert_eq!(heard.tokens(0).len(), expected);
        assert_eq!(heard.reasons, [Some(FinishReason::Length)]);
        assert!(heard.usage().reference <= budget);
        bench.check_empty();
    }
}

#[test]
fn prompt_logprobs_are_billed_as_estimated() {
    let (first, second) = (prompt(1, 300), prompt(2, 5));
    let cost = |scored, tokens| {
        table().request(
            [300, 5].map(|length| PromptWork::of(length, scored)),
            [300, 300, 5, 5].map(|context| (context, tokens)),
        )
    };
    for (scored, max_tokens) in [(true, 0), (true, 1), (true, 9), (false, 9)] {
        let (mut submission, ears) = ask_all(1, &[&first, &second], 2, max_tokens);
        submission.echo_logprobs = scored;
        let budget = cost(scored, u64::from(max_tokens));
        submission.budget = Some(budget);
        let mut bench = Bench::new(256);
        let heard = bench.alone((submission, ears));
        assert_eq!(heard.usage().completion_tokens, 4 * u64::from(max_tokens));
        assert_eq!(heard.usage().reference, budget);
        bench.check_empty();
    }
    assert!(cost(true, 9) > cost(false, 9));

    // A budget for the plain prompt does not cover a prompt with log-probabilities.
    let (mut submission, _) = ask_all(1, &[&first, &second], 2, 9);
    submission.echo_logprobs = true;
    submission.budget = Some(cost(false, 1));
    let error = Bench::new(256).handle.submit(submission).expect_err("it is too little");
    assert_eq!(error, SubmitError::Budget { budget: cost(false, 1), needed: cost(true, 1) });
}

#[test]
fn budget_below_prompt_cost_is_refused() {
    let needed = table().request([(20, 0), (5, 0)], [(20, 1), (20, 1), (5, 1), (5, 1)]);
    for (budget, taken) in [(needed, true), (DeviceNanos(needed.nanos() - 1), false)] {
        let (mut submission, ears) = ask_all(1, &[&prompt(1, 20), &prompt(2, 5)], 2, 30);
        submission.budget = Some(budget);
        let mut bench = Bench::new(64);
        match bench.handle.submit(submission) {
            Ok(()) => {
                bench.run();
                let heard = Heard::of(&ears);
                assert!(taken);
                assert_eq!(heard.usage().completion_tokens, 4, "each has its first token");
                assert_eq!(heard.usage().reference, budget);
            }
            Err(error) => {
                assert!(!taken);
                assert_eq!(error, SubmitError::Budget { budget, needed });
            }
        }
    }
}

#[test]
fn choices_share_a_budget() {
    let (mut submission, ears) = ask_all(1, &[&prompt(1, 20)], 3, 50);
    let budget = table().request([(20, 0)], [(20, 10), (20, 10), (20, 9)]);
    submission.budget = Some(budget);
    let heard = Bench::new(64).alone((submission, ears));
    let lengths: Vec<usize> = (0..3).map(|choice| heard.tokens(choice).len()).collect();
    assert_eq!(lengths, [10, 10, 9]);
    assert_eq!(heard.usage().reference, budget);
}

#[test]
fn preempted_requests_do_not_pay_for_recomputation() {
    let mut bench = Bench::new(40);
    let asked: Vec<Ears> =
        (0..3).map(|number| bench.submit(ask(number, &prompt(number, 40), 400))).collect();
    bench.run();
    assert!(bench.totals().overhead.nanos() > 0);
    let tokens: u32 =
        bench.seen.lock().expect("unpoisoned").iter().flatten().map(|(tokens, _)| tokens).sum();
    assert!(tokens > 3 * (40 + 399), "some were computed twice: {tokens}");
    for heard in asked {
        let usage = Heard::of(&heard).usage();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (40, 400));
    }
}

#[test]
fn stages_sum_to_the_time_of_request() {
    let mut setup = Setup::new(64);
    setup.options.max_sequences = 1;
    let mut bench = Bench::with(setup);
    bench.submit(ask(1, &prompt(1, 20), 5));
    let second = bench.submit(ask(2, &prompt(2, 20), 5));
    bench.run();
    let Some(RequestOutcome::Finished { stages, .. }) = Heard::of(&second).outcome else {
        panic!("it finished");
    };
    let busy: Vec<u64> = bench.log.lock().steps.iter().map(|step| step.busy.nanos()).collect();
    assert_eq!(stages.queue_ns, busy[..5].iter().sum::<u64>());
    assert_eq!(stages.prefill_ns, busy[5]);
    assert_eq!(stages.decode_ns, busy[6..].iter().sum::<u64>());
    assert_eq!(bench.clock.nanos(), busy.iter().sum::<u64>());
}

/// Checks that every request in a step gets all transfer times of the step once, whatever
/// its number of choices, and that a host device reports none.
#[test]
fn transfers_sum_over_steps_of_request() {
    let run = |keeps_time| {
        let mut bench = Bench::with(Setup { keeps_time, ..Setup::new(64) });
        let first = bench.submit(ask_all(1, &[&prompt(1, 40)], 3, 5));
        let second = bench.submit(ask(2, &prompt(2, 40), 20));
        bench.run();
        let transfers = [first, second].map(|heard| match Heard::of(&heard).outcome {
            Some(RequestOutcome::Finished { stages, .. }) => stages.transfers,
            _ => panic!("it finished"),
        });
        (transfers, bench)
    };
    assert_eq!(run(false).0, [None, None]);
    let (transfers, bench) = run(true);
    let log = bench.log.lock();
    for (transfers, (_, figures)) in transfers.into_iter().zip(&log.finished) {
        let is_its = |share: &StepShare| match &share.owner {
            Owner::Request { request, .. } => *request == figures.request,
            Owner::Overhead => false,
        };
        let mine = log.steps.iter().filter(|step| step.shares.iter().any(is_its));
        let mine: Vec<u64> = mine.map(|step| step.step).collect();
        assert!(mine.len() > 4, "{mine:?}");
        // The fake device takes as many ns to the device as steps have run, and 1 us back.
        let (to_device, to_host) = (mine.iter().sum(), 1_000 * mine.len() as u64);
        let (to_device, to_host) = (DeviceNanos(to_device), DeviceNanos(to_host));
        assert_eq!(transfers, Some(Transfers { to_device, to_host }));
    }
}

#[test]
fn device_clock_defines_the_busy_time() {
    let run = |keeps_time, fails_at| {
        let mut bench = Bench::with(Setup { keeps_time, fails_at, ..Setup::new(64) });
        let heard = bench.submit(ask(1, &prompt(1, 40), 20));
        let mut ticks = 0;
        while bench.tick().is_ok() && ticks < 40 {
            ticks += 1;
        }
        drop(heard);
        let log = bench.log.lock();
        let steps: Vec<u64> = log.steps.iter().map(|step| step.busy.nanos()).collect();
        let last = log.steps.last().expect("it ran");
        let end = DeviceNanos(last.started.0 + last.busy.nanos());
        assert_eq!(bench.totals().busy() + bench.totals().idle, end, "nothing is lost");
        for step in &log.steps {
            let sum: DeviceNanos = step.shares.iter().map(|share| share.attributed).sum();
            assert_eq!(sum, step.busy);
        }
        steps
    };
    let (host, device) = (run(false, None), run(true, None));
    let halves: Vec<u64> = host.iter().map(|busy| busy / 2).collect();
    assert_eq!(device, halves, "the host's part of a step is idle");
    // The device time of a failed step is unknown.
    let failed = run(true, Some((3, Failure::Error)));
    assert_eq!(failed, [halves[0], halves[1], host[2]]);
}
