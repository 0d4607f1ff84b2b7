//! The interface between the scheduler and a device: one ragged step of a model's
//! forward pass over a paged KV cache.
//!
//! The engine's thread owns a backend and runs it step by step. A backend knows tokens,
//! positions and KV blocks; it knows no requests and no tenants. After the first steps
//! a backend allocates no memory during a step. A step that a backend refuses changes
//! nothing.

pub mod cpu;
pub mod cuda;
pub mod synthetic;

use std::time::Duration;

pub use tollgate_domain::Transfers;
use tollgate_domain::{AttentionShape, DeviceClass, DeviceNanos};

use crate::grammar::MaskWait;
use crate::model::SamplingDefaults;
use crate::sample::{
    SampledToken, Sampler, SamplingParams, SamplingPoint, TokenCounts, token_logprobs,
};

/// The number of tokens that one KV block holds.
pub const BLOCK_TOKENS: u32 = 16;

/// A model on a device.
pub trait Backend: Send {
    /// Returns the model's dimensions, as far as callers need them.
    fn shape(&self) -> &ModelShape;

    /// Returns a description of the device.
    fn device(&self) -> &DeviceInfo;

    /// Returns the number of KV blocks in the pool. Block ids are `0..kv_blocks()`. The
    /// number never changes.
    fn kv_blocks(&self) -> u32;

    /// Returns the most that one step may ask for. The limits never change.
    fn limits(&self) -> StepLimits;

    /// Copies the keys and values of every layer of one block into another.
    ///
    /// # Panics
    /// If either id is not below [`Backend::kv_blocks`].
    fn copy_block(&mut self, copy: BlockCopy);

    /// Begins one step: feeds every span's tokens to the model and writes their keys
    /// and values. The backend fills `output` with the results of the plan before the
    /// step is [finished](Self::finish).
    ///
    /// # Errors
    /// [`BackendError::Plan`] or [`BackendError::Sample`] if the plan breaks a rule of
    /// [`Span`], [`SampleRequest`] or [`StepLimits`]; nothing ran in this case.
    /// [`BackendError::Device`] if the device failed; the backend must not be used
    /// again.
    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError>;

    /// Waits for the oldest step that was begun and not finished. `output` must be the
    /// one that was passed to [`Self::begin`] for this step.
    ///
    /// # Errors
    /// [`BackendError::Device`] if the device failed; the backend must not be used
    /// again.
    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        let _ = output; // `begin` has filled it already
        Ok(())
    }

    /// Runs one step from begin to end.
    ///
    /// # Errors
    /// The same errors as [`Self::begin`].
    fn step(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        self.begin(plan, output)?;
        self.finish(output)
    }

    /// Returns true if one more step may begin before the previous step is finished.
    /// That step may take samples of the previous step as its
    /// [input](StepPlan::token_feedback).
    fn runs_ahead(&self) -> bool {
        false
    }

    /// Tells the backend that the calling thread will run every further step.
    fn enter(&mut self) {}

    /// Waits until this backend may use the device. The engine calls it before a step,
    /// outside the step's time. A backend that shares its device with no other process
    /// has nothing to do.
    ///
    /// # Errors
    /// [`BackendError::Device`] if the device is no longer available.
    fn acquire(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// Tells the backend that a step took `busy`, from the scheduling decision to the
    /// last token, and that another step may follow at once.
    fn stepped(&mut self, busy: Duration) {
        let _ = busy;
    }

    /// Tells the backend that no step follows until there is new work. Other processes
    /// may use the device in the meantime.
    fn release(&mut self) {}
}

/// A copy of one block's content to another block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockCopy {
    /// Block to read.
    pub from: u32,
    /// Block to write.
    pub to: u32,
}

/// The plan of one step: the new tokens of each sequence in the step.
#[derive(Clone, Copy, Debug)]
pub struct StepPlan<'a> {
    /// The spans, in any order. No two spans may write to the same KV block.
    pub spans: &'a [Span<'a>],
    /// The results that the step must produce from its rows of logits.
    pub results: Results<'a>,
    /// Empty, or one entry for each span: the index of a sample of the previous step.
    /// That sample's token becomes the span's single input token, and the backend
    /// ignores the token in [`Span::tokens`].
    pub token_feedback: &'a [u32],
}

/// The results that a step produces from its rows of logits.
#[derive(Clone, Copy, Debug)]
pub enum Results<'a> {
    /// The rows of logits themselves.
    Logits,
    /// Tokens that the device samples from the rows, at most [`StepLimits::samples`].
    Samples(&'a [SampleRequest<'a>]),
}

