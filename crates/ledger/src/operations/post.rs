//! Posting of blocks: a block is checked against its epoch, then written as entries
//! that sum to zero, with its audit records.

use std::collections::{BTreeMap, HashMap};

use tollgate_domain::{
    Attempt, Block, BlockParts, Caller, FinishReason, FinishedAttempt, Millijoules, Share, Tier,
};

use super::cap;
use super::chain::Chain;
use crate::act::{AdminAction, PartiallyRejectedBlock, Posted, RefusedBlock};
use crate::error::{BlockRefusal, LedgerError};
use crate::rows::attempts::{AttemptWriter, FinishedAt};
use crate::rows::charges::{Charge, ChargeWriter, Payable};
use crate::rows::daily::{DailyChange, DailyKey};
use crate::rows::entries::{Amounts, Entry, EntryOwner, EntryWriter, METERED, account};
use crate::rows::epochs::EpochRow;
use crate::rows::{
    AttemptKey, BlockKey, CallerId, Tables, actions, archives, blocks, callers, charges, daily,
    entries, epochs, fault_caps, faults, gateway_days, meta, partly_rejected_blocks,
    refused_blocks,
};
use crate::rules::block::{self, FIRST_CORRECTION, FIRST_SHARE, Skip, digest_of, refuse};
use crate::rules::charge::DayChanges;
use crate::rules::correction;
use crate::rules::record::{Body, Reported};

/// Posts a block and its records.
///
/// # Errors
/// [`LedgerError::Refused`] where the block contradicts the ledger, and storage
/// errors.
pub(crate) fn post_block(
    tables: Tables<'_>,
    chain: &mut Chain,
    block: &Block,
) -> Result<Posted, LedgerError> {
    let digest = digest_of(block.parts())?;
    post(tables, chain, block.parts(), &digest, Reported { digest: &digest, rejection: None })
}

/// Posts the accepted part of a block. The worker will send the reported form
/// again, so the digest of that form is kept as well.
///
/// # Errors
/// As [`post_block`].
pub(crate) fn post_partly(
    tables: Tables<'_>,
    chain: &mut Chain,
    partly: &PartiallyRejectedBlock,
) -> Result<Posted, LedgerError> {
    let PartiallyRejectedBlock { reported, accepted, reason } = partly;
    let accepted = accepted.parts();
    let digest = digest_of(reported.parts())?;
    // The same text goes into the row and the record, so both agree.
    let reason = block::shorten(reason);
    let said = Reported { digest: &digest, rejection: Some(&reason) };
    let posted = post(tables, chain, accepted, &digest_of(accepted)?, said)?;
    // A block that was there already has its row from the first time.
    if posted == Posted::New {
        let epoch = epochs::find(tables, accepted.epoch)?
            .ok_or_else(|| LedgerError::Damaged("an epoch was posted and is not there".into()))?;
        let key = BlockKey { epoch: epoch.id, block: accepted.number as i64 };
        partly_rejected_blocks::insert(tables, key, &digest, &reason)?;
    }
    Ok(posted)
}

/// Posts `parts` unless a block with the same reported form is there.
fn post(
    tables: Tables<'_>,
    chain: &mut Chain,
    parts: &BlockParts,
    digest: &[u8; 32],
    reported: Reported<'_>,
) -> Result<Posted, LedgerError> {
    // The skipped blocks moved the epoch on, or made it.
    let mut epoch = epochs::find(tables, parts.epoch)?;
    // A worker sends a block again after each reconnect.
    if let Some(posted) = already_posted(tables, parts, epoch.as_ref(), reported.digest)? {
        return Ok(posted);
    }
    if skip_lost(tables, chain, parts, epoch.as_ref())? {
        epoch = epochs::find(tables, parts.epoch)?;
    }
    block::check_against_epoch(parts, epoch.as_ref()).map_err(|refusal| refuse(parts, refusal))?;
    let epoch_id = match &epoch {
        Some(known) => {
            epochs::advance(tables, known, parts)?;
            known.id
        }
        None => epochs::insert(tables, parts)?,
    };
    let key = BlockKey { epoch: epoch_id, block: parts.number as i64 };
    // The record comes before the rows: each row names the record's number.
    let record = chain.append(tables, &Body::block(parts, digest, reported))?;
    blocks::insert(tables, key, parts, digest, record)?;
    post_entries(tables, chain, key, parts)?;
    // An error here rolls the whole block back.
    block::refuse_unless_balanced(entries::sums_of_block(tables, key)?)?;
    Ok(Posted::New)
}

