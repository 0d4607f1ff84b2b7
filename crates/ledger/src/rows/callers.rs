//! Table `callers`: tenants with their keys, numbered.

use std::collections::HashMap;

use tollgate_domain::{Caller, TenantId};
use tollgate_sql::OptionalRow;

use super::{CallerId, Tables, caller_at};
use crate::error::LedgerError;

/// Returns the number of a caller, and inserts the caller at its first
/// appearance.
pub(crate) fn find_or_insert(tables: Tables<'_>, caller: &Caller) -> Result<CallerId, LedgerError> {
    let (tenant, key) = (caller.tenant.as_str(), caller.key.as_str());
    let known = tables
        .connection
        .prepare("SELECT id FROM callers WHERE tenant = ?1 AND key = ?2")?
        .query_row([tenant, key], |row| row.get(0))
        .optional()?;
    if let Some(id) = known {
        return Ok(id);
    }
    Ok(tables
        .connection
        .prepare("INSERT INTO callers (tenant, key) VALUES (?1, ?2) RETURNING id")?
        .query_row([tenant, key], |row| row.get(0))?)
}

/// Returns a tenant's callers with their keys, ordered by key.
pub(crate) fn of_tenant(
    tables: Tables<'_>,
    tenant: &TenantId,
) -> Result<Vec<(CallerId, String)>, LedgerError> {
    let mut statement =
        tables.connection.prepare("SELECT id, key FROM callers WHERE tenant = ?1 ORDER BY key")?;
    let rows = statement.query_map([tenant.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns every caller by its number.
pub(crate) fn all(tables: Tables<'_>) -> Result<HashMap<CallerId, Caller>, LedgerError> {
    let mut statement = tables.connection.prepare("SELECT id, tenant, key FROM callers")?;
    let mut rows = statement.query(())?;
    let mut callers = HashMap::new();
    while let Some(row) = rows.next()? {
        callers.insert(row.get(0)?, caller_at(&row, 1)?);
    }
    Ok(callers)
}
