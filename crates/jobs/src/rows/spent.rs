//! Table `spent`: the cost of answers by day, tenant and class of device. It is written in the
//! transaction of the answers, so that a cap on the device time of batches counts the same
//! after a restart.

use rusqlite::params;
use tollgate_domain::{DeviceClass, DeviceNanos, TenantId, UtcDay};

use super::{Tables, damaged};
use crate::batch::{SpentByBatches, TryCost};
use crate::error::JobError;
use crate::ids::BatchId;

/// Adds the cost of an answer of `batch`, and deletes the sums of days that no cap counts.
pub(super) fn add(tables: Tables<'_>, batch: BatchId, cost: &TryCost) -> Result<(), JobError> {
    let TryCost { day, class, reference } = cost;
    // A row of another database could exceed SQLite's integers; a cost does not.
    let reference = i64::try_from(reference.nanos()).unwrap_or(i64::MAX);
    tables
        .connection
        .prepare_cached(
            "INSERT INTO spent (day, tenant, class, reference_ns)
             SELECT ?1, tenant, ?2, ?3 FROM batches WHERE id = ?4
             ON CONFLICT DO UPDATE SET reference_ns = reference_ns + excluded.reference_ns",
        )?
        .execute(params![day.0, class.as_str(), reference, batch])?;
    // A day before yesterday is over in every order of commits.
    tables
        .connection
        .prepare_cached("DELETE FROM spent WHERE day < ?1")?
        .execute([day.0.saturating_sub(1)])?;
    Ok(())
}

/// Returns the sums of a day.
pub(super) fn of_day(tables: Tables<'_>, day: UtcDay) -> Result<Vec<SpentByBatches>, JobError> {
    let mut statement = tables.connection.prepare_cached(
        "SELECT tenant, class, reference_ns FROM spent WHERE day = ?1 ORDER BY tenant, class",
    )?;
    let mut rows = statement.query([day.0])?;
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
