//! Tests of each limit at its exact boundary, alone and with other limits.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::time::Duration;

use common::*;
use tollgate_admission::{
    Admission, AdmissionOptions, HoldState, Limit, Period, Refusal, ReserveError,
};
use tollgate_domain::{ByClass, DeviceClass, DeviceNanos, PlanLimits, Rate};

fn small() -> tollgate_admission::Estimate {
    estimate(1, 1, 1)
}

fn requests(rate: Rate) -> PlanLimits {
    PlanLimits { requests: Some(rate), ..PlanLimits::default() }
}

#[test]
fn rate_of_sixty_admits_exactly_sixty_at_once() {
    let gate = Gate::of(requests(Rate::per_minute(60)));
    for number in 0..60 {
        let hold = gate.reserve(0, small()).expect("within the burst");
        let figures = hold.figures().requests.expect("a rate");
        assert_eq!(figures.remaining, 59 - number);
        hold.settle(at(0), spent(1, 1)).expect("open");
    }
    let refusal = gate.reserve(0, small()).expect_err("the 61st");
    assert_eq!(refusal.limit, Limit::Requests);
    assert_eq!((refusal.scope.kind(), refusal.scope.name()), ("tenant", "acme"));
    assert_eq!((refusal.value, refusal.remaining, refusal.permanent), (60, 0, false));
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(1)));
    let figures = refusal.figures.requests.expect("a rate");
    assert_eq!((figures.remaining, figures.reset), (0, Duration::from_secs(60)));
    assert!(gate.reserve(SECOND - 1, small()).is_err());
    assert!(gate.reserve(SECOND, small()).is_ok());
    assert!(gate.reserve(SECOND, small()).is_err());
}

/// Checks that a refusal by the wider scope takes nothing from the narrower one, and the
/// reverse.
#[test]
fn refused_reservation_takes_nothing() {
    let wide = scoped(tenant("acme"), requests(Rate::per_minute(2)));
    let one = Gate::new(vec![scoped(key("one"), requests(Rate::per_minute(10))), wide.clone()]);
    for _ in 0..2 {
        let _ = one.reserve(0, small()).expect("both have room");
    }
    for _ in 0..50 {
        let refusal = one.reserve(0, small()).expect_err("the tenant's is spent");
        assert_eq!(refusal.scope, tenant("acme"));
        assert_eq!(refusal.figures.requests.expect("a rate").remaining, 0);
    }
    // After 30 s the tenant has one more request, and the key never lost one.
    let hold = one.reserve(30 * SECOND, small()).expect("one more");
    assert_eq!(hold.figures().requests.expect("a rate").rate, Rate::per_minute(2));

    let key_first =
        Gate::new(vec![scoped(key("one"), requests(Rate::per_minute(1))), wide.clone()]);
    let _ = key_first.reserve(0, small()).expect("both have room");
    let refusal = key_first.reserve(0, small()).expect_err("the key's is spent");
    assert_eq!(refusal.scope, key("one"));
    let other = [scoped(key("two"), requests(Rate::per_minute(1))), wide];
    let hold = key_first.admission.reserve(at(0), utc(0), request(99, 0, &other, small()));
    assert!(hold.is_ok(), "the tenant lost one only");
}

#[test]
fn token_rate_settles_to_true_cost_with_debt() {
    let limits =
        PlanLimits { tokens: Some(Rate { per_minute: 60, burst: 100 }), ..PlanLimits::default() };
    let gate = Gate::of(limits);
    let cheap = gate.reserve(0, estimate(50, 1, 1)).expect("room");
    cheap.settle(at(0), spent(10, 1)).expect("open"); // 40 come back
    let hold = gate.reserve(0, estimate(90, 1, 1)).expect("90 are left");
    assert_eq!(hold.figures().tokens.expect("a rate").remaining, 0);
    hold.settle(at(0), spent(150, 1)).expect("open"); // 60 in debt
    let refusal = gate.reserve(0, estimate(1, 1, 1)).expect_err("in debt");
    assert_eq!((refusal.limit, refusal.remaining), (Limit::Tokens, 0));
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(61)));
    assert!(gate.reserve(61 * SECOND - 1, estimate(1, 1, 1)).is_err());
    assert!(gate.reserve(61 * SECOND, estimate(1, 1, 1)).is_ok());
    let refusal = gate.reserve(HOUR, estimate(101, 1, 1)).expect_err("larger than the bucket");
    assert_eq!((refusal.permanent, refusal.retry_after), (true, None));
    assert_eq!((refusal.asked, refusal.largest, refusal.value), (101, 100, 60));
}

