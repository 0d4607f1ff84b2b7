//! The monitor of the device's health, on a thread of its own. The service asks for
//! the last result before it accepts a request, and the status for the gateway
//! includes it. Between two checks, and before the engine starts, the monitor reads
//! the energy counter alone. Only this thread calls the driver, so a driver that
//! hangs delays nothing else.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use serde::{Deserialize, Serialize};
use tollgate_domain::MonotonicTime;
use tollgate_engine::{Clock, EngineHandle};
use tollgate_wire::v1;

use crate::energy::{Meter, READ_EVERY};
use crate::health::{Concern, Health, Readings, Thresholds};
use crate::nvml::{self, MonitoredDevice};

/// The options of the health checks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HealthOptions {
    /// The path of the NVML library; `None` means the driver's usual name.
    pub nvml: Option<PathBuf>,
    /// Time between two checks.
    pub every: Duration,
    /// The thresholds of a healthy device.
    pub thresholds: Thresholds,
}

impl Default for HealthOptions {
    fn default() -> Self {
        Self { nvml: None, every: Duration::from_secs(5), thresholds: Thresholds::default() }
    }
}

/// The terms of the health checks, which the gateway may change. Clones share them.
#[derive(Clone, Debug)]
pub(crate) struct HealthTerms {
    shared: Arc<Mutex<CheckTerms>>,
}

/// The time between two checks, and the thresholds of a healthy device.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CheckTerms {
    every: Duration,
    thresholds: Thresholds,
}

impl HealthTerms {
    /// Makes the terms with which the worker was started.
    pub(crate) fn new(options: &HealthOptions) -> Self {
        let HealthOptions { nvml: _, every, thresholds } = options.clone();
        Self { shared: Arc::new(Mutex::new(CheckTerms { every, thresholds })) }
    }

    /// Puts `terms` in force within [`LONGEST_PAUSE`].
    pub(crate) fn set(&self, terms: CheckTerms) {
        *self.lock() = terms;
    }

