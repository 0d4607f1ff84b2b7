//! The watchdog of the engine's thread, on a thread of its own. A device that hangs
//! never recovers inside the process. The watchdog reports the hung step once; then
//! the journal is closed, the process ends, and the supervisor restarts it.
//!
//! Waiting counts only for the time in which the watchdog's own thread ran. A
//! process that was stopped, or a host without a free core, is not a hung device.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tollgate_engine::{EngineHandle, Work};

/// The time that a step may take: `least`, or a multiple of the predicted time if
/// that is longer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StepTimeout {
    /// The limit of any step, however short its prediction.
    pub least: Duration,
    /// Multiple of the predicted time.
    pub times_predicted: u32,
}

/// A step that did not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a step has not ended after {waited:?}; its predicted time was {predicted:?}")]
pub struct Hung {
    /// Time since the step began, as far as the watchdog saw it.
    pub waited: Duration,
    /// Predicted time of the step.
    pub predicted: Duration,
}

impl Default for StepTimeout {
    fn default() -> Self {
        Self { least: Duration::from_secs(8), times_predicted: 20 }
    }
}

impl StepTimeout {
    fn of(&self, predicted: Duration) -> Duration {
        self.least.max(predicted.saturating_mul(self.times_predicted))
    }
}

/// The engine tick that was seen last, and the time spent in it.
#[derive(Debug)]
struct Watch {
    timeout: StepTimeout,
    tick: Option<u64>,
    waited: Duration,
}

impl Watch {
    fn new(timeout: StepTimeout) -> Self {
        Self { timeout, tick: None, waited: Duration::ZERO }
    }

    /// Checks the engine's current tick, `since` after the last check.
    fn check(&mut self, since: Duration, work: Option<Work>) -> Result<(), Hung> {
        let tick = work.map(|work| work.tick);
        // A new tick, or no tick, proves that the engine moves, so the waiting starts
        // again.
        if tick != self.tick {
            (self.tick, self.waited) = (tick, Duration::ZERO);
            return Ok(());
        }
        let Some(Work { predicted, .. }) = work else { return Ok(()) };
        self.waited += since.min(LONGEST_CHECK);
        if self.waited < self.timeout.of(predicted) {
            return Ok(());
        }
        Err(Hung { waited: self.waited, predicted })
    }
}

/// A running watchdog. Dropping it ends its thread.
pub(crate) struct Watchdog {
    // The thread ends when this end of the channel is dropped.
    _stay: SyncSender<()>,
    /// The step that did not end, once there is one.
    pub(crate) hung: oneshot::Receiver<Hung>,
}

impl Watchdog {
    /// Starts a watchdog of `engine`.
    #[expect(
        clippy::disallowed_methods,
        reason = "the watchdog's thread reads the time for its pure check"
    )]
    pub(crate) fn start(engine: EngineHandle, timeout: StepTimeout) -> io::Result<Self> {
        let (stay, gone) = sync_channel(1);
        let (sender, hung) = oneshot::channel();
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            let mut watch = Watch::new(timeout);
            let mut checked = Instant::now();
            // The channel carries nothing: its end means that the watchdog was
            // dropped.
            while gone.recv_timeout(CHECK_EVERY) == Err(RecvTimeoutError::Timeout) {
                let now = Instant::now();
                if let Err(hung) = watch.check(now - checked, engine.work()) {
                    // The receiver is gone if the worker is ending anyway.
                    let _ = sender.send(hung);
                    // One report is enough, because the process ends after it.
                    return;
                }
                checked = now;
            }
        })?;
        Ok(Self { _stay: stay, hung })
    }
}

/// Time between two checks.
const CHECK_EVERY: Duration = Duration::from_millis(100);
/// Waiting that one check adds at most. A later check means that this process did
/// not run.
const LONGEST_CHECK: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: StepTimeout = StepTimeout { least: Duration::from_secs(1), times_predicted: 20 };

    fn work(tick: u64, predicted_ms: u64) -> Option<Work> {
        Some(Work { tick, predicted: Duration::from_millis(predicted_ms) })
    }

    /// Checks the same tick every `every` ms. Returns the number of checks until it
    /// is hung.
    fn checks_until_hung(every: u64, predicted_ms: u64) -> Option<u32> {
        let mut watch = Watch::new(TIMEOUT);
        (0..1_000)
            .find(|_| watch.check(Duration::from_millis(every), work(7, predicted_ms)).is_err())
    }

    #[test]
    fn watchdog_finds_hung_steps() {
        assert_eq!(checks_until_hung(100, 10), Some(10), "the floor");
        assert_eq!(checks_until_hung(100, 100), Some(20), "twenty times what was predicted");
    }

    /// A process that was stopped for minutes, or starved of CPU time, reports no
    /// hung step.
    #[test]
    fn watchdog_ignores_suspended_time() {
        assert_eq!(checks_until_hung(60_000, 10), Some(5), "each check counts 200 ms at most");
        let mut watch = Watch::new(TIMEOUT);
        for tick in 0..10 {
            for since in [100, 3_600_000] {
                assert_eq!(watch.check(Duration::from_millis(since), work(tick, 10)), Ok(()));
            }
        }
    }

    #[test]
    fn watchdog_accepts_progress_and_idleness() {
        let mut watch = Watch::new(TIMEOUT);
        for tick in 0..1_000 {
            assert_eq!(watch.check(Duration::from_millis(100), work(tick / 9, 10)), Ok(()));
        }
        for _ in 0..1_000 {
            assert_eq!(watch.check(Duration::from_millis(100), None), Ok(()));
        }
    }
}
