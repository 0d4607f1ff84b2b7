//! Money: prices of device time and tokens. Amounts are whole nano-units of one currency.
//! Sums are exact, and only statements and reports round them. The ledger stores no
//! money: prices meet usage when a statement is made.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use crate::{ByClass, DeviceClass, ModelName, PlanName, PriceListName, Tier, UtcDay};

/// Nano-units in one unit of a currency.
const NANO: u128 = 1_000_000_000;
/// Nanoseconds of a second, and the factor that brings prices per million tokens to the
/// same denominator.
const SECOND: u128 = 1_000_000_000;
const SECOND_PER_MILLION: u128 = 1_000;
/// Digits after the decimal point.
const DIGITS: usize = 9;

/// A price in nano-units of the currency. The text form is a decimal with at most nine
/// digits after the point, so it is exact.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Price(u64);

/// A sum of money in nano-units of the currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(pub u128);

/// A sum of money in billionths of a nano-unit. Every cost without a factor is a whole number
/// of them, so these costs add up without rounding.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExactAmount(pub u128);

/// The money that may be spent in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Currency of the amount.
    pub currency: Currency,
    /// Amount in nano-units, at most [`Budget::LARGEST`] units.
    pub nanos: u64,
}

/// A text that is not a valid price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a decimal such as 0.0025, from 0 to {} with at most nine digits after the point",
    Price::LARGEST
)]
pub struct InvalidPrice;

/// A factor of an amount in billionths: more than 0, and at most 1. The text form is a
/// decimal with at most nine digits after the point, so it is exact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PriceFactor(u64);

/// A text that is not a valid factor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a decimal such as 0.5, more than 0 and at most 1 with at most nine digits after the point"
)]
pub struct InvalidPriceFactor;

/// A currency code of three capital letters, as in ISO 4217.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Currency([u8; 3]);

/// A text that is not a valid currency code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a currency of three capital letters such as EUR")]
pub struct InvalidCurrency;

/// The usage of a tenant that has a price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Priced {
    /// Reference cost, ns.
    pub reference_ns: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Generated tokens.
    pub completion_tokens: u64,
}

/// The prices on one class of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitPrices {
    /// Price of a second of device time, by reference cost.
    pub device_second: Price,
    /// Price of a million prompt tokens.
    pub million_prompt_tokens: Price,
    /// Price of a million generated tokens.
    pub million_completion_tokens: Price,
    /// Factor of the whole amount.
    pub factor: PriceFactor,
}

/// A price list: in force from its first day until the next list of the same plan and
/// model starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceList {
    /// Name of the list.
    pub name: PriceListName,
    /// Plan that the list applies to; `None` for all plans.
    pub plan: Option<PlanName>,
    /// Model that the list applies to; `None` for all models.
    pub model: Option<ModelName>,
    /// First day on which the list is in force.
    pub from: UtcDay,
    /// Price of a second of device time. Device time is free if no class has a price.
    pub device_second: ByClass<Price>,
    /// Price of a million prompt tokens.
    pub million_prompt_tokens: Price,
    /// Price of a million generated tokens.
    pub million_completion_tokens: Price,
    /// Factor of amounts of the batch tier.
    pub batch: PriceFactor,
}

/// All price lists. No two lists of one plan and model start on the same day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceBook {
    /// Currency of all prices.
    pub currency: Currency,
    /// Price lists, in no particular order.
    pub lists: Vec<PriceList>,
}

/// A span of days on which one list is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PricePeriod<'a> {
    /// First day of the span.
    pub from: UtcDay,
    /// Last day of the span.
    pub to: UtcDay,
    /// List in force.
    pub list: &'a PriceList,
}

impl Price {
    /// Largest price, in whole units of the currency.
    pub const LARGEST: u64 = 1_000_000;

    /// Returns the price in nano-units.
    pub fn nanos(self) -> u64 {
        self.0
    }
}

impl FromStr for Price {
    type Err = InvalidPrice;

    fn from_str(text: &str) -> Result<Self, InvalidPrice> {
        nanos(text, Self::LARGEST).map(Self).ok_or(InvalidPrice)
    }
}

impl PriceFactor {
    /// The factor that changes no amount.
    pub const ONE: Self = Self(NANO as u64);

