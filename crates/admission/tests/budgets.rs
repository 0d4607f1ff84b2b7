//! Budgets: caps in money, over all device classes.

#![allow(clippy::expect_used, reason = "a panic is how a test reports")]

mod common;

use std::sync::Arc;

use common::*;
use tollgate_admission::{
    Estimate, Limit, LimitChange, Moment, MoneyEstimate, NewLimits, PastCost, ReserveError, Scope,
    Spent,
};
use tollgate_domain::{
    Budget, DeviceClass, DeviceNanos, ExactAmount, PlanLimits, Price, PriceFactor, UnitPrices,
};

/// A budget in nano-units.
fn budget(nanos: u64) -> PlanLimits {
    let currency = "EUR".parse().expect("a currency");
    PlanLimits { budget_per_month: Some(Budget { currency, nanos }), ..PlanLimits::default() }
}

fn prices(second: &str, prompt: &str, output: &str) -> UnitPrices {
    let price = |text: &str| text.parse::<Price>().expect("a price");
    UnitPrices {
        device_second: price(second),
        million_prompt_tokens: price(prompt),
        million_completion_tokens: price(output),
        factor: PriceFactor::ONE,
    }
}

/// A request of up to `worst` nanoseconds, each of which costs a nano-unit.
fn costing(worst: u64) -> Estimate {
    let money = MoneyEstimate { prices: prices("1", "0", "0"), ..MoneyEstimate::default() };
    Estimate { money, ..estimate(1, 1, worst) }
}

fn spent_money(nanos: u64) -> Spent {
    Spent { money: ExactAmount::of_nanos(nanos), ..spent(1, nanos) }
}

#[test]
fn budget_held_by_lines_is_not_spent() {
    let gate = Gate::of(budget(100));
    let line = |number| {
        let mut line = request(number, 0, &gate.scopes, costing(60));
        (line.is_line, line.estimate.least) = (true, DeviceNanos(60));
        gate.admission.reserve(at(0), utc(0), line)
    };
    let first = line(1).expect("60 of 100");
    let Err(ReserveError::Refused(held)) = line(2) else { panic!("40 are left") };
    assert_eq!((held.limit, held.resets), (Limit::BudgetPerMonth, None));
    assert_eq!((held.retry_after, held.permanent), (None, false));
    first.settle(at(0), spent_money(50)).expect("open");
    let Err(ReserveError::Refused(spent)) = line(3) else { panic!("50 are left") };
    assert_eq!((spent.resets, spent.permanent), (Some(utc(11 * DAY)), true));
}

#[test]
fn budget_holds_worst_case_or_the_rest() {
    let gate = Gate::of(budget(100));
    let first = gate.reserve(0, costing(70)).expect("70 of 100");
    assert_eq!((first.budget(), first.most_output()), (Some(DeviceNanos(70)), None));
    let second = gate.reserve(0, costing(70)).expect("30 remain");
    // A part is rounded down, so that the cost stays within what is left.
    assert!(matches!(second.budget(), Some(DeviceNanos(29..=30))), "{:?}", second.budget());
    let third = gate.reserve(0, costing(70));
    let left = third.as_ref().map(|hold| hold.budget().expect("a budget").nanos());
    assert!(left.is_err() || left == Ok(1), "at most one nanosecond remains");
    drop(third.map(|hold| hold.settle(at(0), spent_money(1))));
    second.settle(at(0), spent_money(29)).expect("open");
    let refusal = gate.reserve(0, costing(3)).expect_err("at most nothing is left");
    assert_eq!((refusal.limit, refusal.value), (Limit::BudgetPerMonth, 100));
    assert_eq!((refusal.class, refusal.permanent), (None, true));
    // 2026-11-20 plus eleven days is the first of December.
    assert_eq!(refusal.resets, Some(utc(11 * DAY)));
    first.settle(at(0), spent_money(20)).expect("open"); // 50 come back
    let fourth = gate.reserve(0, costing(50)).expect("50 remain");
    assert_eq!(fourth.budget(), Some(DeviceNanos(50)));
    let hopeless = Estimate { least: DeviceNanos(101), ..costing(200) };
    let refusal = gate.reserve(0, hopeless).expect_err("no month is long enough");
    assert_eq!((refusal.asked, refusal.largest, refusal.resets), (101, 100, None));
}

