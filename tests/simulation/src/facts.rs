//! The events of a run, noted beside it. At the end the ledger must agree with
//! them.

use std::collections::{BTreeMap, BTreeSet};

use tollgate_domain::block::Attempt;
use tollgate_domain::{Block, Caller, RequestId, TenantId, Usage, WorkerEpoch};
use tollgate_ledger::{LedgerReader, UsageQuery};

/// The events of a run.
#[derive(Default)]
pub(super) struct Facts {
    lives: BTreeMap<u128, Life>,
    /// Every block that was read from a journal.
    handed: BTreeMap<(u128, u64), Handed>,
    /// Attempts for which a gateway has posted a fault cap.
    capped: BTreeSet<(String, u32)>,
    /// Descriptions of failed checks.
    wrong: Vec<String>,
}

struct Handed {
    block: Block,
    acknowledged: bool,
}

/// One process of a worker.
#[derive(Default)]
struct Life {
    began_ns: u64,
    /// The end of the synced records, and of all records.
    synced_ns: u64,
    reached_ns: u64,
    ended_ns: u64,
    /// Recorded ends of requests, and how many of them are synced.
    ends: Vec<End>,
    synced_ends: usize,
}

#[derive(Clone)]
pub(super) struct End {
    pub(super) caller: Caller,
    pub(super) attempt: Attempt,
    pub(super) usage: Usage,
    /// True if the request ended without a fault and no cap is on its way.
    pub(super) is_paid: bool,
}

impl Facts {
    pub(super) fn wrong(&mut self, what: impl Into<String>) {
        if self.wrong.len() < 20 {
            self.wrong.push(what.into());
        }
    }

    pub(super) fn is_wrong(&self) -> bool {
        !self.wrong.is_empty()
    }

    pub(super) fn into_wrong(self) -> Vec<String> {
        self.wrong
    }

    pub(super) fn born(&mut self, epoch: WorkerEpoch, now: u64) {
        let life = Life { began_ns: now, synced_ns: now, reached_ns: now, ..Life::default() };
        self.lives.insert(epoch.0, life);
    }

    pub(super) fn died(&mut self, epoch: WorkerEpoch, now: u64) {
        if let Some(life) = self.lives.get_mut(&epoch.0) {
            life.ended_ns = now;
        }
    }

    /// Notes a step that was journalled up to `now`.
    pub(super) fn stepped(&mut self, epoch: WorkerEpoch, now: u64) {
        if let Some(life) = self.lives.get_mut(&epoch.0) {
            life.reached_ns = now;
        }
    }

    pub(super) fn ended(&mut self, epoch: WorkerEpoch, end: End) {
        if let Some(life) = self.lives.get_mut(&epoch.0) {
            life.ends.push(end);
        }
    }

    /// Notes a sync that succeeded.
    pub(super) fn synced(&mut self, epoch: WorkerEpoch) {
        if let Some(life) = self.lives.get_mut(&epoch.0) {
            life.synced_ns = life.reached_ns;
            life.synced_ends = life.ends.len();
        }
    }

    /// Notes a fault cap for an attempt.
    pub(super) fn capped(&mut self, attempt: &Attempt) {
        self.capped.insert((attempt.request.to_string(), attempt.attempt));
    }

    /// Notes a sent block. A block of the same number must be unchanged.
    pub(super) fn handed(&mut self, block: &Block) {
        let parts = block.parts();
        let id = (parts.epoch.0, parts.number);
        match self.handed.get(&id) {
            Some(before) if before.block != *block => {
                self.wrong(format!("block {} of {:x} means two things", id.1, id.0));
            }
            Some(_) => {}
            None => {
                self.handed.insert(id, Handed { block: block.clone(), acknowledged: false });
            }
        }
    }

    pub(super) fn acknowledged(&mut self, epoch: WorkerEpoch, number: u64) {
        if let Some(handed) = self.handed.get_mut(&(epoch.0, number)) {
            handed.acknowledged = true;
        }
    }

    /// Returns the acknowledged blocks.
    pub(super) fn all_acknowledged(&self) -> Vec<Block> {
        let handed = self.handed.values().filter(|handed| handed.acknowledged);
        handed.map(|handed| handed.block.clone()).collect()
    }

    /// Compares the ledger with the events.
    pub(super) fn judge(&mut self, reader: &LedgerReader, tenants: &[TenantId], cap_ns: u64) {
        for finding in reader.check() {
            self.wrong(format!("check: {}: {}", finding.kind, finding.message));
        }
        for (epoch, life) in std::mem::take(&mut self.lives) {
            self.judge_life(reader, WorkerEpoch(epoch), &life);
        }
        for tenant in tenants {
            let query = UsageQuery { tenant: Some(tenant.clone()), ..UsageQuery::default() };
            let rows = reader.usage(&query).unwrap_or_default();
            let spent: u64 = rows.iter().map(|row| row.reference_ns).sum();
            if spent > cap_ns {
                self.wrong(format!("{tenant} spent {spent} ns, its cap is {cap_ns}"));
            }
        }
    }

    fn judge_life(&mut self, reader: &LedgerReader, epoch: WorkerEpoch, life: &Life) {
        let Ok(balance) = reader.balance(epoch) else {
            return self.wrong(format!("the balance of {epoch} cannot be read"));
        };
        if !balance.is_exact() {
            self.wrong(format!("{epoch} does not balance: {balance:?}"));
        }
        let wall = balance.wall_ns as u64;
        let (least, most) = (life.synced_ns - life.began_ns, life.ended_ns - life.began_ns);
        if wall < least || wall > most {
            self.wrong(format!("{epoch}: wall time {wall}, synced {least}, lived {most}"));
        }
        for (index, end) in life.ends.iter().enumerate() {
            self.judge_end(reader, end, index < life.synced_ends);
        }
    }

    fn judge_end(&mut self, reader: &LedgerReader, end: &End, is_synced: bool) {
        let End { caller, attempt, usage, is_paid } = end;
        let request = &attempt.request;
        let row = match reader.request(&caller.tenant, request) {
            Ok(Some(row)) => row,
            Ok(None) if !is_synced || *usage == Usage::default() => return,
            found => return self.wrong(format!("{request} ended, synced, and is lost: {found:?}")),
        };
        let (paid, done) = (row.usage, *usage);
        let is_capped = self.capped.contains(&(request.to_string(), attempt.attempt));
        if is_synced && *is_paid && !is_capped && row.attempts == 1 && paid != done {
            self.wrong(format!("{request}/{}: done {done:?}, paid {paid:?}", attempt.attempt));
        }
    }

    /// Returns the part of a request's bill for which no work was done.
    pub(super) fn judge_sum(&mut self, reader: &LedgerReader, tenant: &TenantId, id: &RequestId) {
        let Ok(Some(row)) = reader.request(tenant, id) else { return };
        let shares = self.handed.values().flat_map(|handed| &handed.block.parts().shares);
        let done: u64 = shares
            .filter(|share| share.attempt.request == *id)
            .map(|share| share.attributed.nanos())
            .sum();
        if row.usage.attributed.nanos() > done {
            self.wrong(format!("{id} pays {} of {done} ns", row.usage.attributed));
        }
    }
}
