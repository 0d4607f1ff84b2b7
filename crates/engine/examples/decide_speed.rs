//! Measures the time of a scheduling decision with ten thousand waiting tenants. Run it
//! optimised: `cargo run --release -p tollgate-engine --example decide_speed`.

#![allow(clippy::disallowed_methods, reason = "a program that measures time")]

use std::error::Error;
use std::time::{Duration, Instant};

use tollgate_domain::cost::CostTableParts;
use tollgate_domain::{
    AttentionShape, Caller, CostTable, Curve, DeviceNanos, KeyId, MonotonicTime, SequenceId,
    TenantId,
};
use tollgate_engine::backend::StepLimits;
use tollgate_engine::schedule::{
    Bounds, Decisions, NodeId, Rank, Rows, Running, Seat, Shares, Spare, View, Waiting, decide,
};
use tollgate_engine::{SchedulePolicy, Tier};

fn main() -> Result<(), Box<dyn Error>> {
    println!("{:<10} {:>8} {:>12} {:>12} {:>12}", "tenants", "running", "full", "admits", "charge");
    for tenants in [10, 1_000, 10_000, 100_000] {
        for running in [8, 32, 64] {
            let (shares, running) = crowd(tenants, running)?;
            let full = decisions(&shares, &running, 0)?;
            let admits = decisions(&shares, &running, 40)?;
            let charge = charges(shares, &running);
            println!(
                "{tenants:<10} {:>8} {full:>12.2?} {admits:>12.2?} {charge:>12.2?}",
                running.len()
            );
        }
    }
    println!("full: no prompt is admitted; admits: one prompt is; charge: booking one share");
    Ok(())
}

/// Gives each tenant a waiting request; the last tenants have a running one instead.
fn crowd(tenants: u32, running: u32) -> Result<(Shares, Vec<Running>), Box<dyn Error>> {
    let mut shares = Shares::default();
    let mut batch = Vec::new();
    for number in 0..tenants + running {
        let caller = Caller {
            tenant: TenantId::new(&format!("tenant-{number}"))?,
            key: KeyId::new(&format!("key-{number}"))?,
        };
        let seat = Seat::new(SchedulePolicy::Fair, Tier::Interactive, None, &caller, 1.0);
        let key = shares.enter(&seat);
        // All tenants have used about as much, and no two the same, so no guard is
        // exceeded.
        let had = DeviceNanos(u64::from(number) * 7_919 % 100_000_000);
        shares.charge(key, had, DeviceNanos::ZERO, DeviceNanos::ZERO);
        let sequence = SequenceId(u64::from(number) + 1);
        if number >= tenants {
            batch.push(decoding(sequence, key));
        } else {
            shares.expect_start(sequence, LATER);
            shares.push(key, waiting(sequence));
        }
    }
    Ok((shares, batch))
}

fn decoding(sequence: SequenceId, key: NodeId) -> Running {
    Running {
        sequence,
        key,
        cached: 300,
        computed: 300,
        known: 301,
        pending: 1,
        rows: Rows::Last,
        most: 512,
        blocks: 32,
        exclusive: 32,
        followers: 0,
        preempted_at: None,
    }
}

fn waiting(sequence: SequenceId) -> Waiting {
    Waiting {
        sequence,
        request: sequence,
        rank: Rank::fresh(SchedulePolicy::Fair, LATER, sequence),
        deadline: LATER,
        tokens: 256,
        pending: 256,
        most: 512,
        rows: Rows::Last,
        followers: 0,
        predicted: DeviceNanos(50_000_000),
    }
}

/// Returns the mean time of a decision, in the round that was disturbed least.
fn decisions(
    shares: &Shares,
    running: &[Running],
    free_blocks: u32,
) -> Result<Duration, Box<dyn Error>> {
    let bounds = Bounds {
        table: table()?,
        step_time_budget: Duration::from_millis(80),
        batch_step: 25,
        max_sequences: 256,
        limits: StepLimits { tokens: 512, logit_rows: 256 },
        total_blocks: 10_000,
        guard: DeviceNanos(250_000_000),
        rest: Duration::from_secs(5),
        spare: Spare { places: 8, blocks: 0 },
    };
    let view = View { now: MonotonicTime(1), running, shares, free_blocks };
    let decisions = || decide(&view, &bounds);
    let Decisions { admit, chunks, .. } = decisions();
    assert_eq!(
        (admit.len(), chunks.len()),
        if free_blocks == 0 { (0, running.len()) } else { (1, running.len() + 1) }
    );
    Ok(mean(|| std::hint::black_box(decisions()).chunks.len()))
}

/// Returns the mean time of charging a share of a step.
fn charges(mut shares: Shares, running: &[Running]) -> Duration {
    let mut who = running.iter().cycle();
    mean(|| {
        let key = who.next().map(|running| running.key);
        key.inspect(|&key| {
            shares.charge(key, DeviceNanos(1_000_000), DeviceNanos::ZERO, DeviceNanos::ZERO);
        })
        .is_some()
        .into()
    })
}

fn mean(mut act: impl FnMut() -> usize) -> Duration {
    const ROUNDS: u32 = 40;
    const TIMES: u32 = 500;
    let round = || {
        let started = Instant::now();
        let sum: usize = (0..TIMES).map(|_| act()).sum();
        assert!(sum > 0, "it did something");
        started.elapsed() / TIMES
    };
    std::iter::repeat_with(round).take(ROUNDS as usize).min().unwrap_or_default()
}

fn table() -> Result<CostTable, Box<dyn Error>> {
    Ok(CostTable::try_from(CostTableParts {
        version: "example".into(),
        step_ns: 28_000_000.0,
        linear: Curve(vec![(1, 210_000.0), (1_000, 210_000_000.0)]),
        head: Curve(vec![(1, 90_000.0), (1_000, 90_000_000.0)]),
        ns_per_kv_byte: 0.012,
        ns_per_attention_flop: 0.0,
        shape: AttentionShape { kv_bytes_per_token: 100_000, flop_per_pair: 4_096 },
        reference_batch: 32,
        reference_chunk: 256,
    })?)
}

const LATER: MonotonicTime = MonotonicTime(1_000_000_000_000);