#[test]
fn budget_bounds_tokens_with_a_price() {
    let gate = Gate::of(budget(1_000));
    let money = MoneyEstimate {
        prices: prices("0", "0.000001", "0.00001"), // 1 and 10 nano-units a thousand tokens
        prompt_tokens: 100_000,
        least_output: 1,
        most_output: 1_000_000,
    };
    let asked = Estimate { money, ..estimate(1, 1, 50) };
    let hold = gate.reserve(0, asked).expect("100 for the prompt, 900 for the answer");
    assert_eq!(hold.budget(), Some(DeviceNanos(50)), "time has no price");
    let most = hold.most_output().expect("less than asked");
    assert!((89_000..=90_000).contains(&most), "{most}");
    let too_long = MoneyEstimate { prompt_tokens: 2_000_000, ..money };
    let refusal = gate.reserve(0, Estimate { money: too_long, ..asked }).expect_err("2,000");
    assert_eq!((refusal.largest, refusal.resets), (1_000, None));
}

#[test]
fn budget_counts_classes_together() {
    let gate = Gate::of(budget(100));
    let on_cpu = gate.reserve(0, costing(60)).expect("60 of 100");
    on_cpu.settle(at(0), spent_money(60)).expect("open");
    let mut on_gpu = request(1_000, 0, &gate.scopes, costing(90));
    on_gpu.class = DeviceClass::new("h200").expect("a class");
    let hold = gate.admission.reserve(at(0), utc(0), on_gpu).expect("40 remain");
    assert!(hold.budget() <= Some(DeviceNanos(40)), "{:?}", hold.budget());
}

#[test]
fn budget_refuses_free_request_when_spent() {
    let gate = Gate::of(budget(10));
    gate.reserve(0, costing(10)).expect("all").settle(at(0), spent_money(10)).expect("open");
    let refusal = gate.reserve(0, estimate(1, 1, 1)).expect_err("nothing is left");
    assert_eq!((refusal.limit, refusal.remaining), (Limit::BudgetPerMonth, 0));
}

#[test]
fn money_below_a_nano_unit_adds_up() {
    let gate = Gate::of(budget(1));
    let third = ExactAmount(333_333_333);
    for _ in 0..3 {
        let hold = gate.reserve(0, estimate(1, 1, 1)).expect("less than one is spent");
        hold.settle(at(0), Spent { money: third, ..spent(1, 1) }).expect("open");
    }
    let hold = gate.reserve(0, estimate(1, 1, 1)).expect("a billionth remains");
    hold.settle(at(0), Spent { money: ExactAmount(1), ..spent(1, 1) }).expect("open");
    assert!(gate.reserve(0, estimate(1, 1, 1)).is_err());
}

#[test]
fn money_belongs_to_month_of_its_end() {
    let gate = Gate::of(budget(100));
    let late = gate.reserve(11 * DAY - 1, costing(80)).expect("November's");
    let fresh = gate.reserve(11 * DAY, costing(20)).expect("what is not held of December");
    assert_eq!(fresh.budget(), Some(DeviceNanos(20)));
    late.settle(at(11 * DAY), spent_money(50)).expect("open");
    fresh.void(at(11 * DAY)).expect("open");
    gate.admission.expire(at(11 * DAY + HOUR)); // what was spent is not idle
    let next = gate.reserve(11 * DAY + HOUR, costing(50)).expect("50 of December");
    assert_eq!(next.budget(), Some(DeviceNanos(50)));
    assert!(gate.reserve(11 * DAY + HOUR, costing(1)).is_err());
}

#[test]
fn restored_money_counts_in_its_month_only() {
    let gate = Gate::of(budget(100));
    let month = utc(0).day().month();
    for part in [30, 40] {
        gate.admission.restore_cost(tenant("acme"), month, ExactAmount::of_nanos(part));
    }
    let moment = Moment::new(at(0), utc(0));
    let states = gate.admission.limit_states(moment, &gate.scopes, &[]);
    let [state] = &states[..] else { panic!("{states:?}") };
    assert_eq!((state.value, state.used, state.remaining), (100, 70, 30));
    assert_eq!(state.currency.map(|currency| currency.to_string()).as_deref(), Some("EUR"));
    assert!(gate.reserve(0, costing(30)).expect("30 remain").budget() == Some(DeviceNanos(30)));
    assert!(gate.reserve(0, costing(1)).is_err());
    let december = gate.reserve(11 * DAY, costing(70)).expect("30 are held of 100");
    assert_eq!(december.budget(), Some(DeviceNanos(70)));
}

