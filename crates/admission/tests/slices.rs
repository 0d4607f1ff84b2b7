//! Several gateways that share the caps of one tenant: each has an admission of its own, and a
//! database of rows gives out the slices.

#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test reports")]

mod common;

use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::num::NonZeroU32;

use tollgate_admission::{
    Admission, AdmissionOptions, CapCall, CapName, Hold, Lacking, Limit, Refusal, ReserveError,
    ScopeLimits,
};
use tollgate_cluster::{Answer, Book, SliceRow};
use tollgate_domain::{
    Budget, ByClass, DeviceClass, DeviceNanos, MonotonicTime, PlanLimits, UnitPrices,
};

use crate::common::{
    DAY, HOUR, SECOND, at, day_cap, estimate, request, scoped, spent, tenant, utc,
};

const CAP: u64 = 1_000;

/// The rows of one database, by cap, first day and gateway.
#[derive(Default)]
struct Rows(RefCell<BTreeMap<(CapName, u32, usize), SliceRow>>);

impl Rows {
    fn answer(&self, home: usize, gateways: u32, call: &CapCall) -> Option<Answer> {
        let mut rows = self.0.borrow_mut();
        let of_cap = rows.iter().filter(|((cap, ..), _)| *cap == call.cap);
        let of_cap: Vec<_> =
            of_cap.map(|((_, first_day, owner), row)| (*first_day, owner, *row)).collect();
        let terms = (call.value, NonZeroU32::new(gateways).unwrap(), true);
        let days = (call.first_day.0, call.previous.0);
        let (book, _) = Book::open(terms, &home, days, &of_cap);
        let key = (call.cap.clone(), call.first_day.0, home);
        rows.entry(key).or_default().ask(&book, &call.ask).ok()
    }

    fn granted(&self, first_day: u32) -> u64 {
        let rows = self.0.borrow();
        rows.iter().filter(|((_, day, _), _)| *day == first_day).map(|(_, row)| row.granted).sum()
    }
}

/// One of several gateways.
struct Member<'r> {
    rows: &'r Rows,
    home: usize,
    gateways: u32,
    admission: Admission,
    scopes: Vec<ScopeLimits>,
    next: u64,
}

impl<'r> Member<'r> {
    fn new(rows: &'r Rows, home: usize, gateways: u32, limits: PlanLimits) -> Self {
        Self::begin(rows, (home, 1), gateways, limits)
    }

    fn begin(
        rows: &'r Rows,
        (home, life): (usize, u64),
        gateways: u32,
        limits: PlanLimits,
    ) -> Self {
        let admission = Admission::new(AdmissionOptions::default());
        admission.share_caps(life);
        let scopes = vec![scoped(tenant("acme"), limits)];
        Self {
            rows,
            home,
            gateways,
            admission,
            scopes,
            next: home as u64 * 1_000_000 + life * 1_000,
        }
    }

    fn all(rows: &'r Rows, gateways: u32, limits: &PlanLimits) -> Vec<Self> {
        let member = |home| {
            let member = Self::new(rows, home as usize, gateways, limits.clone());
            member.admission.settle_earlier_lives();
            member
        };
        (0..gateways).map(member).collect()
    }

    fn deliver(&self, now: MonotonicTime, calls: &[CapCall]) {
        for call in calls {
            if let Some(answer) = self.rows.answer(self.home, self.gateways, call) {
                self.admission.caps_answered(now, [(call, answer)]);
            }
        }
    }

    /// Reserves as the serving path does: asks once, then takes what is there.
    fn reserve(&mut self, now: u64, worst: u64) -> Result<Hold, Box<Refusal>> {
        self.reserve_cost(now, estimate(1, worst, worst))
    }

    fn reserve_cost(
        &mut self,
        now: u64,
        estimate: tollgate_admission::Estimate,
    ) -> Result<Hold, Box<Refusal>> {
        self.next += 1;
        let asked = request(self.next, now, &self.scopes, estimate);
        let reserved = match self.admission.reserve_or_ask(at(now), utc(now), asked, None) {
            Ok(reserved) => reserved,
            Err(Lacking { request, arrival: _, wants, parts: _ }) => {
                self.deliver(at(now), &self.admission.calls_for(utc(now), &wants));
                self.admission.reserve(at(now), utc(now), request)
            }
        };
        reserved.map_err(|error| match error {
            ReserveError::Refused(refusal) => refusal,
            ReserveError::AlreadyHeld => panic!("ids are numbered"),
        })
    }

    fn beat(&self, now: u64, hungry: &[CapName]) {
        let hungry: HashSet<CapName> = hungry.iter().cloned().collect();
        self.deliver(at(now), &self.admission.calls_at_beat(at(now), utc(now), &hungry));
    }
}

fn cap_of_day() -> CapName {
    let (scope, limit) = (tenant("acme"), Limit::DeviceTimePerDay);
    CapName { scope, limit, class: Some(DeviceClass::cpu()) }
}

