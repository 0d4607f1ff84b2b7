//! The records behind a statement's days, counted again one by one: the
//! charges of each key, then the entries of each worker's life.

use std::collections::BTreeMap;

use rusqlite::{Connection, params};
use tollgate_domain::UtcDay;

use super::{Maker, StatementDay, StatementError, Topic};
use crate::schema::account;
use crate::{LedgerError, archive};

/// What a line stands on. Displays as the one line that is listed:
/// `charge,REQUEST/ATTEMPT,DAY,COUNTED,PROMPT,CACHED,COMPLETION,REFERENCE_NS` or
/// `entry,EPOCH/BLOCK/ORDINAL,DAY,REQUEST/ATTEMPT,AMOUNT_NS[,ENERGY_MJ]`.
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
        /// What was drawn in them, likewise; `None` where the device did not tell.
        energy_mj: Option<i64>,
    },
}

/// Goes through a month's records.
pub(super) struct Recount<'m, 'a> {
    maker: &'m Maker<'a>,
    days: BTreeMap<(Topic, UtcDay), StatementDay>,
    record: &'m mut dyn FnMut(&str, &Record),
}

impl<'m, 'a> Recount<'m, 'a> {
    pub(super) fn new(maker: &'m Maker<'a>, record: &'m mut dyn FnMut(&str, &Record)) -> Self {
        Self { maker, days: BTreeMap::new(), record }
    }

    /// Tells every record; an error where they are not what the sums by day
    /// say.
    pub(super) fn run(mut self, connection: &Connection) -> Result<(), StatementError> {
        let callers = self.maker.callers(connection)?;
        if archive::has_days(connection, &callers, self.maker.days())? {
            let (tenant, month) = (self.maker.query.tenant.to_string(), self.maker.query.month);
            return Err(StatementError::Archived { tenant, month });
        }
        for (caller, key) in &callers {
            self.charges(connection, *caller, key)?;
        }
        for epoch in epochs(connection, self.maker.days())? {
            for (caller, key) in &callers {
                self.entries(connection, &epoch, *caller, key)?;
            }
        }
        let said = self
            .maker
            .lines
            .iter()
            .flat_map(|(topic, days)| days.iter().map(move |day| (topic, day)));
        if said.eq(self.days.iter().map(|((topic, _), day)| (topic, day))) {
            return Ok(());
        }
        let (tenant, month) = (self.maker.query.tenant, self.maker.query.month);
        Err(StatementError::Ledger(LedgerError::Damaged(format!(
            "the sums by day of {tenant} in {month} are not those of its records"
        ))))
    }

    fn charges(
        &mut self,
        connection: &Connection,
        caller: i64,
        key: &str,
    ) -> Result<(), StatementError> {
        let (first, last) = self.maker.days();
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
        let (first, last) = self.maker.days();
        let mut statement = connection
            .prepare_cached(
                "SELECT block, ordinal, request_id, attempt, amount_ns, energy_mj FROM entries
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
                    energy_mj: row.get(5)?,
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
        let period = self.maker.period_of(day)?;
        let topic = Topic { key: key.into(), model: model.into(), class: class.into(), period };
        (self.record)(&self.maker.line_id(&topic), record);
        let counted = self.days.entry((topic, day)).or_insert_with(|| StatementDay::empty(day));
        Ok(counted.add(record).ok_or_else(|| {
            LedgerError::Damaged("a line's figures are beyond what the ledger holds".to_owned())
        })?)
    }
}

impl StatementDay {
    fn empty(day: UtcDay) -> Self {
        Self {
            day,
            charges: 0,
            entries: 0,
            requests: 0,
            prompt_tokens: 0,
            cached_tokens: 0,
            completion_tokens: 0,
            reference_ns: 0,
            attributed_ns: 0,
            energy_mj: None,
        }
    }

    /// `None` where the sum does not fit.
    fn add(&mut self, record: &Record) -> Option<()> {
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
                self.requests += u64::from(*is_counted);
                for (sum, figure) in [
                    (&mut self.prompt_tokens, prompt_tokens),
                    (&mut self.cached_tokens, cached_tokens),
                    (&mut self.completion_tokens, completion_tokens),
                    (&mut self.reference_ns, reference_ns),
                ] {
                    *sum = sum.checked_add(*figure)?;
                }
            }
            Record::Entry { amount_ns, energy_mj, .. } => {
                self.entries += 1;
                // Signed: a correction comes after what it corrects, of the
                // same block and day, and may come before another's entry.
                self.attributed_ns = self.attributed_ns.checked_add(*amount_ns)?;
                if let Some(energy) = energy_mj {
                    self.energy_mj = Some(self.energy_mj.unwrap_or(0).checked_add(*energy)?);
                }
            }
        }
        Some(())
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
            Self::Entry { id, day, request, attempt, amount_ns, energy_mj } => {
                write!(f, "entry,{id},{day},{request}/{attempt},{amount_ns}")?;
                energy_mj.map_or(Ok(()), |energy| write!(f, ",{energy}"))
            }
        }
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
