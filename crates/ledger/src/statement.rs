//! A tenant's month, priced. Lines are summed from the ledger's sums by day,
//! which the writer keeps in the transaction of the records themselves: a month
//! is stated as quickly whatever it holds. Each line says how many records it
//! stands on and the digest of its days; who wants to see the records
//! ([`LedgerReader::statement_records`]) has them counted again.
//!
//! A record is a charge (an attempt that ended: tokens and reference cost, by
//! the day it ended) or an entry (device time, by the day it was done). Each
//! of a tenant's records is in exactly one line of one month. Only charges
//! have a price.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use rusqlite::{Connection, params};
use sha2::{Digest, Sha256};
use tollgate_domain::{
    Amount, Currency, DeviceClass, KeyId, ModelName, PlanName, PriceBook, PriceListName,
    PricePeriod, Priced, TenantId, UnitPrices, UtcDay, UtcMonth, UtcTime,
};

use crate::plans;
use crate::query::name;
use crate::{LedgerError, LedgerReader};

mod records;

pub use records::Record;
use records::Recount;

/// How long after its end a month may still gain usage: what began in it ends,
/// and journals of workers that were away come in.
const SETTLING_NS: u64 = 24 * 3_600 * 1_000_000_000;

/// Whose month, at which prices.
#[derive(Clone, Copy, Debug)]
pub struct StatementQuery<'a> {
    /// Who pays.
    pub tenant: &'a TenantId,
    /// The month (UTC).
    pub month: UtcMonth,
    /// The plan whose prices hold.
    pub priced_as: PricedAs<'a>,
    /// All prices.
    pub prices: &'a PriceBook,
    /// When it is made: it says whether the month is over.
    pub now: UtcTime,
}

/// Whose prices a tenant pays.
#[derive(Clone, Copy, Debug)]
pub enum PricedAs<'a> {
    /// Those of this plan, the whole month.
    Plan(&'a PlanName),
    /// Those of the plan that it had on each day, as the ledger was told
    /// ([`crate::Act::PutPlansInForce`]); of this one where it never was.
    Told(Option<&'a PlanName>),
}

/// A tenant's month.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    /// Names this tenant's month, whatever is in it.
    pub id: String,
    /// Who pays.
    pub tenant: TenantId,
    /// The month (UTC).
    pub month: UtcMonth,
    /// The plans whose prices hold, in the order of their days.
    pub plans: Vec<PlanSpan>,
    /// Of every amount.
    pub currency: Currency,
    /// Whether the month may still gain usage as a matter of course.
    pub is_provisional: bool,
    /// In the order of key, model, class and period.
    pub lines: Vec<StatementLine>,
    /// What the lines sum to, exactly.
    pub total: StatementFigures,
    /// SHA-256 of `ID,DIGEST,AMOUNT` and a line feed for each line: two
    /// statements with the same one say the same.
    pub digest: String,
}

/// One key's use of one model on one class of device at one price list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatementLine {
    /// Made of what the line is about, not of its figures.
    pub id: String,
    /// The credential.
    pub key: KeyId,
    /// The model.
    pub model: ModelName,
    /// The class of the devices.
    pub class: DeviceClass,
    /// Its first day.
    pub from: UtcDay,
    /// Its last day.
    pub to: UtcDay,
    /// The price list in force.
    pub list: PriceListName,
    /// Its prices.
    pub prices: UnitPrices,
    /// What was used, and what that costs.
    pub figures: StatementFigures,
    /// How many charges it stands on.
    pub charges: u64,
    /// How many entries of device time it stands on.
    pub entries: u64,
    /// What it is summed from.
    pub days: Vec<StatementDay>,
    /// SHA-256 of its days, each as [`StatementDay`] shows it and a line feed.
    pub digest: String,
}

/// Days of a month on which one plan's prices hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanSpan {
    /// The first.
    pub from: UtcDay,
    /// The last.
    pub to: UtcDay,
    /// The plan.
    pub plan: PlanName,
}

