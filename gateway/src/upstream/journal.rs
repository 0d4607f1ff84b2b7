//! From the workers' journals into the ledger: each block posted whole, and
//! acknowledged only when it is on the disk. What cannot be posted is retried;
//! what contradicts the ledger is refused, passed over and reported, and never
//! billed.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesOrdered;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tollgate_domain::block::FinishedAttempt;
use tollgate_domain::{Block, BlockParts, FinishReason, Usage, UtcTime, WorkerEpoch, WorkerName};
use tollgate_ledger::{BlockRefusal, FaultCap, LedgerError, LedgerHandle, Posted, SpendRow};
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_wire::v1::{JournalAck, JournalBlock};
use tonic::transport::Channel;

use super::{CALL_TIMEOUT, UpstreamError};
use crate::Clock;
use crate::limits::LateSpend;
use crate::pump::{InFlight, Stage};

/// Blocks posted and not yet committed, so that they share commits.
const UNCOMMITTED: usize = 128;
/// While the ledger is busy.
const BUSY_WAIT: Duration = Duration::from_millis(20);
/// While the disk refuses.
const STORAGE_WAIT: Duration = Duration::from_millis(500);
/// How often a block is posted again that seems to come too early: the one
/// before it may just be being passed over.
const GAP_TRIES: u32 = 10;
/// A journal that says nothing for so long has been taken.
const QUIET: Duration = Duration::from_millis(200);
/// How long the cap of a request that has just ended may be on its way.
const CAP_PATIENCE: Duration = Duration::from_secs(2);

/// Where journals and corrections are entered; clones share it.
#[derive(Clone)]
pub(crate) struct Books {
    pub(crate) ledger: LedgerHandle,
    pub(crate) in_flight: InFlight,
    pub(crate) clock: Clock,
    /// When this gateway began: what ended before it was an earlier one's.
    pub(crate) started: UtcTime,
    pub(crate) late: Arc<LateSpend>,
}

impl Books {
    /// Follows the journal of `worker`, now in `epoch`, to the end of the
    /// connection. `taken` is called once all that it held at the beginning
    /// is in the ledger and what is charged counts in every cap: at the first
    /// block of the epoch, or when nothing more comes.
    pub(super) async fn follow(
        &self,
        worker: &WorkerName,
        epoch: WorkerEpoch,
        mut client: WorkerClient<Channel>,
        taken: impl FnOnce(),
    ) -> Result<Infallible, UpstreamError> {
        let (acks, receiver) = mpsc::channel(UNCOMMITTED);
        let mut blocks = timeout(CALL_TIMEOUT, client.journal(ReceiverStream::new(receiver)))
            .await
            .map_err(|_| UpstreamError::Silent("opening its journal"))??
            .into_inner();
        let mut posting = FuturesOrdered::new();
        let epoch = epoch.to_string();
        let mut taken = Some(taken);
        loop {
            let ack = tokio::select! {
                block = blocks.message(), if posting.len() < UNCOMMITTED => {
                    let block = block?.ok_or(UpstreamError::Ended("journal"))?;
                    posting.push_back(self.enter(worker, block));
                    continue;
                }
                Some(entered) = posting.next() => entered?,
                () = tokio::time::sleep(QUIET), if taken.is_some() && posting.is_empty() => {
                    if let Some(taken) = taken.take() {
                        taken();
                    }
                    continue;
                }
            };
            if ack.epoch == epoch
                && let Some(taken) = taken.take()
            {
                taken();
            }
            acks.send(ack).await.map_err(|_| UpstreamError::Ended("journal"))?;
        }
    }

    /// Enters one block; the answer acknowledges it.
    async fn enter(
        &self,
        worker: &WorkerName,
        wire: JournalBlock,
    ) -> Result<JournalAck, UpstreamError> {
        let ack = JournalAck { epoch: wire.epoch.clone(), block: wire.block };
        let epoch = WorkerEpoch::try_from(wire.epoch.clone())
            .map_err(|_| UpstreamError::Lied("a block's epoch is not 32 hex digits"))?;
        let block = match Block::try_from(wire) {
            Ok(block) if block.parts().worker == *worker => block,
            Ok(_) => return self.pass_over(epoch, ack, "it names another worker".into()).await,
            Err(error) => return self.pass_over(epoch, ack, error.to_string()).await,
        };
        let posted = match self.post(&block).await {
            Ok(posted) => posted,
            Err(LedgerError::Refused { refusal, .. }) => match refusal {
                // Already known: nothing to pass over, nothing to bill.
                BlockRefusal::PassedOver => return Ok(ack),
                BlockRefusal::Conflict | BlockRefusal::Ended => {
                    tracing::error!(%worker, %epoch, block = ack.block, %refusal, "block refused");
                    return Ok(ack);
                }
                BlockRefusal::Gap { .. } => {
                    return Err(UpstreamError::Lied("blocks of its journal are missing"));
                }
                BlockRefusal::Identity
                | BlockRefusal::Steps { .. }
                | BlockRefusal::Replayed { .. }
                | BlockRefusal::Unfit { .. } => {
                    return self.pass_over(epoch, ack, refusal.to_string()).await;
                }
            },
            Err(error) => {
                tracing::error!(%worker, %error, "the ledger takes no block");
                return Err(UpstreamError::Ended("ledger"));
            }
        };
        self.charge_strangers(&block, posted).await;
        self.committed(&block).await;
        Ok(ack)
    }

