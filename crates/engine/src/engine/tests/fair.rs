//! Tests of virtual times in the engine and of the order that follows from them.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::time::Duration;

use proptest::prelude::*;
use tollgate_domain::{DeviceNanos, TenantId, Tier};

use super::bench::{Bench, Ears, Heard, Setup, ask, ask_all, prompt};
use crate::engine::journal::Owner;
use crate::engine::submission::{CancelReason, RequestOutcome, SubmitError};
use crate::schedule::SchedulePolicy;

fn tenants() -> [TenantId; 3] {
    [0, 1, 2].map(|number| TenantId::new(&format!("tenant-{number}")).expect("a name"))
}

/// Returns device time by tenant in the steps from `first` on.
fn billed(bench: &Bench, first: usize) -> BTreeMap<TenantId, DeviceNanos> {
    let mut billed = BTreeMap::new();
    for share in bench.log.lock().steps[first..].iter().flat_map(|step| &step.shares) {
        if let Owner::Request { caller, .. } = &share.owner {
            *billed.entry(caller.tenant.clone()).or_insert(DeviceNanos::ZERO) += share.attributed;
        }
    }
    billed
}

/// Returns the nanoseconds of repeated work in the steps from `first` on.
fn repeated(bench: &Bench, first: usize) -> u64 {
    let log = bench.log.lock();
    let shares = log.steps[first..].iter().flat_map(|step| &step.shares);
    shares
        .filter(|share| matches!(share.owner, Owner::Overhead))
        .map(|share| share.attributed.nanos())
        .sum()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn virtual_times_hold_attributed_and_predicted_time(
        asks in prop::collection::vec(
            (1u32..200, 1u32..3, 1u32..3, 0u32..200, 0u32..20, any::<bool>()), 1..30,
        ),
        blocks in 18u32..60,
        box_us in 200u64..4_000,
    ) {
        let mut setup = Setup::new(blocks);
        setup.options.step_time_budget = Duration::from_micros(box_us);
        setup.options.preemption_guard = Duration::from_millis(1);
        setup.options.preemption_rest = Duration::from_millis(20);
        let mut bench = Bench::with(setup);
        let mut number = 0;
        for (length, prompts, choices, max_tokens, ticks, cancel) in asks {
            let texts: Vec<Vec<u32>> = (0..prompts).map(|i| prompt(number + i, length)).collect();
            let texts: Vec<&[u32]> = texts.iter().map(Vec::as_slice).collect();
            match bench.handle.submit(ask_all(number, &texts, choices, max_tokens).0) {
                Ok(()) | Err(SubmitError::Invalid(_)) => {}
                Err(other) => panic!("{other}"),
            }
            if cancel {
                let (id, _) = ask(number / 2, &[1], 1);
                bench.handle.cancel(&id.request, 0, CancelReason::Client);
            }
            for _ in 0..ticks {
                let before = tenants().map(|tenant| bench.counted(&tenant));
                let first = bench.log.lock().steps.len();
                bench.tick().expect("no fault");
                let billed = billed(&bench, first);
                let repeated = repeated(&bench, first);
                let mut counted_repeated = 0;
                for (tenant, before) in tenants().iter().zip(before) {
                    // A tenant whose requests are done has no node.
                    let Some((attributed, predicted)) = bench.counted(tenant) else { continue };
                    let (had, _) = before.unwrap_or_default();
                    let more = billed.get(tenant).copied().unwrap_or_default();
                    // The rest is repeated work of large sequences, which is not billed.
                    let rest = attributed.nanos().checked_sub((had + more).nanos());
                    prop_assert!(rest.is_some(), "{attributed} < {had} + {more}");
                    counted_repeated += rest.unwrap_or_default();
                    prop_assert_eq!(predicted, bench.unread(tenant));
                }
                prop_assert!(counted_repeated <= repeated);
            }
            number += 1;
        }
        bench.check_empty();
    }
}