#[test]
fn void_returns_every_amount() {
    let limits = PlanLimits {
        requests: Some(Rate::per_minute(1)),
        tokens: Some(Rate::per_minute(10)),
        device_time: ByClass::all(Rate::per_minute(10)),
        device_time_per_day: ByClass::all(DeviceNanos(10)),
        concurrent: Some(1),
        queued: Some(0),
        ..PlanLimits::default()
    };
    let gate = Gate::of(limits);
    for _ in 0..100 {
        let hold = gate.reserve(0, estimate(10, 10, 10)).expect("all of it is there");
        assert_eq!(hold.budget(), Some(DeviceNanos(10)));
        hold.void(at(0)).expect("open");
    }
    let _ = gate.reserve(0, estimate(10, 10, 10)).expect("all of it is there");
}

#[test]
fn limits_by_class_stay_separate() {
    let h200 = DeviceClass::new("h200").expect("a class");
    let mut per_day = ByClass::all(DeviceNanos(100));
    per_day.classes.insert(h200.clone(), DeviceNanos(5));
    let limits = PlanLimits { device_time_per_day: per_day, ..PlanLimits::default() };
    let gate = Gate::of(limits);
    let _ = gate.reserve(0, estimate(1, 100, 100)).expect("the CPU's day");
    let mut on_gpu = request(1_000, 0, &gate.scopes, estimate(1, 5, 5));
    on_gpu.class = h200.clone();
    let hold = gate.admission.reserve(at(0), utc(0), on_gpu.clone()).expect("the GPU's own day");
    assert_eq!(hold.budget(), Some(DeviceNanos(5)));
    on_gpu.id = id(1_001);
    let Err(ReserveError::Refused(refusal)) = gate.admission.reserve(at(0), utc(0), on_gpu) else {
        panic!("spent")
    };
    assert_eq!((refusal.class, refusal.value), (Some(h200), 5));
}

#[test]
fn cap_holds_worst_case_or_the_rest() {
    let gate = Gate::of(day_cap(100));
    let first = gate.reserve(0, estimate(1, 10, 70)).expect("70 of 100");
    assert_eq!(first.budget(), Some(DeviceNanos(70)));
    let second = gate.reserve(0, estimate(1, 10, 70)).expect("30 remain");
    assert_eq!(second.budget(), Some(DeviceNanos(30)));
    assert_eq!(second.figures().day.expect("a cap").remaining, DeviceNanos(0));
    let refusal = gate.reserve(20 * HOUR, estimate(1, 1, 1)).expect_err("nothing is left");
    assert_eq!((refusal.limit, refusal.permanent), (Limit::DeviceTimePerDay, true));
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(4 * 3_600)));
    assert_eq!(refusal.resets, Some(utc(DAY)));
    first.settle(at(0), spent(1, 20)).expect("open"); // 50 come back
    let too_little = tollgate_admission::Estimate { least: DeviceNanos(51), ..estimate(1, 60, 60) };
    let refusal = gate.reserve(0, too_little).expect_err("50 would not bring one token");
    assert_eq!((refusal.asked, refusal.remaining), (51, 50));
    let hopeless =
        tollgate_admission::Estimate { least: DeviceNanos(101), ..estimate(1, 200, 200) };
    let refusal = gate.reserve(0, hopeless).expect_err("no day is long enough");
    assert_eq!((refusal.permanent, refusal.resets), (true, None));
    let third = gate.reserve(0, estimate(1, 60, 60)).expect("50 remain");
    assert_eq!(third.budget(), Some(DeviceNanos(50)));
    let lie = third.settle(at(0), spent(1, 55)).expect("open");
    assert_eq!(lie.overrun, DeviceNanos(5));
}

