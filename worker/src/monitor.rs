//! Looks at the device every few seconds, on a thread of its own, and says
//! whether it is well to whoever asks: the door of the service, and the status
//! that the gateway hears.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use tollgate_engine::{Clock, EngineHandle};
use tollgate_wire::v1;

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

/// A monitor that runs; it ends when this is dropped.
pub(crate) struct Monitor {
    _stay: SyncSender<()>,
}

impl Monitor {
    /// Watches the device `uuid`; nothing where it cannot be watched, for
    /// which the log says why.
    pub(crate) fn start(
        options: &HealthOptions,
        uuid: &str,
        engine: EngineHandle,
        clock: Arc<dyn Clock>,
        seen: Seen,
    ) -> io::Result<Option<Self>> {
        let nvml = match nvml::open(options.nvml.as_deref()) {
            Ok(nvml) => nvml,
            Err(error) => {
                tracing::warn!(%error, "NVML cannot be opened: the device's health is not watched");
                return Ok(None);
            }
        };
        let (stay, gone) = sync_channel(1);
        let look = Look {
            uuid: uuid.to_owned(),
            every: options.every,
            health: Health::new(options.thresholds.clone()),
            steps: 0,
            engine,
            clock,
            seen,
        };
        let thread = std::thread::Builder::new().name("health".to_owned());
        thread.spawn(move || look.until(&nvml, &gone))?;
        Ok(Some(Self { _stay: stay }))
    }
}

/// The monitor's thread.
struct Look {
    uuid: String,
    every: Duration,
    health: Health,
    /// Of the engine, at the last look.
    steps: u64,
    engine: EngineHandle,
    clock: Arc<dyn Clock>,
    seen: Seen,
}

impl Look {
    fn until(mut self, nvml: &Nvml, gone: &Receiver<()>) {
        let mut watched: Option<Watched<'_>> = None;
        let mut before = BTreeSet::new();
        loop {
            let read = match watched.take() {
                Some(watched) => Ok(watched),
                None => Watched::find(nvml, &self.uuid),
            };
            // A device that was gone is looked for anew.
            let readings = read.and_then(|device| {
                let readings = device.read()?;
                watched = Some(device);
                Ok(readings)
            });
            let concerns = self.judge(readings.as_ref().ok());
            if concerns != before {
                let error = readings.as_ref().err().map(ToString::to_string);
                let temperature = readings.as_ref().ok().and_then(|it| it.temperature);
                tracing::warn!(
                    device = self.uuid,
                    ?concerns,
                    temperature,
                    error,
                    "the device's health changed"
                );
                before = concerns;
            }
            if gone.recv_timeout(self.every) != Err(RecvTimeoutError::Timeout) {
                return;
            }
        }
    }

    fn judge(&mut self, readings: Option<&Readings>) -> BTreeSet<Concern> {
        let steps = self.engine.status().steps;
        let worked =
            std::mem::replace(&mut self.steps, steps) != steps || self.engine.work().is_some();
        let concerns = self.health.judge(readings, worked, self.clock.now());
        let nothing = Readings::default();
        *self.seen.lock() = Some(message(readings.unwrap_or(&nothing), &concerns));
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
