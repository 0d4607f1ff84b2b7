//! Random plays of gateways that share one rate or a number of places: calls that come late or never, answers that are
//! lost, gateways that stop for a while or for good, a store that is frozen, emptied, replaced by
//! an older copy, or whose clock is set. All that is admitted must be what one bucket would give,
//! and no more requests may run than there are places: those of a gateway that the store has not
//! heard in time do not count. At the end one gateway must get the whole burst, or all places.
//!
//! Each control leaves one rule out, and the same plays must then find a mistake.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test reports")]

#[path = "../common/mod.rs"]
mod common;
mod gateway;
mod play;

use std::ops::Range;

use crate::play::{Counts, Kind, Omission, Play};

/// The plays of each test.
const SEEDS: u64 = 200;
/// The plays in which a control must find a mistake. Most find one in the first few.
const SEEDS_OF_A_CONTROL: u64 = 600;

fn first_mistake(
    kind: Kind,
    omitted: Option<Omission>,
    seeds: Range<u64>,
) -> Option<(u64, String)> {
    let mistake = |seed| Play::new(kind, seed, omitted).run().err().map(|found| (seed, found));
    { seeds }.find_map(mistake)
}

fn assert_each_rule_matters(kind: Kind, rules: &[Omission]) {
    let found = |omitted| first_mistake(kind, Some(omitted), 0..SEEDS_OF_A_CONTROL);
    let found: Vec<_> = rules.iter().map(|omitted| (omitted, found(*omitted))).collect();
    let missed: Vec<_> = found.iter().filter(|(_, found)| found.is_none()).collect();
    assert!(missed.is_empty(), "no play finds a mistake: {missed:?}; others: {found:?}");
}

#[test]
fn rates_hold_under_random_faults() {
    assert_eq!(first_mistake(Kind::Rate, None, 0..SEEDS), None);
}

#[test]
fn places_hold_under_random_faults() {
    assert_eq!(first_mistake(Kind::Places, None, 0..SEEDS), None);
}

#[test]
fn rates_break_without_their_rules() {
    // A late call or a forgotten claim costs a rate less than the plays of places show.
    let rules = [
        Omission::Life,
        Omission::Ended,
        Omission::Narrowed,
        Omission::Learning,
        Omission::Silence,
    ];
    assert_each_rule_matters(Kind::Rate, &rules);
}

#[test]
fn places_break_without_any_one_rule() {
    assert_each_rule_matters(Kind::Places, &Omission::ALL);
}

#[test]
fn plays_have_every_fault() {
    let mut counts = Counts::new();
    let kinds = |seed| [Kind::Rate, Kind::Places].map(|kind| (kind, seed));
    for (kind, seed) in (0..60).flat_map(kinds) {
        let mut play = Play::new(kind, seed, None);
        play.run().expect("the limit holds");
        for (fault, count) in play.counts {
            *counts.entry(fault).or_default() += count;
        }
    }
    for fault in FAULTS {
        assert!(counts.get(fault).is_some_and(|count| *count >= 10), "{fault}: {counts:?}");
    }
}

const FAULTS: [&str; 16] = [
    "admitted",
    "answer late",
    "call late",
    "call lost",
    "clock set",
    "cut off, then frozen",
    "frozen long",
    "frozen short",
    "gateway killed",
    "gateway stopped",
    "given back",
    "promoted",
    "refused",
    "replaced by an older copy",
    "store emptied",
    "waited",
];

mod long {
    use super::*;

    #[test]
    #[ignore = "takes minutes"]
    fn parts_hold_over_thousands_of_plays() {
        for kind in [Kind::Rate, Kind::Places] {
            assert_eq!(first_mistake(kind, None, SEEDS..3_000), None, "{kind:?}");
        }
    }
}
