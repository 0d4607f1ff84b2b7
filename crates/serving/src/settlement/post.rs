//! Writes to the ledger: blocks, skipped blocks, and corrections. Each write is
//! repeated while the ledger is busy or its disk refuses.

use std::time::Duration;

use tokio::time::{Instant, timeout};
use tollgate_domain::block::FinishedAttempt;
use tollgate_domain::{Block, BlockParts, FinishReason, Usage, WorkerEpoch};
use tollgate_ledger::{
    Act, BlockRefusal, FaultCap, LedgerError, LedgerReader, PartiallyRejectedBlock, Posted,
    RefusedBlock, SpendRow,
};
use tollgate_wire::v1::JournalAck;

use super::{BlockOutcome, Settlement};
use crate::in_flight::Stage;
use crate::limits::BackfilledSpend;
use crate::orders::InvalidRecord;
use crate::submit;
use crate::worker_identity::{WorkerError, WorkerIdentity};

/// Retries of a block that seems to come too early: the block before it may be
/// on its way, or wait for the disk. Together they are longer than
/// [`submit::STORAGE_WAIT`].
const MAX_GAP_RETRIES: u32 = 200;
/// Time that the ledger is asked to take a cap while the gateway ends.
const LAST_CAPS: Duration = Duration::from_secs(10);
/// Time that the cap of a request that has just ended may take to arrive.
const CAP_TIMEOUT: Duration = Duration::from_secs(2);
/// Invalid records of one block that are logged one by one.
const MOST_LOGGED: usize = 8;

/// Returns true if `maker` is one of the gateways with these numbers.
fn is_in(numbers: &[u32], maker: Option<u32>) -> bool {
    maker.is_some_and(|maker| numbers.contains(&maker))
}

impl Settlement {
    /// Posts the accepted part of a block until it is on the disk or refused.
    pub(super) async fn post_block(
        &self,
        reported: &Block,
        accepted: &Block,
        invalid: &[InvalidRecord],
    ) -> Result<Posted, LedgerError> {
        // The ledger keeps one reason for a block; the log has all of them.
        let reason = invalid.first().map(|record| {
            let (tenant, request) = (&record.caller.tenant, &record.attempt.request);
            format!("{} ({request} of {tenant}), {} in all", record.what, invalid.len())
        });
        let act = match reason {
            None => Act::from(accepted.clone()),
            Some(reason) => {
                let (reported, accepted) = (reported.clone(), accepted.clone());
                Act::from(PartiallyRejectedBlock { reported, accepted, reason })
            }
        };
        let mut gaps = 0;
        submit::submit(&self.ledger, act, |error| match error {
            LedgerError::Refused { refusal: BlockRefusal::Gap { .. }, .. }
                if gaps < MAX_GAP_RETRIES =>
            {
                // While the disk refuses, the block before this one is itself retried later.
                gaps += u32::from(self.can_record());
                Some(submit::BUSY_WAIT)
            }
            error => submit::while_unavailable(error),
        })
        .await
    }

    /// Records that a block is refused for good, and acknowledges the block.
    pub(super) async fn skip(
        &self,
        worker: &WorkerIdentity,
        epoch: WorkerEpoch,
        ack: JournalAck,
        reason: String,
    ) -> Result<JournalAck, WorkerError> {
        tracing::error!(worker = %worker.name, %epoch, block = ack.block, reason, "worker sent an invalid block; the block is skipped and its time is loss");
        worker.distrust_record_of(epoch);
        let refused = RefusedBlock {
            worker: worker.name.clone(),
            epoch,
            number: ack.block,
            reason,
            at: self.clock.utc(),
        };
        match submit::submit(&self.ledger, refused, submit::while_unavailable).await {
            Ok(_) => {
                self.books.count(BlockOutcome::Skipped);
                Ok(ack)
            }
            // The disk is retried for ever, so the ledger refuses the block itself.
            Err(_) => {
                Err(WorkerError::InvalidReport("a block that can be neither posted nor skipped"))
            }
        }
    }

