//! New limits take effect at once, and no reload gives back what was taken.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Wake, Waker};

use proptest::prelude::*;
use tollgate_admission::{
    Admission, AdmissionOptions, Estimate, Hold, HoldState, Limit, LimitChange, NewLimits,
    PastSpend, Period, Refusal, Reserve, ReserveError, Scope, ScopeLimits,
};
use tollgate_domain::{DeviceClass, DeviceNanos, PlanLimits, Rate};

use common::*;

fn admission() -> Admission {
    Admission::new(AdmissionOptions::default())
}

fn requests(per_minute: u64, burst: u64) -> PlanLimits {
    PlanLimits { requests: Some(Rate { per_minute, burst }), ..PlanLimits::default() }
}

fn at_revision(limits: &PlanLimits, revision: u64) -> ScopeLimits {
    ScopeLimits { revision, ..scoped(tenant("acme"), limits.clone()) }
}

/// Reserves for a request whose request rate was counted before its body came.
fn reserve(
    admission: &Admission,
    number: u64,
    limited: ScopeLimits,
    estimate: Estimate,
) -> Result<Hold, Box<Refusal>> {
    let request = Reserve { counted: 1, ..request(number, 0, &[limited], estimate) };
    admission.reserve(at(0), utc(0), request).map_err(|error| match error {
        ReserveError::Refused(refusal) => refusal,
        ReserveError::AlreadyHeld => panic!("ids are numbered"),
    })
}

/// Replaces the limits of acme at `now`, in nanoseconds.
fn reload(admission: &Admission, now: u64, revision: u64, [old, new]: [&PlanLimits; 2]) {
    reload_with(admission, now, revision, [old, new], Vec::new());
}

fn reload_with(
    admission: &Admission,
    now: u64,
    revision: u64,
    [old, new]: [&PlanLimits; 2],
    spent: Vec<PastSpend>,
) {
    let change = LimitChange { old: Some(Arc::new(old.clone())), new: Arc::new(new.clone()) };
    let limits_of = |scope: &Scope| (*scope == tenant("acme")).then(|| change.clone());
    admission
        .adopt(at(now), &NewLimits { revision, limits_of: &limits_of, spent, costs: Vec::new() });
}

/// Returns the number of requests that pass at `now`, of at most 1,000.
fn passed(admission: &Admission, now: u64, limited: &ScopeLimits) -> usize {
    let one = || admission.take_request(at(now), std::slice::from_ref(limited)).is_ok();
    (0..1_000).take_while(|_| one()).count()
}

#[test]
fn reload_keeps_level_of_bucket() {
    let small = requests(60, 60);
    for (new, left) in [(requests(60, 60), 10), (requests(600, 600), 10), (requests(6, 6), 6)] {
        let admission = admission();
        let old = at_revision(&small, 0);
        for _ in 0..50 {
            admission.take_request(at(0), std::slice::from_ref(&old)).expect("within the burst");
        }
        reload(&admission, 0, 1, [&small, &new]);
        assert_eq!(passed(&admission, 0, &at_revision(&new, 1)), left);
    }
    // The control: a bucket that is not kept gives its burst again.
    assert_eq!(passed(&admission(), 0, &at_revision(&requests(600, 600), 1)), 600);
}

#[test]
fn shrunk_burst_does_not_come_back() {
    let (large, small) = (requests(60, 100), requests(60, 5));
    let admission = admission();
    admission.take_request(at(0), &[at_revision(&large, 0)]).expect("a full bucket");
    reload(&admission, 0, 1, [&large, &small]);
    reload(&admission, 0, 2, [&small, &large]);
    assert_eq!(passed(&admission, 0, &at_revision(&large, 2)), 5);
}

#[test]
fn refill_follows_old_rate_until_reload() {
    let (slow, fast) = (requests(60, 60), requests(600, 60));
    let admission = admission();
    assert_eq!(passed(&admission, 0, &at_revision(&slow, 0)), 60);
    reload(&admission, 10 * SECOND, 1, [&slow, &fast]);
    // Ten seconds at one a second, then one at ten a second.
    assert_eq!(passed(&admission, 11 * SECOND, &at_revision(&fast, 1)), 20);
}

/// A slow request from before a reload must not lift the new limit: without the number of
/// the config it would drop the bucket, and the next request would find a full one.
#[test]
fn old_request_does_not_lift_new_limit() {
    let (free, limited) = (PlanLimits::default(), requests(1, 5));
    let refused_after = |old_revision: u64| {
        let admission = admission();
        reload(&admission, 0, 1, [&free, &limited]);
        assert_eq!(passed(&admission, 0, &at_revision(&limited, 1)), 5);
        let old = at_revision(&free, old_revision);
        let hold = reserve(&admission, 1, old, estimate(1, 1, 1)).expect("no limit of its own");
        let passed = passed(&admission, 0, &at_revision(&limited, 1));
        hold.void(at(0)).expect("open");
        passed
    };
    assert_eq!(refused_after(0), 0);
    // The control: the same limits as those of the newest config.
    assert_eq!(refused_after(1), 5);
}

