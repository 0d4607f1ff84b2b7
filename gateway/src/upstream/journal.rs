//! From the workers' journals into the ledger: each block judged by what this
//! gateway has ordered, then posted, and acknowledged only when it is on the
//! disk. What cannot be posted is retried. What is untrue of a block is loss,
//! what contradicts the ledger as a whole is passed over; either is reported,
//! costs the worker our trust, and is never billed.

use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::stream::FuturesOrdered;
use futures_util::{Stream, StreamExt, TryStreamExt};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tollgate_domain::block::FinishedAttempt;
use tollgate_domain::{Block, BlockParts, FinishReason, Usage, UtcTime, WorkerEpoch, WorkerName};
use tollgate_ledger::{
    Act, BlockRefusal, FaultCap, Health, LedgerError, LedgerHandle, LedgerReader,
    PartiallyRejectedBlock, Posted, RefusedBlock, SpendRow,
};
use tollgate_wire::v1::worker_client::WorkerClient;
use tollgate_wire::v1::{JournalAck, JournalBlock};
use tonic::transport::Channel;

use super::orders::{Orders, Origin, Untruth};
use super::{CALL_TIMEOUT, Online, UpstreamError};
use crate::Clock;
use crate::limits::LateSpend;
use crate::pump::{InFlight, Stage};
use crate::submit;

/// Blocks posted and not yet committed, so that they share commits.
const UNCOMMITTED: usize = 128;
/// How often a block is posted again that seems to come too early: the one
/// before it may just be being passed over, or wait for the disk. Together
/// longer than [`submit::STORAGE_WAIT`].
const MAX_GAP_RETRIES: u32 = 200;
/// A journal that says nothing for so long has been taken.
const QUIET: Duration = Duration::from_millis(200);
/// How long the ledger is asked to take a cap while the gateway ends.
const LAST_CAPS: Duration = Duration::from_secs(10);
/// How long the cap of a request that has just ended may be on its way.
const CAP_PATIENCE: Duration = Duration::from_secs(2);

/// Untruths of one block that are logged one by one.
const MOST_TOLD: usize = 8;
/// Attempts of one block that the ledger refuses one by one, before the block
/// is passed over.
const MOST_REPLAYED: usize = 64;

/// Where journals and corrections are entered; clones share it.
#[derive(Clone)]
pub(crate) struct Books {
    pub(crate) ledger: LedgerHandle,
    pub(super) orders: Orders,
    in_flight: InFlight,
    clock: Clock,
    /// When this gateway began: what ended before it was an earlier one's.
    started: UtcTime,
    late: Arc<LateSpend>,
    /// The present life of each worker.
    lives: Arc<Mutex<HashMap<WorkerName, Life>>>,
    /// Cancelled when this gateway ends, whatever is still to be entered.
    stopping: CancellationToken,
    /// Ledgers are read on this thread: a simulation has no other.
    #[cfg(test)]
    pub(super) reads_here: bool,
}

/// A life of a worker, as this gateway came to know it.
#[derive(Clone, Copy)]
struct Life {
    epoch: WorkerEpoch,
    /// An earlier gateway had blocks of it: some of its requests are that
    /// one's.
    earlier: bool,
}

/// One connection's journal: what of the epoch that is being told is in the
/// ledger already. Epochs come one after the other.
struct Told<'a> {
    online: &'a Online,
    life: Life,
    /// Whether blocks of the present life are in the ledger: no epoch that is
    /// unknown there can come after that.
    present: bool,
    epoch: Option<WorkerEpoch>,
    /// Its last block that is known.
    last: u64,
    /// Whether others than this gateway can have ordered in it.
    open: bool,
}

/// A block that has been looked at and goes to the ledger.
enum Looked {
    /// Nothing is wrong with it, or it is there already.
    Sound(Block),
    /// Not all of it is believed.
    PartiallyRejectedBlock(Block, Vec<Untruth>),
    /// It is no block of this worker's.
    Refused(WorkerEpoch, String),
}

