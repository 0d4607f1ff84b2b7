//! Random tests of duplicate, reordered and late resolutions (C10) against a model of the
//! state machine. The sums are checked after every act. One test uses many threads on a
//! nearly exhausted cap (T43).

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::collections::HashMap;
use std::time::Duration;

use common::*;
use proptest::prelude::*;
use tollgate_admission::{
    Admission, AdmissionOptions, HoldState, Limit, Period, ReserveError, ResolveError, Resolved,
    ScopeLimits,
};
use tollgate_domain::{ByClass, DeviceClass, DeviceNanos, PlanLimits, Rate};

/// An act of a caller of admission.
#[derive(Clone, Debug)]
enum Act {
    Reserve { number: u64, tokens: u64, expected: u64, worst: u64 },
    Settle { number: u64, part: u64 },
    Void { number: u64 },
    Pass { seconds: u64 },
    Midnight { seconds: u64 },
    Sweep,
}

fn act() -> impl Strategy<Value = Act> {
    let number = 0_u64..24;
    prop_oneof![
        4 => (number.clone(), 1_u64..40, 1_u64..50, 0_u64..200).prop_map(
            |(number, tokens, expected, more)| Act::Reserve {
                number, tokens, expected, worst: expected + more
            }
        ),
        3 => (number.clone(), 0_u64..=100).prop_map(|(number, part)| Act::Settle { number, part }),
        1 => number.prop_map(|number| Act::Void { number }),
        2 => (0_u64..200).prop_map(|seconds| Act::Pass { seconds }),
        // Far enough to start a new day, and near enough that open holds survive it.
        1 => (0_u64..200).prop_map(|seconds| Act::Midnight { seconds }),
        1 => Just(Act::Sweep),
    ]
}

fn limits() -> PlanLimits {
    PlanLimits {
        requests: Some(Rate { per_minute: 60, burst: 20 }),
        tokens: Some(Rate { per_minute: 600, burst: 100 }),
        grammar_time: None,
        device_time: ByClass::all(Rate { per_minute: 1_000, burst: 200 }),
        device_time_per_day: ByClass::all(DeviceNanos(1_000)),
        device_time_per_month: ByClass::all(DeviceNanos(1_500)),
        budget_per_month: None,
        concurrent: Some(3),
        queued: Some(2),
        largest_job: ByClass::all(DeviceNanos(220)),
    }
}

/// A hold in the model.
#[derive(Clone, Debug, PartialEq)]
enum Phase {
    Held { place: HoldState, reserved_at: u64, budget: u64 },
    Posted,
    Voided,
    Expired { budget: u64 },
}

#[derive(Default)]
struct Model {
    now: u64,
    holds: HashMap<u64, Phase>,
    /// Charged spend by the day and the month in which it ended.
    settled: HashMap<Period, u64>,
}

impl Model {
    fn expected_error(&self, number: u64) -> Option<ResolveError> {
        match self.holds.get(&number) {
            None => Some(ResolveError::Unknown),
            Some(Phase::Posted) => Some(ResolveError::AlreadySettled(Resolved::Posted)),
            Some(Phase::Voided) => Some(ResolveError::AlreadySettled(Resolved::Voided)),
            Some(Phase::Held { .. } | Phase::Expired { .. }) => None,
        }
    }

    fn periods(&self) -> [Period; 2] {
        let day = utc(self.now).day();
        [Period::Day(day), Period::Month(day.month())]
    }

    fn promote(&mut self, promoted: &[tollgate_domain::RequestId]) {
        for number in 0..24 {
            if promoted.contains(&id(number)) {
                match self.holds.get_mut(&number) {
                    Some(Phase::Held { place, .. }) if *place == HoldState::Queued => {
                        *place = HoldState::Running;
                    }
                    other => panic!("promoted {number}, which is {other:?}"),
                }
            }
        }
    }

    fn count(&self, wanted: HoldState) -> usize {
        let at_it = |phase: &&Phase| matches!(phase, Phase::Held { place, .. } if *place == wanted);
        self.holds.values().filter(at_it).count()
    }

