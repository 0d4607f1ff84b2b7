//! Who pays when a request ends by our fault: the tenant pays what it was
//! given, `platform.loss` the rest. A cap is posted once for an attempt; it
//! corrects what is there and governs what comes later.

use rusqlite::{Connection, OptionalExtension, params};
use tollgate_domain::{Attempt, FinishReason, FinishedAttempt, Stages, Usage};

use crate::act::{FaultCap, Posted};
use crate::audit::chain::Chain;
use crate::audit::record::Body;
use crate::charge::{
    Charge, DailyChange, DailyKey, Payable, add_to_day, charge_statement, insert_charge,
    reason_name,
};
use crate::post::{Amounts, BlockKey, caller_id, move_to_loss};
use crate::schema::{METERED, account};
use crate::{LedgerError, archive};

/// Posts a cap and its record; the caller rolls back on an error.
///
/// # Errors
/// [`LedgerError::AlreadySettled`] where another cap stands, and storage errors.
pub(crate) fn post(
    connection: &Connection,
    chain: &mut Chain,
    cap: &FaultCap,
) -> Result<Posted, LedgerError> {
    let caller = caller_id(connection, &cap.caller)?;
    let payable = checked(&cap.payable)?;
    if i64::try_from(cap.at.0).is_err() {
        return Err(LedgerError::Damaged("a fault cap's time does not fit".to_owned()));
    }
    match find(connection, caller, &cap.attempt)? {
        Some(known) if known == payable => return Ok(Posted::Already),
        Some(_) => return Err(LedgerError::AlreadySettled),
        None => {
            let record = chain.append(connection, &Body::cap(cap))?;
            insert(connection, caller, cap, &payable, record)?;
        }
    }
    correct_entries(connection, caller, &cap.attempt, payable.attributed_ns)?;
    if !lower_charge(connection, caller, &cap.attempt, &payable)? {
        // The worker died before it could record the end: this is the record.
        let finished = FinishedAttempt {
            caller: cap.caller.clone(),
            attempt: cap.attempt.clone(),
            usage: cap.payable,
            stages: Stages::default(),
            reason: FinishReason::Fault,
            finished: cap.at,
        };
        let (model, class) = (cap.model.as_str(), cap.class.as_str());
        let charge = Charge { caller, finished: &finished, payable, model, class };
        let change = insert_charge(&mut *charge_statement(connection)?, &charge)?;
        let day = finished.finished.day().0;
        add_to_day(connection, &DailyKey { day, caller, model, class }, &change)?;
    }
    Ok(Posted::New)
}

/// The cap on an attempt, if one was posted. What is archived is settled: no
/// more is paid for it.
pub(crate) fn find(
    connection: &Connection,
    caller: i64,
    attempt: &Attempt,
) -> Result<Option<Payable>, LedgerError> {
    let cap = connection
        .prepare_cached(
            "SELECT prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns
             FROM fault_caps WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .query_row(params![attempt.request.as_str(), caller, attempt.attempt], |row| {
            Ok(Payable {
                prompt_tokens: row.get(0)?,
                cached_tokens: row.get(1)?,
                completion_tokens: row.get(2)?,
                attributed_ns: row.get(3)?,
                reference_ns: row.get(4)?,
            })
        })
        .optional()?;
    if cap.is_none() && archive::ended(connection, caller, attempt)?.is_some() {
        return Ok(Some(Payable::default()));
    }
    Ok(cap)
}

/// The greatest id of a request that [`find`] finds something of.
pub(crate) fn newest_settled(connection: &Connection) -> Result<Option<String>, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT max(newest) FROM (
               SELECT max(request_id) AS newest FROM fault_caps
               UNION ALL SELECT max(request_id) FROM archived_attempts)",
        )?
        .query_row([], |row| row.get(0))?)
}

/// What the tenant pays for an attempt as the entries stand, ns.
pub(crate) fn paid_ns(
    connection: &Connection,
    caller: i64,
    attempt: &Attempt,
) -> Result<i64, LedgerError> {
    Ok(connection
        .prepare_cached(
            "SELECT coalesce(sum(amount_ns), 0) FROM entries
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3 AND account = ?4",
        )?
        .query_row(
            params![attempt.request.as_str(), caller, attempt.attempt, account::TENANT],
            |row| row.get(0),
        )?)
}

fn checked(usage: &Usage) -> Result<Payable, LedgerError> {
    let Usage { prompt_tokens, cached_tokens, completion_tokens, attributed, reference } = *usage;
    let fits =
        [prompt_tokens, cached_tokens, completion_tokens, attributed.nanos(), reference.nanos()]
            .into_iter()
            .all(|figure| i64::try_from(figure).is_ok());
    if fits {
        Ok(Payable::of(usage))
    } else {
        Err(LedgerError::Damaged("a fault cap's figures do not fit".to_owned()))
    }
}

