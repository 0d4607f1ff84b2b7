//! The acts that the ledger's writer does, and the answer to each act. An act is
//! safe to submit again: the ledger recognises what it already holds.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_channel::oneshot;
use serde_json::Value;
use tollgate_domain::{
    Attempt, Block, Caller, DeviceClass, ModelName, PlanName, TenantId, Tier, Usage, UtcTime,
    WorkerEpoch, WorkerName,
};

use crate::LedgerError;

/// An act for the ledger's writer. Clones share the contents of large acts.
#[derive(Clone, Debug)]
pub enum Act {
    /// Posts a block as its worker reported it. Fails with
    /// [`LedgerError::Refused`] where the block contradicts the ledger.
    Post(Arc<Block>),
    /// Posts the accepted part of a block. A block that comes again is
    /// recognised by its reported form. Fails as [`Act::Post`].
    PostPartly(Arc<PartiallyRejectedBlock>),
    /// Caps what a tenant pays for an attempt that ended by our fault. The
    /// excess goes to `platform.loss`, including the excess of later blocks.
    /// Fails with [`LedgerError::AlreadySettled`] where another cap stands.
    CapFault(Box<FaultCap>),
    /// Records that a block is refused for good, so that the blocks after it can
    /// be posted. Fails with [`crate::BlockRefusal::Identity`] where the epoch
    /// belongs to another worker. Raising the alarm is the caller's task.
    Skip(Box<RefusedBlock>),
    /// Records what an admin did. An action of a known id is recorded only once.
    Record(Box<AdminAction>),
    /// Keeps and records the plans that changed. Statements use them.
    PutPlansInForce(Box<PlansInForce>),
    /// Signs all records now and copies the write-ahead log into the database
    /// file, as at a stop.
    Sign,
}

/// The result of an act that may come more than once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Posted {
    /// The act has just entered the ledger.
    New,
    /// The ledger already held the act, the same in every field.
    Already,
}

/// A submitted act: a future of its result.
#[must_use = "the result says whether the act is on the disk"]
#[derive(Debug)]
pub struct Submitted(oneshot::Receiver<Result<Posted, LedgerError>>);

impl Submitted {
    pub(crate) fn new(answer: oneshot::Receiver<Result<Posted, LedgerError>>) -> Self {
        Self(answer)
    }
}

impl Future for Submitted {
    type Output = Result<Posted, LedgerError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.0).poll(context);
        // The writer drops the sender only when it stops.
        answer.map(|answer| answer.unwrap_or(Err(LedgerError::Closed)))
    }
}

/// A block of which the gateway accepts only a part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartiallyRejectedBlock {
    /// The block as the worker reported it.
    pub reported: Block,
    /// The block as it is posted: the same span of time, with the rejected
    /// shares in `platform.loss`.
    pub accepted: Block,
    /// Reason of the rejection, for people.
    pub reason: String,
}

/// The most that a tenant pays for an attempt that ended by our fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultCap {
    /// The payer.
    pub caller: Caller,
    /// The attempt that failed.
    pub attempt: Attempt,
    /// The model on which the attempt was placed.
    pub model: ModelName,
    /// The device class on which the attempt was placed.
    pub class: DeviceClass,
    /// Usage that reached the client, up to the last token sent. All zero where
    /// no token reached the client, and where the attempt is retried.
    pub payable: Usage,
    /// The time of the failure; its day is charged.
    pub at: UtcTime,
    /// The tier of the request.
    pub tier: Tier,
}

/// A block that cannot be posted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusedBlock {
    /// The worker with the block in its journal.
    pub worker: WorkerName,
    /// The epoch that the block names.
    pub epoch: WorkerEpoch,
    /// The block's number within the epoch.
    pub number: u64,
    /// Reason of the refusal; the first 500 characters are kept.
    pub reason: String,
    /// The time of the refusal.
    pub at: UtcTime,
}

/// An act of an admin, or of the gateway on an admin's behalf.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminAction {
    /// Permanent id of the action: an action of a known id is not recorded again.
    pub id: String,
    /// The time of the action.
    pub at: UtcTime,
    /// The kind of action: `key.created`, `config.loaded`, ...
    pub operation: String,
    /// The actor as far as it is known: `uid 0`, `admin key`.
    pub actor: String,
    /// The tenant and the key that the action concerns, if there are any.
    pub user: Option<(String, Option<String>)>,
    /// Further facts as JSON.
    pub detail: Value,
}

/// The plans that are in force from the start of a gateway on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlansInForce {
    /// The record that is written if a plan changed. The ledger fills its
    /// detail with the changes.
    pub action: AdminAction,
    /// The plan of each tenant that has one.
    pub plans: Vec<(TenantId, PlanName)>,
}

impl From<Block> for Act {
    fn from(block: Block) -> Self {
        // Shared, so that a retry does not copy the block.
        Self::Post(Arc::new(block))
    }
}

impl From<PartiallyRejectedBlock> for Act {
    fn from(partly: PartiallyRejectedBlock) -> Self {
        Self::PostPartly(Arc::new(partly))
    }
}

impl From<FaultCap> for Act {
    fn from(cap: FaultCap) -> Self {
        // Boxed, as the other rare and large acts, so that each place in the queue stays small.
        Self::CapFault(Box::new(cap))
    }
}

impl From<RefusedBlock> for Act {
    fn from(refused: RefusedBlock) -> Self {
        Self::Skip(Box::new(refused))
    }
}

impl From<AdminAction> for Act {
    fn from(action: AdminAction) -> Self {
        Self::Record(Box::new(action))
    }
}

impl From<PlansInForce> for Act {
    fn from(plans: PlansInForce) -> Self {
        Self::PutPlansInForce(Box::new(plans))
    }
}