    /// Checks that the spend of today and this month plus all open holds stays within the
    /// caps, and that the counts of admission are right.
    fn check(&self, admission: &Admission) {
        for (period, cap) in self.periods().into_iter().zip([1_000, 1_500]) {
            let held: u64 = self
                .holds
                .values()
                .map(|phase| if let Phase::Held { budget, .. } = phase { *budget } else { 0 })
                .sum();
            let settled = self.settled.get(&period).copied().unwrap_or_default();
            assert!(settled + held <= cap, "{settled} + {held} > {cap} in {period:?}");
        }
        let status = admission.status();
        assert_eq!(status.running, self.count(HoldState::Running));
        assert_eq!(status.queued, self.count(HoldState::Queued));
        assert!(status.running <= 3 && status.queued <= 2);
        assert!(status.queued == 0 || status.running == 3, "a place is free and someone waits");
    }
}

fn run(acts: Vec<Act>) {
    let admission = Admission::new(AdmissionOptions::default());
    let scopes = vec![scoped(tenant("acme"), limits())];
    let mut model = Model::default();
    // A worker never spends more than its budget, late or not.
    let mut kept = Vec::new();
    for act in acts {
        match act {
            Act::Pass { seconds } => model.now += seconds * SECOND,
            Act::Midnight { seconds } => {
                let next = (model.now / DAY + 1) * DAY;
                // Starts shortly before midnight, after an idle day.
                model.now = (next - 100 * SECOND).max(model.now) + seconds * SECOND;
            }
            Act::Reserve { number, tokens, expected, worst } => {
                let asked = request(number, model.now, &scopes, estimate(tokens, expected, worst));
                let result = admission.reserve(at(model.now), utc(model.now), asked);
                let known = model.holds.contains_key(&number);
                match result {
                    Err(ReserveError::AlreadyHeld) => assert!(known),
                    Err(ReserveError::Refused(_)) => assert!(!known),
                    Ok(hold) => {
                        assert!(!known);
                        let budget = hold.budget().expect("a cap applies").nanos();
                        assert!(budget <= worst && budget > 0 || worst == 0);
                        let (place, reserved_at) = (hold.state(), model.now);
                        let held = Phase::Held { place, reserved_at, budget };
                        model.holds.insert(number, held);
                        kept.push(hold); // dropped at the end only
                    }
                }
            }
            Act::Settle { number, part } => settle(&admission, &mut model, number, part),
            Act::Void { number } => {
                let result = admission.void(at(model.now), &id(number));
                let expected = match model.holds.get(&number) {
                    Some(Phase::Expired { .. }) => {
                        Some(ResolveError::AlreadySettled(Resolved::Expired))
                    }
                    _ => model.expected_error(number),
                };
                match result {
                    Err(error) => assert_eq!(Some(error), expected),
                    Ok(settlement) => {
                        assert_eq!(expected, None);
                        model.holds.insert(number, Phase::Voided);
                        model.promote(&settlement.promoted);
                    }
                }
            }
            Act::Sweep => sweep(&admission, &mut model),
        }
        model.check(&admission);
    }
}

fn settle(admission: &Admission, model: &mut Model, number: u64, part: u64) {
    let budget = match model.holds.get(&number) {
        Some(Phase::Held { budget, .. } | Phase::Expired { budget }) => *budget,
        _ => 0,
    };
    let late = matches!(model.holds.get(&number), Some(Phase::Expired { .. }));
    // A cap cannot foresee late usage, so the late usage here is zero.
    let reference = if late { 0 } else { budget * part / 100 };
    let result = admission.settle(at(model.now), &id(number), spent(part, reference));
    match result {
        Err(error) => assert_eq!(Some(error), model.expected_error(number)),
        Ok(settlement) => {
            assert_eq!(model.expected_error(number), None);
            assert_eq!(settlement.late, late);
            assert_eq!(settlement.overrun, DeviceNanos::ZERO);
            for period in model.periods() {
                *model.settled.entry(period).or_default() += reference;
            }
            model.holds.insert(number, Phase::Posted);
            model.promote(&settlement.promoted);
        }
    }
}

