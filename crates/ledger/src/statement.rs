//! A tenant's month, priced. Lines are summed from the ledger's own rows, not
//! from its sums by day, and must agree with them; each line says how many
//! records it stands on and their digest, and can list them.
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

use crate::query::name;
use crate::schema::account;
use crate::{LedgerError, LedgerReader};

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
    pub plan: &'a PlanName,
    /// All prices.
    pub prices: &'a PriceBook,
    /// When it is made: it says whether the month is over.
    pub now: UtcTime,
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
    /// The plan whose prices hold.
    pub plan: PlanName,
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
    /// SHA-256 of its records, each as [`Record`] shows it and a line feed.
    pub digest: String,
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
    /// What that costs.
    pub amount: Amount,
}

/// What a line stands on. Displays as the one line that is hashed:
/// `charge,REQUEST/ATTEMPT,DAY,COUNTED,PROMPT,CACHED,COMPLETION,REFERENCE_NS` or
/// `entry,EPOCH/BLOCK/ORDINAL,DAY,REQUEST/ATTEMPT,AMOUNT_NS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// An attempt that ended.
    Charge {
        /// The request.
        request: String,
        /// Which attempt at it.
        attempt: u32,
        /// The day on which it ended.
        day: UtcDay,
        /// Whether it counts as a request: not if it failed without charge.
        is_counted: bool,
        /// Tokens of its prompts.
        prompt_tokens: u64,
        /// Those found in the prefix cache.
        cached_tokens: u64,
        /// Tokens generated.
        completion_tokens: u64,
        /// Reference cost.
        reference_ns: u64,
    },
    /// Device time, or its correction after a fault.
    Entry {
        /// `EPOCH/BLOCK/ORDINAL`: its place in the ledger, for ever.
        id: String,
        /// The day on which it was done.
        day: UtcDay,
        /// The request that it was done for.
        request: String,
        /// Which attempt at it.
        attempt: u32,
        /// Nanoseconds; negative where a correction takes them back.
        amount_ns: i64,
    },
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
    /// The ledger cannot be read, or does not agree with itself.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
}

impl LedgerReader {
    /// The statement, read in one snapshot. `record` is told every record with
    /// its line's id, the charges before the entries, in the order in which
    /// the line's digest takes them.
    ///
    /// # Errors
    /// [`StatementError`].
    pub fn statement(
        &self,
        query: StatementQuery<'_>,
        record: &mut dyn FnMut(&str, &Record),
    ) -> Result<Statement, StatementError> {
        self.read(|connection| Ok(Maker::new(query, record).make(connection)))?
    }
}

impl std::fmt::Display for Record {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Charge {
                request,
                attempt,
                day,
                is_counted,
                prompt_tokens,
                cached_tokens,
                completion_tokens,
                reference_ns,
            } => write!(
                f,
                "charge,{request}/{attempt},{day},{},{prompt_tokens},{cached_tokens},\
                 {completion_tokens},{reference_ns}",
                u8::from(*is_counted)
            ),
            Self::Entry { id, day, request, attempt, amount_ns } => {
                write!(f, "entry,{id},{day},{request}/{attempt},{amount_ns}")
            }
        }
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

/// A line in the making.
struct Sums {
    id: String,
    figures: StatementFigures,
    /// Signed: a correction is read after what it corrects, but not at once.
    attributed_ns: i64,
    charges: u64,
    entries: u64,
    hash: Sha256,
}

struct Maker<'a, 'r> {
    query: StatementQuery<'a>,
    periods: Vec<PricePeriod<'a>>,
    lines: BTreeMap<Topic, Sums>,
    record: &'r mut dyn FnMut(&str, &Record),
    /// The text of a record, kept between records.
    text: String,
}

impl<'a, 'r> Maker<'a, 'r> {
    fn new(query: StatementQuery<'a>, record: &'r mut dyn FnMut(&str, &Record)) -> Self {
        let StatementQuery { month, plan, prices, .. } = query;
        let periods = prices.periods(plan, month.first_day(), month.last_day());
        Self { query, periods, lines: BTreeMap::new(), record, text: String::new() }
    }

