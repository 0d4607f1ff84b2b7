//! What an attempt is charged: a row of `requests`, and the sums of its day.

use std::collections::BTreeMap;

use rusqlite::{CachedStatement, Connection, Statement, params};
use tollgate_domain::{FinishReason, FinishedAttempt, Usage};

use crate::LedgerError;

/// A row of `requests` in the making.
pub(crate) struct Charge<'a> {
    pub(crate) caller: i64,
    pub(crate) finished: &'a FinishedAttempt,
    pub(crate) payable: Payable,
    pub(crate) model: &'a str,
    pub(crate) class: &'a str,
}

/// Figures as the database keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Payable {
    pub(crate) prompt_tokens: i64,
    pub(crate) cached_tokens: i64,
    pub(crate) completion_tokens: i64,
    pub(crate) attributed_ns: i64,
    pub(crate) reference_ns: i64,
}

/// Where sums by day go.
pub(crate) struct DailyKey<'a> {
    pub(crate) day: u32,
    pub(crate) caller: i64,
    pub(crate) model: &'a str,
    pub(crate) class: &'a str,
}

/// What is added to (or, negative, taken from) a day.
#[derive(Default)]
pub(crate) struct DailyChange {
    /// Rows of `requests`, and of `entries` that a tenant pays: they only grow.
    pub(crate) charges: i64,
    pub(crate) entries: i64,
    pub(crate) requests: i64,
    pub(crate) prompt_tokens: i64,
    pub(crate) cached_tokens: i64,
    pub(crate) completion_tokens: i64,
    pub(crate) attributed_ns: i64,
    pub(crate) reference_ns: i64,
    /// `None` where no device told.
    pub(crate) energy_mj: Option<i64>,
}

/// What one block adds to days, summed before it is written: a caller's row is
/// written once for the block, not once for each of its requests.
pub(crate) struct Days<'a> {
    model: &'a str,
    class: &'a str,
    /// By day and caller.
    changes: BTreeMap<(u32, i64), DailyChange>,
}

impl<'a> Days<'a> {
    /// For a block of `model` on a device of `class`.
    pub(crate) fn new(model: &'a str, class: &'a str) -> Self {
        Self { model, class, changes: BTreeMap::new() }
    }

    /// Adds to a day of a caller; `None` where that is beyond what a day holds.
    pub(crate) fn add(&mut self, day: u32, caller: i64, change: &DailyChange) -> Option<()> {
        self.changes.entry((day, caller)).or_default().add(change)
    }

    /// Writes them.
    pub(crate) fn write(self, connection: &Connection) -> Result<(), LedgerError> {
        let Self { model, class, changes } = self;
        for ((day, caller), change) in changes {
            add_to_day(connection, &DailyKey { day, caller, model, class }, &change)?;
        }
        Ok(())
    }
}

impl DailyChange {
    fn add(&mut self, other: &Self) -> Option<()> {
        let Self {
            charges,
            entries,
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
            energy_mj,
        } = other;
        for (sum, figure) in [
            (&mut self.charges, charges),
            (&mut self.entries, entries),
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
        Some(())
    }
}

/// What [`insert_charge`] runs. Whoever writes many asks for it once.
pub(crate) fn charge_statement(
    connection: &Connection,
) -> Result<CachedStatement<'_>, LedgerError> {
    Ok(connection.prepare_cached(
        "INSERT INTO requests (request_id, caller_id, attempt, model, device_class, day,
           finished_utc_ns, counted, prompt_tokens, cached_tokens, completion_tokens,
           reference_ns, queue_ns, prefill_ns, decode_ns, reason)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
    )?)
}

/// Writes an attempt's charge; what it adds to its day is for the caller to
/// enter.
pub(crate) fn insert_charge(
    statement: &mut Statement<'_>,
    charge: &Charge<'_>,
) -> Result<DailyChange, LedgerError> {
    let Charge { caller, finished, payable, model, class } = charge;
    let counted = payable.is_counted(finished.reason);
    statement.execute(params![
        finished.attempt.request.as_str(),
        caller,
        finished.attempt.attempt,
        model,
        class,
        finished.finished.day().0,
        finished.finished.0 as i64,
        counted,
        payable.prompt_tokens,
        payable.cached_tokens,
        payable.completion_tokens,
        payable.reference_ns,
        finished.stages.queue_ns as i64,
        finished.stages.prefill_ns as i64,
        finished.stages.decode_ns as i64,
        reason_name(finished.reason)
    ])?;
    Ok(DailyChange { charges: 1, ..payable.as_change(counted) })
}

pub(crate) fn add_to_day(
    connection: &Connection,
    key: &DailyKey<'_>,
    change: &DailyChange,
) -> Result<(), LedgerError> {
    let DailyKey { day, caller, model, class } = key;
    let DailyChange {
        charges,
        entries,
        requests,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        attributed_ns,
        reference_ns,
        energy_mj,
    } = change;
    connection
        .prepare_cached(
            "INSERT INTO daily (day, caller_id, model, device_class, requests, prompt_tokens,
               cached_tokens, completion_tokens, attributed_ns, reference_ns, charges, entries,
               energy_mj)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)
             ON CONFLICT DO UPDATE SET
               requests = requests + excluded.requests,
               prompt_tokens = prompt_tokens + excluded.prompt_tokens,
               cached_tokens = cached_tokens + excluded.cached_tokens,
               completion_tokens = completion_tokens + excluded.completion_tokens,
               attributed_ns = attributed_ns + excluded.attributed_ns,
               reference_ns = reference_ns + excluded.reference_ns,
               charges = charges + excluded.charges,
               entries = entries + excluded.entries,
               energy_mj = coalesce(energy_mj + excluded.energy_mj, energy_mj, excluded.energy_mj)",
        )?
        .execute(params![
            day,
            caller,
            model,
            class,
            requests,
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            attributed_ns,
            reference_ns,
            charges,
            entries,
            energy_mj
        ])?;
    Ok(())
}

impl Payable {
    /// All of `usage`.
    pub(crate) fn of(usage: &Usage) -> Self {
        let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } =
            *usage;
        Self {
            prompt_tokens: prompt_tokens as i64,
            cached_tokens: cached_tokens as i64,
            completion_tokens: completion_tokens as i64,
            attributed_ns: attributed.nanos() as i64,
            reference_ns: reference.nanos() as i64,
        }
    }

    /// Whether a statement counts the attempt as a request: one that failed
    /// without charge is none.
    pub(crate) fn is_counted(&self, reason: FinishReason) -> bool {
        reason != FinishReason::Fault || *self != Self::default()
    }

    pub(crate) fn as_change(&self, counted: bool) -> DailyChange {
        DailyChange {
            requests: i64::from(counted),
            prompt_tokens: self.prompt_tokens,
            cached_tokens: self.cached_tokens,
            completion_tokens: self.completion_tokens,
            attributed_ns: 0, // by the day of its entries
            reference_ns: self.reference_ns,
            ..DailyChange::default()
        }
    }
}

pub(crate) fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Fault => "fault",
    }
}

pub(crate) fn reason_named(name: &str) -> Result<FinishReason, LedgerError> {
    Ok(match name {
        "stop" => FinishReason::Stop,
        "length" => FinishReason::Length,
        "cancelled" => FinishReason::Cancelled,
        "deadline" => FinishReason::Deadline,
        "fault" => FinishReason::Fault,
        other => return Err(LedgerError::Damaged(format!("unknown finish reason {other:?}"))),
    })
}
