//! The calibration: a cost table that is measured once for an engine, a device and
//! a model, and kept in the data folder. A table that requests were billed with
//! never changes.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tollgate_domain::{CostTable, DeviceNanos};
use tollgate_engine::calibrate::{calibrate, calibration_key};
use tollgate_engine::{Backend, Clock};

use crate::WorkerError;

/// A cost table, with the device time that its measurement took in this process.
pub(crate) struct Calibrated {
    pub(crate) table: CostTable,
    pub(crate) device_time: DeviceNanos,
}

/// Returns the kept table, or measures and keeps a new one. A measurement takes two
/// seconds for a small model and half a minute for a large one.
pub(crate) fn table(
    data: &Path,
    backend: &mut dyn Backend,
    clock: &dyn Clock,
) -> Result<Calibrated, WorkerError> {
    let folder = data.join("calibration");
    let key = calibration_key(backend);
    let path = folder.join(format!("{key}.json"));
    if let Some(table) = kept(&path, &key) {
        return Ok(Calibrated { table, device_time: DeviceNanos::ZERO });
    }
    tracing::info!(%key, "calibrating the device; this takes 2 s for a small model, and 30 s for a large one");
    let measured = calibrate(backend, clock)?;
    // A table that is not kept would be measured again, and costs would change with
    // each start.
    keep(&folder, &path, &measured.table)
        .map_err(|source| WorkerError::CalibrationFile { path, source })?;
    tracing::info!(
        version = measured.table.version(),
        steps = measured.steps,
        device_time = %measured.device_time,
        "calibrated the device"
    );
    Ok(Calibrated { table: measured.table, device_time: measured.device_time })
}

/// Returns the table in the file `path`. Returns `None` if the file is missing or
/// unusable; the caller then measures a new table.
fn kept(path: &Path, key: &str) -> Option<CostTable> {
    let bytes = fs::read(path).ok()?;
    match serde_json::from_slice::<CostTable>(&bytes) {
        // A copied file may have the right name and the wrong content.
        Ok(table) if table.version().starts_with(key) => Some(table),
        Ok(_) => {
            tracing::warn!(file = %path.display(), "calibration file is for another device or model; measuring again");
            None
        }
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "calibration file is unreadable; measuring again");
            None
        }
    }
}

/// Writes the table atomically. Other workers may calibrate at the same time, so
/// the draft's name is unique to this process.
fn keep(folder: &Path, path: &PathBuf, table: &CostTable) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let bytes = serde_json::to_vec_pretty(table)?;
    // A crash while writing must not leave half a table under the final name.
    let draft = path.with_extension(format!("draft-{}", std::process::id()));
    let file = fs::File::create(&draft)?;
    io::Write::write_all(&mut &file, &bytes)?;
    // The sync comes before the rename, or a power cut could leave an empty file.
    file.sync_all()?;
    fs::rename(&draft, path)
}
