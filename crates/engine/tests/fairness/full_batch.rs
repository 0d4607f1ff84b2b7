//! Small models: devices whose steps take about a millisecond, so that a full batch, and not the
//! KV cache, limits what runs. A step of a full batch takes many times as long as a short one.

use std::time::Duration;

use tollgate_engine::SchedulePolicy::{self, Fair, FirstComeFirstServed};
use tollgate_engine::backend::synthetic::StepCost;

use crate::play::{Played, Until, play};
use crate::table::{Bound, Row, check_sums, first_token, row, worst};
use crate::workload::{Device, Sender, Size, Workload};

const LASTS: Duration = Duration::from_secs(15);
const SEEDS: std::ops::Range<u64> = 0..4;
/// Requests a second of each tenant of a crowd: ten times what the devices answer.
const CROWD_RATE: f64 = 108.0;
/// The bound of the victims' first token, in seconds.
const FIRST_TOKEN: f64 = 0.03;
/// The bound that the control must break, in seconds.
const CONTROL: f64 = 0.06;

/// The shipped model on two cores of a CPU, and Qwen2.5 0.5B on an H200
/// (`docs/benchmarks/h200-2026-11-28`), with the largest KV cache that the tests need.
fn devices() -> [(&'static str, Device); 2] {
    let device = |step, sequence, prefill_token, kv_token| {
        let [step, sequence, prefill_token] =
            [step, sequence, prefill_token].map(Duration::from_micros);
        let kv_token = Duration::from_nanos(kv_token);
        let cost = StepCost { step, sequence, kv_token, prefill_token, ..StepCost::default() };
        Device { cost, kv_tokens: 65_536 }
    };
    [("CPU", device(60, 40, 10, 2)), ("H200", device(700, 20, 3, 5))]
}

/// Returns the rows of each device.
pub(crate) fn rows() -> Vec<Row> {
    devices().into_iter().flat_map(|(name, device)| on_device(name, device)).collect()
}

fn on_device(name: &str, device: Device) -> Vec<Row> {
    let crowded = |most_open, seed| loaded(&crowd(), most_open, device, seed);
    let odd = |seed| loaded(&odd_shapes(), 64, device, seed);
    let over_first_come = |workload: Workload| {
        let rate = |policy| fully(&workload, policy).tokens_per_second();
        rate(Fair) / rate(FirstComeFirstServed)
    };
    let mut rows = vec![];
    for most_open in [16, 8] {
        rows.push(row(
            format!("{name}, 8 tenants with {most_open} requests each: victims' first token p99"),
            slowest(|seed| crowded(most_open, seed)),
            "s",
            Bound::AtMost(FIRST_TOKEN),
        ));
    }
    rows.push(row(
        format!("{name}, 8 tenants with 16 requests each: tokens/s over first come, first served"),
        over_first_come(crowded(16, SEEDS.start)),
        "",
        Bound::AtLeast(0.85),
    ));
    rows.push(row(
        format!("{name}, control: first come, first served"),
        wait(&crowded(16, SEEDS.start), FirstComeFirstServed),
        "s",
        Bound::Above(CONTROL),
    ));
    rows.push(row(
        format!("{name}, odd shapes of six tenants: victims' first token p99"),
        slowest(odd),
        "s",
        Bound::AtMost(FIRST_TOKEN),
    ));
    rows.push(row(
        format!("{name}, control: odd shapes under first come, first served"),
        wait(&odd(SEEDS.start), FirstComeFirstServed),
        "s",
        Bound::Above(CONTROL),
    ));
    rows
}

/// Returns the victims' first token p99 with the worst seed.
fn slowest(workload: impl Fn(u64) -> Workload) -> f64 {
    worst(&SEEDS.map(|seed| wait(&workload(seed), Fair)).collect::<Vec<f64>>())
}

/// Returns the victims' first token p99.
fn wait(workload: &Workload, policy: SchedulePolicy) -> f64 {
    first_token(workload, &fully(workload, policy), 0.99)
}

fn fully(workload: &Workload, policy: SchedulePolicy) -> Played {
    let played = play(workload, policy, Until::TimeIsUp);
    check_sums(&played);
    played
}

/// Returns the load of two victims and of others, none with more than `most_open` requests.
fn loaded(others: &[Sender], most_open: u32, device: Device, seed: u64) -> Workload {
    let victim = |name| Sender { is_victim: true, ..Sender::new(name, 10.0, Size::of(14, 16)) };
    let senders = [&["acme", "globex"].map(victim)[..], others].concat();
    Workload { most_open: Some(most_open), device, ..Workload::new(&senders, LASTS, seed) }
}

fn crowd() -> Vec<Sender> {
    (0..8)
        .map(|number| Sender::new(&format!("crowd-{number}"), CROWD_RATE, Size::of(14, 200)))
        .collect()
}

/// Returns the load of the drill `odd_shapes`.
fn odd_shapes() -> Vec<Sender> {
    let patience = Some(Duration::from_millis(20));
    vec![
        Sender::new("one-token", 100.0, Size::of(14, 1)),
        // Sixteen prompts with eight choices each, twice a second.
        Sender { burst: 16, choices: 8, ..Sender::new("prompts", 32.0, Size::of(6, 8)) },
        Sender { patience, ..Sender::new("leaver", 50.0, Size::of(900, 16)) },
        Sender { patience, ..Sender::new("keys", 50.0, Size::of(14, 200)) },
        Sender { choices: 8, ..Sender::new("choices", 10.0, Size::of(14, 100)) },
        Sender::new("stops", 10.0, Size::of(50, 500)),
    ]
}
