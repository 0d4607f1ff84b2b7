//! Tests of the limits that each tier takes.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use common::*;
use tollgate_admission::{Admission, AdmissionOptions, Limit, Moment, Reserve, ReserveError};
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