    /// Logs the invalid records of a block and withdraws the trust in its worker, if the
    /// block is of the worker's present epoch.
    pub(super) fn report_invalid(
        &self,
        worker: &WorkerIdentity,
        reported: &Block,
        invalid: &[InvalidRecord],
    ) {
        let (name, BlockParts { epoch, number: block, .. }) = (&worker.name, reported.parts());
        for record in invalid.iter().take(MOST_LOGGED) {
            let InvalidRecord { caller, attempt, tier: _, what, excused, voids: _ } = record;
            let (tenant, request, attempt) = (&caller.tenant, &attempt.request, attempt.attempt);
            if *excused {
                tracing::warn!(worker = %name, %epoch, block, %tenant, %request, attempt, what, "record cannot be priced; it is not billed");
            } else {
                tracing::error!(worker = %name, %epoch, block, %tenant, %request, attempt, what, "worker journalled an invalid record; it is not billed");
            }
        }
        if invalid.len() > MOST_LOGGED {
            tracing::error!(worker = %name, %epoch, block, invalid = invalid.len(), "block has more invalid records than are logged");
        }
        if invalid.iter().any(|record| !record.excused) {
            worker.distrust_record_of(*epoch);
        }
    }

    /// Caps attempts with false figures at nothing, whatever was or will be accepted of
    /// them.
    pub(super) async fn void_attempts(
        &self,
        reported: &Block,
        invalid: impl Iterator<Item = &InvalidRecord>,
    ) {
        let BlockParts { model, device, .. } = reported.parts();
        for record in invalid {
            let InvalidRecord { caller, attempt, tier, .. } = record;
            self.cap_fault(FaultCap {
                caller: caller.clone(),
                attempt: attempt.clone(),
                model: model.clone(),
                class: device.class.clone(),
                payable: Usage::default(),
                at: self.clock.utc(),
                tier: *tier,
            })
            .await;
            // No later record of the attempt can be billed, so the order is done.
            self.orders.recorded(attempt);
        }
    }

    /// Settles orphaned attempts: attempts that ended and that no task of this
    /// gateway owns, because an earlier gateway placed them. An attempt that its
    /// gateway lost pays nothing, since it is unknown what reached the client. The
    /// spending of the others was not in the ledger when the caps were filled at
    /// the start, and is added now.
    pub(super) async fn settle_orphans(&self, block: &Block, posted: Posted) {
        let BlockParts { model, device, finished, .. } = block.parts();
        let mut backfilled = Vec::new();
        for ended in finished {
            let FinishedAttempt { caller, attempt, usage, reason, finished, tier, .. } = ended;
            // Each gateway settles its own requests; those of one that is gone are settled when it
            // starts again, or is retired.
            if self.number.is_some() && attempt.request.gateway() != self.number {
                continue;
            }
            // The request's own task settles it.
            if self.in_flight.contains(&attempt.request) {
                continue;
            }
            if *reason == FinishReason::Fault {
                self.cap_fault(FaultCap {
                    caller: caller.clone(),
                    attempt: attempt.clone(),
                    model: model.clone(),
                    class: device.class.clone(),
                    payable: Usage::default(),
                    at: *finished,
                    tier: *tier,
                })
                .await;
            // An attempt of this gateway that is no longer in flight was settled when
            // its task ended, so only attempts from before the start are added.
            } else if posted == Posted::New && *finished < self.started {
                let row = SpendRow {
                    caller: caller.clone(),
                    model: model.clone(),
                    class: device.class.clone(),
                    reference: usage.reference,
                };
                let (day, used) = (finished.day(), usage.priced());
                backfilled.push(BackfilledSpend { day, row, tier: *tier, used });
            }
        }
        self.limits.backfill(&backfilled);
    }

    /// Notes that the ends of requests in a block are in the ledger.
    pub(super) fn finish_requests(&self, block: &Block) {
        for FinishedAttempt { attempt, .. } in &block.parts().finished {
            self.in_flight.recorded(attempt);
            self.orders.recorded(attempt);
        }
    }

