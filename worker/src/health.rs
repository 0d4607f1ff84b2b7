//! The health of a device: NVML's readings compared with the admin's thresholds. A
//! worker whose device is too hot or faulty rests: it finishes its requests and
//! accepts nothing new until the device has been healthy for a while. This module
//! does no I/O; callers pass in the readings and the time.

use std::collections::BTreeSet;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tollgate_domain::MonotonicTime;

/// The readings of a device at one moment; `None` for a value that the device does
/// not report.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readings {
    /// Percent of the last sample period in which kernels ran.
    pub(crate) utilisation: Option<u32>,
    pub(crate) memory: Option<Memory>,
    /// The temperature in degrees Celsius.
    pub(crate) temperature: Option<u32>,
    pub(crate) power_mw: Option<u64>,
    pub(crate) power_limit_mw: Option<u64>,
    /// Energy drawn since the driver was loaded.
    pub(crate) energy_mj: Option<u64>,
    pub(crate) clock_mhz: Option<u32>,
    pub(crate) memory_clock_mhz: Option<u32>,
    /// True while heat lowers the clocks.
    pub(crate) slowed_by_heat: bool,
    pub(crate) slowed_by_power: bool,
    /// Corrected memory errors since the driver was loaded.
    pub(crate) ecc_corrected: Option<u64>,
    pub(crate) ecc_uncorrected: Option<u64>,
    /// Critical errors (Xids) that the driver reported since the last check; `None` if it
    /// reports no events.
    pub(crate) xids: Option<Vec<u64>>,
    /// Processes that compute on the device.
    pub(crate) processes: Option<u32>,
    /// True if the device is partitioned (MIG) or is a slice.
    pub(crate) mig: Option<bool>,
}

/// A device's memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) used: u64,
    pub(crate) total: u64,
    /// Memory that this process uses, if the driver reports it.
    pub(crate) ours: Option<u64>,
}

/// The thresholds of a healthy device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Thresholds {
    /// Degrees Celsius from which the device is too hot.
    pub hot: u32,
    /// Degrees Celsius at which a hot device counts as cool again.
    pub cooled: u32,
    /// Time without a fault after which a faulty device counts as healthy again.
    pub well_for: Duration,
    /// Percent of utilisation above which the device is busy.
    pub busy: u32,
    /// Time of being busy after which the worker reports it.
    pub busy_for: Duration,
    /// Percent of memory in use above which the worker reports it.
    pub memory: u32,
    /// Bytes of growth of this process's memory above which the worker reports a
    /// leak.
    pub leak: u64,
}

impl Default for Thresholds {
    fn default() -> Self {
        Self {
            hot: 85,
            cooled: 75,
            well_for: Duration::from_secs(300),
            busy: 95,
            busy_for: Duration::from_secs(600),
            memory: 90,
            leak: 256 << 20,
        }
    }
}

/// A deviation from the healthy state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Concern {
    /// The device is too hot. The worker rests.
    Hot,
    /// The device had an uncorrectable memory error or a critical error of its own.
    /// The worker rests.
    Ill,
    /// The device does not answer. The worker rests.
    Gone,
    /// The device has been busy for a long time.
    Busy,
    /// The device's memory is nearly full.
    MemoryFull,
    /// This process's memory on the device grows, although the KV pool has a fixed
    /// size.
    Leak,
    /// Heat or the power limit lowers the clocks.
    Slowed,
    /// The device is busy although this worker had no work.
    BusyWithoutWork,
}

impl Concern {
    /// Returns true if the worker must rest.
    pub(crate) fn is_grave(self) -> bool {
        matches!(self, Self::Hot | Self::Ill | Self::Gone)
    }
}

/// The state of a device between readings.
#[derive(Debug)]
pub(crate) struct Health {
    thresholds: Thresholds,
    hot: bool,
    /// The time of the last fault. The counters of errors may be older than this
    /// process, so their first values are only a baseline.
    ill: Option<MonotonicTime>,
    uncorrected: Option<u64>,
    busy_since: Option<MonotonicTime>,
    unexplained_since: Option<MonotonicTime>,
    /// The time of the first reading, and the largest memory of this process within
    /// [`SETTLING`] after it.
    first: Option<MonotonicTime>,
    settled: u64,
}

impl Health {
    pub(crate) fn new(thresholds: Thresholds) -> Self {
        Self {
            thresholds,
            hot: false,
            ill: None,
            uncorrected: None,
            busy_since: None,
            unexplained_since: None,
            first: None,
            settled: 0,
        }
    }

