//! What is drawn in a step, as the kernel that draws reads it, and what it
//! came to.

use std::num::NonZeroU32;

use super::kernels::{MOST_TOP, NONE, SampleRow};
use super::room::{CHOICE_WORDS, Packer, Room};
use crate::backend::{BackendError, SampleRequest, SampleTarget};
use crate::sample::{SampledToken, SamplingParams, TokenLogprobs};

/// The draws of a step: lists of whole words.
pub(super) struct Choices {
    rows: Vec<[u32; CHOICE_WORDS]>,
    bias_tokens: Vec<u32>,
    biases: Vec<u32>,
    count_tokens: Vec<u32>,
    counts: Vec<u32>,
    /// Log-probabilities that each is told with: how many of the likeliest, or
    /// none at all.
    told: Vec<Option<u32>>,
    most_biases: usize,
    most_counts: usize,
    /// No row has more tokens than the vocabulary.
    most_top: u32,
}

/// Where each list begins in the packed words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ChoicePlaces {
    pub(super) rows: usize,
    pub(super) bias_tokens: usize,
    pub(super) biases: usize,
    pub(super) count_tokens: usize,
    pub(super) counts: usize,
}

impl Choices {
    pub(super) fn new(room: &Room) -> Self {
        Self {
            rows: Vec::with_capacity(room.draws),
            told: Vec::with_capacity(room.draws),
            bias_tokens: Vec::new(),
            biases: Vec::new(),
            count_tokens: Vec::new(),
            counts: Vec::new(),
            most_biases: room.biases(),
            most_counts: room.counts(),
            most_top: MOST_TOP.min(room.vocabulary),
        }
    }

    /// How many are drawn.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// What is told with each.
    pub(super) fn told(&self) -> &[Option<u32>] {
        &self.told
    }

    /// Lays out draws that have been checked one by one.
    ///
    /// # Errors
    /// [`BackendError::Device`] when there are more biases than one list for
    /// each row, or more counts than the cache has tokens.
    pub(super) fn lay_out(&mut self, draws: &[SampleRequest<'_>]) -> Result<(), BackendError> {
        self.clear();
        let mut last: Option<(*const SamplingParams, u32)> = None;
        for draw in draws {
            // Draws of one request stand together and have one list.
            let params = std::ptr::from_ref(draw.params);
            let biases = match last {
                Some((of, biases)) if of == params => biases,
                _ => self.add_biases(draw.params),
            };
            last = Some((params, biases));
            self.add(draw, biases);
        }
        let (biases, counts) = (self.biases.len(), self.counts.len());
        match biases <= self.most_biases && counts <= self.most_counts {
            true => Ok(()),
            false => Err(BackendError::Device(format!(
                "the draws of one step have {biases} biases and {counts} counts of tokens; \
                 {} and {} is the most",
                self.most_biases, self.most_counts
            ))),
        }
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.told.clear();
        self.bias_tokens.clear();
        self.biases.clear();
        self.count_tokens.clear();
        self.counts.clear();
    }

    fn add_biases(&mut self, params: &SamplingParams) -> u32 {
        let first = self.biases.len() as u32;
        for &(token, bias) in &params.logit_bias {
            self.bias_tokens.push(token);
            self.biases.push(bias.to_bits());
        }
        first
    }

    fn add(&mut self, draw: &SampleRequest<'_>, biases: u32) {
        let &SampleRequest { row, params, token } = draw;
        let counts = self.counts.len() as u32;
        let mut sample = SampleRow {
            seed: 0,
            temperature: params.temperature,
            top_p: params.top_p,
            presence: params.presence_penalty,
            frequency: params.frequency_penalty,
            position: 0,
            row,
            given: NONE,
            pending: NONE,
            biases,
            bias_count: params.logit_bias.len() as u32,
            counts,
            count_count: 0,
            top: NONE,
            top_k: params.top_k.map_or(0, NonZeroU32::get),
        };
        let told = match token {
            SampleTarget::Given(token) => {
                sample.given = token;
                Some(params.top_logprobs.unwrap_or(0))
            }
            SampleTarget::Next { point, pending } => {
                sample.seed = point.seed;
                sample.position = point.position;
                sample.pending = pending.unwrap_or(NONE);
                if params.penalises() {
                    for (token, count) in point.counts.iter() {
                        self.count_tokens.push(token);
                        self.counts.push(count);
                    }
                }
                sample.count_count = self.counts.len() as u32 - counts;
                params.top_logprobs
            }
        };
        let told = told.map(|top| top.min(self.most_top));
        sample.top = told.unwrap_or(NONE);
        self.told.push(told);
        self.rows.push(words_of(&sample));
    }

    pub(super) fn pack(&self, packer: &mut Packer<'_>) -> ChoicePlaces {
        ChoicePlaces {
            rows: packer.list(self.rows.as_flattened()),
            bias_tokens: packer.list(&self.bias_tokens),
            biases: packer.list(&self.biases),
            count_tokens: packer.list(&self.count_tokens),
            counts: packer.list(&self.counts),
        }
    }
}

/// As it lies in memory, little endian.
fn words_of(sample: &SampleRow) -> [u32; CHOICE_WORDS] {
    let &SampleRow {
        seed,
        temperature,
        top_p,
        presence,
        frequency,
        position,
        row,
        given,
        pending,
        biases,
        bias_count,
        counts,
        count_count,
        top,
        top_k,
    } = sample;
    [
        seed as u32,
        (seed >> 32) as u32,
        temperature.to_bits(),
        top_p.to_bits(),
        presence.to_bits(),
        frequency.to_bits(),
        position,
        row,
        given,
        pending,
        biases,
        bias_count,
        counts,
        count_count,
        top,
        top_k,
    ]
}

/// What is drawn lies in one piece, so that one copy brings it: for `draws`
/// draws their tokens, the tokens' log-probabilities, then the likeliest of
/// each and theirs.
#[derive(Clone, Copy)]
pub(super) struct DrawnPlaces {
    draws: usize,
}

impl DrawnPlaces {
    pub(super) fn of(draws: usize) -> Self {
        Self { draws }
    }

