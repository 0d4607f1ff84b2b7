//! Table `meta`: facts about the file itself, beside its format.

use rusqlite::OptionalExtension;
use tollgate_domain::UtcTime;

use super::Tables;
use crate::error::LedgerError;

/// Returns the time of the last restore from a backup.
pub(crate) fn restored(tables: Tables<'_>) -> Result<Option<UtcTime>, LedgerError> {
    let at: Option<u64> = tables
        .connection
        .prepare_cached("SELECT value FROM meta WHERE name = 'restored'")?
        .query_row([], |row| row.get(0))
        .optional()?;
    Ok(at.map(UtcTime))
}

/// Notes that the file was restored at this time.
pub(crate) fn set_restored(tables: Tables<'_>, at: UtcTime) -> Result<(), LedgerError> {
    // The newest restore counts: any block that began before it may be lost.
    tables.connection.execute("REPLACE INTO meta VALUES ('restored', ?1)", [at.0])?;
    Ok(())
}
