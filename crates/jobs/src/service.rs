//! The way from the dispatcher to the workers and to the ledger, as a trait: serving
//! stands behind it in the product, and a played worker in tests.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tollgate_domain::{Caller, ModelName, RequestId, TenantId};

use crate::batch::{Endpoint, TryUsage};
use crate::quota::ScopedQuotas;

/// A future of the service.
pub type ServiceFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The place of a line on a worker. A drop lets another line run.
pub struct LinePlace(Box<dyn Send + Sync>);

impl LinePlace {
    /// Makes a place that drops `guard`.
    pub(crate) fn new(guard: impl Send + Sync + 'static) -> Self {
        Self(Box::new(guard))
    }

    /// Gives the place back.
    pub fn give_back(self) {
        drop(self.0);
    }
}

impl std::fmt::Debug for LinePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LinePlace")
    }
}

/// One try of a line.
#[derive(Debug)]
pub struct LineRequest {
    /// The request id of the try.
    pub request: RequestId,
    /// The tenant and the key that made the batch.
    pub caller: Caller,
    /// The endpoint.
    pub endpoint: Endpoint,
    /// The body of the request, as JSON.
    pub body: Arc<str>,
    /// The place on a worker. The service gives it back when the worker has done its work, and
    /// before the work is in the ledger. It goes back with the outcome at the latest.
    pub place: Option<LinePlace>,
    /// Cancelled when the answer is not wanted any more. A try on a worker then ends
    /// within a step and is paid for what was done.
    pub cancel: CancellationToken,
}

/// The outcome of a try.
///
/// A try is one admission and at most one placement. Where this says that nothing ran, no
/// worker has computed anything and no bill names the request id.
#[derive(Clone, Debug, PartialEq)]
pub enum TryOutcome {
    /// The line has its answer, of any status. Status 200 goes to the output file.
    Answered(LineAnswer),
    /// Nothing ran: the line waits and runs again under a new request id.
    NotPlaced(Waiting),
    /// Nothing ran: what other requests hold of a limit leaves no room for the line. Any of
    /// them may make room when it ends.
    HeldBack {
        /// A short word for clients, such as `cap_held`.
        reason: &'static str,
    },
    /// Admission knows the request id already: the next number is taken.
    IdKnown,
    /// A worker refused the request before it ran anything.
    RefusedByWorker(Waiting),
    /// The try may have run on a worker, and its answer is lost.
    Lost,
    /// The line was cancelled.
    Cancelled {
        /// True if the try ran on a worker: what was done is paid.
        is_paid: bool,
        /// The work that was done.
        usage: TryUsage,
    },
}

/// The answer of a line.
#[derive(Clone, Debug, PartialEq)]
pub struct LineAnswer {
    /// The status code of the same request over HTTP.
    pub status: u16,
    /// The body of the response, as JSON on one line.
    pub body: String,
    /// True if the try ran on a worker and is paid.
    pub is_paid: bool,
    /// The work that was done.
    pub usage: TryUsage,
    /// The model that the line names, if there is such a model.
    pub model: Option<ModelName>,
}

/// The reason why a line waits, and for how long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// A short word for clients: `no_worker`, `cap_spent`, `overloaded`, ...
    pub reason: &'static str,
    /// Time after which the line may be tried again.
    pub retry_after: Duration,
    /// True if the whole batch waits, so that the tenant's next batch may run.
    pub holds_batch: bool,
}

/// The state of the caller that made a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CallerState {
    /// The caller's batches run. An expired or rotated key changes nothing.
    Active,
    /// The key was revoked.
    KeyRevoked,
    /// The tenant is not configured.
    TenantGone,
    /// This gateway knows the tenant or the key not yet, or not any more, and another one that
    /// shares the batch may know both: the batch is left alone.
    Unknown,
}

/// A try that needs its fault cap in the ledger. A try is placed at most once, so that the
/// number of its attempt is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapRequest {
    /// The tenant and the key.
    pub caller: Caller,
    /// The request id of the try.
    pub request: RequestId,
    /// The model that the line names.
    pub model: ModelName,
}

/// A failure of a line that the dispatcher finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineFailure {
    /// The try took longer than a try may.
    Late(Duration),
    /// Each of several tries lost its worker.
    WorkersLost,
}

/// The text of a failure, as the same request over HTTP would get it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailureReply {
    /// The status code.
    pub status: u16,
    /// The body, as JSON on one line.
    pub body: String,
}

/// The service that runs lines.
pub trait LineService: Send + Sync + 'static {
    /// Runs one try of a line to its outcome. The try is placed at most once: a second
    /// placement would need a second request id. A caller that drops the
    /// future puts a cap on the try.
    fn run(&self, line: LineRequest) -> ServiceFuture<TryOutcome>;

    /// Puts a fault cap of zero on a try into the ledger. Returns true when the ledger
    /// has the cap, and false if it cannot be had now.
    fn cap(&self, cap: CapRequest) -> ServiceFuture<bool>;

    /// Returns the answer of a line that fails.
    fn failure(&self, failure: LineFailure) -> FailureReply;

    /// Returns the state of a caller.
    fn caller(&self, caller: &Caller) -> CallerState;

    /// Returns the quotas of a tenant, narrowest first; empty for an unknown tenant.
    fn quotas(&self, tenant: &TenantId) -> Vec<ScopedQuotas>;

    /// Returns the number of lines that may be on workers at once, over all tenants.
    fn capacity(&self) -> usize;
}
