//! Makes a statement of days: groups them into lines, prices the lines, sums them.

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use tollgate_domain::{
    Amount, DeviceClass, KeyId, ModelName, PriceBook, PricePeriod, Priced, Tier, UnitPrices, UtcDay,
};

use super::{
    PlanSpan, PricedAs, Statement, StatementDay, StatementError, StatementFigures, StatementLine,
    StatementQuery,
};
use crate::error::LedgerError;
use crate::hex::hex;
use crate::rows::daily::{DailyChange, DailyRow};
use crate::rows::name;
use crate::rules::plans;

/// Time after its end during which a month may still gain usage: requests that
/// began in it end, and journals of workers that were away come in.
pub(crate) const SETTLING_NS: u64 = 24 * 3_600 * 1_000_000_000;

const DAY_NS: u64 = 24 * 3_600 * 1_000_000_000;

/// The subject of a line. The order is the order of lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Topic {
    pub(super) key: String,
    pub(super) model: String,
    pub(super) class: String,
    pub(super) tier: Tier,
    /// Index of one of the model's price periods in the month.
    pub(super) period: usize,
}

/// A statement in the making.
pub(crate) struct Maker<'a> {
    pub(super) query: StatementQuery<'a>,
    plans: Vec<PlanSpan>,
    periods: Periods<'a>,
    lines: BTreeMap<Topic, Vec<StatementDay>>,
}

impl<'a> Maker<'a> {
    /// Returns a statement without lines. `known` returns the plans that the ledger
    /// knows of the tenant; it is called only if the query asks for them.
    ///
    /// # Errors
    /// No plan is known, or `known` fails.
    pub(crate) fn new(
        query: StatementQuery<'a>,
        known: impl FnOnce() -> Result<Vec<(UtcDay, tollgate_domain::PlanName)>, LedgerError>,
    ) -> Result<Self, StatementError> {
        let (from, to) = (query.month.first_day(), query.month.last_day());
        let whole =
            |plan: &tollgate_domain::PlanName| vec![PlanSpan { from, to, plan: plan.clone() }];
        let plans = match query.priced_as {
            PricedAs::Plan(plan) => whole(plan),
            PricedAs::Told(otherwise) => match (plans::spans(known()?, from, to), otherwise) {
                // What the ledger knows comes first: the given plan may be newer than the month.
                (spans, _) if !spans.is_empty() => spans,
                (_, Some(plan)) => whole(plan),
                (_, None) => {
                    return Err(StatementError::NoPlan { tenant: query.tenant.to_string() });
                }
            },
        };
        let periods = Periods::new(query.prices, &plans);
        Ok(Self { query, plans, periods, lines: BTreeMap::new() })
    }

    /// Returns the first and the last day of the month.
    pub(crate) fn days(&self) -> (u32, u32) {
        (self.query.month.first_day().0, self.query.month.last_day().0)
    }

    /// Adds a day's sums of a key.
    ///
    /// # Errors
    /// No price list is in force on that day, or a sum is negative.
    pub(crate) fn add_day(&mut self, key: &str, row: DailyRow) -> Result<(), StatementError> {
        let DailyRow { model, class, tier, day, sums } = row;
        let period = self.period_of(&model, day)?;
        // A change of price splits a line, because a line has one price list.
        let topic = Topic { key: key.into(), model, class, tier, period };
        let day = StatementDay::of(day, &sums)?;
        self.lines.entry(topic).or_default().push(day);
        Ok(())
    }

    /// Returns every line's days, by line.
    pub(super) fn days_by_line(&self) -> impl Iterator<Item = (&Topic, &StatementDay)> {
        self.lines.iter().flat_map(|(topic, days)| days.iter().map(move |day| (topic, day)))
    }

    /// Returns the index of the price period of `model` that holds on `day`.
    pub(super) fn period_of(&self, model: &str, day: UtcDay) -> Result<usize, StatementError> {
        let holds = |period: &PricePeriod<'_>| period.from <= day && day <= period.to;
        self.periods.of(model).iter().position(holds).ok_or_else(|| {
            let plan = self.plans.iter().find(|span| span.from <= day && day <= span.to);
            let plan = plan.map(|span| span.plan.to_string()).unwrap_or_default();
            StatementError::NoList { day, plan, model: model.to_owned() }
        })
    }

