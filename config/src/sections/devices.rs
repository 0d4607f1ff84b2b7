//! The sections of devices: timeouts, health checks and sharing.

use std::path::PathBuf;
use std::time::Duration;

use super::{ByteSize, DAY, seconds};
use crate::read::section;

section! {
    /// The timeouts of a worker. A worker that exceeds one is ended and restarted.
    /// The work in its journal is billed; the current step is billed to no tenant.
    pub struct Watchdog {
        /// The time that any step may take. A step with a long prediction may take
        /// longer: see times_predicted.
        step: Duration = seconds(8), Duration::from_millis(100)..=DAY;
        /// The multiple of its predicted time that a step may take, if that is
        /// longer than `step`.
        times_predicted: u32 = 20, 1..=10_000;
        /// The longest time without a heartbeat of a worker. A worker sends two
        /// heartbeats a second.
        silence: Duration = seconds(8), seconds(2)..=DAY;
        /// The time that a worker has to start: to load its model and to calibrate
        /// its device.
        start: Duration = seconds(1_800), seconds(1)..=DAY;
    }
}

section! {
    /// GPUs that several workers share. The workers take turns, so that the time of
    /// each step is exact.
    pub struct Sharing {
        /// The length of one worker's turn while others wait. A step is never
        /// interrupted. On a shared GPU worker.step_time_budget is at most this
        /// long.
        turn: Duration = Duration::from_millis(20), Duration::from_millis(1)..=Duration::from_millis(20);
        /// The folder of the GPU locks. All processes of the host that use its GPUs
        /// must use the same folder. The default is tollgate-gpus in /run/lock, or
        /// in /tmp if /run/lock does not exist.
        locks: Option<PathBuf> = None;
    }
}

section! {
    /// The health checks of GPUs, from the readings of the driver (NVML). While a
    /// device is too hot or faulty, its worker finishes its requests and accepts
    /// nothing new. Other findings appear in the log, in /v1/status and in the
    /// metrics.
    pub struct Health {
        /// The time between two health checks.
        every: Duration = seconds(5), Duration::from_millis(100)..=seconds(3_600);
        /// The temperature in degrees Celsius from which a device is too hot.
        hot: u32 = 85, 1..=200;
        /// The temperature in degrees Celsius at which a hot device counts as cool
        /// again.
        cooled: u32 = 75, 1..=200;
        /// The time without a fault after which a faulty device is used again.
        /// Faults are uncorrectable memory errors, critical errors (Xids) of the
        /// device, and a device that does not answer.
        well_for: Duration = seconds(300), seconds(1)..=DAY;
        /// The percentage of utilisation above which a busy device is reported.
        busy: u32 = 95, 1..=100;
        /// The time for which a device must be busy before it is reported.
        busy_for: Duration = seconds(600), seconds(1)..=DAY;
        /// The percentage of used device memory above which the device is reported.
        memory: u32 = 90, 1..=100;
        /// The growth of a worker's memory on the device, after its first minute,
        /// above which a leak is reported. The KV cache itself never grows.
        leak: ByteSize = ByteSize(256 << 20), ByteSize(1 << 20)..=ByteSize(1 << 40);
        /// The path of the NVML library. The default is the driver's usual name
        /// (libnvidia-ml.so.1).
        nvml: Option<PathBuf> = None;
    }
}
