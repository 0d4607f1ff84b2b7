//! Table `attempts`: finished attempts as their workers reported them.

use tollgate_domain::{
    Attempt, DeviceNanos, FinishReason, FinishedAttempt, RequestId, Stages, Tier, Usage, UtcTime,
};
use tollgate_sql::{Statement, params};

use super::{BlockKey, CallerId, Tables, TierColumn, name};
use crate::error::LedgerError;

/// The place of a finished attempt in its block, and the attempt's audit record.
#[derive(Clone, Copy)]
pub(crate) struct FinishedAt {
    pub(crate) index: usize,
    pub(crate) record: u64,
}

/// A finished attempt as it is read again.
pub(crate) struct StoredAttempt {
    pub(crate) caller: CallerId,
    pub(crate) attempt: Attempt,
    pub(crate) usage: Usage,
    pub(crate) stages: Stages,
    pub(crate) reason: FinishReason,
    pub(crate) finished: UtcTime,
    pub(crate) tier: Tier,
    pub(crate) record: Option<u64>,
}

/// Inserts attempts with a statement that is prepared once.
pub(crate) struct AttemptWriter<'c>(Statement<'c>);

impl<'c> AttemptWriter<'c> {
    /// Prepares the statement.
    pub(crate) fn new(tables: Tables<'c>) -> Result<Self, LedgerError> {
        Ok(Self(tables.connection.prepare(
            "INSERT INTO attempts (epoch_id, block, ordinal, caller_id, request_id, attempt,
               prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns,
               queue_ns, prefill_ns, decode_ns, reason, finished_utc_ns, record_seq, tier)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17,
               ?18)
             ON CONFLICT (request_id, caller_id, attempt) DO NOTHING",
        )?))
    }

    /// Inserts a finished attempt. Returns false where the attempt is there
    /// already.
    pub(crate) fn insert(
        &mut self,
        key: BlockKey,
        caller: CallerId,
        at: FinishedAt,
        finished: &FinishedAttempt,
    ) -> Result<bool, LedgerError> {
        let FinishedAttempt { caller: _, attempt, usage, stages, reason, finished: ended, tier } =
            finished;
        let inserted = self.0.execute(params![
            key.epoch,
            key.block,
            // The casts change no figure: a `Block` exists only with figures that fit `i64`.
            at.index as i64,
            caller,
            attempt.request.as_str(),
            attempt.attempt,
            usage.prompt_tokens as i64,
            usage.cached_tokens as i64,
            usage.completion_tokens as i64,
            usage.attributed.nanos() as i64,
            usage.reference.nanos() as i64,
            stages.queue_ns as i64,
            stages.prefill_ns as i64,
            stages.decode_ns as i64,
            reason_name(*reason),
            ended.0 as i64,
            at.record,
            TierColumn(*tier)
        ])?;
        // `DO NOTHING` inserts no row where the attempt is there already.
        Ok(inserted == 1)
    }
}

/// Returns the attempts that finished in a block, by ordinal.
pub(crate) fn of_block(
    tables: Tables<'_>,
    key: BlockKey,
) -> Result<Vec<StoredAttempt>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT caller_id, request_id, attempt, prompt_tokens, cached_tokens, completion_tokens,
           attributed_ns, reference_ns, queue_ns, prefill_ns, decode_ns, reason, finished_utc_ns,
           record_seq, tier
         FROM attempts WHERE epoch_id = ?1 AND block = ?2 ORDER BY ordinal",
    )?;
    // The digest covers the attempts in their order, so they are read by ordinal.
    let mut rows = statement.query(params![key.epoch, key.block])?;
    let mut attempts = Vec::new();
    while let Some(row) = rows.next()? {
        attempts.push(StoredAttempt {
            caller: row.get(0)?,
            attempt: Attempt {
                request: name(RequestId::new(&row.get::<String>(1)?))?,
                attempt: row.get(2)?,
            },
            usage: Usage {
                prompt_tokens: row.get(3)?,
                cached_tokens: row.get(4)?,
                completion_tokens: row.get(5)?,
                attributed: DeviceNanos(row.get(6)?),
                reference: DeviceNanos(row.get(7)?),
            },
            stages: Stages {
                queue_ns: row.get(8)?,
                prefill_ns: row.get(9)?,
                decode_ns: row.get(10)?,
            },
            reason: reason_named(&row.get::<String>(11)?)?,
            finished: UtcTime(row.get(12)?),
            record: row.get(13)?,
            tier: row.get::<TierColumn>(14)?.0,
        });
    }
    Ok(attempts)
}

/// Returns the text under which a reason is kept.
pub(crate) fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        // These texts stand in the file and in audit records, so they never change.
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
        FinishReason::Cancelled => "cancelled",
        FinishReason::Deadline => "deadline",
        FinishReason::Fault => "fault",
    }
}

/// Returns the reason that is kept under `name`.
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
