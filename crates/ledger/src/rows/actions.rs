//! Table `recorded_actions`: ids of recorded actions.

use tollgate_sql::{OptionalRow, params};

use super::Tables;
use crate::error::LedgerError;

/// Returns true if an action of this id is recorded already.
pub(crate) fn is_known(tables: Tables<'_>, id: &str) -> Result<bool, LedgerError> {
    let known: Option<i64> = tables
        .connection
        .prepare("SELECT 1 FROM recorded_actions WHERE id = ?1")?
        .query_row([id], |row| row.get(0))
        .optional()?;
    Ok(known.is_some())
}

/// Inserts an action's id with the number of its record.
pub(crate) fn insert(tables: Tables<'_>, id: &str, record: u64) -> Result<(), LedgerError> {
    tables
        .connection
        .prepare("INSERT INTO recorded_actions (id, record_seq) VALUES (?1, ?2)")?
        .send(params![id, record])?;
    Ok(())
}

/// Returns numbers and texts of the records of the newest `most` actions, the newest last.
pub(crate) fn newest(tables: Tables<'_>, most: u32) -> Result<Vec<(u64, String)>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT seq, record FROM recorded_actions JOIN records ON seq = record_seq
         ORDER BY record_seq DESC LIMIT ?1",
    )?;
    let rows = statement.query_map([most], |row| Ok((row.get(0)?, row.get(1)?)))?;
    let mut records = rows.collect::<Result<Vec<_>, _>>()?;
    // The query reads from the end, so that the limit keeps the newest.
    records.reverse();
    Ok(records)
}

/// Calls `each` with every action from record `first` on: its id, and its
/// record's text if there is one.
pub(crate) fn each_from(
    tables: Tables<'_>,
    first: u64,
    mut each: impl FnMut(&str, Option<&str>),
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT id, record FROM recorded_actions LEFT JOIN records ON seq = record_seq
         WHERE record_seq >= ?1",
    )?;
    let mut rows = statement.query([first])?;
    while let Some(row) = rows.next()? {
        let (id, record): (String, Option<String>) = (row.get(0)?, row.get(1)?);
        each(&id, record.as_deref());
    }
    Ok(())
}
