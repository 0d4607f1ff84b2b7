//! Table `requests`: the charge of each attempt, i.e. the worker's report or less
//! after a fault.

use tollgate_domain::{FinishReason, FinishedAttempt, Tier, UtcDay};
use tollgate_sql::{OptionalRow, SqlError, Statement, params};

use super::attempts::reason_name;
use super::{AttemptKey, CallerId, Tables, TierColumn};
use crate::error::LedgerError;

/// Figures of an attempt as the database keeps them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Payable {
    pub(crate) prompt_tokens: i64,
    pub(crate) cached_tokens: i64,
    pub(crate) completion_tokens: i64,
    pub(crate) attributed_ns: i64,
    pub(crate) reference_ns: i64,
}

/// A charge to insert.
pub(crate) struct Charge<'a> {
    pub(crate) caller: CallerId,
    pub(crate) finished: &'a FinishedAttempt,
    pub(crate) payable: Payable,
    /// True if a statement counts the attempt as a request.
    pub(crate) is_counted: bool,
    pub(crate) model: &'a str,
    pub(crate) class: &'a str,
}

/// A charge as it is kept, without `attributed_ns`, which its entries sum to.
pub(crate) struct StoredCharge {
    pub(crate) model: String,
    pub(crate) class: String,
    pub(crate) tier: Tier,
    pub(crate) day: u32,
    pub(crate) is_counted: bool,
    pub(crate) payable: Payable,
}

/// A charge of a caller, for a statement's records.
pub(crate) struct CallerCharge {
    pub(crate) model: String,
    pub(crate) class: String,
    pub(crate) tier: Tier,
    pub(crate) request: String,
    pub(crate) attempt: u32,
    pub(crate) day: UtcDay,
    pub(crate) is_counted: bool,
    pub(crate) prompt_tokens: u64,
    pub(crate) cached_tokens: u64,
    pub(crate) completion_tokens: u64,
    pub(crate) reference_ns: u64,
}

/// Inserts charges with a statement that is prepared once.
pub(crate) struct ChargeWriter<'c>(Statement<'c>);

impl<'c> ChargeWriter<'c> {
    /// Prepares the statement.
    pub(crate) fn new(tables: Tables<'c>) -> Result<Self, LedgerError> {
        Ok(Self(tables.connection.prepare(
            "INSERT INTO requests (request_id, caller_id, attempt, model, device_class, day,
               finished_utc_ns, counted, prompt_tokens, cached_tokens, completion_tokens,
               reference_ns, queue_ns, prefill_ns, decode_ns, reason, tier)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)",
        )?))
    }

    /// Inserts a charge. The sums of its day are not touched.
    pub(crate) fn insert(&mut self, charge: &Charge<'_>) -> Result<(), LedgerError> {
        let Charge { caller, finished, payable, is_counted, model, class } = charge;
        self.0.send(params![
            finished.attempt.request.as_str(),
            caller,
            finished.attempt.attempt,
            model,
            class,
            finished.finished.day().0,
            finished.finished.0 as i64,
            is_counted,
            payable.prompt_tokens,
            payable.cached_tokens,
            payable.completion_tokens,
            payable.reference_ns,
            // The casts change no figure: a checked block or a checked cap states each of them.
            finished.stages.queue_ns as i64,
            finished.stages.prefill_ns as i64,
            finished.stages.decode_ns as i64,
            reason_name(finished.reason),
            TierColumn(finished.tier)
        ])?;
        Ok(())
    }
}

/// Finds the charge of an attempt.
pub(crate) fn find(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
) -> Result<Option<StoredCharge>, LedgerError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT model, device_class, day, counted, prompt_tokens, cached_tokens,
               completion_tokens, reference_ns, tier
             FROM requests WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .query_row(params![key.attempt.request.as_str(), key.caller, key.attempt.attempt], |row| {
            Ok(StoredCharge {
                model: row.get(0)?,
                class: row.get(1)?,
                tier: row.get::<TierColumn>(8)?.0,
                day: row.get(2)?,
                is_counted: row.get(3)?,
                payable: Payable {
                    prompt_tokens: row.get(4)?,
                    cached_tokens: row.get(5)?,
                    completion_tokens: row.get(6)?,
                    // The table does not keep the device time: the entries sum to it.
                    attributed_ns: 0,
                    reference_ns: row.get(7)?,
                },
            })
        })
        .optional()?)
}

/// Replaces the figures of a charge after a fault.
pub(crate) fn lower(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
    payable: &Payable,
    is_counted: bool,
) -> Result<(), LedgerError> {
    tables
        .connection
        .prepare(
            "UPDATE requests SET counted = ?4, prompt_tokens = ?5, cached_tokens = ?6,
               completion_tokens = ?7, reference_ns = ?8, reason = ?9
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .send(params![
            key.attempt.request.as_str(),
            key.caller,
            key.attempt.attempt,
            is_counted,
            payable.prompt_tokens,
            payable.cached_tokens,
            payable.completion_tokens,
            payable.reference_ns,
            // A cap exists only for an attempt that ended by our fault.
            reason_name(FinishReason::Fault)
        ])?;
    Ok(())
}

/// Fills in the stages of an attempt that a fault cap charged before.
pub(crate) fn set_stages(
    tables: Tables<'_>,
    caller: CallerId,
    finished: &FinishedAttempt,
) -> Result<(), LedgerError> {
    let FinishedAttempt { attempt, stages, .. } = finished;
    tables
        .connection
        .prepare(
            "UPDATE requests SET queue_ns = ?4, prefill_ns = ?5, decode_ns = ?6
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .send(params![
            attempt.request.as_str(),
            caller,
            attempt.attempt,
            stages.queue_ns as i64,
            stages.prefill_ns as i64,
            stages.decode_ns as i64
        ])?;
    Ok(())
}

/// Calls `each` with a caller's charges on the days from `first` to `last`.
pub(crate) fn each_of_caller<E: From<LedgerError>>(
    tables: Tables<'_>,
    caller: CallerId,
    (first, last): (u32, u32),
    mut each: impl FnMut(CallerCharge) -> Result<(), E>,
) -> Result<(), E> {
    // The error type is the caller's, so `?` alone cannot convert the database's error.
    let storage = |error: SqlError| E::from(LedgerError::from(error));
    let mut statement = tables
        .connection
        .prepare(
            "SELECT model, device_class, request_id, attempt, day, counted, prompt_tokens,
               cached_tokens, completion_tokens, reference_ns, tier
             FROM requests WHERE caller_id = ?1 AND day BETWEEN ?2 AND ?3
             ORDER BY day, request_id, attempt",
        )
        .map_err(storage)?;
    let mut rows = statement
        .query_map(params![caller, first, last], |row| {
            Ok(CallerCharge {
                model: row.get(0)?,
                class: row.get(1)?,
                tier: row.get::<TierColumn>(10)?.0,
                request: row.get(2)?,
                attempt: row.get(3)?,
                day: UtcDay(row.get(4)?),
                is_counted: row.get(5)?,
                prompt_tokens: row.get(6)?,
                cached_tokens: row.get(7)?,
                completion_tokens: row.get(8)?,
                reference_ns: row.get(9)?,
            })
        })
        .map_err(storage)?;
    rows.try_for_each(|row| each(row.map_err(storage)?))
}
