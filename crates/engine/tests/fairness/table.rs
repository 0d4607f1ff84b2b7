//! The rows of the fairness benchmark: workloads, the figures taken from them, and the
//! bound of each figure.

use std::fmt;
use std::time::Duration;

use tollgate_engine::SchedulePolicy;

use crate::batch;
use crate::full_batch;
use crate::play::{Played, Until, play, play_written};
use crate::search;
use crate::workload::{Rate, Sender, Size, Workload};

use SchedulePolicy::{Fair, FirstComeFirstServed, KeyCounters, TokenCounters};

/// One figure and its bound.
#[derive(Clone, Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) figure: f64,
    pub(crate) unit: &'static str,
    pub(crate) bound: Bound,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Bound {
    AtMost(f64),
    AtLeast(f64),
    Above(f64),
    /// The figure has no bound.
    None,
}

/// A part of the table that runs by itself.
pub(crate) struct Part {
    pub(crate) name: &'static str,
    pub(crate) rows: fn() -> Vec<Row>,
}

/// The whole table, in order.
pub(crate) const PARTS: [Part; 22] = [
    Part { name: "A1", rows: || attacked(&ATTACKS[0]) },
    Part { name: "A2", rows: || attacked(&ATTACKS[1]) },
    Part { name: "A3", rows: || attacked(&ATTACKS[2]) },
    Part { name: "A4", rows: || attacked(&ATTACKS[3]) },
    Part { name: "A5", rows: || attacked(&ATTACKS[4]) },
    Part { name: "A6", rows: || attacked(&ATTACKS[5]) },
    Part { name: "A7", rows: many_hogs },
    Part { name: "search", rows: search::worst_known },
    Part { name: "controls", rows: controls },
    Part { name: "FB-9", rows: equals },
    Part { name: "weights", rows: weights },
    Part { name: "sybils", rows: sybils },
    Part { name: "overload", rows: overload },
    Part { name: "end of overload", rows: end_of_overload },
    Part { name: "eight", rows: eight },
    Part { name: "on and off", rows: on_and_off },
    Part { name: "increase", rows: increase },
    Part { name: "alone", rows: alone },
    Part { name: "batch", rows: batch::rows },
    Part { name: "file", rows: batch::file },
    Part { name: "batch shares", rows: batch::shares },
    Part { name: "full batch", rows: full_batch::rows },
];

/// The load of an attacker beside four victims.
struct Attack {
    name: &'static str,
    rate: f64,
    keys: u32,
    size: Size,
    /// Bound of the victims' first token, in seconds.
    bound: f64,
    /// Tokens per second, relative to first come, first served.
    throughput: f64,
}

const ATTACKS: [Attack; 7] = [
    Attack {
        name: "A1 flood, 20/s of 256/256",
        rate: 20.0,
        keys: 1,
        size: Size::of(256, 256),
        bound: 0.6,
        throughput: 0.95,
    },
    Attack {
        name: "A2 the same from 50 keys",
        rate: 20.0,
        keys: 50,
        size: Size::of(256, 256),
        bound: 0.6,
        throughput: 0.95,
    },
    Attack {
        name: "A3 costly prompts, 5/s of 4,000/1",
        rate: 5.0,
        keys: 1,
        size: Size::of(4_000, 1),
        bound: 0.5,
        throughput: 0.9,
    },
    Attack {
        name: "A4 hogs, 5/s of 16/8 with max_tokens 4,000",
        rate: 5.0,
        keys: 1,
        size: Size { prompt: 16, answer: 8, max_tokens: 4_000 },
        bound: 0.3,
        throughput: 0.95,
    },
    Attack {
        name: "A5 endless answers, 2/s of 16/2,000",
        rate: 2.0,
        keys: 1,
        size: Size::of(16, 2_000),
        bound: 0.6,
        throughput: 0.95,
    },
    Attack {
        name: "A6 prompts of 70 % of the cache, 8/s of 7,000/1 from 7 keys",
        rate: 8.0,
        keys: 7,
        size: Size::of(7_000, 1),
        bound: 0.5,
        throughput: 0.85,
    },
    Attack {
        name: "A7 many hogs, 30/s of 64/3 with max_tokens 4,000",
        rate: 30.0,
        keys: 1,
        size: Size { prompt: 64, answer: 3, max_tokens: 4_000 },
        bound: 0.3,
        throughput: 0.95,
    },
];

