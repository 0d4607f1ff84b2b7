//! The end of the audit log's hash chain, kept in memory beside its rows. The chain
//! changes within the writer's transaction only; a caller that rolls the
//! transaction back also restores the chain.

use crate::audit_key::AuditKey;
use crate::error::LedgerError;
use crate::rows::records::Hash;
use crate::rows::{Tables, actions, archives, checkpoints, records};
use crate::rules::record::{Before, Body, GENESIS, body_of, text_of};
use crate::rules::tree::{Frontier, is_kept, leaf};

/// The end of the chain.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    frontier: Frontier,
    /// The hash of the last record.
    last: Hash,
    /// The number of records that the newest checkpoint covers.
    signed: u64,
}

impl Chain {
    /// Begins the chain of a ledger. `before` describes the rows that the ledger
    /// held without a chain.
    pub(crate) fn begin(tables: Tables<'_>, before: Option<&Before>) -> Result<(), LedgerError> {
        let mut chain = Self { frontier: Frontier::default(), last: [0; 32], signed: 0 };
        let seq = chain.append(tables, &Body::genesis(before)?)?;
        // The first record needs a row as well: `check` expects one row for each record.
        actions::insert(tables, GENESIS, seq)
    }

    /// Loads the end of the chain.
    pub(crate) fn load(tables: Tables<'_>) -> Result<Self, LedgerError> {
        let (size, last) = records::end(tables)?;
        // A log without a key has no checkpoint at all.
        let signed = checkpoints::newest_size(tables)?.unwrap_or(0);
        Ok(Self { frontier: frontier(tables, size)?, last, signed })
    }

    /// Returns true if the log in the database ends as this chain does.
    pub(crate) fn is_end_of(&self, tables: Tables<'_>) -> Result<bool, LedgerError> {
        let (size, last) = records::end(tables)?;
        let signed = checkpoints::newest_size(tables)?.unwrap_or(0);
        Ok((size, last, signed) == (self.frontier.size(), self.last, self.signed))
    }

    /// Returns the number of records, archived ones included.
    pub(crate) fn size(&self) -> u64 {
        self.frontier.size()
    }

    /// Returns the number of records that no checkpoint covers yet.
    pub(crate) fn unsigned(&self) -> u64 {
        self.frontier.size().saturating_sub(self.signed)
    }

    /// Writes the next record and returns its number.
    pub(crate) fn append(
        &mut self,
        tables: Tables<'_>,
        body: &Body<'_>,
    ) -> Result<u64, LedgerError> {
        let seq = self.frontier.size();
        // The body alone is stored; number and previous hash are in other columns.
        let body = body_of(body)?;
        let hash = leaf(text_of(seq, &self.last, &body).as_bytes());
        // The primary key refuses a second record of this number.
        records::insert(tables, seq, &hash, &body)?;
        let mut completed = Vec::new();
        self.frontier.push(hash, |node| completed.push(node));
        for node in completed.iter().filter(|node| is_kept(node.level)) {
            records::insert_node(tables, node)?;
        }
        // Moves only after the rows are written, so that an error leaves the chain as it was.
        self.last = hash;
        Ok(seq)
    }

    /// Signs the chain as it stands, in the caller's transaction.
    pub(crate) fn sign(&mut self, tables: Tables<'_>, key: &AuditKey) -> Result<(), LedgerError> {
        let size = self.frontier.size();
        checkpoints::insert(tables, size, &key.checkpoint(size, &self.frontier.root()))?;
        self.signed = size;
        Ok(())
    }
}

/// Loads the frontier of the first `size` records.
pub(crate) fn frontier(tables: Tables<'_>, size: u64) -> Result<Frontier, LedgerError> {
    Frontier::load(size, &|level, position| records::node(tables, level, position))
}

/// Returns the hash that record `seq` names: the hash of the record before it, and
/// zeros for the first record.
pub(crate) fn hash_before(tables: Tables<'_>, seq: u64) -> Result<Hash, LedgerError> {
    let Some(before) = seq.checked_sub(1) else { return Ok([0; 32]) };
    // The record before the first one here is archived; its hash is kept.
    match archives::newest(tables)?.filter(|archive| archive.size == seq) {
        Some(archive) => Ok(archive.last),
        None => records::hash_of(tables, before),
    }
}