#[test]
fn cap_held_by_lines_is_not_spent() {
    let gate = Gate::of(day_cap(100));
    let line = |number, least| {
        let mut line = request(number, 0, &gate.scopes, estimate(1, 1, least));
        (line.is_line, line.estimate.least) = (true, DeviceNanos(least));
        gate.admission.reserve(at(0), utc(0), line)
    };
    let first = line(1, 60).expect("60 of 100");
    let Err(ReserveError::Refused(held)) = line(2, 60) else { panic!("40 are left") };
    assert_eq!((held.limit, held.remaining), (Limit::DeviceTimePerDay, 40));
    assert_eq!((held.retry_after, held.resets, held.permanent), (None, None, false));
    first.settle(at(0), spent(1, 50)).expect("open");
    let Err(ReserveError::Refused(spent)) = line(3, 60) else { panic!("50 are left") };
    assert_eq!((spent.resets, spent.permanent), (Some(utc(DAY)), true));
    let _ = line(4, 50).expect("50 are left");
}

#[test]
fn spend_belongs_to_day_of_its_end() {
    let both = PlanLimits { device_time_per_month: ByClass::all(DeviceNanos(150)), ..day_cap(100) };
    let gate = Gate::of(both);
    let late = gate.reserve(DAY - 1, estimate(1, 80, 80)).expect("today's");
    let fresh = gate.reserve(DAY, estimate(1, 100, 100)).expect("what is not held of tomorrow");
    assert_eq!(fresh.budget(), Some(DeviceNanos(20)));
    late.settle(at(DAY), spent(1, 80)).expect("open");
    fresh.settle(at(DAY), spent(1, 10)).expect("open");
    let next = gate.reserve(2 * DAY, estimate(1, 100, 100)).expect("60 of the month");
    assert_eq!(next.budget(), Some(DeviceNanos(60)), "the month goes on");
    assert_eq!(next.figures().day.expect("a cap").remaining, DeviceNanos(40));
    // 2026-11-20 plus ten days is in December.
    let refusal = gate.reserve(2 * DAY, estimate(1, 1, 1)).expect_err("the month is held");
    assert_eq!(refusal.limit, Limit::DeviceTimePerMonth);
    assert_eq!(refusal.resets, Some(utc(11 * DAY)));
    next.settle(at(11 * DAY - 1), spent(1, 60)).expect("open");
    let december = gate.reserve(11 * DAY, estimate(1, 100, 100)).expect("a month anew");
    assert_eq!(december.budget(), Some(DeviceNanos(100)));
}

/// Checks that a hold across midnight counts fully and once in the new day, whether the
/// first reservation of that day comes before or after the hold's end.
#[test]
fn holds_across_midnight_count_in_new_day() {
    for seen_first in [true, false] {
        let gate = Gate::of(day_cap(100));
        let holds: Vec<_> = (0..4)
            .map(|_| gate.reserve(DAY - SECOND, estimate(1, 25, 25)).expect("a quarter"))
            .collect();
        let refused = |now| {
            let refusal = gate.reserve(now, estimate(1, 1, 1)).expect_err("all is held or spent");
            assert_eq!((refusal.limit, refusal.remaining), (Limit::DeviceTimePerDay, 0));
        };
        if seen_first {
            refused(DAY);
        }
        gate.admission.expire(at(DAY + SECOND));
        for (hold, part) in holds.into_iter().zip([25, 25, 25, 15]) {
            let end = hold.settle(at(DAY + SECOND), spent(1, part)).expect("open");
            assert_eq!(end.overrun, DeviceNanos::ZERO);
        }
        gate.admission.expire(at(DAY + HOUR)); // what was spent today is not idle
        let rest = gate.reserve(DAY + HOUR, estimate(1, 50, 50)).expect("what was not spent");
        assert_eq!(rest.budget(), Some(DeviceNanos(10)), "seen first: {seen_first}");
        refused(DAY + HOUR);
        rest.settle(at(2 * DAY - 1), spent(1, 10)).expect("open");
        refused(2 * DAY - 1);
        let fresh = gate.reserve(2 * DAY, estimate(1, 100, 100)).expect("nothing is held");
        assert_eq!(fresh.budget(), Some(DeviceNanos(100)));
    }
}