/// Writes the entries, finished attempts and day sums of a block.
fn post_entries(
    tables: Tables<'_>,
    chain: &mut Chain,
    key: BlockKey,
    parts: &BlockParts,
) -> Result<(), LedgerError> {
    let energy = parts.energy_parts();
    // Platform entries first: their ordinals are below every share.
    let mut posting = Posting::new(tables, key, parts)?;
    for (ordinal, entry) in block::platform_entries(parts, energy.as_ref()) {
        posting.entry.insert(key, ordinal, &entry)?;
    }
    for (index, share) in parts.shares.iter().enumerate() {
        // The energy is split over these same shares, so the index is within bounds.
        let drew = energy.as_ref().map(|energy| energy.shares[index]);
        posting.share(FIRST_SHARE + index as i64, share, drew)?;
    }
    for (index, finished) in parts.finished.iter().enumerate() {
        // One record per attempt, so that one request can be proved alone.
        let record = chain.append(tables, &Body::attempt(parts, finished))?;
        posting.finished(FinishedAt { index, record }, finished)?;
    }
    // Once per day and caller, after all rows of the block.
    for (key, change) in posting.days.into_rows() {
        daily::add(tables, &key, &change)?;
    }
    for (maker, days) in posting.days_of_makers {
        for (key, change) in days.into_rows() {
            gateway_days::add(tables, maker, &key, &change)?;
        }
    }
    Ok(())
}

/// Returns the answer for a block that was posted before; `None` for a new block.
///
/// # Errors
/// Another block of this number was posted, or the block was skipped or archived.
fn already_posted(
    tables: Tables<'_>,
    parts: &BlockParts,
    epoch: Option<&EpochRow>,
    digest: &[u8; 32],
) -> Result<Option<Posted>, LedgerError> {
    // Blocks come in order, so a number above the last is new.
    let Some(epoch) = epoch.filter(|epoch| parts.number <= epoch.last_block) else {
        return Ok(None);
    };
    let key = BlockKey { epoch: epoch.id, block: parts.number as i64 };
    match blocks::reported_digest(tables, key)? {
        Some(known) if known == digest => Ok(Some(Posted::Already)),
        Some(_) => Err(refuse(parts, BlockRefusal::Conflict)),
        None if archives::has_block(tables, epoch.id, parts.number)? => {
            Err(refuse(parts, BlockRefusal::Archived))
        }
        None => Err(refuse(parts, BlockRefusal::Skipped)),
    }
}

/// Skips the blocks before `parts` that a restore from an older backup lost.
/// Returns true if there were any.
fn skip_lost(
    tables: Tables<'_>,
    chain: &mut Chain,
    parts: &BlockParts,
    epoch: Option<&EpochRow>,
) -> Result<bool, LedgerError> {
    // Nothing is missing in the common case; only a gap asks for the restore.
    if parts.number <= epoch.map_or(1, |epoch| epoch.last_block + 1) {
        return Ok(false);
    }
    let Some(at) = meta::restored(tables)? else { return Ok(false) };
    let lost = block::lost_before(parts, epoch, Some(at));
    let any = !lost.is_empty();
    for number in lost {
        let (worker, epoch) = (parts.worker.clone(), parts.epoch);
        let reason = "lost: the ledger was restored from an older backup".to_owned();
        skip(tables, chain, &RefusedBlock { worker, epoch, number, reason, at })?;
    }
    Ok(any)
}

