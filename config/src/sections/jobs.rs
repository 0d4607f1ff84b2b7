//! Files and batches: the quotas of plans and the limits of the gateway.

use std::path::PathBuf;
use std::time::Duration;

use tollgate_domain::{ByClass, DeviceNanos, Rate};

use super::{ByteSize, DAY, kib, mib, seconds};
use crate::read::section;

section! {
    /// Quotas of batches and of their files, for a tenant or a pool.
    pub struct BatchQuotas {
        /// The largest number of batches that have not ended. 0 allows none.
        queued: u32 = 100, 0..=100_000;
        /// The largest number of batches with lines on workers.
        running: u32 = 4, 1..=1_000;
        /// The largest number of lines without an answer, over all batches.
        lines: u64 = 200_000, 1..=100_000_000;
        /// The largest number of lines on workers at the same time.
        in_flight: u32 = 32, 1..=4_096;
        /// Files and batches made a minute (a token bucket): a number, or { limit,
        /// burst }.
        made_per_minute: Rate = Rate::per_minute(60);
        /// The largest size of all inputs together.
        stored: ByteSize = mib(1_024), kib(1)..=ByteSize(1 << 50);
        /// The largest size of all results together.
        results: ByteSize = mib(2_048), kib(1)..=ByteSize(1 << 50);
        /// The largest number of files. A batch takes two for its results.
        files: u32 = 1_000, 1..=1_000_000;
        /// The largest number of uploads at the same time.
        uploads: u32 = 4, 1..=1_000;
        /// The largest device time of all lines in a calendar day (UTC). It also counts
        /// against the plan's own limits.
        device_time_per_day: ByClass<DeviceNanos> = ByClass::default();
        /// The longest life of a file, and of a batch after its end.
        kept: Duration = seconds(7 * 86_400), seconds(3_600)..=seconds(365 * 86_400);
    }
}

section! {
    /// Files and batches of all tenants.
    pub struct JobLimits {
        /// The largest file. It has at most 50,000 lines, each at most as long as
        /// gateway.requests.body.
        file: ByteSize = mib(200), kib(1)..=ByteSize(1 << 40);
        /// The largest size of all inputs of all tenants together.
        stored: ByteSize = mib(50 * 1_024), kib(1)..=ByteSize(1 << 50);
        /// The size of the disk that files leave free, for the ledger and the journals.
        spare: ByteSize = mib(2_048), ByteSize(0)..=ByteSize(1 << 50);
        /// The longest time for an upload. It also needs 64 KiB in each 5 s.
        upload: Duration = seconds(3_600), seconds(1)..=DAY;
        /// The longest time for a line on a worker.
        line: Duration = seconds(3_600), seconds(1)..=DAY;
        /// A folder that all gateways share, such as a network file system. With it they share
        /// files and batches, too, and cluster.postgres has the list of them. None: each
        /// gateway has its own, in the data folder.
        folder: Option<PathBuf> = None;
    }
}
