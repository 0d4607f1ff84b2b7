//! Drawing tokens from rows of logits.
//!
//! A draw depends on the row, the request's own history and its seed alone:
//! never on neighbours, on the order of rows, or on what was drawn elsewhere.
//! A grammar's mask leaves tokens out, whatever their bias.
//! Penalties and biases change the logits, temperature scales them, `min_p`,
//! `top_k` and then `top_p` cut the tail, and one number of a counter-based
//! generator picks a token.
//! Log-probabilities are the model's own: of the row as it came, before any of
//! that. No row is sorted, whatever the vocabulary.

mod exponential;
mod generator;
mod likeliest;
mod tail;

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use exponential::exponentials;
use generator::uniform;
use tail::Kept;
use tollgate_domain::REPETITION_PENALTIES;

use crate::grammar::{Constraint, RequestGrammar, TokenMask};

pub use generator::choice_seed;

/// Sampling parameters with the meaning of OpenAI's API; `top_k`, `min_p`
/// and `repetition_penalty` have the meaning of vLLM's.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 is greedy; up to 2.
    pub temperature: f32,
    /// Number of likeliest tokens to sample from; `None` for all.
    pub top_k: Option<NonZeroU32>,
    /// Part of the probability, 0 to 1, that the likeliest tokens must reach
    /// together; less likely tokens are not sampled.
    pub top_p: f32,
    /// Part of the likeliest token's probability, 0 to 1, that a token must reach to
    /// be sampled; 0 cuts nothing.
    pub min_p: f32,
    /// Taken off the logit of each token that was generated before, -2 to 2.
    pub presence_penalty: f32,
    /// Taken off the logit of a token for each time it was generated before, -2 to 2.
    pub frequency_penalty: f32,
    /// Divides the positive logit, and multiplies the negative one, of each token
    /// that the prompt or the choice already has, as Hugging Face's
    /// `RepetitionPenaltyLogitsProcessor` does; [`MIN_REPETITION_PENALTY`] to
    /// [`MAX_REPETITION_PENALTY`]; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Added to logits: token ids, each once, and finite biases.
    pub logit_bias: Vec<(u32, f32)>,
    /// Keys the generator; with it a result can be had again.
    pub seed: u64,
    /// Absent: no log-probabilities. Else how many of the likeliest tokens are
    /// reported beside the drawn one, up to 20.
    pub top_logprobs: Option<u32>,
    /// Token ids that end a choice, as the model's own end tokens do; up to
    /// [`MAX_STOP_TOKENS`].
    pub stop_tokens: Vec<u32>,
    /// True if the model's own end tokens do not end a choice.
    pub ignores_end: bool,
    /// The form that every choice must have; `None` for free text. Not together with
    /// `ignores_end`: a complete answer has no next token but the end.
    pub grammar: Option<RequestGrammar>,
}

impl SamplingParams {
    /// The likeliest token each time, nothing else asked for.
    pub fn greedy(seed: u64) -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed,
            top_logprobs: None,
            stop_tokens: Vec::new(),
            ignores_end: false,
            grammar: None,
        }
    }
}

/// Log-probabilities at one place.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Log-probability of the token at the position.
    pub logprob: f32,
    /// The likeliest tokens, likeliest first, ties to the smaller id.
    pub top: Vec<(u32, f32)>,
}

/// Counts of the tokens that a choice has generated.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts(BTreeMap<u32, u32>);

impl TokenCounts {
    /// Creates counts without a token.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Every token that was generated and how often, by token.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + '_ {
        self.0.iter().map(|(&token, &count)| (token, count))
    }

    /// One more of `token`.
    pub fn add(&mut self, token: u32) {
        *self.0.entry(token).or_default() += 1;
    }
}

/// The position in a choice at which a token is sampled.
#[derive(Clone, Copy, Debug)]
pub struct SamplingPoint<'a> {
    /// The choice's own seed; see [`choice_seed`].
    pub seed: u64,
    /// Tokens that the choice has generated before.
    pub position: u32,
    /// Counts of the tokens that the choice has generated; read only if a penalty
    /// applies.
    pub counts: &'a TokenCounts,
    /// The distinct tokens of the prompt in ascending order; read only where
    /// there is a repetition penalty.
    pub prompt: &'a [u32],
    /// The state of the choice's grammar; `None` for free text.
    pub constraint: Option<&'a Constraint>,
}

/// A drawn token.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// Its id.
    pub token: u32,
    /// Log-probabilities, when the parameters ask for them.
    pub logprobs: Option<TokenLogprobs>,
}

/// Draws tokens; keeps the memory that takes. One for each thread.
#[derive(Debug, Default)]
pub struct Sampler {
    weights: Vec<f32>,
    sums: Vec<f64>,
    tail: tail::Tail,
}