    fn make(mut self, connection: &Connection) -> Result<Statement, StatementError> {
        let callers = self.callers(connection)?;
        for (caller, key) in &callers {
            self.charges(connection, *caller, key)?;
        }
        for epoch in epochs(connection, self.days())? {
            for (caller, key) in &callers {
                self.entries(connection, &epoch, *caller, key)?;
            }
        }
        self.refuse_unless_agreed(connection)?;
        self.finish()
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

    fn charges(
        &mut self,
        connection: &Connection,
        caller: i64,
        key: &str,
    ) -> Result<(), StatementError> {
        let (first, last) = self.days();
        let mut statement = connection
            .prepare_cached(
                "SELECT model, device_class, request_id, attempt, day, counted, prompt_tokens,
                   cached_tokens, completion_tokens, reference_ns
                 FROM requests WHERE caller_id = ?1 AND day BETWEEN ?2 AND ?3
                 ORDER BY day, request_id, attempt",
            )
            .map_err(LedgerError::from)?;
        let mut rows = statement.query(params![caller, first, last]).map_err(LedgerError::from)?;
        while let Some(row) = rows.next().map_err(LedgerError::from)? {
            let read = || -> rusqlite::Result<_> {
                let charge = Record::Charge {
                    request: row.get(2)?,
                    attempt: row.get(3)?,
                    day: UtcDay(row.get(4)?),
                    is_counted: row.get(5)?,
                    prompt_tokens: row.get(6)?,
                    cached_tokens: row.get(7)?,
                    completion_tokens: row.get(8)?,
                    reference_ns: row.get(9)?,
                };
                Ok((row.get(0)?, row.get(1)?, charge))
            };
            let (model, class, charge): (String, String, _) = read().map_err(LedgerError::from)?;
            self.add(key, &model, &class, &charge)?;
        }
        Ok(())
    }

    /// By epoch, not by the order in which the ledger heard of them.
    fn entries(
        &mut self,
        connection: &Connection,
        epoch: &Epoch,
        caller: i64,
        key: &str,
    ) -> Result<(), StatementError> {
        let (first, last) = self.days();
        let mut statement = connection
            .prepare_cached(
                "SELECT block, ordinal, request_id, attempt, amount_ns FROM entries
                 WHERE caller_id = ?1 AND epoch_id = ?2 AND block BETWEEN ?3 AND ?4
                   AND account = ?5
                 ORDER BY block, ordinal",
            )
            .map_err(LedgerError::from)?;
        let mut rows = statement
            .query(params![caller, epoch.id, epoch.blocks.0, epoch.blocks.1, account::TENANT])
            .map_err(LedgerError::from)?;
        let mut at = Block::default();
        while let Some(row) = rows.next().map_err(LedgerError::from)? {
            let number: i64 = row.get(0).map_err(LedgerError::from)?;
            if at.number != number {
                at = Block::find(connection, epoch.id, number)?;
            }
            // Blocks need not begin in the order of their numbers.
            if !(first..=last).contains(&at.day.0) {
                continue;
            }
            let read = || -> rusqlite::Result<_> {
                Ok(Record::Entry {
                    id: format!("{}/{number}/{}", epoch.name, row.get::<_, i64>(1)?),
                    day: at.day,
                    request: row.get(2)?,
                    attempt: row.get(3)?,
                    amount_ns: row.get(4)?,
                })
            };
            let entry = read().map_err(LedgerError::from)?;
            self.add(key, &at.model, &epoch.class, &entry)?;
        }
        Ok(())
    }

    fn add(
        &mut self,
        key: &str,
        model: &str,
        class: &str,
        record: &Record,
    ) -> Result<(), StatementError> {
        let day = record.day();
        let period = self.periods.iter().position(|period| period.from <= day && day <= period.to);
        let Some(period) = period else {
            return Err(StatementError::NoList { day, plan: self.query.plan.to_string() });
        };
        let topic = Topic { key: key.into(), model: model.into(), class: class.into(), period };
        let (query, periods) = (&self.query, &self.periods);
        let line = self
            .lines
            .entry(topic)
            .or_insert_with_key(|topic| Sums::new(line_id(query, topic, periods[period].from)));
        line.add(record)?;
        self.text.clear();
        // Writing to a string does not fail.
        let _ = writeln!(self.text, "{record}");
        line.hash.update(self.text.as_bytes());
        (self.record)(&line.id, record);
        Ok(())
    }

    /// Both sides check the sum: the rows must say what the sums by day say.
    fn refuse_unless_agreed(&self, connection: &Connection) -> Result<(), LedgerError> {
        let (first, last) = self.days();
        let daily = connection
            .prepare_cached(
                "SELECT coalesce(sum(requests), 0), coalesce(sum(prompt_tokens), 0),
                   coalesce(sum(cached_tokens), 0), coalesce(sum(completion_tokens), 0),
                   coalesce(sum(attributed_ns), 0), coalesce(sum(reference_ns), 0)
                 FROM daily JOIN callers ON callers.id = caller_id
                 WHERE tenant = ?1 AND day BETWEEN ?2 AND ?3",
            )?
            .query_row(params![self.query.tenant.as_str(), first, last], |row| {
                (0..6).map(|column| row.get(column)).collect::<Result<Vec<i64>, _>>()
            })?;
        let mut rows = [0_i64; 6];
        for line in self.lines.values() {
            let figures = &line.figures;
            for (sum, figure) in rows.iter_mut().zip([
                figures.requests as i64,
                figures.prompt_tokens as i64,
                figures.cached_tokens as i64,
                figures.completion_tokens as i64,
                line.attributed_ns,
                figures.reference_ns as i64,
            ]) {
                *sum += figure;
            }
        }
        if daily == rows {
            return Ok(());
        }
        let StatementQuery { tenant, month, .. } = self.query;
        Err(LedgerError::Damaged(format!(
            "the sums by day of {tenant} in {month} are {daily:?}, its rows sum to {rows:?}"
        )))
    }

    fn finish(self) -> Result<Statement, StatementError> {
        let StatementQuery { tenant, month, plan, prices, now } = self.query;
        let mut lines = Vec::with_capacity(self.lines.len());
        let mut total = StatementFigures::default();
        let mut hash = Sha256::new();
        for (topic, sums) in self.lines {
            let line = sums.priced(topic, &self.periods)?;
            total.add(&line.figures);
            hash.update(format!("{},{},{}\n", line.id, line.digest, line.figures.amount));
            lines.push(line);
        }
        let settled = month.last_day().start().0 + DAY_NS + SETTLING_NS;
        Ok(Statement {
            id: format!("stmt-{}", short(&["statement", tenant.as_str(), &month.to_string()])),
            tenant: tenant.clone(),
            month,
            plan: plan.clone(),
            currency: prices.currency,
            is_provisional: now.0 < settled,
            lines,
            total,
            digest: hex(&hash.finalize()),
        })
    }
}

impl Sums {
    fn new(id: String) -> Self {
        let figures = StatementFigures::default();
        Self { id, figures, attributed_ns: 0, charges: 0, entries: 0, hash: Sha256::new() }
    }

