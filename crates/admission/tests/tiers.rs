//! Tests of the limits that each tier takes, and of the limit on grammar time, which both take.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::time::Duration;

use common::*;
use tollgate_admission::{
    Admission, AdmissionOptions, Estimate, Limit, Moment, Reserve, ReserveError, Spent,
};
use tollgate_domain::{ByClass, DeviceClass, DeviceNanos, PlanLimits, Rate, Tier};

#[test]
fn batch_tier_takes_caps_and_no_rates() {
    let limits = PlanLimits {
        tokens: Some(Rate::per_minute(10)),
        device_time: ByClass::all(Rate::per_minute(10)),
        device_time_per_day: ByClass::all(DeviceNanos(100)),
        concurrent: Some(1),
        queued: Some(0),
        ..PlanLimits::default()
    };
    let scopes = [scoped(tenant("acme"), limits)];
    let admission = Admission::new(AdmissionOptions::default());
    let asked =
        |number, tier| Reserve { tier, ..request(number, 0, &scopes, estimate(50, 50, 50)) };
    let reserve = |number, tier| admission.reserve(at(0), utc(0), asked(number, tier));
    let limit_of = |refused| match refused {
        Err(ReserveError::Refused(refusal)) => refusal.limit,
        other => panic!("it is refused: {other:?}"),
    };
    // The control: as an interactive request it is larger than the rates.
    assert_eq!(limit_of(reserve(1, Tier::Interactive)), Limit::Tokens);
    let hold = reserve(2, Tier::Batch).expect("no rate is taken");
    assert_eq!(limit_of(reserve(3, Tier::Batch)), Limit::Concurrent);
    hold.settle(at(0), spent(50, 40)).expect("it is open");
    // The cap has 60 left, and the rates are whole.
    let states = admission.limit_states(Moment::new(at(0), utc(0)), &scopes, &[DeviceClass::cpu()]);
    let left =
        |limit| states.iter().find(|state| state.limit == limit).map(|state| state.remaining);
    assert_eq!(left(Limit::Tokens), Some(10));
    assert_eq!(left(Limit::DeviceTime), Some(10));
    assert_eq!(left(Limit::DeviceTimePerDay), Some(60));
}

const MILLISECOND: u64 = 1_000_000;

/// A gate with a second of grammar time a minute.
fn gate_of_forms() -> Gate {
    let grammar_time = Some(Rate::per_minute(1_000 * MILLISECOND));
    Gate::of(PlanLimits { grammar_time, ..PlanLimits::default() })
}

fn with_form() -> Estimate {
    Estimate { grammar_time: Duration::from_millis(20), ..estimate(1, 1, 1) }
}

fn spent_on_form(millis: u64) -> Spent {
    Spent { grammar_time: Duration::from_millis(millis), ..spent(1, 1) }
}

fn grammar_time_left(gate: &Gate) -> Option<u64> {
    let moment = Moment::new(at(0), utc(0));
    let states = gate.admission.limit_states(moment, &gate.scopes, &[]);
    let left = states.iter().find(|state| state.limit == Limit::GrammarTime);
    left.map(|state| state.remaining / MILLISECOND)
}

#[test]
fn grammar_time_is_held_settled_and_refused() {
    let gate = gate_of_forms();
    let hold = gate.reserve(0, with_form()).expect("the bucket is full");
    assert_eq!(hold.figures().grammar_time.map(|it| it.remaining), Some(980 * MILLISECOND));
    assert_eq!(grammar_time_left(&gate), Some(980));
    // More than the minute has: the rest is a debt of half a second.
    hold.settle(at(0), spent_on_form(1_500)).expect("open");
    let refusal = gate.reserve(0, with_form()).expect_err("in debt");
    assert_eq!((refusal.limit, refusal.permanent), (Limit::GrammarTime, false));
    // A second comes back in 60: 520 ms take 31.2 s.
    assert_eq!(refusal.retry_after, Some(Duration::from_millis(31_200)));
    // A request without a form is no part of this.
    let free = gate.reserve(0, estimate(1, 1, 1)).expect("has no form");
    assert_eq!(free.figures().grammar_time, None);
    gate.reserve(31_200 * MILLISECOND, with_form())
        .expect("the debt is paid")
        .void(at(0))
        .expect("open");
}

#[test]
fn refused_form_costs_its_time() {
    let gate = gate_of_forms();
    let hold = gate.reserve(0, with_form()).expect("the bucket is full");
    hold.void_form(at(0), Duration::from_millis(250)).expect("open");
    assert_eq!(grammar_time_left(&gate), Some(750));
    // The control: a void without a form returns everything.
    gate.reserve(0, with_form()).expect("enough is left").void(at(0)).expect("open");
    assert_eq!(grammar_time_left(&gate), Some(750));
}

#[test]
fn batch_tier_takes_grammar_time() {
    let gate = gate_of_forms();
    let asked = Reserve { tier: Tier::Batch, ..request(1, 0, &gate.scopes, with_form()) };
    let hold = gate.admission.reserve(at(0), utc(0), asked).expect("the bucket is full");
    hold.settle(at(0), spent_on_form(300)).expect("open");
    assert_eq!(grammar_time_left(&gate), Some(700));
}