impl Sampler {
    /// Draws the next token of a choice from its row of logits. `None` when
    /// no logit is above minus infinity: the model is broken. A token that
    /// `mask` does not allow is never drawn.
    ///
    /// A logit that is not a number counts as minus infinity, ties go to the
    /// smaller id.
    pub fn sample(
        &mut self,
        row: &[f32],
        params: &SamplingParams,
        point: SamplingPoint<'_>,
        mask: Option<&TokenMask>,
    ) -> Option<SampledToken> {
        // Plain greedy sampling needs no copy of the row.
        let token = if mask.is_none() && params.leaves_logits() && params.is_greedy() {
            likeliest::argmax(row)?
        } else {
            self.adjust(row, params, point);
            if let Some(mask) = mask {
                self.leave_out(mask);
            }
            let best = likeliest::argmax(&self.weights)?;
            if params.is_greedy() { best } else { self.sample_by_weight(best, params, point) }
        };
        let logprobs = params.top_logprobs.map(|top| token_logprobs(row, token, top as usize));
        Some(SampledToken { token, logprobs })
    }

    /// Copies the row with biases added and penalties taken off.
    fn adjust(&mut self, row: &[f32], params: &SamplingParams, point: SamplingPoint<'_>) {
        self.weights.clear();
        self.weights.extend(row.iter().map(|&logit| likeliest::bounded(logit)));
        for &(token, bias) in &params.logit_bias {
            if let Some(logit) = self.weights.get_mut(token as usize) {
                *logit += bias;
            }
        }
        if !params.penalises() {
            return;
        }
        // The repetition penalty comes first, once for each token: vLLM and the
        // kernel use the same order, so that a sample is the same everywhere.
        if params.penalises_repetition() {
            for &token in point.prompt {
                self.penalise_repetition(token, params);
            }
        }
        for (&token, &count) in &point.counts.0 {
            if params.penalises_repetition() && point.prompt.binary_search(&token).is_err() {
                self.penalise_repetition(token, params);
            }
            if let Some(logit) = self.weights.get_mut(token as usize) {
                *logit -= params.presence_penalty + params.frequency_penalty * count as f32;
            }
        }
    }

    /// Leaves out every token that the mask does not allow.
    fn leave_out(&mut self, mask: &TokenMask) {
        // After the biases: a bias cannot bring a token back.
        for (weights, &word) in self.weights.chunks_mut(u32::BITS as usize).zip(mask.words()) {
            for (bit, weight) in weights.iter_mut().enumerate() {
                if word & 1 << bit == 0 {
                    *weight = f32::NEG_INFINITY;
                }
            }
        }
    }

    fn penalise_repetition(&mut self, token: u32, params: &SamplingParams) {
        if let Some(logit) = self.weights.get_mut(token as usize) {
            // A penalty below 1 may overflow; the kernel bounds the result alike.
            *logit = likeliest::bounded(match *logit > 0.0 {
                true => *logit / params.repetition_penalty,
                false => *logit * params.repetition_penalty,
            });
        }
    }

    /// Turns the adjusted logits into weights and picks one, `best` being the
    /// likeliest.
    fn sample_by_weight(
        &mut self,
        best: u32,
        params: &SamplingParams,
        point: SamplingPoint<'_>,
    ) -> u32 {
        let highest = self.weights[best as usize];
        exponentials(&mut self.weights, highest, params.temperature.recip());
        if params.min_p > 0.0 {
            // The likeliest token has the weight 1. vLLM cuts here, too: after the
            // temperature, before `top_k` and `top_p`.
            for weight in &mut self.weights {
                *weight = if *weight < params.min_p { 0.0 } else { *weight };
            }
        }
        if let Some(most) = params.top_k {
            self.tail.cut(&mut self.weights, Kept::Count(most.get()));
        }
        if params.top_p < 1.0 {
            self.tail.cut(&mut self.weights, Kept::Part(params.top_p));
        }
        self.sums.clear();
        self.sums.extend(self.weights.chunks(SUM_CHUNK).map(exponential::sum));
        let total: f64 = self.sums.iter().sum();
        let mut left = uniform(point.seed, point.position) * total;
        // Chunks before the drawn place are passed over by their sums.
        for (chunk, &sum) in self.sums.iter().enumerate() {
            if left >= sum {
                left -= sum;
                continue;
            }
            let start = chunk * SUM_CHUNK;
            let end = (start + SUM_CHUNK).min(self.weights.len());
            for (token, &weight) in (start..end).zip(&self.weights[start..end]) {
                if left < f64::from(weight) {
                    return token as u32;
                }
                left -= f64::from(weight);
            }
        }
        // Rounding can leave a crumb behind the last token.
        best
    }
}

/// The log-probability of `token` and of the `top` likeliest, by the model's
/// own distribution. Nothing is reported below [`LEAST_LOGPROB`], so that every
/// figure is finite.
pub fn token_logprobs(row: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let normaliser = likeliest::log_sum_exp(row);
    let logprob = |logit: f32| {
        let value = (f64::from(likeliest::bounded(logit)) - normaliser) as f32;
        // Written so that what is not a number goes to the floor as well.
        if value > LEAST_LOGPROB { value.min(0.0) } else { LEAST_LOGPROB }
    };
    TokenLogprobs {
        logprob: row.get(token as usize).map_or(LEAST_LOGPROB, |&logit| logprob(logit)),
        top: likeliest::top(row, top)
            .into_iter()
            .map(|(token, logit)| (token, logprob(logit)))
            .collect(),
    }
}