pub(crate) const SEEDS: std::ops::Range<u64> = 0..10;
const VICTIMS: u32 = 4;
const VICTIM: Size = Size::of(256, 128);
const VICTIM_RATE: f64 = 0.2;
pub(crate) const ATTACK_LASTS: Duration = Duration::from_secs(300);
/// Duration of the overload that ends.
const OVERLOAD_LASTS: Duration = Duration::from_secs(120);
/// Requests a second of each of its tenants.
const OVERLOAD_RATE: f64 = 10.0;
/// Requests that each of its tenants may have under way.
const MOST_OPEN: u32 = 80;
/// Time after which an overload that has ended must not be felt.
const RECOVERY: Duration = Duration::from_secs(5);
/// Duration of the published workloads.
const LASTS: Duration = Duration::from_secs(360);
/// Time until queues have built up. Before that no tenant competes.
const WARM: Duration = Duration::from_secs(30);

pub(crate) fn victims() -> Vec<Sender> {
    (0..VICTIMS)
        .map(|number| Sender {
            is_victim: true,
            ..Sender::new(&format!("victim-{number}"), VICTIM_RATE, VICTIM)
        })
        .collect()
}

fn with_attacker(attack: &Attack, seed: u64) -> Workload {
    let mut senders = victims();
    let Attack { rate, size, keys, .. } = *attack;
    senders.push(Sender { keys, ..Sender::new("attacker", rate, size) });
    Workload::new(&senders, ATTACK_LASTS, seed)
}

fn attacked(attack: &Attack) -> Vec<Row> {
    let name = attack.name;
    let (mut waits, mut again) = (Vec::new(), Vec::new());
    let mut throughput = None;
    for seed in SEEDS {
        let workload = with_attacker(attack, seed);
        let played = play(&workload, Fair, Until::VictimsServed);
        check_sums(&played);
        waits.push(first_token(&workload, &played, 0.99));
        again.push(100.0 * played.account.overhead as f64 / played.account.busy as f64);
        if seed == SEEDS.start {
            throughput = Some(over_first_come(&workload));
        }
    }
    let longest = worst(&waits);
    let throughput = throughput.expect("there is a seed");
    vec![
        row(format!("{name}: victims' first token p99"), longest, "s", AtMost(attack.bound)),
        row(format!("{name}: the same, median of ten seeds"), median(&mut waits), "s", Bound::None),
        row(format!("{name}: computed again, worst seed"), worst(&again), "%", Bound::None),
        row(
            format!("{name}: tokens/s over first come, first served"),
            throughput,
            "",
            AtLeast(attack.throughput),
        ),
    ]
}

/// Returns the rows of many hogs. In some seeds the victims delay each other by more than the
/// attack delays them, so the delay that the attack adds has a bound of its own.
fn many_hogs() -> Vec<Row> {
    let attack = &ATTACKS[6];
    let wait = |workload: &Workload| {
        first_token(workload, &play(workload, Fair, Until::VictimsServed), 0.99)
    };
    let added = SEEDS.map(|seed| {
        wait(&with_attacker(attack, seed)) - wait(&Workload::new(&victims(), ATTACK_LASTS, seed))
    });
    let added = worst(&added.collect::<Vec<f64>>());
    let name = format!("{}: added to the wait without attack, worst seed", attack.name);
    let mut rows = attacked(attack);
    rows.push(row(name, added, "s", AtMost(0.1)));
    rows
}

/// Returns the rows of the control policies, which must break the bounds.
fn controls() -> Vec<Row> {
    let seed = SEEDS.start;
    let wait = |attack: &Attack, policy| {
        let workload = with_attacker(attack, seed);
        let played = play(&workload, policy, Until::VictimsServed);
        check_sums(&played);
        first_token(&workload, &played, 0.99)
    };
    let alone = Workload::new(&victims(), ATTACK_LASTS, seed);
    let unharmed = play(&alone, Fair, Until::VictimsServed);
    vec![
        row(
            "nobody attacks: victims' first token p99",
            first_token(&alone, &unharmed, 0.99),
            "s",
            AtMost(ATTACKS[3].bound),
        ),
        row(
            "control: A1 under first come, first served",
            wait(&ATTACKS[0], FirstComeFirstServed),
            "s",
            Above(100.0),
        ),
        row("control: A2 under counters by key", wait(&ATTACKS[1], KeyCounters), "s", Above(100.0)),
    ]
}

