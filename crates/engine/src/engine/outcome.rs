//! Results of a finished step for single choices.

use tollgate_domain::SequenceId;

use crate::sample::SampledToken;

/// The result of a step for one choice.
pub(super) struct Outcome {
    pub(super) request: SequenceId,
    pub(super) sequence: SequenceId,
    pub(super) choice: u32,
    pub(super) event: ChoiceEvent,
}

/// The event of a step for one choice.
pub(super) enum ChoiceEvent {
    /// All log-probabilities of the prompt are complete. The value is the index of the
    /// prompt.
    PromptRead(usize),
    /// A sampled token. The flag is true for an end token.
    Token(SampledToken, bool),
    /// The prompt is read and the request asked for no token.
    NothingWanted,
    /// The answer exceeds the bounds of its grammar, so no mask exists for its next token.
    Exceeded,
    /// No token could be sampled: no logit was above minus infinity.
    Broken,
}