    fn current(&self) -> CheckTerms {
        self.lock().clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CheckTerms> {
        // Every change is one assignment.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error for terms without a time between two checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("every_ns is zero: the health checks need a time between them")]
pub(crate) struct InvalidTerms;

impl TryFrom<v1::HealthTerms> for CheckTerms {
    type Error = InvalidTerms;

    fn try_from(terms: v1::HealthTerms) -> Result<Self, InvalidTerms> {
        let v1::HealthTerms {
            every_ns,
            hot_celsius,
            cooled_celsius,
            well_for_ns,
            busy_percent,
            busy_for_ns,
            memory_percent,
            leak_bytes,
        } = terms;
        if every_ns == 0 {
            return Err(InvalidTerms);
        }
        let thresholds = Thresholds {
            hot: hot_celsius,
            cooled: cooled_celsius,
            well_for: Duration::from_nanos(well_for_ns),
            busy: busy_percent,
            busy_for: Duration::from_nanos(busy_for_ns),
            memory: memory_percent,
            leak: leak_bytes,
        };
        Ok(Self { every: Duration::from_nanos(every_ns), thresholds })
    }
}

/// The result of the last check; `None` if the device is not monitored. Clones
/// share the result.
#[derive(Clone, Debug, Default)]
pub(crate) struct LatestHealth {
    shared: Arc<Mutex<Option<v1::DeviceHealth>>>,
}

impl LatestHealth {
    /// Returns true if the worker must accept nothing new.
    pub(crate) fn rests(&self) -> bool {
        self.lock().as_ref().is_some_and(|health| health.rests)
    }

    /// Returns the result as the gateway receives it.
    pub(crate) fn message(&self) -> Option<v1::DeviceHealth> {
        *self.lock()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<v1::DeviceHealth>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Opens NVML. Returns `None` and logs a warning if that fails.
fn open(library: Option<&Path>) -> Option<Nvml> {
    nvml::open(library)
        .inspect_err(|error| {
            tracing::warn!(%error, "cannot open NVML; the device's health is not monitored");
        })
        .ok()
}

/// The parts that a monitor is made of.
pub(crate) struct MonitorParts {
    /// The path of the NVML library; `None` means the driver's usual name.
    pub(crate) nvml: Option<PathBuf>,
    pub(crate) terms: HealthTerms,
    pub(crate) uuid: String,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) health: LatestHealth,
    /// `None` if other workers share the device: the counter counts their energy,
    /// too.
    pub(crate) meter: Option<Meter>,
}

/// A running monitor. Dropping it ends its thread, and nothing waits for that: the
/// driver may hang in a call.
pub(crate) struct Monitor {
    engine: SyncSender<EngineHandle>,
}

impl Monitor {
    /// Starts the thread. If the energy is metered, waits for the first reading, at
    /// most [`FIRST_READING`].
    pub(crate) fn start(parts: MonitorParts) -> io::Result<Self> {
        let (engine, engines) = sync_channel(1);
        let (send_first, first) = sync_channel(1);
        let is_metered = parts.meter.is_some();
        let thread = std::thread::Builder::new().name("health".to_owned());
        thread.spawn(move || {
            let Some(nvml) = open(parts.nvml.as_deref()) else { return };
            let Some(found) = find_device(&nvml, &parts.uuid) else { return };
            if let Some(engine) = read_until(found.as_ref(), &parts, &engines, &send_first) {
                let health = Health::new(parts.terms.current().thresholds);
                let concerns = BTreeSet::new();
                let checks = Checks { parts, engine, health, steps: 0, concerns, xids: None };
                checks.run(&nvml, found, &engines);
            }
        })?;
        if is_metered {
            // Without a reading the epoch begins without a found counter.
            let _ = first.recv_timeout(FIRST_READING);
        }
        Ok(Self { engine })
    }

    /// Starts the full checks, which need the engine.
    pub(crate) fn watch(&self, engine: EngineHandle) {
        // The thread has ended already if there is no NVML.
        let _ = self.engine.try_send(engine);
    }
}

/// Returns the device, or `Some(None)` if the device does not answer. Returns
/// `None` and logs a warning if NVML does not know the UUID: a device that was
/// never found cannot be reported as lost.
fn find_device<'nvml>(nvml: &'nvml Nvml, device: &str) -> Option<Option<MonitoredDevice<'nvml>>> {
    match MonitoredDevice::find(nvml, device) {
        Ok(found) => Some(Some(found)),
        Err(error @ NvmlError::NotFound) => {
            tracing::warn!(device, %error, "NVML does not know the device; its health is not monitored");
            None
        }
        Err(_) => Some(None),
    }
}

/// Reads the energy counter until the engine has started. Returns the engine.
fn read_until(
    found: Option<&MonitoredDevice<'_>>,
    parts: &MonitorParts,
    engines: &Receiver<EngineHandle>,
    send_first: &SyncSender<()>,
) -> Option<EngineHandle> {
    let metered = parts.meter.as_ref().zip(found);
    loop {
        if let Some((meter, device)) = metered {
            store_energy(meter, device, &*parts.clock);
        }
        // The start may have stopped waiting.
        let _ = send_first.try_send(());
        match engines.recv_timeout(READ_EVERY) {
            Ok(engine) => return Some(engine),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return None,
        }
    }
}

/// Reads the counter. The time is taken before the call, because the driver may
/// take long to answer.
fn store_energy(meter: &Meter, device: &MonitoredDevice<'_>, clock: &dyn Clock) {
    let at = clock.now();
    meter.store(at, device.energy());
}

/// The longest wait between two looks at the terms.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// The state of the monitor's thread.
struct Checks {
    parts: MonitorParts,
    engine: EngineHandle,
    health: Health,
    /// The engine's count of steps at the last check.
    steps: u64,
    /// The concerns at the last check.
    concerns: BTreeSet<Concern>,
    /// The critical errors since the start; `None` until the driver has been asked for events.
    xids: Option<u64>,
}

impl Checks {
    fn run<'nvml>(
        mut self,
        nvml: &'nvml Nvml,
        mut watched: Option<MonitoredDevice<'nvml>>,
        gone: &Receiver<EngineHandle>,
    ) {
        // The energy counter must be read much more often than the health.
        let pace = if self.parts.meter.is_some() { READ_EVERY } else { LONGEST_PAUSE };
        let clock = Arc::clone(&self.parts.clock);
        let mut checked = None;
        loop {
            let now = clock.now();
            let CheckTerms { every, thresholds } = self.parts.terms.current();
            if checked.is_none_or(|at: MonotonicTime| now >= at.after(every)) {
                self.health.set_thresholds(thresholds);
                watched = self.check(nvml, watched.take());
                checked = Some(now);
            }
            let due = checked.unwrap_or(now).after(every);
            match (&self.parts.meter, &watched) {
                (Some(meter), Some(device)) => store_energy(meter, device, &*clock),
                // An old value would count as a reading of the lost device.
                (Some(meter), None) => meter.store(now, None),
                (None, _) => {}
            }
            // A wait on the channel ends at once when the monitor is dropped.
            let pause = due.since(clock.now()).min(pace);
            if !matches!(gone.recv_timeout(pause), Err(RecvTimeoutError::Timeout)) {
                return;
            }
        }
    }

    /// Makes a full check. Searches a device that was lost again.
    fn check<'nvml>(
        &mut self,
        nvml: &'nvml Nvml,
        watched: Option<MonitoredDevice<'nvml>>,
    ) -> Option<MonitoredDevice<'nvml>> {
        let found = watched.map_or_else(|| MonitoredDevice::find(nvml, &self.parts.uuid), Ok);
        // An error drops the handle, so the next check searches the device again.
        let read = found.and_then(|device| Ok((device.read()?, device)));
        let (readings, device, error) = match read {
            Ok((readings, device)) => (Some(readings), Some(device), None),
            Err(error) => (None, None, Some(error.to_string())),
        };
        self.count_xids(readings.as_ref());
        let concerns = self.judge(readings.as_ref());
        // A device that stays hot must not fill the log, so only changes are logged.
        if concerns != self.concerns {
            let temperature = readings.and_then(|it| it.temperature);
            tracing::warn!(
                device = self.parts.uuid,
                ?concerns,
                temperature,
                error,
                "device health changed"
            );
            self.concerns = concerns;
        }
        device
    }

    /// Counts and logs the critical errors since the last check.
    fn count_xids(&mut self, readings: Option<&Readings>) {
        let Some(xids) = readings.and_then(|readings| readings.xids.as_ref()) else { return };
        let count = self.xids.get_or_insert(0);
        *count = count.saturating_add(xids.len() as u64);
        if !xids.is_empty() {
            tracing::warn!(device = self.parts.uuid, ?xids, "the driver reported critical errors");
        }
    }

    fn judge(&mut self, readings: Option<&Readings>) -> BTreeSet<Concern> {
        let steps = self.engine.status().steps;
        // A step between two checks counts as work, and so does a step that still
        // runs.
        let worked =
            std::mem::replace(&mut self.steps, steps) != steps || self.engine.work().is_some();
        let concerns = self.health.judge(readings, worked, self.parts.clock.now());
        let nothing = Readings::default();
        *self.parts.health.lock() = Some(v1::DeviceHealth {
            xids: self.xids,
            ..message(readings.unwrap_or(&nothing), &concerns)
        });
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
        xids: _, // counted over all checks
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
        xids: None,
    }
}

/// Time that a start waits for the first reading of the counter.
const FIRST_READING: Duration = Duration::from_millis(500);
