//! The progress of each worker's journal: the time that this gateway has posted, and the blocks
//! that are on their way into the ledger. For metrics; bills come from the ledger alone.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate_domain::block::BlockParts;
use tollgate_domain::{MonotonicTime, UtcTime, WorkerName};

/// The progress of all journals; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Books(Arc<Mutex<BooksReport>>);

/// The progress of all journals at one moment.
#[derive(Clone, Debug, Default)]
pub struct BooksReport {
    /// The time of each worker that was posted since the start of this gateway. Bounded by
    /// the workers of the config.
    pub workers: BTreeMap<WorkerName, PostedTime>,
    /// Blocks since the start of this gateway, by what became of them.
    pub blocks: BTreeMap<BlockOutcome, u64>,
    /// The arrival of each block that is not committed yet, by its number of arrival.
    pending: BTreeMap<u64, MonotonicTime>,
    arrivals: u64,
}

/// The device time of one worker by account, ns. The accounts sum to the wall time that the
/// posted blocks cover.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PostedTime {
    /// Time of tenants.
    pub tenants: u64,
    /// Time of no tenant: calibration, repeated work.
    pub overhead: u64,
    /// Time between steps.
    pub idle: u64,
    /// Time that a fault made useless, or that no valid record explains.
    pub loss: u64,
    /// The end of the last posted block, by the clock of the worker's host.
    pub until: UtcTime,
}

/// The outcome of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockOutcome {
    /// The ledger took the block.
    Posted,
    /// The ledger had the block already.
    Known,
    /// The block was invalid as a whole; its time is loss.
    Skipped,
    /// The ledger has another block of the same number.
    Dropped,
    /// Another gateway has recorded the block.
    Elsewhere,
}

impl BlockOutcome {
    /// Returns the name of the outcome, which is also its metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Posted => "posted",
            Self::Known => "known",
            Self::Skipped => "skipped",
            Self::Dropped => "dropped",
            Self::Elsewhere => "elsewhere",
        }
    }
}

impl BooksReport {
    /// Returns the arrival of the oldest block that is not committed.
    pub fn oldest_pending(&self) -> Option<MonotonicTime> {
        self.pending.first_key_value().map(|(_, arrived)| *arrived)
    }
}

impl Books {
    /// Returns the progress so far.
    pub fn report(&self) -> BooksReport {
        self.lock().clone()
    }

    /// Counts a block as on its way until the guard is dropped.
    pub(super) fn begin(&self, now: MonotonicTime) -> PendingBlock {
        let mut books = self.lock();
        // Numbered in order, so that the first pending block is the oldest one.
        books.arrivals += 1;
        let number = books.arrivals;
        books.pending.insert(number, now);
        PendingBlock { books: self.clone(), number }
    }

    /// Counts the outcome of a block.
    pub(super) fn count(&self, outcome: BlockOutcome) {
        *self.lock().blocks.entry(outcome).or_default() += 1;
    }

    /// Adds the times of a block that the ledger took.
    pub(super) fn posted(&self, block: &BlockParts) {
        let mut books = self.lock();
        let time = books.workers.entry(block.worker.clone()).or_default();
        // In a checked block the accounts do not exceed the wall time.
        let others = block.overhead.nanos() + block.idle.nanos() + block.loss.nanos();
        time.tenants += block.wall.nanos().saturating_sub(others);
        time.overhead += block.overhead.nanos();
        time.idle += block.idle.nanos();
        time.loss += block.loss.nanos();
        let until = UtcTime(block.started.0.saturating_add(block.wall.nanos()));
        // Journals send the oldest epoch first, but clocks can go back.
        time.until = time.until.max(until);
    }

    fn lock(&self) -> MutexGuard<'_, BooksReport> {
        // Every change under the lock is complete before a panic could happen.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A block on its way into the ledger. The drop ends it, also if its connection ends first.
#[derive(Debug)]
pub(super) struct PendingBlock {
    books: Books,
    number: u64,
}

impl Drop for PendingBlock {
    fn drop(&mut self) {
        self.books.lock().pending.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_block_is_pending_no_more() {
        let books = Books::default();
        let first = books.begin(MonotonicTime(5));
        let second = books.begin(MonotonicTime(9));
        assert_eq!(books.report().oldest_pending(), Some(MonotonicTime(5)));
        drop(first);
        assert_eq!(books.report().oldest_pending(), Some(MonotonicTime(9)));
        drop(second);
        assert_eq!(books.report().oldest_pending(), None);
    }
}
