//! Each block, made again from its rows: only so is it seen that they are what
//! was posted, and what the audit log says.

use std::collections::HashMap;

use rusqlite::{Connection, params};
use tollgate_domain::{
    Attempt, BlockParts, Caller, Device, DeviceClass, DeviceNanos, FinishedAttempt, KeyId,
    Millijoules, ModelName, RequestId, SequenceId, Share, Stages, TenantId, Usage, UtcTime,
    WorkerEpoch, WorkerName,
};

use super::{Findings, in_full};
use crate::LedgerError;
use crate::audit::check::says;
use crate::audit::record::{Body, Said};
use crate::charge::reason_named;
use crate::post::digest_of;
use crate::query::name;
use crate::schema::{METERED, account};

/// Each block is made again from its rows: it must balance and be the same.
pub(super) fn made_again(
    connection: &Connection,
    findings: &mut Findings,
) -> Result<(), LedgerError> {
    let callers = callers(connection)?;
    let mut statement = connection.prepare(
        "SELECT epoch_id, block, epoch, worker, device_class, device_name, device_uuid, model,
           calibration, first_step, blocks.last_step, started_utc_ns, last_of_epoch, blocks.digest, day,
           record_seq, said.digest, said.reason
         FROM blocks JOIN epochs ON epochs.id = blocks.epoch_id
         LEFT JOIN struck_blocks AS said USING (epoch_id, block) ORDER BY epoch_id, block",
    )?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        if let Err(error) = block(connection, &callers, row, findings) {
            let (epoch, number): (i64, i64) = (row.get(0)?, row.get(1)?);
            let message = format!("block {number} of epoch no. {epoch}: {}", in_full(&error));
            findings.add("block", message);
        }
    }
    Ok(())
}

/// One block, from its row of the query above.
fn block(
    connection: &Connection,
    callers: &HashMap<i64, Caller>,
    row: &rusqlite::Row<'_>,
    findings: &mut Findings,
) -> Result<(), LedgerError> {
    let (epoch_id, number): (i64, i64) = (row.get(0)?, row.get(1)?);
    let epoch_text: String = row.get(2)?;
    let mut parts = BlockParts {
        epoch: name(WorkerEpoch::try_from(epoch_text.clone()))?,
        number: number as u64,
        worker: name(WorkerName::new(&row.get::<_, String>(3)?))?,
        device: Device {
            class: name(DeviceClass::new(&row.get::<_, String>(4)?))?,
            name: row.get(5)?,
            uuid: row.get(6)?,
        },
        model: name(ModelName::new(&row.get::<_, String>(7)?))?,
        calibration: row.get(8)?,
        first_step: row.get(9)?,
        last_step: row.get(10)?,
        started: UtcTime(row.get(11)?),
        wall: DeviceNanos::ZERO,
        overhead: DeviceNanos::ZERO,
        idle: DeviceNanos::ZERO,
        loss: DeviceNanos::ZERO,
        shares: Vec::new(),
        finished: Vec::new(),
        last_of_epoch: row.get(12)?,
        energy: None,
    };
    let records = add_finished(connection, callers, epoch_id, &mut parts)?;
    let digest: Vec<u8> = row.get(13)?;
    let day: u32 = row.get(14)?;
    let sums = add_entries(connection, callers, epoch_id, &mut parts)?;
    if (sums.metered, sums.corrections) != (0, 0) {
        findings.add(
            "block",
            format!(
                "block {number} of {epoch_text} sums to {} ns, its corrections to {} ns",
                sums.metered, sums.corrections
            ),
        );
    }
    if sums.energy != energy_due(&parts) || sums.corrections_mj != 0 {
        let message = format!("the energy of block {number} of {epoch_text} is not split by time");
        findings.add("block", message);
    }
    if digest != digest_of(&parts)? || day != parts.started.day().0 {
        findings.add("block", format!("block {number} of {epoch_text} is not what was posted"));
    }
    let (said, struck): (Option<Vec<u8>>, Option<String>) = (row.get(16)?, row.get(17)?);
    let said = <[u8; 32]>::try_from(said.unwrap_or_else(|| digest.clone()));
    let said = said.map_err(|_| LedgerError::Damaged("a digest of a block".to_owned()))?;
    let said = Said { digest: &said, struck: struck.as_deref() };
    let mut told = says(connection, row.get(15)?, &Body::block(&parts, &digest, said))?;
    for (finished, record) in parts.finished.iter().zip(records) {
        told &= says(connection, record, &Body::attempt(&parts, finished))?;
    }
    if !told {
        let message = format!("block {number} of {epoch_text} is not what its records say");
        findings.add("audit", message);
    }
    Ok(())
}