#[test]
fn budget_begun_by_reload_counts_past_money_once() {
    let gate = Gate::of(PlanLimits::default());
    let open = gate.reserve(0, costing(10)).expect("no limit");
    let month = utc(0).day().month();
    let reload = |revision, old: &PlanLimits, new: &PlanLimits, nanos| {
        let change = LimitChange { old: Some(Arc::new(old.clone())), new: Arc::new(new.clone()) };
        let limits_of = |scope: &Scope| (*scope == tenant("acme")).then(|| change.clone());
        let cost = ExactAmount::of_nanos(nanos);
        let costs = match change.begins_budget() {
            true => vec![PastCost { scope: tenant("acme"), month, cost }],
            false => Vec::new(),
        };
        let limits = NewLimits { revision, limits_of: &limits_of, spent: Vec::new(), costs };
        gate.admission.adopt(at(0), &limits);
    };
    let (none, hundred, more) = (PlanLimits::default(), budget(100), budget(200));
    reload(1, &none, &hundred, 60);
    reload(2, &hundred, &more, 60);
    open.settle(at(0), spent_money(15)).expect("open");
    let limited = tollgate_admission::ScopeLimits { revision: 2, ..scoped(tenant("acme"), more) };
    let asked = request(1_000, 0, &[limited], costing(300));
    let hold = match gate.admission.reserve(at(0), utc(0), asked) {
        Ok(hold) => hold,
        Err(ReserveError::Refused(refusal)) => panic!("{refusal:?}"),
        Err(ReserveError::AlreadyHeld) => panic!("ids are numbered"),
    };
    let left = hold.budget().expect("a budget").nanos();
    assert!((124..=125).contains(&left), "200 less 60 and 15, not {left}");
}

/// Returns the thresholds that were reached since the last call.
fn reached(gate: &Gate, now: u64) -> Vec<(Limit, u8)> {
    let swept = gate.admission.expire(at(now));
    swept.reached.into_iter().map(|reached| (reached.limit, reached.percent)).collect()
}

#[test]
fn thresholds_are_reported_once_a_period() {
    let gate = Gate::of(both(100, 1_000));
    let (day, month) = (Limit::DeviceTimePerDay, Limit::BudgetPerMonth);
    let spend = |now: u64, amount: u64| {
        let hold = gate.reserve(now, costing(amount)).expect("enough is left");
        hold.settle(at(now), spent_money(amount)).expect("open");
        reached(&gate, now)
    };
    assert_eq!(spend(0, 40), []);
    assert_eq!(spend(0, 10), [(day, 50)]);
    assert_eq!(spend(0, 40), [(day, 80)]);
    assert_eq!(spend(0, 10), [(day, 100)]);
    assert!(gate.reserve(0, costing(1)).is_err());
    assert_eq!(reached(&gate, 0), [], "reported already");
    // The day begins again, and the month goes on.
    assert_eq!(spend(DAY, 90), [(day, 80)]);
    let large = Estimate { least: DeviceNanos(11), ..costing(20) };
    assert!(gate.reserve(DAY, large).is_err());
    assert_eq!(reached(&gate, DAY), [(day, 100)], "refused when nearly spent");
    assert!(gate.reserve(DAY, large).is_err());
    assert_eq!(reached(&gate, DAY), []);
    for number in 2..5 {
        assert_eq!(spend(number * DAY, 99), [(day, 80)]);
    }
    assert_eq!(spend(5 * DAY, 99), [(day, 80), (month, 50)]);
}

/// A cap on the day's device time and a budget, in nanoseconds and nano-units.
fn both(day: u64, month: u64) -> PlanLimits {
    PlanLimits { budget_per_month: budget(month).budget_per_month, ..day_cap(day) }
}

#[test]
fn restored_spend_reports_no_threshold() {
    let gate = Gate::of(budget(100));
    let month = utc(0).day().month();
    gate.admission.restore_cost(tenant("acme"), month, ExactAmount::of_nanos(60));
    let hold = gate.reserve(0, costing(10)).expect("40 remain");
    hold.settle(at(0), spent_money(10)).expect("open");
    assert_eq!(reached(&gate, 0), [], "half was spent before the start");
    let hold = gate.reserve(0, costing(10)).expect("30 remain");
    hold.settle(at(0), spent_money(10)).expect("open");
    assert_eq!(reached(&gate, 0), [(Limit::BudgetPerMonth, 80)]);
}