/// Returns the rows of two tenants with equal token rates: one mostly reads, one mostly
/// generates.
fn equals() -> Vec<Row> {
    let senders = [
        Sender::new("reader", 6.0, Size::of(512, 32)),
        Sender::new("writer", 2.0, Size::of(32, 512)),
    ];
    let ratio = |policy| {
        let ratios = SEEDS.take(3).map(|seed| {
            let workload = Workload::new(&senders, LASTS, seed);
            let played = play(&workload, policy, Until::TimeIsUp);
            check_sums(&played);
            let [reader, writer] = served(&played, WARM, LASTS)[..] else { unreachable!("two") };
            (reader / writer).max(writer / reader)
        });
        ratios.collect::<Vec<f64>>()
    };
    vec![
        row(
            "FB-9: device time of two equals, more over less",
            worst(&ratio(Fair)),
            "",
            AtMost(1.03),
        ),
        row(
            "control: FB-9 under token counters",
            ratio(TokenCounters).into_iter().fold(f64::INFINITY, f64::min),
            "",
            Above(2.0),
        ),
    ]
}

fn weights() -> Vec<Row> {
    let senders: Vec<Sender> = (1..=4)
        .map(|weight| Sender {
            weight: f64::from(weight),
            ..Sender::new(&format!("weight-{weight}"), 2.0, Size::of(256, 256))
        })
        .collect();
    let strays = SEEDS.take(3).map(|seed| {
        let played = play(&Workload::new(&senders, LASTS, seed), Fair, Until::TimeIsUp);
        check_sums(&played);
        let served = served(&played, WARM, LASTS);
        let all: f64 = served.iter().sum();
        let shares = served.iter().zip(1..).map(|(served, weight)| {
            let share = f64::from(weight) / 10.0;
            (served / all / share - 1.0).abs()
        });
        shares.fold(0.0, f64::max) * 100.0
    });
    let strays: Vec<f64> = strays.collect();
    vec![row(
        "weights 1:2:3:4: furthest from its share of device time",
        worst(&strays),
        "%",
        AtMost(2.0),
    )]
}

/// Returns the rows of hundreds of trial tenants that flood one share, beside paid tenants:
/// four below their share, and one with constant load.
fn sybils() -> Vec<Row> {
    let mut senders = victims();
    senders.push(Sender::new("paid", 3.0, Size::of(256, 256)));
    let trial = |number: u32| Sender {
        pool: Some("trials"),
        ..Sender::new(&format!("trial-{number}"), 0.2, Size::of(256, 256))
    };
    senders.extend((0..100).map(trial));
    let (mut waits, mut parts) = (Vec::new(), Vec::new());
    for seed in SEEDS.take(3) {
        let workload = Workload::new(&senders, ATTACK_LASTS, seed);
        let played = play(&workload, Fair, Until::VictimsServed);
        check_sums(&played);
        waits.push(first_token(&workload, &played, 0.99));
        let served = served(&played, WARM, ATTACK_LASTS);
        let (paid, trials) = (served[4], served[5..].iter().sum::<f64>());
        parts.push(trials / (paid + trials));
    }
    vec![
        row("100 trial tenants flood: paid ones' first token p99", worst(&waits), "s", AtMost(0.6)),
        row(
            "100 trial tenants flood: their pool's part beside one that always asks",
            worst(&parts),
            "",
            AtMost(0.52),
        ),
    ]
}

fn overload() -> Vec<Row> {
    let senders = [
        Sender::new("over", 1.5, Size::of(256, 256)),
        Sender::new("far-over", 3.0, Size::of(256, 256)),
    ];
    let differences: Vec<f64> = SEEDS
        .take(3)
        .map(|seed| {
            let played = play(&Workload::new(&senders, LASTS, seed), Fair, Until::TimeIsUp);
            check_sums(&played);
            // Before both have a queue, the first tenant has the device to itself.
            largest_difference(&played, WARM, LASTS)
        })
        .collect();
    let workload = Workload::new(&senders, LASTS, SEEDS.start);
    let control = play(&workload, FirstComeFirstServed, Until::TimeIsUp);
    vec![
        row("overload: largest difference of device time", worst(&differences), "s", AtMost(4.0)),
        row(
            "control: overload under first come, first served",
            largest_difference(&control, WARM, LASTS),
            "s",
            Above(4.0),
        ),
        row(
            "overload: tokens/s over first come, first served",
            over_first_come(&workload),
            "",
            AtLeast(0.95),
        ),
    ]
}

