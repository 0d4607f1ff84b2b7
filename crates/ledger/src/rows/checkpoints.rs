//! Table `checkpoints`: the signed sizes of the audit log.

use std::ops::Range;
use tollgate_sql::{OptionalRow, Row, SqlError, params};

use super::Tables;
use crate::error::LedgerError;

/// Inserts the signed note over the first `size` records.
pub(crate) fn insert(tables: Tables<'_>, size: u64, note: &str) -> Result<(), LedgerError> {
    tables
        .connection
        .prepare("INSERT INTO checkpoints (size, note) VALUES (?1, ?2)")?
        .send(params![size, note])?;
    Ok(())
}

/// Finds the note over the first `size` records.
pub(crate) fn find(tables: Tables<'_>, size: u64) -> Result<Option<String>, LedgerError> {
    let query = "SELECT note FROM checkpoints WHERE size = ?1";
    Ok(tables.connection.query_row(query, [size], |row| row.get(0)).optional()?)
}

/// Returns the newest checkpoint: its size and its note.
pub(crate) fn newest(tables: Tables<'_>) -> Result<Option<(u64, String)>, LedgerError> {
    let query = "SELECT size, note FROM checkpoints ORDER BY size DESC LIMIT 1";
    let row = tables.connection.query_row(query, (), |row| Ok((row.get(0)?, row.get(1)?)));
    Ok(row.optional()?)
}

/// Returns the number of records that the newest checkpoint covers.
pub(crate) fn newest_size(tables: Tables<'_>) -> Result<Option<u64>, LedgerError> {
    let query = "SELECT max(size) FROM checkpoints";
    Ok(tables.connection.query_row(query, (), |row| row.get(0))?)
}

/// Returns the first checkpoint of more than `size` records; the first one of all
/// for `None`.
pub(crate) fn next_after(
    tables: Tables<'_>,
    size: Option<u64>,
) -> Result<Option<(u64, String)>, LedgerError> {
    let read = |row: &Row<'_>| Ok((row.get(0)?, row.get(1)?));
    let row = match size {
        // Two queries, because a condition that may be absent would keep SQLite from seeking.
        None => tables.connection.query_row(
            "SELECT size, note FROM checkpoints ORDER BY size LIMIT 1",
            (),
            read,
        ),
        Some(size) => tables
            .connection
            .prepare("SELECT size, note FROM checkpoints WHERE size > ?1 ORDER BY size LIMIT 1")?
            .query_row([size], read),
    };
    Ok(row.optional()?)
}

/// Returns the smallest size of a checkpoint that covers record `seq`.
pub(crate) fn size_covering(tables: Tables<'_>, seq: u64) -> Result<u64, LedgerError> {
    let query = "SELECT min(size) FROM checkpoints WHERE size > ?1";
    Ok(tables.connection.query_row(query, [seq], |row| row.get(0))?)
}

/// Calls `each` with size and note of every checkpoint, by size.
pub(crate) fn each(tables: Tables<'_>, mut each: impl FnMut(u64, &str)) -> Result<(), LedgerError> {
    let mut statement =
        tables.connection.prepare("SELECT size, note FROM checkpoints ORDER BY size")?;
    let mut rows = statement.query(())?;
    while let Some(row) = rows.next()? {
        each(row.get(0)?, &row.get::<String>(1)?);
    }
    Ok(())
}

/// Calls `each` with the note of every checkpoint that covers a record of `range`
/// and no record after it, by size.
pub(crate) fn each_note_of<E: From<LedgerError>>(
    tables: Tables<'_>,
    range: Range<u64>,
    mut each: impl FnMut(&str) -> Result<(), E>,
) -> Result<(), E> {
    let storage = |error: SqlError| E::from(LedgerError::from(error));
    let mut statement = tables
        .connection
        .prepare("SELECT note FROM checkpoints WHERE size > ?1 AND size <= ?2 ORDER BY size")
        .map_err(storage)?;
    let mut rows = statement.query([range.start, range.end]).map_err(storage)?;
    while let Some(row) = rows.next().map_err(storage)? {
        each(&row.get::<String>(0).map_err(storage)?)?;
    }
    Ok(())
}