#[test]
fn removed_concurrency_limit_promotes_waiting_requests() {
    let one = PlanLimits { concurrent: Some(1), queued: Some(5), ..PlanLimits::default() };
    let gate = Gate::of(one);
    let first = gate.reserve(0, small()).expect("room");
    let second = gate.reserve(0, small()).expect("room to wait");
    assert_eq!((first.state(), second.state()), (HoldState::Running, HoldState::Queued));
    let open = [scoped(tenant("acme"), PlanLimits::default())];
    let third = gate.admission.reserve(at(0), utc(0), request(99, 0, &open, small()));
    let end = third.expect("no limit").settle(at(0), spent(1, 1)).expect("open");
    assert_eq!(end.promoted, [second.id().clone()]);
}

#[test]
fn restored_spend_counts_against_caps() {
    let gate = Gate::of(day_cap(100));
    let (scope, cpu) = (tenant("acme"), DeviceClass::cpu());
    let today = utc(0).day();
    for part in [30, 40] {
        let period = Period::Day(today);
        gate.admission.restore_spend(scope.clone(), &cpu, period, DeviceNanos(part));
    }
    gate.admission.expire(at(HOUR)); // what was restored is not idle
    let hold = gate.reserve(HOUR, estimate(1, 50, 50)).expect("30 remain");
    assert_eq!(hold.budget(), Some(DeviceNanos(30)));
    assert!(gate.reserve(HOUR, small()).is_err());
}

#[test]
fn largest_job_refuses_worst_case_permanently() {
    let limits = PlanLimits {
        largest_job: ByClass::all(DeviceNanos(10)),
        requests: Some(Rate::per_minute(1)),
        ..PlanLimits::default()
    };
    let gate = Gate::of(limits);
    let _ = gate.reserve(0, estimate(1, 1, 10)).expect("just fits");
    // The rate is exhausted too, but the permanent refusal wins.
    let refusal = gate.reserve(0, estimate(1, 1, 11)).expect_err("too large");
    assert_eq!((refusal.limit, refusal.permanent), (Limit::LargestJob, true));
    assert_eq!((refusal.value, refusal.asked, refusal.retry_after), (10, 11, None));
}

/// Checks that a request that can use more than 1.5 bursts gets the same refusal from an
/// idle tenant and from a busy one, so that a client never waits for it in vain.
#[test]
fn request_beyond_one_and_half_bursts_never_passes() {
    let limits =
        PlanLimits { tokens: Some(Rate { per_minute: 60, burst: 100 }), ..PlanLimits::default() };
    let of = |most_tokens| tollgate_admission::Estimate { most_tokens, ..estimate(10, 1, 1) };
    for is_busy in [false, true] {
        let gate = Gate::of(limits.clone());
        let open = is_busy.then(|| gate.reserve(0, of(20)).expect("room"));
        for now in [0, HOUR] {
            let refusal = gate.reserve(now, of(151)).expect_err("too large");
            let figures = (refusal.limit, refusal.asked, refusal.largest, refusal.value);
            assert_eq!(figures, (Limit::Tokens, 151, 150, 60), "busy: {is_busy}");
            assert_eq!((refusal.permanent, refusal.retry_after), (true, None), "busy: {is_busy}");
        }
        drop(open.map(|hold| hold.settle(at(HOUR), spent(10, 1))));
        // The control: the largest allowed request passes.
        assert!(gate.reserve(HOUR, of(150)).is_ok(), "busy: {is_busy}");
    }
}