    /// Returns the id of a line. It is made of the line's subject, so that the line
    /// has the same id whatever its figures.
    pub(super) fn line_id(&self, topic: &Topic) -> String {
        let Topic { key, model, class, tier, period } = topic;
        let from = self.periods.of(model)[*period].from.to_string();
        let month = self.query.month.to_string();
        let mut about = vec!["line", self.query.tenant.as_str(), &month, key, model, class, &from];
        // A line of interactive usage keeps the id that it had before lines had a tier.
        if !tier.is_interactive() {
            about.push(tier.as_str());
        }
        format!("line-{}", short_hash(&about))
    }

    /// Returns the statement with its lines priced and summed.
    ///
    /// # Errors
    /// A price is missing, or a sum does not fit.
    pub(crate) fn finish(self) -> Result<Statement, StatementError> {
        let StatementQuery { tenant, month, prices, now, .. } = self.query;
        let mut lines = Vec::with_capacity(self.lines.len());
        let (mut sums, mut amount) = (DailyChange::default(), Amount(0));
        let mut hash = Sha256::new();
        for (topic, days) in &self.lines {
            let line = self.line(topic, days)?;
            days.iter().try_for_each(|day| sums.add(&day.sums()?)).ok_or_else(overflow)?;
            // The total sums the lines' amounts, which are rounded once each.
            let total = amount.0.checked_add(line.figures.amount.0).ok_or_else(overflow)?;
            amount = Amount(total);
            hash.update(format!("{},{},{}\n", line.id, line.digest, line.figures.amount));
            lines.push(line);
        }
        // A request of the last day may end, or be reported, within the settling time.
        let settled = month.last_day().start().0 + DAY_NS + SETTLING_NS;
        Ok(Statement {
            id: format!("stmt-{}", short_hash(&["statement", tenant.as_str(), &month.to_string()])),
            tenant: tenant.clone(),
            month,
            plans: self.plans,
            currency: prices.currency,
            is_provisional: now.0 < settled,
            lines,
            total: StatementFigures { amount, ..figures(&sums)? },
            digest: hex(&hash.finalize()),
        })
    }

    /// Returns one line with its cost.
    fn line(&self, topic: &Topic, days: &[StatementDay]) -> Result<StatementLine, StatementError> {
        let Topic { key, model, class, tier, period } = topic;
        let PricePeriod { from, to, list } = self.periods.of(model)[*period];
        let device = name(DeviceClass::new(class))?;
        let mut sums = DailyChange::default();
        let mut hash = Sha256::new();
        for day in days {
            let of_day = day.sums().ok_or_else(overflow)?;
            // A day that is negative cannot be hidden by the other days of its line.
            figures(&of_day).map_err(|NegativeSum| {
                LedgerError::Damaged(format!("on {} more was taken back than there was", day.day))
            })?;
            sums.add(&of_day).ok_or_else(overflow)?;
            hash.update(format!("{day}\n"));
        }
        let usage = figures(&sums)?;
        let prices = match list.on(&device, *tier) {
            Some(prices) => prices,
            // Attempts that nobody pays for can name a class that no device has: they ended
            // while no worker was connected.
            None if usage == StatementFigures::default() => UnitPrices::default(),
            None => {
                let (list, class) = (list.name.to_string(), class.clone());
                return Err(StatementError::NoPrice { list, class });
            }
        };
        // Once for the line: rounding each day would add up to a difference.
        let amount = prices.cost(Priced {
            reference_ns: usage.reference_ns,
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
        });
        Ok(StatementLine {
            id: self.line_id(topic),
            key: name(KeyId::new(key))?,
            model: name(ModelName::new(model))?,
            class: device,
            tier: *tier,
            from,
            to,
            list: list.name.clone(),
            prices,
            figures: StatementFigures { amount, ..usage },
            // No overflow: `sums` has added the same figures with a check.
            charges: days.iter().map(|day| day.charges).sum(),
            entries: days.iter().map(|day| day.entries).sum(),
            days: days.to_vec(),
            digest: hex(&hash.finalize()),
        })
    }
}

/// The price periods of a month.
struct Periods<'a> {
    /// The periods of each model that a price list names.
    by_model: BTreeMap<&'a str, Vec<PricePeriod<'a>>>,
    /// The periods of every other model.
    others: Vec<PricePeriod<'a>>,
}

