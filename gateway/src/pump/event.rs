//! What a running request tells whoever waits for it, in our own words: the
//! wire's messages are checked once, where they arrive.

use tollgate_domain::{DeviceClass, DeviceNanos, StopReason, TextDelta, TokenLogprob, Usage};

use crate::path::Path;
use crate::reply::ApiError;

/// One thing that happened to a request. A sequence of them ends with exactly
/// one [`Event::Finished`] or [`Event::Failed`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// Text and tokens of one choice.
    Delta(TextDelta),
    /// Log-probabilities of a prompt's tokens after its first.
    PromptLogprobs { prompt: u32, tokens: Vec<TokenLogprob> },
    /// A choice has all its text.
    ChoiceFinished { choice: u32, reason: StopReason },
    /// It was placed on another worker: forget what was told so far.
    Restarted,
    /// All is told and measured.
    Finished(Box<Receipt>),
    /// It ended badly.
    Failed(Failure),
}

/// How a request ended badly.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Failure {
    /// What the client hears.
    pub(crate) error: ApiError,
    /// Whether the tenant pays for what was done all the same.
    pub(crate) is_charged: bool,
}

impl Failure {
    /// Of a request whose task panicked; what it had done is not known.
    pub(crate) const UNKNOWN: Self = Self { error: ApiError::Internal, is_charged: true };
}

impl From<Failure> for ApiError {
    fn from(failure: Failure) -> Self {
        failure.error
    }
}

/// What a finished request cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Receipt {
    pub(crate) usage: Usage,
    /// Where its time went.
    pub(crate) path: Path,
    /// The class of device whose time it is.
    pub(crate) class: DeviceClass,
    /// What admission held for it, reference cost.
    pub(crate) reserved: DeviceNanos,
}