#[test]
fn refusal_is_the_longest_binding_limit() {
    let tight = PlanLimits { tokens: Some(Rate::per_minute(6)), ..PlanLimits::default() };
    let narrow = scoped(key("one"), requests(Rate::per_minute(60)));
    let gate = Gate::new(vec![narrow, scoped(tenant("acme"), tight)]);
    for _ in 0..6 {
        let _ = gate.reserve(0, small()).expect("six tokens");
    }
    let refusal: Box<Refusal> = gate.reserve(0, small()).expect_err("no token is left");
    assert_eq!(refusal.limit, Limit::Tokens);
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(10)));
}

#[test]
fn clock_jumps_neither_refuse_nor_refill() {
    let gate = Gate::of(requests(Rate::per_minute(60)));
    for _ in 0..60 {
        let _ = gate.reserve(HOUR, small()).expect("within the burst");
    }
    // The wall clock jumps by an hour in both directions; the monotonic clock does not
    // move.
    for (number, wall) in [(1_000, 2 * HOUR), (1_001, 0)] {
        let asked = request(number, HOUR, &gate.scopes, small());
        assert!(gate.admission.reserve(at(HOUR), utc(wall), asked).is_err());
    }
    assert!(gate.reserve(HOUR + SECOND, small()).is_ok());
    // An older reading from a concurrent thread changes nothing.
    assert!(gate.reserve(0, small()).is_err());
}

#[test]
fn admission_bounds_its_state() {
    let options = AdmissionOptions { max_holds: 2, max_scopes: 3, max_resolved: 4 };
    let admission = Admission::new(options);
    let ask = |number: u64, now: u64, name: &str| {
        let scopes = [scoped(tenant(name), requests(Rate::per_minute(60)))];
        admission.reserve(at(now), utc(now), request(number, now, &scopes, small()))
    };
    let refused_by = |result: Result<_, ReserveError>| match result {
        Err(ReserveError::Refused(refusal)) => (refusal.limit, refusal.scope.kind()),
        other => panic!("{other:?}"),
    };
    let (a, b) = (ask(1, 0, "a").expect("room"), ask(2, 0, "b").expect("room"));
    assert_eq!(refused_by(ask(3, 0, "c").map(drop)), (Limit::Capacity, "gateway"));
    a.settle(at(0), spent(1, 1)).expect("open");
    b.settle(at(0), spent(1, 1)).expect("open");
    ask(4, 0, "c").expect("room").settle(at(0), spent(1, 1)).expect("open");
    assert_eq!(refused_by(ask(5, 0, "d").map(drop)), (Limit::Capacity, "gateway"));
    // After two minutes all buckets are full, and the sweep forgets the scopes.
    assert_eq!(admission.expire(at(120 * SECOND)).scopes_forgotten, 3);
    for number in 6..30 {
        let hold = ask(number, 120 * SECOND, "d").expect("room");
        hold.settle(at(120 * SECOND), spent(1, 1)).expect("open");
    }
    let status = admission.status();
    assert_eq!((status.scopes, status.resolved, status.running), (1, 4, 0));
    assert!(matches!(ask(29, 120 * SECOND, "d"), Err(ReserveError::AlreadyHeld)));
}

#[test]
fn waiting_requests_run_in_order_and_once() {
    let limits = PlanLimits { concurrent: Some(2), queued: Some(2), ..PlanLimits::default() };
    let gate = Gate::of(limits);
    let [first, second, third, fourth] = [(); 4].map(|()| gate.reserve(0, small()).expect("room"));
    let places = [&first, &second, &third, &fourth].map(tollgate_admission::Hold::state);
    assert_eq!(
        places,
        [HoldState::Running, HoldState::Running, HoldState::Queued, HoldState::Queued]
    );
    let refusal = gate.reserve(0, small()).expect_err("the queue is full");
    assert_eq!((refusal.limit, refusal.value, refusal.permanent), (Limit::Queued, 2, false));
    assert_eq!(refusal.retry_after, None);

    let settled = second.settle(at(1), spent(1, 1)).expect("open");
    assert_eq!(settled.promoted, [third.id().clone()]);
    let voided = third.void(at(2)).expect("open");
    assert_eq!(voided.promoted, [fourth.id().clone()]);
    let status = gate.admission.status();
    assert_eq!((status.running, status.queued), (2, 0));
    drop((first, fourth)); // they may have run: they hold until they expire
    assert_eq!(gate.admission.status().running, 2);
    let queued = gate.reserve(3, small()).expect("a place to wait");
    drop(queued); // it never ran
    assert_eq!(gate.admission.status().queued, 0);
    let swept = gate.admission.expire(at(630 * SECOND));
    assert_eq!(swept.expired.len(), 2);
    assert_eq!(gate.admission.status().running, 0);
}

