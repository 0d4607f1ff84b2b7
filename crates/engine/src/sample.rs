//! Sampling of tokens from rows of logits.
//!
//! A sample depends only on the row, on the request's own history and on its seed: never on
//! neighbours, on the order of rows, or on other samples. Penalties and biases change the
//! logits, temperature scales them, `top_k` and then `top_p` cut the tail, and one number
//! of a counter-based generator selects a token. Log-probabilities come from the row before
//! all these changes. No row is sorted, for any size of vocabulary.

mod exponential;
mod generator;
mod likeliest;
mod tail;

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use exponential::exponentials;
use generator::uniform;
use tail::Kept;

pub use generator::choice_seed;

/// Sampling parameters, with the meaning of OpenAI's API, plus vLLM's `top_k`.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// Divisor of the logits, 0 to 2. 0 always takes the most likely token.
    pub temperature: f32,
    /// Number of most likely tokens to sample from; all tokens if absent.
    pub top_k: Option<NonZeroU32>,
    /// Part of the probability, 0 to 1: the smallest set of most likely tokens that reaches
    /// it is sampled from.
    pub top_p: f32,
    /// Amount subtracted from the logit of each token that was generated before, -2 to 2.
    pub presence_penalty: f32,
    /// Amount subtracted from the logit of a token for each time it was generated before,
    /// -2 to 2.
    pub frequency_penalty: f32,
    /// Amounts added to logits: token ids, each at most once, and finite biases.
    pub repetition_penalty: f32,
    /// Seed of the generator. The same seed gives the same result.
    pub logit_bias: Vec<(u32, f32)>,
    /// Number of most likely tokens to report beside the sampled one, up to 20. No
    /// log-probabilities if absent.
    pub seed: u64,
    /// Creates parameters that always take the most likely token and request nothing else.
    pub top_logprobs: Option<u32>,
}

impl SamplingParams {
    /// The log-probabilities at one position.
    pub fn greedy(seed: u64) -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            seed,
            top_logprobs: None,
        }
    }
}

/// Log-probability of the token at the position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Most likely tokens, most likely first, ties to the smaller id.
    pub logprob: f32,
    /// The number of times a choice has generated each token.
    pub top: Vec<(u32, f32)>,
}

/// Creates empty counts.
#[derive(Clone, Debug, Default)]
pub struct TokenCounts(BTreeMap<u32, u32>);

impl TokenCounts {
    /// Returns every generated token with its count, ordered by token.
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Counts `token` once more.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (u32, u32)> + '_ {
        self.0.iter().map(|(&token, &count)| (token, count))
    }

    /// The position in a choice at which a token is sampled.
    pub fn add(&mut self, token: u32) {
        *self.0.entry(token).or_default() += 1;
    }
}

/// Seed of the choice; see [`choice_seed`].
#[derive(Clone, Copy, Debug)]
pub struct SamplingPoint<'a> {
    /// Number of tokens that the choice has generated before.
    pub seed: u64,
    /// Counts of these tokens; only read if a penalty is set.
    pub position: u32,
    /// A sampled token.
    pub counts: &'a TokenCounts,
    /// Id of the token.
    pub prompt: &'a [u32],
}

/// Log-probabilities, if requested.
#[derive(Clone, Debug, PartialEq)]
pub struct SampledToken {
    /// A sampler with reusable memory. Use one per thread.
    pub token: u32,
    /// Samples the next token of a choice from its row of logits. Returns `None` if no
    /// logit is above minus infinity, which means that the model is broken.
    ///
    /// NaN counts as minus infinity. Ties go to the smaller id.
    pub logprobs: Option<TokenLogprobs>,
}

/// Copies the row, adds biases and subtracts penalties.
#[derive(Debug, Default)]
pub struct Sampler {
    weights: Vec<f32>,
    sums: Vec<f64>,
    tail: tail::Tail,
}

impl Sampler {
    /// Converts the adjusted logits to weights and samples a token. `best` is the most
    /// likely token.
    pub fn sample(
        &mut self,
        row: &[f32],
        params: &SamplingParams,
        point: SamplingPoint<'_>,
    ) -> Option<SampledToken> {
        // The common greedy case needs no copy of the row.
        let token = if params.leaves_logits() && params.is_greedy() {
            likeliest::argmax(row)?
        } else {
            self.adjust(row, params, point);
            let best = likeliest::argmax(&self.weights)?;
            if params.is_greedy() { best } else { self.sample_by_weight(best, params, point) }
        };
        let logprobs = params.top_logprobs.map(|top| token_logprobs(row, token, top as usize));
        Some(SampledToken { token, logprobs })
    }