impl<'a> Periods<'a> {
    fn new(prices: &'a PriceBook, plans: &[PlanSpan]) -> Self {
        let named = prices.models().into_iter();
        let by_model = named.map(|model| (model.as_str(), periods(prices, Some(model), plans)));
        Self { by_model: by_model.collect(), others: periods(prices, None, plans) }
    }

    /// Returns the periods of `model`, in order.
    fn of(&self, model: &str) -> &[PricePeriod<'a>] {
        self.by_model.get(model).unwrap_or(&self.others)
    }
}

/// Returns a model's price periods of all plans. Two periods that follow one another with
/// the same list are one, whatever the plans' names.
fn periods<'a>(
    prices: &'a PriceBook,
    model: Option<&ModelName>,
    plans: &[PlanSpan],
) -> Vec<PricePeriod<'a>> {
    let mut periods: Vec<PricePeriod<'a>> = Vec::new();
    for PlanSpan { from, to, plan } in plans {
        for next in prices.periods(plan, model, (*from, *to)) {
            match periods.last_mut() {
                // A change of plan that keeps the price list must not split a line.
                Some(last) if last.list.name == next.list.name && last.to.0 + 1 == next.from.0 => {
                    last.to = next.to;
                }
                _ => periods.push(next),
            }
        }
    }
    periods
}

impl StatementDay {
    /// Returns a day of these sums.
    ///
    /// # Errors
    /// A sum that only grows is negative: the file is damaged.
    pub(super) fn of(day: UtcDay, sums: &DailyChange) -> Result<Self, LedgerError> {
        let count = |sum: i64| {
            let negative = |_| LedgerError::Damaged(format!("a sum of {day} is negative"));
            u64::try_from(sum).map_err(negative)
        };
        Ok(Self {
            day,
            charges: count(sums.charges)?,
            entries: count(sums.entries)?,
            requests: count(sums.requests)?,
            prompt_tokens: count(sums.prompt_tokens)?,
            cached_tokens: count(sums.cached_tokens)?,
            completion_tokens: count(sums.completion_tokens)?,
            reference_ns: count(sums.reference_ns)?,
            // Corrections may take back more than one line holds of that day.
            attributed_ns: sums.attributed_ns,
            energy_mj: sums.energy_mj,
        })
    }

    /// Returns the sums of the day; `None` where one does not fit.
    fn sums(&self) -> Option<DailyChange> {
        let signed = |count: u64| i64::try_from(count).ok();
        Some(DailyChange {
            charges: signed(self.charges)?,
            entries: signed(self.entries)?,
            requests: signed(self.requests)?,
            prompt_tokens: signed(self.prompt_tokens)?,
            cached_tokens: signed(self.cached_tokens)?,
            completion_tokens: signed(self.completion_tokens)?,
            attributed_ns: self.attributed_ns,
            reference_ns: signed(self.reference_ns)?,
            energy_mj: self.energy_mj,
        })
    }
}

/// A sum that must not be negative is.
struct NegativeSum;

impl From<NegativeSum> for StatementError {
    fn from(_: NegativeSum) -> Self {
        Self::Ledger(LedgerError::Damaged("more was taken back than there was".to_owned()))
    }
}

/// Returns sums as a statement's figures, without an amount.
fn figures(sums: &DailyChange) -> Result<StatementFigures, NegativeSum> {
    let figure = |sum: i64| u64::try_from(sum).map_err(|_| NegativeSum);
    Ok(StatementFigures {
        requests: figure(sums.requests)?,
        prompt_tokens: figure(sums.prompt_tokens)?,
        cached_tokens: figure(sums.cached_tokens)?,
        completion_tokens: figure(sums.completion_tokens)?,
        attributed_ns: figure(sums.attributed_ns)?,
        reference_ns: figure(sums.reference_ns)?,
        energy_mj: sums.energy_mj.map(figure).transpose()?,
        amount: Amount(0),
    })
}

/// Returns 128 bits of the SHA-256 of `parts`, each with a line feed after it. No
/// part holds a line feed.
fn short_hash(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update(b"\n");
    }
    // 128 bits keep the ids short, and a collision by chance is out of the question.
    hex(&hash.finalize()[..16])
}

pub(super) fn overflow() -> LedgerError {
    LedgerError::Damaged("a line's figures are beyond what the ledger holds".to_owned())
}