/// Skips a block that cannot be posted, so that the blocks after it can be. Its
/// time is in no account; `check` reports it.
pub(crate) fn skip(
    tables: Tables<'_>,
    chain: &mut Chain,
    refused: &RefusedBlock,
) -> Result<Posted, LedgerError> {
    let refused = block::as_kept(refused);
    let &RefusedBlock { ref worker, epoch, number, .. } = &refused;
    let known = epochs::find(tables, epoch)?;
    // A caller that lost its answer submits the skip again.
    if block::check_skip(&refused, known.as_ref())? == Skip::Already {
        return Ok(Posted::Already);
    }
    let epoch_id = match known {
        Some(known) => {
            epochs::set_last_block(tables, known.id, number)?;
            known.id
        }
        // Nothing that the block states is accepted, its device included.
        None => epochs::insert_skipped(tables, epoch, worker.as_str(), number)?,
    };
    let record = chain.append(tables, &Body::refused(&refused))?;
    let key = BlockKey { epoch: epoch_id, block: number as i64 };
    refused_blocks::insert(tables, key, &refused, record)?;
    Ok(Posted::New)
}

/// Records an action of an admin, unless an action of its id is recorded.
pub(crate) fn record_action(
    tables: Tables<'_>,
    chain: &mut Chain,
    action: &AdminAction,
) -> Result<Posted, LedgerError> {
    if actions::is_known(tables, &action.id)? {
        return Ok(Posted::Already);
    }
    // The id is kept beside the record: a look-up by id must be cheap.
    let record = chain.append(tables, &Body::action(action))?;
    actions::insert(tables, &action.id, record)?;
    Ok(Posted::New)
}

/// Moves `excess` of an entry from its tenant to `platform.loss`.
pub(super) fn move_to_loss(
    tables: Tables<'_>,
    key: BlockKey,
    daily: &DailyKey<'_>,
    owner: EntryOwner<'_>,
    excess: Amounts,
) -> Result<(), LedgerError> {
    // No time moves, so no energy moves either.
    if excess.amount_ns == 0 {
        return Ok(());
    }
    // Above every share of the block, including shares that are not written yet.
    let first = entries::last_ordinal(tables, key)?.max(FIRST_CORRECTION - 1) + 1;
    let mut writer = EntryWriter::new(tables)?;
    // Tenant first, loss second: the pair stays side by side.
    for (ordinal, entry) in (first..).zip(correction::to_loss(excess, owner)) {
        writer.insert(key, ordinal, &entry)?;
    }
    let taken = correction::negated(excess);
    daily::add(tables, daily, &DailyChange::by_entry(taken.amount_ns, taken.energy_mj))
}

/// The writing of one block: statements and callers that its rows share.
struct Posting<'a> {
    tables: Tables<'a>,
    key: BlockKey,
    parts: &'a BlockParts,
    /// Numbers of the callers met so far.
    callers: HashMap<&'a Caller, CallerId>,
    /// The greatest id of a request with a cap or an archived attempt. Ids grow with
    /// time, so nearly every attempt of a block is beyond it and needs no look-up.
    newest_settled: Option<String>,
    // Each statement runs for many rows, so it is prepared once for the block.
    entry: EntryWriter<'a>,
    attempt: AttemptWriter<'a>,
    charge: ChargeWriter<'a>,
    days: DayChanges<'a>,
    /// The charges among them by the number of the gateway that ordered the work.
    days_of_makers: BTreeMap<Option<u32>, DayChanges<'a>>,
}

impl<'a> Posting<'a> {
    fn new(tables: Tables<'a>, key: BlockKey, parts: &'a BlockParts) -> Result<Self, LedgerError> {
        Ok(Self {
            tables,
            key,
            parts,
            callers: HashMap::new(),
            newest_settled: fault_caps::newest_settled(tables)?,
            entry: EntryWriter::new(tables)?,
            attempt: AttemptWriter::new(tables)?,
            charge: ChargeWriter::new(tables)?,
            days: DayChanges::new(parts.model.as_str(), parts.device.class.as_str()),
            days_of_makers: BTreeMap::new(),
        })
    }

    fn may_be_settled(&self, attempt: &Attempt) -> bool {
        let newest = self.newest_settled.as_deref();
        newest.is_some_and(|newest| attempt.request.as_str() <= newest)
    }

    fn cap(&self, key: AttemptKey<'_>) -> Result<Option<Payable>, LedgerError> {
        if !self.may_be_settled(key.attempt) {
            return Ok(None);
        }
        cap::find(self.tables, key)
    }

    fn caller(&mut self, caller: &'a Caller) -> Result<CallerId, LedgerError> {
        if let Some(id) = self.callers.get(caller) {
            return Ok(*id);
        }
        let id = callers::find_or_insert(self.tables, caller)?;
        self.callers.insert(caller, id);
        Ok(id)
    }

