//! Table `spent`: the cost of answers by day, tenant and class of device. It is written in the
//! transaction of the answers, so that a cap on the device time of batches counts the same
//! after a restart.

use tollgate_domain::{DeviceClass, DeviceNanos, TenantId, UtcDay};
use tollgate_sql::params;

use super::{Tables, damaged};
use crate::batch::{SpentByBatches, TryCost};
use crate::error::JobError;
use crate::ids::BatchId;

/// Adds the cost of answers of `batch`, and deletes the sums of days that no cap counts.
pub(super) fn add(tables: Tables<'_>, batch: BatchId, cost: &TryCost) -> Result<(), JobError> {
    let TryCost { day, class, reference } = cost;
    // A row of another database could exceed SQLite's integers; a cost does not.
    let reference = i64::try_from(reference.nanos()).unwrap_or(i64::MAX);
    let (class, connection) = (class.as_str(), tables.connection);
    match tables.home {
        None => connection
            .prepare(
                "INSERT INTO spent (day, tenant, class, reference_ns)
                 SELECT ?1, tenant, ?2, ?3 FROM batches WHERE id = ?4
                 ON CONFLICT (day, tenant, class)
                 DO UPDATE SET reference_ns = spent.reference_ns + excluded.reference_ns",
            )?
            .send(params![day.0, class, reference, batch])?,
        // Each gateway counts the answers that it committed against its own part of a cap.
        Some(home) => connection
            .prepare(
                "INSERT INTO spent (day, tenant, class, reference_ns, home)
                 SELECT CAST(?1 AS BIGINT), tenant, CAST(?2 AS TEXT), CAST(?3 AS BIGINT),
                   CAST(?5 AS TEXT) FROM batches WHERE id = ?4
                 ON CONFLICT (day, tenant, class, home)
                 DO UPDATE SET reference_ns = spent.reference_ns + excluded.reference_ns",
            )?
            .send(params![day.0, class, reference, batch, home])?,
    }
    // A day before yesterday is over in every order of commits.
    connection.prepare("DELETE FROM spent WHERE day < ?1")?.send([day.0.saturating_sub(1)])?;
    Ok(())
}

/// Returns the sums of a day; on a server those of this gateway.
pub(super) fn of_day(tables: Tables<'_>, day: UtcDay) -> Result<Vec<SpentByBatches>, JobError> {
    let own = if tables.home.is_some() { "AND home = ?2" } else { "AND ?2 IS NULL" };
    let sql = format!(
        "SELECT tenant, class, reference_ns FROM spent WHERE day = ?1 {own} ORDER BY tenant, class"
    );
    let mut statement = tables.connection.prepare(&sql)?;
    let mut rows = statement.query(params![day.0, tables.home])?;
    let mut spent = Vec::new();
    while let Some(row) = rows.next()? {
        let (tenant, class): (String, String) = (row.get(0)?, row.get(1)?);
        spent.push(SpentByBatches {
            tenant: TenantId::new(&tenant).map_err(|error| damaged(error.to_string()))?,
            class: DeviceClass::new(&class).map_err(|error| damaged(error.to_string()))?,
            reference: DeviceNanos(row.get(2)?),
        });
    }
    Ok(spent)
}