#[test]
fn full_scope_without_queue_refuses_at_once() {
    let limits = PlanLimits { concurrent: Some(1), queued: Some(0), ..PlanLimits::default() };
    let gate = Gate::of(limits);
    let hold = gate.reserve(0, small()).expect("room");
    let refusal = gate.reserve(0, small()).expect_err("taken");
    assert_eq!((refusal.limit, refusal.value, refusal.permanent), (Limit::Concurrent, 1, false));
    hold.settle(at(0), spent(1, 1)).expect("open");
    assert!(gate.reserve(0, small()).is_ok());
}

/// Checks that a request waits in the queue of the scope that is full. Another scope
/// without a queue must not refuse it.
#[test]
fn scope_with_room_ignores_its_queue_limit() {
    let limits = |concurrent, queued| PlanLimits {
        concurrent: Some(concurrent),
        queued: Some(queued),
        ..PlanLimits::default()
    };
    let gate = Gate::new(vec![]);
    let ask = |number, name| {
        let scopes = [scoped(key(name), limits(1, 0)), scoped(tenant("acme"), limits(2, 1))];
        gate.admission.reserve(at(0), utc(0), request(number, 0, &scopes, small()))
    };
    let refused = |number, name| match ask(number, name) {
        Err(ReserveError::Refused(refusal)) => (refusal.limit, refusal.scope.clone()),
        other => panic!("{other:?}"),
    };
    let a1 = ask(1, "a").expect("a place");
    assert_eq!(refused(2, "a"), (Limit::Concurrent, key("a")));
    let b1 = ask(3, "b").expect("a place");
    let c1 = ask(4, "c").expect("a place to wait");
    assert_eq!(
        [&a1, &b1, &c1].map(tollgate_admission::Hold::state),
        [HoldState::Running, HoldState::Running, HoldState::Queued]
    );
    assert_eq!(refused(5, "d"), (Limit::Queued, tenant("acme")));
    assert_eq!(a1.void(at(0)).expect("open").promoted, [c1.id().clone()]);
}

/// Checks that a key at its own limit does not block other keys of its tenant.
#[test]
fn waiting_request_blocks_only_its_own_scopes() {
    let of_key = |name| {
        scoped(key(name), PlanLimits { concurrent: Some(1), queued: Some(9), ..Default::default() })
    };
    let of_tenant = scoped(
        tenant("acme"),
        PlanLimits { concurrent: Some(2), queued: Some(9), ..Default::default() },
    );
    let gate = Gate::new(vec![]);
    let ask = |number, name| {
        let scopes = [of_key(name), of_tenant.clone()];
        gate.admission
            .reserve(at(0), utc(0), request(number, 0, &scopes, small()))
            .expect("a place to run or wait")
    };
    let a1 = ask(1, "a");
    let a2 = ask(2, "a");
    let b1 = ask(3, "b");
    let c1 = ask(4, "c");
    assert_eq!(
        [&a1, &a2, &b1, &c1].map(tollgate_admission::Hold::state),
        [HoldState::Running, HoldState::Queued, HoldState::Running, HoldState::Queued]
    );
    // The place of b goes to c. a2 came first, but the only place of its key is taken.
    assert_eq!(b1.void(at(0)).expect("open").promoted, [c1.id().clone()]);
    assert_eq!(a1.void(at(0)).expect("open").promoted, [a2.id().clone()]);
}

