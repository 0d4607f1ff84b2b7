//! What config says about devices: how long they may be silent, when they are
//! well, and how they are shared.

use std::path::PathBuf;
use std::time::Duration;

use super::{ByteSize, DAY, seconds};
use crate::read::section;

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
        /// never cut short; worker.step_time_budget is no longer than this there.
        turn: Duration = Duration::from_millis(20), Duration::from_millis(1)..=Duration::from_millis(20);
        /// The folder of the locks that say whose a card is; all processes of
        /// the host that use its cards must name the same. Unless given,
        /// tollgate-cards in /run/lock, or in /tmp where that is not there.
        locks: Option<PathBuf> = None;
    }
}

section! {
    /// When a device is not well, by what its driver (NVML) tells. Too hot or
    /// ill, its worker finishes what it has and takes nothing new until the
    /// device is well again; the rest is told in the log, /v1/status and
    /// metrics.
    pub struct Health {
        /// How often the device is looked at.
        every: Duration = seconds(5), Duration::from_millis(100)..=seconds(3_600);
        /// Too hot, in degrees Celsius ...
        hot: u32 = 85, 1..=200;
        /// ... until it has come down to this.
        cooled: u32 = 75, 1..=200;
        /// How long a device must have been well after memory errors that could
        /// not be corrected, a critical error (Xid) of its own, or silence.
        well_for: Duration = seconds(300), seconds(1)..=DAY;
        /// Worth a word: more than so many percent busy ...
        busy: u32 = 95, 1..=100;
        /// ... for so long.
        busy_for: Duration = seconds(600), seconds(1)..=DAY;
        /// Worth a word: more than so many percent of its memory in use.
        memory: u32 = 90, 1..=100;
        /// Worth a word: the worker's memory on it grew by so much after its
        /// first minute, though the KV cache never grows.
        leak: ByteSize = ByteSize(256 << 20), ByteSize(1 << 20)..=ByteSize(1 << 40);
        /// The NVML library, where it is not found by its usual name
        /// (libnvidia-ml.so.1).
        nvml: Option<PathBuf> = None;
    }
}
