//! Table `blocks`: the posted blocks without their entries.

use tollgate_domain::{
    BlockParts, Device, DeviceClass, DeviceNanos, ModelName, UtcDay, UtcTime, WorkerEpoch,
    WorkerName,
};
use tollgate_sql::{Row, params};

use super::{BlockKey, EpochId, Tables, name};
use crate::error::LedgerError;

/// A block as it is kept, with its epoch.
pub(crate) struct BlockRow {
    pub(crate) epoch: EpochId,
    /// The block's number as it is stored.
    pub(crate) block: i64,
    /// The block without its entries and finished attempts.
    pub(crate) parts: BlockParts,
    /// SHA-256 of the posted block.
    pub(crate) digest: Vec<u8>,
    pub(crate) day: u32,
    /// The block's audit record.
    pub(crate) record: Option<u64>,
    /// SHA-256 of the block as its worker reported it, if only a part was
    /// accepted.
    pub(crate) reported_digest: Option<Vec<u8>>,
    /// Reason of the partial rejection.
    pub(crate) rejection: Option<String>,
}

/// Inserts a block. `record` is the number of its audit record.
pub(crate) fn insert(
    tables: Tables<'_>,
    key: BlockKey,
    parts: &BlockParts,
    digest: &[u8; 32],
    record: u64,
) -> Result<(), LedgerError> {
    tables
        .connection
        .prepare(
            "INSERT INTO blocks (epoch_id, block, model, calibration, first_step, last_step,
               started_utc_ns, day, last_of_epoch, digest, record_seq)
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        )?
        .send(params![
            key.epoch,
            key.block,
            parts.model.as_str(),
            parts.calibration,
            // The casts change no figure: a `Block` exists only with figures that fit `i64`.
            parts.first_step as i64,
            parts.last_step as i64,
            parts.started.0 as i64,
            // The day is kept beside the time, so that an index finds the blocks of a month.
            parts.started.day().0,
            parts.last_of_epoch,
            &digest[..],
            record
        ])?;
    Ok(())
}

/// Returns the digest of a block as its worker reported it; `None` where the
/// block was skipped or is archived.
pub(crate) fn reported_digest(
    tables: Tables<'_>,
    key: BlockKey,
) -> Result<Option<Vec<u8>>, LedgerError> {
    // A worker repeats a block as it reported it, so that form's digest comes first.
    Ok(tables
        .connection
        .prepare(
            "SELECT coalesce(
               (SELECT digest FROM struck_blocks WHERE epoch_id = ?1 AND block = ?2),
               (SELECT digest FROM blocks WHERE epoch_id = ?1 AND block = ?2))",
        )?
        .query_row(params![key.epoch, key.block], |row| row.get(0))?)
}

/// Returns day and model of a block.
pub(crate) fn day_and_model(
    tables: Tables<'_>,
    key: BlockKey,
) -> Result<(UtcDay, String), LedgerError> {
    Ok(tables
        .connection
        .prepare("SELECT day, model FROM blocks WHERE epoch_id = ?1 AND block = ?2")?
        .query_row(params![key.epoch, key.block], |row| Ok((UtcDay(row.get(0)?), row.get(1)?)))?)
}

/// Calls `each` with every block, or with its epoch and number and the reason
/// why the row cannot be read.
pub(crate) fn each(
    tables: Tables<'_>,
    mut each: impl FnMut(EpochId, i64, Result<BlockRow, LedgerError>),
) -> Result<(), LedgerError> {
    let mut statement = tables.connection.prepare(
        "SELECT epoch_id, block, epoch, worker, device_class, device_name, device_uuid, model,
           calibration, first_step, blocks.last_step, started_utc_ns, last_of_epoch, blocks.digest, day,
           record_seq, said.digest, said.reason
         FROM blocks JOIN epochs ON epochs.id = blocks.epoch_id
         LEFT JOIN struck_blocks AS said USING (epoch_id, block) ORDER BY epoch_id, block",
    )?;
    let mut rows = statement.stream(())?;
    while let Some(row) = rows.next()? {
        // An unreadable row is passed on as an error, so that the check goes on to the next row.
        each(row.get(0)?, row.get(1)?, read(&row));
    }
    Ok(())
}

fn read(row: &Row<'_>) -> Result<BlockRow, LedgerError> {
    let block: i64 = row.get(1)?;
    let parts = BlockParts {
        epoch: name(WorkerEpoch::try_from(row.get::<String>(2)?))?,
        // A negative number of a damaged file becomes a large one, and the digest shows it.
        number: block as u64,
        worker: name(WorkerName::new(&row.get::<String>(3)?))?,
        device: Device {
            class: name(DeviceClass::new(&row.get::<String>(4)?))?,
            name: row.get(5)?,
            uuid: row.get(6)?,
        },
        model: name(ModelName::new(&row.get::<String>(7)?))?,
        calibration: row.get(8)?,
        first_step: row.get(9)?,
        last_step: row.get(10)?,
        started: UtcTime(row.get(11)?),
        // The entries hold times and energy; the caller adds them.
        wall: DeviceNanos::ZERO,
        overhead: DeviceNanos::ZERO,
        idle: DeviceNanos::ZERO,
        loss: DeviceNanos::ZERO,
        shares: Vec::new(),
        finished: Vec::new(),
        last_of_epoch: row.get(12)?,
        energy: None,
    };
    Ok(BlockRow {
        epoch: row.get(0)?,
        block,
        parts,
        digest: row.get(13)?,
        day: row.get(14)?,
        record: row.get(15)?,
        reported_digest: row.get(16)?,
        rejection: row.get(17)?,
    })
}
