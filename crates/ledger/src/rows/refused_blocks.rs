//! Table `refused_blocks`: blocks that were skipped.

use tollgate_domain::{UtcTime, WorkerEpoch, WorkerName};
use tollgate_sql::params;

use super::{BlockKey, Tables, name};
use crate::act::RefusedBlock;
use crate::error::LedgerError;

/// Inserts a skipped block. `record` is the number of its audit record.
pub(crate) fn insert(
    tables: Tables<'_>,
    key: BlockKey,
    refused: &RefusedBlock,
    record: u64,
) -> Result<(), LedgerError> {
    tables.connection.execute(
        "INSERT INTO refused_blocks (epoch_id, block, reason, at_utc_ns, record_seq)
         VALUES (?1, ?2, ?3, ?4, ?5)",
        params![key.epoch, key.block, refused.reason, refused.at.0 as i64, record],
    )?;
    Ok(())
}

/// Returns every skipped block that has an audit record, with the record's number.
pub(crate) fn recorded(tables: Tables<'_>) -> Result<Vec<(RefusedBlock, u64)>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT worker, epoch, block, reason, at_utc_ns, record_seq
         FROM refused_blocks JOIN epochs ON epochs.id = epoch_id WHERE record_seq IS NOT NULL",
    )?;
    let mut rows = statement.query(())?;
    let mut refused = Vec::new();
    while let Some(row) = rows.next()? {
        let block = RefusedBlock {
            worker: name(WorkerName::new(&row.get::<String>(0)?))?,
            epoch: name(WorkerEpoch::try_from(row.get::<String>(1)?))?,
            number: row.get(2)?,
            reason: row.get(3)?,
            at: UtcTime(row.get(4)?),
        };
        refused.push((block, row.get(5)?));
    }
    Ok(refused)
}

/// Returns epoch, number and reason of every skipped block.
pub(crate) fn reasons(tables: Tables<'_>) -> Result<Vec<(String, i64, String)>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT epoch, block, reason FROM refused_blocks JOIN epochs ON epochs.id = epoch_id",
    )?;
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}