/// A day of a line. Displays as the one line that is hashed: the fields in
/// this order, commas between them. Records are only ever added, so a day of
/// the same counts and sums has the same records.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatementDay {
    /// Which.
    pub day: UtcDay,
    /// Attempts that ended.
    pub charges: u64,
    /// Entries of device time, and their corrections.
    pub entries: u64,
    /// Requests that ended, those that failed without charge left out.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Those found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Reference cost.
    pub reference_ns: u64,
    /// Exact device time.
    pub attributed_ns: i64,
    /// What was drawn in it, as far as devices told; `None`, and no field,
    /// where none did.
    pub energy_mj: Option<i64>,
}

/// What was used and what it costs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StatementFigures {
    /// Requests that ended, those that failed without charge left out.
    pub requests: u64,
    /// Tokens of their prompts.
    pub prompt_tokens: u64,
    /// Those found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub completion_tokens: u64,
    /// Exact device time, by the day it was done.
    pub attributed_ns: u64,
    /// Reference cost, by the day the request ended.
    pub reference_ns: u64,
    /// What was drawn in the attributed time, as far as devices told.
    pub energy_mj: Option<u64>,
    /// What the reference cost and the tokens cost.
    pub amount: Amount,
}

/// Why there is no statement.
#[derive(Clone, Debug, thiserror::Error)]
pub enum StatementError {
    /// Something was used on a day on which no price list is in force.
    #[error("{day} has usage and no price list for plan {plan:?}; lists begin later")]
    NoList {
        /// The first such day.
        day: UtcDay,
        /// Under which plan.
        plan: String,
    },
    /// Something was used on a class of device that the list has no price for.
    #[error("price list {list:?} has no price for device class {class:?}, and no default")]
    NoPrice {
        /// The list.
        list: String,
        /// The class.
        class: String,
    },
    /// The month's records, or some of them, have left the ledger.
    #[error("records of {tenant:?} in {month} are archived: read them with --data ARCHIVE")]
    Archived {
        /// Whose.
        tenant: String,
        /// When.
        month: UtcMonth,
    },
    /// Nobody has told the ledger the tenant's plan.
    #[error("no plan of tenant {tenant:?} is known")]
    NoPlan {
        /// Whose.
        tenant: String,
    },
    /// The ledger cannot be read, or does not agree with itself.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl LedgerReader {
    /// The statement, read in one snapshot from the sums by day.
    ///
    /// # Errors
    /// [`StatementError`].
    pub fn statement(&self, query: StatementQuery<'_>) -> Result<Statement, StatementError> {
        self.read(|connection| Ok(Maker::read(query, connection).and_then(|maker| maker.finish())))?
    }

    /// The statement, and every record that it stands on: `record` is told
    /// each with its line's id, the charges before the entries. It takes as
    /// long as there are records, and fails where they are not what the sums
    /// by day say.
    ///
    /// # Errors
    /// [`StatementError`].
    pub fn statement_records(
        &self,
        query: StatementQuery<'_>,
        record: &mut dyn FnMut(&str, &Record),
    ) -> Result<Statement, StatementError> {
        self.read(|connection| {
            Ok(Maker::read(query, connection).and_then(|maker| {
                Recount::new(&maker, record).run(connection)?;
                maker.finish()
            }))
        })?
    }
}

impl std::fmt::Display for StatementDay {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            day,
            charges,
            entries,
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            reference_ns,
            attributed_ns,
            energy_mj,
        } = self;
        write!(
            f,
            "{day},{charges},{entries},{requests},{prompt_tokens},{cached_tokens},\
             {completion_tokens},{reference_ns},{attributed_ns}"
        )?;
        energy_mj.map_or(Ok(()), |energy| write!(f, ",{energy}"))
    }
}

/// What a line is about, in the order of lines.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Topic {
    key: String,
    model: String,
    class: String,
    /// Which of the month's price periods.
    period: usize,
}

struct Maker<'a> {
    query: StatementQuery<'a>,
    plans: Vec<PlanSpan>,
    periods: Vec<PricePeriod<'a>>,
    /// The days of each line.
    lines: BTreeMap<Topic, Vec<StatementDay>>,
}

