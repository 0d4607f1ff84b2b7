//! Whether a device is well: what NVML reads of it against the admin's
//! thresholds. Too hot or ill, and the worker rests: it finishes what it has
//! and takes nothing new, until the device has been well for a while. Pure: it
//! is given readings and the time, and says what follows.

use std::collections::BTreeSet;
use std::time::Duration;

use tollgate_domain::MonotonicTime;

/// What was read of a device at one moment. What it does not tell is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Readings {
    /// Kernels ran for so many percent of the last moments.
    pub(crate) utilisation: Option<u32>,
    pub(crate) memory: Option<Memory>,
    /// Degrees Celsius.
    pub(crate) temperature: Option<u32>,
    pub(crate) power_mw: Option<u64>,
    pub(crate) power_limit_mw: Option<u64>,
    /// Since the driver was loaded.
    pub(crate) energy_mj: Option<u64>,
    pub(crate) clock_mhz: Option<u32>,
    pub(crate) memory_clock_mhz: Option<u32>,
    /// Whether its clocks are held down by heat, and by power.
    pub(crate) slowed_by_heat: bool,
    pub(crate) slowed_by_power: bool,
    /// Memory errors since the driver was loaded.
    pub(crate) ecc_corrected: Option<u64>,
    pub(crate) ecc_uncorrected: Option<u64>,
    /// Critical errors that the driver reported since the last look.
    pub(crate) xids: Vec<u64>,
    /// Processes that compute on it.
    pub(crate) processes: Option<u32>,
    /// Whether it is cut into slices, or is one.
    pub(crate) mig: Option<bool>,
}

/// A device's memory, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) used: u64,
    pub(crate) total: u64,
    /// What this process has of it, where the driver says so.
    pub(crate) ours: Option<u64>,
}

/// When a device is not well.
#[derive(Clone, Debug, PartialEq)]
pub struct Thresholds {
    /// At so many degrees Celsius it is too hot ...
    pub hot: u32,
    /// ... until it has come down to this.
    pub cooled: u32,
    /// For so long it must have been well after an illness.
    pub well_for: Duration,
    /// More than so many percent busy ...
    pub busy: u32,
    /// ... for so long is worth a word.
    pub busy_for: Duration,
    /// More memory used than so many percent is, too.
    pub memory: u32,
    /// And so is memory of ours that grew by so many bytes.
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

/// What is not as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Concern {
    /// The worker rests: it is too hot.
    Hot,
    /// The worker rests: memory that cannot be corrected, or a critical error
    /// that is the device's own.
    Ill,
    /// The worker rests: it does not answer any more.
    Gone,
    /// Busy for long.
    Busy,
    /// Its memory is nearly used up.
    MemoryFull,
    /// Our memory on it grows, though the KV pool never does.
    Leak,
    /// Its clocks are held down.
    Slowed,
    /// It is busy though we have had nothing to do.
    BusyWithoutWork,
}

impl Concern {
    /// Whether a worker rests for it.
    pub(crate) fn is_grave(self) -> bool {
        matches!(self, Self::Hot | Self::Ill | Self::Gone)
    }
}

/// What is remembered of a device between readings.
#[derive(Debug)]
pub(crate) struct Health {
    thresholds: Thresholds,
    hot: bool,
    /// When it was last seen ill, and the first time: what is counted since
    /// the driver was loaded is not all of our days.
    ill: Option<MonotonicTime>,
    uncorrected: Option<u64>,
    busy_since: Option<MonotonicTime>,
    unexplained_since: Option<MonotonicTime>,
    /// When it was first read, and our memory on it once that had settled.
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

    /// What is not as it should be, now that so much was read; no readings
    /// where the device does not answer. `worked` says whether a step of ours
    /// ran since the last look.
    pub(crate) fn judge(
        &mut self,
        readings: Option<&Readings>,
        worked: bool,
        now: MonotonicTime,
    ) -> BTreeSet<Concern> {
        let Some(readings) = readings else {
            // What comes back after this must prove itself.
            self.ill = Some(now);
            return BTreeSet::from([Concern::Gone]);
        };
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
        self.uncorrected = readings.ecc_uncorrected.or(self.uncorrected);
        if grew || readings.xids.iter().any(|xid| DEVICE_XIDS.contains(xid)) {
            self.ill = Some(now);
        }
        self.ill.is_some_and(|seen| now.since(seen) < self.thresholds.well_for)
    }

    fn is_busy(&mut self, readings: &Readings, now: MonotonicTime) -> bool {
        let is_busy = readings.utilisation.is_some_and(|percent| percent > self.thresholds.busy);
        lasts(&mut self.busy_since, is_busy, self.thresholds.busy_for, now)
    }

