//! The state of limits as readers see it.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::time::Duration;

use common::*;
use tollgate_admission::{HeldRequests, Limit, LimitState, Moment};
use tollgate_domain::{ByClass, DeviceClass, DeviceNanos, PlanLimits, Rate};

fn limits() -> PlanLimits {
    PlanLimits {
        requests: Some(Rate { per_minute: 60, burst: 10 }),
        tokens: Some(Rate::per_minute(600)),
        concurrent: Some(1),
        queued: Some(4),
        grammar_time: None,
        device_time: ByClass::all(Rate::per_minute(6_000)),
        device_time_per_day: ByClass::all(DeviceNanos(1_000)),
        device_time_per_month: ByClass::all(DeviceNanos(5_000)),
        largest_job: ByClass::all(DeviceNanos(900)),
        budget_per_month: None,
    }
}

fn states(gate: &Gate, now: u64) -> Vec<LimitState> {
    let moment = Moment::new(at(now), utc(now));
    gate.admission.limit_states(moment, &gate.scopes, &[DeviceClass::cpu()])
}

fn find(states: &[LimitState], limit: Limit) -> (u64, u64, u64, Option<Duration>) {
    let state = states.iter().find(|state| state.limit == limit).expect("the plan has it");
    (state.value, state.used, state.remaining, state.refills)
}

const DAY_LENGTH: Duration = Duration::from_secs(86_400);

#[test]
fn unused_limits_are_whole() {
    let gate = Gate::of(limits());
    let states = states(&gate, 0);
    assert_eq!(states.len(), 8, "{states:?}");
    assert_eq!(find(&states, Limit::Requests), (60, 0, 10, Some(Duration::ZERO)));
    assert_eq!(find(&states, Limit::Concurrent), (1, 0, 1, None));
    assert_eq!(find(&states, Limit::LargestJob), (900, 0, 900, None));
    assert_eq!(find(&states, Limit::DeviceTimePerDay), (1_000, 0, 1_000, Some(DAY_LENGTH)));
    // 2026-11-20 is followed by eleven days of its month, itself included.
    let month = Some(DAY_LENGTH * 11);
    assert_eq!(find(&states, Limit::DeviceTimePerMonth), (5_000, 0, 5_000, month));
}

#[test]
fn states_count_held_spent_and_waiting() {
    let gate = Gate::of(limits());
    let running = gate.reserve(0, estimate(100, 200, 300)).expect("admitted");
    let _waiting = gate.reserve(0, estimate(100, 200, 300)).expect("admitted");
    let seen = states(&gate, 0);
    assert_eq!(find(&seen, Limit::Requests), (60, 2, 8, Some(Duration::from_secs(2))));
    assert_eq!(find(&seen, Limit::Tokens), (600, 200, 400, Some(Duration::from_secs(20))));
    assert_eq!(find(&seen, Limit::Concurrent), (1, 1, 0, None));
    assert_eq!(find(&seen, Limit::Queued), (4, 1, 3, None));
    assert_eq!(find(&seen, Limit::DeviceTimePerDay), (1_000, 600, 400, Some(DAY_LENGTH)));
    let held = gate.admission.held_by_tenant();
    assert_eq!(held[&tenant_id("acme")], HeldRequests { running: 1, waiting: 1 });

    // 150 of the 300 that were held are spent. The other request still holds its own.
    running.settle(at(0), spent(100, 150)).expect("open");
    let seen = states(&gate, SECOND);
    assert_eq!(find(&seen, Limit::DeviceTimePerDay).1, 450);
    // The requests of a second came back: one.
    assert_eq!(find(&seen, Limit::Requests).1, 1);
    // A reader sees the next day before any request does: what is held counts there, too.
    let seen = states(&gate, DAY);
    assert_eq!(find(&seen, Limit::DeviceTimePerDay).1, 300);
    assert_eq!(find(&seen, Limit::DeviceTimePerMonth).1, 450);
}

#[test]
fn reading_states_takes_nothing() {
    let gate = Gate::of(limits());
    for _ in 0..100 {
        let _ = states(&gate, 0);
    }
    for _ in 0..4 {
        let _hold = gate.reserve(0, estimate(1, 1, 1)).expect("within every limit");
    }
    assert_eq!(find(&states(&gate, 0), Limit::Requests).1, 4 - 3, "dropped waits are returned");
    assert_eq!(gate.admission.status().scopes, 1);
}