/// A waker that notes that it was woken.
#[derive(Default)]
struct Noted(AtomicBool);

impl Wake for Noted {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[test]
fn raised_concurrency_wakes_waiting_requests() {
    let places = |concurrent| PlanLimits {
        concurrent: Some(concurrent),
        queued: Some(8),
        ..PlanLimits::default()
    };
    let admission = admission();
    let (narrow, wide) = (places(1), places(3));
    let holds: Vec<Hold> = (0..5)
        .map(|number| {
            let limited = at_revision(&narrow, 0);
            reserve(&admission, number, limited, estimate(1, 1, 1)).expect("runs or waits")
        })
        .collect();
    assert_eq!(holds[1].state(), HoldState::Queued);
    let woken: Vec<Arc<Noted>> = holds.iter().map(|_| Arc::default()).collect();
    let polled = |index: usize| {
        let waker = Waker::from(Arc::clone(&woken[index]));
        pin!(holds[index].queue_ticket()).poll(&mut Context::from_waker(&waker))
    };
    assert!((1..5).all(|index| polled(index).is_pending()));
    reload(&admission, 0, 1, [&narrow, &wide]);
    let woke: Vec<bool> = woken.iter().map(|noted| noted.0.load(Ordering::SeqCst)).collect();
    assert_eq!(woke, [false, true, true, false, false]);
    assert!(polled(2).is_ready());
    assert_eq!((admission.status().running, admission.status().queued), (3, 2));
}

#[test]
fn cap_below_spend_grants_nothing() {
    let (large, small) = (day_cap(1_000), day_cap(300));
    let admission = admission();
    let hold = reserve(&admission, 1, at_revision(&large, 0), estimate(1, 400, 400));
    hold.expect("within the cap").settle(at(0), spent(1, 400)).expect("open");
    reload(&admission, 0, 1, [&large, &small]);
    let refused = reserve(&admission, 2, at_revision(&small, 1), estimate(1, 1, 1));
    assert_eq!(refused.expect_err("the cap is spent").limit, Limit::DeviceTimePerDay);
    // A larger cap counts what was spent before it.
    reload(&admission, 0, 2, [&small, &large]);
    let hold = reserve(&admission, 3, at_revision(&large, 2), estimate(1, 900, 900));
    assert_eq!(hold.expect("within the cap").budget(), Some(DeviceNanos(600)));
}

#[test]
fn added_cap_counts_past_spend_and_open_requests() {
    let (free, capped) = (PlanLimits::default(), day_cap(1_000));
    let admission = admission();
    let open = reserve(&admission, 1, at_revision(&free, 0), estimate(1, 100, 100));
    let spent = vec![PastSpend {
        scope: tenant("acme"),
        class: DeviceClass::cpu(),
        period: Period::Day(TODAY.day()),
        spent: DeviceNanos(300),
    }];
    reload_with(&admission, 0, 1, [&free, &capped], spent);
    open.expect("no limit").settle(at(0), common::spent(1, 100)).expect("open");
    let hold = reserve(&admission, 2, at_revision(&capped, 1), estimate(1, 900, 900));
    assert_eq!(hold.expect("room").budget(), Some(DeviceNanos(600)));
}

proptest! {
    /// Over any window, whatever the reloads in it, the requests that pass are at most the
    /// largest burst and the largest rate's refill.
    #[test]
    fn reloads_never_admit_more_than_largest_limits(
        plans in prop::collection::vec((1_u64..2_000, 1_u64..50), 1..5),
        steps in prop::collection::vec((0_u64..4 * SECOND, 0_usize..8, 1_usize..12), 1..30),
    ) {
        let plans: Vec<PlanLimits> =
            plans.iter().map(|&(per_minute, burst)| requests(per_minute, burst)).collect();
        let rates = || plans.iter().filter_map(|plan| plan.requests);
        let burst = rates().map(|rate| rate.burst).max().unwrap_or(0);
        let per_minute = rates().map(|rate| rate.per_minute).max().unwrap_or(0);
        let admission = admission();
        let (mut now, mut revision, mut current) = (0, 0, 0);
        let mut times: Vec<u64> = Vec::new();
        for (gap, next, asks) in steps {
            now += gap;
            // Some steps only ask; requests from before the last reload ask, too.
            if let Some(new) = plans.get(next) {
                revision += 1;
                reload(&admission, now, revision, [&plans[current], new]);
                current = next;
            }
            for ask in 0..asks {
                let limited = at_revision(&plans[current], revision - revision.min(ask as u64 % 2));
                if admission.take_request(at(now), &[limited]).is_ok() {
                    times.push(now);
                }
            }
        }
        for (first, start) in times.iter().enumerate() {
            for (last, end) in times.iter().enumerate().skip(first) {
                let allowed = u128::from(burst) * 60_000_000_000
                    + u128::from(per_minute) * u128::from(end - start);
                prop_assert!((last - first + 1) as u128 * 60_000_000_000 <= allowed);
            }
        }
    }
}
