//! Random plays of gateways that share one cap: calls that come late or never, answers that
//! are lost, gateways that stop and start again, work that ends after its gateway, changes of
//! period at other times on each machine, standbys that take over with lost commits. After
//! every step all that may be spent must be within the cap. At the end the whole rest of
//! the cap must be free.
//!
//! Each control leaves one rule out, and the same plays must then find a mistake.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod database;
mod home;
mod omission;
mod play;
mod random;

use crate::omission::Omission;
use crate::play::{Counts, Play};

/// The plays of each test.
const SEEDS: u64 = 2_000;

fn first_mistake(omitted: Option<Omission>) -> Option<(u64, String)> {
    (0..SEEDS).find_map(|seed| Play::new(seed, omitted).run().err().map(|found| (seed, found)))
}

#[test]
fn caps_hold_under_random_faults() {
    assert_eq!(first_mistake(None), None);
}

#[test]
fn caps_break_without_any_one_rule() {
    let found = Omission::ALL.map(|omitted| (omitted, first_mistake(Some(omitted))));
    let missed: Vec<_> = found.iter().filter(|(_, found)| found.is_none()).collect();
    assert!(missed.is_empty(), "{SEEDS} plays find no mistake: {missed:?}; others: {found:?}");
}

#[test]
fn caps_plays_have_every_fault() {
    let mut counts = Counts::new();
    for seed in 0..120 {
        let mut play = Play::new(seed, None);
        play.run().expect("the cap holds");
        for (fault, count) in play.counts {
            *counts.entry(fault).or_default() += count;
        }
    }
    for fault in FAULTS {
        assert!(counts.get(fault).is_some_and(|count| *count >= 10), "{fault}: {counts:?}");
    }
}

const FAULTS: [&str; 15] = [
    "answer lost",
    "call late",
    "call lost",
    "call stale",
    "cut off",
    "failed over",
    "killed",
    "lost one back",
    "lost one freed",
    "need met in part",
    "period begun",
    "ran across periods",
    "restarted",
    "taken for lost",
    "work after its gateway",
];
