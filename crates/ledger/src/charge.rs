//! What an attempt is charged: a row of `requests`, and the sums of its day.

use rusqlite::{Connection, params};
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
    pub(crate) requests: i64,
    pub(crate) prompt_tokens: i64,
    pub(crate) cached_tokens: i64,
    pub(crate) completion_tokens: i64,
    pub(crate) attributed_ns: i64,
    pub(crate) reference_ns: i64,
}

/// Charges an attempt: its row, and its day.
pub(crate) fn insert_charge(
    connection: &Connection,
    charge: &Charge<'_>,
) -> Result<(), LedgerError> {
    let Charge { caller, finished, payable, model, class } = charge;
    let day = finished.finished.day().0;
    let counted = payable.is_counted(finished.reason);
    connection
        .prepare_cached(
            "INSERT INTO requests (request_id, caller_id, attempt, model, device_class, day,
               finished_utc_ns, counted, prompt_tokens, cached_tokens, completion_tokens,
               reference_ns, queue_ns, prefill_ns, decode_ns, reason)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
        )?
        .execute(params![
            finished.attempt.request.as_str(),
            caller,
            finished.attempt.attempt,
            model,
            class,
            day,
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
    let daily = DailyKey { day, caller: *caller, model, class };
    add_to_day(connection, &daily, &payable.as_change(counted))
}

pub(crate) fn add_to_day(
    connection: &Connection,
    key: &DailyKey<'_>,
    change: &DailyChange,
) -> Result<(), LedgerError> {
    let DailyKey { day, caller, model, class } = key;
    let DailyChange {
        requests,
        prompt_tokens,
        cached_tokens,
        completion_tokens,
        attributed_ns,
        reference_ns,
    } = change;
    connection
        .prepare_cached(
            "INSERT INTO daily (day, caller_id, model, device_class, requests, prompt_tokens,
               cached_tokens, completion_tokens, attributed_ns, reference_ns)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)
             ON CONFLICT DO UPDATE SET
               requests = requests + excluded.requests,
               prompt_tokens = prompt_tokens + excluded.prompt_tokens,
               cached_tokens = cached_tokens + excluded.cached_tokens,
               completion_tokens = completion_tokens + excluded.completion_tokens,
               attributed_ns = attributed_ns + excluded.attributed_ns,
               reference_ns = reference_ns + excluded.reference_ns",
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
            reference_ns
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
