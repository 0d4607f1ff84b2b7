//! Random plays of gateways that share one cap: calls that come late or never, commits without
//! an answer, machines that stop, sleep and start again, standbys that take over with lost
//! commits, and databases that go on beside their standby. After every step all
//! that may be spent at that moment must be within the cap. At the end every
//! cost must be posted once, and the rest of the cap be free.
//!
//! Each control leaves one rule out, and the same plays must then find a mistake.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod database;
mod omission;
mod play;
mod random;

use crate::omission::Omission;
use crate::play::{Counts, Play};

/// The plays of each test.
const SEEDS: u64 = 1_000;

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

const FAULTS: [&str; 14] = [
    "call late",
    "call lost",
    "call unanswered",
    "end unheard",
    "ended itself",
    "failed over",
    "frozen",
    "killed",
    "old timeline refused",
    "post late",
    "retired",
    "retired work refused",
    "stopped",
    "worker restarted",
];
