//! The audit log on its way out: records and checkpoints as plain lines, and
//! the proof that one request's records are in the log.

use std::io::{self, Write};

use rusqlite::{Connection, OptionalExtension};
use serde::Serialize;
use tollgate_domain::RequestId;

use super::chain::{hash_before, hash_from};
use super::note::hex;
use super::record::text_of;
use super::tree::{Frontier, path};
use crate::{LedgerError, LedgerReader, archive};

/// Which records are wanted, by their numbers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub from: u64,
    /// The last that must be in it; none: as many as are signed.
    pub to: Option<u64>,
}

/// Where an export stands in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// What stands before its first record.
    pub start: Start,
    /// The number after its last record: the size that its last checkpoint signs.
    pub end: u64,
    /// Records that exist and that no checkpoint covers yet; they are not in it.
    pub unsigned: u64,
}

/// What a verifier must know of the records before the first one, as it is
/// written beside them; it is proved by the checkpoints that follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Start {
    /// How many records there are before.
    pub size: u64,
    /// The hash of the last of them; zeros where there is none.
    pub prev: String,
    /// The perfect subtrees that they make, largest first.
    pub peaks: Vec<String>,
}

/// That the records of one request are in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// The signed note whose root the paths lead to.
    pub checkpoint: String,
    /// Every record of the request.
    pub records: Vec<ProvedRecord>,
}

/// One record and its way to the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProvedRecord {
    /// Its number.
    pub index: u64,
    /// Its bytes.
    pub record: String,
    /// The siblings on the way to the root, lowest first.
    pub path: Vec<String>,
}

/// Why nothing, or not all, could be handed out.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The ledger cannot be read.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The output takes no more.
    #[error("the export cannot be written")]
    Output(#[from] io::Error),
    /// No checkpoint covers what is wanted.
    #[error(
        "the log is signed up to record {signed} (exclusive) and not beyond: start the gateway, which signs what is there, or wait ten seconds"
    )]
    Unsigned {
        /// The size that the newest checkpoint covers.
        signed: u64,
    },
    /// They have left the database.
    #[error("records 0 to {} are archived: verify the archive and begin with --from {first}", first - 1)]
    Archived {
        /// The first record that is here.
        first: u64,
    },
    /// No record tells of the request.
    #[error("no record tells of {0}")]
    Unknown(RequestId),
}

impl LedgerReader {
    /// Writes records and checkpoints of `range`, a line each, from one
    /// snapshot. It ends with a record that is the last of a checkpoint.
    ///
    /// # Errors
    /// The ledger cannot be read, the output not written, or no checkpoint
    /// covers the range.
    pub fn export(
        &self,
        range: Range,
        records: &mut dyn Write,
        checkpoints: &mut dyn Write,
    ) -> Result<Exported, ExportError> {
        self.snapshot(|connection| export(connection, range, records, checkpoints))
    }

    /// Proves that each record of `request` is in the log.
    ///
    /// # Errors
    /// No record tells of it, or no checkpoint covers one of them yet.
    pub fn prove(&self, request: &RequestId) -> Result<Proof, ExportError> {
        self.snapshot(|connection| prove(connection, request))
    }

    /// The newest checkpoint; `None` where nothing was signed yet.
    ///
    /// # Errors
    /// Storage errors.
    pub fn checkpoint(&self) -> Result<Option<String>, LedgerError> {
        self.read(|connection| Ok(newest(connection)?.map(|(_, note)| note)))
    }

    /// As [`Self::read`], with errors that are not the ledger's.
    fn snapshot<T>(
        &self,
        read: impl FnOnce(&Connection) -> Result<T, ExportError>,
    ) -> Result<T, ExportError> {
        self.read(|connection| Ok(read(connection)))?
    }
}