/// Returns the time to the first token of a small request beside a flood of another tenant.
fn first_token_beside_a_flood(policy: SchedulePolicy, places: u32) -> Duration {
    let mut setup = Setup::new(64);
    setup.options.policy = policy;
    setup.options.max_sequences = places;
    setup.options.queue_capacity = 1_000;
    setup.options.preemption_guard = Duration::from_millis(2);
    let mut bench = Bench::with(setup);
    for number in 0..60 {
        let (mut submission, _) = ask(number * 3, &prompt(number, 60), 200);
        submission.queue_deadline = Duration::from_secs(3_600);
        bench.handle.submit(submission).expect("it is taken");
    }
    bench.run_steps(20);
    let modest = bench.submit(ask(1, &prompt(1, 60), 5));
    bench.run();
    let Some(RequestOutcome::Finished { stages, .. }) = Heard::of(&modest).outcome else {
        panic!("it finished");
    };
    Duration::from_nanos(stages.queue_ns + stages.prefill_ns)
}

/// Checks both kinds of scarcity: KV blocks and places in the batch.
#[test]
fn flood_delays_others_by_about_the_guard() {
    for places in [4, 64] {
        let fair = first_token_beside_a_flood(SchedulePolicy::Fair, places);
        let control = first_token_beside_a_flood(SchedulePolicy::FirstComeFirstServed, places);
        assert!(fair < Duration::from_millis(10), "{places}: {fair:?}");
        assert!(control > 20 * fair, "{places}: {control:?}");
    }
}

#[test]
fn preempted_requests_keep_tokens_and_price() {
    const NUMBERS: [u32; 6] = [0, 3, 6, 1, 4, 2];
    for ahead in [false, true] {
        let mut setup = Setup { ahead, ..Setup::new(64) };
        setup.options.max_sequences = 2;
        setup.options.preemption_guard = Duration::from_millis(1);
        setup.options.preemption_rest = Duration::ZERO;
        let mut bench = Bench::with(setup);
        let asked = NUMBERS.map(|number| bench.submit(ask(number, &prompt(number, 40), 100)));
        bench.run();
        assert!(bench.totals().overhead > DeviceNanos::ZERO, "somebody was preempted");
        assert!(bench.handle.status().preemptions > 0);
        assert_eq!(bench.ahead.load(Ordering::Relaxed) > 0, ahead);
        for (ears, number) in asked.iter().zip(NUMBERS) {
            let alone = Bench::new(64).alone(ask(number, &prompt(number, 40), 100));
            assert_eq!(Heard::of(ears).tokens(0), alone.tokens(0));
            assert_eq!(Heard::of(ears).usage().reference, alone.usage().reference);
        }
        bench.check_empty();
    }
}

#[test]
fn batch_work_runs_on_spare_capacity() {
    let mut setup = Setup::new(64);
    setup.options.max_sequences = 2;
    let mut bench = Bench::with(setup);
    let jobs: Vec<Ears> = (0..4)
        .map(|number| {
            let (mut submission, ears) = ask(number * 3, &prompt(number, 20), 30);
            submission.tier = Tier::Batch;
            bench.submit((submission, ears))
        })
        .collect();
    bench.run_steps(3);
    let asked: Vec<Ears> =
        (0..4).map(|number| bench.submit(ask(number * 3 + 1, &prompt(number, 20), 30))).collect();
    bench.run_steps(60);
    assert!(asked.iter().all(|ears| Heard::of(ears).outcome.is_some()), "in 2 x 30 steps");
    assert!(jobs.iter().all(|ears| Heard::of(ears).outcome.is_none()));
    bench.run();
    assert!(jobs.iter().all(|ears| Heard::of(ears).tokens(0).len() == 30));
    bench.check_empty();
    // The journal names the tier of each end and each share.
    let log = bench.log.lock();
    let (batch, interactive): (Vec<_>, Vec<_>) =
        log.finished.iter().map(|(_, figures)| figures).partition(|it| it.tier == Tier::Batch);
    assert_eq!((batch.len(), interactive.len()), (4, 4));
    for share in log.steps.iter().flat_map(|step| &step.shares) {
        let Owner::Request { request, tier, .. } = &share.owner else { continue };
        let is_batch = batch.iter().any(|it| it.request == *request);
        assert_eq!(*tier == Tier::Batch, is_batch, "{request}");
    }
}
