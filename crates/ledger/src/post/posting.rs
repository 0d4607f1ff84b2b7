//! A block's shares and ends, row by row, and what they add to days.

use std::collections::HashMap;

use rusqlite::{CachedStatement, Connection, Statement, params};
use tollgate_domain::{Attempt, BlockParts, Caller, FinishedAttempt, Millijoules, Share};

use super::{
    Amounts, BlockKey, Entry, caller_id, entry_statement, insert_entry, move_to_loss, refused,
};
use crate::charge::{
    Charge, DailyChange, DailyKey, Days, Payable, charge_statement, insert_charge, reason_name,
};
use crate::fault;
use crate::schema::{METERED, account};
use crate::{BlockRefusal, LedgerError, archive};

/// Which of its block's finished attempts one is, and which record tells of it.
pub(super) struct FinishedAt {
    pub(super) index: usize,
    pub(super) record: u64,
}

/// What a block's shares and ends have in common while they are written.
pub(super) struct Posting<'a> {
    connection: &'a Connection,
    key: BlockKey,
    parts: &'a BlockParts,
    /// Ids of the callers met so far.
    callers: HashMap<&'a Caller, i64>,
    /// Of the requests with a cap or an archive, the greatest id. Ids grow with
    /// time, so what a block tells of is nearly always beyond it, and then
    /// nobody need look whether it is one of them.
    newest_settled: Option<String>,
    /// What is run for each of many rows is looked up once.
    entry: CachedStatement<'a>,
    attempt: CachedStatement<'a>,
    charge: CachedStatement<'a>,
    pub(super) days: Days<'a>,
}

impl<'a> Posting<'a> {
    pub(super) fn of(
        connection: &'a Connection,
        key: BlockKey,
        parts: &'a BlockParts,
    ) -> Result<Self, LedgerError> {
        Ok(Self {
            connection,
            key,
            parts,
            callers: HashMap::new(),
            newest_settled: fault::newest_settled(connection)?,
            entry: entry_statement(connection)?,
            attempt: attempt_statement(connection)?,
            charge: charge_statement(connection)?,
            days: Days::new(parts.model.as_str(), parts.device.class.as_str()),
        })
    }

    fn may_be_settled(&self, attempt: &Attempt) -> bool {
        let newest = self.newest_settled.as_deref();
        newest.is_some_and(|newest| attempt.request.as_str() <= newest)
    }

    fn cap(&self, caller: i64, attempt: &Attempt) -> Result<Option<Payable>, LedgerError> {
        if !self.may_be_settled(attempt) {
            return Ok(None);
        }
        fault::find(self.connection, caller, attempt)
    }

    fn caller(&mut self, caller: &'a Caller) -> Result<i64, LedgerError> {
        if let Some(id) = self.callers.get(caller) {
            return Ok(*id);
        }
        let id = caller_id(self.connection, caller)?;
        self.callers.insert(caller, id);
        Ok(id)
    }

    /// Writes a share, and what was drawn in its time where the device told.
    pub(super) fn share(
        &mut self,
        ordinal: i64,
        share: &'a Share,
        drew: Option<Millijoules>,
    ) -> Result<(), LedgerError> {
        let caller = self.caller(&share.caller)?;
        let Self { connection, key, parts, .. } = *self;
        let request = share.attempt.request.as_str();
        let cap = self.cap(caller, &share.attempt)?;
        let paid = match cap {
            Some(_) => fault::paid_ns(connection, caller, &share.attempt)?,
            None => 0,
        };
        let amount_ns = share.attributed.nanos() as i64;
        let owner = Some((caller, share.sequence.0 as i64, request, share.attempt.attempt));
        let energy_mj = drew.map(|energy| energy.millijoules() as i64);
        let entry = Entry { kind: METERED, account: account::TENANT, amount_ns, energy_mj, owner };
        insert_entry(&mut self.entry, key, ordinal, &entry)?;
        let day = parts.started.day().0;
        let change =
            DailyChange { entries: 1, attributed_ns: amount_ns, energy_mj, ..Default::default() };
        self.add_to_day(day, caller, &change)?;
        if let Some(cap) = cap {
            let room = (cap.attributed_ns - paid).max(0);
            let excess = Amounts { amount_ns, energy_mj }.beyond(amount_ns.min(room));
            let (model, class) = (parts.model.as_str(), parts.device.class.as_str());
            let daily = DailyKey { day, caller, model, class };
            move_to_loss(connection, key, &daily, entry.owner, excess)?;
        }
        Ok(())
    }