/// The reasons why sampling parameters are refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// A number outside its range, or not a number.
    #[error("{field} is {value}; it lies between {low} and {high}")]
    Range {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f32,
        /// The least allowed.
        low: f32,
        /// The most allowed.
        high: f32,
    },
    /// A bias for a token that the model does not have.
    #[error("logit_bias names token {token}; the vocabulary has {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Its bound.
        vocabulary: u32,
    },
    /// Too many biases.
    #[error("logit_bias has {count} entries; at most {MAX_LOGIT_BIAS} are allowed")]
    Biases {
        /// Number of entries in the request.
        count: usize,
    },
    /// Too many stop tokens.
    #[error("stop_token_ids has {count} entries; at most {MAX_STOP_TOKENS} are allowed")]
    StopTokens {
        /// Number of entries in the request.
        count: usize,
    },
    /// A stop token that the model does not have.
    #[error("stop_token_ids names token {token}; the vocabulary has {vocabulary}")]
    StopToken {
        /// The token.
        token: u32,
        /// Its bound.
        vocabulary: u32,
    },
    /// Too many alternatives.
    #[error("top_logprobs is {count}; at most {MAX_TOP_LOGPROBS} are allowed")]
    TopLogprobs {
        /// Number of alternatives in the request.
        count: u32,
    },
}

impl SamplingParams {
    /// Returns true if the likeliest token is always sampled.
    pub fn is_greedy(&self) -> bool {
        self.temperature < LEAST_TEMPERATURE
    }

    /// Returns true if the logits of earlier tokens change.
    pub fn penalises(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.penalises_repetition()
    }

    /// Returns true if the tokens of the prompt matter, too.
    pub fn penalises_repetition(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// Returns true if `token` ends a choice of a model with these `end_tokens`.
    pub fn ends_with(&self, token: u32, end_tokens: &[u32]) -> bool {
        self.stop_tokens.contains(&token) || (!self.ignores_end && end_tokens.contains(&token))
    }

    fn leaves_logits(&self) -> bool {
        self.logit_bias.is_empty() && !self.penalises()
    }

    /// Checks every bound that the fields state.
    ///
    /// # Errors
    /// [`SamplingError`] for the first field that breaks its bound.
    pub fn check(&self, vocabulary: u32) -> Result<(), SamplingError> {
        for (field, value, low, high) in [
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("min_p", self.min_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            (
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
        ] {
            // Written so that NaN is outside.
            if !(low..=high).contains(&value) {
                return Err(SamplingError::Range { field, value, low, high });
            }
        }
        if self.logit_bias.len() > MAX_LOGIT_BIAS {
            return Err(SamplingError::Biases { count: self.logit_bias.len() });
        }
        for &(token, value) in &self.logit_bias {
            if token >= vocabulary {
                return Err(SamplingError::Token { token, vocabulary });
            }
            if !(-MAX_BIAS..=MAX_BIAS).contains(&value) {
                let (low, high) = (-MAX_BIAS, MAX_BIAS);
                return Err(SamplingError::Range { field: "logit_bias", value, low, high });
            }
        }
        if self.stop_tokens.len() > MAX_STOP_TOKENS {
            return Err(SamplingError::StopTokens { count: self.stop_tokens.len() });
        }
        if let Some(&token) = self.stop_tokens.iter().find(|token| **token >= vocabulary) {
            return Err(SamplingError::StopToken { token, vocabulary });
        }
        match self.top_logprobs {
            Some(count) if count > MAX_TOP_LOGPROBS => Err(SamplingError::TopLogprobs { count }),
            _ => Ok(()),
        }
    }
}

/// The largest repetition penalty.
pub const MAX_REPETITION_PENALTY: f32 = *REPETITION_PENALTIES.end() as f32;
/// The smallest repetition penalty: a logit is divided by it.
pub const MIN_REPETITION_PENALTY: f32 = *REPETITION_PENALTIES.start() as f32;
/// Entries of `logit_bias` at most.
pub const MAX_LOGIT_BIAS: usize = 1_024;
/// Entries of `stop_token_ids` at most.
pub const MAX_STOP_TOKENS: usize = 64;
/// Alternatives reported at most.
pub const MAX_TOP_LOGPROBS: u32 = 20;
/// A bias at most, either way.
const MAX_BIAS: f32 = 100.0;
/// A log-probability at least; what is less likely is reported as this.
pub const LEAST_LOGPROB: f32 = -9_999.0;
/// Below this temperature the likeliest token has all the weight that f32 can
/// tell from none.
const LEAST_TEMPERATURE: f32 = 1e-5;
/// Weights are summed by chunks of this many, so that finding the drawn one
/// reads few of them.
const SUM_CHUNK: usize = 256;

#[cfg(test)]
mod tests;
