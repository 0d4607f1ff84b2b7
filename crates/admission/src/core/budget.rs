//! Budgets: caps in money. A hold takes the largest cost of the request, or what the
//! tightest budget has left. In the second case the request gets less device time and fewer
//! tokens, so that its cost stays within what is left.

use std::ops::RangeInclusive;

use tollgate_domain::{
    Budget, DeviceNanos, ExactAmount, PlanLimits, Price, UtcDay, UtcMonth, UtcTime,
};

use super::check::first_day_after;
use crate::scope::ScopeState;
use crate::terms::{Estimate, MoneyEstimate};

/// The bounds that caps set to one request, and the money that is held for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bounds {
    /// Largest reference cost; `None` without a cap or a budget.
    pub(crate) time: Option<DeviceNanos>,
    /// Largest number of tokens of all answers; `None` if the request may have as many as it
    /// asks for.
    pub(crate) output: Option<u64>,
    /// Money to hold against every budget: the cost at these bounds.
    pub(crate) money: ExactAmount,
}

impl Bounds {
    /// Returns the bounds of a request. Caps allow it `time`, and budgets have `left`, which
    /// is enough for the least cost of the request.
    pub(super) fn within(
        estimate: &Estimate,
        time: Option<DeviceNanos>,
        left: Option<ExactAmount>,
    ) -> Self {
        let money = &estimate.money;
        let Some(left) = left else { return Self { time, ..Self::default() } };
        let most = (time.unwrap_or(estimate.worst), money.most_output);
        let whole = money.cost(most.0, most.1);
        if whole <= left {
            return Self { time: Some(most.0), output: None, money: whole };
        }
        let least = (estimate.least.min(most.0), money.least_output.min(most.1));
        let base = money.cost(least.0, least.1);
        // The same part of the time and of the tokens beyond the least. The cost grows in
        // proportion, so the parts cost at most what is left.
        let part = Part::of(left.minus(base).minus(ROUNDING), whole.minus(base));
        let MoneyEstimate { prices, .. } = money;
        // Time or tokens without a price need no bound.
        let is_priced = |price: Price| price.nanos() > 0;
        let time = match is_priced(prices.device_second) {
            true => DeviceNanos(part.between(least.0.nanos()..=most.0.nanos())),
            false => most.0,
        };
        let output =
            is_priced(prices.million_completion_tokens).then(|| part.between(least.1..=most.1));
        Self { time: Some(time), output, money: money.cost(time, output.unwrap_or(most.1)) }
    }
}

/// The most by which roundings of costs with a factor can add up.
const ROUNDING: ExactAmount = ExactAmount(2);

/// A part of a whole, in 2^-32, rounded down.
struct Part(u128);

impl Part {
    /// Returns the part that `some` is of `whole`. `some` is less than `whole` and at most a
    /// budget, so the shift does not overflow: the largest budget has 90 bits.
    fn of(some: ExactAmount, whole: ExactAmount) -> Self {
        // `whole` is larger than `some`, so it is not zero.
        Self((some.0 << 32).checked_div(whole.0).unwrap_or(0))
    }

    /// Returns the value at this part of the way through `range`.
    fn between(&self, range: RangeInclusive<u64>) -> u64 {
        let (least, most) = range.into_inner();
        let way = u128::from(most.saturating_sub(least));
        least.saturating_add(u64::try_from((way * self.0) >> 32).unwrap_or(u64::MAX)).min(most)
    }
}

/// The budget of a scope and the rest of it.
pub(super) struct BudgetLeft {
    pub(super) budget: Budget,
    pub(super) remaining: ExactAmount,
    /// The rest if every open hold is given back unused.
    pub(super) without_holds: ExactAmount,
    /// The rest for all gateways together.
    of_all: ExactAmount,
    /// True if the database may have more of the budget later in the month.
    pub(super) may_get_more: bool,
    next: UtcDay,
}

impl BudgetLeft {
    /// Returns the start of the next month, but never a time before `utc`.
    pub(super) fn resets(&self, utc: UtcTime) -> UtcTime {
        self.next.start().max(utc)
    }

    /// Returns what is left in whole nano-units.
    pub(super) fn remaining_nanos(&self) -> u64 {
        u64::try_from(self.remaining.floor().0).unwrap_or(u64::MAX)
    }

    /// Returns what all gateways together have left, in whole nano-units.
    pub(super) fn nanos_of_all(&self) -> u64 {
        u64::try_from(self.of_all.floor().0).unwrap_or(u64::MAX)
    }
}

/// Returns the budget of a scope in this month.
pub(super) fn budget_of(state: &ScopeState, period: (UtcDay, UtcMonth)) -> Option<BudgetLeft> {
    budget(&state.limits, state, period)
}