    pub(super) fn finished(
        &mut self,
        at: FinishedAt,
        finished: &'a FinishedAttempt,
    ) -> Result<(), LedgerError> {
        let caller = self.caller(&finished.caller)?;
        let Self { connection, key, parts, .. } = *self;
        let is_archived = self.may_be_settled(&finished.attempt)
            && archive::ended(connection, caller, &finished.attempt)? == Some(true);
        if is_archived || !insert_attempt(&mut self.attempt, key, caller, at, finished)? {
            let Attempt { request, attempt } = &finished.attempt;
            let refusal =
                BlockRefusal::Replayed { request: request.to_string(), attempt: *attempt };
            return Err(refused(parts, refusal));
        }
        if self.cap(caller, &finished.attempt)?.is_some() {
            // The cap made the charge already; only the times are news.
            return set_stages(connection, caller, finished);
        }
        let charge = Charge {
            caller,
            finished,
            payable: Payable::of(&finished.usage),
            model: parts.model.as_str(),
            class: parts.device.class.as_str(),
        };
        let change = insert_charge(&mut self.charge, &charge)?;
        self.add_to_day(finished.finished.day().0, caller, &change)
    }

    fn add_to_day(
        &mut self,
        day: u32,
        caller: i64,
        change: &DailyChange,
    ) -> Result<(), LedgerError> {
        self.days.add(day, caller, change).ok_or_else(|| {
            let reason = "its figures are beyond what a day holds".to_owned();
            refused(self.parts, BlockRefusal::Unfit { reason })
        })
    }
}

fn attempt_statement(connection: &Connection) -> Result<CachedStatement<'_>, LedgerError> {
    Ok(connection.prepare_cached(
        "INSERT INTO attempts (epoch_id, block, ordinal, caller_id, request_id, attempt,
           prompt_tokens, cached_tokens, completion_tokens, attributed_ns, reference_ns,
           queue_ns, prefill_ns, decode_ns, reason, finished_utc_ns, record_seq)
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)
         ON CONFLICT (request_id, caller_id, attempt) DO NOTHING",
    )?)
}

/// False where an attempt of this id is there already.
fn insert_attempt(
    statement: &mut Statement<'_>,
    key: BlockKey,
    caller: i64,
    at: FinishedAt,
    finished: &FinishedAttempt,
) -> Result<bool, LedgerError> {
    let FinishedAttempt { caller: _, attempt, usage, stages, reason, finished: ended } = finished;
    let inserted = statement.execute(params![
        key.epoch_id,
        key.block,
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
        at.record
    ])?;
    Ok(inserted == 1)
}

fn set_stages(
    connection: &Connection,
    caller: i64,
    finished: &FinishedAttempt,
) -> Result<(), LedgerError> {
    let FinishedAttempt { attempt, stages, .. } = finished;
    connection
        .prepare_cached(
            "UPDATE requests SET queue_ns = ?4, prefill_ns = ?5, decode_ns = ?6
             WHERE request_id = ?1 AND caller_id = ?2 AND attempt = ?3",
        )?
        .execute(params![
            attempt.request.as_str(),
            caller,
            attempt.attempt,
            stages.queue_ns as i64,
            stages.prefill_ns as i64,
            stages.decode_ns as i64
        ])?;
    Ok(())
}
