//! The chain's end in memory, and its rows in the database. It changes within
//! the writer's transaction only; whoever rolls that back puts the chain back
//! as well.

use rusqlite::{Connection, OptionalExtension, params};

use super::note::AuditKey;
use super::record::{Before, Body, GENESIS, body_of, text_of};
use super::tree::{Frontier, Hash, is_kept, leaf};
use crate::{LedgerError, archive};

/// Where the chain ends.
#[derive(Clone, Debug)]
pub(crate) struct Chain {
    frontier: Frontier,
    /// The hash of the last record.
    last: Hash,
    /// How many records the newest checkpoint covers.
    signed: u64,
    /// Only a benchmark leaves the records out.
    left_out: bool,
}

impl Chain {
    /// Begins the chain of a ledger; `before` is what stood in it without one.
    pub(crate) fn begin(
        connection: &Connection,
        before: Option<&Before>,
    ) -> Result<(), LedgerError> {
        let frontier = Frontier::default();
        let mut chain = Self { frontier, last: [0; 32], signed: 0, left_out: false };
        let seq = chain.append(connection, &Body::genesis(before)?)?;
        remember_action(connection, GENESIS, seq)
    }

    /// The chain as it stands in the database.
    pub(crate) fn load(connection: &Connection, left_out: bool) -> Result<Self, LedgerError> {
        let (size, last): (u64, Vec<u8>) = connection.query_row(
            "SELECT seq + 1, hash FROM records ORDER BY seq DESC LIMIT 1",
            [],
            |row| Ok((row.get(0)?, row.get(1)?)),
        )?;
        let last = Hash::try_from(last)
            .map_err(|_| LedgerError::Damaged("the last record's hash".to_owned()))?;
        let signed: Option<u64> =
            connection.query_row("SELECT max(size) FROM checkpoints", [], |row| row.get(0))?;
        let frontier = Frontier::load(connection, size)?;
        Ok(Self { frontier, last, signed: signed.unwrap_or(0), left_out })
    }

    /// How many records there are, archived ones too.
    pub(crate) fn size(&self) -> u64 {
        self.frontier.size()
    }

    /// Records that no checkpoint covers yet.
    pub(crate) fn unsigned(&self) -> u64 {
        self.frontier.size().saturating_sub(self.signed)
    }

    /// Writes the next record; its number.
    pub(crate) fn append(
        &mut self,
        connection: &Connection,
        body: &Body<'_>,
    ) -> Result<u64, LedgerError> {
        let seq = self.frontier.size();
        if self.left_out {
            return Ok(seq);
        }
        let body = body_of(body)?;
        let hash = leaf(text_of(seq, &self.last, &body).as_bytes());
        connection
            .prepare_cached("INSERT INTO records (seq, hash, record) VALUES (?1, ?2, ?3)")?
            .execute(params![seq, &hash[..], body])?;
        let mut kept = Vec::new();
        self.frontier.push(hash, |level, position, hash| {
            if is_kept(level) {
                kept.push((level, position, *hash));
            }
        });
        for (level, position, hash) in kept {
            connection
                .prepare_cached(
                    "INSERT INTO record_nodes (level, position, hash) VALUES (?1, ?2, ?3)",
                )?
                .execute(params![level, position, &hash[..]])?;
        }
        self.last = hash;
        Ok(seq)
    }

    /// Signs the chain as it stands, in the caller's transaction.
    pub(crate) fn sign(
        &mut self,
        connection: &Connection,
        key: &AuditKey,
    ) -> Result<(), LedgerError> {
        let size = self.frontier.size();
        let note = key.checkpoint(size, &self.frontier.root());
        connection
            .prepare_cached("INSERT INTO checkpoints (size, note) VALUES (?1, ?2)")?
            .execute(params![size, note])?;
        self.signed = size;
        Ok(())
    }
}

/// The hash that record `seq` names: of the one before it, zeros of the first.
pub(crate) fn hash_before(connection: &Connection, seq: u64) -> Result<Hash, LedgerError> {
    let Some(before) = seq.checked_sub(1) else { return Ok([0; 32]) };
    if let Some(base) = archive::base(connection)?.filter(|base| base.size == seq) {
        return Ok(base.last);
    }
    let hash =
        connection
            .query_row("SELECT hash FROM records WHERE seq = ?1", [before], |row| row.get(0))?;
    hash_from(hash, before)
}

pub(crate) fn hash_from(stored: Vec<u8>, seq: u64) -> Result<Hash, LedgerError> {
    Hash::try_from(stored).map_err(|_| LedgerError::Damaged(format!("the hash of record {seq}")))
}

/// Whether an action of this id is recorded already.
pub(crate) fn knows_action(connection: &Connection, id: &str) -> Result<bool, LedgerError> {
    let known: Option<i64> = connection
        .prepare_cached("SELECT 1 FROM recorded_actions WHERE id = ?1")?
        .query_row([id], |row| row.get(0))
        .optional()?;
    Ok(known.is_some())
}

pub(crate) fn remember_action(
    connection: &Connection,
    id: &str,
    seq: u64,
) -> Result<(), LedgerError> {
    connection
        .prepare_cached("INSERT INTO recorded_actions (id, record_seq) VALUES (?1, ?2)")?
        .execute(params![id, seq])?;
    Ok(())
}