fn sweep(admission: &Admission, model: &mut Model) {
    let swept = admission.expire(at(model.now));
    for number in 0..24 {
        let Some(Phase::Held { place, reserved_at, budget }) = model.holds.get(&number).cloned()
        else {
            continue;
        };
        let age = model.now - reserved_at;
        let (expired, timed_out) =
            (swept.expired.contains(&id(number)), swept.timed_out.contains(&id(number)));
        // A request that was promoted in this sweep left the queue in time.
        let left_queue = expired || swept.promoted.contains(&id(number));
        if timed_out {
            assert!(place == HoldState::Queued && age >= 30 * SECOND);
            model.holds.insert(number, Phase::Voided);
        } else if expired {
            assert!(age >= 630 * SECOND);
            model.holds.insert(number, Phase::Expired { budget });
        } else {
            assert!(age < 630 * SECOND, "overdue");
            assert!(place == HoldState::Running || left_queue || age < 30 * SECOND, "overdue");
        }
    }
    model.promote(&swept.promoted);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn random_acts_agree_with_the_model(acts in prop::collection::vec(act(), 1..120)) {
        run(acts);
    }

    /// Checks that `retry_after` is exact: the same request passes after it, and does not
    /// pass one nanosecond before.
    #[test]
    fn retry_after_is_exact(
        costs in prop::collection::vec((1_u64..100, 1_u64..200, 0_u64..10 * SECOND), 1..40),
    ) {
        let plan = PlanLimits { concurrent: None, queued: None, ..limits() };
        let narrow = PlanLimits {
            requests: Some(Rate { per_minute: 30, burst: 3 }),
            ..PlanLimits::default()
        };
        let gate = Gate::new(vec![scoped(key("k"), narrow), scoped(tenant("acme"), plan)]);
        let mut now = 0;
        for (tokens, cost, gap) in costs {
            now += gap;
            let asked = estimate(tokens, cost, cost);
            let refusal = match gate.reserve(now, asked) {
                Err(refusal) => refusal,
                Ok(hold) => {
                    // The headers are exact: 0 remaining means that the next request is
                    // refused.
                    let figures = hold.figures();
                    let rates = [figures.requests, figures.tokens, figures.device_time];
                    let mut left: Vec<u64> =
                        rates.into_iter().flatten().map(|rate| rate.remaining).collect();
                    left.extend(figures.day.map(|cap| cap.remaining.nanos()));
                    if left.contains(&0) {
                        prop_assert!(gate.reserve(now, asked).is_err(), "{figures:?}");
                    }
                    continue;
                }
            };
            let Some(wait) = refusal.retry_after else { continue };
            let later = now + wait.as_nanos() as u64;
            prop_assert!(gate.reserve(later - 1, asked).is_err());
            if refusal.resets.is_some() {
                gate.admission.expire(at(later)); // what is lost is not held in the new period
            }
            let hold = gate.reserve(later, asked);
            prop_assert!(hold.is_ok(), "{refusal:?} then {hold:?}");
            hold.expect("checked").settle(at(later), spent(tokens, cost)).expect("open");
            now = later;
        }
    }

    /// Checks that every amount comes back with time, whether it was settled, voided or
    /// lost.
    #[test]
    fn resolved_holds_leave_nothing_behind(acts in prop::collection::vec((0_u64..3, 1_u64..40, 1_u64..50), 1..60)) {
        let gate = Gate::of(limits());
        for (end, tokens, cost) in acts {
            let Ok(hold) = gate.reserve(0, estimate(tokens, cost, cost)) else { continue };
            match end {
                0 => drop(hold),
                1 => _ = hold.void(at(0)).expect("open"),
                _ => _ = hold.settle(at(0), spent(tokens, cost / 2)).expect("open"),
            }
        }
        gate.admission.expire(at(630 * SECOND));
        let status = gate.admission.status();
        prop_assert_eq!((status.running, status.queued), (0, 0));
        let hold = gate.reserve(40 * DAY, estimate(1, 1, 1)).expect("all is free");
        let figures = hold.figures();
        prop_assert_eq!(figures.requests.expect("a rate").remaining, 19);
        prop_assert_eq!(figures.tokens.expect("a rate").remaining, 99);
        prop_assert_eq!(figures.device_time.expect("a rate").remaining, 199);
        prop_assert_eq!(figures.day.expect("a cap").remaining, DeviceNanos(999));
        hold.void(at(40 * DAY)).expect("open");
        gate.admission.expire(at(40 * DAY + HOUR));
        prop_assert_eq!(gate.admission.status().scopes, 0);
    }
}