    /// Compares later readings with `thresholds`. What was found so far is kept.
    pub(crate) fn set_thresholds(&mut self, thresholds: Thresholds) {
        self.thresholds = thresholds;
    }

    /// Returns the concerns about these readings; `None` means that the device does
    /// not answer. `worked` is true if a step of this worker ran since the last
    /// call.
    pub(crate) fn judge(
        &mut self,
        readings: Option<&Readings>,
        worked: bool,
        now: MonotonicTime,
    ) -> BTreeSet<Concern> {
        let Some(readings) = readings else {
            // A device that comes back must first stay healthy for a while.
            self.ill = Some(now);
            return BTreeSet::from([Concern::Gone]);
        };
        // Each check keeps state, so all of them run at every reading.
        let found = [
            (Concern::Hot, self.is_hot(readings)),
            (Concern::Ill, self.is_ill(readings, now)),
            (Concern::Busy, self.is_busy(readings, now)),
            (Concern::MemoryFull, self.is_full(readings)),
            (Concern::Leak, self.leaks(readings, now)),
            (Concern::Slowed, readings.slowed_by_heat || readings.slowed_by_power),
            (Concern::BusyWithoutWork, self.is_unexplained(readings, worked, now)),
        ];
        found.into_iter().filter(|&(_, is_so)| is_so).map(|(concern, _)| concern).collect()
    }

    fn is_hot(&mut self, readings: &Readings) -> bool {
        let Thresholds { hot, cooled, .. } = self.thresholds;
        // Without a reading the state stays: a hot device is hot until a reading
        // shows otherwise.
        if let Some(temperature) = readings.temperature {
            self.hot = temperature >= hot || (self.hot && temperature > cooled);
        }
        self.hot
    }

    fn is_ill(&mut self, readings: &Readings, now: MonotonicTime) -> bool {
        let grew = match (self.uncorrected, readings.ecc_uncorrected) {
            (Some(before), Some(errors)) => errors > before,
            _ => false,
        };
        // A missing count must not reset the baseline.
        self.uncorrected = readings.ecc_uncorrected.or(self.uncorrected);
        if grew || readings.xids.iter().flatten().any(|xid| DEVICE_XIDS.contains(xid)) {
            self.ill = Some(now);
        }
        self.ill.is_some_and(|seen| now.since(seen) < self.thresholds.well_for)
    }

    fn is_busy(&mut self, readings: &Readings, now: MonotonicTime) -> bool {
        let is_busy = readings.utilisation.is_some_and(|percent| percent > self.thresholds.busy);
        lasts(&mut self.busy_since, is_busy, self.thresholds.busy_for, now)
    }

    fn is_full(&self, readings: &Readings) -> bool {
        // In `u128` the products below cannot overflow.
        let share = u128::from(self.thresholds.memory);
        readings.memory.is_some_and(|Memory { used, total, .. }| {
            u128::from(used) * 100 > u128::from(total) * share
        })
    }

    /// Compares with the memory after settling: the pool is allocated once, and
    /// libraries allocate in the first minute of steps.
    fn leaks(&mut self, readings: &Readings, now: MonotonicTime) -> bool {
        let Some(ours) = readings.memory.and_then(|memory| memory.ours) else { return false };
        let first = *self.first.get_or_insert(now);
        if now.since(first) < SETTLING {
            self.settled = self.settled.max(ours);
            return false;
        }
        ours > self.settled.saturating_add(self.thresholds.leak)
    }

    fn is_unexplained(&mut self, readings: &Readings, worked: bool, now: MonotonicTime) -> bool {
        let is_busy = readings.utilisation.is_some_and(|percent| percent >= UNEXPLAINED_PERCENT);
        lasts(&mut self.unexplained_since, is_busy && !worked, UNEXPLAINED_FOR, now)
    }
}

/// Returns true if `is_so` has held for `long`. `since` keeps the time at which it
/// began.
fn lasts(
    since: &mut Option<MonotonicTime>,
    is_so: bool,
    long: Duration,
    now: MonotonicTime,
) -> bool {
    if !is_so {
        *since = None;
        return false;
    }
    now.since(*since.get_or_insert(now)) >= long
}