/// Returns the budget of `limits` in this month. `state` has the spend.
pub(super) fn budget(
    limits: &PlanLimits,
    state: &ScopeState,
    (day, month): (UtcDay, UtcMonth),
) -> Option<BudgetLeft> {
    let budget = limits.budget_per_month?;
    // The state may not have seen the month yet.
    let spend = state.budget.view(month.0);
    let whole = ExactAmount::of_nanos(budget.nanos);
    Some(BudgetLeft {
        budget,
        remaining: spend.remaining(whole),
        without_holds: spend.remaining_without_holds(whole),
        of_all: spend.remaining_of_all(whole),
        may_get_more: spend.may_get_more(),
        next: first_day_after(day, month),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;
    use tollgate_domain::{Amount, PriceFactor, UnitPrices};

    use super::*;

    fn prices(second: &str, prompt: &str, output: &str) -> UnitPrices {
        let price = |text: &str| text.parse().unwrap();
        UnitPrices {
            device_second: price(second),
            million_prompt_tokens: price(prompt),
            million_completion_tokens: price(output),
            factor: PriceFactor::ONE,
        }
    }

    fn estimate(prices: UnitPrices, (least, worst): (u64, u64), output: (u64, u64)) -> Estimate {
        Estimate {
            tokens: 0,
            most_tokens: 0,
            expected: DeviceNanos(least),
            most: DeviceNanos(worst),
            worst: DeviceNanos(worst),
            least: DeviceNanos(least),
            grammar_time: Duration::ZERO,
            money: MoneyEstimate {
                prices,
                prompt_tokens: 100,
                least_output: output.0,
                most_output: output.1,
            },
        }
    }

    #[test]
    fn budget_with_room_holds_the_worst_case() {
        let asked = estimate(prices("1", "0", "1"), (5, 50), (1, 10));
        let whole = asked.money.cost(DeviceNanos(50), 10);
        let bounds = Bounds::within(&asked, None, Some(whole));
        assert_eq!(bounds, Bounds { time: Some(DeviceNanos(50)), output: None, money: whole });
        let without = Bounds::within(&asked, Some(DeviceNanos(9)), None);
        assert_eq!(without, Bounds { time: Some(DeviceNanos(9)), ..Bounds::default() });
    }

    #[test]
    fn unpriced_part_is_not_bounded() {
        let of_time = estimate(prices("1", "0", "0"), (10, 110), (1, 11));
        let bounds = Bounds::within(&of_time, None, Some(of_time.money.cost(DeviceNanos(60), 0)));
        // A rounded part is at most a nanosecond short.
        assert!(matches!(bounds.time, Some(DeviceNanos(59..=60))), "{bounds:?}");
        assert_eq!(bounds.output, None);
        let of_tokens = estimate(prices("0", "1", "1"), (10, 110), (1, 11));
        let left = of_tokens.money.cost(DeviceNanos(0), 6);
        let bounds = Bounds::within(&of_tokens, None, Some(left));
        assert_eq!(bounds.time, Some(DeviceNanos(110)));
        assert!(matches!(bounds.output, Some(5..=6)), "{bounds:?}");
    }

    #[test]
    fn largest_figures_do_not_overflow() {
        let largest = Price::LARGEST.to_string();
        let asked = estimate(prices(&largest, &largest, &largest), (1, u64::MAX), (1, u64::MAX));
        let left = ExactAmount::of_nanos(Budget::LARGEST * 1_000_000_000);
        let bounds = Bounds::within(&asked, None, Some(left));
        assert!(bounds.money <= left, "{bounds:?}");
        assert!(bounds.time >= Some(DeviceNanos(1)), "{bounds:?}");
    }

    proptest! {
        #[test]
        fn bounds_never_cost_more_than_is_left(
            second in 0..=1_000_000_000_u64,
            prompt in 0..=1_000_000_000_u64,
            output in 0..=1_000_000_000_u64,
            time in (0..1_u64 << 30, 0..1_u64 << 50),
            tokens in (0_u64..100, 0_u64..1 << 32),
            part in 0..=1_000_u128,
            factor in 1..=1_000_000_000_u64,
        ) {
            let [second, prompt, output] =
                [second, prompt, output].map(|nanos| Amount(nanos.into()).to_string());
            let factor = Amount(factor.into()).to_string().parse().unwrap();
            let prices = UnitPrices { factor, ..prices(&second, &prompt, &output) };
            let asked =
                estimate(prices, (time.0, time.0 + time.1), (tokens.0, tokens.0 + tokens.1));
            let base = asked.money.cost(asked.least, tokens.0);
            let whole = asked.money.cost(asked.worst, asked.money.most_output);
            let left = base.plus(ExactAmount(whole.minus(base).0 / 1_000 * part));
            let bounds = Bounds::within(&asked, None, Some(left));
            let reached = asked.money.cost(
                bounds.time.unwrap(),
                bounds.output.unwrap_or(asked.money.most_output),
            );
            prop_assert!(reached <= left, "{:?} of {:?}", reached, left);
            prop_assert_eq!(reached, bounds.money);
            prop_assert!(bounds.time.unwrap() >= asked.least);
            prop_assert!(bounds.output.is_none_or(|output| output >= tokens.0));
        }
    }
}