#[test]
fn queue_deadline_voids_and_wakes() {
    use std::future::Future;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    struct Count(AtomicUsize);
    impl Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }
    let count = Arc::new(Count(AtomicUsize::new(0)));
    let waker = Waker::from(Arc::clone(&count));
    let mut context = Context::from_waker(&waker);
    let limits = PlanLimits { concurrent: Some(1), queued: Some(9), ..PlanLimits::default() };
    let gate = Gate::of(limits);
    let running = gate.reserve(0, small()).expect("room");
    let soon = gate.reserve(10 * SECOND, small()).expect("waits");
    let late = gate.reserve(0, small()).expect("waits");
    let mut poll = |hold: &tollgate_admission::Hold| {
        std::pin::pin!(hold.queue_ticket()).as_mut().poll(&mut context)
    };
    assert_eq!(poll(&running), Poll::Ready(Ok(())));
    assert_eq!((poll(&soon), poll(&late)), (Poll::Pending, Poll::Pending));
    let swept = gate.admission.expire(at(30 * SECOND));
    assert_eq!(swept.timed_out, [late.id().clone()]);
    assert_eq!(count.0.load(Ordering::SeqCst), 1);
    assert!(matches!(poll(&late), Poll::Ready(Err(_))));
    assert_eq!(poll(&soon), Poll::Pending);
    running.settle(at(31 * SECOND), spent(1, 1)).expect("open");
    assert_eq!(count.0.load(Ordering::SeqCst), 2);
    assert_eq!(poll(&soon), Poll::Ready(Ok(())));
    // The queue deadline has no effect on a running request.
    assert_eq!(gate.admission.expire(at(60 * SECOND)), Default::default());
}

/// Checks that a request is taken from every rate or from none, without an estimate, and
/// that the strongest refusal is returned.
#[test]
fn take_request_takes_every_rate_or_none() {
    let own = scoped(tenant("acme"), requests(Rate { per_minute: 60, burst: 2 }));
    let pool = pool("trial");
    let pool = scoped(pool, requests(Rate::per_minute(6)));
    let open = scoped(
        key("one"),
        PlanLimits { tokens: Some(Rate::per_minute(1)), ..PlanLimits::default() },
    );
    let scopes = vec![open, own, pool];
    let gate = Gate::new(scopes.clone());
    let take = |now| gate.admission.take_request(at(now), &scopes);
    assert_eq!(take(0), Ok(()));
    assert_eq!(take(0), Ok(()));
    let refusal = take(0).expect_err("the tenant's rate is spent");
    let refused = gate.reserve(0, estimate(0, 1, 1)).expect_err("so a hold is refused too");
    assert_eq!(refusal.scope, tenant("acme"));
    assert_eq!(
        (refusal.limit, refusal.value, refusal.retry_after, refusal.permanent),
        (refused.limit, refused.value, refused.retry_after, refused.permanent)
    );
    assert_eq!(refusal.figures.requests, refused.figures.requests);
    for _ in 0..100 {
        let refusal = take(SECOND - 1).expect_err("still spent");
        assert_eq!(refusal.retry_after, Some(Duration::from_nanos(1)));
    }
    // The refusals took nothing of the pool: four of its six requests are left, and a
    // tenth of a request has come back each second.
    for now in [SECOND, 2 * SECOND, 3 * SECOND, 4 * SECOND] {
        assert_eq!(take(now), Ok(()));
    }
    let refusal = take(5 * SECOND).expect_err("the pool's rate is spent");
    assert_eq!(refusal.scope.kind(), "pool");
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(5)));
    // A scope without a request rate is not remembered.
    assert_eq!(gate.admission.status().scopes, 3, "the refused hold looked at all three");
    let fresh = Gate::new(scopes.clone());
    assert_eq!(fresh.admission.take_request(at(0), &scopes), Ok(()));
    assert_eq!(fresh.admission.status().scopes, 2);
    // A plan that allows no request refuses the first one.
    let closed = [scoped(tenant("none"), requests(Rate { per_minute: 60, burst: 0 }))];
    let refusal = fresh.admission.take_request(at(0), &closed).expect_err("never");
    assert!(refusal.permanent, "{refusal:?}");
}

