//! Log-probabilities in the two shapes that clients know.

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use tollgate_domain::TokenLogprob;

/// The value that stands for the logarithm of zero, because JSON has no infinity.
const IMPOSSIBLE: f32 = -9_999.0;

/// The `logprobs` object of a chat choice.
#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: (),
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct ChatToken {
    #[serde(flatten)]
    token: ChatTop,
    top_logprobs: Vec<ChatTop>,
}

#[derive(Debug, PartialEq, Serialize, JsonSchema)]
struct ChatTop {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// Returns `tokens` in chat's shape.
    pub(crate) fn new(tokens: &[TokenLogprob]) -> Self {
        let token = |token: &TokenLogprob| ChatToken {
            token: ChatTop::new(&token.bytes, token.logprob),
            top_logprobs: token
                .top
                .iter()
                .map(|(bytes, logprob)| ChatTop::new(bytes, *logprob))
                .collect(),
        };
        // `refusal` is null: the API reserves it for refusals by the model.
        Self { content: tokens.iter().map(token).collect(), refusal: () }
    }
}

impl ChatTop {
    fn new(bytes: &[u8], logprob: f32) -> Self {
        Self { token: text(bytes).into_owned(), logprob: finite(logprob), bytes: bytes.to_vec() }
    }
}

/// The `logprobs` object of a completion choice: four arrays of equal length.
#[derive(Debug, Default, PartialEq, Serialize, JsonSchema)]
pub(crate) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    text_offset: Vec<u64>,
}

impl CompletionLogprobs {
    /// Appends `tokens`, with their text at character `offset` of the choice;
    /// returns the offset at which their text ends.
    pub(crate) fn push(&mut self, tokens: &[TokenLogprob], mut offset: u64) -> u64 {
        for token in tokens {
            let text = text(&token.bytes);
            // Offsets count characters, as Python strings do, and not bytes.
            let length = text.chars().count() as u64;
            let top = token
                .top
                .iter()
                .map(|(bytes, logprob)| (self::text(bytes).into_owned(), finite(*logprob)));
            self.add(text, Some(finite(token.logprob)), Some(top.collect()), offset);
            offset += length;
        }
        offset
    }

    /// Appends the first token of a repeated prompt; returns the offset at which
    /// its text ends. No token precedes this one, so it has no probability.
    pub(crate) fn push_first(&mut self, bytes: &[u8]) -> u64 {
        let text = text(bytes);
        let length = text.chars().count() as u64;
        self.add(text, None, None, 0);
        length
    }

    fn add(
        &mut self,
        token: Cow<'_, str>,
        logprob: Option<f32>,
        top: Option<BTreeMap<String, f32>>,
        offset: u64,
    ) {
        self.tokens.push(token.into_owned());
        self.token_logprobs.push(logprob);
        self.top_logprobs.push(top);
        self.text_offset.push(offset);
    }
}

/// Returns the number of characters in the text of `tokens`, as `text_offset`
/// counts them.
pub(crate) fn characters(tokens: &[TokenLogprob]) -> u64 {
    tokens.iter().map(|token| token_characters(&token.bytes)).sum()
}

/// Returns the number of characters in the text of one token.
pub(crate) fn token_characters(bytes: &[u8]) -> u64 {
    text(bytes).chars().count() as u64
}

/// Returns a token's text. Bytes that are not whole characters become
/// replacement characters; chat reports the exact bytes beside the text.
fn text(bytes: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// Returns a log-probability that JSON can hold.
fn finite(logprob: f32) -> f32 {
    // Rounding can make the logarithm of a probability slightly positive.
    if logprob.is_nan() { IMPOSSIBLE } else { logprob.clamp(IMPOSSIBLE, 0.0) }
}
