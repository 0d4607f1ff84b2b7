//! Random plays of gateways that share one rate: calls that come late or never, answers that are
//! lost, gateways that stop for a while or for good, a store that is frozen, emptied, replaced by
//! an older copy, or whose clock is set. All that is admitted must be what one bucket would give.
//! At the end one gateway must get the whole burst.
//!
//! Each control leaves one rule out, and the same plays must then find a mistake.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test reports")]

#[path = "../common/mod.rs"]
mod common;
mod gateway;
mod play;

use crate::play::{Counts, Omission, Play};

/// The plays of each test.
const SEEDS: u64 = 600;

fn first_mistake(omitted: Option<Omission>) -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| Play::new(seed, omitted).run().err().map(|found| (seed, found)))
}

#[test]
fn rates_hold_under_random_faults() {
    assert_eq!(first_mistake(None), None);
}

#[test]
fn rates_break_without_any_one_rule() {
    let found = Omission::ALL.map(|omitted| (omitted, first_mistake(Some(omitted))));
    let missed: Vec<_> = found.iter().filter(|(_, found)| found.is_none()).collect();
    assert!(missed.is_empty(), "{SEEDS} plays find no mistake: {missed:?}; others: {found:?}");
}

#[test]
fn rates_plays_have_every_fault() {
    let mut counts = Counts::new();
    for seed in 0..60 {
        let mut play = Play::new(seed, None);
        play.run().expect("the rate holds");
        for (fault, count) in play.counts {
            *counts.entry(fault).or_default() += count;
        }
    }
    for fault in FAULTS {
        assert!(counts.get(fault).is_some_and(|count| *count >= 10), "{fault}: {counts:?}");
    }
}

const FAULTS: [&str; 14] = [
    "admitted",
    "answer late",
    "call late",
    "call lost",
    "clock set",
    "frozen long",
    "frozen short",
    "gateway killed",
    "gateway stopped",
    "given back",
    "refused",
    "replaced by an older copy",
    "store emptied",
    "waited",
];
