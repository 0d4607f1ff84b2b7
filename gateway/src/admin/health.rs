//! The health of a device as JSON for admins. Figures that the driver does not
//! report are null.

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_wire::v1;

use crate::telemetry::concerns;

/// The health of one device.
#[derive(Debug, Serialize, JsonSchema)]
pub(super) struct Health {
    /// True while the gateway places nothing new on the device.
    rests: bool,
    /// The names of the concerns that hold.
    concerns: Vec<&'static str>,
    utilisation_percent: Option<u32>,
    memory_used_bytes: Option<u64>,
    memory_total_bytes: Option<u64>,
    /// Device memory of the worker's own process.
    memory_ours_bytes: Option<u64>,
    temperature_celsius: Option<u32>,
    power_mw: Option<u64>,
    power_limit_mw: Option<u64>,
    energy_mj: Option<u64>,
    clock_mhz: Option<u32>,
    memory_clock_mhz: Option<u32>,
    slowed_by_heat: bool,
    slowed_by_power: bool,
    ecc_corrected: Option<u64>,
    ecc_uncorrected: Option<u64>,
    processes: Option<u32>,
    mig: Option<bool>,
}

impl From<v1::DeviceHealth> for Health {
    fn from(health: v1::DeviceHealth) -> Self {
        Self {
            rests: health.rests,
            concerns: concerns(&health).into_iter().filter(|it| it.1).map(|it| it.0).collect(),
            utilisation_percent: health.utilisation_percent,
            memory_used_bytes: health.memory_used,
            memory_total_bytes: health.memory_total,
            memory_ours_bytes: health.memory_ours,
            temperature_celsius: health.temperature_celsius,
            power_mw: health.power_mw,
            power_limit_mw: health.power_limit_mw,
            energy_mj: health.energy_mj,
            clock_mhz: health.clock_mhz,
            memory_clock_mhz: health.memory_clock_mhz,
            slowed_by_heat: health.slowed_by_heat,
            slowed_by_power: health.slowed_by_power,
            ecc_corrected: health.ecc_corrected,
            ecc_uncorrected: health.ecc_uncorrected,
            processes: health.processes,
            mig: health.mig,
        }
    }
}