fn insert(
    connection: &Connection,
    caller: i64,
    cap: &FaultCap,
    payable: &Payable,
    record: u64,
) -> Result<(), LedgerError> {
    let FaultCap { caller: _, attempt, model, class, payable: _, at } = cap;
    connection
        .prepare_cached(
            "INSERT INTO fault_caps (request_id, caller_id, attempt, prompt_tokens, cached_tokens,
               completion_tokens, attributed_ns, reference_ns, model, device_class, at_utc_ns,
               record_seq)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
        )?
        .execute(params![
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
            record
        ])?;
    Ok(())
}

/// A metered entry of an attempt, with what says where its correction goes.
struct EntryOfAttempt {
    key: BlockKey,
    sequence: i64,
    amounts: Amounts,
    day: u32,
    model: String,
    class: String,
}

/// Walks the attempt's entries in the order of the device's work; what lies
/// beyond `payable_ns` moves to loss, entry by entry.
fn correct_entries(
    connection: &Connection,
    caller: i64,
    attempt: &Attempt,
    payable_ns: i64,
) -> Result<(), LedgerError> {
    let entries = connection
        .prepare_cached(
            "SELECT entries.epoch_id, entries.block, sequence, amount_ns, day, model, device_class,
               energy_mj
             FROM entries
             JOIN blocks USING (epoch_id, block)
             JOIN epochs ON epochs.id = entries.epoch_id
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3 AND kind = ?4
             ORDER BY entries.epoch_id, entries.block, ordinal",
        )?
        .query_map(params![attempt.request.as_str(), caller, attempt.attempt, METERED], |row| {
            Ok(EntryOfAttempt {
                key: BlockKey { epoch_id: row.get(0)?, block: row.get(1)? },
                sequence: row.get(2)?,
                amounts: Amounts { amount_ns: row.get(3)?, energy_mj: row.get(7)? },
                day: row.get(4)?,
                model: row.get(5)?,
                class: row.get(6)?,
            })
        })?
        .collect::<Result<Vec<_>, _>>()?;
    let mut room = payable_ns;
    for entry in entries {
        let kept = entry.amounts.amount_ns.min(room);
        room -= kept;
        let daily = DailyKey { day: entry.day, caller, model: &entry.model, class: &entry.class };
        let owner = Some((caller, entry.sequence, attempt.request.as_str(), attempt.attempt));
        move_to_loss(connection, entry.key, &daily, owner, entry.amounts.beyond(kept))?;
    }
    Ok(())
}

/// Lowers the charge that the worker's record made to what is payable.
/// False where there is no such record.
fn lower_charge(
    connection: &Connection,
    caller: i64,
    attempt: &Attempt,
    cap: &Payable,
) -> Result<bool, LedgerError> {
    let id = params![attempt.request.as_str(), caller, attempt.attempt];
    let row = connection
        .prepare_cached(
            "SELECT model, device_class, day, counted, prompt_tokens, cached_tokens,
               completion_tokens, reference_ns
             FROM requests WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .query_row(id, |row| {
            let charged = Payable {
                prompt_tokens: row.get(4)?,
                cached_tokens: row.get(5)?,
                completion_tokens: row.get(6)?,
                attributed_ns: 0,
                reference_ns: row.get(7)?,
            };
            let counted: i64 = row.get(3)?;
            Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?, row.get(2)?, counted, charged))
        })
        .optional()?;
    let Some((model, class, day, was_counted, charged)) = row else {
        return Ok(false);
    };
    let lower = Payable {
        prompt_tokens: charged.prompt_tokens.min(cap.prompt_tokens),
        cached_tokens: charged.cached_tokens.min(cap.cached_tokens),
        completion_tokens: charged.completion_tokens.min(cap.completion_tokens),
        attributed_ns: cap.attributed_ns,
        reference_ns: charged.reference_ns.min(cap.reference_ns),
    };
    let counted = lower.is_counted(FinishReason::Fault);
    connection
        .prepare_cached(
            "UPDATE requests SET counted = ?4, prompt_tokens = ?5, cached_tokens = ?6,
               completion_tokens = ?7, reference_ns = ?8, reason = ?9
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .execute(params![
            attempt.request.as_str(),
            caller,
            attempt.attempt,
            counted,
            lower.prompt_tokens,
            lower.cached_tokens,
            lower.completion_tokens,
            lower.reference_ns,
            reason_name(FinishReason::Fault)
        ])?;
    let change = DailyChange {
        charges: 0, // its row was there
        entries: 0,
        requests: i64::from(counted) - was_counted,
        prompt_tokens: lower.prompt_tokens - charged.prompt_tokens,
        cached_tokens: lower.cached_tokens - charged.cached_tokens,
        completion_tokens: lower.completion_tokens - charged.completion_tokens,
        attributed_ns: 0, // the entries' corrections said it
        reference_ns: lower.reference_ns - charged.reference_ns,
        energy_mj: None, // likewise
    };
    add_to_day(connection, &DailyKey { day, caller, model: &model, class: &class }, &change)?;
    Ok(true)
}
