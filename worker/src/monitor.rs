//! Looks at the device every few seconds, on a thread of its own, and says
//! whether it is well to whoever asks: the door of the service, and the status
//! that the gateway hears. In between it reads the energy counter alone.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use tollgate_engine::{Clock, EngineHandle};
use tollgate_wire::v1;

use crate::energy::{Meter, READ_EVERY};
use crate::health::{Concern, Health, Readings, Thresholds};
use crate::nvml::{self, Watched};

/// How a device is watched.
#[derive(Clone, Debug, PartialEq)]
pub struct HealthOptions {
    /// The NVML library, where it has no usual name.
    pub nvml: Option<PathBuf>,
    /// How often the device is looked at.
    pub every: Duration,
    /// When it is not well.
    pub thresholds: Thresholds,
}

impl Default for HealthOptions {
    fn default() -> Self {
        Self { nvml: None, every: Duration::from_secs(5), thresholds: Thresholds::default() }
    }
}

/// What was seen last; clones are the same. Empty where nothing is watched.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    shared: Arc<Mutex<Option<v1::DeviceHealth>>>,
}

impl Seen {
    /// Whether the device should be given nothing new.
    pub(crate) fn rests(&self) -> bool {
        self.lock().as_ref().is_some_and(|health| health.rests)
    }

    /// As the gateway is told it.
    pub(crate) fn message(&self) -> Option<v1::DeviceHealth> {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<v1::DeviceHealth>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens NVML; nothing where it cannot be had, for which the log says why.
pub(crate) fn open(options: &HealthOptions) -> Option<Nvml> {
    nvml::open(options.nvml.as_deref())
        .inspect_err(|error| {
            tracing::warn!(%error, "NVML cannot be opened: the device's health is not watched");
        })
        .ok()
}

/// Reads the energy counter of the device `uuid` once.
pub(crate) fn read_energy(nvml: &Nvml, uuid: &str, clock: &dyn Clock, meter: &Meter) {
    let at = clock.now();
    meter.tell(at, Watched::find(nvml, uuid).ok().and_then(|device| device.energy()));
}

/// What a monitor looks at, and whom it tells.
pub(crate) struct MonitorParts {
    pub(crate) options: HealthOptions,
    pub(crate) uuid: String,
    pub(crate) engine: EngineHandle,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) seen: Seen,
    /// None: what the device draws is not this worker's alone.
    pub(crate) meter: Option<Meter>,
}

/// A monitor that runs; it ends when this is dropped.
pub(crate) struct Monitor {
    _stay: SyncSender<()>,
}

impl Monitor {
    /// Watches the device.
    pub(crate) fn start(nvml: Nvml, parts: MonitorParts) -> io::Result<Self> {
        let (stay, gone) = sync_channel(1);
        let health = Health::new(parts.options.thresholds.clone());
        let look = Look { parts, health, steps: 0, concerns: BTreeSet::new() };
        let thread = std::thread::Builder::new().name("health".to_owned());
        thread.spawn(move || look.until(&nvml, &gone))?;
        Ok(Self { _stay: stay })
    }
}

/// The monitor's thread.
struct Look {
    parts: MonitorParts,
    health: Health,
    /// Of the engine, at the last look.
    steps: u64,
    /// At the last look.
    concerns: BTreeSet<Concern>,
}

impl Look {
    fn until(mut self, nvml: &Nvml, gone: &Receiver<()>) {
        let every = self.parts.options.every;
        let pace = if self.parts.meter.is_some() { every.min(READ_EVERY) } else { every };
        let mut watched: Option<Watched<'_>> = None;
        let mut rest = Duration::ZERO;
        loop {
            if rest.is_zero() {
                watched = self.look(nvml, watched.take());
                rest = every;
            }
            if let Some(meter) = &self.parts.meter {
                let at = self.parts.clock.now();
                meter.tell(at, watched.as_ref().and_then(Watched::energy));
            }
            let pause = rest.min(pace);
            if gone.recv_timeout(pause) != Err(RecvTimeoutError::Timeout) {
                return;
            }
            rest = rest.saturating_sub(pause);
        }
    }

    /// One whole look. A device that was gone is looked for anew.
    fn look<'nvml>(
        &mut self,
        nvml: &'nvml Nvml,
        watched: Option<Watched<'nvml>>,
    ) -> Option<Watched<'nvml>> {
        let found = watched.map_or_else(|| Watched::find(nvml, &self.parts.uuid), Ok);
        let read = found.and_then(|device| Ok((device.read()?, device)));
        let (readings, device, error) = match read {
            Ok((readings, device)) => (Some(readings), Some(device), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        let concerns = self.judge(readings.as_ref());
        if concerns != self.concerns {
            let temperature = readings.and_then(|it| it.temperature);
            tracing::warn!(
                device = self.parts.uuid,
                ?concerns,
                temperature,
                error,
                "the device's health changed"
            );
            self.concerns = concerns;
        }
        device
    }

    fn judge(&mut self, readings: Option<&Readings>) -> BTreeSet<Concern> {
        let steps = self.parts.engine.status().steps;
        let worked = std::mem::replace(&mut self.steps, steps) != steps
            || self.parts.engine.work().is_some();
        let concerns = self.health.judge(readings, worked, self.parts.clock.now());
        let nothing = Readings::default();
        *self.parts.seen.lock() = Some(message(readings.unwrap_or(&nothing), &concerns));
        concerns
    }
}

fn message(readings: &Readings, concerns: &BTreeSet<Concern>) -> v1::DeviceHealth {
    let Readings {
        utilisation,
        memory,
        temperature,
        power_mw,
        power_limit_mw,
        energy_mj,
        clock_mhz,
        memory_clock_mhz,
        slowed_by_heat,
        slowed_by_power,
        ecc_corrected,
        ecc_uncorrected,
        xids: _, // in the log, and a concern where they are the device's
        processes,
        mig,
    } = readings.clone();
    let ours = memory.and_then(|memory| memory.ours);
    let has = |concern| concerns.contains(&concern);
    v1::DeviceHealth {
        rests: concerns.iter().any(|concern| concern.is_grave()),
        hot: has(Concern::Hot),
        ill: has(Concern::Ill),
        gone: has(Concern::Gone),
        busy: has(Concern::Busy),
        memory_full: has(Concern::MemoryFull),
        leak: has(Concern::Leak),
        slowed: has(Concern::Slowed),
        busy_without_work: has(Concern::BusyWithoutWork),
        utilisation_percent: utilisation,
        memory_used: memory.map(|memory| memory.used),
        memory_total: memory.map(|memory| memory.total),
        memory_ours: ours,
        temperature_celsius: temperature,
        power_mw,
        power_limit_mw,
        energy_mj,
        clock_mhz,
        memory_clock_mhz,
        slowed_by_heat,
        slowed_by_power,
        ecc_corrected,
        ecc_uncorrected,
        processes,
        mig,
    }
}