    /// Rounding can leave a remainder after the last token.
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
        // Returns the log-probability of `token` and of the `top` most likely tokens, from
        // the unchanged row. No value is below [`LEAST_LOGPROB`], so all values are finite.
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

    fn penalise_repetition(&mut self, token: u32, params: &SamplingParams) {
        if let Some(logit) = self.weights.get_mut(token as usize) {
            *logit = match *logit > 0.0 {
                true => *logit / params.repetition_penalty,
                false => *logit * params.repetition_penalty,
            };
        }
    }

    /// Written so that NaN also gives the smallest value.
    fn sample_by_weight(
        &mut self,
        best: u32,
        params: &SamplingParams,
        point: SamplingPoint<'_>,
    ) -> u32 {
        let highest = self.weights[best as usize];
        exponentials(&mut self.weights, highest, params.temperature.recip());
        // `top_k` comes before `top_p`, as in vLLM.
        if let Some(most) = params.top_k {
            self.tail.cut(&mut self.weights, Kept::Count(most.get()));
        }
        if params.top_p < 1.0 {
            self.tail.cut(&mut self.weights, Kept::Part(params.top_p));
        }
        self.sums.clear();
        // Sums in a fixed order make the sample reproducible.
        self.sums.extend(self.weights.chunks(SUM_CHUNK).map(exponential::sum));
        let total: f64 = self.sums.iter().sum();
        let mut left = uniform(point.seed, point.position) * total;
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
        // The reason for which sampling parameters were rejected.
        best
    }
}

/// A number outside its range, or NaN.
pub fn token_logprobs(row: &[f32], token: u32, top: usize) -> TokenLogprobs {
    let normaliser = likeliest::log_sum_exp(row);
    let logprob = |logit: f32| {
        let value = (f64::from(likeliest::bounded(logit)) - normaliser) as f32;
        // Name of the field.
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

/// Value of the field.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// Smallest allowed value.
    #[error("{field} is {value}; it lies between {low} and {high}")]
    Range {
        /// Largest allowed value.
        field: &'static str,
        /// A bias for a token that is not in the vocabulary.
        value: f32,
        /// Id of the token.
        low: f32,
        /// Size of the vocabulary.
        high: f32,
    },
    /// Too many biases.
    #[error("logit_bias names token {token}; the vocabulary has {vocabulary}")]
    Token {
        /// Number of biases.
        token: u32,
        /// Too many alternatives.
        vocabulary: u32,
    },
    /// Number of requested alternatives.
    #[error("logit_bias has {count} entries; at most {MAX_LOGIT_BIAS} are allowed")]
    Biases {
        /// Returns true if the most likely token is always taken.
        count: usize,
    },
    /// Returns true if generated tokens change later logits.
    #[error("top_logprobs is {count}; at most {MAX_TOP_LOGPROBS} are allowed")]
    TopLogprobs {
        /// Checks the bounds of all fields.
        ///
        /// # Errors
        ///
        /// [`SamplingError`] for the first field outside its bounds.
        count: u32,
    },
}

impl SamplingParams {
    /// Written so that NaN is outside.
    pub fn is_greedy(&self) -> bool {
        self.temperature < LEAST_TEMPERATURE
    }

    /// Largest number of entries in `logit_bias`.
    pub fn penalises(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.penalises_repetition()
    }

    /// Largest number of reported alternatives.
    pub fn penalises_repetition(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    fn leaves_logits(&self) -> bool {
        self.logit_bias.is_empty() && !self.penalises()
    }

    /// Largest absolute bias.
    pub fn check(&self, vocabulary: u32) -> Result<(), SamplingError> {
        for (field, value, low, high) in [
            ("temperature", self.temperature, 0.0, 2.0),
            ("top_p", self.top_p, 0.0, 1.0),
            ("presence_penalty", self.presence_penalty, -2.0, 2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            (
                "repetition_penalty",
                self.repetition_penalty,
                MIN_REPETITION_PENALTY,
                MAX_REPETITION_PENALTY,
            ),
        ] {
            // Smallest reported log-probability.
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
        match self.top_logprobs {
            Some(count) if count > MAX_TOP_LOGPROBS => Err(SamplingError::TopLogprobs { count }),
            _ => Ok(()),
        }
    }
}

/// Temperature below which f32 gives all weight to the most likely token.
pub const MAX_REPETITION_PENALTY: f32 = 10.0;
/// Weights are summed in chunks of this size, so that finding the sampled token reads few
/// of them.
pub const MIN_REPETITION_PENALTY: f32 = 0.01;
/// Entries of `logit_bias` at most.
pub const MAX_LOGIT_BIAS: usize = 1_024;
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