const TODAY: u32 = (common::TODAY.0 / DAY) as u32;

#[test]
fn slices_share_cap_to_last_unit() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 4, &day_cap(CAP));
    let (mut sum, mut refused) = (0, 0);
    for turn in 0..400_u64 {
        let (now, at_turn) = (turn * SECOND / 10, (turn * 7 % 4) as usize);
        let worst = 1 + turn * 13 % 40;
        match members[at_turn].reserve(now, worst) {
            Ok(hold) => {
                // The last requests get the rest of the cap, which is less than they asked for.
                let cost = hold.budget().expect("a cap").nanos().min(worst);
                hold.settle(at(now), spent(1, cost)).expect("held");
                sum += cost;
            }
            Err(refusal) => {
                assert_eq!(refusal.limit, Limit::DeviceTimePerDay);
                refused += 1;
            }
        }
        assert!(sum <= CAP);
        if turn % 10 == 9 {
            members.iter().for_each(|member| member.beat(now, &[cap_of_day()]));
        }
    }
    assert_eq!(sum, CAP, "nothing of the cap is left over");
    assert!(refused > 100, "{refused}");
    let last = members[0].reserve(50 * SECOND, 5).expect_err("the cap is spent");
    assert!(last.permanent && last.resets.is_some(), "{last:?}");
}

#[test]
fn slice_grows_to_worst_case_of_request() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 2, &day_cap(CAP));
    let small = members[0].reserve(0, 10).expect("room");
    // A slice is there, but it is smaller than the request.
    let large = members[0].reserve(1, 600).expect("room");
    assert_eq!(large.budget(), Some(DeviceNanos(600)), "only the cap cuts an answer short");
    let other = members[1].reserve(2, 900).expect("a part");
    assert!(other.budget() < Some(DeviceNanos(400)), "{:?}", other.budget());
    assert!(rows.granted(TODAY) <= CAP);
    for (hold, cost) in [(small, 10), (large, 0), (other, 0)] {
        hold.settle(at(3), spent(1, cost)).expect("held");
    }
    // What others gave back can be granted.
    members[0].beat(SECOND, &[cap_of_day()]);
    let whole = members[1].reserve(2 * SECOND, 900).expect("room");
    assert_eq!(whole.budget(), Some(DeviceNanos(900)));
}

#[test]
fn slice_refuses_briefly_while_others_hold_rest() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 2, &day_cap(CAP));
    let hold = members[0].reserve(0, CAP).expect("the whole cap");
    let refusal = members[1].reserve(1, 100).expect_err("nothing is left");
    assert_eq!(refusal.retry_after, Some(std::time::Duration::from_secs(1)));
    assert!(!refusal.permanent && refusal.resets.is_none(), "{refusal:?}");
    hold.settle(at(2), spent(1, CAP)).expect("held");
    // The spend is told, so no gateway has anything to give back.
    members[0].beat(10 * SECOND, &[]);
    members[1].beat(10 * SECOND, &[]);
    let refusal = members[1].reserve(20 * SECOND, 100).expect_err("the cap is spent");
    assert!(refusal.permanent && refusal.resets.is_some(), "{refusal:?}");
}

#[test]
fn slice_is_not_asked_for_by_refused_requests() {
    let rows = Rows::default();
    let limits = PlanLimits { largest_job: ByClass::all(DeviceNanos(50)), ..day_cap(CAP) };
    let mut members = Member::all(&rows, 2, &limits);
    let refusal = members[0].reserve(0, 60).expect_err("too large");
    assert_eq!(refusal.limit, Limit::LargestJob);
    assert_eq!(rows.granted(TODAY), 0, "another limit refused, so nothing was asked for");
}

#[test]
fn slice_of_idle_gateway_goes_back() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 2, &day_cap(CAP));
    let hold = members[0].reserve(0, 20).expect("room");
    hold.settle(at(1), spent(1, 20)).expect("held");
    assert!(rows.granted(TODAY) > 20, "more was granted than one request needs");
    (1..60).for_each(|second| members[0].beat(second * SECOND, &[]));
    assert_eq!(rows.granted(TODAY), 20);
}

