//! Fair shares of a device under attack, in virtual time. Hours of load on the real engine,
//! over a device that only passes time, run in seconds. `cargo xtask bench fairness`
//! measures the same table over the network and on a real clock.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod batch;
mod full_batch;
mod play;
mod search;
mod table;
mod workload;

use std::time::Duration;

use table::{PARTS, check_sums, played_out, written_twice};

/// Runs one part of the table and prints its rows.
fn check(name: &str) {
    let part = PARTS.iter().find(|part| part.name == name).expect("a part of the table");
    let rows = (part.rows)();
    rows.iter().for_each(|row| println!("{row}"));
    let broken: Vec<String> =
        rows.iter().filter(|row| !row.holds()).map(ToString::to_string).collect();
    assert!(broken.is_empty(), "out of bounds:\n{}", broken.join("\n"));
}

macro_rules! parts {
    ($($test:ident: $name:literal),+ $(,)?) => {
        $(#[test] fn $test() { check($name); })+

        #[test]
        fn every_part_is_checked() {
            assert_eq!([$($name),+], PARTS.map(|part| part.name));
        }
    };
}

parts! {
    flood_does_not_delay_others: "A1",
    flood_from_many_keys_does_not_delay_others: "A2",
    costly_prompts_do_not_delay_others: "A3",
    hogs_do_not_delay_others: "A4",
    endless_answers_do_not_delay_others: "A5",
    large_prompts_do_not_delay_others: "A6",
    many_hogs_do_not_delay_others: "A7",
    worst_known_mixes_do_not_delay_others: "search",
    control_policies_delay_others: "controls",
    equals_get_equal_device_time: "FB-9",
    weights_are_shares: "weights",
    trial_tenants_share_one_share: "sybils",
    overload_is_shared: "overload",
    overload_that_ends_is_not_felt: "end of overload",
    eight_equals_are_equal: "eight",
    idle_tenant_earns_no_credit: "on and off",
    rising_load_does_not_delay_others: "increase",
    lone_tenant_gets_the_whole_device: "alone",
    batch_work_does_not_delay_interactive_work: "batch",
    whole_file_does_not_delay_interactive_work: "file",
    costly_lines_take_no_share_of_others: "batch shares",
    full_batch_does_not_delay_small_requests: "full batch",
}

#[test]
fn play_with_the_same_seed_gives_one_trace() {
    let [once, again] = written_twice();
    assert!(once.lines().count() > 500, "it was a long one");
    // Not `assert_eq`: two traces are too long to print.
    assert!(once == again, "two plays of one seed differ");
}

#[test]
fn search_with_the_same_seed_finds_the_same() {
    let search = |seed| search::search(2, 1, seed, Duration::from_secs(600));
    let (found, played) = search(3);
    assert_eq!((found.len(), played), (2, 2));
    assert!(found[0].wait >= found[1].wait, "the longest wait comes first");
    assert!(found.iter().all(|found| found.redrawn.len() == 1 && found.wait >= found.redrawn[0]));
    assert_eq!(search(3).0, found);
}

#[test]
fn device_time_always_has_an_owner() {
    let played = played_out();
    check_sums(&played);
    assert!(played.requests.iter().all(|seen| seen.tokens == seen.ask.size.answer));
}