    /// Returns this part of `amount`, rounded down.
    fn of(self, amount: ExactAmount) -> ExactAmount {
        let factor = u128::from(self.0);
        // In two steps, because the product of an amount and a factor may need more bits.
        let (whole, rest) = (amount.0 / NANO, amount.0 % NANO);
        ExactAmount(whole * factor + rest * factor / NANO)
    }
}

impl Default for PriceFactor {
    fn default() -> Self {
        Self::ONE
    }
}

impl FromStr for PriceFactor {
    type Err = InvalidPriceFactor;

    fn from_str(text: &str) -> Result<Self, InvalidPriceFactor> {
        nanos(text, 1).filter(|nanos| *nanos > 0).map(Self).ok_or(InvalidPriceFactor)
    }
}

/// Formats the factor without trailing zeros.
impl fmt::Display for PriceFactor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Price(self.0))
    }
}

impl Budget {
    /// Largest budget, in whole units of the currency.
    pub const LARGEST: u64 = 1_000_000_000;

    /// Reads an amount in decimals, as prices are written. Returns `None` if the amount is
    /// no such decimal or zero.
    pub fn new(currency: Currency, amount: &str) -> Option<Self> {
        let nanos = nanos(amount, Self::LARGEST).filter(|nanos| *nanos > 0)?;
        Some(Self { currency, nanos })
    }
}

/// Formats the amount without trailing zeros.
impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", Price(self.nanos))
    }
}

/// Returns the nano-units of a decimal of at most `largest` whole units.
fn nanos(text: &str, largest: u64) -> Option<u64> {
    let (whole, fraction) = match text.split_once('.') {
        // A trailing point is rejected, so that every amount has one form to write.
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (text, ""),
    };
    // `parse` also accepts a plus sign, which amounts must not have.
    let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty()
        // Bounds the digits before they are parsed, so that parsing cannot overflow.
        || whole.len() > 10
        || fraction.len() > DIGITS
        || !digits(whole)
        || !digits(fraction)
    {
        return None;
    }
    // At most nineteen digits, which fit a u64.
    let nanos = format!("{whole}{fraction:0<DIGITS$}").parse::<u64>().ok()?;
    (u128::from(nanos) <= u128::from(largest) * NANO).then_some(nanos)
}

/// Formats the price without trailing zeros.
impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = Amount(self.0.into()).to_string();
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// Formats the amount with all nine digits after the point, so that columns align.
impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0 / NANO, self.0 % NANO)
    }
}

impl ExactAmount {
    /// No money.
    pub const ZERO: Self = Self(0);

    /// Returns `nanos` nano-units.
    pub fn of_nanos(nanos: u64) -> Self {
        Self(u128::from(nanos) * SECOND)
    }

    /// Returns whole nano-units, rounded down.
    pub fn floor(self) -> Amount {
        Amount(self.0 / SECOND)
    }

    /// Returns whole nano-units, rounded up.
    pub fn ceil(self) -> Amount {
        Amount(self.0.div_ceil(SECOND))
    }

    /// Adds an amount. The largest sum stands for every larger one.
    pub fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Subtracts an amount. Nothing is less than zero.
    pub fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl std::iter::Sum for Amount {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        Self(amounts.map(|amount| amount.0).sum())
    }
}

impl FromStr for Currency {
    type Err = InvalidCurrency;

    fn from_str(text: &str) -> Result<Self, InvalidCurrency> {
        match text.as_bytes() {
            [a, b, c] if [a, b, c].iter().all(|byte| byte.is_ascii_uppercase()) => {
                Ok(Self([*a, *b, *c]))
            }
            _ => Err(InvalidCurrency),
        }
    }
}

impl fmt::Display for Currency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{}", char::from(*byte)))
    }
}

impl UnitPrices {
    /// Returns the cost of `used`, rounded down to a whole nano-unit.
    pub fn cost(&self, used: Priced) -> Amount {
        // The parts are not rounded, because that would lose up to two nano-units. The factor
        // rounds down first, and rounding down twice is the same as once.
        self.exact_cost(used).floor()
    }