#[test]
fn slice_of_killed_gateway_waits_for_journals() {
    let rows = Rows::default();
    let mut first = Member::new(&rows, 0, 2, day_cap(CAP));
    first.admission.settle_earlier_lives();
    let _running = first.reserve(0, 700).expect("room");
    let granted = rows.granted(TODAY);
    assert!(granted >= 700);
    drop(first);
    // The next life knows of no spend, because the work is not in the ledger yet.
    let mut second = Member::begin(&rows, (0, 2), 2, day_cap(CAP));
    second.admission.remember_slices(&[cap_of_day()]);
    second.beat(SECOND, &[cap_of_day()]);
    assert_eq!(rows.granted(TODAY), granted, "the first call gives nothing back");
    let hold = second.reserve(2 * SECOND, CAP).expect("the rest of the cap");
    assert_eq!(hold.budget(), Some(DeviceNanos(CAP - granted)));
    hold.settle(at(3 * SECOND), spent(1, 0)).expect("held");
    // The ledger tells what the earlier life has spent.
    let (scope, class) = (tenant("acme"), DeviceClass::cpu());
    let today = tollgate_admission::Period::Day(utc(0).day());
    second.admission.restore_spend(scope, &class, today, DeviceNanos(300));
    second.admission.settle_earlier_lives();
    second.beat(4 * SECOND, &[cap_of_day()]);
    assert_eq!(rows.granted(TODAY), 300);
}

#[test]
fn slice_keeps_room_for_requests_over_midnight() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 2, &day_cap(CAP));
    let late = DAY - SECOND;
    let hold = members[0].reserve(late, 800).expect("room");
    // The other gateway enters the new day first.
    let other = members[1].reserve(DAY + 1, 500).expect("a part");
    assert!(other.budget() <= Some(DeviceNanos(200)), "{:?}", other.budget());
    members[0].beat(DAY + 2, &[]);
    assert!(rows.granted(TODAY + 1) <= CAP);
    hold.settle(at(DAY + 3), spent(1, 800)).expect("held");
    assert_eq!(rows.granted(TODAY + 1), CAP, "the request counts on the day of its end");
}

#[test]
fn slice_kept_over_midnight_is_given_back() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 2, &day_cap(CAP));
    let hold = members[0].reserve(DAY - SECOND, 50).expect("room");
    hold.settle(at(DAY - SECOND), spent(1, 50)).expect("held");
    assert!(rows.granted(TODAY) > 100, "more is kept than was spent");
    members[0].beat(DAY + 1, &[]);
    let whole = members[1].reserve(DAY + 2, CAP).expect("room");
    assert_eq!(whole.budget(), Some(DeviceNanos(CAP)));
}

/// A start knows of slices before it knows the config of their caps.
#[test]
fn slice_that_was_remembered_does_not_refuse() {
    let rows = Rows::default();
    let mut first = Member::new(&rows, 0, 2, day_cap(CAP));
    let _running = first.reserve(0, 10).expect("room");
    let mut second = Member::begin(&rows, (0, 2), 2, day_cap(CAP));
    second.admission.remember_slices(&[cap_of_day()]);
    second.beat(1, &[]);
    second.admission.settle_earlier_lives();
    let hold = second.reserve(2, 900).expect("room");
    assert_eq!(hold.budget(), Some(DeviceNanos(900)));
}

#[test]
fn slices_share_budget() {
    let rows = Rows::default();
    let prices = UnitPrices { device_second: "1".parse().unwrap(), ..UnitPrices::default() };
    let budget = Budget { currency: "EUR".parse().unwrap(), nanos: 1_000 };
    let limits = PlanLimits { budget_per_month: Some(budget), ..PlanLimits::default() };
    let mut members = Member::all(&rows, 3, &limits);
    let mut sum = 0;
    for turn in 0..60_u64 {
        let mut asked = estimate(1, 70, 70);
        asked.money.prices = prices;
        let now = turn * SECOND;
        // A nanosecond costs a nano-unit.
        if let Ok(hold) = members[(turn % 3) as usize].reserve_cost(now, asked) {
            let cost = hold.budget().expect("a budget").nanos().min(70);
            let money = tollgate_domain::ExactAmount::of_nanos(cost);
            let spent = tollgate_admission::Spent { money, ..spent(1, cost) };
            hold.settle(at(now), spent).expect("held");
            sum += cost;
        }
        let name = CapName { scope: tenant("acme"), limit: Limit::BudgetPerMonth, class: None };
        members.iter().for_each(|member| member.beat(now, std::slice::from_ref(&name)));
    }
    assert!((999..=1_000).contains(&sum), "{sum}");
}

#[test]
fn limit_states_show_rest_of_all_gateways() {
    let rows = Rows::default();
    let mut members = Member::all(&rows, 2, &day_cap(CAP));
    let hold = members[0].reserve(0, 100).expect("room");
    assert_eq!(hold.figures().day.expect("a cap").remaining, DeviceNanos(900));
    hold.settle(at(1), spent(1, 100)).expect("held");
    members[1].reserve(HOUR, 1).expect("room").settle(at(HOUR), spent(1, 1)).expect("held");
    let moment = tollgate_admission::Moment::new(at(HOUR), utc(HOUR));
    let classes = [DeviceClass::cpu()];
    let states = members[1].admission.limit_states(moment, &members[1].scopes, &classes);
    let [state] = states.as_slice() else { panic!("{states:?}") };
    assert!(state.remaining <= 899 && state.remaining > 100, "{state:?}");
}
