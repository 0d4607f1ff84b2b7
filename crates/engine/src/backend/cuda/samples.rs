//! The sample requests of a step as the sampling kernel reads them, and the results
//! that it writes.

use std::num::NonZeroU32;

use super::capacity::{Packer, SAMPLE_WORDS, StepCapacity};
use super::kernels::{MOST_TOP, NONE, PROMPTED, SampleRow};
use crate::backend::{BackendError, SampleRequest, SampleTarget};
use crate::grammar::MaskWait;
use crate::sample::{SampledToken, SamplingParams, SamplingPoint, TokenLogprobs};

/// The sample requests of a step, as lists of 32-bit words.
pub(super) struct SampleList {
    rows: Vec<[u32; SAMPLE_WORDS]>,
    bias_tokens: Vec<u32>,
    biases: Vec<u32>,
    count_tokens: Vec<u32>,
    counts: Vec<u32>,
    prompt_tokens: Vec<u32>,
    masks: Vec<u32>,
    /// The number of likeliest tokens to report with each request; `None` if no
    /// log-probabilities are reported.
    top_counts: Vec<Option<u32>>,
    most_biases: usize,
    most_counts: usize,
    most_prompt_tokens: usize,
    most_mask_words: usize,
    /// The words of one mask.
    mask_words: usize,
    /// The most tokens that are reported beside a sampled one, at most the vocabulary.
    most_top: u32,
}

/// The offset of each list in the packed words.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SampleOffsets {
    pub(super) rows: usize,
    pub(super) bias_tokens: usize,
    pub(super) biases: usize,
    pub(super) count_tokens: usize,
    pub(super) counts: usize,
    pub(super) prompt_tokens: usize,
    pub(super) masks: usize,
}

/// The first entry of a request in lists that requests share.
#[derive(Clone, Copy)]
struct ListStarts {
    biases: u32,
    prompt: u32,
    mask: u32,
}

impl SampleList {
    pub(super) fn new(capacity: &StepCapacity) -> Self {
        Self {
            rows: Vec::with_capacity(capacity.samples),
            top_counts: Vec::with_capacity(capacity.samples),
            bias_tokens: Vec::new(),
            biases: Vec::new(),
            count_tokens: Vec::new(),
            counts: Vec::new(),
            prompt_tokens: Vec::new(),
            masks: Vec::new(),
            most_biases: capacity.biases(),
            most_counts: capacity.counts(),
            most_prompt_tokens: capacity.prompt_tokens(),
            most_mask_words: capacity.mask_words(),
            mask_words: capacity.words_of_mask(),
            most_top: MOST_TOP.min(capacity.vocabulary),
        }
    }

    /// Returns the number of requests.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns the number of likeliest tokens to report with each request.
    pub(super) fn top_counts(&self) -> &[Option<u32>] {
        &self.top_counts
    }

    /// Lays out requests that [`StepPlan::check`](crate::backend::StepPlan::check)
    /// accepted.
    ///
    /// # Errors
    /// [`BackendError::Device`] if the requests have more biases than one list for each
    /// row, or more counts or tokens of prompts than the cache has tokens.
    pub(super) fn lay_out(&mut self, samples: &[SampleRequest<'_>]) -> Result<(), BackendError> {
        self.clear();
        let mut last: Option<(*const SamplingParams, u32)> = None;
        let mut last_prompt: Option<(*const [u32], u32)> = None;
        let mut wait = MaskWait::new();
        for draw in samples {
            // Requests that share their parameters follow one another and share one
            // list of biases.
            let params = std::ptr::from_ref(draw.params);
            let biases = match last {
                Some((of, biases)) if of == params => biases,
                _ => self.add_biases(draw.params),
            };
            last = Some((params, biases));
            // All choices of a prompt refer to one list, so that the lists of a
            // step are no longer than the prompts in the cache.
            let prompt = std::ptr::from_ref(draw.penalised_prompt());
            let prompt_tokens = match last_prompt {
                Some((of, start)) if std::ptr::eq(of, prompt) => start,
                _ => self.add_prompt(draw.penalised_prompt()),
            };
            last_prompt = Some((prompt, prompt_tokens));
            let mask = self.add_mask(draw, &mut wait);
            self.add(draw, ListStarts { biases, prompt: prompt_tokens, mask });
        }
        let lists = [
            ("biases", self.biases.len(), self.most_biases),
            ("counts of tokens", self.counts.len(), self.most_counts),
            ("tokens of prompts", self.prompt_tokens.len(), self.most_prompt_tokens),
            ("words of masks", self.masks.len(), self.most_mask_words),
        ];
        match lists.iter().find(|(_, count, most)| count > most) {
            None => Ok(()),
            Some((list, count, most)) => Err(BackendError::Device(format!(
                "the samples of one step have {count} {list}; {most} is the most"
            ))),
        }
    }

    fn clear(&mut self) {
        self.rows.clear();
        self.top_counts.clear();
        self.bias_tokens.clear();
        self.biases.clear();
        self.count_tokens.clear();
        self.counts.clear();
        self.prompt_tokens.clear();
        self.masks.clear();
    }

    /// Adds the mask of a constrained choice. A mask that is late allows no token, so that
    /// the row gives none in this step.
    fn add_mask(&mut self, draw: &SampleRequest<'_>, wait: &mut MaskWait) -> u32 {
        let SampleTarget::Next {
            point: SamplingPoint { constraint: Some(constraint), .. }, ..
        } = draw.token
        else {
            return NONE;
        };
        let first = self.masks.len();
        if let Some(mask) = constraint.mask(wait) {
            self.masks.extend_from_slice(mask.words());
        }
        self.masks.resize(first + self.mask_words, 0);
        first as u32
    }

    fn add_prompt(&mut self, prompt: &[u32]) -> u32 {
        let first = self.prompt_tokens.len() as u32;
        self.prompt_tokens.extend_from_slice(prompt);
        first
    }

    fn add_biases(&mut self, params: &SamplingParams) -> u32 {
        let first = self.biases.len() as u32;
        for &(token, bias) in &params.logit_bias {
            self.bias_tokens.push(token);
            self.biases.push(bias.to_bits());
        }
        first
    }

    fn add(&mut self, draw: &SampleRequest<'_>, starts: ListStarts) {
        let ListStarts { biases, prompt, mask } = starts;
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
            repetition: params.repetition_penalty,
            prompt,
            prompt_count: draw.penalised_prompt().len() as u32,
            min_p: params.min_p,
            mask,
            unused: 0,
        };
        let top_counts = match token {
            SampleTarget::Given(token) => {
                sample.given = token;
                Some(params.top_logprobs.unwrap_or(0))
            }
            SampleTarget::Next { point, pending } => {
                sample.seed = point.seed;
                sample.position = point.position;
                sample.pending = pending.unwrap_or(NONE);
                // Without penalties the kernel reads no counts, so none are uploaded.
                if params.penalises() {
                    let prompt = draw.penalised_prompt();
                    for (token, count) in point.counts.iter() {
                        let is_prompted = prompt.binary_search(&token).is_ok();
                        self.count_tokens.push(token);
                        self.counts.push(if is_prompted { count | PROMPTED } else { count });
                    }
                }
                sample.count_count = self.counts.len() as u32 - counts;
                params.top_logprobs
            }
        };
        let top_counts = top_counts.map(|top| top.min(self.most_top));
        sample.top = top_counts.unwrap_or(NONE);
        self.top_counts.push(top_counts);
        self.rows.push(words_of(&sample));
    }

