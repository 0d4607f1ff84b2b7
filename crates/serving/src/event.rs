//! Events of a running request, for the caller that waits for its answer. The
//! messages of the wire are checked once, where they arrive; these are facts.

use tollgate_domain::{DeviceClass, DeviceNanos, StopReason, TextDelta, TokenLogprob, Usage};

use crate::error::RequestError;
use crate::timings::RequestTimings;

/// One event of a request. A sequence of events ends with exactly one
/// [`Event::Finished`] or [`Event::Failed`].
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Text and tokens of one choice.
    Delta(TextDelta),
    /// Log-probabilities of a prompt's tokens after its first token.
    PromptLogprobs {
        /// Index of the prompt.
        prompt: u32,
        /// One entry for each token after the first.
        tokens: Vec<TokenLogprob>,
    },
    /// The end of one choice: all its text has been sent.
    ChoiceFinished {
        /// Index of the choice, over all prompts.
        choice: u32,
        /// The reason why the choice ended.
        reason: StopReason,
    },
    /// A new placement on another worker. Earlier events of the request are void.
    Restarted,
    /// The end of an answered request, with its figures.
    Finished(Box<Receipt>),
    /// The end of a request that failed.
    Failed(Failure),
}

/// The end of a request that failed.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    /// The reason, for the client.
    pub error: RequestError,
    /// True if the tenant pays for the work that was done.
    pub is_charged: bool,
}

impl Failure {
    /// The failure of a request after a panic of its task. The work that the task had
    /// done is unknown, so the request counts as charged.
    pub const UNKNOWN: Self = Self { error: RequestError::INTERNAL, is_charged: true };
}

impl From<Failure> for RequestError {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// The figures of an answered request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Receipt {
    /// Tokens and device time.
    pub usage: Usage,
    /// Time in each stage.
    pub timings: RequestTimings,
    /// The class of the device that answered.
    pub class: DeviceClass,
    /// Reference cost that admission held for the request.
    pub reserved: DeviceNanos,
}
