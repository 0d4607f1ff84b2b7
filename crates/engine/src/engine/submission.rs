//! Submissions to the engine, and the results that a sink receives.

use std::time::Duration;

use tollgate_domain::{
    Caller, DeviceNanos, FinishReason, PoolName, RequestId, Tier, Transfers, Usage,
};

use crate::sample::{SamplingParams, TokenLogprobs};

/// One attempt at one request.
pub struct Submission {
    /// Id of the request.
    pub request: RequestId,
    /// Number of the attempt. Together with the request's id it names the run that is
    /// cancelled and billed.
    pub attempt: u32,
    /// Tenant and key that pay.
    pub caller: Caller,
    /// Pool that owns the share of the device. Without a pool the tenant owns it.
    pub pool: Option<PoolName>,
    /// Class of service.
    pub tier: Tier,
    /// Weight of the share, above 0: that of the pool or of the tenant.
    pub weight: f64,
    /// Token ids of each prompt. No prompt is empty.
    pub prompts: Vec<Vec<u32>>,
    /// n: choices for each prompt. Choice i of a prompt has the index prompt * n + i.
    pub choices: u32,
    /// Largest number of tokens to generate for each choice. 0 only reads the prompt.
    pub max_tokens: u32,
    /// Parameters of sampling.
    pub sampling: SamplingParams,
    /// Largest reference cost of the request. The request ends with
    /// [`FinishReason::Length`] before the step that would exceed it.
    pub budget: Option<DeviceNanos>,
    /// Longest wait before the request starts. After that the request is refused.
    pub queue_deadline: Duration,
    /// True if log-probabilities of the prompts' tokens are wanted.
    pub echo_logprobs: bool,
    /// Receiver of the results.
    pub sink: Box<dyn TokenSink>,
}

/// The id of a request and the number of the attempt.
pub(super) type RequestKey = (RequestId, u32);

/// Receiver of the results of one submission. Each choice gets its tokens in order and then
/// `finished`. `done` comes once at the very end, or alone with a refusal.
///
/// The engine's thread calls the sink between steps, so no method may block. The engine
/// drops the sink after `done`. A sink that is dropped without `done` means that the engine
/// itself failed.
pub trait TokenSink: Send {
    /// Receives the log-probabilities of a prompt, once before its first token, if they
    /// were requested. The first token of a prompt has no entry, because no token comes
    /// before it: entry 0 belongs to token 1 of the prompt.
    fn prompt_logprobs(&mut self, prompt: u32, logprobs: Vec<PromptLogprob>);

    /// Receives one token of a choice. Returning [`Flow::Stop`] ends the choice with
    /// [`FinishReason::Stop`].
    fn token(&mut self, choice: u32, token: GeneratedToken) -> Flow;

    /// Receives the end of a choice. No more tokens of the choice follow.
    fn finished(&mut self, choice: u32, reason: FinishReason, completion_tokens: u32);

    /// Receives the end of the request. Nothing follows.
    fn done(&mut self, outcome: RequestOutcome);
}

/// A generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedToken {
    /// Id of the token.
    pub token: u32,
    /// True for an end token, which is counted but has no text.
    pub end: bool,
    /// Log-probabilities, if they were requested.
    pub logprobs: Option<TokenLogprobs>,
    /// Attributed device time of the whole request up to this step, this step included.
    pub attributed: DeviceNanos,
    /// Reference cost of the whole request up to this step, this step included.
    pub reference: DeviceNanos,
}

/// The probability of a token of the prompt, given the tokens before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// Id of the token.
    pub token: u32,
    /// Log-probability of the token, and the most likely tokens at its position.
    pub logprobs: TokenLogprobs,
}

/// The sink's answer to a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// The choice continues.
    Continue,
    /// The text contains a stop string; the choice ends.
    Stop,
}

/// The outcome of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// The request ran, and every choice has a finish reason.
    Finished {
        /// Work that the device did for the request.
        usage: Usage,
        /// Time spent in each stage.
        stages: Stages,
    },
    /// The request did not run. Nothing is charged.
    Refused(Refusal),
}

/// The refusal of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Kind of the refusal.
    pub reason: RefusedReason,
    /// Time after which a retry may succeed, if known.
    pub retry_after: Option<Duration>,
    /// Sentence for the client.
    pub message: String,
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedReason {
    /// The queue is full, and the request's own queue is the longest.
    Overloaded,
    /// The request waited past its deadline, or would have to.
    Deadline,
    /// The worker accepts no new requests.
    Draining,
    /// The request does not fit the model.
    Invalid,
    /// The budget does not cover the prompt and the first token of each choice.
    Budget,
    /// The form of the answer cannot be enforced.
    Grammar,
}

/// The reason for a cancellation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// The client disconnected or cancelled the request.
    Client,
    /// The deadline of the whole request passed.
    Deadline,
    /// The gateway disappeared. The tenant is not at fault.
    Fault,
}

impl From<CancelReason> for FinishReason {
    fn from(reason: CancelReason) -> Self {
        match reason {
            CancelReason::Client => Self::Cancelled,
            CancelReason::Deadline => Self::Deadline,
            CancelReason::Fault => Self::Fault,
        }
    }
}

/// Time in each stage of a request, in nanoseconds of host time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// From arrival at the engine to the first place in the batch.
    pub queue_ns: u64,
    /// From there to the first token, or to the end if no token came.
    pub prefill_ns: u64,
    /// From the first token to the end.
    pub decode_ns: u64,
    /// Transfer times between host and device, summed over the steps that the request was
    /// in, each step in full. The time is part of prefill and decode. `None` if the device
    /// is the host itself.
    pub transfers: Option<Transfers>,
}

/// The reason for which [`EngineHandle::submit`](crate::EngineHandle::submit) refused a
/// submission. The sink is dropped without a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// A bounded queue is full.
    #[error("the worker's queue is full")]
    Full {
        /// Predicted time until the requester's own waiting work is done.
        predicted: Duration,
    },
    /// The engine is finishing its work and accepts no new requests.
    #[error("the worker is draining")]
    Draining,
    /// The engine has ended.
    #[error("the worker's engine has stopped")]
    Stopped,
    /// The predicted wait exceeds the deadline.
    #[error("the predicted wait of {} ms exceeds the deadline", predicted.as_millis())]
    Deadline {
        /// Predicted wait.
        predicted: Duration,
    },
    /// The budget does not cover the prompt and the first token of each choice.
    #[error(
        "the budget of {budget} does not cover the {needed} that the prompt and a first token cost"
    )]
    Budget {
        /// Budget, as reference cost.
        budget: DeviceNanos,
        /// Least reference cost of the request.
        needed: DeviceNanos,
    },
    /// The request can never run on this engine. The text says why.
    #[error("{0}")]
    Invalid(String),
}

impl From<SubmitError> for Refusal {
    fn from(error: SubmitError) -> Self {
        let (reason, retry_after) = match &error {
            SubmitError::Full { predicted } => (RefusedReason::Overloaded, Some(*predicted)),
            SubmitError::Draining | SubmitError::Stopped => (RefusedReason::Draining, None),
            SubmitError::Deadline { predicted } => (RefusedReason::Deadline, Some(*predicted)),
            SubmitError::Budget { .. } => (RefusedReason::Budget, None),
            SubmitError::Invalid(_) => (RefusedReason::Invalid, None),
        };
        Self { reason, retry_after, message: error.to_string() }
    }
}