    /// Posts `block` until it is on the disk or refused.
    async fn post(&self, block: &Block) -> Result<Posted, LedgerError> {
        let mut gaps = 0;
        loop {
            let (done, posted) = oneshot::channel();
            let completion = Box::new(move |result| {
                let _ = done.send(result); // nobody waits: it is sent again
            });
            let result = match self.ledger.post_block(block.clone(), completion) {
                Ok(()) => posted.await.unwrap_or(Err(LedgerError::Closed)),
                Err(error) => Err(error),
            };
            match result {
                Err(LedgerError::Busy) => tokio::time::sleep(BUSY_WAIT).await,
                Err(LedgerError::Storage(_)) => tokio::time::sleep(STORAGE_WAIT).await,
                Err(LedgerError::Refused { refusal: BlockRefusal::Gap { .. }, .. })
                    if gaps < GAP_TRIES =>
                {
                    gaps += 1;
                    tokio::time::sleep(BUSY_WAIT).await;
                }
                result => return result,
            }
        }
    }

    /// Records that a block is refused for good, and acknowledges it.
    async fn pass_over(
        &self,
        epoch: WorkerEpoch,
        ack: JournalAck,
        reason: String,
    ) -> Result<JournalAck, UpstreamError> {
        tracing::error!(%epoch, block = ack.block, reason, "block refused and passed over");
        loop {
            let (done, passed) = oneshot::channel();
            let completion = Box::new(move |result| {
                let _ = done.send(result);
            });
            let result = match self.ledger.pass_over(epoch, ack.block, reason.clone(), completion) {
                Ok(()) => passed.await.unwrap_or(Err(LedgerError::Closed)),
                Err(error) => Err(error),
            };
            match result {
                Ok(_) => return Ok(ack),
                Err(LedgerError::Busy) => tokio::time::sleep(BUSY_WAIT).await,
                Err(LedgerError::Storage(_)) => tokio::time::sleep(STORAGE_WAIT).await,
                Err(_) => {
                    return Err(UpstreamError::Lied(
                        "a block that can be neither posted nor passed over",
                    ));
                }
            }
        }
    }

    /// Attempts that ended and of which no task of ours knows: an earlier
    /// gateway placed them. Those that lost it pay nothing, since nobody knows
    /// what reached the client. What the others cost was not there when the
    /// caps were filled at the start, and is added now.
    async fn charge_strangers(&self, block: &Block, posted: Posted) {
        let BlockParts { model, device, finished, .. } = block.parts();
        let mut late = Vec::new();
        for ended in finished {
            let FinishedAttempt { caller, attempt, usage, reason, finished, .. } = ended;
            if self.in_flight.knows(&attempt.request) {
                continue;
            }
            if *reason == FinishReason::Fault {
                self.fault(FaultCap {
                    caller: caller.clone(),
                    attempt: attempt.clone(),
                    model: model.clone(),
                    class: device.class.clone(),
                    payable: Usage::default(),
                    at: *finished,
                })
                .await;
            } else if posted == Posted::New && *finished < self.started {
                // One of our own that is forgotten was settled when it ended.
                late.push((
                    finished.day(),
                    SpendRow {
                        caller: caller.clone(),
                        model: model.clone(),
                        class: device.class.clone(),
                        reference: usage.reference,
                    },
                ));
            }
        }
        self.late.add(&late);
    }

    /// What follows from a block that is on the disk.
    async fn committed(&self, block: &Block) {
        for FinishedAttempt { attempt, .. } in &block.parts().finished {
            self.in_flight.recorded(attempt);
        }
        if block.parts().last_of_epoch {
            self.close_epoch(block.parts().epoch).await;
        }
    }

    /// Attempts that ended with their worker, and of which no task of ours
    /// will say who pays: nobody does. A task that runs says it when it hears
    /// of the end; one that has just ended may be saying it.
    async fn close_epoch(&self, epoch: WorkerEpoch) {
        let reader = self.ledger.reader().clone();
        let open = tokio::task::spawn_blocking(move || reader.open_attempts(epoch)).await;
        let Ok(Ok(open)) = open else {
            tracing::error!(%epoch, "the open attempts of an ended epoch cannot be read");
            return;
        };
        for attempt in open {
            let stage = self.in_flight.stage(&attempt.caller.tenant, &attempt.attempt.request);
            if let Some(mut stage) = stage {
                if *stage.borrow() == Stage::Running {
                    continue;
                }
                // Past the patience, or forgotten meanwhile: it says nothing.
                let _ =
                    timeout(CAP_PATIENCE, stage.wait_for(|stage| *stage == Stage::Recorded)).await;
            }
            self.fault(FaultCap {
                caller: attempt.caller,
                attempt: attempt.attempt,
                model: attempt.model,
                class: attempt.class,
                payable: Usage::default(),
                at: self.clock.utc(),
            })
            .await;
        }
    }

    /// Enters what a tenant pays at most for an attempt that ended by our
    /// fault; it comes to an end only with the ledger.
    pub(crate) async fn fault(&self, cap: FaultCap) {
        loop {
            let (done, capped) = oneshot::channel();
            let completion = Box::new(move |result| {
                let _ = done.send(result);
            });
            let result = match self.ledger.fault_cap(cap.clone(), completion) {
                Ok(()) => capped.await.unwrap_or(Err(LedgerError::Closed)),
                Err(error) => Err(error),
            };
            match result {
                Ok(_) => return self.in_flight.recorded(&cap.attempt),
                // Who knew more has said what is paid.
                Err(LedgerError::AlreadySettled) if cap.payable == Usage::default() => return,
                Err(LedgerError::Busy) => tokio::time::sleep(BUSY_WAIT).await,
                Err(LedgerError::Storage(_)) => tokio::time::sleep(STORAGE_WAIT).await,
                Err(error) => {
                    tracing::error!(request = %cap.attempt.request, %error, "a fault is not entered");
                    return;
                }
            }
        }
    }
}

impl std::fmt::Debug for Books {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Books").field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
    }
}
