//! The price of steps: measured once for an engine, a device and a model, and
//! kept. A table that was served on never changes by itself.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tollgate_domain::{CostTable, DeviceNanos};
use tollgate_engine::calibrate::{calibrate, calibration_key};
use tollgate_engine::{Backend, Clock};

use crate::WorkerError;

/// The table to serve on, and what measuring it took just now.
pub(crate) struct Calibrated {
    pub(crate) table: CostTable,
    pub(crate) device_time: DeviceNanos,
}

/// The kept table, or a new one that is kept from now on: two seconds for a
/// small model, half a minute for a large one.
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
    tracing::info!(%key, "calibrating");
    let measured = calibrate(backend, clock)?;
    keep(&folder, &path, &measured.table)
        .map_err(|source| WorkerError::CalibrationFile { path, source })?;
    tracing::info!(
        version = measured.table.version(),
        steps = measured.steps,
        device_time = %measured.device_time,
        "calibrated"
    );
    Ok(Calibrated { table: measured.table, device_time: measured.device_time })
}

/// What is kept at `path`, unless it cannot be used: then it is measured anew.
fn kept(path: &Path, key: &str) -> Option<CostTable> {
    let bytes = fs::read(path).ok()?;
    match serde_json::from_slice::<CostTable>(&bytes) {
        Ok(table) if table.version().starts_with(key) => Some(table),
        Ok(_) => {
            tracing::warn!(file = %path.display(), "a kept calibration is of something else");
            None
        }
        Err(error) => {
            tracing::warn!(file = %path.display(), %error, "a kept calibration is unreadable");
            None
        }
    }
}

/// Whole or not at all, whoever else calibrates beside us.
fn keep(folder: &Path, path: &PathBuf, table: &CostTable) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let bytes = serde_json::to_vec_pretty(table)?;
    let draft = path.with_extension(format!("draft-{}", std::process::id()));
    let file = fs::File::create(&draft)?;
    io::Write::write_all(&mut &file, &bytes)?;
    file.sync_all()?;
    fs::rename(&draft, path)
}
