//! The identity of a connected worker: its epoch, its models, and whether the
//! gateway trusts its reports. Settlement and the workers' connections share
//! these types.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tollgate_domain::{DeviceClass, ModelName, WorkerEpoch, WorkerName};

use crate::model::ServedModel;

/// The checked announcement of a worker.
#[derive(Debug)]
pub struct WorkerIdentity {
    /// The worker's name in the config.
    pub name: WorkerName,
    /// The epoch, which a worker draws when it starts.
    pub epoch: WorkerEpoch,
    /// The class of the worker's device.
    pub class: DeviceClass,
    /// The device's name, for people.
    pub device: String,
    /// True if other gateways may use the worker, too.
    pub is_shared: bool,
    /// The models that the worker serves.
    pub models: BTreeMap<ModelName, Arc<ServedModel>>,
    /// The trust in this worker, which outlives its connections.
    pub trust: Trust,
}

/// The trust in one worker. A worker that sent an invalid report gets no more
/// requests in its epoch, whether its connection lasts or not.
#[derive(Clone, Debug)]
pub struct Trust {
    /// The last epoch in which the worker sent an invalid report.
    distrusted: Arc<Mutex<Option<WorkerEpoch>>>,
    violations: ProtocolViolations,
}

/// A count of invalid messages from all workers; clones share it.
#[derive(Clone, Debug, Default)]
pub struct ProtocolViolations(Arc<AtomicU64>);

/// The reason why a worker's connection ended or could not be made.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The worker's socket cannot be reached.
    #[error("cannot connect to the worker")]
    Connect(#[source] tollgate_wire::ConnectError),
    /// The worker refused or broke off a call.
    #[error("the worker broke off a call")]
    Call(#[source] Box<tonic::Status>),
    /// The worker did not answer in time.
    #[error("the worker did not answer in time while {0}")]
    Timeout(&'static str),
    /// The worker reported something that cannot be true.
    #[error("the worker sent an invalid report: {0}")]
    InvalidReport(&'static str),
    /// The worker's cost table is not valid.
    #[error("the worker's cost table is not valid")]
    CostTable(#[source] serde_json::Error),
    /// The worker's tokenizer or chat template is not valid.
    #[error("the worker's tokenizer or template is not valid")]
    Text(#[source] tollgate_text::TextError),
    /// A stream ended that has no end while the worker runs.
    #[error("the {0} stream ended")]
    StreamEnded(&'static str),
}

impl From<tonic::Status> for WorkerError {
    fn from(status: tonic::Status) -> Self {
        Self::Call(Box::new(status))
    }
}

impl WorkerError {
    /// True if the worker broke the protocol, rather than failed or left.
    pub(crate) fn is_violation(&self) -> bool {
        matches!(self, Self::InvalidReport(_) | Self::CostTable(_) | Self::Text(_))
    }
}

impl WorkerIdentity {
    /// True if the worker has sent no invalid report in its epoch.
    pub fn is_trusted(&self) -> bool {
        self.trust.holds(self.epoch)
    }

    /// Notes that the worker sent an invalid report.
    pub fn distrust(&self) {
        self.trust.lose(self.epoch);
    }

    /// Notes that the worker sent an invalid record of `epoch`. A record of an earlier epoch
    /// counts and costs no trust: it comes from a file, which a restart does not change.
    pub(crate) fn distrust_record_of(&self, epoch: WorkerEpoch) {
        if epoch == self.epoch {
            self.distrust();
        } else {
            self.trust.violations.add_one();
        }
    }
}

impl Trust {
    /// Makes the trust in a worker that has not reported yet.
    pub fn new(violations: ProtocolViolations) -> Self {
        Self { distrusted: Arc::default(), violations }
    }

    fn holds(&self, epoch: WorkerEpoch) -> bool {
        *self.lock() != Some(epoch)
    }

    /// Counts an invalid report of `epoch` and logs the consequence once.
    fn lose(&self, epoch: WorkerEpoch) {
        self.violations.add_one();
        if self.lock().replace(epoch) != Some(epoch) {
            tracing::error!(%epoch, "worker sent an invalid report; no requests go to the worker until it restarts");
        }
    }

    fn lock(&self) -> MutexGuard<'_, Option<WorkerEpoch>> {
        // One assignment is the only change, so poisoning is ignored.
        self.distrusted.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ProtocolViolations {
    /// Counts one more invalid message.
    pub(crate) fn add_one(&self) {
        // A count for people: no other memory depends on its order.
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the count since the start.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
