//! Looks at the device every few seconds, on a thread of its own, and says
//! whether it is well to whoever asks: the door of the service, and the status
//! that the gateway hears. In between, and before there is an engine, it reads the
//! energy counter alone. Only this thread asks the driver: one that never answers
//! holds up nobody else.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
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
fn open(options: &HealthOptions) -> Option<Nvml> {
    nvml::open(options.nvml.as_deref())
        .inspect_err(|error| {
            tracing::warn!(%error, "NVML cannot be opened: the device's health is not watched");
        })
        .ok()
}

/// What a monitor looks at, and whom it tells.
pub(crate) struct MonitorParts {
    pub(crate) options: HealthOptions,
    pub(crate) uuid: String,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) seen: Seen,
    /// None: what the device draws is not this worker's alone.
    pub(crate) meter: Option<Meter>,
}

/// A monitor that runs; it ends when this is dropped. Nobody waits for its
/// thread: a driver may hold that for ever.
pub(crate) struct Monitor {
    engine: SyncSender<EngineHandle>,
}

impl Monitor {
    /// Begins to read the counter, where there is a meter, and waits for the
    /// first reading as long as one may take.
    pub(crate) fn start(parts: MonitorParts) -> io::Result<Self> {
        let (engine, engines) = sync_channel(1);
        let (tell_first, first) = sync_channel(1);
        let is_metered = parts.meter.is_some();
        let thread = std::thread::Builder::new().name("health".to_owned());
        thread.spawn(move || {
            let Some(nvml) = open(&parts.options) else { return };
            let Some(known) = knows(&nvml, &parts.uuid) else { return };
            if let Some(engine) = read_until(known.as_ref(), &parts, &engines, &tell_first) {
                let health = Health::new(parts.options.thresholds.clone());
                let look = Look { parts, engine, health, steps: 0, concerns: BTreeSet::new() };
                look.until(&nvml, known, &engines);
            }
        })?;
        if is_metered {
            // With none the epoch begins without one.
            let _ = first.recv_timeout(FIRST_READING);
        }
        Ok(Self { engine })
    }

    /// The device has an engine: from here on it is looked at as a whole.
    pub(crate) fn watch(&self, engine: EngineHandle) {
        // It ended where there is no NVML.
        let _ = self.engine.try_send(engine);
    }
}

/// The device, if it answers; nothing at all where NVML knows none of this name,
/// for which the log says so: what it never knew is not gone.
fn knows<'nvml>(nvml: &'nvml Nvml, device: &str) -> Option<Option<Watched<'nvml>>> {
    match Watched::find(nvml, device) {
        Ok(found) => Some(Some(found)),
        Err(error @ NvmlError::NotFound) => {
            tracing::warn!(device, %error, "NVML does not know it: its health is not watched");
            None
        }
        Err(_) => Some(None),
    }
}

/// Reads the counter alone, while the worker starts; the engine, once there is
/// one.
fn read_until(
    known: Option<&Watched<'_>>,
    parts: &MonitorParts,
    engines: &Receiver<EngineHandle>,
    tell_first: &SyncSender<()>,
) -> Option<EngineHandle> {
    let metered = parts.meter.as_ref().zip(known);
    loop {
        if let Some((meter, device)) = metered {
            tell(meter, device, &*parts.clock);
        }
        let _ = tell_first.try_send(()); // who waited may have gone on
        match engines.recv_timeout(READ_EVERY) {
            Ok(engine) => return Some(engine),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Reads the counter. It is as old as the question, however long the driver
/// takes to answer.
fn tell(meter: &Meter, device: &Watched<'_>, clock: &dyn Clock) {
    let at = clock.now();
    meter.tell(at, device.energy());
}

/// The monitor's thread.
struct Look {
    parts: MonitorParts,
    engine: EngineHandle,
    health: Health,
    /// Of the engine, at the last look.
    steps: u64,
    /// At the last look.
    concerns: BTreeSet<Concern>,
}

impl Look {
    fn until<'nvml>(
        mut self,
        nvml: &'nvml Nvml,
        mut watched: Option<Watched<'nvml>>,
        gone: &Receiver<EngineHandle>,
    ) {
        let every = self.parts.options.every;
        let pace = if self.parts.meter.is_some() { every.min(READ_EVERY) } else { every };
        let clock = Arc::clone(&self.parts.clock);
        let mut due = clock.now();
        loop {
            let now = clock.now();
            if now >= due {
                watched = self.look(nvml, watched.take());
                due = now.after(every);
            }
            match (&self.parts.meter, &watched) {
                (Some(meter), Some(device)) => tell(meter, device, &*clock),
                (Some(meter), None) => meter.tell(now, None),
                (None, _) => {}
            }
            let pause = due.since(clock.now()).min(pace);
            if !matches!(gone.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                return;
            }
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
        let steps = self.engine.status().steps;
        let worked =
            std::mem::replace(&mut self.steps, steps) != steps || self.engine.work().is_some();
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

/// How long a start waits for the device's counter.
const FIRST_READING: Duration = Duration::from_millis(500);