    fn is_full(&self, readings: &Readings) -> bool {
        let share = u128::from(self.thresholds.memory);
        readings.memory.is_some_and(|Memory { used, total, .. }| {
            u128::from(used) * 100 > u128::from(total) * share
        })
    }

    /// The pool is allocated once; libraries take what they need in the first
    /// minute of steps.
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

/// Whether what `is_so` has been for `long`.
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

/// Critical errors that are the device's own, by NVIDIA's list: memory that
/// cannot be corrected (48, 63, 64, 94, 95), microcontrollers that stopped (61,
/// 62, 119, 120), links (74), a device that fell off the bus (79). Those that a
/// program causes (13, 31, 43, 45, ...) end that program and no device.
const DEVICE_XIDS: [u64; 11] = [48, 61, 62, 63, 64, 74, 79, 94, 95, 119, 120];
/// Our memory on a device has settled after so long.
const SETTLING: Duration = Duration::from_secs(60);
/// A device that is busy by so much while we do nothing ...
const UNEXPLAINED_PERCENT: u32 = 50;
/// ... for so long works for somebody else, or for nobody.
const UNEXPLAINED_FOR: Duration = Duration::from_secs(60);

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> MonotonicTime {
        MonotonicTime(seconds * 1_000_000_000)
    }

    /// Judges one reading after the other, each `every` seconds later; which
    /// concerns there were at each.
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
    fn it_is_hot_until_it_has_cooled() {
        let temperatures = [60, 84, 85, 84, 76, 75, 84, 90];
        let hot = temperatures
            .map(|temperature| Readings { temperature: Some(temperature), ..Readings::default() });
        let rests: Vec<bool> =
            all(5, hot).iter().map(|concerns| concerns.contains(&Concern::Hot)).collect();
        assert_eq!(rests, [false, false, true, true, true, false, false, true]);
        assert!(Concern::Hot.is_grave() && !Concern::Slowed.is_grave());
    }

    #[test]
    fn it_is_ill_until_it_has_been_well_for_long() {
        let errors = |count| Readings { ecc_uncorrected: Some(count), ..Readings::default() };
        // Three old errors are no news; the fourth is, for 300 s.
        let seen = all(100, [errors(3), errors(3), errors(4), errors(4), errors(4), errors(4)]);
        let ill = vec![Concern::Ill];
        assert_eq!(seen, [vec![], vec![], ill.clone(), ill.clone(), ill.clone(), vec![]]);
        for (xid, is_ill) in [(79, true), (48, true), (13, false), (31, false), (45, false)] {
            let xids = Readings { xids: vec![xid], ..Readings::default() };
            assert_eq!(!all(5, [xids])[0].is_empty(), is_ill, "Xid {xid}");
        }
    }

    #[test]
    fn one_that_does_not_answer_rests_and_then_proves_itself() {
        let well = || (Some(Readings::default()), true);
        let seen = judged(200, &[well(), (None, false), well(), well(), well()]);
        let expected = [vec![], vec![Concern::Gone], vec![Concern::Ill], vec![], vec![]];
        assert_eq!(seen, expected);
    }

    #[test]
    fn being_busy_is_worth_a_word_after_ten_minutes() {
        let busy = |percent| Readings { utilisation: Some(percent), ..Readings::default() };
        let seen = all(300, [busy(96), busy(100), busy(96), busy(95), busy(99), busy(99)]);
        let counts: Vec<usize> = seen.iter().map(Vec::len).collect();
        assert_eq!(counts, [0, 0, 1, 0, 0, 0]);
        // The same without work of ours: somebody else is on it, or nobody.
        let unexplained = judged(30, &vec![(Some(busy(60)), false); 4]);
        assert_eq!(unexplained[1], []);
        assert_eq!(unexplained[2], [Concern::BusyWithoutWork]);
    }

    #[test]
    fn memory_that_grows_while_the_pool_does_not_is_a_leak() {
        const GIB: u64 = 1 << 30;
        let memory = |ours: u64| Readings {
            memory: Some(Memory { used: ours, total: 80 * GIB, ours: Some(ours) }),
            ..Readings::default()
        };
        // Loading takes its time, and libraries take a little more.
        let grown = 41 * GIB + (256 << 20);
        let seen =
            all(30, [memory(GIB), memory(41 * GIB), memory(grown), memory(grown + 1), memory(GIB)]);
        assert_eq!(seen, [vec![], vec![], vec![], vec![Concern::Leak], vec![]]);
        let full = all(5, [memory(72 * GIB), memory(72 * GIB + 1)]);
        assert_eq!(full, [vec![], vec![Concern::MemoryFull]]);
    }
}