fn callers(connection: &Connection) -> Result<HashMap<i64, Caller>, LedgerError> {
    let mut statement = connection.prepare("SELECT id, tenant, key FROM callers")?;
    let mut rows = statement.query([])?;
    let mut callers = HashMap::new();
    while let Some(row) = rows.next()? {
        let tenant = name(TenantId::new(&row.get::<_, String>(1)?))?;
        let key = name(KeyId::new(&row.get::<_, String>(2)?))?;
        callers.insert(row.get(0)?, Caller { tenant, key });
    }
    Ok(callers)
}

fn caller(callers: &HashMap<i64, Caller>, id: i64) -> Result<Caller, LedgerError> {
    callers.get(&id).cloned().ok_or_else(|| LedgerError::Damaged(format!("no caller {id}")))
}

/// What a block's entries say together.
#[derive(Default)]
struct Sums {
    /// What was metered, ns.
    metered: i64,
    /// What was corrected, ns.
    corrections: i64,
    /// Likewise, mJ.
    corrections_mj: i64,
    /// Of each metered entry, mJ, in their order.
    energy: Vec<Option<i64>>,
}

/// Puts a block's metered entries into `parts`; what they sum to.
fn add_entries(
    connection: &Connection,
    callers: &HashMap<i64, Caller>,
    epoch_id: i64,
    parts: &mut BlockParts,
) -> Result<Sums, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT kind, account, amount_ns, caller_id, sequence, request_id, attempt, energy_mj
         FROM entries WHERE epoch_id = ?1 AND block = ?2 ORDER BY ordinal",
    )?;
    let mut rows = statement.query(params![epoch_id, parts.number as i64])?;
    let mut sums = Sums::default();
    while let Some(row) = rows.next()? {
        let (amount, energy): (i64, Option<i64>) = (row.get(2)?, row.get(7)?);
        if row.get::<_, i64>(0)? != METERED {
            sums.corrections = sums.corrections.wrapping_add(amount);
            sums.corrections_mj = sums.corrections_mj.wrapping_add(energy.unwrap_or(0));
            continue;
        }
        sums.metered = sums.metered.wrapping_add(amount);
        sums.energy.push(energy);
        let nanos = DeviceNanos(amount.unsigned_abs());
        match row.get(1)? {
            account::DEVICE => {
                parts.wall = nanos;
                parts.energy = energy.map(|energy| Millijoules(energy.unsigned_abs()));
            }
            account::OVERHEAD => parts.overhead = nanos,
            account::IDLE => parts.idle = nanos,
            account::LOSS => parts.loss = nanos,
            _ => parts.shares.push(Share {
                sequence: SequenceId(row.get(4)?),
                caller: caller(callers, row.get(3)?)?,
                attempt: Attempt {
                    request: name(RequestId::new(&row.get::<_, String>(5)?))?,
                    attempt: row.get(6)?,
                },
                attributed: nanos,
            }),
        }
    }
    Ok(sums)
}

/// What the energy of a block's entries has to be, in their order: its split
/// by time once more.
fn energy_due(parts: &BlockParts) -> Vec<Option<i64>> {
    let platform = [parts.overhead, parts.idle, parts.loss];
    let split = parts.energy_parts();
    let signed = |energy: Millijoules| energy.millijoules() as i64;
    let of_platform = match &split {
        Some(split) => [split.overhead, split.idle, split.loss].map(|it| Some(signed(it))),
        None => [None; 3],
    };
    let of_shares = |index: usize| split.as_ref().map(|split| signed(split.shares[index]));
    // Only a damaged file's does not fit.
    let mut due = vec![parts.energy.map(|energy| signed(energy).wrapping_neg())];
    // What took no time has no entry.
    let entries = platform.iter().zip(of_platform).filter(|(time, _)| **time != DeviceNanos::ZERO);
    due.extend(entries.map(|(_, energy)| energy));
    due.extend((0..parts.shares.len()).map(of_shares));
    due
}

/// Puts what finished in a block into `parts`; the number of each one's record.
fn add_finished(
    connection: &Connection,
    callers: &HashMap<i64, Caller>,
    epoch_id: i64,
    parts: &mut BlockParts,
) -> Result<Vec<Option<u64>>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT caller_id, request_id, attempt, prompt_tokens, cached_tokens, completion_tokens,
           attributed_ns, reference_ns, queue_ns, prefill_ns, decode_ns, reason, finished_utc_ns,
           record_seq
         FROM attempts WHERE epoch_id = ?1 AND block = ?2 ORDER BY ordinal",
    )?;
    let mut rows = statement.query([epoch_id, parts.number as i64])?;
    let mut records = Vec::new();
    while let Some(row) = rows.next()? {
        records.push(row.get(13)?);
        parts.finished.push(FinishedAttempt {
            caller: caller(callers, row.get(0)?)?,
            attempt: Attempt {
                request: name(RequestId::new(&row.get::<_, String>(1)?))?,
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
            reason: reason_named(&row.get::<_, String>(11)?)?,
            finished: UtcTime(row.get(12)?),
        });
    }
    Ok(records)
}
