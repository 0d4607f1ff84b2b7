//! Table `meta`: facts about the database itself, beside its format.

use tollgate_domain::UtcTime;
use tollgate_sql::OptionalRow;

use super::Tables;
use crate::error::LedgerError;

/// Returns the time of the last restore from a backup.
pub(crate) fn restored(tables: Tables<'_>) -> Result<Option<UtcTime>, LedgerError> {
    let at: Option<u64> = tables
        .connection
        .prepare("SELECT CAST(value AS BIGINT) FROM meta WHERE name = 'restored'")?
        .query_row((), |row| row.get(0))
        .optional()?;
    Ok(at.map(UtcTime))
}

/// Notes that the file was restored at this time.
pub(crate) fn set_restored(tables: Tables<'_>, at: UtcTime) -> Result<(), LedgerError> {
    // The newest restore counts: any block that began before it may be lost.
    tables.connection.execute(
        "INSERT INTO meta (name, value) VALUES ('restored', ?1)
         ON CONFLICT (name) DO UPDATE SET value = excluded.value",
        [at.0],
    )?;
    Ok(())
}
