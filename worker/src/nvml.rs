//! The one module that touches NVML. The library is opened by name when a
//! worker starts; a host without it has one sentence in the log and no other
//! trouble. What a device does not tell (slices tell less, old drivers too) is
//! left out of its readings.

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

/// Opens the library at `path`, or by the names that drivers give it.
pub(crate) fn open(path: Option<&Path>) -> Result<Nvml, NvmlError> {
    let open = |name: &OsStr| Nvml::builder().lib_path(name).init();
    match path {
        Some(path) => open(path.as_os_str()),
        // The driver's own name first: the short one comes with developers' files.
        None => open(OsStr::new("libnvidia-ml.so.1"))
            .or_else(|first| open(OsStr::new("libnvidia-ml.so")).map_err(|_| first)),
    }
}

/// A device that is watched.
pub(crate) struct Watched<'nvml> {
    device: Device<'nvml>,
    /// Whether it is a slice of a card.
    is_slice: bool,
    /// None where it reports no events.
    events: Option<EventSet<'nvml>>,
}

impl<'nvml> Watched<'nvml> {
    /// The device, or slice of one, with this UUID.
    pub(crate) fn find(nvml: &'nvml Nvml, uuid: &str) -> Result<Self, NvmlError> {
        let device = nvml.device_by_uuid(uuid)?;
        // Events are the whole card's, whichever slice is ours.
        let whole = device.mig_parent_device();
        let events = nvml.create_event_set().ok().and_then(|set| {
            whole
                .as_ref()
                .unwrap_or(&device)
                .register_events(EventTypes::CRITICAL_XID_ERROR, set)
                .ok()
        });
        Ok(Self { is_slice: whole.is_ok(), device, events })
    }

    /// What it has drawn since its driver was loaded, where it tells. Of a
    /// slice nobody can: energy is counted for whole cards.
    pub(crate) fn energy(&self) -> Option<Millijoules> {
        if self.is_slice {
            return None;
        }
        self.device.total_energy_consumption().ok().map(Millijoules)
    }

    /// What it tells now; an error where it is gone.
    pub(crate) fn read(&self) -> Result<Readings, NvmlError> {
        let Self { device, .. } = self;
        let slowed = told(device.current_throttle_reasons())?.unwrap_or(ThrottleReasons::NONE);
        let by_heat = ThrottleReasons::SW_THERMAL_SLOWDOWN | ThrottleReasons::HW_THERMAL_SLOWDOWN;
        let by_power = ThrottleReasons::SW_POWER_CAP | ThrottleReasons::HW_POWER_BRAKE_SLOWDOWN;
        let ecc = |kind| told(device.total_ecc_errors(kind, EccCounter::Volatile));
        let processes = told(device.running_compute_processes())?;
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
            utilisation: told(device.utilization_rates())?.map(|rates| rates.gpu),
            memory: told(device.memory_info())?.map(|memory| Memory {
                used: memory.used,
                total: memory.total,
                ours,
            }),
            temperature: told(device.temperature(TemperatureSensor::Gpu))?,
            power_mw: told(device.power_usage())?.map(u64::from),
            power_limit_mw: told(device.enforced_power_limit())?.map(u64::from),
            energy_mj: told(device.total_energy_consumption())?,
            clock_mhz: told(device.clock_info(Clock::SM))?,
            memory_clock_mhz: told(device.clock_info(Clock::Memory))?,
            slowed_by_heat: slowed.intersects(by_heat),
            slowed_by_power: slowed.intersects(by_power),
            ecc_corrected: ecc(MemoryError::Corrected)?,
            ecc_uncorrected: ecc(MemoryError::Uncorrected)?,
            xids: self.xids()?,
            processes: processes.map(|processes| processes.len() as u32),
            mig: told(device.mig_mode())?.map(|mode| mode.current != 0),
        })
    }

    /// The critical errors since the last look.
    fn xids(&self) -> Result<Vec<u64>, NvmlError> {
        let mut xids = Vec::new();
        let Some(events) = &self.events else { return Ok(xids) };
        while xids.len() < MOST_EVENTS {
            match events.wait(0) {
                Ok(event) => xids.push(match event.event_data {
                    Some(XidError::Value(xid)) => xid,
                    Some(XidError::Unknown) | None => 0,
                }),
                Err(NvmlError::Timeout) => break,
                Err(error) => return told(Err(error)).map(|_: Option<()>| xids),
            }
        }
        Ok(xids)
    }
}

/// A figure, or none where the device does not tell it. Only a device that is
/// gone is an error.
fn told<T>(result: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
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

/// Events that are read at one look; more wait for the next.
const MOST_EVENTS: usize = 64;
