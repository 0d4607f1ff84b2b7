//! Reasons why a request was not served. A [`Refusal`] says that the request
//! may not run; a [`Fault`] says that the gateway or a worker failed. Neither
//! knows a status code: the front door turns both into its own errors.

use std::borrow::Cow;
use std::time::Duration;

use tollgate_admission::{Offence, Penalty};
use tollgate_domain::{PlanName, RequestId};

/// Returns an error with its causes, on one line.
pub fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

/// The reason why a request was not served.
#[derive(Clone, Debug, PartialEq)]
pub enum RequestError {
    /// The request may not run, or not now.
    Refused(Refusal),
    /// The gateway or a worker failed.
    Failed(Fault),
}

/// A queue of the gateway that takes no more requests for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullQueue {
    /// The queues of all workers.
    Workers,
    /// The queue of prompts that wait to be tokenized.
    Tokenizing,
    /// The memory for request bodies.
    BodyMemory,
}

/// The reason why a request may not run.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
    /// One of the caller's limits does not allow the request now, or ever.
    Limit(Box<tollgate_admission::Refusal>),
    /// The tenant has a penalty.
    Penalty {
        /// The offence that earned the penalty.
        offence: Offence,
        /// Time until the penalty is over, if nothing is added to it.
        retry_after: Duration,
    },
    /// The caller's key names a plan that the config does not define.
    PlanNotConfigured {
        /// The missing plan.
        plan: PlanName,
    },
    /// A field of the request does not fit the model.
    InvalidField {
        /// The field's name in the caller's interface.
        field: &'static str,
        /// A sentence that says what is wrong.
        message: Cow<'static, str>,
    },
    /// Prompt and answer do not fit the model's context.
    ContextLength {
        /// The name of the prompt's field in the caller's interface.
        field: &'static str,
        /// Tokens that the model takes, prompt and answer together.
        limit: u64,
        /// Tokens of the longest prompt, or those counted before counting stopped.
        prompt: u64,
        /// Tokens of answer that were asked for, if they are what does not fit.
        completion: Option<u64>,
    },
    /// A queue is full, or the wait would be too long.
    Overloaded {
        /// The queue.
        full: FullQueue,
        /// Time after which a place is expected.
        retry_after: Option<Duration>,
    },
    /// No worker serves the model now.
    NoWorker {
        /// The model.
        model: String,
    },
    /// The deadline of the whole request passed.
    DeadlineExceeded {
        /// The deadline.
        deadline: Duration,
    },
    /// The caller's key was revoked while its request ran.
    KeyRevoked,
    /// The gateway is about to stop.
    Draining,
    /// The request's idempotency key does not allow the request.
    Idempotency(IdempotencyRefusal),
}

/// The reason why an idempotency key does not allow a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IdempotencyRefusal {
    /// The key was used with another body.
    OtherBody,
    /// The first request was charged, and its answer is not kept any more.
    Charged {
        /// The first request.
        request: RequestId,
    },
    /// The first request is not settled yet.
    Unsettled {
        /// The first request.
        request: RequestId,
    },
    /// The tenant has as many keys in use as it may.
    TooManyKeys {
        /// Keys that a tenant may have in use.
        limit: u32,
    },
}

/// A failure that is not the caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A failure inside the gateway. The log has the cause.
    Internal,
    /// Usage could not be recorded, so no billable work is done.
    LedgerUnavailable,
    /// The worker was lost in the middle of an answer.
    WorkerLost {
        /// True if part of the answer went out, which the tenant pays.
        charged: bool,
    },
}

impl RequestError {
    /// The error of a request after a panic of its task.
    pub const INTERNAL: Self = Self::Failed(Fault::Internal);
}

impl Refusal {
    /// Makes the refusal of a request that is not valid for its model.
    pub(crate) fn invalid(field: &'static str, message: impl Into<Cow<'static, str>>) -> Self {
        Self::InvalidField { field, message: message.into() }
    }
}

impl From<Refusal> for RequestError {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl From<Fault> for RequestError {
    fn from(fault: Fault) -> Self {
        Self::Failed(fault)
    }
}

impl From<IdempotencyRefusal> for Refusal {
    fn from(refusal: IdempotencyRefusal) -> Self {
        Self::Idempotency(refusal)
    }
}

impl From<IdempotencyRefusal> for RequestError {
    fn from(refusal: IdempotencyRefusal) -> Self {
        Self::Refused(refusal.into())
    }
}

impl From<Box<tollgate_admission::Refusal>> for Refusal {
    fn from(refusal: Box<tollgate_admission::Refusal>) -> Self {
        Self::Limit(refusal)
    }
}

impl From<Penalty> for Refusal {
    fn from(penalty: Penalty) -> Self {
        let Penalty { offence, left } = penalty;
        Self::Penalty { offence, retry_after: left }
    }
}
