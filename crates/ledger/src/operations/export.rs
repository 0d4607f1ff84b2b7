//! Export of the audit log: records and checkpoints as plain lines, and the proof
//! that one request's records are in the log.

use std::io::{self, Write};

use serde::Serialize;
use tollgate_domain::RequestId;

use super::chain::{frontier, hash_before};
use crate::error::LedgerError;
use crate::hex::hex;
use crate::rows::records::{Hash, RecordRow};
use crate::rows::{Tables, archives, checkpoints, records};
use crate::rules::record::text_of;
use crate::rules::tree::path;

/// A range of records, by number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Range {
    /// The first record.
    pub from: u64,
    /// The last record that must be included; as many as are signed for `None`.
    pub to: Option<u64>,
}

/// The place of an export in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exported {
    /// The state of the log before the export's first record.
    pub start: Start,
    /// The number after its last record: the size that its last checkpoint signs.
    pub end: u64,
    /// Number of records that no checkpoint covers yet; they are not in the export.
    pub unsigned: u64,
}

/// The facts about earlier records that a verifier needs, as they are written beside
/// an export. The checkpoints that follow prove them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Start {
    /// Number of earlier records.
    pub size: u64,
    /// Hash of the last earlier record; zeros where there is none.
    pub prev: String,
    /// The perfect subtrees of the earlier records, largest first.
    pub peaks: Vec<String>,
}

/// A proof that the records of one request are in the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Proof {
    /// The signed note. The paths lead to its root.
    pub checkpoint: String,
    /// Every record of the request.
    pub records: Vec<ProvedRecord>,
}

/// One record and its path to the root.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ProvedRecord {
    /// The record's number.
    pub index: u64,
    /// The record's bytes.
    pub record: String,
    /// The siblings on the way to the root, lowest first.
    pub path: Vec<String>,
}

/// The reason why an export or a proof failed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The ledger cannot be read.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The output cannot be written.
    #[error("the export cannot be written")]
    Output(#[from] io::Error),
    /// No checkpoint covers the range.
    #[error(
        "the log is signed up to record {signed} (exclusive) and not beyond: start the gateway, which signs the rest, or wait ten seconds"
    )]
    Unsigned {
        /// The size that the newest checkpoint covers.
        signed: u64,
    },
    /// The records have left the database.
    #[error("records 0 to {} are archived: verify the archive and begin with --from {first}", first - 1)]
    Archived {
        /// The first record that is still here.
        first: u64,
    },
    /// No record tells of the request.
    #[error("no record tells of {0}")]
    Unknown(RequestId),
}

/// Writes the records and checkpoints of a range, a line each.
pub(crate) fn export(
    tables: Tables<'_>,
    range: Range,
    output: &mut dyn Write,
    checkpoints_output: &mut dyn Write,
) -> Result<Exported, ExportError> {
    let Range { from, to } = range;
    let first = archives::first_record(tables)?;
    if from < first {
        return Err(ExportError::Archived { first });
    }
    let signed = checkpoints::newest(tables)?.map_or(0, |(size, _)| size);
    // A verifier can judge only records that a checkpoint covers.
    if from >= signed || to.is_some_and(|to| to >= signed) {
        return Err(ExportError::Unsigned { signed });
    }
    // The export ends with the first checkpoint that covers its last record.
    let end = match to {
        None => signed,
        // An end before `from` counts as `from`: no checkpoint ends an export without a record.
        Some(to) => checkpoints::size_covering(tables, to.max(from))?,
    };
    write_records(tables, from..end, output)?;
    checkpoints::each_note_of(tables, from..end, |note| {
        let note = serde_json::to_string(note).map_err(io::Error::from)?;
        Ok::<_, ExportError>(writeln!(checkpoints_output, "{{\"note\":{note}}}")?)
    })?;
    // The snapshot keeps both figures consistent.
    let unsigned = records::size(tables)? - signed;
    Ok(Exported { start: start(tables, from)?, end, unsigned })
}

fn write_records(
    tables: Tables<'_>,
    range: std::ops::Range<u64>,
    output: &mut dyn Write,
) -> Result<(), ExportError> {
    let mut before = hash_before(tables, range.start)?;
    records::each(tables, Some(range), |RecordRow { seq, hash, record }| {
        let record = text_of(seq, &before, &record);
        writeln!(output, "{{\"hash\":\"{}\",\"record\":{record}}}", hex(&hash))?;
        before = Hash::try_from(hash)
            .map_err(|_| LedgerError::Damaged(format!("the hash of record {seq}")))?;
        Ok::<_, ExportError>(true)
    })
}

fn start(tables: Tables<'_>, from: u64) -> Result<Start, LedgerError> {
    let prev = hex(&hash_before(tables, from)?);
    let peaks = frontier(tables, from)?.peaks().iter().map(|peak| hex(peak)).collect();
    Ok(Start { size: from, prev, peaks })
}

/// Proves that each record of a request is in the log.
pub(crate) fn prove(tables: Tables<'_>, request: &RequestId) -> Result<Proof, ExportError> {
    let known = records::of_request(tables, request)?;
    let Some(&last) = known.last() else {
        return Err(ExportError::Unknown(request.clone()));
    };
    // The newest checkpoint covers every older record.
    let (size, checkpoint) = checkpoints::newest(tables)?.unwrap_or_default();
    // Without a checkpoint the size is 0, so every record counts as unsigned.
    if last >= size {
        return Err(ExportError::Unsigned { signed: size });
    }
    let nodes = |level, position| records::node(tables, level, position);
    let mut proved = Vec::new();
    for index in known {
        let missing = || LedgerError::Damaged(format!("there is no record {index}"));
        let stored = records::text_of(tables, index)?.ok_or_else(missing)?;
        let record = text_of(index, &hash_before(tables, index)?, &stored).into_owned();
        let path = path(index, &nodes, size)?.iter().map(|hash| hex(hash)).collect();
        proved.push(ProvedRecord { index, record, path });
    }
    Ok(Proof { checkpoint, records: proved })
}
