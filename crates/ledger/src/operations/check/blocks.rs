//! Check of blocks: each block is rebuilt from its rows, which shows that the rows
//! are what was posted and what the audit log states.

use std::collections::HashMap;

use tollgate_domain::{
    Attempt, Caller, DeviceNanos, FinishedAttempt, Millijoules, RequestId, SequenceId, Share,
};

use super::audit::states;
use super::{Findings, with_cause};
use crate::error::LedgerError;
use crate::rows::attempts::StoredAttempt;
use crate::rows::blocks::BlockRow;
use crate::rows::entries::{METERED, StoredEntry, StoredOwner, account};
use crate::rows::{BlockKey, CallerId, Tables, attempts, blocks, callers, entries, name};
use crate::rules::block::{digest_of, energy_due};
use crate::rules::record::{Body, Reported};

type Callers = HashMap<CallerId, Caller>;

/// Rebuilds every block: it must balance and be the posted one.
pub(super) fn rebuild_all(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    // Read once, because every share of every block names a caller.
    let callers = callers::all(tables)?;
    blocks::each(tables, |epoch, number, row| {
        let checked = row.and_then(|row| rebuild(tables, &callers, row, findings));
        // One unreadable block must not hide the findings of the others.
        if let Err(error) = checked {
            let cause = with_cause(&error);
            findings.add("block", format!("block {number} of epoch no. {epoch}: {cause}"));
        }
    })
}

fn rebuild(
    tables: Tables<'_>,
    callers: &Callers,
    mut row: BlockRow,
    findings: &mut Findings,
) -> Result<(), LedgerError> {
    let key = BlockKey { epoch: row.epoch, block: row.block };
    let (number, epoch) = (row.block, row.parts.epoch);
    // The digest covers shares and finished attempts, so both are read back.
    let records = add_finished(tables, callers, key, &mut row)?;
    let sums = add_entries(tables, callers, key, &mut row)?;
    let BlockRow { parts, digest, day, .. } = &row;
    if (sums.metered, sums.corrections) != (0, 0) {
        let Sums { metered, corrections, .. } = sums;
        let message = format!(
            "block {number} of {epoch} sums to {metered} ns, its corrections to {corrections} ns"
        );
        findings.add("block", message);
    }
    if sums.energy != energy_due(parts) || sums.corrections_mj != 0 {
        let message = format!("the energy of block {number} of {epoch} is not split by time");
        findings.add("block", message);
    }
    if *digest != digest_of(parts)? || *day != parts.started.day().0 {
        findings.add("block", format!("block {number} of {epoch} is not what was posted"));
    }
    if !records_agree(tables, &row, &records)? {
        let message = format!("block {number} of {epoch} is not what its records state");
        findings.add("audit", message);
    }
    Ok(())
}

/// Returns true if the block's records state what its rows hold. `records` are the
/// records of its finished attempts.
fn records_agree(
    tables: Tables<'_>,
    row: &BlockRow,
    records: &[Option<u64>],
) -> Result<bool, LedgerError> {
    let BlockRow { parts, digest, record, reported_digest, rejection, .. } = row;
    // A block without a kept reported form was accepted as it was reported.
    let reported = reported_digest.as_deref().unwrap_or(digest);
    let reported = <&[u8; 32]>::try_from(reported)
        .map_err(|_| LedgerError::Damaged("a digest of a block".to_owned()))?;
    let reported = Reported { digest: reported, rejection: rejection.as_deref() };
    // Every record is compared, even after one differs: all share one finding.
    let mut agree = states(tables, *record, &Body::block(parts, digest, reported))?;
    for (finished, record) in parts.finished.iter().zip(records) {
        agree &= states(tables, *record, &Body::attempt(parts, finished))?;
    }
    Ok(agree)
}

fn find_caller(callers: &Callers, id: CallerId) -> Result<Caller, LedgerError> {
    callers.get(&id).cloned().ok_or_else(|| LedgerError::Damaged(format!("no caller {id}")))
}

/// Sums over a block's entries.
#[derive(Default)]
struct Sums {
    /// Metered entries, ns.
    metered: i64,
    /// Corrections, ns.
    corrections: i64,
    /// Corrections, mJ.
    corrections_mj: i64,
    /// Energy of each metered entry, mJ, in their order.
    energy: Vec<Option<i64>>,
}

/// Adds a block's metered entries to its parts and returns the sums.
fn add_entries(
    tables: Tables<'_>,
    callers: &Callers,
    key: BlockKey,
    row: &mut BlockRow,
) -> Result<Sums, LedgerError> {
    let parts = &mut row.parts;
    let mut sums = Sums::default();
    entries::each_of_block(tables, key, |entry| {
        let StoredEntry { kind, account, amounts, owner } = entry;
        let (amount, energy) = (amounts.amount_ns, amounts.energy_mj);
        // Wrapping sums, because a damaged file may hold any amount.
        if kind != METERED {
            sums.corrections = sums.corrections.wrapping_add(amount);
            sums.corrections_mj = sums.corrections_mj.wrapping_add(energy.unwrap_or(0));
            return Ok(());
        }
        sums.metered = sums.metered.wrapping_add(amount);
        sums.energy.push(energy);
        // The device's entry is a credit, hence negative; blocks state times without a sign.
        let nanos = DeviceNanos(amount.unsigned_abs());
        match (account, owner) {
            // The device's entry is the block's only one for its wall time and whole energy.
            (account::DEVICE, _) => {
                parts.wall = nanos;
                parts.energy = energy.map(|energy| Millijoules(energy.unsigned_abs()));
            }
            (account::OVERHEAD, _) => parts.overhead = nanos,
            (account::IDLE, _) => parts.idle = nanos,
            (account::LOSS, _) => parts.loss = nanos,
            (_, Some(owner)) => parts.shares.push(share(callers, owner, nanos)?),
            (other, None) => {
                return Err(LedgerError::Damaged(format!("unknown account {other}")));
            }
        }
        Ok(())
    })?;
    Ok(sums)
}

fn share(
    callers: &Callers,
    owner: StoredOwner,
    attributed: DeviceNanos,
) -> Result<Share, LedgerError> {
    Ok(Share {
        sequence: SequenceId(owner.sequence),
        caller: find_caller(callers, owner.caller)?,
        attempt: Attempt { request: name(RequestId::new(&owner.request))?, attempt: owner.attempt },
        attributed,
        tier: owner.tier,
    })
}

/// Adds a block's finished attempts to its parts and returns their records.
fn add_finished(
    tables: Tables<'_>,
    callers: &Callers,
    key: BlockKey,
    row: &mut BlockRow,
) -> Result<Vec<Option<u64>>, LedgerError> {
    let mut records = Vec::new();
    for stored in attempts::of_block(tables, key)? {
        let StoredAttempt { caller, attempt, usage, stages, reason, finished, tier, record } =
            stored;
        let caller = find_caller(callers, caller)?;
        records.push(record);
        let finished = FinishedAttempt { caller, attempt, usage, stages, reason, finished, tier };
        row.parts.finished.push(finished);
    }
    Ok(records)
}
