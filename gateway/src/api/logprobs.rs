//! Log-probabilities in the two shapes that clients know.

use std::collections::BTreeMap;

use serde::Serialize;

use tollgate_domain::TokenLogprob;

/// What stands for a logarithm of zero: JSON has no infinity.
const IMPOSSIBLE: f32 = -9_999.0;

/// Chat's `logprobs`.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: (),
}

#[derive(Debug, PartialEq, Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: ChatTop,
    top_logprobs: Vec<ChatTop>,
}

#[derive(Debug, PartialEq, Serialize)]
struct ChatTop {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

impl ChatLogprobs {
    /// The shape of `tokens`.
    pub(super) fn of(tokens: &[TokenLogprob]) -> Self {
        let mut logprobs = Self::default();
        logprobs.push(tokens);
        logprobs
    }

    /// Adds `tokens` at the end.
    pub(super) fn push(&mut self, tokens: &[TokenLogprob]) {
        self.content.extend(tokens.iter().map(|token| ChatToken {
            token: ChatTop::of(&token.bytes, token.logprob),
            top_logprobs:
                token.top.iter().map(|(bytes, logprob)| ChatTop::of(bytes, *logprob)).collect(),
        }));
    }
}

impl ChatTop {
    fn of(bytes: &[u8], logprob: f32) -> Self {
        Self { token: text(bytes), logprob: finite(logprob), bytes: bytes.to_vec() }
    }
}

/// Completions' `logprobs`: four arrays in step.
#[derive(Debug, Default, PartialEq, Serialize)]
pub(super) struct CompletionLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    text_offset: Vec<u64>,
}

impl CompletionLogprobs {
    /// Adds `tokens`, whose text begins `offset` characters into the choice's;
    /// returns where it ends.
    pub(super) fn push(&mut self, tokens: &[TokenLogprob], mut offset: u64) -> u64 {
        for token in tokens {
            let text = text(&token.bytes);
            let length = text.chars().count() as u64;
            let top =
                token.top.iter().map(|(bytes, logprob)| (self::text(bytes), finite(*logprob)));
            self.add(text, Some(finite(token.logprob)), Some(top.collect()), offset);
            offset += length;
        }
        offset
    }

    /// Adds the first token of an echoed prompt, which follows nothing and so
    /// has no probability; returns where its text ends.
    pub(super) fn push_first(&mut self, bytes: &[u8]) -> u64 {
        let text = text(bytes);
        let length = text.chars().count() as u64;
        self.add(text, None, None, 0);
        length
    }

    fn add(
        &mut self,
        token: String,
        logprob: Option<f32>,
        top: Option<BTreeMap<String, f32>>,
        offset: u64,
    ) {
        self.tokens.push(token);
        self.token_logprobs.push(logprob);
        self.top_logprobs.push(top);
        self.text_offset.push(offset);
    }
}

/// A token's text; what is not whole characters shows as replacements, and
/// its bytes beside it say what it really is.
fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn finite(logprob: f32) -> f32 {
    if logprob.is_nan() { IMPOSSIBLE } else { logprob.clamp(IMPOSSIBLE, 0.0) }
}
