//! A worker's journal on its way into the ledger: each block is reviewed, posted
//! and acknowledged.

use std::convert::Infallible;
use std::sync::PoisonError;
use std::time::Duration;

use futures_util::stream::FuturesOrdered;
use futures_util::{Stream, StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tollgate_domain::{Block, BlockParts, MonotonicTime, WorkerEpoch};
use tollgate_ledger::{BlockRefusal, LedgerError, LedgerReader, Posted};
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_wire::v1::{JournalAck, JournalBlock};
use tonic::transport::Channel;

use super::{BlockOutcome, Incarnation, Settlement};
use crate::orders::{EpochOwner, InvalidRecord, Origin, Unordered, without_invalid};
use crate::worker_identity::{WorkerError, WorkerIdentity};

/// The name of the journal stream in errors.
pub(crate) const JOURNAL: &str = "journal";

/// Blocks that are posted and not committed yet. Several share one commit.
const UNCOMMITTED: usize = 128;
/// A journal without a block for this long has no more blocks from before the
/// connection.
const QUIET: Duration = Duration::from_millis(200);
/// Time that a worker may take to open its journal.
const CALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Time between two attempts to read the ledger.
const LEDGER_WAIT: Duration = Duration::from_secs(1);
/// Attempts of one block that the ledger refuses one by one, before the whole
/// block is skipped.
const MOST_REPLAYED: usize = 64;

/// The state of one connection's journal. Epochs come one after the other.
struct IngestState<'a> {
    worker: &'a WorkerIdentity,
    incarnation: Incarnation,
    /// True if blocks of the present epoch are in the ledger. No epoch that the
    /// ledger does not have can come after them.
    present: bool,
    /// The epoch of the last block.
    epoch: Option<WorkerEpoch>,
    /// The number of the last block that is known.
    last: u64,
    /// The gateways that can have ordered work in the epoch.
    owner: EpochOwner,
}

/// A block after its review.
enum ReviewedBlock {
    /// A block without invalid records, or one that the ledger has already.
    Accepted(Block),
    /// A block with invalid records.
    PartiallyRejected(Block, Vec<InvalidRecord>),
    /// A message that is no block of the worker, with the reason.
    Rejected(WorkerEpoch, String),
}

impl Settlement {
    /// Follows the journal of `worker` to the end of the connection. Calls
    /// `ingested` once the journal's blocks from before the connection are in the
    /// ledger and count in every cap.
    pub(crate) async fn follow(
        &self,
        worker: &WorkerIdentity,
        mut client: WorkerClient<Channel>,
        ingested: impl FnOnce(),
    ) -> Result<Infallible, WorkerError> {
        // As large as the posts in flight, so that sending an acknowledgement waits only
        // for a worker that does not read.
        let (acks, receiver) = mpsc::channel(UNCOMMITTED);
        let blocks = timeout(CALL_TIMEOUT, client.journal(ReceiverStream::new(receiver)))
            .await
            .map_err(|_| WorkerError::Timeout("opening its journal"))??
            .into_inner();
        self.ingest(worker, blocks, acks, ingested).await
    }

    /// Posts `blocks` as they come and acknowledges each block once it is in the
    /// ledger. Calls `ingested` at the first block of the present epoch, or when
    /// no more blocks come; at once for a shared worker.
    ///
    /// # Errors
    /// The stream ended, the worker broke the protocol, or the ledger failed.
    pub async fn ingest(
        &self,
        worker: &WorkerIdentity,
        mut blocks: impl Stream<Item = Result<JournalBlock, tonic::Status>> + Unpin,
        acks: mpsc::Sender<JournalAck>,
        ingested: impl FnOnce(),
    ) -> Result<Infallible, WorkerError> {
        let mut state = self.begin(worker).await?;
        // Ordered, because acknowledgements must come in the order of the blocks.
        let mut posting = FuturesOrdered::new();
        let epoch = worker.epoch.to_string();
        let mut ingested = Some(ingested);
        // Any gateway may record the journal of a shared worker, so what this one reads of it says
        // nothing about the caps. Each gateway has slices of them and settles its earlier starts.
        if worker.is_shared
            && let Some(ingested) = ingested.take()
        {
            ingested();
        }
        loop {
            let ack = tokio::select! {
                // Finished posts come first, so that the worker can free its journal.
                biased;
                Some(posted) = posting.next() => posted?,
                // A slow ledger stops the reading, and the worker keeps its blocks in its journal.
                block = blocks.try_next(), if posting.len() < UNCOMMITTED => {
                    let block = block?.ok_or(WorkerError::StreamEnded(JOURNAL))?;
                    if block.recorded {
                        self.check_recorded(worker, block).await;
                        continue;
                    }
                    let ack = JournalAck { epoch: block.epoch.clone(), block: block.block };
                    let reviewed = self.review(&mut state, block).await?;
                    posting.push_back(self.post_reviewed(worker, ack, reviewed));
                    continue;
                }
                () = tokio::time::sleep(QUIET), if ingested.is_some() && posting.is_empty() => {
                    if let Some(ingested) = ingested.take() {
                        ingested();
                    }
                    continue;
                }
            };
            // Epochs come oldest first, so a block of the present epoch shows that
            // all blocks of earlier epochs are in the ledger.
            if ack.epoch == epoch
                && let Some(ingested) = ingested.take()
            {
                ingested();
            }
            acks.send(ack).await.map_err(|_| WorkerError::StreamEnded(JOURNAL))?;
        }
    }