impl Books {
    pub(crate) fn new(
        ledger: LedgerHandle,
        in_flight: InFlight,
        clock: Clock,
        late: Arc<LateSpend>,
        stopping: CancellationToken,
    ) -> Self {
        Self {
            ledger,
            orders: Orders::default(),
            in_flight,
            started: clock.utc(),
            clock,
            late,
            lives: Arc::default(),
            stopping,
            #[cfg(test)]
            reads_here: false,
        }
    }

    /// Reads the ledger, away from this thread: it waits for the disk.
    async fn read<T: Send + 'static>(
        &self,
        what: &'static str,
        read: impl FnOnce(&LedgerReader) -> Result<T, LedgerError> + Send + 'static,
    ) -> Option<T> {
        let reader = self.ledger.reader().clone();
        #[cfg(test)]
        if self.reads_here {
            return read(&reader).inspect_err(|error| eprintln!("{what}: {error}")).ok();
        }
        match tokio::task::spawn_blocking(move || read(&reader)).await {
            Ok(Ok(found)) => Some(found),
            Ok(Err(error)) => {
                tracing::error!(%error, what, "the ledger cannot be read");
                None
            }
            Err(error) => {
                tracing::error!(%error, what, "reading the ledger came to no end");
                None
            }
        }
    }

    /// Follows the journal of `online` to the end of the connection. `taken`
    /// is called once all that it held at the beginning is in the ledger and
    /// what is charged counts in every cap: at the first block of the epoch,
    /// or when nothing more comes.
    pub(super) async fn follow(
        &self,
        online: &Online,
        mut client: WorkerClient<Channel>,
        taken: impl FnOnce(),
    ) -> Result<Infallible, UpstreamError> {
        let (acks, receiver) = mpsc::channel(UNCOMMITTED);
        let blocks = timeout(CALL_TIMEOUT, client.journal(ReceiverStream::new(receiver)))
            .await
            .map_err(|_| UpstreamError::Silent("opening its journal"))??
            .into_inner();
        self.take(online, blocks, acks, taken).await
    }

    /// Enters `blocks` as they come, and acknowledges each once it is in the
    /// ledger.
    pub(super) async fn take(
        &self,
        online: &Online,
        mut blocks: impl Stream<Item = Result<JournalBlock, tonic::Status>> + Unpin,
        acks: mpsc::Sender<JournalAck>,
        taken: impl FnOnce(),
    ) -> Result<Infallible, UpstreamError> {
        let mut told = self.begin(online).await?;
        let mut posting = FuturesOrdered::new();
        let epoch = online.epoch.to_string();
        let mut taken = Some(taken);
        loop {
            let ack = tokio::select! {
                // What is done is told before more is taken on.
                biased;
                Some(entered) = posting.next() => entered?,
                block = blocks.try_next(), if posting.len() < UNCOMMITTED => {
                    let block = block?.ok_or(UpstreamError::Ended("journal"))?;
                    let ack = JournalAck { epoch: block.epoch.clone(), block: block.block };
                    let looked = self.look(&mut told, block).await?;
                    posting.push_back(self.enter(online, ack, looked));
                    continue;
                }
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

    /// Notes in which life `online` is. Nobody else may be in it.
    async fn begin<'a>(&self, online: &'a Online) -> Result<Told<'a>, UpstreamError> {
        let present = self.last_block(online.epoch).await? > 0;
        let mut lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner);
        if lives.iter().any(|(name, life)| life.epoch == online.epoch && *name != online.name) {
            return Err(UpstreamError::Lied("it announces another worker's epoch"));
        }
        let life = match lives.get(&online.name) {
            Some(life) if life.epoch == online.epoch => *life,
            _ => Life { epoch: online.epoch, earlier: present },
        };
        lives.insert(online.name.clone(), life);
        Ok(Told { online, life, present, epoch: None, last: 0, open: false })
    }

    async fn last_block(&self, epoch: WorkerEpoch) -> Result<u64, UpstreamError> {
        let last = self.read("the blocks of an epoch", move |reader| reader.last_block(epoch));
        last.await.ok_or(UpstreamError::Ended("ledger"))
    }

    /// The last block before `first` where the ledger was restored from an older
    /// backup since: those in between were acknowledged, and no journal need
    /// have them any more. The ledger passes over them.
    async fn lost_before(&self, first: &JournalBlock) -> u64 {
        let restored = self.read("whether it was restored", LedgerReader::restored).await.flatten();
        let is_older = restored.is_some_and(|at| first.started_utc_ns < at.0);
        if is_older { first.block.saturating_sub(1) } else { 0 }
    }

    /// Looks at a block before the ledger does: whether it is this worker's to
    /// tell, and what of it is untrue. What is in the ledger already was
    /// judged when it came first.
    async fn look(&self, told: &mut Told<'_>, wire: JournalBlock) -> Result<Looked, UpstreamError> {
        let epoch = WorkerEpoch::try_from(wire.epoch.clone())
            .map_err(|_| UpstreamError::Lied("a block's epoch is not 32 hex digits"))?;
        let worker = &told.online.name;
        let lives = self.lives.lock().unwrap_or_else(PoisonError::into_inner).clone();
        if lives.iter().any(|(name, life)| life.epoch == epoch && name != worker) {
            return Err(UpstreamError::Lied("a block of another worker's epoch"));
        }
        if told.epoch != Some(epoch) {
            let last = self.last_block(epoch).await?;
            let is_present = epoch == told.life.epoch;
            // Journals are told oldest first.
            told.open = if is_present { told.life.earlier } else { last > 0 || !told.present };
            told.present |= is_present;
            let lost = self.lost_before(&wire).await;
            (told.epoch, told.last) = (Some(epoch), last.max(lost));
        }
        // Who leaves one out could tell it later, and it would pass unjudged.
        let is_known = wire.block <= told.last;
        if !is_known && wire.block != told.last + 1 {
            return Err(UpstreamError::Lied("blocks of its journal are missing"));
        }
        told.last = told.last.max(wire.block);
        let block = match Block::try_from(wire) {
            Ok(block) if block.parts().worker == *worker => block,
            Ok(_) => return Ok(Looked::Refused(epoch, "it names another worker".into())),
            Err(error) => return Ok(Looked::Refused(epoch, error.to_string())),
        };
        let parts = block.parts();
        if is_known {
            return Ok(Looked::Sound(block));
        }
        if !self.orders.may_have_drawn(parts, !told.open) {
            return Ok(Looked::Refused(epoch, "its life drew more than any device does".into()));
        }
        let keys = &self.late.keys;
        let model = told.online.models.get(&parts.model).filter(|model| {
            model.class == parts.device.class && model.table.version() == parts.calibration
        });
        let origin = if told.open {
            Origin::Earlier { may_be: &|caller| keys.may_be(caller), model: model.map(|it| &**it) }
        } else {
            Origin::Ours
        };
        let untruths = self.orders.judge(parts, &origin);
        Ok(if untruths.is_empty() {
            Looked::Sound(block)
        } else {
            Looked::PartiallyRejectedBlock(block, untruths)
        })
    }

    /// Enters one block; the answer acknowledges it.
    async fn enter(
        &self,
        online: &Online,
        ack: JournalAck,
        looked: Looked,
    ) -> Result<JournalAck, UpstreamError> {
        let (said, mut untruths) = match looked {
            Looked::Sound(block) => (block, Vec::new()),
            Looked::PartiallyRejectedBlock(block, untruths) => (block, untruths),
            Looked::Refused(epoch, reason) => {
                return self.pass_over(online, epoch, ack, reason).await;
            }
        };
        let epoch = said.parts().epoch;
        loop {
            let believed = said.without(|caller, attempt| {
                untruths.iter().any(|it| it.caller == *caller && it.attempt == *attempt)
            });
            let refusal = match self.post(&said, &believed, &untruths).await {
                Ok(posted) => {
                    if posted == Posted::New {
                        self.report(online, &said, &untruths);
                        self.void(&said, &untruths).await;
                    }
                    self.charge_strangers(&believed, posted).await;
                    self.committed(&believed).await;
                    return Ok(ack);
                }
                Err(LedgerError::Refused { refusal, .. }) => refusal,
                Err(error) => {
                    tracing::error!(worker = %online.name, %error, "the ledger takes no block");
                    return Err(UpstreamError::Ended("ledger"));
                }
            };
            match refusal {
                // Already known: nothing to pass over, nothing to bill.
                BlockRefusal::Skipped | BlockRefusal::Archived => return Ok(ack),
                BlockRefusal::Conflict | BlockRefusal::Ended => {
                    online.distrust();
                    let (worker, block) = (&online.name, ack.block);
                    tracing::error!(%worker, %epoch, block, %refusal, "block refused");
                    return Ok(ack);
                }
                BlockRefusal::Gap { .. } => {
                    return Err(UpstreamError::Lied("blocks of its journal are missing"));
                }
                BlockRefusal::Replayed { request, attempt } if untruths.len() < MOST_REPLAYED => {
                    let ended = said.parts().finished.iter();
                    untruths.extend(
                        ended
                            .filter(|ended| {
                                ended.attempt.request.as_str() == request
                                    && ended.attempt.attempt == attempt
                            })
                            .map(Untruth::replayed),
                    );
                }
                BlockRefusal::Identity
                | BlockRefusal::Steps { .. }
                | BlockRefusal::Replayed { .. }
                | BlockRefusal::Unfit { .. } => {
                    return self.pass_over(online, epoch, ack, refusal.to_string()).await;
                }
            }
        }
    }

    /// Says what was not believed of a block, and trusts its worker no more.
    fn report(&self, online: &Online, said: &Block, untruths: &[Untruth]) {
        let (worker, BlockParts { epoch, number, .. }) = (&online.name, said.parts());
        for Untruth { caller, attempt, what, excused, voids: _ } in untruths.iter().take(MOST_TOLD)
        {
            let (tenant, request, attempt) = (&caller.tenant, &attempt.request, attempt.attempt);
            if *excused {
                tracing::warn!(%worker, %epoch, block = number, %tenant, %request, attempt, what, "not billed");
            } else {
                tracing::error!(%worker, %epoch, block = number, %tenant, %request, attempt, what, "a worker lied: not billed");
            }
        }
        if untruths.len() > MOST_TOLD {
            tracing::error!(%worker, %epoch, block = number, untruths = untruths.len(), "a worker lied often");
        }
        if untruths.iter().any(|untruth| !untruth.excused) {
            online.distrust();
        }
    }

    /// Attempts that are real and of which false figures were told pay
    /// nothing, whatever was or will be believed of them.
    async fn void(&self, said: &Block, untruths: &[Untruth]) {
        let BlockParts { model, device, .. } = said.parts();
        for Untruth { caller, attempt, .. } in untruths.iter().filter(|untruth| untruth.voids) {
            self.fault(FaultCap {
                caller: caller.clone(),
                attempt: attempt.clone(),
                model: model.clone(),
                class: device.class.clone(),
                payable: Usage::default(),
                at: self.clock.utc(),
            })
            .await;
            self.orders.recorded(attempt);
        }
    }

    /// Posts what is `believed` of a block until it is on the disk or refused.
    async fn post(
        &self,
        said: &Block,
        believed: &Block,
        untruths: &[Untruth],
    ) -> Result<Posted, LedgerError> {
        let reason = untruths.first().map(|untruth| {
            let (tenant, request) = (&untruth.caller.tenant, &untruth.attempt.request);
            format!("{} ({request} of {tenant}), {} in all", untruth.what, untruths.len())
        });
        let act = match reason {
            None => Act::from(believed.clone()),
            Some(reason) => {
                let (reported, accepted) = (said.clone(), believed.clone());
                Act::from(PartiallyRejectedBlock { reported, accepted, reason })
            }
        };
        let mut gaps = 0;
        submit::submit(&self.ledger, act, |error| match error {
            LedgerError::Refused { refusal: BlockRefusal::Gap { .. }, .. }
                if gaps < MAX_GAP_RETRIES =>
            {
                // While the disk refuses, the block before this one is itself retried later.
                gaps += u32::from(self.ledger.health() == Health::Healthy);
                Some(submit::BUSY_WAIT)
            }
            error => submit::while_unavailable(error),
        })
        .await
    }

    /// Records that a block is refused for good, and acknowledges it.
    async fn pass_over(
        &self,
        online: &Online,
        epoch: WorkerEpoch,
        ack: JournalAck,
        reason: String,
    ) -> Result<JournalAck, UpstreamError> {
        let worker = &online.name;
        tracing::error!(%worker, %epoch, block = ack.block, reason, "block refused and passed over");
        online.distrust();
        let refused = RefusedBlock {
            worker: worker.clone(),
            epoch,
            number: ack.block,
            reason,
            at: self.clock.utc(),
        };
        match submit::submit(&self.ledger, refused, submit::while_unavailable).await {
            Ok(_) => Ok(ack),
            Err(_) => {
                Err(UpstreamError::Lied("a block that can be neither posted nor passed over"))
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
            self.orders.recorded(attempt);
        }
        if block.parts().last_of_epoch {
            self.orders.closed(block.parts().epoch);
            self.close_epoch(block.parts().epoch).await;
        }
    }

    /// Attempts that ended with their worker, and of which no task of ours
    /// will say who pays: nobody does. A task that runs says it when it hears
    /// of the end; one that has just ended may be saying it.
    async fn close_epoch(&self, epoch: WorkerEpoch) {
        let open = self.read("open attempts", move |reader| reader.open_attempts(epoch)).await;
        for attempt in open.into_iter().flatten() {
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

    /// Says of what an earlier gateway left open that nobody pays for it: a
    /// task of its own was to say it, and had not when the gateway was killed.
    pub(super) async fn close_what_was_left(&self) {
        let ended = self.read("ended epochs", LedgerReader::lately_ended).await;
        for epoch in ended.into_iter().flatten() {
            self.close_epoch(epoch).await;
        }
    }

    /// Enters what a tenant pays at most for an attempt that ended by our
    /// fault. It comes to an end with the ledger, or, where the ledger does not
    /// take it, some time after this gateway is to end: a disk that stays full
    /// must not keep the process.
    pub(crate) async fn fault(&self, cap: FaultCap) {
        let mut until = None;
        let mut is_final = || {
            // The time runs from the first error after this gateway began to stop.
            self.stopping.is_cancelled()
                && Instant::now() >= *until.get_or_insert(Instant::now() + LAST_CAPS)
        };
        let capped = submit::submit(&self.ledger, cap.clone(), |error| {
            submit::while_unavailable(error).filter(|_| !is_final())
        })
        .await;
        match capped {
            Ok(_) => self.in_flight.recorded(&cap.attempt),
            // The task that knew more has already said what is paid.
            Err(LedgerError::AlreadySettled) if cap.payable == Usage::default() => {}
            Err(error) => {
                let request = &cap.attempt.request;
                tracing::error!(%request, %error, "ledger did not take a fault cap; the attempt stays charged as its worker reported it");
            }
        }
    }
}

impl std::fmt::Debug for Books {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Books").field("in_flight", &self.in_flight.len()).finish_non_exhaustive()
    }
}
