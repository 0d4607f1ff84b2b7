//! Table `answers`: one row for each line that has its answer, until the batch ends.

use tollgate_sql::params;

use super::Tables;
use crate::error::JobError;
use crate::file::BlobRange;
use crate::ids::BatchId;
use crate::store::{Answer, AnswerKind};

pub(super) fn insert(tables: Tables<'_>, batch: BatchId, answer: &Answer) -> Result<(), JobError> {
    let Answer { line, kind, range, paid, usage: _, model: _ } = answer;
    tables
        .connection
        .prepare(
            "INSERT INTO answers (batch, line, kind, blob, start, length, paid_claim, paid_try)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
        )?
        .send(params![
            batch,
            line,
            kind_text(*kind),
            range.blob,
            range.offset,
            range.length,
            paid.map(|paid| paid.claim.0),
            paid.map(|paid| paid.number)
        ])?;
    Ok(())
}

/// Returns the lines with an answer, in order.
pub(super) fn lines(tables: Tables<'_>, batch: BatchId) -> Result<Vec<u64>, JobError> {
    let mut statement =
        tables.connection.prepare("SELECT line FROM answers WHERE batch = ?1 ORDER BY line")?;
    let rows = statement.query_map([batch], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the number of answers of a kind, and their bytes as few ranges.
pub(super) fn ranges(
    tables: Tables<'_>,
    batch: BatchId,
    kind: AnswerKind,
) -> Result<(u64, Vec<BlobRange>), JobError> {
    let mut statement = tables.connection.prepare(
        "SELECT blob, start, length FROM answers WHERE batch = ?1 AND kind = ?2
         ORDER BY blob, start",
    )?;
    let rows = statement.query_map(params![batch, kind_text(kind)], |row| {
        Ok(BlobRange { blob: row.get(0)?, offset: row.get(1)?, length: row.get(2)? })
    })?;
    let (mut lines, mut ranges) = (0, Vec::<BlobRange>::new());
    for row in rows {
        let next = row?;
        lines += 1;
        match ranges.last_mut() {
            Some(last) if last.blob == next.blob && last.offset + last.length == next.offset => {
                last.length += next.length;
            }
            _ => ranges.push(next),
        }
    }
    Ok((lines, ranges))
}

pub(super) fn delete(tables: Tables<'_>, batch: BatchId) -> Result<(), JobError> {
    tables.connection.prepare("DELETE FROM answers WHERE batch = ?1")?.execute([batch])?;
    Ok(())
}

fn kind_text(kind: AnswerKind) -> &'static str {
    match kind {
        AnswerKind::Output => "output",
        AnswerKind::Error => "error",
    }
}
