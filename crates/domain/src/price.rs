//! Money: what device time and tokens cost. Whole nano-units of one currency,
//! exact sums, and one rounding, here and nowhere else. Nothing in the ledger
//! is money: prices meet usage when a statement is made.

use std::fmt;
use std::str::FromStr;

use crate::{ByClass, DeviceClass, PlanName, PriceListName, UtcDay};

/// Nano-units of a currency in one of its units.
const NANO: u128 = 1_000_000_000;
/// Nanoseconds of a second, and what makes a million tokens commensurable.
const SECOND: u128 = 1_000_000_000;
const SECOND_PER_MILLION: u128 = 1_000;
/// Digits after the point.
const DIGITS: usize = 9;

/// A price in nano-units of the currency. Reads and shows as a decimal with at
/// most nine digits after the point, never as a binary fraction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Price(u64);

/// A sum of money in nano-units of the currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Amount(pub u128);

/// A text that is no price.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "not a decimal such as 0.0025, from 0 to {} with at most nine digits after the point",
    Price::LARGEST
)]
pub struct InvalidPrice;

/// Three capital letters, as ISO 4217 has them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Currency([u8; 3]);

/// A text that is no currency.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a currency of three capital letters such as EUR")]
pub struct InvalidCurrency;

/// What a tenant used, as far as it has a price.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Priced {
    /// Reference cost, ns.
    pub reference_ns: u64,
    /// Tokens of prompts.
    pub prompt_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
}

/// The price of each thing that has one, on one class of device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UnitPrices {
    /// A second of device time, by reference cost.
    pub device_second: Price,
    /// A million tokens of prompts.
    pub million_prompt_tokens: Price,
    /// A million tokens generated.
    pub million_completion_tokens: Price,
}

/// Prices from a day on, until the next list of the same plan begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceList {
    /// Its name.
    pub name: PriceListName,
    /// The tenants of one plan only; of all plans where `None`.
    pub plan: Option<PlanName>,
    /// The first day.
    pub from: UtcDay,
    /// A second of device time; nothing where no class has a price.
    pub device_second: ByClass<Price>,
    /// A million tokens of prompts.
    pub million_prompt_tokens: Price,
    /// A million tokens generated.
    pub million_completion_tokens: Price,
}

/// All price lists. No two of one plan begin on the same day.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PriceBook {
    /// Of every price.
    pub currency: Currency,
    /// In no particular order.
    pub lists: Vec<PriceList>,
}

/// Days on which one list is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PricePeriod<'a> {
    /// The first.
    pub from: UtcDay,
    /// The last.
    pub to: UtcDay,
    /// The list.
    pub list: &'a PriceList,
}

impl Price {
    /// Whole units of the largest price.
    pub const LARGEST: u64 = 1_000_000;

    /// Nano-units.
    pub fn nanos(self) -> u64 {
        self.0
    }
}

impl FromStr for Price {
    type Err = InvalidPrice;

    fn from_str(text: &str) -> Result<Self, InvalidPrice> {
        let (whole, fraction) = match text.split_once('.') {
            Some((_, "")) => return Err(InvalidPrice),
            Some(parts) => parts,
            None => (text, ""),
        };
        let digits = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty()
            || whole.len() > 7
            || fraction.len() > DIGITS
            || !digits(whole)
            || !digits(fraction)
        {
            return Err(InvalidPrice);
        }
        // At most sixteen digits: they fit.
        let number = |text: &str| text.parse::<u64>().map_err(|_| InvalidPrice);
        let nanos = number(&format!("{whole}{fraction:0<DIGITS$}"))?;
        if u128::from(nanos) > u128::from(Self::LARGEST) * NANO {
            return Err(InvalidPrice);
        }
        Ok(Self(nanos))
    }
}

/// Without zeros at its end.
impl fmt::Display for Price {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = Amount(self.0.into()).to_string();
        f.write_str(text.trim_end_matches('0').trim_end_matches('.'))
    }
}

/// With all nine digits after the point, so that columns line up.
impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:09}", self.0 / NANO, self.0 % NANO)
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
    /// What `used` costs, exactly, then rounded down to a whole nano-unit: the
    /// only rounding there is. A part of a nano-unit is nobody's debt.
    pub fn cost(&self, used: Priced) -> Amount {
        let times = |count: u64, price: Price| u128::from(count) * u128::from(price.0);
        let tokens = times(used.prompt_tokens, self.million_prompt_tokens)
            + times(used.completion_tokens, self.million_completion_tokens);
        let time = times(used.reference_ns, self.device_second);
        Amount((time + tokens * SECOND_PER_MILLION) / SECOND)
    }
}

