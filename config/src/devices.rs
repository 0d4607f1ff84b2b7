//! What config says about devices: how long they may be silent, when they are
//! well, and how they are shared.

use std::path::PathBuf;
use std::time::Duration;

use crate::read::section;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// No wait is longer.
const DAY: Duration = seconds(86_400);

section! {
    /// When a worker that does not go on is given up: it is ended and started
    /// again. What it has journalled is billed, the step under way is nobody's.
    pub struct Watchdog {
        /// How long any step may take. One that was predicted to take longer
        /// than a part of this may take longer: see times_predicted.
        step: Duration = seconds(8), Duration::from_millis(100)..=DAY;
        /// So many times as long as predicted a step may take, where that is
        /// more than step.
        times_predicted: u32 = 20, 1..=10_000;
        /// How long nothing may be heard of a worker's process. It says twice a
        /// second how it is.
        silence: Duration = seconds(8), seconds(2)..=DAY;
        /// How long a worker may take to start: to load its model and measure
        /// its device.
        start: Duration = seconds(1_800), seconds(1)..=DAY;
    }
}

section! {
    /// Cards that several workers use. They take turns, so that each step's
    /// time is its own.
    pub struct Sharing {
        /// For how long one of them may run steps while others wait. A step is
        /// never cut short; worker.step_box is no longer than this there.
        turn: Duration = Duration::from_millis(20), Duration::from_millis(1)..=Duration::from_millis(20);
        /// The folder of the locks that say whose a card is; all processes of
        /// the host that use its cards must name the same. Unless given,
        /// tollgate-cards in /run/lock, or in /tmp where that is not there.
        locks: Option<PathBuf> = None;
    }
}