/// A request for one token from a row of logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    /// Index of the row. Rows are counted in the order of the spans and, within a span,
    /// of its tokens.
    pub row: u32,
    /// The sampling parameters, which also say whether log-probabilities are reported.
    pub params: &'a SamplingParams,
    /// The token to take from the row.
    pub token: SampleTarget<'a>,
}

/// The token to take from a row of logits.
#[derive(Clone, Copy, Debug)]
pub enum SampleTarget<'a> {
    /// A token that is already known. Only its log-probability is computed.
    Given(u32),
    /// The next token of a choice, which is sampled.
    Next {
        /// The state of the choice at this token.
        point: SamplingPoint<'a>,
        /// Index of the previous step's sample that belongs to this choice and is not
        /// yet part of the counts in `point`.
        pending: Option<u32>,
    },
}

/// The new tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// The tokens: at least one, each below [`ModelShape::vocabulary`].
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`, which is also the number of tokens already in the KV
    /// cache. `start + tokens.len()` is at most [`ModelShape::context`].
    pub start: u32,
    /// The sequence's KV blocks in order of position, [`BLOCK_TOKENS`] tokens each. The
    /// blocks cover at least `start + tokens.len()` tokens.
    pub blocks: &'a [u32],
    /// The tokens that produce a row of logits.
    pub logits: LogitRows,
}

/// The tokens of a span that produce a row of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// No token, as in every chunk of a prefill but the last.
    None,
    /// The last token only: one row.
    Last,
    /// Every token: as many rows as tokens.
    All,
}

/// The results of a step. Callers keep one and pass it again, so that its memory is
/// reused.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Rows of logits. The vector only grows; elements after the last row are left over
    /// from earlier steps.
    logits: Vec<f32>,
    rows: usize,
    vocabulary: usize,
    sampled: Vec<Option<SampledToken>>,
    sampler: Sampler,
    device_time: Option<DeviceNanos>,
    transfers: Option<Transfers>,
}

/// The most that one step may ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Tokens over all spans.
    pub tokens: u32,
    /// Rows of logits over all spans.
    pub logit_rows: u32,
}

/// The dimensions and the identity of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Tokens that one sequence may hold, prompt and completion together.
    pub context: u32,
    /// Elements of a row of logits. Every token id is below this number.
    pub vocabulary: u32,
    /// Number of transformer layers.
    pub layers: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of keys and values over all layers for one token of context, as this
    /// backend stores them.
    pub kv_bytes_per_token: u64,
    /// Tokens that end a completion, in the order of the model's own files.
    pub end_tokens: Vec<u32>,
    /// The sampling parameters of requests that name none.
    pub sampling_defaults: SamplingDefaults,
    /// SHA-256 over the configuration and the weights, in hex.
    pub hash: String,
}

/// A description of a backend's device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's class. Times of devices of one class are comparable.
    pub class: DeviceClass,
    /// The device's name, for people.
    pub name: String,
    /// The device's UUID; empty on a CPU.
    pub uuid: String,
    /// Threads that compute; 0 for devices without host threads.
    pub threads: u32,
}

/// The reasons why a step did not run.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The plan is malformed, which is a mistake of the scheduler. Nothing ran.
    #[error("span {span}: {reason}")]
    Plan {
        /// Index of the offending span.
        span: usize,
        /// The rule that is broken.
        reason: PlanFault,
    },
    /// A sample request is malformed, which is a mistake of the scheduler. Nothing ran.
    #[error("sample {sample}: {reason}")]
    Sample {
        /// Index of the offending sample.
        sample: usize,
        /// The rule that is broken.
        reason: SampleFault,
    },
    /// The device failed in the middle of a step.
    #[error("{0}")]
    Device(String),
}

/// The rules that a plan can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanFault {
    /// A span without tokens.
    #[error("no tokens")]
    Empty,
    /// A token id outside the model's vocabulary.
    #[error("token {token} is not below the vocabulary of {vocabulary}")]
    Token {
        /// The id of the token.
        token: u32,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
    /// A span that ends past the model's context.
    #[error("it ends at token {end}, past the context of {context} tokens")]
    Context {
        /// Tokens in the KV cache after the span.
        end: u64,
        /// Tokens that the context holds.
        context: u32,
    },
    /// A block table that does not cover its span.
    #[error("{blocks} KV blocks do not cover {end} tokens")]
    BlocksShort {
        /// Number of blocks in the table.
        blocks: usize,
        /// Tokens that the table must cover.
        end: u64,
    },
    /// A block id outside the pool.
    #[error("KV block {block} is not below the pool of {pool}")]
    Block {
        /// The id of the block.
        block: u32,
        /// Number of blocks in the pool.
        pool: u32,
    },
    /// A KV block that two spans write to, or that one span writes to twice.
    #[error("KV block {block} is written twice in one step")]
    BlockShared {
        /// The id of the block.
        block: u32,
    },
    /// More tokens than [`StepLimits::tokens`], counted up to this span.
    #[error("more than {limit} tokens in one step")]
    TooManyTokens {
        /// The limit that was exceeded.
        limit: u32,
    },
    /// Token feedback for a span with more than one token, or not exactly one entry for
    /// each span.
    #[error("token feedback needs one entry for each span, and one token in each span")]
    Feedback,
    /// More rows than [`StepLimits::logit_rows`], counted up to this span.
    #[error("more than {limit} rows of logits in one step")]
    TooManyRows {
        /// The limit that was exceeded.
        limit: u32,
    },
}

/// The rules that a sample request can break.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleFault {
    /// A row that the step does not have.
    #[error("row {row} is not below the step's {rows} rows")]
    Row {
        /// Index of the row.
        row: u32,
        /// Number of rows in the step.
        rows: usize,
    },
    /// More samples than [`StepLimits::samples`].
    #[error("more than {limit} samples in one step")]
    TooMany {
        /// The limit that was exceeded.
        limit: u32,
    },
    /// A reference to a sample that the previous step did not have.
    #[error("the previous step had only {samples} samples")]
    Previous {
        /// Number of samples in the previous step.
        samples: usize,
    },
}

impl Span<'_> {
    /// Returns the number of tokens in the KV cache after the span has run.
    pub fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }

    /// Returns the number of rows of logits that the span produces.
    pub fn rows(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.tokens.len(),
        }
    }
}

impl StepLimits {
    /// Returns the most samples of one step: one for each row, and one more for each
    /// sequence.
    pub fn samples(&self) -> u32 {
        2 * self.logit_rows
    }
}

impl<'a> StepPlan<'a> {
    /// Builds a plan that returns its rows of logits.
    pub fn logits(spans: &'a [Span<'a>]) -> Self {
        Self { spans, results: Results::Logits, token_feedback: &[] }
    }

    /// Builds a plan that samples tokens.
    pub fn samples(spans: &'a [Span<'a>], samples: &'a [SampleRequest<'a>]) -> Self {
        Self { spans, results: Results::Samples(samples), token_feedback: &[] }
    }

    /// Checks every rule of [`Span`] and [`StepLimits`] that concerns a single span.
    ///
    /// # Errors
    /// [`BackendError::Plan`] with the first offending span, or
    /// [`BackendError::Sample`].
    pub fn check(
        &self,
        shape: &ModelShape,
        limits: StepLimits,
        kv_blocks: u32,
    ) -> Result<(), BackendError> {
        let (mut tokens, mut rows) = (0_u64, 0_u64);
        for (index, span) in self.spans.iter().enumerate() {
            tokens += span.tokens.len() as u64;
            rows += span.rows() as u64;
            span.check(shape, kv_blocks)
                .and_then(|()| {
                    within(tokens, limits.tokens, |limit| PlanFault::TooManyTokens { limit })
                })
                .and_then(|()| {
                    within(rows, limits.logit_rows, |limit| PlanFault::TooManyRows { limit })
                })
                .map_err(|reason| BackendError::Plan { span: index, reason })?;
        }
        // The limits are u32, so the sums that passed fit into usize.
        self.check_samples(rows as usize, limits)?;
        // Feedback replaces a span's token. A span with more tokens would need an entry
        // for each.
        let can_be_fed = |span: &Span<'_>| span.tokens.len() == 1;
        let unfed = match self.token_feedback.len() {
            0 => None,
            fed if fed == self.spans.len() => self.spans.iter().position(|span| !can_be_fed(span)),
            // A wrong number of entries is reported at the first span without a
            // partner.
            fed => Some(fed.min(self.spans.len())),
        };
        match unfed {
            Some(span) => Err(BackendError::Plan { span, reason: PlanFault::Feedback }),
            None => Ok(()),
        }
    }

    fn check_samples(&self, rows: usize, limits: StepLimits) -> Result<(), BackendError> {
        let Results::Samples(samples) = self.results else { return Ok(()) };
        let most = limits.samples();
        if samples.len() > most as usize {
            let reason = SampleFault::TooMany { limit: most };
            return Err(BackendError::Sample { sample: most as usize, reason });
        }
        // Backends index rows with this number, on a GPU without a bounds check.
        match (0..).zip(samples).find(|(_, sample)| sample.row as usize >= rows) {
            Some((sample, &SampleRequest { row, .. })) => {
                Err(BackendError::Sample { sample, reason: SampleFault::Row { row, rows } })
            }
            None => Ok(()),
        }
    }

    /// Checks that every reference to a sample of the previous step is below
    /// `previous`, the number of samples of that step.
    ///
    /// # Errors
    /// [`BackendError::Sample`] otherwise.
    pub fn check_feedback(&self, previous: usize) -> Result<(), BackendError> {
        let pending = self.results.samples().iter().map(SampleRequest::pending);
        let fed = self.token_feedback.iter().copied().map(Some);
        let wrong = pending.chain(fed).flatten().find(|&sample| sample as usize >= previous);
        wrong.map_or(Ok(()), |sample| {
            let reason = SampleFault::Previous { samples: previous };
            Err(BackendError::Sample { sample: sample as usize, reason })
        })
    }
}

impl<'a> Results<'a> {
    /// Returns the requested samples; empty if the rows themselves are the result.
    pub fn samples(self) -> &'a [SampleRequest<'a>] {
        match self {
            Self::Logits => &[],
            Self::Samples(samples) => samples,
        }
    }
}

impl SampleTarget<'_> {
    /// Returns the first token of a choice with seed 0, for measurements.
    pub fn first() -> Self {
        Self::Next {
            point: SamplingPoint {
                seed: 0,
                position: 0,
                counts: &NO_COUNTS,
                prompt: &[],
                constraint: None,
            },
            pending: None,
        }
    }
}

impl<'a> SampleRequest<'a> {
    /// Returns the distinct tokens of the prompt if a repetition penalty applies
    /// to them, else nothing.
    pub fn penalised_prompt(&self) -> &'a [u32] {
        match self.token {
            SampleTarget::Next { point, .. } if self.params.penalises_repetition() => point.prompt,
            SampleTarget::Next { .. } | SampleTarget::Given(_) => &[],
        }
    }

    /// Returns the index of the previous step's sample that the counts do not include
    /// yet.
    pub fn pending(&self) -> Option<u32> {
        match self.token {
            SampleTarget::Given(_) => None,
            SampleTarget::Next { pending, .. } => pending,
        }
    }

    /// Returns true if the token must be one that a grammar allows.
    fn needs_mask(&self) -> bool {
        matches!(self.token, SampleTarget::Next { point, .. } if point.constraint.is_some())
    }

    /// Takes the token from `row`. `None` if the row gives no token in this step.
    fn draw(
        &self,
        row: &[f32],
        sampler: &mut Sampler,
        wait: &mut MaskWait,
    ) -> Option<SampledToken> {
        let &Self { params, token, .. } = self;
        match token {
            SampleTarget::Next { point, .. } => match point.constraint {
                None => sampler.sample(row, params, point, None),
                Some(constraint) => {
                    sampler.sample(row, params, point, Some(&*constraint.mask(wait)?))
                }
            },
            SampleTarget::Given(token) => {
                // A given token always has its log-probability, the list beside it only on
                // request.
                let top = params.top_logprobs.unwrap_or(0) as usize;
                Some(SampledToken { token, logprobs: Some(token_logprobs(row, token, top)) })
            }
        }
    }
}

impl Span<'_> {
    fn check(&self, shape: &ModelShape, pool: u32) -> Result<(), PlanFault> {
        let &ModelShape { vocabulary, context, .. } = shape;
        let end = self.end();
        if self.tokens.is_empty() {
            return Err(PlanFault::Empty);
        }
        if let Some(&token) = self.tokens.iter().find(|&&token| token >= vocabulary) {
            return Err(PlanFault::Token { token, vocabulary });
        }
        if end > u64::from(context) {
            return Err(PlanFault::Context { end, context });
        }
        // Kernels look blocks up by position without a bounds check.
        if end > self.blocks.len() as u64 * u64::from(BLOCK_TOKENS) {
            return Err(PlanFault::BlocksShort { blocks: self.blocks.len(), end });
        }
        match self.blocks.iter().find(|&&block| block >= pool) {
            Some(&block) => Err(PlanFault::Block { block, pool }),
            None => Ok(()),
        }
    }
}

impl StepOutput {
    /// Returns the number of rows of logits.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns row `row` of the logits, one element for each token of the vocabulary.
    ///
    /// # Panics
    /// If `row` is not below [`StepOutput::rows`].
    pub fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.rows, "a row of the step");
        &self.logits[row * self.vocabulary..][..self.vocabulary]
    }

    /// Returns the sampled tokens in the order of the plan's requests. An entry is
    /// `None` if its row had no finite logit.
    pub fn sampled(&self) -> &[Option<SampledToken>] {
        &self.sampled
    }

    /// Removes and returns the sampled tokens, in the order of [`Self::sampled`].
    pub fn take_sampled(&mut self) -> impl Iterator<Item = Option<SampledToken>> + '_ {
        self.sampled.drain(..)
    }

    /// Stores sampled tokens. Backends that sample on the device call this method.
    pub fn set_sampled(&mut self, sampled: impl IntoIterator<Item = Option<SampledToken>>) {
        self.sampled.clear();
        self.sampled.extend(sampled);
    }

    /// Samples the plan's tokens from the rows. Backends whose rows are in host memory
    /// call this method after all rows are written.
    ///
    /// # Panics
    /// If the plan has token feedback, which such a backend does not support.
    pub fn sample(&mut self, plan: &StepPlan<'_>) {
        assert!(
            plan.token_feedback.is_empty(),
            "a backend that does not run ahead takes no token feedback"
        );
        let Self { logits, vocabulary, sampled, sampler, .. } = self;
        let samples = plan.results.samples();
        sampled.clear();
        sampled.resize_with(samples.len(), || None);
        let mut wait = MaskWait::new();
        // Rows with a mask come last: their masks are computed meanwhile.
        for is_masked in [false, true] {
            let rows = samples.iter().zip(&mut *sampled);
            for (sample, sampled) in rows.filter(|(sample, _)| sample.needs_mask() == is_masked) {
                let row = &logits[sample.row as usize * *vocabulary..][..*vocabulary];
                *sampled = sample.draw(row, sampler, &mut wait);
            }
        }
    }

    /// Returns the device's own measurement of the step's time. `None` if the calling
    /// thread is the device; the caller's clock then measures the step.
    pub fn device_time(&self) -> Option<DeviceNanos> {
        self.device_time
    }

    /// Stores the device's time. Backends call this method after [`StepOutput::reset`].
    pub fn set_device_time(&mut self, time: DeviceNanos) {
        self.device_time = Some(time);
    }

    /// Returns the time of the step's transfers to and from the device, by the device's
    /// clock. `None` if the device is the host. The time is part of
    /// [`StepOutput::device_time`].
    pub fn transfers(&self) -> Option<Transfers> {
        self.transfers
    }

    /// Stores the transfer times. Backends call this method after
    /// [`StepOutput::reset`].
    pub fn set_transfers(&mut self, transfers: Transfers) {
        self.transfers = Some(transfers);
    }

    /// Makes room for rows of logits, each of the vocabulary's length, and returns it for
    /// a backend to overwrite. The content is unspecified before that.
    pub fn reset(&mut self, [rows, vocabulary]: [usize; 2]) -> &mut [f32] {
        self.device_time = None;
        self.sampled.clear();
        self.transfers = None;
        // No multiplication overflow: the limits keep a step's logits far below usize.
        let elements = rows * vocabulary;
        self.vocabulary = vocabulary;
        self.rows = rows;
        // Shrinking and growing again would clear the memory each time.
        if self.logits.len() < elements {
            self.logits.resize(elements, 0.0);
        }
        &mut self.logits[..elements]
    }
}

impl ModelShape {
    /// Returns the memory and the arithmetic that attention needs for a token.
    pub fn attention(&self) -> AttentionShape {
        AttentionShape {
            kv_bytes_per_token: self.kv_bytes_per_token,
            // Two are for the score and two for the weighted value of each element.
            flop_per_pair: 4
                * u64::from(self.layers)
                * u64::from(self.heads)
                * u64::from(self.head_dim),
        }
    }
}

/// The counts of a choice that has generated nothing.
static NO_COUNTS: TokenCounts = TokenCounts::new();

fn within(sum: u64, limit: u32, fault: impl FnOnce(u32) -> PlanFault) -> Result<(), PlanFault> {
    if sum <= u64::from(limit) { Ok(()) } else { Err(fault(limit)) }
}