/// Critical errors (Xids) of the device itself, by NVIDIA's list: uncorrectable
/// memory errors (48, 63, 64, 94, 95), stopped microcontrollers (61, 62, 119, 120),
/// links (74), and a device that fell off the bus (79). Errors that a program
/// causes (13, 31, 43, 45, ...) end that program only.
const DEVICE_XIDS: [u64; 11] = [48, 61, 62, 63, 64, 74, 79, 94, 95, 119, 120];
/// Time after which this process's memory on a device no longer grows.
const SETTLING: Duration = Duration::from_secs(60);
/// Percent of utilisation that needs an explanation while this worker has no work.
const UNEXPLAINED_PERCENT: u32 = 50;
/// Time after which unexplained utilisation is reported: another program may use
/// the device.
const UNEXPLAINED_FOR: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    /// Judges the readings `every` seconds apart. Returns the concerns at each
    /// reading.
    fn judged(every: u64, readings: &[(Option<Readings>, bool)]) -> Vec<Vec<Concern>> {
        let mut health = Health::new(Thresholds::default());
        (0..)
            .zip(readings)
            .map(|(look, (readings, worked))| {
                health.judge(readings.as_ref(), *worked, at(look * every)).into_iter().collect()
            })
            .collect()
    }

    fn all(every: u64, readings: impl IntoIterator<Item = Readings>) -> Vec<Vec<Concern>> {
        let readings: Vec<_> = readings.into_iter().map(|it| (Some(it), true)).collect();
        judged(every, &readings)
    }

    #[test]
    fn health_hot_until_cooled() {
        let temperatures = [60, 84, 85, 84, 76, 75, 84, 90];
        let hot = temperatures
            .map(|temperature| Readings { temperature: Some(temperature), ..Readings::default() });
        let rests: Vec<bool> =
            all(5, hot).iter().map(|concerns| concerns.contains(&Concern::Hot)).collect();
        assert_eq!(rests, [false, false, true, true, true, false, false, true]);
        assert!(Concern::Hot.is_grave() && !Concern::Slowed.is_grave());
    }

    #[test]
    fn health_ill_until_healthy_long_enough() {
        let errors = |count| Readings { ecc_uncorrected: Some(count), ..Readings::default() };
        // Three old errors are the baseline; the fourth counts, for 300 s.
        let seen = all(100, [errors(3), errors(3), errors(4), errors(4), errors(4), errors(4)]);
        let ill = vec![Concern::Ill];
        assert_eq!(seen, [vec![], vec![], ill.clone(), ill.clone(), ill.clone(), vec![]]);
        for (xid, is_ill) in [(79, true), (48, true), (13, false), (31, false), (45, false)] {
            let xids = Readings { xids: Some(vec![xid]), ..Readings::default() };
            assert_eq!(!all(5, [xids])[0].is_empty(), is_ill, "Xid {xid}");
        }
    }

    #[test]
    fn health_ill_after_device_returns() {
        let well = || (Some(Readings::default()), true);
        let seen = judged(200, &[well(), (None, false), well(), well(), well()]);
        let expected = [vec![], vec![Concern::Gone], vec![Concern::Ill], vec![], vec![]];
        assert_eq!(seen, expected);
    }

    #[test]
    fn health_reports_busy_after_ten_minutes() {
        let busy = |percent| Readings { utilisation: Some(percent), ..Readings::default() };
        let seen = all(300, [busy(96), busy(100), busy(96), busy(95), busy(99), busy(99)]);
        let counts: Vec<usize> = seen.iter().map(Vec::len).collect();
        assert_eq!(counts, [0, 0, 1, 0, 0, 0]);
        // Busy without work of this worker: another program may use the device.
        let unexplained = judged(30, &vec![(Some(busy(60)), false); 4]);
        assert_eq!(unexplained[1], []);
        assert_eq!(unexplained[2], [Concern::BusyWithoutWork]);
    }

    #[test]
    fn health_reports_memory_growth_as_leak() {
        const GIB: u64 = 1 << 30;
        let memory = |ours: u64| Readings {
            memory: Some(Memory { used: ours, total: 80 * GIB, ours: Some(ours) }),
            ..Readings::default()
        };
        // The model loads for a while, and libraries allocate a little more.
        let grown = 41 * GIB + (256 << 20);
        let seen =
            all(30, [memory(GIB), memory(41 * GIB), memory(grown), memory(grown + 1), memory(GIB)]);
        assert_eq!(seen, [vec![], vec![], vec![], vec![Concern::Leak], vec![]]);
        let full = all(5, [memory(72 * GIB), memory(72 * GIB + 1)]);
        assert_eq!(full, [vec![], vec![Concern::MemoryFull]]);
    }
}
