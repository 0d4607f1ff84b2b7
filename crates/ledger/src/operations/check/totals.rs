//! Checks of sums: balances, tiling, sums by day, caps and charges.

use super::{Findings, LISTED};
use crate::error::LedgerError;
use crate::operations::query;
use crate::rows::consistency::{Correction, EpochTiling, WrongDay, WrongPayment};
use crate::rows::{Tables, consistency, epochs, partly_rejected_blocks, refused_blocks};
use crate::rules::correction::is_moved_from;

/// Checks that each epoch's accounts sum to its measured time and energy.
pub(super) fn balances(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for (id, epoch) in epochs::all(tables)? {
        let balance = query::balance_of(tables, id)?;
        if !balance.is_exact() {
            findings.add("balance", format!("epoch {epoch} does not balance: {balance:?}"));
        }
        let energy = query::energy_of(tables, id)?;
        if let Some(energy) = energy.filter(|energy| !energy.is_exact()) {
            findings.add("balance", format!("epoch {epoch} does not balance: {energy:?}"));
        }
    }
    Ok(())
}

/// Checks that blocks are numbered without gaps and that their steps follow one
/// another.
pub(super) fn tiling(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for row in consistency::tiling(tables)? {
        let EpochTiling { epoch, last_block, last_step, blocks, last_step_of_blocks, .. } = &row;
        if !row.agrees_on_end {
            let message = format!("epoch {epoch} and its last block disagree on its end");
            findings.add("tiling", message);
        }
        if (blocks, last_step_of_blocks) != (last_block, last_step) {
            let message = format!(
                "epoch {epoch}: {blocks} of {last_block} blocks, step {last_step_of_blocks} of {last_step}"
            );
            findings.add("tiling", message);
        }
    }
    for (epoch, block) in consistency::overlapping_blocks(tables)? {
        findings
            .add("tiling", format!("block {block} of {epoch} repeats steps of an earlier block"));
    }
    Ok(())
}

/// Checks that the sums by day are those of entries, charges and archives.
pub(super) fn days(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for WrongDay { day, caller, model, class, tier } in consistency::wrong_days(tables, LISTED)? {
        let message = format!(
            "the sums of {day}, caller {caller}, {tier} use of {model} on {class} are not those of \
             its entries"
        );
        findings.add("daily", message);
    }
    Ok(())
}

/// Checks that each attempt pays what was measured, or its cap where that is less,
/// and that corrections move the right energy.
pub(super) fn caps(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for wrong in consistency::wrong_payments(tables, LISTED)? {
        let WrongPayment { request, attempt, paid_ns, payable_ns } = wrong;
        let message = format!(
            "attempt {attempt} of {request} pays {paid_ns} ns where {payable_ns} are payable"
        );
        findings.add("cap", message);
    }
    corrections(tables, findings)
}

/// A correction by its epoch, block and ordinal, and what may be wrong with it.
type Judged = ((String, i64, i64), Option<&'static str>);

/// Checks that each correction corrects an entry of its block and moves the energy
/// of the time that it moves.
fn corrections(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    // A block may have two like entries, so a correction comes once for each entry
    // that it may correct. It is right if it fits one of them.
    let mut judged = Vec::<Judged>::new();
    consistency::each_correction(tables, |row| {
        let Correction { epoch, block, ordinal, account, moved, metered } = row;
        let wrong = match metered {
            None => Some("corrects no entry of its block"),
            Some(metered) => (!is_moved_from(metered, moved, account))
                .then_some("moves other energy than its time had"),
        };
        let key = (epoch, block, ordinal);
        match judged.last_mut().filter(|last| last.0 == key) {
            // One entry that fits clears the finding.
            Some(last) => last.1 = last.1.and(wrong),
            None => {
                // Only wrong ones are kept, so the list stays short.
                judged.pop_if(|last| last.1.is_none());
                judged.push((key, wrong));
            }
        }
        // False ends the reading once the list is full.
        judged.len() <= LISTED
    })?;
    for ((epoch, block, ordinal), wrong) in judged {
        if let Some(wrong) = wrong {
            findings.add("cap", format!("entry {ordinal} of block {block} of {epoch} {wrong}"));
        }
    }
    Ok(())
}

/// Checks that each charge is what its worker recorded, or its cap where that is
/// less.
pub(super) fn charges(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for (request, attempt) in consistency::wrong_charges(tables, LISTED)? {
        let message = format!("attempt {attempt} of {request} is not charged as it was recorded");
        findings.add("charge", message);
    }
    Ok(())
}

/// Lists the blocks that were skipped or posted in part, as remarks.
pub(super) fn refused(tables: Tables<'_>, findings: &mut Findings) -> Result<(), LedgerError> {
    for (epoch, block, reason) in refused_blocks::reasons(tables)? {
        findings.add("refused", format!("block {block} of {epoch} was skipped: {reason}"));
    }
    for (epoch, block, reason) in partly_rejected_blocks::reasons(tables)? {
        findings.add("refused", format!("block {block} of {epoch} was posted in part: {reason}"));
    }
    Ok(())
}