    /// Returns the cost of `used`. The costs of parts sum to the cost of the whole. With a
    /// factor below 1, the sum may be less than the cost of the whole, by less than a
    /// billionth of a nano-unit for each part.
    pub fn exact_cost(&self, used: Priced) -> ExactAmount {
        // No overflow: a price is below 2^50, and a count below 2^64.
        let times = |count: u64, price: Price| u128::from(count) * u128::from(price.0);
        let tokens = times(used.prompt_tokens, self.million_prompt_tokens)
            + times(used.completion_tokens, self.million_completion_tokens);
        let time = times(used.reference_ns, self.device_second);
        self.factor.of(ExactAmount(time + tokens * SECOND_PER_MILLION))
    }
}

impl PriceList {
    /// Returns the prices of `tier` on devices of `class`, or `None` if other classes have a price
    /// for device time and this class has none. Such a gap is a mistake in config; the time
    /// must not be free by accident. The synthetic class, which computes nothing, is free
    /// unless the list names it.
    pub fn on(&self, class: &DeviceClass, tier: Tier) -> Option<UnitPrices> {
        let factor = match tier {
            Tier::Interactive => PriceFactor::ONE,
            Tier::Batch => self.batch,
        };
        if *class == DeviceClass::synthetic() && !self.device_second.classes.contains_key(class) {
            return Some(UnitPrices { factor, ..UnitPrices::default() });
        }
        let untimed = self.device_second.default.is_none() && self.device_second.classes.is_empty();
        let device_second = match self.device_second.limit(class) {
            Some(price) => price,
            None if untimed => Price::default(),
            None => return None,
        };
        Some(UnitPrices {
            device_second,
            million_prompt_tokens: self.million_prompt_tokens,
            million_completion_tokens: self.million_completion_tokens,
            factor,
        })
    }
}

impl PriceBook {
    /// Returns the list that prices a day's usage of `model` under `plan`: the list of both,
    /// otherwise of the plan, otherwise of the model, otherwise the list for all.
    pub fn in_force(
        &self,
        plan: &PlanName,
        model: Option<&ModelName>,
        day: UtcDay,
    ) -> Option<&PriceList> {
        // A more specific list replaces a general one, even a later one.
        let of_model = |plan| model.and_then(|model| self.latest(plan, Some(model), day));
        of_model(Some(plan))
            .or_else(|| self.latest(Some(plan), None, day))
            .or_else(|| of_model(None))
            .or_else(|| self.latest(None, None, day))
    }

    fn latest(
        &self,
        plan: Option<&PlanName>,
        model: Option<&ModelName>,
        day: UtcDay,
    ) -> Option<&PriceList> {
        let begun = self.lists.iter().filter(|list| list.from <= day);
        let same = |list: &&PriceList| list.plan.as_ref() == plan && list.model.as_ref() == model;
        // No two of these lists begin on one day, so the latest one is always the same.
        begun.filter(same).max_by_key(|list| list.from)
    }

    /// Returns the models that a list names.
    pub fn models(&self) -> BTreeSet<&ModelName> {
        self.lists.iter().filter_map(|list| list.model.as_ref()).collect()
    }

    /// Returns the days from `from` to `to` by the list in force for `model`, in order. Days
    /// without a list are left out. `None` stands for a model that no list names.
    pub fn periods(
        &self,
        plan: &PlanName,
        model: Option<&ModelName>,
        (from, to): (UtcDay, UtcDay),
    ) -> Vec<PricePeriod<'_>> {
        let mut periods: Vec<PricePeriod<'_>> = Vec::new();
        for day in (from.0..=to.0).map(UtcDay) {
            let Some(list) = self.in_force(plan, model, day) else { continue };
            match periods.last_mut() {
                // Consecutive days of one list form one period.
                Some(last) if last.list.name == list.name => last.to = day,
                _ => periods.push(PricePeriod { from: day, to: day, list }),
            }
        }
        periods
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn price(text: &str) -> Price {
        text.parse().expect(text)
    }