    /// Writes a share with the energy of its time, and moves what its cap does not
    /// allow to `platform.loss`.
    fn share(
        &mut self,
        ordinal: i64,
        share: &'a Share,
        drew: Option<Millijoules>,
    ) -> Result<(), LedgerError> {
        let caller = self.caller(&share.caller)?;
        let Self { tables, key, parts, .. } = *self;
        let attempt = AttemptKey { caller, attempt: &share.attempt };
        // A cap may come before the blocks that it governs.
        let cap = self.cap(attempt)?;
        // The sum of what is paid so far is read before this share is written.
        let paid_ns = match cap {
            Some(_) => entries::paid_ns(tables, attempt)?,
            None => 0,
        };
        // The casts are safe: a block's time and energy have bounds far below `i64::MAX`.
        let amounts = Amounts {
            amount_ns: share.attributed.nanos() as i64,
            energy_mj: drew.map(|energy| energy.millijoules() as i64),
        };
        let tier = share.tier;
        let owner = EntryOwner { attempt, sequence: share.sequence.0 as i64, tier };
        let entry = Entry { kind: METERED, account: account::TENANT, amounts, owner: Some(owner) };
        self.entry.insert(key, ordinal, &entry)?;
        let day = parts.started.day().0;
        let change = DailyChange::by_entry(amounts.amount_ns, amounts.energy_mj);
        self.add_to_day(day, (caller, tier), &change)?;
        if let Some(cap) = cap {
            let excess = correction::excess_of_share(amounts, cap.attributed_ns - paid_ns);
            let (model, class) = (parts.model.as_str(), parts.device.class.as_str());
            let daily = DailyKey { day, caller, model, class, tier };
            move_to_loss(tables, key, &daily, owner, excess)?;
        }
        Ok(())
    }

    /// Writes a finished attempt and its charge.
    fn finished(
        &mut self,
        at: FinishedAt,
        finished: &'a FinishedAttempt,
    ) -> Result<(), LedgerError> {
        let caller = self.caller(&finished.caller)?;
        let Self { tables, key, parts, .. } = *self;
        let attempt = AttemptKey { caller, attempt: &finished.attempt };
        // The unique index does not see archived attempts.
        let is_archived = self.may_be_settled(&finished.attempt)
            && archives::attempt_ended(tables, attempt)? == Some(true);
        if is_archived || !self.attempt.insert(key, caller, at, finished)? {
            let Attempt { request, attempt } = &finished.attempt;
            let refusal =
                BlockRefusal::Replayed { request: request.to_string(), attempt: *attempt };
            return Err(refuse(parts, refusal));
        }
        if self.cap(attempt)?.is_some() {
            // The cap made the charge already; only the stages are new.
            return charges::set_stages(tables, caller, finished);
        }
        let payable = Payable::of(&finished.usage);
        // A worker may itself report a fault without any usage.
        let is_counted = payable.is_counted(finished.reason);
        let (model, class) = (parts.model.as_str(), parts.device.class.as_str());
        let charge = Charge { caller, finished, payable, is_counted, model, class };
        self.charge.insert(&charge)?;
        if finished.reason == FinishReason::Fault {
            faults::insert(tables, caller, finished)?;
        }
        let change = DailyChange::by_charge(&payable, is_counted);
        let (day, payer) = (finished.finished.day().0, (caller, finished.tier));
        if gateway_days::are_counted(tables) {
            let days = self.days_of_makers.entry(finished.attempt.request.gateway());
            let of_maker = days.or_insert_with(|| DayChanges::new(model, class));
            of_maker.add(day, payer, &change).ok_or_else(|| unfit(parts))?;
        }
        self.add_to_day(day, payer, &change)
    }

    fn add_to_day(
        &mut self,
        day: u32,
        payer: (CallerId, Tier),
        change: &DailyChange,
    ) -> Result<(), LedgerError> {
        self.days.add(day, payer, change).ok_or_else(|| unfit(self.parts))
    }
}

fn unfit(parts: &BlockParts) -> LedgerError {
    let reason = "its figures are beyond what a day holds".to_owned();
    refuse(parts, BlockRefusal::Unfit { reason })
}
