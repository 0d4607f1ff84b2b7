//! Tests that the form of one choice changes nothing for others, and that a mask that is
//! late delays its own choice alone.

use std::time::Duration;

use tollgate_domain::{FinishReason, Grammar};

use super::bench::{Bench, Ears, Heard, ask, ask_all, prompt};
use crate::engine::submission::Submission;
use crate::grammar::{GrammarCompiler, Vocabulary};
use crate::testing::{END, VOCABULARY};

/// Returns a compiler for the fake device's tokens: token `i` is the byte `a` + `i`.
fn compiler() -> GrammarCompiler {
    let tokens = (0..VOCABULARY).map(|token| vec![b'a' + (token % 26) as u8]).collect();
    GrammarCompiler::new(Vocabulary { tokens, controls: vec![END], end_tokens: vec![END] })
        .expect("the vocabulary is whole")
}

/// Lets a request answer with two or more of the letters `a` to `e` alone.
fn constrained(compiler: &GrammarCompiler, number: u32, most: u32) -> (Submission, Ears) {
    let (mut submission, heard) = ask(number, &prompt(number, 20), most);
    let compiled = compiler.compile(&Grammar::Regex("[a-e]{2,}".into())).expect("it compiles");
    submission.sampling.grammar = Some(compiled.of_request(Duration::ZERO));
    (submission, heard)
}

fn is_of_the_form(tokens: &[u32]) -> bool {
    tokens.iter().all(|&token| token == END || token % 26 < 5)
}

#[test]
fn constrained_choice_keeps_to_its_form() {
    let compiler = compiler();
    let mut forms = 0;
    for number in 0..20 {
        let heard = Bench::new(256).alone(constrained(&compiler, number, 30));
        let tokens = heard.tokens(0);
        assert!(is_of_the_form(&tokens), "{tokens:?}");
        let free = Bench::new(256).alone(ask(number, &prompt(number, 20), 30)).tokens(0);
        forms += u32::from(!is_of_the_form(&free));
        if heard.reasons == [Some(FinishReason::Stop)] {
            assert!(tokens.len() > 2, "two letters come before the end");
        }
    }
    assert!(forms > 10, "free answers have another form");
}

#[test]
fn choices_of_constrained_request_keep_to_the_form() {
    let compiler = compiler();
    let (mut submission, heard) = ask_all(7, &[&prompt(7, 21)], 4, 40);
    let compiled = compiler.compile(&Grammar::Regex("[a-e]{2,}".into())).expect("it compiles");
    submission.sampling.grammar = Some(compiled.of_request(Duration::ZERO));
    let heard = Bench::new(256).alone((submission, heard));
    let all: Vec<Vec<u32>> = (0..4).map(|choice| heard.tokens(choice)).collect();
    assert!(all.iter().all(|tokens| is_of_the_form(tokens)), "{all:?}");
    assert!(all[1..].iter().any(|tokens| *tokens != all[0]), "each choice has its own state");
}

#[test]
fn forms_change_no_token_of_neighbours() {
    let compiler = compiler();
    let mut bench = Bench::new(512);
    let free: Vec<Ears> =
        (0..8).map(|number| bench.submit(ask(number, &prompt(number, 20), 30))).collect();
    let formed: Vec<Ears> =
        (8..16).map(|number| bench.submit(constrained(&compiler, number, 30))).collect();
    bench.run();
    for (heard, number) in free.iter().zip(0..) {
        let alone = Bench::new(256).alone(ask(number, &prompt(number, 20), 30));
        assert_eq!(Heard::of(heard).tokens(0), alone.tokens(0));
    }
    for (heard, number) in formed.iter().zip(8..) {
        let alone = Bench::new(256).alone(constrained(&compiler, number, 30));
        assert_eq!(Heard::of(heard).tokens(0), alone.tokens(0));
    }
    bench.check_empty();
}

#[test]
fn late_mask_delays_its_own_choice_alone() {
    let compiler = compiler();
    let expected = Bench::new(256).alone(constrained(&compiler, 1, 12));
    let neighbour = Bench::new(256).alone(ask(2, &prompt(2, 20), 12));
    let mut bench = Bench::new(256);
    let (late, on_time) =
        (bench.submit(constrained(&compiler, 1, 12)), bench.submit(ask(2, &prompt(2, 20), 12)));
    // The first mask is known from the compilation; the second one does not come.
    compiler.pause_masks(true);
    bench.run_steps(8);
    assert_eq!(Heard::of(&late).tokens(0).len(), 1, "no token comes without its mask");
    assert_eq!(Heard::of(&on_time).tokens(0).len(), 8, "the neighbour gets one in each step");
    compiler.pause_masks(false);
    bench.run();
    assert_eq!(Heard::of(&late).tokens(0), expected.tokens(0));
    assert_eq!(Heard::of(&on_time).tokens(0), neighbour.tokens(0));
    // The request pays for the steps in which its row was computed in vain, and its
    // reference cost is that of its tokens.
    let (waited, prompt) = (Heard::of(&late).usage(), expected.usage());
    assert!(waited.attributed > prompt.attributed, "{waited:?} {prompt:?}");
    assert_eq!(waited.reference, prompt.reference);
    bench.check_empty();
}