/// Checks that a hold does not count a request again, that a void does not return it, and
/// that the wait after another limit's refusal includes the wait for the next request.
#[test]
fn counted_request_stays_counted() {
    let limits = PlanLimits {
        tokens: Some(Rate { per_minute: 600, burst: 100 }),
        ..requests(Rate { per_minute: 6, burst: 2 })
    };
    let gate = Gate::of(limits);
    let take = |now| gate.admission.take_request(at(now), &gate.scopes);
    let reserve = |number, tokens| {
        let mut reserve = request(number, 0, &gate.scopes, estimate(tokens, 1, 1));
        reserve.counted = 1;
        gate.admission.reserve(at(0), utc(0), reserve)
    };
    assert_eq!(take(0), Ok(()));
    let hold = reserve(1, 60).expect("room");
    let left = |hold: &tollgate_admission::Hold| hold.figures().requests.map(|rate| rate.remaining);
    assert_eq!(left(&hold), Some(1), "counted once");
    hold.void(at(0)).expect("open");
    let hold = reserve(2, 60).expect("the tokens came back");
    assert_eq!(left(&hold), Some(1), "the request did not");
    assert_eq!(take(0), Ok(()));
    let Err(ReserveError::Refused(refusal)) = reserve(3, 60) else { panic!("40 are left") };
    assert_eq!(refusal.limit, Limit::Tokens);
    // Two seconds for the tokens, ten for the next request.
    assert_eq!(refusal.retry_after, Some(Duration::from_secs(10)));
    assert_eq!(refusal.figures.requests.map(|rate| rate.remaining), Some(0));
    assert!(take(10 * SECOND - 1).is_err());
    assert_eq!(take(10 * SECOND), Ok(()));
    drop(hold);
}

/// Checks that an arriving request holds a place to run or to wait, in every scope or in
/// none, and that the hold takes over that place.
#[test]
fn arriving_request_holds_a_place() {
    let places = |concurrent, queued| PlanLimits {
        concurrent: Some(concurrent),
        queued: Some(queued),
        ..PlanLimits::default()
    };
    let pool = pool("trial");
    let scopes = vec![scoped(tenant("acme"), places(1, 1)), scoped(pool, places(8, 0))];
    let gate = Gate::new(scopes.clone());
    let arrive = || gate.admission.arrive(at(0), &requester("acme"), &scopes);
    let first = arrive().expect("it may run");
    let second = arrive().expect("it may wait");
    let refusal = arrive().expect_err("both places are taken");
    assert_eq!((refusal.limit, refusal.value), (Limit::Queued, 1));
    assert_eq!(refusal.scope, tenant("acme"));
    drop(second);
    let second = arrive().expect("the place came back");
    let reserve = |number, arrival| {
        let request = request(number, 0, &scopes, estimate(0, 1, 1));
        gate.admission.reserve_arrived(at(0), utc(0), request, arrival)
    };
    let running = reserve(1, first).expect("its place was kept");
    assert_eq!(running.state(), HoldState::Running);
    assert!(arrive().is_err(), "a hold keeps the place");
    let waiting = reserve(2, second).expect("its place was kept");
    assert_eq!(waiting.state(), HoldState::Queued);
    running.void(at(1)).expect("open");
    let third = arrive().expect("the request that waited runs now");
    assert!(arrive().is_err());
    // A refused reservation returns the place.
    assert!(matches!(reserve(1, third), Err(ReserveError::AlreadyHeld)));
    drop(arrive().expect("a place"));
    waiting.void(at(2)).expect("open");
    gate.admission.expire(at(HOUR));
    assert_eq!(gate.admission.status().scopes, 0, "no place is left behind");
    // A scope without the limit is never full.
    let open = vec![scoped(tenant("other"), PlanLimits::default())];
    let arrivals: Vec<_> =
        (0..100).map(|_| gate.admission.arrive(at(0), &requester("other"), &open)).collect();
    assert!(arrivals.iter().all(Result::is_ok));
}