#[test]
fn late_usage_posts_once() {
    let gate = Gate::of(day_cap(100));
    let hold = gate.reserve(0, estimate(1, 10, 60)).expect("room");
    let lost = hold.id().clone();
    drop(hold);
    let left = |number| {
        let hold = gate.admission.reserve(
            at(630 * SECOND),
            utc(HOUR),
            request(number, HOUR, &gate.scopes, estimate(1, 1, 200)),
        );
        let hold = hold.expect("something is left");
        let budget = hold.budget().expect("a cap applies").nanos();
        hold.void(at(630 * SECOND)).expect("open");
        budget
    };
    assert_eq!(left(100), 40);
    assert_eq!(gate.admission.expire(at(630 * SECOND)).expired, std::slice::from_ref(&lost));
    assert_eq!(left(101), 100, "expired: charged nothing");
    let void = gate.admission.void(at(640 * SECOND), &lost);
    assert_eq!(void, Err(ResolveError::AlreadySettled(Resolved::Expired)));
    let late = gate.admission.settle(at(640 * SECOND), &lost, spent(1, 25)).expect("late");
    assert!(late.late);
    assert_eq!(left(102), 75);
    let again = gate.admission.settle(at(640 * SECOND), &lost, spent(1, 25));
    assert_eq!(again, Err(ResolveError::AlreadySettled(Resolved::Posted)));
    assert_eq!(left(103), 75);
    let stranger = gate.admission.settle(at(0), &id(7_777), spent(1, 1));
    assert_eq!(stranger, Err(ResolveError::Unknown));
}

/// Checks that 200 threads that spend all they may use exactly the cap and no nanosecond
/// more (T43).
#[test]
fn concurrent_threads_never_exceed_a_cap() {
    const CAP: u64 = 10_007;
    let admission = Admission::new(AdmissionOptions::default());
    let scopes: Vec<ScopeLimits> = vec![scoped(tenant("acme"), day_cap(CAP))];
    let cpu = DeviceClass::cpu();
    let today = Period::Day(utc(0).day());
    admission.restore_spend(tenant("acme"), &cpu, today, DeviceNanos(7));
    let spend = |thread: u64| {
        let mut spent_here = 0;
        for round in 0..50 {
            let number = thread * 1_000 + round;
            let asked = request(number, 0, &scopes, estimate(10, 3, 40 + thread % 7));
            match admission.reserve(at(round), utc(0), asked) {
                Ok(hold) => {
                    std::thread::yield_now();
                    let budget = hold.budget().expect("a cap applies").nanos();
                    // Every third thread returns a half, every seventh returns everything.
                    let used = match number {
                        n if n % 7 == 0 => 0,
                        n if n % 3 == 0 => budget / 2,
                        _ => budget,
                    };
                    hold.settle(at(round), spent(10, used)).expect("open");
                    spent_here += used;
                }
                Err(ReserveError::Refused(refusal)) => {
                    assert_eq!(refusal.limit, Limit::DeviceTimePerDay);
                    assert!(
                        refusal.permanent
                            && refusal.retry_after == Some(Duration::from_secs(86_400))
                    );
                }
                Err(ReserveError::AlreadyHeld) => panic!("ids are numbered"),
            }
        }
        spent_here
    };
    let total: u64 = std::thread::scope(|threads| {
        let running: Vec<_> = (0..200).map(|thread| threads.spawn(move || spend(thread))).collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    });
    assert_eq!(total + 7, CAP, "the whole cap is spent: 10,000 requests asked for far more");
}

mod long {
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 5_120, ..ProptestConfig::default() })]

        #[test]
        #[ignore = "long: five thousand random orders"]
        fn five_thousand_random_orders_agree_with_the_model(
            acts in prop::collection::vec(act(), 1..240),
        ) {
            run(acts);
        }
    }
}