impl PriceList {
    /// The prices on devices of `class`; `None` where other classes have a
    /// price and this one has none, which is a mistake and not a gift.
    pub fn on(&self, class: &DeviceClass) -> Option<UnitPrices> {
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
        })
    }
}

impl PriceBook {
    /// The list that prices a day's usage under `plan`: the plan's own, else
    /// the one for all.
    pub fn in_force(&self, plan: &PlanName, day: UtcDay) -> Option<&PriceList> {
        self.latest(Some(plan), day).or_else(|| self.latest(None, day))
    }

    fn latest(&self, plan: Option<&PlanName>, day: UtcDay) -> Option<&PriceList> {
        let begun = self.lists.iter().filter(|list| list.from <= day);
        begun.filter(|list| list.plan.as_ref() == plan).max_by_key(|list| list.from)
    }

    /// The days from `from` to `to` by the list in force, in order; days
    /// without one are left out.
    pub fn periods(&self, plan: &PlanName, from: UtcDay, to: UtcDay) -> Vec<PricePeriod<'_>> {
        let mut periods: Vec<PricePeriod<'_>> = Vec::new();
        for day in (from.0..=to.0).map(UtcDay) {
            let Some(list) = self.in_force(plan, day) else { continue };
            match periods.last_mut() {
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
    fn currencies_are_three_capitals() {
        assert_eq!("EUR".parse::<Currency>().expect("one").to_string(), "EUR");
        for text in ["", "eur", "EU", "EURO", "E R"] {
            assert_eq!(text.parse::<Currency>(), Err(InvalidCurrency), "{text:?}");
        }
    }

    #[test]
    fn a_plans_own_list_wins_and_days_before_any_have_none() {
        let day = |text: &str| text.parse::<UtcDay>().expect(text);
        let plan = |name: &str| PlanName::new(name).expect("a name");
        let list = |name, from, plan| PriceList {
            name: PriceListName::new(name).expect("a name"),
            plan,
            from: day(from),
            device_second: ByClass::default(),
            million_prompt_tokens: Price::default(),
            million_completion_tokens: Price::default(),
        };
        let book = PriceBook {
            currency: "EUR".parse().expect("one"),
            lists: vec![
                list("winter", "2026-11-20", None),
                list("summer", "2026-11-03", None),
                list("gold", "2026-11-10", Some(plan("gold"))),
            ],
        };
        let month: crate::UtcMonth = "2026-11".parse().expect("one");
        let periods = |of: &str| -> Vec<String> {
            let periods = book.periods(&plan(of), month.first_day(), month.last_day());
            periods.iter().map(|p| format!("{} {} {}", p.from, p.to, p.list.name)).collect()
        };
        assert_eq!(
            periods("team"),
            ["2026-11-03 2026-11-19 summer", "2026-11-20 2026-11-30 winter"]
        );
        assert_eq!(periods("gold"), ["2026-11-03 2026-11-09 summer", "2026-11-10 2026-11-30 gold"]);
    }

    #[test]
    fn a_cost_is_rounded_down_once() {
        let prices = UnitPrices {
            device_second: price("0.000000001"),
            million_prompt_tokens: price("0.000000001"),
            million_completion_tokens: price("0.5"),
        };
        let cost = |reference_ns, prompt_tokens, completion_tokens| {
            prices.cost(Priced { reference_ns, prompt_tokens, completion_tokens }).0
        };
        assert_eq!(cost(999_999_999, 0, 0), 0, "a part of a nano-unit");
        assert_eq!(cost(1_000_000_000, 0, 0), 1);
        assert_eq!(cost(500_000_000, 500_000, 0), 1, "two halves are one: summed, then rounded");
        assert_eq!(cost(0, 0, 3), 1_500);
        // The largest figures there are do not overflow.
        let largest = UnitPrices {
            device_second: price("1000000"),
            million_prompt_tokens: price("1000000"),
            million_completion_tokens: price("1000000"),
        };
        let all = i64::MAX as u64;
        let used = Priced { reference_ns: all, prompt_tokens: all, completion_tokens: all };
        assert!(largest.cost(used).0 > 0);
    }

    proptest! {
        #[test]
        fn a_price_survives_being_shown(nanos in 0..=Price::LARGEST * 1_000_000_000) {
            prop_assert_eq!(Price(nanos).to_string().parse(), Ok(Price(nanos)));
        }
    }
}
