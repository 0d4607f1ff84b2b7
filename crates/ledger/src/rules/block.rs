//! Rules for a block that comes in: may it follow its epoch, and which entries
//! belong to the device and the platform.

use std::io::BufWriter;
use std::ops::Range;

use sha2::{Digest, Sha256};
use tollgate_domain::block::{EnergyParts, LARGEST_BLOCK};
use tollgate_domain::{BlockParts, DeviceNanos, Millijoules, UtcTime};

use crate::act::RefusedBlock;
use crate::error::{BlockRefusal, LedgerError};
use crate::rows::entries::{Amounts, Entry, METERED, account};
use crate::rows::epochs::{EpochRow, WorkerIdentity};

/// Ordinals below this are the block's device and platform entries.
pub(crate) const FIRST_SHARE: i64 = 4;
/// The first ordinal of corrections: above every ordinal that a share can have.
pub(crate) const FIRST_CORRECTION: i64 = FIRST_SHARE + LARGEST_BLOCK as i64;
/// Characters of a reason that are kept. A worker's words may be in it.
const LONGEST_REASON: usize = 500;

/// Returns the SHA-256 of the block's fields. `check` makes the block again from
/// its rows and compares, so that a flipped bit in any field is found.
pub(crate) fn digest_of(parts: &BlockParts) -> Result<[u8; 32], LedgerError> {
    // Buffered: the serialiser writes a few bytes at a time.
    let mut hashed = BufWriter::new(Sha256::new());
    serde_json::to_writer(&mut hashed, parts)
        .map_err(|error| LedgerError::Damaged(error.to_string()))?;
    let hash = hashed.into_inner().map_err(|error| LedgerError::Damaged(error.to_string()))?;
    Ok(hash.finalize().into())
}

/// Refuses a block with a reason.
pub(crate) fn refuse(parts: &BlockParts, refusal: BlockRefusal) -> LedgerError {
    LedgerError::Refused { epoch: parts.epoch, number: parts.number, refusal }
}

/// Checks that a block follows what is known of its epoch.
///
/// # Errors
/// The reason of the refusal.
pub(crate) fn check_against_epoch(
    parts: &BlockParts,
    epoch: Option<&EpochRow>,
) -> Result<(), BlockRefusal> {
    let Some(epoch) = epoch else {
        // The first block of an epoch has number 1; a later one means that blocks were lost.
        return if parts.number == 1 { Ok(()) } else { Err(BlockRefusal::Gap { expected: 1 }) };
    };
    let expected = epoch.last_block + 1;
    // Checked before the number: no number is right after the end.
    if epoch.has_ended {
        return Err(BlockRefusal::Ended);
    }
    if parts.number != expected {
        return Err(BlockRefusal::Gap { expected });
    }
    let identity = WorkerIdentity::of(parts);
    // An epoch that began with skipped blocks takes its device from the first
    // block that is posted.
    let fits = epoch.identity == identity
        || (epoch.identity.has_no_device() && epoch.identity.worker == identity.worker);
    if !fits {
        return Err(BlockRefusal::Identity);
    }
    // A block without steps states 0 and cannot repeat a step.
    if parts.first_step != 0 && parts.first_step <= epoch.last_step {
        return Err(BlockRefusal::Steps { after: epoch.last_step });
    }
    Ok(())
}

/// Returns the blocks before `parts` that were lost: this ledger was `restored`
/// from a backup that is older than they are, and no journal has them any more.
pub(crate) fn lost_before(
    parts: &BlockParts,
    epoch: Option<&EpochRow>,
    restored: Option<UtcTime>,
) -> Range<u64> {
    let expected = epoch.map_or(1, |epoch| epoch.last_block + 1);
    // A gap in blocks that began after the restore is a fault, not a loss, and must be refused.
    let is_older = restored.is_some_and(|at| parts.started < at);
    if is_older { expected..parts.number } else { expected..expected }
}

/// The decision on a block that is to be skipped.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Skip {
    /// The block is the next one: skip it.
    Now,
    /// The block was posted or skipped before.
    Already,
}

