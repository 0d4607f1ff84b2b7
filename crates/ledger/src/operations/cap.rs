//! Fault caps: when a request ends by our fault, the tenant pays for what reached
//! it and `platform.loss` the rest. A cap is posted once for an attempt; it corrects
//! the entries that are there and governs those that come later.

use super::chain::Chain;
use super::post::move_to_loss;
use crate::act::{FaultCap, Posted};
use crate::error::LedgerError;
use crate::rows::charges::{Charge, ChargeWriter, Payable};
use crate::rows::daily::{DailyChange, DailyKey};
use crate::rows::entries::EntryOwner;
use crate::rows::{
    AttemptKey, Tables, archives, callers, charges, daily, entries, fault_caps, faults,
    gateway_days,
};
use crate::rules::charge::{LoweredCharge, end_by_cap, lower, payable_of_cap};
use crate::rules::correction;
use crate::rules::record::Body;

/// Posts a cap and its record.
///
/// # Errors
/// [`LedgerError::AlreadySettled`] where another cap stands, and storage errors.
pub(crate) fn post(
    tables: Tables<'_>,
    chain: &mut Chain,
    cap: &FaultCap,
) -> Result<Posted, LedgerError> {
    let caller = callers::find_or_insert(tables, &cap.caller)?;
    let payable = payable_of_cap(cap)?;
    let key = AttemptKey { caller, attempt: &cap.attempt };
    match find(tables, key)? {
        // The gateway submits a cap again if it lost the answer.
        Some(known) if known == payable => return Ok(Posted::Already),
        // A second cap would correct the same entries twice.
        Some(_) => return Err(LedgerError::AlreadySettled),
        None => {
            let record = chain.append(tables, &Body::cap(cap))?;
            fault_caps::insert(tables, caller, cap, &payable, record)?;
        }
    }
    faults::delete(tables, key)?;
    // Entries that come later are corrected when they are posted.
    correct_entries(tables, key, payable.attributed_ns)?;
    if !lower_charge(tables, key, &payable)? {
        charge_cap(tables, key, cap, payable)?;
    }
    Ok(Posted::New)
}

/// Finds the cap on an attempt. An archived attempt is settled: its cap is zero,
/// because no more is paid for it.
pub(crate) fn find(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
) -> Result<Option<Payable>, LedgerError> {
    let cap = fault_caps::find(tables, key)?;
    if cap.is_none() && archives::attempt_ended(tables, key)?.is_some() {
        return Ok(Some(Payable::default()));
    }
    Ok(cap)
}

/// Moves what the attempt's entries hold beyond `payable_ns` to `platform.loss`.
fn correct_entries(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
    payable_ns: i64,
) -> Result<(), LedgerError> {
    let metered = entries::metered_of(tables, key)?;
    for (entry, excess) in correction::excesses(metered, payable_ns) {
        let daily = DailyKey {
            // A correction belongs to the day of the work, whenever the cap comes.
            day: entry.day,
            caller: key.caller,
            model: &entry.model,
            class: &entry.class,
            tier: entry.tier,
        };
        let owner = EntryOwner { attempt: key, sequence: entry.sequence, tier: entry.tier };
        move_to_loss(tables, entry.key, &daily, owner, excess)?;
    }
    Ok(())
}

/// Lowers the charge that the worker's report made. Returns false where there is no
/// report.
fn lower_charge(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
    cap: &Payable,
) -> Result<bool, LedgerError> {
    let Some(charged) = charges::find(tables, key)? else { return Ok(false) };
    // The rules compute row and day from one decision, so the two cannot drift apart.
    let LoweredCharge { payable, is_counted, change } = lower(&charged, cap);
    // The row and its day change together, or `check` reports the day.
    charges::lower(tables, key, &payable, is_counted)?;
    let (model, class) = (&*charged.model, &*charged.class);
    let (day, caller, tier) = (charged.day, key.caller, charged.tier);
    let daily = DailyKey { day, caller, model, class, tier };
    add_charge(tables, key, &daily, &change)?;
    Ok(true)
}

/// Charges the cap itself: the worker died before it could report the end.
fn charge_cap(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
    cap: &FaultCap,
    payable: Payable,
) -> Result<(), LedgerError> {
    let finished = end_by_cap(cap);
    let is_counted = payable.is_counted(finished.reason);
    let (caller, model, class) = (key.caller, cap.model.as_str(), cap.class.as_str());
    let charge = Charge { caller, finished: &finished, payable, is_counted, model, class };
    // The worker's report, if it still comes, only fills in the stages.
    ChargeWriter::new(tables)?.insert(&charge)?;
    let day = finished.finished.day().0;
    let change = DailyChange::by_charge(&payable, is_counted);
    add_charge(tables, key, &DailyKey { day, caller, model, class, tier: cap.tier }, &change)
}

/// Adds the change of an attempt's charge to the sums of its day.
fn add_charge(
    tables: Tables<'_>,
    key: AttemptKey<'_>,
    daily: &DailyKey<'_>,
    change: &DailyChange,
) -> Result<(), LedgerError> {
    daily::add(tables, daily, change)?;
    gateway_days::add(tables, key.attempt.request.gateway(), daily, change)
}
