//! The journal without a worker process, for tests that simulate power cuts and
//! failing disks. The test makes the engine's calls, the syncing thread's checks
//! and the gateway's acknowledgements itself, on a [`Disk`] of its own.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use tollgate_domain::{Block, Device, ModelName, UtcTime, WorkerEpoch, WorkerName};
pub use tollgate_engine::{
    Clock, Owner, RequestFigures, Stages, StepJournal, StepRecord, StepShare,
};

use crate::energy::Meter;
pub use crate::journal::{Disk, DiskFile, OsDisk};
use crate::journal::{Feed, Journal, JournalOptions, Tail};

/// The parameters of a journal. Its epoch begins when it is opened.
pub struct HarnessOptions {
    /// The journal's folder.
    pub folder: PathBuf,
    /// The epoch of the simulated worker process.
    pub epoch: WorkerEpoch,
    /// The worker's name.
    pub worker: WorkerName,
    /// The worker's device.
    pub device: Device,
    /// The model that the worker serves.
    pub model: ModelName,
    /// The version of the cost table.
    pub calibration: String,
    /// The engine's clock.
    pub clock: Arc<dyn Clock>,
    /// The host's clock.
    pub utc: fn() -> UtcTime,
}

/// The journal of one simulated worker process.
pub struct JournalHarness<D: Disk> {
    journal: Journal<D>,
    engine: Box<dyn StepJournal>,
}

impl<D: Disk> JournalHarness<D> {
    /// Recovers the epochs of earlier processes and begins a new one.
    ///
    /// # Errors
    /// The disk reports an error.
    pub fn open(disk: D, options: HarnessOptions) -> io::Result<Self> {
        let HarnessOptions { folder, epoch, worker, device, model, calibration, clock, utc } =
            options;
        let began = clock.now();
        let options = JournalOptions {
            folder,
            epoch,
            worker,
            device,
            model,
            calibration,
            meter: Meter::default(),
            counter: None,
            most_bytes: 64 << 20,
            began,
            clock,
            utc,
        };
        let journal = Journal::open(disk, options)?;
        let engine = journal.for_engine();
        Ok(Self { journal, engine })
    }

    /// Returns the engine's side of the journal.
    pub fn engine(&mut self) -> &mut dyn StepJournal {
        &mut *self.engine
    }

    /// Does the syncing thread's work, which is normally due every 100 ms. Begins a
    /// new file after `segment_bytes`.
    ///
    /// # Errors
    /// The disk reports an error.
    pub fn tick(&self, segment_bytes: u64) -> io::Result<()> {
        self.journal.tick(segment_bytes)
    }

    /// Ends the epoch in order.
    ///
    /// # Errors
    /// The disk reports an error.
    pub fn close(&self) -> io::Result<()> {
        self.journal.close(Tail::Idle)
    }

    /// Returns a reader of blocks, as a gateway's connection has one.
    pub fn reader(&self) -> BlockReader<D> {
        BlockReader { feed: self.journal.feed() }
    }

    /// Acknowledges the blocks of `epoch` up to `block`, as the gateway does.
    pub fn acknowledge(&self, epoch: WorkerEpoch, block: u64) {
        self.journal.acknowledge(epoch, block);
    }

    /// Returns true if the epoch has been ended in order.
    pub fn is_closed(&self) -> bool {
        self.journal.is_closed()
    }

    /// Returns true if every block has been acknowledged.
    pub fn is_acknowledged(&self) -> bool {
        self.journal.is_acknowledged()
    }
}

/// A reader of blocks, as a gateway's connection has one.
pub struct BlockReader<D: Disk> {
    feed: Feed<D>,
}

impl<D: Disk> BlockReader<D> {
    /// Returns the next block that is synced to the disk.
    ///
    /// # Errors
    /// The disk reports an error, or a journal file is damaged.
    pub fn next_block(&mut self) -> io::Result<Option<Block>> {
        self.feed.next()
    }
}