impl<'a> Maker<'a> {
    fn read(query: StatementQuery<'a>, connection: &Connection) -> Result<Self, StatementError> {
        let plans = plans::in_force(connection, &query)?;
        let periods = periods(query.prices, &plans);
        let mut maker = Self { query, plans, periods, lines: BTreeMap::new() };
        for (caller, key) in maker.callers(connection)? {
            maker.add_days(connection, caller, &key)?;
        }
        Ok(maker)
    }

    fn callers(&self, connection: &Connection) -> Result<Vec<(i64, String)>, LedgerError> {
        let mut statement = connection
            .prepare_cached("SELECT id, key FROM callers WHERE tenant = ?1 ORDER BY key")?;
        let rows = statement
            .query_map([self.query.tenant.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
        Ok(rows.collect::<Result<_, _>>()?)
    }

    fn days(&self) -> (u32, u32) {
        (self.query.month.first_day().0, self.query.month.last_day().0)
    }

    fn add_days(
        &mut self,
        connection: &Connection,
        caller: i64,
        key: &str,
    ) -> Result<(), StatementError> {
        let (first, last) = self.days();
        let mut statement = connection
            .prepare_cached(
                "SELECT model, device_class, day, charges, entries, requests, prompt_tokens,
                   cached_tokens, completion_tokens, reference_ns, attributed_ns, energy_mj
                 FROM daily WHERE caller_id = ?1 AND day BETWEEN ?2 AND ?3 ORDER BY day",
            )
            .map_err(LedgerError::from)?;
        let rows = statement
            .query_map(params![caller, first, last], |row| {
                let day = StatementDay {
                    day: UtcDay(row.get(2)?),
                    charges: row.get(3)?,
                    entries: row.get(4)?,
                    requests: row.get(5)?,
                    prompt_tokens: row.get(6)?,
                    cached_tokens: row.get(7)?,
                    completion_tokens: row.get(8)?,
                    reference_ns: row.get(9)?,
                    attributed_ns: row.get(10)?,
                    energy_mj: row.get(11)?,
                };
                Ok((row.get(0)?, row.get(1)?, day))
            })
            .map_err(LedgerError::from)?;
        for row in rows {
            let (model, class, day) = row.map_err(LedgerError::from)?;
            let period = self.period_of(day.day)?;
            let topic = Topic { key: key.into(), model, class, period };
            self.lines.entry(topic).or_default().push(day);
        }
        Ok(())
    }

    /// Which of the month's price periods `day` is in.
    fn period_of(&self, day: UtcDay) -> Result<usize, StatementError> {
        let is_in = |period: &PricePeriod<'_>| period.from <= day && day <= period.to;
        self.periods.iter().position(is_in).ok_or_else(|| {
            let plan = self.plans.iter().find(|span| span.from <= day && day <= span.to);
            let plan = plan.map(|span| span.plan.to_string()).unwrap_or_default();
            StatementError::NoList { day, plan }
        })
    }

    /// Of what the line is about, so that it has the same id whatever its
    /// figures.
    fn line_id(&self, topic: &Topic) -> String {
        let Topic { key, model, class, period } = topic;
        let (month, from) = (self.query.month.to_string(), self.periods[*period].from.to_string());
        let about = ["line", self.query.tenant.as_str(), &month, key, model, class, &from];
        format!("line-{}", short(&about))
    }

    fn finish(self) -> Result<Statement, StatementError> {
        let StatementQuery { tenant, month, prices, now, .. } = self.query;
        let mut lines = Vec::with_capacity(self.lines.len());
        let mut total = StatementFigures::default();
        let mut hash = Sha256::new();
        for (topic, days) in &self.lines {
            let line = self.line(topic, days)?;
            total.add(&line.figures).ok_or_else(overflow)?;
            hash.update(format!("{},{},{}\n", line.id, line.digest, line.figures.amount));
            lines.push(line);
        }
        let settled = month.last_day().start().0 + DAY_NS + SETTLING_NS;
        Ok(Statement {
            id: format!("stmt-{}", short(&["statement", tenant.as_str(), &month.to_string()])),
            tenant: tenant.clone(),
            month,
            plans: self.plans,
            currency: prices.currency,
            is_provisional: now.0 < settled,
            lines,
            total,
            digest: hex(&hash.finalize()),
        })
    }

    /// The line, with what it costs.
    fn line(&self, topic: &Topic, days: &[StatementDay]) -> Result<StatementLine, StatementError> {
        let Topic { key, model, class, period } = topic;
        let PricePeriod { from, to, list } = self.periods[*period];
        let device = name(DeviceClass::new(class))?;
        let Some(prices) = list.on(&device) else {
            let (list, class) = (list.name.to_string(), class.clone());
            return Err(StatementError::NoPrice { list, class });
        };
        let mut figures = StatementFigures::default();
        let (mut charges, mut entries) = (0, 0);
        let mut hash = Sha256::new();
        for day in days {
            figures.add(&day.figures()?).ok_or_else(overflow)?;
            charges += day.charges;
            entries += day.entries;
            hash.update(format!("{day}\n"));
        }
        figures.amount = prices.cost(Priced {
            reference_ns: figures.reference_ns,
            prompt_tokens: figures.prompt_tokens,
            completion_tokens: figures.completion_tokens,
        });
        Ok(StatementLine {
            id: self.line_id(topic),
            key: name(KeyId::new(key))?,
            model: name(ModelName::new(model))?,
            class: device,
            from,
            to,
            list: list.name.clone(),
            prices,
            figures,
            charges,
            entries,
            days: days.to_vec(),
            digest: hex(&hash.finalize()),
        })
    }
}

/// The periods of all plans; two that follow one another with the same list
/// are one, whatever the plans' names.
fn periods<'a>(prices: &'a PriceBook, plans: &[PlanSpan]) -> Vec<PricePeriod<'a>> {
    let mut periods: Vec<PricePeriod<'a>> = Vec::new();
    for PlanSpan { from, to, plan } in plans {
        for next in prices.periods(plan, *from, *to) {
            match periods.last_mut() {
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
    fn figures(&self) -> Result<StatementFigures, LedgerError> {
        let not_negative = |sum: i64| {
            u64::try_from(sum).map_err(|_| {
                LedgerError::Damaged(format!("on {} more was taken back than there was", self.day))
            })
        };
        Ok(StatementFigures {
            requests: self.requests,
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            attributed_ns: not_negative(self.attributed_ns)?,
            reference_ns: self.reference_ns,
            energy_mj: self.energy_mj.map(not_negative).transpose()?,
            amount: Amount(0), // of the line, rounded once
        })
    }
}

impl StatementFigures {
    /// `None` where a sum does not fit.
    fn add(&mut self, other: &Self) -> Option<()> {
        let Self {
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
            energy_mj,
            amount,
        } = other;
        for (sum, figure) in [
            (&mut self.requests, requests),
            (&mut self.prompt_tokens, prompt_tokens),
            (&mut self.cached_tokens, cached_tokens),
            (&mut self.completion_tokens, completion_tokens),
            (&mut self.attributed_ns, attributed_ns),
            (&mut self.reference_ns, reference_ns),
        ] {
            *sum = sum.checked_add(*figure)?;
        }
        if let Some(energy) = energy_mj {
            self.energy_mj = Some(self.energy_mj.unwrap_or(0).checked_add(*energy)?);
        }
        self.amount.0 = self.amount.0.checked_add(amount.0)?;
        Some(())
    }
}

/// 128 bits of the SHA-256 of `parts`, each with a line feed after it; none
/// holds one.
fn short(parts: &[&str]) -> String {
    let mut hash = Sha256::new();
    for part in parts {
        hash.update(part.as_bytes());
        hash.update(b"\n");
    }
    hex(&hash.finalize()[..16])
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(bytes.len() * 2), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

fn overflow() -> LedgerError {
    LedgerError::Damaged("a line's figures are beyond what the ledger holds".to_owned())
}

const DAY_NS: u64 = 24 * 3_600 * 1_000_000_000;
