//! Table `fault_caps`: the most that a tenant pays for an attempt that ended by
//! our fault.

use tollgate_domain::{Attempt, DeviceClass, DeviceNanos, ModelName, RequestId, Usage, UtcTime};
use tollgate_sql::{OptionalRow, params};

use super::charges::Payable;
use super::{AttemptKey, CallerId, Tables, TierColumn, caller_at, name};
use crate::act::FaultCap;
use crate::error::LedgerError;

/// Finds the cap on an attempt.
pub(crate) fn find(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
) -> Result<Option<Payable>, LedgerError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns
             FROM fault_caps WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .query_row(params![key.attempt.request.as_str(), key.caller, key.attempt.attempt], |row| {
            Ok(Payable {
                prompt_tokens: row.get(0)?,
                cached_tokens: row.get(1)?,
                completion_tokens: row.get(2)?,
                attributed_ns: row.get(3)?,
                reference_ns: row.get(4)?,
            })
        })
        .optional()?)
}

/// Returns the greatest id of a request with a cap or an archived attempt.
pub(crate) fn newest_settled(tables: Tables<'_>) -> Result<Option<String>, LedgerError> {
    // A table without rows gives NULL, which the outer `max` ignores.
    Ok(tables
        .connection
        .prepare(
            "SELECT max(newest) FROM (
               SELECT max(request_id) AS newest FROM fault_caps
               UNION ALL SELECT max(request_id) FROM archived_attempts) AS settled",
        )?
        .query_row((), |row| row.get(0))?)
}

/// Inserts a cap. `record` is the number of its audit record.
pub(crate) fn insert(
    tables: Tables<'_>,
    caller: CallerId,
    cap: &FaultCap,
    payable: &Payable,
    record: u64,
) -> Result<(), LedgerError> {
    // `payable` comes separately, in the signed figures of the database.
    let FaultCap { caller: _, attempt, model, class, payable: _, at, tier } = cap;
    tables
        .connection
        .prepare(
            "INSERT INTO fault_caps (request_id, caller_id, attempt, prompt_tokens, cached_tokens,
               completion_tokens, attributed_ns, reference_ns, model, device_class, at_utc_ns,
               record_seq, tier)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13)",
        )?
        .send(params![
            attempt.request.as_str(),
            caller,
            attempt.attempt,
            payable.prompt_tokens,
            payable.cached_tokens,
            payable.completion_tokens,
            payable.attributed_ns,
            payable.reference_ns,
            model.as_str(),
            class.as_str(),
            at.0 as i64,
            record,
            TierColumn(*tier)
        ])?;
    Ok(())
}

/// Calls `each` with every cap that has an audit record, and the record's number.
pub(crate) fn each_recorded(
    tables: Tables<'_>,
    mut each: impl FnMut(FaultCap, u64) -> Result<(), LedgerError>,
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT tenant, key, request_id, attempt, model, device_class, at_utc_ns, prompt_tokens,
           cached_tokens, completion_tokens, attributed_ns, reference_ns, record_seq, tier
         FROM fault_caps JOIN callers ON callers.id = caller_id WHERE record_seq IS NOT NULL",
    )?;
    let mut rows = statement.stream(())?;
    while let Some(row) = rows.next()? {
        let cap = FaultCap {
            caller: caller_at(&row, 0)?,
            attempt: Attempt {
                request: name(RequestId::new(&row.get::<String>(2)?))?,
                attempt: row.get(3)?,
            },
            // Only caps without a record lack model, class and time; the query leaves them out.
            model: name(ModelName::new(&row.get::<String>(4)?))?,
            class: name(DeviceClass::new(&row.get::<String>(5)?))?,
            at: UtcTime(row.get(6)?),
            tier: row.get::<TierColumn>(13)?.0,
            payable: Usage {
                prompt_tokens: row.get(7)?,
                cached_tokens: row.get(8)?,
                completion_tokens: row.get(9)?,
                attributed: DeviceNanos(row.get(10)?),
                reference: DeviceNanos(row.get(11)?),
            },
        };
        each(cap, row.get(12)?)?;
    }
    Ok(())
}