    #[test]
    fn prices_are_exact_decimals() {
        for (text, nanos, shown) in [
            ("0", 0, "0"),
            ("0.000000001", 1, "0.000000001"),
            ("0.0025", 2_500_000, "0.0025"),
            ("12", 12_000_000_000, "12"),
            ("12.50", 12_500_000_000, "12.5"),
            ("1000000", 1_000_000_000_000_000, "1000000"),
        ] {
            assert_eq!(price(text).nanos(), nanos, "{text}");
            assert_eq!(price(text).to_string(), shown, "{text}");
        }
        for text in [
            "",
            ".",
            "1.",
            ".5",
            "-1",
            "+1",
            "1e3",
            "0.0000000001",
            "1000000.000000001",
            "9999999",
            "1 ",
            "1,5",
            "٣",
        ] {
            assert_eq!(text.parse::<Price>(), Err(InvalidPrice), "{text:?}");
        }
        assert_eq!(Amount(1).to_string(), "0.000000001");
    }

    #[test]
    fn budget_is_positive_exact_decimal() {
        let eur = "EUR".parse().expect("one");
        let budget = |text: &str| Budget::new(eur, text);
        for (text, nanos, shown) in [
            ("500", 500_000_000_000, "500"),
            ("0.000000001", 1, "0.000000001"),
            ("1000000000", 1_000_000_000_000_000_000, "1000000000"),
        ] {
            let budget = budget(text).expect(text);
            assert_eq!((budget.nanos, budget.to_string().as_str()), (nanos, shown));
        }
        for text in ["", "0", "0.0", "-1", "1e3", "1000000000.000000001", "9999999999", "1."] {
            assert_eq!(budget(text), None, "{text:?}");
        }
    }

    #[test]
    fn currency_is_three_capital_letters() {
        assert_eq!("EUR".parse::<Currency>().expect("one").to_string(), "EUR");
        for text in ["", "eur", "EU", "EURO", "E R"] {
            assert_eq!(text.parse::<Currency>(), Err(InvalidCurrency), "{text:?}");
        }
    }

    fn list(name: &str, from: &str, plan: Option<&str>, model: Option<&str>) -> PriceList {
        PriceList {
            name: PriceListName::new(name).expect("a name"),
            plan: plan.map(|name| PlanName::new(name).expect("a name")),
            model: model.map(|name| ModelName::new(name).expect("a name")),
            from: from.parse().expect("a day"),
            device_second: ByClass::default(),
            million_prompt_tokens: price("1"),
            million_completion_tokens: Price::default(),
            batch: PriceFactor::ONE,
        }
    }

    #[test]
    fn most_specific_price_list_wins() {
        let book = PriceBook {
            currency: "EUR".parse().expect("one"),
            lists: vec![
                list("winter", "2026-11-20", None, None),
                list("summer", "2026-11-03", None, None),
                list("gold", "2026-11-10", Some("gold"), None),
                list("large", "2026-11-12", None, Some("large")),
                list("gold-large", "2026-11-12", Some("gold"), Some("large")),
            ],
        };
        let month: crate::UtcMonth = "2026-11".parse().expect("one");
        let periods = |plan: &str, model: &str| -> Vec<String> {
            let plan = PlanName::new(plan).expect("a name");
            let model = ModelName::new(model).expect("a name");
            let days = (month.first_day(), month.last_day());
            let periods = book.periods(&plan, Some(&model), days);
            periods
                .iter()
                .map(|p| {
                    format!("{} {} {}", p.from.0 - days.0.0 + 1, p.to.0 - days.0.0 + 1, p.list.name)
                })
                .collect()
        };
        assert_eq!(periods("team", "small"), ["3 19 summer", "20 30 winter"]);
        assert_eq!(periods("gold", "small"), ["3 9 summer", "10 30 gold"]);
        assert_eq!(periods("team", "large"), ["3 11 summer", "12 30 large"]);
        assert_eq!(periods("gold", "large"), ["3 9 summer", "10 11 gold", "12 30 gold-large"]);
    }

    #[test]
    fn synthetic_class_is_free_unless_named() {
        let mut list = list("one", "2026-11-01", None, None);
        list.device_second = ByClass::all(price("2"));
        let used =
            Priced { reference_ns: 1_000_000_000, prompt_tokens: 1_000_000, ..Priced::default() };
        let cost = |list: &PriceList, class: &DeviceClass| {
            list.on(class, Tier::Interactive).map(|prices| prices.cost(used).to_string())
        };
        assert_eq!(cost(&list, &DeviceClass::cpu()).as_deref(), Some("3.000000000"));
        assert_eq!(cost(&list, &DeviceClass::synthetic()).as_deref(), Some("0.000000000"));
        list.device_second.classes.insert(DeviceClass::synthetic(), price("4"));
        assert_eq!(cost(&list, &DeviceClass::synthetic()).as_deref(), Some("5.000000000"));
    }