    pub(super) fn pack(&self, packer: &mut Packer<'_>) -> SampleOffsets {
        SampleOffsets {
            rows: packer.list(self.rows.as_flattened()),
            bias_tokens: packer.list(&self.bias_tokens),
            biases: packer.list(&self.biases),
            count_tokens: packer.list(&self.count_tokens),
            counts: packer.list(&self.counts),
            prompt_tokens: packer.list(&self.prompt_tokens),
            masks: packer.list(&self.masks),
        }
    }
}

/// Returns the words of the structure in memory, little endian.
fn words_of(sample: &SampleRow) -> [u32; SAMPLE_WORDS] {
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
        repetition,
        prompt,
        prompt_count,
        min_p,
        mask,
        unused,
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
        repetition.to_bits(),
        prompt,
        prompt_count,
        min_p.to_bits(),
        mask,
        unused,
    ]
}

/// The layout of a step's results. They lie in one piece, so that one copy brings them
/// to the host: the tokens of `samples` requests, the tokens' log-probabilities, the
/// likeliest tokens of each request, and the log-probabilities of those.
#[derive(Clone, Copy)]
pub(super) struct SampledLayout {
    samples: usize,
}

impl SampledLayout {
    pub(super) fn of(samples: usize) -> Self {
        Self { samples }
    }

    /// Returns the offset of the tokens, bytes.
    pub(super) fn tokens(self) -> usize {
        0
    }

    /// Returns the offset of the tokens' log-probabilities, bytes.
    pub(super) fn logprobs(self) -> usize {
        4 * self.samples
    }

    /// Returns the offset of the likeliest tokens, bytes. Each request has [`MOST_TOP`]
    /// of them.
    pub(super) fn top_tokens(self) -> usize {
        8 * self.samples
    }

    /// Returns the offset of the likeliest tokens' log-probabilities, bytes.
    pub(super) fn top_logprobs(self) -> usize {
        self.top_tokens() + TOP_BYTES * self.samples
    }

    /// Returns the size of all results, bytes.
    pub(super) fn bytes(self) -> usize {
        self.top_logprobs() + TOP_BYTES * self.samples
    }

    /// Returns the bytes that must be copied to the host: only the tokens if no request
    /// reports log-probabilities.
    pub(super) fn wanted(self, top_counts: &[Option<u32>]) -> usize {
        match top_counts.iter().any(Option::is_some) {
            // One copy of everything costs less than one copy for each request that
            // reports more.
            true => self.bytes(),
            false => self.logprobs(),
        }
    }

    /// Reads the results from host memory.
    #[expect(
        clippy::expect_used,
        reason = "the layout gives each word four bytes within the buffer"
    )]
    pub(super) fn read(
        self,
        bytes: &[u8],
        top_counts: &[Option<u32>],
    ) -> impl Iterator<Item = Option<SampledToken>> {
        let word = |at: usize| {
            let word = bytes[at..].first_chunk::<4>().expect("four bytes a word");
            u32::from_le_bytes(*word)
        };
        top_counts.iter().enumerate().map(move |(draw, top_counts)| {
            let token = word(self.tokens() + 4 * draw);
            (token != NONE).then(|| SampledToken {
                token,
                logprobs: top_counts.map(|top| TokenLogprobs {
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

/// Bytes of one request's likeliest tokens.
pub(super) const TOP_BYTES: usize = 4 * MOST_TOP as usize;
