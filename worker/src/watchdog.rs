//! Watches over the engine's thread from a thread of its own. A device that
//! hangs never comes back inside the process: who finds that out says so once,
//! the journal is closed, the process ends, and whoever started it starts
//! another.
//!
//! Time counts only as far as this thread itself was awake for it: a process
//! that was stopped, or a machine without a free core, is no hung device.

use std::io;
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;
use tollgate_engine::{EngineHandle, Work};

/// How long a step may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPatience {
    /// Any step, whatever was predicted.
    pub least: Duration,
    /// So many times as long as it was predicted to take, where that is more.
    pub times_predicted: u32,
}

/// A step that did not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a step has not ended after {waited:?}; it was to take {predicted:?}")]
pub struct Hung {
    /// For how long it was watched.
    pub waited: Duration,
    /// How long it should have taken.
    pub predicted: Duration,
}

impl Default for StepPatience {
    fn default() -> Self {
        Self { least: Duration::from_secs(8), times_predicted: 20 }
    }
}

impl StepPatience {
    fn of(&self, predicted: Duration) -> Duration {
        self.least.max(predicted.saturating_mul(self.times_predicted))
    }
}

/// What is known of the turn that was seen last.
#[derive(Debug)]
struct Watch {
    patience: StepPatience,
    turn: Option<u64>,
    waited: Duration,
}

impl Watch {
    fn new(patience: StepPatience) -> Self {
        Self { patience, turn: None, waited: Duration::ZERO }
    }

    /// Looks again, `since` the last time.
    fn look(&mut self, since: Duration, work: Option<Work>) -> Result<(), Hung> {
        let turn = work.map(|work| work.tick);
        if turn != self.turn {
            (self.turn, self.waited) = (turn, Duration::ZERO);
            return Ok(());
        }
        let Some(Work { predicted, .. }) = work else { return Ok(()) };
        self.waited += since.min(LONGEST_LOOK);
        if self.waited < self.patience.of(predicted) {
            return Ok(());
        }
        Err(Hung { waited: self.waited, predicted })
    }
}

/// A watchdog that runs; it ends when this is dropped.
pub(crate) struct Watchdog {
    _stay: SyncSender<()>,
    /// The step that did not end, if there ever is one.
    pub(crate) hung: oneshot::Receiver<Hung>,
}

impl Watchdog {
    /// Watches over `engine`.
    pub(crate) fn start(engine: EngineHandle, patience: StepPatience) -> io::Result<Self> {
        let (stay, gone) = sync_channel(1);
        let (sender, hung) = oneshot::channel();
        std::thread::Builder::new().name("watchdog".to_owned()).spawn(move || {
            let mut watch = Watch::new(patience);
            let mut looked = Instant::now();
            while gone.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                let now = Instant::now();
                if let Err(hung) = watch.look(now - looked, engine.work()) {
                    // Nobody listens to it once the worker is ending anyway.
                    let _ = sender.send(hung);
                    return;
                }
                looked = now;
            }
        })?;
        Ok(Self { _stay: stay, hung })
    }
}

/// How often it looks.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// What a look may count at most: it came late because nothing ran.
const LONGEST_LOOK: Duration = Duration::from_millis(200);

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: StepPatience =
        StepPatience { least: Duration::from_secs(1), times_predicted: 20 };

    fn work(turn: u64, predicted_ms: u64) -> Option<Work> {
        Some(Work { tick: turn, predicted: Duration::from_millis(predicted_ms) })
    }

    /// Looks every `every` ms at the same turn; after how many it is hung.
    fn looks_until_hung(every: u64, predicted_ms: u64) -> Option<u32> {
        let mut watch = Watch::new(PATIENCE);
        (0..1_000)
            .find(|_| watch.look(Duration::from_millis(every), work(7, predicted_ms)).is_err())
    }

    #[test]
    fn a_step_that_does_not_end_is_found() {
        assert_eq!(looks_until_hung(100, 10), Some(10), "the floor");
        assert_eq!(looks_until_hung(100, 100), Some(20), "twenty times what was predicted");
    }

    /// A process that was stopped for minutes, or starved, finds nothing hung.
    #[test]
    fn time_in_which_nothing_ran_does_not_count() {
        assert_eq!(looks_until_hung(60_000, 10), Some(5), "each look counts 200 ms at most");
        let mut watch = Watch::new(PATIENCE);
        for turn in 0..10 {
            for since in [100, 3_600_000] {
                assert_eq!(watch.look(Duration::from_millis(since), work(turn, 10)), Ok(()));
            }
        }
    }

    #[test]
    fn who_moves_or_waits_is_well() {
        let mut watch = Watch::new(PATIENCE);
        for turn in 0..1_000 {
            assert_eq!(watch.look(Duration::from_millis(100), work(turn / 9, 10)), Ok(()));
        }
        for _ in 0..1_000 {
            assert_eq!(watch.look(Duration::from_millis(100), None), Ok(()));
        }
    }
}
