//! The journal without its process, for who plays power cuts and failing disks
//! against it: the engine's side, the syncing thread's look and the gateway's
//! side are calls of the owner's, on a [`Disk`] of the owner's.

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

/// What a journal is told at its start; its epoch begins now.
pub struct RigOptions {
    /// Its folder.
    pub folder: PathBuf,
    /// This life of the worker.
    pub epoch: WorkerEpoch,
    /// Whose it is.
    pub worker: WorkerName,
    /// What it works on.
    pub device: Device,
    /// What it serves.
    pub model: ModelName,
    /// Version of the cost table.
    pub calibration: String,
    /// The engine's clock.
    pub clock: Arc<dyn Clock>,
    /// The host's clock.
    pub utc: fn() -> UtcTime,
}

/// One life of a worker's journal.
pub struct JournalRig<D: Disk> {
    journal: Journal<D>,
    engine: Box<dyn StepJournal>,
}

impl<D: Disk> JournalRig<D> {
    /// Recovers what earlier lives left and begins this one.
    ///
    /// # Errors
    /// The disk's.
    pub fn open(disk: D, options: RigOptions) -> io::Result<Self> {
        let RigOptions { folder, epoch, worker, device, model, calibration, clock, utc } = options;
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

    /// What the engine writes to.
    pub fn engine(&mut self) -> &mut dyn StepJournal {
        &mut *self.engine
    }

    /// What the syncing thread does every 100 ms; a file of `segment_bytes` is
    /// long.
    ///
    /// # Errors
    /// The disk's.
    pub fn tick(&self, segment_bytes: u64) -> io::Result<()> {
        self.journal.tick(segment_bytes)
    }

    /// Ends the epoch in peace.
    ///
    /// # Errors
    /// The disk's.
    pub fn close(&self) -> io::Result<()> {
        self.journal.close(Tail::Idle)
    }

    /// A connection's reader.
    pub fn reader(&self) -> BlockReader<D> {
        BlockReader { feed: self.journal.feed() }
    }

    /// The gateway says that blocks up to this one are in its ledger.
    pub fn acknowledge(&self, epoch: WorkerEpoch, block: u64) {
        self.journal.acknowledge(epoch, block);
    }

    /// Whether the epoch was ended in peace.
    pub fn is_closed(&self) -> bool {
        self.journal.is_closed()
    }

    /// Whether every block is in the ledger.
    pub fn is_acknowledged(&self) -> bool {
        self.journal.is_acknowledged()
    }
}

/// Reads blocks as a connection does.
pub struct BlockReader<D: Disk> {
    feed: Feed<D>,
}

impl<D: Disk> BlockReader<D> {
    /// The next block that may be told.
    ///
    /// # Errors
    /// The disk's, and damage.
    pub fn next_block(&mut self) -> io::Result<Option<Block>> {
        self.feed.next()
    }
}