    /// Byte at which the tokens begin.
    pub(super) fn tokens(self) -> usize {
        0
    }

    /// Byte at which their log-probabilities begin.
    pub(super) fn logprobs(self) -> usize {
        4 * self.draws
    }

    /// Byte at which the likeliest tokens begin, [`MOST_TOP`] a draw.
    pub(super) fn top_tokens(self) -> usize {
        8 * self.draws
    }

    /// Byte at which the likeliest tokens' log-probabilities begin.
    pub(super) fn top_logprobs(self) -> usize {
        self.top_tokens() + TOP_BYTES * self.draws
    }

    /// Bytes of all.
    pub(super) fn bytes(self) -> usize {
        self.top_logprobs() + TOP_BYTES * self.draws
    }

    /// Bytes that are worth bringing: tokens alone where nobody wants more.
    pub(super) fn wanted(self, told: &[Option<u32>]) -> usize {
        match told.iter().any(Option::is_some) {
            true => self.bytes(),
            false => self.logprobs(),
        }
    }

    /// Reads what was drawn.
    pub(super) fn read(
        self,
        bytes: &[u8],
        told: &[Option<u32>],
    ) -> impl Iterator<Item = Option<SampledToken>> {
        let word = |at: usize| {
            let word = bytes[at..].first_chunk::<4>().expect("four bytes a word");
            u32::from_le_bytes(*word)
        };
        told.iter().enumerate().map(move |(draw, told)| {
            let token = word(self.tokens() + 4 * draw);
            (token != NONE).then(|| SampledToken {
                token,
                logprobs: told.map(|top| TokenLogprobs {
                    logprob: f32::from_bits(word(self.logprobs() + 4 * draw)),
                    top: (0..top as usize)
                        .map(|place| TOP_BYTES * draw + 4 * place)
                        .map(|at| (word(self.top_tokens() + at), word(self.top_logprobs() + at)))
                        .map(|(token, logprob)| (token, f32::from_bits(logprob)))
                        .collect(),
                }),
            })
        })
    }
}

/// Bytes of one draw's likeliest tokens.
pub(super) const TOP_BYTES: usize = 4 * MOST_TOP as usize;
