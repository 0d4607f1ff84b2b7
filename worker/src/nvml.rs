//! The only module that calls NVML. The library is opened by name when a worker
//! starts; a host without it gets one warning in the log and no health checks. A
//! value that the device does not report (MIG slices and old drivers report less)
//! is missing from the readings.

use std::ffi::OsStr;
use std::path::Path;

use nvml_wrapper::bitmasks::device::ThrottleReasons;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::{Clock, EccCounter, MemoryError, TemperatureSensor};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};

use tollgate_domain::Millijoules;

use crate::health::{Memory, Readings};

/// Opens the library at `path`, or else under the driver's usual names.
pub(crate) fn open(path: Option<&Path>) -> Result<Nvml, NvmlError> {
    let open = |name: &OsStr| Nvml::builder().lib_path(name).init();
    match path {
        Some(path) => open(path.as_os_str()),
        // The versioned name comes with the driver; the other one with development
        // files.
        // If both fail, the first error is reported, because the driver should bring
        // that library.
        None => open(OsStr::new("libnvidia-ml.so.1"))
            .or_else(|first| open(OsStr::new("libnvidia-ml.so")).map_err(|_| first)),
    }
}

/// A monitored device.
pub(crate) struct MonitoredDevice<'nvml> {
    device: Device<'nvml>,
    /// True if the device is a MIG slice.
    is_slice: bool,
    /// `None` if the device reports no events.
    events: Option<EventSet<'nvml>>,
}

impl<'nvml> MonitoredDevice<'nvml> {
    /// Finds the GPU or MIG slice with this UUID.
    pub(crate) fn find(nvml: &'nvml Nvml, uuid: &str) -> Result<Self, NvmlError> {
        let device = nvml.device_by_uuid(uuid)?;
        // Events are reported for the whole GPU only, also to its slices.
        let whole = device.mig_parent_device();
        // A device without events still has readings, so failures here are no errors.
        let events = nvml.create_event_set().ok().and_then(|set| {
            whole
                .as_ref()
                .unwrap_or(&device)
                .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                .ok()
        });
        Ok(Self { is_slice: whole.is_ok(), device, events })
    }

    /// Returns the energy drawn since the driver was loaded. Returns `None` for a
    /// slice: the driver counts the energy of whole GPUs only.
    pub(crate) fn energy(&self) -> Option<Millijoules> {
        if self.is_slice {
            return None;
        }
        self.device.total_energy_consumption().ok().map(Millijoules)
    }

    /// Returns the current readings, or an error if the device is lost.
    pub(crate) fn read(&self) -> Result<Readings, NvmlError> {
        let Self { device, .. } = self;
        let slowed = reported(device.current_throttle_reasons())?.unwrap_or(ThrottleReasons::NONE);
        let by_heat = ThrottleReasons::SW_THERMAL_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        let by_power = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN;
        let ecc = |kind| reported(device.total_ecc_errors(kind, EccCounter::Volatile));
        let processes = reported(device.running_compute_processes())?;
        // NVML lists the processes of the host; this one is found by its id.
        let ours = processes.as_ref().and_then(|processes| {
            let us = std::process::id();
            processes.iter().find(|process| process.pid == us).and_then(|process| {
                match process.used_gpu_memory {
                    UsedGpuMemory::Used(bytes) => Some(bytes),
                    UsedGpuMemory::Unavailable => None,
                }
            })
        });
        Ok(Readings {
            utilisation: reported(device.utilization_rates())?.map(|rates| rates.gpu),
            memory: reported(device.memory_info())?.map(|memory| Memory {
                used: memory.used,
                total: memory.total,
                ours,
            }),
            temperature: reported(device.temperature(TemperatureSensor::Gpu))?,
            power_mw: reported(device.power_usage())?.map(u64::from),
            power_limit_mw: reported(device.enforced_power_limit())?.map(u64::from),
            energy_mj: reported(device.total_energy_consumption())?,
            clock_mhz: reported(device.clock_info(Clock::SM))?,
            memory_clock_mhz: reported(device.clock_info(Clock::Memory))?,
            slowed_by_heat: slowed.intersects(by_heat),
            slowed_by_power: slowed.intersects(by_power),
            ecc_corrected: ecc(MemoryError::Corrected)?,
            ecc_uncorrected: ecc(MemoryError::Uncorrected)?,
            xids: self.xids()?,
            processes: processes.map(|processes| processes.len() as u32),
            mig: reported(device.mig_mode())?.map(|mode| mode.current != 0),
        })
    }

    /// Returns the critical errors since the last check; `None` if the driver reports no events.
    fn xids(&self) -> Result<Option<Vec<u64>>, NvmlError> {
        let Some(events) = &self.events else { return Ok(None) };
        let mut xids = Vec::new();
        // A faulty device may report events without end.
        while xids.len() < MOST_EVENTS {
            match events.wait(0) {
                Ok(event) => xids.push(match event.event_data {
                    Some(XidError::Value(xid)) => xid,
                    Some(XidError::Unknown) | None => 0,
                }),
                Err(NvmlError::Timeout) => break,
                Err(error) => return reported(Err(error)).map(|_: Option<()>| Some(xids)),
            }
        }
        Ok(Some(xids))
    }
}

/// Returns the value, or `None` if the device does not report it. Only a lost
/// device is an error.
fn reported<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match result {
        Ok(figure) => Ok(Some(figure)),
        Err(
            error @ (NvmlError::GpuLost
            | NvmlError::ResetRequired
            | NvmlError::Uninitialized
            | NvmlError::IrqIssue),
        ) => Err(error),
        Err(_) => Ok(None),
    }
}

/// Events that one check reads at most; the next check reads the others.
const MOST_EVENTS: usize = 64;