fn export(
    connection: &Connection,
    range: Range,
    records: &mut dyn Write,
    checkpoints: &mut dyn Write,
) -> Result<Exported, ExportError> {
    let Range { from, to } = range;
    let first = archive::base(connection)?.map_or(0, |base| base.size);
    if from < first {
        return Err(ExportError::Archived { first });
    }
    let signed = newest(connection)?.map_or(0, |(size, _)| size);
    if from >= signed || to.is_some_and(|to| to >= signed) {
        return Err(ExportError::Unsigned { signed });
    }
    // The first checkpoint that covers `to`.
    let end: u64 = match to {
        None => signed,
        Some(to) => connection
            .query_row("SELECT min(size) FROM checkpoints WHERE size > ?1", [to.max(from)], |row| {
                row.get(0)
            })
            .map_err(LedgerError::from)?,
    };
    write_records(connection, from, end, records)?;
    write_checkpoints(connection, from, end, checkpoints)?;
    let size: u64 = connection
        .query_row("SELECT max(seq) + 1 FROM records", [], |row| row.get(0))
        .map_err(LedgerError::from)?;
    Ok(Exported { start: start(connection, from)?, end, unsigned: size - signed })
}

fn write_records(
    connection: &Connection,
    from: u64,
    end: u64,
    output: &mut dyn Write,
) -> Result<(), ExportError> {
    let storage = LedgerError::from;
    let mut before = hash_before(connection, from)?;
    let mut statement = connection
        .prepare("SELECT seq, hash, record FROM records WHERE seq >= ?1 AND seq < ?2 ORDER BY seq")
        .map_err(storage)?;
    let mut rows = statement.query([from, end]).map_err(storage)?;
    while let Some(row) = rows.next().map_err(storage)? {
        let seq: u64 = row.get(0).map_err(storage)?;
        let hash: Vec<u8> = row.get(1).map_err(storage)?;
        let stored: String = row.get(2).map_err(storage)?;
        let record = text_of(seq, &before, &stored);
        writeln!(output, "{{\"hash\":\"{}\",\"record\":{record}}}", hex(&hash))?;
        before = hash_from(hash, seq)?;
    }
    Ok(())
}

fn write_checkpoints(
    connection: &Connection,
    from: u64,
    end: u64,
    output: &mut dyn Write,
) -> Result<(), ExportError> {
    let storage = LedgerError::from;
    let mut statement = connection
        .prepare("SELECT note FROM checkpoints WHERE size > ?1 AND size <= ?2 ORDER BY size")
        .map_err(storage)?;
    let mut rows = statement.query([from, end]).map_err(storage)?;
    while let Some(row) = rows.next().map_err(storage)? {
        let note: String = row.get(0).map_err(storage)?;
        let note = serde_json::to_string(&note).map_err(io::Error::from)?;
        writeln!(output, "{{\"note\":{note}}}")?;
    }
    Ok(())
}

fn start(connection: &Connection, from: u64) -> Result<Start, LedgerError> {
    let prev = hash_before(connection, from)?;
    let peaks = Frontier::load(connection, from)?.peaks().iter().map(|peak| hex(peak)).collect();
    Ok(Start { size: from, prev: hex(&prev), peaks })
}

fn prove(connection: &Connection, request: &RequestId) -> Result<Proof, ExportError> {
    let known = records_of(connection, request)?;
    let Some(&last) = known.last() else {
        return Err(ExportError::Unknown(request.clone()));
    };
    let (size, checkpoint) = newest(connection)?.unwrap_or_default();
    if last >= size {
        return Err(ExportError::Unsigned { signed: size });
    }
    let mut records = Vec::new();
    for index in known {
        let stored: String = connection
            .query_row("SELECT record FROM records WHERE seq = ?1", [index], |row| row.get(0))
            .map_err(LedgerError::from)?;
        let record = text_of(index, &hash_before(connection, index)?, &stored).into_owned();
        let path = path(connection, index, size)?.iter().map(|hash| hex(hash)).collect();
        records.push(ProvedRecord { index, record, path });
    }
    Ok(Proof { checkpoint, records })
}

/// The records of a request's attempts and of what corrected them.
fn records_of(connection: &Connection, request: &RequestId) -> Result<Vec<u64>, LedgerError> {
    let mut statement = connection.prepare_cached(
        "SELECT record_seq FROM attempts WHERE request_id = ?1 AND record_seq IS NOT NULL
         UNION ALL
         SELECT record_seq FROM fault_caps WHERE request_id = ?1 AND record_seq IS NOT NULL
         ORDER BY 1",
    )?;
    let rows = statement.query_map([request.as_str()], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

fn newest(connection: &Connection) -> Result<Option<(u64, String)>, LedgerError> {
    let row = connection
        .query_row("SELECT size, note FROM checkpoints ORDER BY size DESC LIMIT 1", [], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()?;
    Ok(row)
}
