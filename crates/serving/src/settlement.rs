//! Settlement: the worker's journals and the gateway's corrections on their way
//! into the ledger.
//!
//! Each block is checked against the orders of this gateway, posted, and
//! acknowledged only when it is on the disk. A block that the disk does not take
//! is posted again. Invalid records of a block become loss. A block that
//! contradicts the ledger as a whole is skipped. Both are reported, cost the
//! worker the gateway's trust, and are never billed.

mod books;
mod ingest;
mod post;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio_util::sync::CancellationToken;
use tollgate_domain::{UtcTime, WorkerEpoch, WorkerName};
use tollgate_ledger::{Health, LedgerError, LedgerHandle, LedgerReader};

pub use self::books::{BlockOutcome, Books, BooksReport, PostedTime};
pub(crate) use self::ingest::JOURNAL;
use crate::Clock;
use crate::in_flight::InFlight;
use crate::limits::Limits;
use crate::observer::Observer;
use crate::orders::Orders;

/// The handle with which journals and corrections are posted; clones share one
/// state.
#[derive(Clone)]
pub struct Settlement {
    ledger: LedgerHandle,
    orders: Orders,
    in_flight: InFlight,
    clock: Clock,
    /// The start of this gateway. Work that ended before it was ordered by an
    /// earlier gateway.
    started: UtcTime,
    /// The number of this gateway, if others use the workers, too.
    number: Option<u32>,
    /// The limits that take spending of earlier gateways, and the keys that tell
    /// their callers.
    limits: Limits,
    /// The present incarnation of each worker.
    incarnations: Arc<Mutex<HashMap<WorkerName, Incarnation>>>,
    books: Books,
    observer: Arc<dyn Observer>,
    /// Cancelled when this gateway ends, even if writes are still waiting.
    stopping: CancellationToken,
    reads: ReadThread,
}

/// The parts of a [`Settlement`].
pub struct SettlementOptions {
    /// The ledger that takes blocks and corrections.
    pub ledger: LedgerHandle,
    /// The requests that run or have just ended.
    pub in_flight: InFlight,
    /// The clock of records.
    pub clock: Clock,
    /// The limits that take spending of earlier gateways.
    pub limits: Limits,
    /// The receiver of figures.
    pub observer: Arc<dyn Observer>,
    /// Cancelled when this gateway ends.
    pub stopping: CancellationToken,
    /// The thread on which the ledger is read.
    pub reads: ReadThread,
    /// The number of this gateway, if it shares the ledger and may share workers with others.
    pub number: Option<u32>,
}

/// The thread on which the ledger is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReadThread {
    /// A thread of the blocking pool, because a read waits for the disk.
    Blocking,
    /// The caller's thread: a simulation has no other.
    Caller,
}

/// One process of a worker, as this gateway came to know it.
#[derive(Clone, Copy)]
struct Incarnation {
    epoch: WorkerEpoch,
    /// True if the ledger had blocks of the epoch before this gateway followed it.
    /// Some requests of the epoch then belong to an earlier gateway.
    earlier: bool,
}

impl Settlement {
    /// Makes the settlement of one gateway.
    pub fn new(options: SettlementOptions) -> Self {
        let SettlementOptions {
            ledger,
            in_flight,
            clock,
            limits,
            observer,
            stopping,
            reads,
            number,
        } = options;
        Self {
            ledger,
            orders: Orders::default(),
            in_flight,
            started: clock.utc(),
            number,
            clock,
            limits,
            incarnations: Arc::default(),
            books: Books::default(),
            observer,
            stopping,
            reads,
        }
    }

    /// Returns the ledger's handle.
    pub fn ledger(&self) -> &LedgerHandle {
        &self.ledger
    }

    /// Returns the orders of this gateway.
    pub fn orders(&self) -> &Orders {
        &self.orders
    }

    /// Returns what was posted of the workers' journals.
    pub fn books(&self) -> &Books {
        &self.books
    }

    /// Returns true if other gateways may share the ledger and the workers.
    pub(crate) fn is_shared(&self) -> bool {
        self.number.is_some()
    }

    /// Returns true while the ledger takes records.
    pub fn can_record(&self) -> bool {
        self.ledger.health() == Health::Healthy
    }

    /// Returns true if work that must be billed may begin: its usage is recorded now, or soon.
    pub fn may_begin_work(&self) -> bool {
        self.ledger.may_begin_work()
    }

    /// Reads the ledger, away from this thread because a read waits for the disk.
    /// Logs an error and returns `None`.
    async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        read: impl FnOnce(&LedgerReader) -> Result<T, LedgerError> + Send + 'static,
    ) -> Option<T> {
        // A clone shares the reader's connections and can move to another thread.
        let reader = self.ledger.reader().clone();
        let found = match self.reads {
            ReadThread::Caller => Ok(read(&reader)),
            ReadThread::Blocking => tokio::task::spawn_blocking(move || read(&reader)).await,
        };
        match found {
            Ok(Ok(found)) => Some(found),
            Ok(Err(error)) => {
                tracing::error!(%error, what, "ledger read failed; the journal waits, or open attempts stay open");
                None
            }
            Err(error) => {
                tracing::error!(%error, what, "ledger read panicked; the journal waits, or open attempts stay open");
                None
            }
        }
    }
}

impl std::fmt::Debug for Settlement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Settlement")
            .field("in_flight", &self.in_flight.len())
            .finish_non_exhaustive()
    }
}