    #[test]
    fn cost_rounds_down_once() {
        let prices = UnitPrices {
            device_second: price("0.000000001"),
            million_prompt_tokens: price("0.000000001"),
            million_completion_tokens: price("0.5"),
            factor: PriceFactor::ONE,
        };
        let cost = |reference_ns, prompt_tokens, completion_tokens| {
            prices.cost(Priced { reference_ns, prompt_tokens, completion_tokens }).0
        };
        assert_eq!(cost(999_999_999, 0, 0), 0, "a part of a nano-unit");
        assert_eq!(cost(1_000_000_000, 0, 0), 1);
        assert_eq!(cost(500_000_000, 500_000, 0), 1, "two halves are one: summed, then rounded");
        assert_eq!(cost(0, 0, 3), 1_500);
        // The largest possible figures do not overflow.
        let largest = UnitPrices {
            device_second: price("1000000"),
            million_prompt_tokens: price("1000000"),
            million_completion_tokens: price("1000000"),
            factor: "0.999999999".parse().expect("one"),
        };
        let all = i64::MAX as u64;
        let used = Priced { reference_ns: all, prompt_tokens: all, completion_tokens: all };
        assert!(largest.cost(used).0 > 0);
    }

    #[test]
    fn price_factor_is_exact_part_of_one() {
        let factor = |text: &str| text.parse::<PriceFactor>();
        for (text, nanos, shown) in [
            ("1", 1_000_000_000, "1"),
            ("0.5", 500_000_000, "0.5"),
            ("0.330", 330_000_000, "0.33"),
            ("0.000000001", 1, "0.000000001"),
        ] {
            assert_eq!(factor(text), Ok(PriceFactor(nanos)), "{text}");
            assert_eq!(PriceFactor(nanos).to_string(), shown, "{text}");
        }
        for text in ["", "0", "0.0", "1.000000001", "2", "-0.5", "50%", ".5", "0.0000000001"] {
            assert_eq!(factor(text), Err(InvalidPriceFactor), "{text:?}");
        }
    }

    #[test]
    fn batch_tier_costs_its_factor() {
        let mut list = list("one", "2026-11-01", None, None);
        list.device_second = ByClass::all(price("0.000000003"));
        list.batch = "0.5".parse().expect("one");
        let used = |reference_ns| Priced { reference_ns, ..Priced::default() };
        let cost = |tier, seconds: u64| {
            let prices = list.on(&DeviceClass::cpu(), tier).expect("prices");
            prices.cost(used(seconds * 1_000_000_000)).0
        };
        assert_eq!((cost(Tier::Interactive, 3), cost(Tier::Batch, 3)), (9, 4), "rounded down");
        assert_eq!(cost(Tier::Batch, 2) + cost(Tier::Batch, 2), 6);
    }

    proptest! {
        /// The factor of an amount rounds down once, whatever the figures are.
        #[test]
        fn factored_cost_rounds_down_once(
            reference_ns in 0..1_u64 << 40,
            second in 0..1_000_000_000_u64,
            factor in 1..=1_000_000_000_u64,
        ) {
            let device_second = Price(second);
            let prices =
                UnitPrices { device_second, factor: PriceFactor(factor), ..UnitPrices::default() };
            let used = Priced { reference_ns, ..Priced::default() };
            let exact = u128::from(reference_ns) * u128::from(second) * u128::from(factor);
            prop_assert_eq!(prices.cost(used).0, exact / (SECOND * NANO));
            prop_assert_eq!(prices.exact_cost(used).0, exact / NANO);
        }

        #[test]
        fn price_survives_its_text_form(nanos in 0..=Price::LARGEST * 1_000_000_000) {
            prop_assert_eq!(Price(nanos).to_string().parse(), Ok(Price(nanos)));
        }
    }
}