    /// Updates requests and orders after a block is on the disk.
    pub(super) async fn committed(&self, block: &Block) {
        self.orders.compared(block.parts().epoch, block.parts().number);
        self.finish_requests(block);
        if block.parts().last_of_epoch {
            self.end_epoch(block.parts().epoch).await;
        }
    }

    /// Updates orders and attempts after the last block of an epoch.
    pub(super) async fn end_epoch(&self, epoch: WorkerEpoch) {
        self.orders.epoch_closed(epoch);
        let others = self.other_gateways().await;
        // Without an answer nobody knows which gateways run. Each closes its own.
        let is_ours = |maker| others.as_ref().map_or(maker == self.number, |it| !is_in(it, maker));
        self.close_epoch(epoch, is_ours).await;
    }

    /// Returns the numbers of the other gateways that run and share the ledger.
    async fn other_gateways(&self) -> Option<Vec<u32>> {
        if self.number.is_none() {
            return Some(Vec::new());
        }
        let running = self.read("gateways", LedgerReader::live_gateways).await;
        running.map(|running| running.into_iter().filter(|it| Some(*it) != self.number).collect())
    }

    /// Voids attempts that ended with their worker and that no running task will
    /// settle, of the gateways that `is_ours` selects by number.
    pub(super) async fn close_epoch(
        &self,
        epoch: WorkerEpoch,
        is_ours: impl Fn(Option<u32>) -> bool,
    ) {
        let open = self.read("open attempts", move |reader| reader.open_attempts(epoch)).await;
        for attempt in open.into_iter().flatten() {
            if !is_ours(attempt.attempt.request.gateway()) {
                continue;
            }
            let stage = self.in_flight.stage(&attempt.caller.tenant, &attempt.attempt.request);
            if let Some(mut stage) = stage {
                // The task settles the attempt itself when it hears of the worker's end.
                if *stage.borrow() == Stage::Running {
                    continue;
                }
                // The task has just ended and its cap may be on the way. After the
                // timeout, or if the request is forgotten meanwhile, no cap comes.
                let _ =
                    timeout(CAP_TIMEOUT, stage.wait_for(|stage| *stage == Stage::Recorded)).await;
            }
            self.cap_fault(FaultCap {
                caller: attempt.caller,
                attempt: attempt.attempt,
                model: attempt.model,
                class: attempt.class,
                payable: Usage::default(),
                at: self.clock.utc(),
                tier: attempt.tier,
            })
            .await;
        }
    }

    /// Voids the attempts that gateways left open which do not run any more: they were killed
    /// before a task of their own could settle them.
    pub async fn close_left_open(&self) {
        // A gateway that runs knows better what its tenants pay: its tasks may be about to settle.
        let Some(others) = self.other_gateways().await else { return };
        let is_gone = |maker| maker != self.number && !is_in(&others, maker);
        let ended = self.read("ended epochs", LedgerReader::lately_ended).await;
        for epoch in ended.into_iter().flatten() {
            self.close_epoch(epoch, |maker| self.number.is_none() || is_gone(maker)).await;
        }
        // It is unknown what reached their clients.
        let faults = self.read("faults without a cap", LedgerReader::uncapped_faults).await;
        for cap in faults.into_iter().flatten() {
            if is_gone(cap.attempt.request.gateway()) {
                self.cap_fault(cap).await;
            }
        }
    }

    /// Posts the most that a tenant pays for an attempt that ended by a fault of
    /// the platform. Returns when the ledger has the cap, or, if the ledger does
    /// not take it, some time after this gateway began to stop: a disk that stays
    /// full must not keep the process alive.
    #[expect(
        clippy::disallowed_methods,
        reason = "the retries end at a time on the runtime's clock"
    )]
    pub async fn cap_fault(&self, cap: FaultCap) {
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
            // The task that knew more has already posted what is paid.
            Err(LedgerError::AlreadySettled) if cap.payable == Usage::default() => {}
            Err(error) => {
                let request = &cap.attempt.request;
                tracing::error!(%request, %error, "ledger did not take a fault cap; the attempt stays charged as its worker reported it");
            }
        }
    }
}