/// Returns the rows of an overload that ends. Four tenants keep all requests under way that
/// their plans allow, and have the others refused; the victims are few and modest.
fn end_of_overload() -> Vec<Row> {
    let crowd = |number: u32| Sender {
        rate: Rate::Until(OVERLOAD_RATE, OVERLOAD_LASTS),
        ..Sender::new(&format!("crowd-{number}"), 0.0, Size::of(256, 256))
    };
    let mut senders = victims();
    senders.extend((0..4).map(crowd));
    let overloaded = |seed, lasts| Workload {
        most_open: Some(MOST_OPEN),
        ..Workload::new(&senders, lasts, seed)
    };
    let begin = OVERLOAD_LASTS + RECOVERY;
    let wait_after = |seed, policy, quantile| {
        let workload = overloaded(seed, ATTACK_LASTS);
        let played = play(&workload, policy, Until::VictimsServed);
        check_sums(&played);
        first_token_from(&workload, &played, quantile, begin)
    };
    let over_alone = |seed, policy| {
        let alone = Workload::new(&victims(), ATTACK_LASTS, seed);
        let played = play(&alone, Fair, Until::VictimsServed);
        wait_after(seed, policy, 0.95) / first_token_from(&alone, &played, 0.95, begin)
    };
    let seed = SEEDS.start;
    let workload = overloaded(seed, OVERLOAD_LASTS);
    let played = play(&workload, Fair, Until::TimeIsUp);
    let admitted = played.requests.iter().filter(|seen| !seen.refused).count();
    let unbounded = Workload { most_open: None, ..workload.clone() };
    let capacity = play(&unbounded, FirstComeFirstServed, Until::TimeIsUp).tokens_per_second();
    vec![
        row(
            "overload that ends: requests over those that were admitted",
            played.requests.len() as f64 / admitted as f64,
            "",
            Above(5.0),
        ),
        row(
            "overload that ends: tokens/s in it over those of a full device",
            played.tokens_per_second() / capacity,
            "",
            AtLeast(0.9),
        ),
        row(
            "5 s after: victims' first token p95 over that alone, worst seed",
            worst(&SEEDS.map(|seed| over_alone(seed, Fair)).collect::<Vec<f64>>()),
            "",
            AtMost(2.0),
        ),
        row(
            "5 s after: victims' first token p99, worst seed",
            worst(&SEEDS.map(|seed| wait_after(seed, Fair, 0.99)).collect::<Vec<f64>>()),
            "s",
            Bound::None,
        ),
        row(
            "control: 5 s after, p95 under first come, first served",
            over_alone(seed, FirstComeFirstServed),
            "",
            Above(100.0),
        ),
    ]
}

fn eight() -> Vec<Row> {
    let senders: Vec<Sender> = (0..8)
        .map(|number| Sender::new(&format!("equal-{number}"), 1.0, Size::of(256, 256)))
        .collect();
    let (mut fairness, mut differences) = (Vec::new(), Vec::new());
    for seed in SEEDS.take(3) {
        let played = play(&Workload::new(&senders, LASTS, seed), Fair, Until::TimeIsUp);
        check_sums(&played);
        fairness.push(jain(&served(&played, WARM, LASTS)));
        differences.push(largest_difference(&played, WARM, LASTS));
    }
    let least = fairness.iter().copied().fold(f64::INFINITY, f64::min);
    vec![
        row("eight equals: Jain's index of device time", least, "", AtLeast(0.999)),
        row(
            "eight equals: largest difference of device time",
            worst(&differences),
            "s",
            AtMost(2.0),
        ),
    ]
}

/// Returns the rows of one tenant with constant load and one that is active every other
/// minute. Its silence must neither earn nor cost anything.
fn on_and_off() -> Vec<Row> {
    const SPAN: Duration = Duration::from_secs(60);
    const EDGE: Duration = Duration::from_secs(5);
    let at_times = Sender::new("at-times", 0.0, Size::of(256, 256));
    let senders = [
        Sender::new("steady", 3.0, Size::of(256, 256)),
        Sender { rate: Rate::OffOn(1.0, SPAN), ..at_times },
    ];
    let played = play(&Workload::new(&senders, LASTS, SEEDS.start), Fair, Until::TimeIsUp);
    check_sums(&played);
    // The queue builds up some seconds after the start and lasts for most of the following
    // minute.
    let together = [1, 3, 5]
        .map(|minute| largest_difference(&played, SPAN * minute + EDGE, SPAN * (minute + 1)));
    let apart = [3, 5].map(|minute| {
        let served = served(&played, SPAN * minute - EDGE, SPAN * minute);
        served[0] / served.iter().sum::<f64>()
    });
    vec![
        row("on and off: largest difference while both ask", worst(&together), "s", AtMost(4.0)),
        row(
            "on and off: the steady one's part while alone",
            apart.into_iter().fold(f64::INFINITY, f64::min),
            "",
            AtLeast(0.99),
        ),
    ]
}

