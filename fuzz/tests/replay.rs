//! Replays every corpus, then mutates it a fixed number of times from a fixed seed.
//! Counts bound the run, so a slow machine finds the same failures as a fast one.
#![allow(clippy::expect_used, reason = "a panic is how a test reports")]
#![allow(missing_docs)]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use tollgate_fuzz::mutate::Mutator;
use tollgate_fuzz::{TARGETS, Target, corpus, corpus_folder};

/// Returns the number of mutations of a target in the gate; slow targets get fewer.
fn mutations(name: &str) -> usize {
    match name {
        "safetensors" | "chat" => 300,
        "template" | "tokenizer_file" | "config" | "credential" | "prompt" | "schema" => 2_000,
        // A form is read several times, each time on a runtime of its own.
        "upload_form" => 3_000,
        _ => 10_000,
    }
}

const SEED: u64 = 0x0070_6c61_7465;

#[test]
fn every_corpus_replays() {
    for (name, target) in TARGETS {
        let inputs = corpus(name).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(inputs.len() > 1, "{name} has no corpus");
        for input in inputs {
            target(&input);
        }
    }
}

#[test]
fn mutations_of_every_corpus_hold() {
    for (name, target) in TARGETS {
        run(name, target, SEED, mutations(name));
    }
}

/// Runs the target, seed and count in `FUZZ_TARGET`, `FUZZ_SEED` and `FUZZ_COUNT`.
#[test]
#[ignore = "cargo xtask fuzz --own runs it"]
#[allow(clippy::disallowed_methods, reason = "a test is told by its runner what to run")]
fn on_demand() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let wanted = std::env::var("FUZZ_TARGET").unwrap_or_default();
    let (seed, count) = (number("FUZZ_SEED").unwrap_or(1), number("FUZZ_COUNT").unwrap_or(100_000));
    for (name, target) in
        TARGETS.into_iter().filter(|(name, _)| wanted.is_empty() || *name == wanted)
    {
        run(name, target, seed, count as usize);
    }
}

fn run(name: &str, target: Target, seed: u64, count: usize) {
    let corpus = corpus(name).expect("a readable corpus");
    let mut mutator = Mutator::new(seed);
    for number in 0..count {
        let input = mutator.draw(&corpus);
        if catch_unwind(AssertUnwindSafe(|| target(&input))).is_err() {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/fuzz");
            let path = folder.join(format!("{name}-{seed:x}-{number}"));
            let kept = fs::create_dir_all(&folder).and_then(|()| fs::write(&path, &input));
            panic!(
                "{name}: seed {seed:#x}, mutation {number}; the input is in {} ({kept:?}); keep it in {}",
                path.display(),
                corpus_folder(name).display()
            );
        }
    }
}
