//! Tests that tokens depend neither on neighbours nor on chunks nor on preemption.

use std::num::NonZeroU32;
use std::time::Duration;

use tollgate_domain::FinishReason;

use super::bench::{Bench, Ears, Heard, Setup, ask, ask_all, prompt};
use crate::engine::submission::Submission;
use crate::sample::choice_seed;
use crate::testing::END;

/// Returns requests of many kinds.
fn mixed(count: u32) -> Vec<(Submission, Ears)> {
    (0..count)
        .map(|number| {
            let (mut submission, heard) =
                ask(number, &prompt(number, 1 + number * 13 % 90), 4 + number * 7 % 60);
            let sampling = &mut submission.sampling;
            match number % 7 {
                0 => sampling.temperature = 0.0,
                1 => sampling.top_p = 0.7,
                2 => sampling.frequency_penalty = 1.5,
                3 => sampling.top_k = NonZeroU32::new(3),
                4 => sampling.repetition_penalty = 1.4,
                5 => sampling.min_p = 0.3,
                _ => sampling.top_logprobs = Some(2),
            }
            (submission, heard)
        })
        .collect()
}

fn alone(asked: (Submission, Ears)) -> Vec<u32> {
    Bench::new(256).alone(asked).tokens(0)
}

#[test]
fn neighbours_and_chunks_change_no_token() {
    for step_time_budget in [Duration::ZERO, Duration::from_millis(1), Duration::from_millis(80)] {
        let mut setup = Setup::new(1_024);
        setup.options.step_time_budget = step_time_budget;
        let mut bench = Bench::with(setup);
        let together: Vec<Ears> = mixed(20).into_iter().map(|asked| bench.submit(asked)).collect();
        bench.run();
        for (heard, asked) in together.iter().zip(mixed(20)) {
            assert_eq!(Heard::of(heard).tokens(0), alone(asked), "{step_time_budget:?}");
        }
        let widest = bench.seen.lock().expect("unpoisoned").iter().map(Vec::len).max();
        assert!(widest > Some(4), "they did run together: {widest:?}");
        bench.check_empty();
    }
}

#[test]
fn requests_join_and_leave_between_steps() {
    let mut bench = Bench::new(64);
    let long = bench.submit(ask(1, &prompt(1, 5), 40));
    bench.run_steps(3);
    let short = bench.submit(ask(2, &prompt(2, 5), 2));
    bench.run_steps(4);
    assert_eq!(Heard::of(&short).reasons, [Some(FinishReason::Length)]);
    assert!(Heard::of(&long).outcome.is_none());
    bench.run();
    assert_eq!(Heard::of(&long).tokens(0), alone(ask(1, &prompt(1, 5), 40)));
    assert_eq!(Heard::of(&short).tokens(0), alone(ask(2, &prompt(2, 5), 2)));
    // 5 tokens, then one per step. The prompt of the new request shares a step with it.
    let seen = bench.seen.lock().expect("unpoisoned").clone();
    assert_eq!(seen[..4], [vec![(5, 0)], vec![(1, 5)], vec![(1, 6)], vec![(1, 7), (5, 0)]]);
}

#[test]
fn preemption_changes_no_token() {
    // Each request grows to 28 blocks, reserved 16 at a time.
    for blocks in [34, 40, 50, 65] {
        let mut bench = Bench::new(blocks);
        let requests = || (0..6).map(|number| ask(number, &prompt(number, 40), 400));
        let together: Vec<Ears> = requests().map(|asked| bench.submit(asked)).collect();
        bench.run();
        for (heard, asked) in together.iter().zip(requests()) {
            assert_eq!(Heard::of(heard).tokens(0), alone(asked), "{blocks}");
        }
        assert!(bench.totals().overhead.nanos() > 0, "nobody was preempted with {blocks}");
        bench.check_empty();
    }
}

#[test]
fn choices_equal_separate_requests() {
    for (length, blocks) in [(16, 256), (21, 256), (40, 24)] {
        let mut bench = Bench::new(blocks);
        let heard = bench.alone(ask_all(7, &[&prompt(7, length)], 4, 300));
        for choice in 0..4 {
            let (mut submission, ears) = ask(7, &prompt(7, length), 300);
            submission.sampling.seed = choice_seed(7, choice);
            let expected = alone((submission, ears));
            assert_eq!(heard.tokens(choice as usize), expected, "{length} {blocks} {choice}");
        }
        let usage = heard.usage();
        assert_eq!((usage.prompt_tokens, usage.completion_tokens), (u64::from(length), 1_200));
        // The prompt was read once; other reads are recomputation.
        let first = bench.seen.lock().expect("unpoisoned")[0].clone();
        assert_eq!(first, [(length, 0)]);
        bench.check_empty();
    }
}