/// Decides on a block that is to be skipped.
///
/// # Errors
/// The epoch belongs to another worker, or blocks before this one are missing.
pub(crate) fn check_skip(
    refused: &RefusedBlock,
    known: Option<&EpochRow>,
) -> Result<Skip, LedgerError> {
    let &RefusedBlock { epoch, number, .. } = refused;
    let refuse = |refusal| LedgerError::Refused { epoch, number, refusal };
    if known.is_some_and(|known| known.identity.worker != refused.worker.as_str()) {
        return Err(refuse(BlockRefusal::Identity));
    }
    // Blocks are numbered from 1 in each epoch.
    let expected = known.map_or(1, |known| known.last_block + 1);
    if number < expected {
        // A block that is posted already also counts: nothing is left to skip.
        Ok(Skip::Already)
    } else if number > expected {
        Err(refuse(BlockRefusal::Gap { expected }))
    } else {
        Ok(Skip::Now)
    }
}

/// Returns a skipped block in the form that is kept: a bounded reason, and a time
/// that the database can hold.
pub(crate) fn as_kept(refused: &RefusedBlock) -> RefusedBlock {
    RefusedBlock {
        reason: shorten(&refused.reason),
        at: UtcTime(refused.at.0.min(i64::MAX as u64)),
        ..refused.clone()
    }
}

/// Cuts a reason to the length that is kept.
pub(crate) fn shorten(reason: &str) -> String {
    // Cut by characters, because a cut by bytes could split one.
    reason.chars().take(LONGEST_REASON).collect()
}

/// Returns the entries of the device and of the platform, with their ordinals. An
/// account that received no time has no entry.
pub(crate) fn platform_entries(
    parts: &BlockParts,
    energy: Option<&EnergyParts>,
) -> impl Iterator<Item = (i64, Entry<'static>)> {
    // The cast is safe: a `Block` exists only with figures that fit `i64`.
    let signed = |amount: DeviceNanos| amount.nanos() as i64;
    let drew = |of: fn(&EnergyParts) -> Millijoules| energy.map(|all| of(all).0 as i64);
    // A device is credited with its time and energy; all others are debited.
    let all = parts.energy.map(|energy| -(energy.0 as i64));
    [
        (0, account::DEVICE, -signed(parts.wall), all),
        (1, account::OVERHEAD, signed(parts.overhead), drew(|energy| energy.overhead)),
        (2, account::IDLE, signed(parts.idle), drew(|energy| energy.idle)),
        (3, account::LOSS, signed(parts.loss), drew(|energy| energy.loss)),
    ]
    .into_iter()
    // The device's entry always stands: it holds the block's wall time and energy.
    .filter(|(ordinal, _, amount_ns, _)| *ordinal == 0 || *amount_ns != 0)
    .map(|(ordinal, account, amount_ns, energy_mj)| {
        let amounts = Amounts { amount_ns, energy_mj };
        (ordinal, Entry { kind: METERED, account, amounts, owner: None })
    })
}

/// Returns the energy that a block's metered entries must have, in their order:
/// the block's energy split by time once more.
pub(crate) fn energy_due(parts: &BlockParts) -> Vec<Option<i64>> {
    let platform = [parts.overhead, parts.idle, parts.loss];
    let split = parts.energy_parts();
    let signed = |energy: Millijoules| energy.millijoules() as i64;
    let of_platform = match &split {
        Some(split) => [split.overhead, split.idle, split.loss].map(|it| Some(signed(it))),
        None => [None; 3],
    };
    let of_shares = |index: usize| split.as_ref().map(|split| signed(split.shares[index]));
    // Only a damaged file holds energy that does not fit.
    let mut due = vec![parts.energy.map(|energy| signed(energy).wrapping_neg())];
    // An account that received no time has no entry.
    let entries = platform.iter().zip(of_platform).filter(|(time, _)| **time != DeviceNanos::ZERO);
    due.extend(entries.map(|(_, energy)| energy));
    due.extend((0..parts.shares.len()).map(of_shares));
    due
}