    fn add(&mut self, record: &Record) -> Result<(), LedgerError> {
        match record {
            Record::Charge {
                request: _,
                attempt: _,
                day: _,
                is_counted,
                prompt_tokens,
                cached_tokens,
                completion_tokens,
                reference_ns,
            } => {
                self.charges += 1;
                let figures = &mut self.figures;
                figures.requests += u64::from(*is_counted);
                for (sum, figure) in [
                    (&mut figures.prompt_tokens, prompt_tokens),
                    (&mut figures.cached_tokens, cached_tokens),
                    (&mut figures.completion_tokens, completion_tokens),
                    (&mut figures.reference_ns, reference_ns),
                ] {
                    // As much as a signed column of the ledger's holds.
                    let fits = sum.checked_add(*figure).filter(|sum| *sum <= i64::MAX as u64);
                    *sum = fits.ok_or_else(overflow)?;
                }
            }
            Record::Entry { amount_ns, .. } => {
                self.entries += 1;
                self.attributed_ns =
                    self.attributed_ns.checked_add(*amount_ns).ok_or_else(overflow)?;
            }
        }
        Ok(())
    }

    /// The line, with what it costs.
    fn priced(
        self,
        topic: Topic,
        periods: &[PricePeriod<'_>],
    ) -> Result<StatementLine, StatementError> {
        let Self { id, mut figures, attributed_ns, charges, entries, hash } = self;
        let Topic { key, model, class, period } = topic;
        let PricePeriod { from, to, list } = periods[period];
        let device = name(DeviceClass::new(&class))?;
        let Some(prices) = list.on(&device) else {
            return Err(StatementError::NoPrice { list: list.name.to_string(), class });
        };
        figures.attributed_ns = u64::try_from(attributed_ns).map_err(|_| {
            LedgerError::Damaged(format!("more of line {id} was taken back than it had"))
        })?;
        figures.amount = prices.cost(Priced {
            reference_ns: figures.reference_ns,
            prompt_tokens: figures.prompt_tokens,
            completion_tokens: figures.completion_tokens,
        });
        Ok(StatementLine {
            id,
            key: name(KeyId::new(&key))?,
            model: name(ModelName::new(&model))?,
            class: device,
            from,
            to,
            list: list.name.clone(),
            prices,
            figures,
            charges,
            entries,
            digest: hex(&hash.finalize()),
        })
    }
}

impl StatementFigures {
    fn add(&mut self, other: &Self) {
        let Self {
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
            amount,
        } = other;
        self.requests += requests;
        self.prompt_tokens += prompt_tokens;
        self.cached_tokens += cached_tokens;
        self.completion_tokens += completion_tokens;
        self.attributed_ns += attributed_ns;
        self.reference_ns += reference_ns;
        self.amount.0 += amount.0;
    }
}

impl Record {
    fn day(&self) -> UtcDay {
        match self {
            Self::Charge { day, .. } | Self::Entry { day, .. } => *day,
        }
    }
}

/// A worker's life, as far as it falls into the month.
struct Epoch {
    id: i64,
    name: String,
    class: String,
    /// The numbers of its first and last block of the month.
    blocks: (i64, i64),
}

fn epochs(connection: &Connection, days: (u32, u32)) -> Result<Vec<Epoch>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT epoch_id, epoch, device_class, first, last FROM (
           SELECT epoch_id, min(block) AS first, max(block) AS last
           FROM blocks WHERE day BETWEEN ?1 AND ?2 GROUP BY epoch_id)
         JOIN epochs ON epochs.id = epoch_id ORDER BY epoch",
    )?;
    let rows = statement.query_map(params![days.0, days.1], |row| {
        Ok(Epoch {
            id: row.get(0)?,
            name: row.get(1)?,
            class: row.get(2)?,
            blocks: (row.get(3)?, row.get(4)?),
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// What an entry takes from its block. Numbers begin at 1.
#[derive(Default)]
struct Block {
    number: i64,
    day: UtcDay,
    model: String,
}

impl Block {
    fn find(connection: &Connection, epoch: i64, number: i64) -> Result<Self, LedgerError> {
        Ok(connection
            .prepare_cached("SELECT day, model FROM blocks WHERE epoch_id = ?1 AND block = ?2")?
            .query_row(params![epoch, number], |row| {
                Ok(Self { number, day: UtcDay(row.get(0)?), model: row.get(1)? })
            })?)
    }
}

/// Of what the line is about, so that it has the same id whatever its figures.
fn line_id(query: &StatementQuery<'_>, topic: &Topic, from: UtcDay) -> String {
    let (month, from) = (query.month.to_string(), from.to_string());
    let Topic { key, model, class, period: _ } = topic;
    format!("line-{}", short(&["line", query.tenant.as_str(), &month, key, model, class, &from]))
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
