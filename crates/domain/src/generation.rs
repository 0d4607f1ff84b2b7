//! Values that describe one generation: the sampling parameters that go in, the
//! pieces of text that come out. The serving core and the API's formats share
//! these types, so that neither has to know the other.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::grammar::Grammar;

/// The parameters that decide how the next token is sampled.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits; 0 always takes the likeliest token.
    pub temperature: f32,
    /// The number of likeliest tokens to sample from; 0 means all tokens.
    pub top_k: u32,
    /// The probability mass to sample from, from 0 to 1.
    pub top_p: f32,
    /// The part of the likeliest token's probability, from 0 to 1, that a token must
    /// reach to be sampled, as vLLM defines it; 0 cuts nothing.
    pub min_p: f32,
    /// The factor that makes tokens of the prompt and of the answer less likely, as
    /// vLLM defines it; 1 changes nothing.
    pub repetition_penalty: f32,
    /// The amount subtracted from the logit of each token that has occurred.
    pub presence_penalty: f32,
    /// The amount subtracted for each time that the token has occurred.
    pub frequency_penalty: f32,
    /// The amount added to the logit of a token, by token id.
    pub logit_bias: BTreeMap<u32, f32>,
    /// The seed of the random numbers; `None` lets the worker draw one.
    pub seed: Option<u64>,
    /// The number of alternatives to report for each token; `None` reports no
    /// log-probabilities at all.
    pub top_logprobs: Option<u32>,
    /// The ids of tokens that end a choice, as the model's own end tokens do.
    pub stop_tokens: Vec<u32>,
    /// True if the model's own end tokens do not end a choice.
    pub ignores_end: bool,
    /// The form that the answer must have; `None` for free text.
    pub grammar: Option<Grammar>,
}

/// The sampling parameters of a model for requests that name none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SamplingDefaults {
    /// See [`Sampling::temperature`].
    pub temperature: f32,
    /// See [`Sampling::top_k`].
    pub top_k: u32,
    /// See [`Sampling::top_p`].
    pub top_p: f32,
    /// See [`Sampling::min_p`].
    pub min_p: f32,
    /// See [`Sampling::repetition_penalty`].
    pub repetition_penalty: f32,
}

/// The values of `repetition_penalty` that are accepted.
pub const REPETITION_PENALTIES: RangeInclusive<f64> = 0.01..=10.0;

impl Default for SamplingDefaults {
    /// Returns the defaults of OpenAI's API.
    fn default() -> Self {
        Self { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// The text and tokens that one choice gained since its previous delta.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TextDelta {
    /// The index of the choice, over all prompts of the request.
    pub choice: u32,
    /// Whole characters only; the bytes of an incomplete one come later.
    pub text: String,
    /// The number of tokens since the choice's previous delta. The last one may have no text yet.
    pub tokens: u32,
    /// The bytes of the text that came with each token, in the order of the text. Empty if
    /// they are not known; the text of one token needs none.
    pub token_bytes: Vec<u32>,
    /// One entry for each token if the request asked for log-probabilities.
    pub logprobs: Vec<TokenLogprob>,
}

impl TextDelta {
    /// Returns the text in parts, each with the number of its tokens: one part for each
    /// token where its bytes are known, else the whole text. The parts join to the text.
    pub fn parts(&self) -> Vec<(&str, u32)> {
        let mut parts = Vec::with_capacity(self.token_bytes.len() + 1);
        let mut rest = self.text.as_str();
        for &bytes in &self.token_bytes {
            // The figures come from a worker, so they may not fit the text.
            let Some((part, next)) = rest.split_at_checked(bytes as usize) else {
                return vec![(&self.text, self.tokens)];
            };
            parts.push((part, 1));
            rest = next;
        }
        if parts.len() != self.tokens as usize {
            return vec![(&self.text, self.tokens)];
        }
        // Text that was held back has come after the last token.
        if !rest.is_empty() {
            parts.push((rest, 0));
        }
        parts
    }
}

/// A token and its log-probability.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The bytes of the token, which need not be valid UTF-8.
    pub bytes: Vec<u8>,
    /// The natural logarithm of the token's probability.
    pub logprob: f32,
    /// The likeliest tokens at this position, likeliest first.
    pub top: Vec<(Vec<u8>, f32)>,
}

/// The reason why a choice ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// The model ended its text, or a stop string occurred.
    Stop,
    /// The limit on tokens, the context or the budget was reached.
    Length,
}