    /// Notes the incarnation of `worker`. No other worker may be in its epoch.
    async fn begin<'a>(&self, worker: &'a WorkerIdentity) -> Result<IngestState<'a>, WorkerError> {
        // Read before the lock is taken, because a lock must not be held across a wait. Other
        // gateways may have ordered work in any epoch of a shared worker, so nothing depends on the
        // answer there, and the worker can be used while the database is away.
        let present = worker.is_shared || self.last_block(worker.epoch).await? > 0;
        let mut incarnations = self.incarnations.lock().unwrap_or_else(PoisonError::into_inner);
        if incarnations.iter().any(|(name, it)| it.epoch == worker.epoch && *name != worker.name) {
            return Err(WorkerError::InvalidReport("it announces another worker's epoch"));
        }
        let incarnation = match incarnations.get(&worker.name) {
            // A second connection to the same process: this gateway's own blocks are
            // in the ledger by now, and must not count as an earlier gateway's.
            Some(known) if known.epoch == worker.epoch => *known,
            _ => Incarnation { epoch: worker.epoch, earlier: present },
        };
        incarnations.insert(worker.name.clone(), incarnation);
        Ok(IngestState {
            worker,
            incarnation,
            present,
            epoch: None,
            last: 0,
            owner: EpochOwner::ThisGateway,
        })
    }

    async fn last_block(&self, epoch: WorkerEpoch) -> Result<u64, WorkerError> {
        let last = self.read("the blocks of an epoch", move |reader| reader.last_block(epoch));
        last.await.ok_or(WorkerError::StreamEnded("ledger"))
    }

    /// Returns the last block of an epoch. Waits for the ledger if the worker is shared: such a
    /// worker hands its journal to this gateway at any time, also while the database is away, and
    /// the requests that run there must go on.
    async fn last_block_of(
        &self,
        worker: &WorkerIdentity,
        epoch: WorkerEpoch,
    ) -> Result<u64, WorkerError> {
        loop {
            match self.last_block(epoch).await {
                Err(_) if worker.is_shared => tokio::time::sleep(LEDGER_WAIT).await,
                last => return last,
            }
        }
    }

    /// Returns the last block before `first` that the ledger cannot have, because
    /// the ledger was restored from an older backup. Such blocks were acknowledged
    /// before the restore, so no journal needs to have them any more. The ledger
    /// accepts the gap.
    async fn lost_before(&self, first: &JournalBlock) -> u64 {
        let restored = self.read("whether it was restored", LedgerReader::restored).await.flatten();
        let is_older = restored.is_some_and(|at| first.started_utc_ns < at.0);
        if is_older { first.block.saturating_sub(1) } else { 0 }
    }

    /// Reviews a block before the ledger does: checks that the block belongs to
    /// the worker and finds its invalid records. A block that the ledger has was
    /// reviewed when it first came.
    async fn review(
        &self,
        state: &mut IngestState<'_>,
        wire: JournalBlock,
    ) -> Result<ReviewedBlock, WorkerError> {
        let epoch = WorkerEpoch::try_from(wire.epoch.clone())
            .map_err(|_| WorkerError::InvalidReport("a block's epoch is not 32 hex digits"))?;
        let worker = state.worker;
        // A copy, because the lock must not be held across the waits below.
        let incarnations = self.incarnations.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if incarnations.iter().any(|(name, it)| it.epoch == epoch && *name != worker.name) {
            return Err(WorkerError::InvalidReport("a block of another worker's epoch"));
        }
        if state.epoch != Some(epoch) {
            self.begin_epoch(state, epoch, &wire).await?;
        }
        let mut is_known = wire.block <= state.last;
        if worker.is_shared && wire.block != state.last + 1 {
            // Another gateway may have recorded the blocks before. And a block that comes again may
            // not be in the ledger yet: then it must be checked again.
            let recorded = self.last_block_of(worker, epoch).await?;
            is_known = wire.block <= recorded;
            state.last = state.last.max(recorded);
        }
        // A worker that leaves a block out could send it later, when the gateway
        // would take it for a known block and not review it.
        if wire.block > state.last + 1 {
            return Err(WorkerError::InvalidReport(BLOCKS_MISSING));
        }
        state.last = state.last.max(wire.block);
        let block = match Block::try_from(wire) {
            Ok(block) if block.parts().worker == worker.name => block,
            Ok(_) => return Ok(ReviewedBlock::Rejected(epoch, "it names another worker".into())),
            Err(error) => return Ok(ReviewedBlock::Rejected(epoch, error.to_string())),
        };
        if is_known {
            return Ok(ReviewedBlock::Accepted(block));
        }
        Ok(self.check_records(state, epoch, block))
    }

    /// Notes the first block of another epoch than before.
    async fn begin_epoch(
        &self,
        state: &mut IngestState<'_>,
        epoch: WorkerEpoch,
        first: &JournalBlock,
    ) -> Result<(), WorkerError> {
        let last = self.last_block_of(state.worker, epoch).await?;
        let is_present = epoch == state.incarnation.epoch;
        // Journals send the oldest epoch first. An unknown epoch before the present
        // one is therefore older than this gateway, and one after it is not.
        let is_earlier =
            if is_present { state.incarnation.earlier } else { last > 0 || !state.present };
        let is_shared = is_earlier || state.worker.is_shared;
        state.owner = if is_shared { EpochOwner::Shared } else { EpochOwner::ThisGateway };
        state.present |= is_present;
        let lost = self.lost_before(first).await;
        (state.epoch, state.last) = (Some(epoch), last.max(lost));
        Ok(())
    }

    /// Checks the records of a block that the ledger does not have.
    #[expect(
        clippy::disallowed_methods,
        reason = "the checks get the time at which the block came"
    )]
    fn check_records(
        &self,
        state: &IngestState<'_>,
        epoch: WorkerEpoch,
        block: Block,
    ) -> ReviewedBlock {
        let (parts, now) = (block.parts(), Instant::now());
        if !self.orders.may_have_drawn(parts, state.owner, now) {
            let reason = "its epoch drew more energy than any device can";
            return ReviewedBlock::Rejected(epoch, reason.into());
        }
        let model = state.worker.models.get(&parts.model).filter(|model| {
            // Another calibration is another price.
            model.class == parts.device.class && model.table.version() == parts.calibration
        });
        let may_have_asked = |caller: &_| self.limits.may_have_asked(caller);
        let model = model.map(|model| &**model);
        let unordered = Unordered { may_have_asked: &may_have_asked, model };
        let origin = match (state.owner, self.number) {
            (EpochOwner::ThisGateway, _) => Origin::Ours(unordered),
            (EpochOwner::Shared, None) => Origin::Earlier(unordered),
            (EpochOwner::Shared, Some(number)) => Origin::Any(number, unordered),
        };
        let invalid = self.orders.check(parts, &origin, now);
        if invalid.is_empty() {
            ReviewedBlock::Accepted(block)
        } else {
            ReviewedBlock::PartiallyRejected(block, invalid)
        }
    }

    /// Returns the attempts of a recorded block that pay nothing: real ones with false figures.
    /// If another gateway was faster to record the block, adds those of this gateway's requests that
    /// were left out here, because the other one had no reason to.
    fn to_void<'a>(
        &self,
        invalid: &'a [InvalidRecord],
        posted: Posted,
    ) -> impl Iterator<Item = &'a InvalidRecord> {
        let number = self.number.filter(|_| posted == Posted::Already);
        invalid.iter().filter(move |record| match number {
            Some(number) => {
                let is_own = record.attempt.request.gateway() == Some(number);
                is_own && !record.is_repeated_end()
            }
            None => record.voids && posted == Posted::New,
        })
    }

    /// Checks the records of this gateway's requests in a block that another gateway has recorded.
    /// An invalid record is not billed.
    #[expect(
        clippy::disallowed_methods,
        reason = "the checks get the time at which the block came"
    )]
    async fn check_recorded(&self, worker: &WorkerIdentity, wire: JournalBlock) {
        // Its recorder has judged what is no block of the worker.
        let block = Block::try_from(wire).ok();
        let block = block.filter(|block| block.parts().worker == worker.name);
        let (Some(block), Some(number)) = (block, self.number) else { return };
        let BlockParts { epoch, number: place, last_of_epoch, .. } = *block.parts();
        // This gateway may have had the block as its recorder before.
        if !self.orders.compared(epoch, place) {
            return;
        }
        self.books.count(BlockOutcome::Elsewhere);
        let invalid = self.orders.check(block.parts(), &Origin::Recorded(number), Instant::now());
        if !invalid.is_empty() {
            self.report_invalid(worker, &block, &invalid);
            // A block that the ledger does not have has billed nothing. Only the worker says that it
            // was recorded, and its lies must not take back what others have done.
            if self.last_block_of(worker, epoch).await.is_ok_and(|last| last >= place) {
                // The ledger has refused a second end already; a cap would take back the first one.
                let void = invalid.iter().filter(|record| !record.is_repeated_end());
                self.void_attempts(&block, void).await;
            }
        }
        self.finish_requests(&without_invalid(&block, &invalid));
        if last_of_epoch {
            self.orders.epoch_closed(epoch);
            let is_own = |maker| maker == Some(number);
            self.close_epoch(epoch, is_own).await;
        }
    }

    /// Counts a block that is in the ledger.
    fn count_posted(&self, block: &Block, posted: Posted, arrived: MonotonicTime) {
        match posted {
            Posted::New => {
                self.books.count(BlockOutcome::Posted);
                self.books.posted(block.parts());
            }
            Posted::Already => self.books.count(BlockOutcome::Known),
        }
        self.observer.block_committed(self.clock.now().since(arrived));
    }

    /// Posts one reviewed block and returns the acknowledgement for it.
    async fn post_reviewed(
        &self,
        worker: &WorkerIdentity,
        ack: JournalAck,
        reviewed: ReviewedBlock,
    ) -> Result<JournalAck, WorkerError> {
        let (reported, mut invalid) = match reviewed {
            ReviewedBlock::Accepted(block) => (block, Vec::new()),
            ReviewedBlock::PartiallyRejected(block, invalid) => (block, invalid),
            ReviewedBlock::Rejected(epoch, reason) => {
                return self.skip(worker, epoch, ack, reason).await;
            }
        };
        let epoch = reported.parts().epoch;
        let arrived = self.clock.now();
        let _pending = self.books.begin(arrived);
        loop {
            // Made again in each round, because a repeated end becomes one more invalid record.
            let accepted = without_invalid(&reported, &invalid);
            let refusal = match self.post_block(&reported, &accepted, &invalid).await {
                Ok(posted) => {
                    self.count_posted(&accepted, posted, arrived);
                    // A repeated block was reported when it was new, unless another gateway had it.
                    if posted == Posted::New || self.number.is_some() {
                        self.report_invalid(worker, &reported, &invalid);
                    }
                    self.void_attempts(&reported, self.to_void(&invalid, posted)).await;
                    // Also for a block that the ledger had: the gateway that posted it may
                    // have ended before this.
                    self.settle_orphans(&accepted, posted).await;
                    self.committed(&accepted).await;
                    return Ok(ack);
                }
                Err(LedgerError::Refused { refusal, .. }) => refusal,
                Err(error) => {
                    tracing::error!(worker = %worker.name, %error, "ledger rejected a block; reconnecting to the worker");
                    return Err(WorkerError::StreamEnded("ledger"));
                }
            };
            match refusal {
                // The ledger knows the block, so there is nothing to skip or to bill.
                BlockRefusal::Skipped | BlockRefusal::Archived => return Ok(ack),
                // The worker closed this epoch at its start, and the end of the journal
                // was damaged: the block was posted before, with more in it.
                BlockRefusal::Conflict
                    if epoch != worker.epoch && reported.parts().last_of_epoch =>
                {
                    tracing::warn!(worker = %worker.name, %epoch, block = ack.block, "journal of an earlier epoch is damaged and ends at a block that the ledger has; the ledger keeps its own, and nothing is lost");
                    self.end_epoch(epoch).await;
                    return Ok(ack);
                }
                BlockRefusal::Conflict | BlockRefusal::Ended => {
                    worker.distrust();
                    self.books.count(BlockOutcome::Dropped);
                    let block = ack.block;
                    tracing::error!(worker = %worker.name, %epoch, block, %refusal, "ledger has another block of this number; the new block is dropped");
                    // Acknowledged all the same: the worker would send it for ever.
                    return Ok(ack);
                }
                // Retries did not close the gap, so the journal has lost blocks.
                BlockRefusal::Gap { .. } => {
                    return Err(WorkerError::InvalidReport(BLOCKS_MISSING));
                }
                BlockRefusal::Replayed { request, attempt } if invalid.len() < MOST_REPLAYED => {
                    // The ledger has this end from another block. The record is
                    // rejected, and the rest of the block is posted again.
                    let ended = reported.parts().finished.iter();
                    let repeated = ended.filter(|ended| {
                        ended.attempt.request.as_str() == request
                            && ended.attempt.attempt == attempt
                    });
                    invalid.extend(repeated.map(InvalidRecord::replayed));
                }
                BlockRefusal::Identity
                | BlockRefusal::Steps { .. }
                | BlockRefusal::Replayed { .. }
                | BlockRefusal::Unfit { .. } => {
                    return self.skip(worker, epoch, ack, refusal.to_string()).await;
                }
            }
        }
    }
}

const BLOCKS_MISSING: &str = "blocks of its journal are missing";
