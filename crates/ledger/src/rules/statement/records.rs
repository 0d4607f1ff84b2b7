//! The records behind a statement's days, counted again one by one.

use std::collections::BTreeMap;

use tollgate_domain::{Tier, UtcDay};

use super::maker::{Topic, overflow};
use super::{Maker, StatementDay, StatementError};
use crate::error::LedgerError;
use crate::rows::daily::DailyChange;

/// A record behind a line. Displays as the one line that is listed:
/// `charge,REQUEST/ATTEMPT,DAY,COUNTED,PROMPT,CACHED,COMPLETION,REFERENCE_NS` or
/// `entry,EPOCH/BLOCK/ORDINAL,DAY,REQUEST/ATTEMPT,AMOUNT_NS[,ENERGY_MJ]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Record {
    /// An attempt that ended.
    Charge {
        /// The request.
        request: String,
        /// The number of the attempt, from 0.
        attempt: u32,
        /// The day on which the attempt ended.
        day: UtcDay,
        /// True if the attempt counts as a request, i.e. unless it failed without
        /// charge.
        is_counted: bool,
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Prompt tokens that were found in the prefix cache.
        cached_tokens: u64,
        /// Tokens generated.
        completion_tokens: u64,
        /// Reference cost in ns.
        reference_ns: u64,
    },
    /// Device time, or its correction after a fault.
    Entry {
        /// `EPOCH/BLOCK/ORDINAL`: the entry's permanent place in the ledger.
        id: String,
        /// The day of the work.
        day: UtcDay,
        /// The request.
        request: String,
        /// The number of the attempt, from 0.
        attempt: u32,
        /// Nanoseconds; negative where a correction takes them back.
        amount_ns: i64,
        /// Energy of that time, signed alike; `None` where the device reported none.
        energy_mj: Option<i64>,
    },
}

/// A new count of a statement's records.
pub(crate) struct Recount<'m, 'a> {
    maker: &'m Maker<'a>,
    days: BTreeMap<(Topic, UtcDay), DailyChange>,
    record: &'m mut dyn FnMut(&str, &Record),
}

impl<'m, 'a> Recount<'m, 'a> {
    /// Returns a count of nothing. `record` is called with each record and the id of
    /// its line.
    pub(crate) fn new(maker: &'m Maker<'a>, record: &'m mut dyn FnMut(&str, &Record)) -> Self {
        Self { maker, days: BTreeMap::new(), record }
    }

    /// Adds a record of a key.
    pub(crate) fn add(
        &mut self,
        key: &str,
        (model, class, tier): (&str, &str, Tier),
        record: &Record,
    ) -> Result<(), StatementError> {
        let day = record.day();
        let period = self.maker.period_of(model, day)?;
        let (key, model, class) = (key.into(), model.into(), class.into());
        let topic = Topic { key, model, class, tier, period };
        (self.record)(&self.maker.line_id(&topic), record);
        // The same sums as in `daily`, made from the records alone.
        let counted = self.days.entry((topic, day)).or_default();
        Ok(record.sums().and_then(|sums| counted.add(&sums)).ok_or_else(overflow)?)
    }

    /// Compares the count with the sums by day.
    ///
    /// # Errors
    /// They differ: the ledger is damaged.
    pub(crate) fn finish(self) -> Result<(), StatementError> {
        let counted = self.days.iter().map(|((topic, day), sums)| {
            Ok::<_, LedgerError>((topic, StatementDay::of(*day, sums)?))
        });
        let counted = counted.collect::<Result<Vec<_>, _>>()?;
        // Both sides are sorted by line and day, so one walk compares them.
        if self.maker.days_by_line().eq(counted.iter().map(|(topic, day)| (*topic, day))) {
            return Ok(());
        }
        let (tenant, month) = (self.maker.query.tenant, self.maker.query.month);
        Err(StatementError::Ledger(LedgerError::Damaged(format!(
            "the sums by day of {tenant} in {month} are not those of its records"
        ))))
    }
}

impl Record {
    fn day(&self) -> UtcDay {
        match self {
            Self::Charge { day, .. } | Self::Entry { day, .. } => *day,
        }
    }

    /// Returns what the record adds to its day; `None` where a figure does not fit.
    fn sums(&self) -> Option<DailyChange> {
        let signed = |figure: &u64| i64::try_from(*figure).ok();
        Some(match self {
            // All fields by name, so that a new one cannot be left out of the sums.
            Self::Charge {
                request: _,
                attempt: _,
                day: _,
                is_counted,
                prompt_tokens,
                cached_tokens,
                completion_tokens,
                reference_ns,
            } => DailyChange {
                charges: 1,
                requests: i64::from(*is_counted),
                prompt_tokens: signed(prompt_tokens)?,
                cached_tokens: signed(cached_tokens)?,
                completion_tokens: signed(completion_tokens)?,
                reference_ns: signed(reference_ns)?,
                ..DailyChange::default()
            },
            // A correction is signed, and may come before another entry of its day.
            Self::Entry { amount_ns, energy_mj, .. } => {
                DailyChange::by_entry(*amount_ns, *energy_mj)
            }
        })
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