#[test]
fn stop_token_ends_choice() {
    let plain = Bench::new(256).alone(ask(3, &prompt(3, 9), 30)).tokens(0);
    assert_eq!(plain.len(), 30, "the control");
    let stop = plain[7];
    let (mut submission, ears) = ask(3, &prompt(3, 9), 30);
    submission.sampling.stop_tokens = vec![END, stop];
    let heard = Bench::new(256).alone((submission, ears));
    assert_eq!(heard.reasons, [Some(FinishReason::Stop)]);
    let first = plain.iter().position(|token| *token == stop).expect("sampled");
    assert_eq!(heard.tokens(0), plain[..=first]);
}

#[test]
fn ignored_end_token_ends_nothing() {
    for (ignores_end, reason) in [(false, FinishReason::Stop), (true, FinishReason::Length)] {
        let (mut submission, ears) = ask(4, &prompt(4, 9), 12);
        submission.sampling.logit_bias = vec![(END, 100.0)];
        submission.sampling.ignores_end = ignores_end;
        let heard = Bench::new(256).alone((submission, ears));
        assert_eq!(heard.reasons, [Some(reason)]);
        assert_eq!(heard.tokens(0).len(), if ignores_end { 12 } else { 1 });
        assert!(heard.tokens(0).iter().all(|token| *token == END));
    }
}

#[test]
fn several_prompts_give_several_choices() {
    let prompts = [prompt(1, 30), prompt(2, 17), prompt(3, 1)];
    let prompts: Vec<&[u32]> = prompts.iter().map(Vec::as_slice).collect();
    let heard = Bench::new(256).alone(ask_all(5, &prompts, 2, 9));
    for choice in 0..6 {
        let (mut submission, ears) = ask(5, prompts[choice / 2], 9);
        submission.sampling.seed = choice_seed(5, choice as u32);
        assert_eq!(heard.tokens(choice), alone((submission, ears)), "{choice}");
    }
    assert_eq!(heard.usage().prompt_tokens, 48);
    assert_eq!(heard.usage().completion_tokens, 54);
}

#[test]
fn end_token_ends_its_choice_and_counts() {
    let (mut submission, ears) = ask_all(1, &[&prompt(1, 20)], 3, 500);
    submission.sampling.logit_bias = vec![(END, 3.0)];
    let mut bench = Bench::new(256);
    let heard = bench.alone((submission, ears));
    for (choice, tokens) in heard.choices.iter().enumerate() {
        let ends: Vec<usize> = (0..tokens.len()).filter(|&at| tokens[at].end).collect();
        assert_eq!(ends, [tokens.len() - 1]);
        assert_eq!(tokens[tokens.len() - 1].token, END);
        assert_eq!(heard.reasons[choice], Some(FinishReason::Stop));
    }
    bench.check_empty();
}

#[test]
fn prompt_logprobs_come_before_its_tokens() {
    let prompt = prompt(3, 200);
    for (max_tokens, blocks) in [(0, 256), (4, 256)] {
        let (mut submission, ears) = ask_all(3, &[&prompt, &prompt[..1]], 2, max_tokens);
        submission.echo_logprobs = true;
        submission.sampling.top_logprobs = Some(1);
        submission.sampling.logit_bias.clear();
        let mut bench = Bench::new(blocks);
        let heard = bench.alone((submission, ears));
        let [(0, long), (1, short)] = &heard.prompt_logprobs[..] else {
            panic!("one for each prompt: {:?}", heard.prompt_logprobs);
        };
        let tokens: Vec<u32> = long.iter().map(|entry| entry.token).collect();
        assert_eq!(tokens, prompt[1..]);
        assert!(short.is_empty());
        assert!(long.iter().all(|entry| entry.logprobs.logprob < 0.0));
        assert!(long.iter().all(|entry| entry.logprobs.logprob <= entry.logprobs.top[0].1));
        assert_eq!(heard.reasons, [Some(FinishReason::Length); 4]);
        assert_eq!(heard.usage().completion_tokens, 4 * u64::from(max_tokens));
        bench.check_empty();
    }
}

#[test]
fn prompt_logprobs_survive_preemption() {
    let echo = |number| {
        let (mut submission, ears) = ask(number, &prompt(number, 150), 400);
        submission.echo_logprobs = true;
        (submission, ears)
    };
    let mut bench = Bench::new(40);
    let together: Vec<Ears> = (0..4).map(|number| bench.submit(echo(number))).collect();
    bench.run();
    assert!(bench.totals().overhead.nanos() > 0, "nobody was preempted");
    for (heard, number) in together.iter().zip(0..) {
        let expected = Bench::new(256).alone(echo(number));
        assert_eq!(Heard::of(heard).prompt_logprobs, expected.prompt_logprobs);
        assert_eq!(Heard::of(heard).tokens(0), expected.tokens(0));
    }
}