/// Returns the rows of one tenant below its share and one with growing load.
fn increase() -> Vec<Row> {
    let mut senders = victims();
    let rate = Rate::Rising(0.1, 6.0);
    senders.push(Sender { rate, ..Sender::new("rising", 0.0, Size::of(256, 256)) });
    let waits: Vec<f64> = SEEDS
        .take(3)
        .map(|seed| {
            let workload = Workload::new(&senders, LASTS, seed);
            let played = play(&workload, Fair, Until::VictimsServed);
            check_sums(&played);
            first_token(&workload, &played, 0.99)
        })
        .collect();
    vec![row(
        "increase, 0.1/s to 6/s of 256/256: others' first token p99",
        worst(&waits),
        "s",
        AtMost(0.6),
    )]
}

/// Returns the rows of a lone tenant, which must get the whole device.
fn alone() -> Vec<Row> {
    let moderate = [Sender::new("alone", 1.0, Size::of(256, 256))];
    let hungry = [Sender::new("alone", 3.0, Size::of(256, 256))];
    let wait = |seed, policy| {
        let workload = Workload::new(&moderate, LASTS, seed);
        let played = play(&workload, policy, Until::TimeIsUp);
        let waits = played.requests.iter().map(|seen| played.first_token(seen).as_secs_f64());
        waits.sum::<f64>() / played.requests.len() as f64
    };
    let over = SEEDS.map(|seed| wait(seed, Fair) / wait(seed, FirstComeFirstServed));
    let over: Vec<f64> = over.collect();
    let workload = Workload::new(&hungry, LASTS, SEEDS.start);
    let played = play(&workload, Fair, Until::TimeIsUp);
    check_sums(&played);
    let first = workload.asks.first().expect("it asks").at;
    let busy = Duration::from_nanos(played.totals.busy().nanos());
    let part = busy.as_secs_f64() / (played.booked - first).as_secs_f64();
    vec![
        row("alone: part of the time that the device is busy", part, "", AtLeast(1.0)),
        row(
            "alone: first token over that of first come, first served, mean",
            over[0],
            "",
            AtMost(1.01),
        ),
        row("alone: the same, worst of ten seeds", worst(&over), "", AtMost(1.01)),
        row(
            "alone: tokens/s over first come, first served",
            over_first_come(&workload),
            "",
            AtLeast(0.99),
        ),
    ]
}

/// Returns the journals of two runs of one workload.
pub(crate) fn written_twice() -> [String; 2] {
    let lasts = Duration::from_secs(60);
    let mut senders = victims();
    senders.push(Sender { keys: 50, ..Sender::new("attacker", 20.0, Size::of(256, 256)) });
    let workload = || Workload::new(&senders, lasts, 7);
    [workload(), workload()].map(|workload| {
        let played = play_written(&workload, Fair, Until::TimeIsUp);
        played.account.written.expect("it was asked for")
    })
}

/// Runs a workload to its very end.
pub(crate) fn played_out() -> Played {
    let workload = with_attacker(&ATTACKS[4], 3);
    let lasts = Duration::from_secs(40);
    let asks = workload.asks.into_iter().filter(|ask| ask.at < lasts).collect();
    let workload = Workload { asks, lasts, ..workload };
    play(&workload, Fair, Until::Done)
}

/// Checks the sums that must hold to the nanosecond for any workload.
pub(crate) fn check_sums(played: &Played) {
    let Played { account, totals, booked, .. } = played;
    assert_eq!(account.shares, account.busy, "the shares sum to the steps");
    let tenants: u64 = account.steps.last().map_or(0, |(_, tenants)| tenants.iter().sum());
    assert_eq!(totals.billed.nanos(), tenants, "what is billed is the tenants'");
    assert_eq!(totals.overhead.nanos(), account.overhead);
    assert_eq!(u128::from(totals.busy().nanos()), account.busy, "billed + overhead = busy");
    let all = totals.billed + totals.overhead + totals.idle;
    assert_eq!(u128::from(all.nanos()), booked.as_nanos(), "and with idle, all of the time");
}

