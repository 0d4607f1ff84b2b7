//! What is submitted to the engine and how it answers.

use std::time::Duration;

use tollgate_domain::{Caller, DeviceNanos, FinishReason, PoolName, RequestId, Transfers, Usage};

use crate::sample::{SamplingParams, TokenLogprobs};
use crate::schedule::Tier;

/// One attempt at one request.
pub struct Submission {
    /// The request.
    pub request: RequestId,
    /// Which placement of it; with the id it names what is cancelled and billed.
    pub attempt: u32,
    /// Who pays.
    pub caller: Caller,
    /// The pool on whose share of the device it runs; without one, it is the
    /// tenant's own.
    pub pool: Option<PoolName>,
    /// The class it runs in.
    pub tier: Tier,
    /// The weight of that share, above 0: the pool's or the tenant's.
    pub weight: f64,
    /// Token ids of each prompt, none of them empty.
    pub prompts: Vec<Vec<u32>>,
    /// n: choices for each prompt; choice index = prompt * n + i.
    pub choices: u32,
    /// Tokens generated at most, for each choice. 0 reads the prompt only.
    pub max_tokens: u32,
    /// How tokens are drawn.
    pub sampling: SamplingParams,
    /// Reference cost that the request may never exceed; it ends with
    /// [`FinishReason::Length`] before the step that would.
    pub budget: Option<DeviceNanos>,
    /// How long it may wait before it starts; refused after that.
    pub queue_deadline: Duration,
    /// Log-probabilities of the prompts' tokens too.
    pub echo_logprobs: bool,
    /// Who hears of it.
    pub sink: Box<dyn TokenSink>,
}

/// A client's request id and the number of the attempt.
pub(super) type RequestKey = (RequestId, u32);

/// Hears what becomes of one submission: for each choice its tokens in order,
/// then `finished`; `done` once at the very end, or `done` alone with a refusal.
///
/// Called on the engine's thread, between steps: it must never block. After
/// `done` it is dropped. If it is dropped without `done`, the engine itself
/// broke down.
pub trait TokenSink: Send {
    /// The prompt's own log-probabilities, once for each prompt before its
    /// first token, when they were asked for. The first token of a prompt has
    /// nothing before it and so no entry: entry 0 is the prompt's token 1.
    fn prompt_logprobs(&mut self, prompt: u32, logprobs: Vec<PromptLogprob>);

    /// One token of a choice. [`Flow::Stop`] ends that choice with
    /// [`FinishReason::Stop`].
    fn token(&mut self, choice: u32, token: GeneratedToken) -> Flow;

    /// A choice ended; no more tokens of it come.
    fn finished(&mut self, choice: u32, reason: FinishReason, completion_tokens: u32);

    /// The request ended; nothing more comes.
    fn done(&mut self, outcome: RequestOutcome);
}

/// A token as it was drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct GeneratedToken {
    /// Its id.
    pub token: u32,
    /// Whether it is an end token: counted, but no text.
    pub end: bool,
    /// Log-probabilities, when they were asked for.
    pub logprobs: Option<TokenLogprobs>,
    /// Attributed device time of the whole request up to and with this step.
    pub attributed: DeviceNanos,
    /// Reference cost of the whole request up to and with this step.
    pub reference: DeviceNanos,
}

/// How likely a token of the prompt was after those before it.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptLogprob {
    /// The prompt's token.
    pub token: u32,
    /// Its log-probability and the likeliest in its place.
    pub logprobs: TokenLogprobs,
}

/// Whether a choice goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// More, please.
    Continue,
    /// A stop string was met.
    Stop,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestOutcome {
    /// It ran, and every choice has its reason.
    Finished {
        /// What the device did for it.
        usage: Usage,
        /// Where its time went.
        stages: Stages,
    },
    /// Nothing was computed and nothing is charged.
    Refused(Refusal),
}

/// Why a request was not run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of reason.
    pub reason: RefusedReason,
    /// When it may be worth trying again, if known.
    pub retry_after: Option<Duration>,
    /// A sentence for the client.
    pub message: String,
}

/// The kinds of refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusedReason {
    /// The queue is full, and the longest line in it was its own.
    Overloaded,
    /// It waited, or would wait, past its deadline.
    Deadline,
    /// The worker takes nothing new.
    Draining,
    /// It does not fit the model.
    Invalid,
    /// Its budget does not cover the prompt and a first token of each choice.
    Budget,
}

/// Why a request is cancelled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CancelReason {
    /// The client left or cancelled.
    Client,
    /// The deadline of the whole request passed.
    Deadline,
    /// Who asked for it is gone without a word: no fault of the tenant's.
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

/// Device-side stages of a request, host time in nanoseconds: until it was
/// first scheduled, until its first token, until its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stages {
    /// From arrival at the engine to its first place in the batch.
    pub queue_ns: u64,
    /// From there to the first token (or the end, if none came).
    pub prefill_ns: u64,
    /// From the first token to the end.
    pub decode_ns: u64,
    /// What data took to the device and back in the steps that it was in, all
    /// of each: within prefill and decode. `None` where the device is the host.
    pub transfers: Option<Transfers>,
}

/// Why [`EngineHandle::submit`](crate::EngineHandle::submit) took nothing. The
/// sink is dropped unused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SubmitError {
    /// A bounded queue is full.
    #[error("the worker's queue is full")]
    Full {
        /// How long what waits of its own should take.
        predicted: Duration,
    },
    /// The engine finishes what it has and takes nothing new.
    #[error("the worker is draining")]
    Draining,
    /// The engine has ended.
    #[error("the worker's engine has stopped")]
    Stopped,
    /// The queue is so long that it would wait past its deadline.
    #[error("the predicted wait of {} ms exceeds the deadline", predicted.as_millis())]
    Deadline {
        /// The predicted wait.
        predicted: Duration,
    },
    /// The budget does not cover the prompt and a first token of each choice.
    #[error(
        "the budget of {budget} does not cover the {needed} that the prompt and a first token cost"
    )]
    Budget {
        /// What may be spent, reference cost.
        budget: DeviceNanos,
        /// What is needed at least, reference cost.
        needed: DeviceNanos,
    },
    /// It can never run here.
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