/// Checks that the written entries of a block sum to zero, whatever the block
/// states: both sides of a boundary check the sum.
pub(crate) fn refuse_unless_balanced((ns, mj): (i64, i64)) -> Result<(), LedgerError> {
    if (ns, mj) == (0, 0) {
        Ok(())
    } else {
        Err(LedgerError::Damaged(format!("a block's entries sum to {ns} ns and {mj} mJ")))
    }
}

#[cfg(test)]
mod tests {
    use tollgate_domain::{Device, DeviceClass, ModelName, WorkerEpoch, WorkerName};

    use super::*;
    use crate::rows::EpochId;

    fn parts(number: u64) -> BlockParts {
        BlockParts {
            epoch: WorkerEpoch(7),
            number,
            worker: WorkerName::new("0").expect("a name"),
            device: Device { class: DeviceClass::cpu(), name: "cpu".into(), uuid: "u".into() },
            model: ModelName::new("m").expect("a name"),
            calibration: "v1".into(),
            first_step: 10 * number,
            last_step: 10 * number + 9,
            started: UtcTime(100),
            wall: DeviceNanos(35),
            overhead: DeviceNanos(10),
            idle: DeviceNanos(20),
            loss: DeviceNanos(5),
            shares: Vec::new(),
            finished: Vec::new(),
            last_of_epoch: false,
            energy: None,
        }
    }

    fn known() -> EpochRow {
        EpochRow {
            id: EpochId::for_test(1),
            last_block: 1,
            last_step: 19,
            has_ended: false,
            identity: WorkerIdentity::of(&parts(1)),
        }
    }

    #[test]
    fn block_must_follow_its_epoch() {
        let check = |change: fn(&mut BlockParts), epoch: &EpochRow| {
            let mut parts = parts(2);
            change(&mut parts);
            check_against_epoch(&parts, Some(epoch))
        };
        assert_eq!(check(|_| (), &known()), Ok(()));
        assert_eq!(check(|it| it.number = 3, &known()), Err(BlockRefusal::Gap { expected: 2 }));
        assert_eq!(check(|it| it.device.uuid.clear(), &known()), Err(BlockRefusal::Identity));
        assert_eq!(
            check(|it| it.first_step = 19, &known()),
            Err(BlockRefusal::Steps { after: 19 })
        );
        let ended = EpochRow { has_ended: true, ..known() };
        assert_eq!(check(|_| (), &ended), Err(BlockRefusal::Ended));
        let skipped = EpochRow { identity: WorkerIdentity::without_device("0"), ..known() };
        assert_eq!(check(|_| (), &skipped), Ok(()));
        let other = EpochRow { identity: WorkerIdentity::without_device("1"), ..known() };
        assert_eq!(check(|_| (), &other), Err(BlockRefusal::Identity));
        assert_eq!(check_against_epoch(&parts(2), None), Err(BlockRefusal::Gap { expected: 1 }));
    }

    #[test]
    fn blocks_are_lost_only_before_a_restore() {
        let lost = |number, restored: Option<u64>| {
            lost_before(&parts(number), Some(&known()), restored.map(UtcTime))
        };
        assert!(lost(5, None).is_empty());
        assert!(lost(5, Some(100)).is_empty());
        assert_eq!(lost(5, Some(101)), 2..5);
        assert!(lost(2, Some(101)).is_empty());
    }

    #[test]
    fn platform_entries_leave_out_empty_accounts() {
        let ordinals = |change: fn(&mut BlockParts)| -> Vec<i64> {
            let mut parts = parts(1);
            change(&mut parts);
            platform_entries(&parts, None).map(|(ordinal, _)| ordinal).collect()
        };
        assert_eq!(ordinals(|_| ()), [0, 1, 2, 3]);
        assert_eq!(ordinals(|it| it.idle = DeviceNanos::ZERO), [0, 1, 3]);
    }
}
