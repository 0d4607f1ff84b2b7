//! Table `struck_blocks`: the reported form of blocks that were accepted only in
//! part, so that such a block is recognised when its worker sends it again.

use rusqlite::params;

use super::{BlockKey, Tables};
use crate::error::LedgerError;

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
        .prepare_cached(
            "INSERT INTO struck_blocks (epoch_id, block, digest, reason) VALUES (?1, ?2, ?3, ?4)",
        )?
        .execute(params![key.epoch, key.block, &reported_digest[..], reason])?;
    Ok(())
}
