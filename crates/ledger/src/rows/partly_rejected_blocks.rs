//! Table `struck_blocks`: the reported form of blocks that were accepted only in
//! part, so that such a block is recognised when its worker sends it again.

use tollgate_sql::params;

use super::{BlockKey, Tables};
use crate::error::LedgerError;

/// Returns epoch, number and reason of every block that was posted in part.
pub(crate) fn reasons(tables: Tables<'_>) -> Result<Vec<(String, i64, String)>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT epoch, block, reason FROM struck_blocks JOIN epochs ON epochs.id = epoch_id
         ORDER BY epoch_id, block",
    )?;
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Inserts the digest of a block as its worker reported it, and the reason of the
/// partial rejection.
pub(crate) fn insert(
    tables: Tables<'_>,
    key: BlockKey,
    reported_digest: &[u8; 32],
    reason: &str,
) -> Result<(), LedgerError> {
    tables
        .connection
        .prepare(
            "INSERT INTO struck_blocks (epoch_id, block, digest, reason) VALUES (?1, ?2, ?3, ?4)",
        )?
        .send(params![key.epoch, key.block, &reported_digest[..], reason])?;
    Ok(())
}
