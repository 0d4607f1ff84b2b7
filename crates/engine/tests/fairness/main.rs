//! Fair shares of a device under attack, in virtual time: hours of load on the
//! real engine and a device that only passes time, played in seconds. The same
//! table over the network and a real clock is `cargo xtask bench fairness`.

mod play;
mod table;
mod workload;

use table::{PARTS, check_sums, played_out, written_twice};

/// Plays one part of the table and prints its rows.
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
    a_flood_does_not_delay_others: "A1",
    a_flood_from_many_keys_does_not_delay_others: "A2",
    costly_prompts_do_not_delay_others: "A3",
    hogs_do_not_delay_others: "A4",
    endless_answers_do_not_delay_others: "A5",
    the_controls_are_harmed: "controls",
    equals_get_equal_device_time: "FB-9",
    weights_are_shares: "weights",
    trial_tenants_share_one_share: "sybils",
    overload_is_shared: "overload",
    eight_equals_are_equal: "eight",
    silence_saves_nothing: "on and off",
    a_rising_load_does_not_delay_others: "increase",
    who_is_alone_has_everything: "alone",
}

#[test]
fn one_seed_is_one_trace() {
    let [once, again] = written_twice();
    assert!(once.lines().count() > 500, "it was a long one");
    // Not assert_eq: nobody wants to read both.
    assert!(once == again, "two plays of one seed differ");
}

#[test]
fn all_device_time_is_someones() {
    let played = played_out();
    check_sums(&played);
    assert!(played.requests.iter().all(|seen| seen.tokens == seen.ask.size.answer));
}
