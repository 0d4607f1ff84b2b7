//! Table `epochs`: the lives of workers.

use tollgate_domain::{BlockParts, WorkerEpoch};
use tollgate_sql::{OptionalRow, params};

use super::{EpochId, Tables};
use crate::error::LedgerError;

/// A worker's epoch as far as its blocks have come in.
pub(crate) struct EpochRow {
    pub(crate) id: EpochId,
    /// The last block that was posted or skipped.
    pub(crate) last_block: u64,
    pub(crate) last_step: u64,
    pub(crate) has_ended: bool,
    pub(crate) identity: WorkerIdentity,
}

/// The worker of an epoch and its device. The device's texts are empty while
/// all blocks of the epoch were skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WorkerIdentity {
    pub(crate) worker: String,
    pub(crate) device_class: String,
    pub(crate) device_name: String,
    pub(crate) device_uuid: String,
}

/// An epoch with blocks on the days that were asked for.
pub(crate) struct EpochOfDays {
    pub(crate) id: EpochId,
    pub(crate) epoch: String,
    pub(crate) device_class: String,
    /// The first block of these days.
    pub(crate) first_block: i64,
    /// The last block of these days.
    pub(crate) last_block: i64,
}

impl WorkerIdentity {
    /// Returns the identity that a block states.
    pub(crate) fn of(parts: &BlockParts) -> Self {
        Self {
            worker: parts.worker.to_string(),
            device_class: parts.device.class.to_string(),
            device_name: parts.device.name.clone(),
            device_uuid: parts.device.uuid.clone(),
        }
    }

    /// Returns an identity with a worker and no device.
    #[cfg(test)]
    pub(crate) fn without_device(worker: &str) -> Self {
        Self {
            worker: worker.to_owned(),
            device_class: String::new(),
            device_name: String::new(),
            device_uuid: String::new(),
        }
    }

    /// Returns true while no device is known.
    pub(crate) fn has_no_device(&self) -> bool {
        [&self.device_class, &self.device_name, &self.device_uuid].into_iter().all(String::is_empty)
    }
}

/// Finds an epoch.
pub(crate) fn find(
    tables: Tables<'_>,
    epoch: WorkerEpoch,
) -> Result<Option<EpochRow>, LedgerError> {
    Ok(tables
        .connection
        .prepare(
            "SELECT id, last_block, last_step, ended, worker, device_class, device_name, device_uuid
             FROM epochs WHERE epoch = ?1",
        )?
        .query_row([epoch.to_string()], |row| {
            Ok(EpochRow {
                id: row.get(0)?,
                last_block: row.get(1)?,
                last_step: row.get(2)?,
                has_ended: row.get(3)?,
                identity: WorkerIdentity {
                    worker: row.get(4)?,
                    device_class: row.get(5)?,
                    device_name: row.get(6)?,
                    device_uuid: row.get(7)?,
                },
            })
        })
        .optional()?)
}

/// Inserts the epoch of its first posted block and returns the epoch's number.
pub(crate) fn insert(tables: Tables<'_>, parts: &BlockParts) -> Result<EpochId, LedgerError> {
    let WorkerIdentity { worker, device_class, device_name, device_uuid } =
        WorkerIdentity::of(parts);
    let values = params![
        parts.epoch.to_string(),
        worker,
        device_class,
        device_name,
        device_uuid,
        parts.number as i64,
        parts.last_step as i64,
        parts.last_of_epoch
    ];
    let mut statement = tables.connection.prepare(
        "INSERT INTO epochs (epoch, worker, device_class, device_name, device_uuid,
           last_block, last_step, ended) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8) RETURNING id",
    )?;
    Ok(statement.query_row(values, |row| row.get(0))?)
}

/// Inserts an epoch that begins with a skipped block: its worker is known, its
/// device is not.
pub(crate) fn insert_skipped(
    tables: Tables<'_>,
    epoch: WorkerEpoch,
    worker: &str,
    last_block: u64,
) -> Result<EpochId, LedgerError> {
    // Empty texts mark a device that is unknown; the first posted block sets them.
    Ok(tables.connection.query_row(
        "INSERT INTO epochs (epoch, worker, device_class, device_name, device_uuid,
           last_block, last_step, ended) VALUES (?1, ?2, '', '', '', ?3, 0, 0) RETURNING id",
        params![epoch.to_string(), worker, last_block as i64],
        |row| row.get(0),
    )?)
}

/// Moves a known epoch on to a posted block.
pub(crate) fn advance(
    tables: Tables<'_>,
    known: &EpochRow,
    parts: &BlockParts,
) -> Result<(), LedgerError> {
    // The device is written with each block: skipped first blocks left it empty.
    let WorkerIdentity { worker, device_class, device_name, device_uuid } =
        WorkerIdentity::of(parts);
    tables
        .connection
        .prepare(
            "UPDATE epochs SET last_block = ?2, last_step = ?3, ended = ?4, worker = ?5,
               device_class = ?6, device_name = ?7, device_uuid = ?8 WHERE id = ?1",
        )?
        .send(params![
            known.id,
            parts.number as i64,
            // A block of idle time has no steps and states 0, which must not move the epoch back.
            parts.last_step.max(known.last_step) as i64,
            parts.last_of_epoch,
            worker,
            device_class,
            device_name,
            device_uuid
        ])?;
    Ok(())
}

/// Moves a known epoch on past a skipped block.
pub(crate) fn set_last_block(
    tables: Tables<'_>,
    id: EpochId,
    last_block: u64,
) -> Result<(), LedgerError> {
    tables
        .connection
        // Only the number moves on: nothing else that a skipped block states is accepted.
        .prepare("UPDATE epochs SET last_block = ?2 WHERE id = ?1")?
        .send(params![id, last_block as i64])?;
    Ok(())
}

/// Returns number and name of every epoch, in the order of their first blocks.
pub(crate) fn all(tables: Tables<'_>) -> Result<Vec<(EpochId, String)>, LedgerError> {
    let mut statement = tables.connection.prepare("SELECT id, epoch FROM epochs ORDER BY id")?;
    let rows = statement.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the ended epochs with a last block within `days` of the newest block.
pub(crate) fn ended_within(tables: Tables<'_>, days: i64) -> Result<Vec<String>, LedgerError> {
    // Relative to the newest block, because the crate has no clock.
    let mut statement = tables.connection.prepare(
        "SELECT epoch FROM epochs WHERE ended <> 0 AND id IN (
           SELECT epoch_id FROM blocks
           WHERE day >= (SELECT max(day) FROM blocks) - ?1 AND last_of_epoch <> 0)
         ORDER BY id",
    )?;
    let rows = statement.query_map([days], |row| row.get(0))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Returns the epochs with blocks on the days from `first` to `last`, by name.
pub(crate) fn of_days(
    tables: Tables<'_>,
    (first, last): (u32, u32),
) -> Result<Vec<EpochOfDays>, LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT epoch_id, epoch, device_class, first, last FROM (
           SELECT epoch_id, min(block) AS first, max(block) AS last
           FROM blocks WHERE day BETWEEN ?1 AND ?2 GROUP BY epoch_id) AS spans
         JOIN epochs ON epochs.id = epoch_id ORDER BY epoch",
    )?;
    let rows = statement.query_map(params![first, last], |row| {
        Ok(EpochOfDays {
            id: row.get(0)?,
            epoch: row.get(1)?,
            device_class: row.get(2)?,
            first_block: row.get(3)?,
            last_block: row.get(4)?,
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}