use Bound::{Above, AtLeast, AtMost};

pub(crate) fn row(name: impl Into<String>, figure: f64, unit: &'static str, bound: Bound) -> Row {
    Row { name: name.into(), figure, unit, bound }
}

/// Returns tokens per second under the fair policy, relative to first come, first served,
/// at the same moment of the same workload.
fn over_first_come(workload: &Workload) -> f64 {
    let rate = |policy| play(workload, policy, Until::TimeIsUp).tokens_per_second();
    rate(Fair) / rate(FirstComeFirstServed)
}

/// Returns the victims' wait for a first token at `quantile`, by nearest rank.
pub(crate) fn first_token(workload: &Workload, played: &Played, quantile: f64) -> f64 {
    first_token_from(workload, played, quantile, Duration::ZERO)
}

/// Returns the wait of the victims' requests that were sent from `begin` on.
fn first_token_from(workload: &Workload, played: &Played, quantile: f64, begin: Duration) -> f64 {
    let sent = played.requests.iter().filter(|seen| seen.ask.at >= begin);
    let victims = sent.filter(|seen| {
        let is_victim = workload.tenants[seen.ask.tenant].is_victim;
        assert!(!(is_victim && seen.refused), "no victim was to be refused");
        is_victim
    });
    let mut waits: Vec<f64> = victims.map(|seen| played.first_token(seen).as_secs_f64()).collect();
    waits.sort_by(f64::total_cmp);
    waits[(waits.len() as f64 * quantile).ceil() as usize - 1]
}

/// Returns each tenant's device time between two moments, in seconds.
pub(crate) fn served(played: &Played, from: Duration, to: Duration) -> Vec<f64> {
    let steps = &played.account.steps;
    let at = |moment: Duration| {
        let step = steps.partition_point(|(ended, _)| *ended <= moment).checked_sub(1);
        step.map(|step| steps[step].1.clone())
    };
    let none = || vec![0; steps.first().map_or(0, |(_, tenants)| tenants.len())];
    let (before, after) = (at(from).unwrap_or_else(none), at(to).unwrap_or_else(none));
    after.iter().zip(before).map(|(after, before)| (after - before) as f64 / 1e9).collect()
}

/// Returns the largest lead of any tenant over any other between two moments, in seconds,
/// counted from the first moment.
fn largest_difference(played: &Played, from: Duration, to: Duration) -> f64 {
    let steps = &played.account.steps;
    let first = steps.partition_point(|(ended, _)| *ended <= from);
    let last = steps.partition_point(|(ended, _)| *ended <= to);
    let none = vec![0; steps.first().map_or(0, |(_, tenants)| tenants.len())];
    let before = first.checked_sub(1).map_or(&none, |step| &steps[step].1);
    let spread = steps[first..last].iter().map(|(_, tenants)| {
        let served = || tenants.iter().zip(before).map(|(after, before)| after - before);
        served().max().unwrap_or(0) - served().min().unwrap_or(0)
    });
    spread.max().unwrap_or(0) as f64 / 1e9
}

fn jain(served: &[f64]) -> f64 {
    let sum: f64 = served.iter().sum();
    let squares: f64 = served.iter().map(|served| served * served).sum();
    sum * sum / (served.len() as f64 * squares)
}

pub(crate) fn worst(figures: &[f64]) -> f64 {
    figures.iter().copied().fold(0.0, f64::max)
}

fn median(figures: &mut [f64]) -> f64 {
    figures.sort_by(f64::total_cmp);
    f64::midpoint(figures[(figures.len() - 1) / 2], figures[figures.len() / 2])
}

impl Row {
    pub(crate) fn holds(&self) -> bool {
        match self.bound {
            AtMost(bound) => self.figure <= bound,
            AtLeast(bound) => self.figure >= bound,
            Above(bound) => self.figure > bound,
            Bound::None => true,
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, figure, unit, bound } = self;
        let holds = if self.holds() { "" } else { "   BROKEN" };
        write!(f, "{name:<72}{figure:>10.4} {unit:<2}{bound:>12}{holds}")
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            AtMost(bound) => format!("<= {bound}"),
            AtLeast(bound) => format!(">= {bound}"),
            Above(bound) => format!("> {bound}"),
            Self::None => String::new(),
        };
        f.pad(&text)
    }
}
