//! The seam between the scheduler and a device: one ragged step of a model's
//! forward pass over a paged KV cache.
//!
//! The engine's thread owns a backend and calls it step by step. A backend
//! knows tokens, positions and KV blocks; it knows no request and no tenant.
//! It never allocates on the path of a step once it is warm, and a step that
//! it refuses has changed nothing.

pub mod cpu;
pub mod cuda;
pub mod synthetic;

use std::time::Duration;

pub use tollgate_domain::Transfers;
use tollgate_domain::{AttentionShape, DeviceClass, DeviceNanos};

use crate::sample::{
    SampledToken, Sampler, SamplingParams, SamplingPoint, TokenCounts, token_logprobs,
};

/// Tokens that one KV block holds.
pub const BLOCK_TOKENS: u32 = 16;

/// A model on a device.
pub trait Backend: Send {
    /// What the model looks like from outside.
    fn shape(&self) -> &ModelShape;

    /// What it runs on.
    fn device(&self) -> &DeviceInfo;

    /// KV blocks in the pool: ids are `0..kv_blocks()`. Fixed for life.
    fn kv_blocks(&self) -> u32;

    /// The most that one step may ask for. Fixed for life.
    fn limits(&self) -> StepLimits;

    /// Copies the keys and values of every layer of block `from` into `to`.
    ///
    /// # Panics
    /// If either is not below [`Backend::kv_blocks`].
    fn copy_block(&mut self, from: u32, to: u32);

    /// Begins one step: feeds every span's tokens, writes their keys and
    /// values, and fills `output` with what the plan wants, here or at the
    /// latest when the step is [finished](Self::finish).
    ///
    /// # Errors
    /// [`BackendError::Plan`] or [`BackendError::Sample`] when the plan breaks a
    /// rule of [`Span`], [`SampleRequest`] or [`StepLimits`], before anything ran;
    /// [`BackendError::Device`] when the device failed, after which the
    /// backend is not to be used again.
    fn begin(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError>;

    /// Waits for the first step that was begun and not finished; `output` is
    /// the one that it was begun with.
    ///
    /// # Errors
    /// [`BackendError::Device`], as there.
    fn finish(&mut self, output: &mut StepOutput) -> Result<(), BackendError> {
        let _ = output; // it was whole when the step had begun
        Ok(())
    }

    /// Runs one step to its end.
    ///
    /// # Errors
    /// As [`Self::begin`].
    fn step(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError> {
        self.begin(plan, output)?;
        self.finish(output)
    }

    /// Whether one more step may begin before the last is finished, and may be
    /// [fed](StepPlan::token_feedback) with what that one draws.
    fn runs_ahead(&self) -> bool {
        false
    }

    /// The calling thread is the one that runs every step from here on.
    fn enter(&mut self) {}

    /// Waits until the device is this backend's to use. Called before a step,
    /// outside its time: where nobody else uses the device there is nothing to
    /// do.
    ///
    /// # Errors
    /// [`BackendError::Device`] when it cannot be had any more.
    fn acquire(&mut self) -> Result<(), BackendError> {
        Ok(())
    }

    /// A step took `busy`, from the decision to the last token; another may
    /// follow at once.
    fn stepped(&mut self, busy: Duration) {
        let _ = busy;
    }

    /// No step follows until there is work again: others may use the device.
    fn release(&mut self) {}
}

/// One step: the new tokens of each sequence in it.
#[derive(Clone, Copy, Debug)]
pub struct StepPlan<'a> {
    /// In any order. No two spans may write to the same KV block.
    pub spans: &'a [Span<'a>],
    /// What its rows of logits are wanted for.
    pub results: Results<'a>,
    /// Empty; or for each span, which has one token then, the draw of the step
    /// before that this token is: what the span says of it is not read.
    pub token_feedback: &'a [u32],
}

/// What a step's rows of logits are wanted for.
#[derive(Clone, Copy, Debug)]
pub enum Results<'a> {
    /// Themselves.
    Logits,
    /// Tokens, drawn where the rows are: at most [`StepLimits::samples`].
    Samples(&'a [SampleRequest<'a>]),
}

/// A token that is wanted of a row of logits.
#[derive(Clone, Copy, Debug)]
pub struct SampleRequest<'a> {
    /// The row, in the order of the spans and, within one, of tokens.
    pub row: u32,
    /// How it is drawn and what is told of it.
    pub params: &'a SamplingParams,
    /// Which it is.
    pub token: SampleTarget<'a>,
}

/// Which token is wanted of a row.
#[derive(Clone, Copy, Debug)]
pub enum SampleTarget<'a> {
    /// The one that stands there: its log-probabilities are wanted.
    Given(u32),
    /// The next one of a choice.
    Next {
        /// Where in the choice.
        point: SamplingPoint<'a>,
        /// The draw of the step before that belongs to the choice and that its
        /// counts do not know yet.
        pending: Option<u32>,
    },
}

/// New tokens of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct Span<'a> {
    /// The tokens, at least one, each below [`ModelShape::vocabulary`].
    pub tokens: &'a [u32],
    /// Position of `tokens[0]`: how many tokens are in the KV cache already.
    /// `start + tokens.len()` is at most [`ModelShape::context`].
    pub start: u32,
    /// The sequence's KV blocks in order of position, [`BLOCK_TOKENS`] each;
    /// they cover at least `start + tokens.len()` tokens.
    pub blocks: &'a [u32],
    /// Which of its tokens want logits.
    pub logits: LogitRows,
}

/// Which tokens of a span want logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogitRows {
    /// None: a chunk of prefill that is not the last.
    None,
    /// The last token only: one row.
    Last,
    /// Every token: as many rows as tokens.
    All,
}

/// What a step computed. Keep it between steps: its memory is reused.
#[derive(Debug, Default)]
pub struct StepOutput {
    /// Only ever grows; what lies behind the rows is left over.
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

/// What a model looks like from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Tokens that one sequence may hold, prompt and completion together.
    pub context: u32,
    /// Width of a row of logits: token ids are below it.
    pub vocabulary: u32,
    /// Transformer layers.
    pub layers: u32,
    /// Attention heads of the queries.
    pub heads: u32,
    /// Attention heads of keys and values.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of K and V over all layers for one token of context, as this
    /// backend stores them.
    pub kv_bytes_per_token: u64,
    /// Tokens that end a completion, in the order of the model's own files.
    pub end_tokens: Vec<u32>,
    /// Hex SHA-256 over config and weights.
    pub hash: String,
}

/// What a backend runs on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Devices of one class have comparable time.
    pub class: DeviceClass,
    /// For people.
    pub name: String,
    /// The device's own identity; empty on a CPU.
    pub uuid: String,
    /// Threads that compute; 0 where the word means nothing.
    pub threads: u32,
}

/// Why a step did not run.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// The plan is malformed: a mistake of the scheduler. Nothing ran.
    #[error("span {span}: {reason}")]
    Plan {
        /// Index of the offending span.
        span: usize,
        /// What is wrong with it.
        reason: PlanFault,
    },
    /// A draw is malformed: a mistake of the scheduler. Nothing ran.
    #[error("sample {sample}: {reason}")]
    Sample {
        /// Index of the offending sample.
        sample: usize,
        /// What is wrong with it.
        reason: SampleFault,
    },
    /// The device failed in the middle of a step.
    #[error("{0}")]
    Device(String),
}

/// What is wrong with a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanFault {
    /// A span without tokens.
    #[error("no tokens")]
    Empty,
    /// A token id that the model has no row for.
    #[error("token {token} is not below the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Its bound.
        vocabulary: u32,
    },
    /// The span ends behind the model's context.
    #[error("it ends at token {end}, past the context of {context} tokens")]
    Context {
        /// Tokens in the KV cache after the span.
        end: u64,
        /// The bound.
        context: u32,
    },
    /// The block table does not cover the span.
    #[error("{blocks} KV blocks do not cover {end} tokens")]
    BlocksShort {
        /// Blocks given.
        blocks: usize,
        /// Tokens to cover.
        end: u64,
    },
    /// A block id outside the pool.
    #[error("KV block {block} is not below the pool of {pool}")]
    Block {
        /// The block.
        block: u32,
        /// The pool's size.
        pool: u32,
    },
    /// Two spans, or one twice, write to the same KV block.
    #[error("KV block {block} is written twice in one step")]
    BlockShared {
        /// The block.
        block: u32,
    },
    /// More tokens than [`StepLimits::tokens`] up to and with this span.
    #[error("more than {limit} tokens in one step")]
    TooManyTokens {
        /// The bound.
        limit: u32,
    },
    /// A span that is fed by the step before, and has not just one token; or
    /// not every span is.
    #[error("token feedback needs one entry for each span, and one token in each span")]
    Feedback,
    /// More rows than [`StepLimits::logit_rows`] up to and with this span.
    #[error("more than {limit} rows of logits in one step")]
    TooManyRows {
        /// The bound.
        limit: u32,
    },
}

/// What is wrong with a draw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SampleFault {
    /// A row that the step does not have.
    #[error("row {row} is not below the step's {rows} rows")]
    Row {
        /// The row.
        row: u32,
        /// Rows of the step.
        rows: usize,
    },
    /// More than [`StepLimits::samples`].
    #[error("more than {limit} samples in one step")]
    TooMany {
        /// The bound.
        limit: u32,
    },
    /// A draw of the step before that there was not.
    #[error("the previous step had only {samples} samples")]
    Previous {
        /// How many it had.
        samples: usize,
    },
}

impl Span<'_> {
    /// Tokens in the KV cache once the span has run.
    pub fn end(&self) -> u64 {
        u64::from(self.start) + self.tokens.len() as u64
    }

    /// Rows of logits that it asks for.
    pub fn rows(&self) -> usize {
        match self.logits {
            LogitRows::None => 0,
            LogitRows::Last => 1,
            LogitRows::All => self.tokens.len(),
        }
    }
}

impl StepLimits {
    /// Draws over all rows: one of each, and one more for every sequence.
    pub fn samples(&self) -> u32 {
        2 * self.logit_rows
    }
}

impl<'a> StepPlan<'a> {
    /// A plan whose rows of logits are wanted themselves.
    pub fn logits(spans: &'a [Span<'a>]) -> Self {
        Self { spans, results: Results::Logits, token_feedback: &[] }
    }

    /// A plan of which tokens are wanted.
    pub fn samples(spans: &'a [Span<'a>], samples: &'a [SampleRequest<'a>]) -> Self {
        Self { spans, results: Results::Samples(samples), token_feedback: &[] }
    }

    /// Checks the plan against every rule that [`Span`] and [`StepLimits`]
    /// state and that can be seen from one span at a time.
    ///
    /// # Errors
    /// [`BackendError::Plan`] with the first offending span.
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
        self.check_samples(rows as usize, limits)?;
        let can_be_fed = |span: &Span<'_>| span.tokens.len() == 1;
        let unfed = match self.token_feedback.len() {
            0 => None,
            fed if fed == self.spans.len() => self.spans.iter().position(|span| !can_be_fed(span)),
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
        match (0..).zip(samples).find(|(_, sample)| sample.row as usize >= rows) {
            Some((sample, &SampleRequest { row, .. })) => {
                Err(BackendError::Sample { sample, reason: SampleFault::Row { row, rows } })
            }
            None => Ok(()),
        }
    }

    /// Checks that every draw of the step before that this one speaks of is
    /// one of its `before`.
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
    /// The draws that are wanted.
    pub fn samples(self) -> &'a [SampleRequest<'a>] {
        match self {
            Self::Logits => &[],
            Self::Samples(samples) => samples,
        }
    }
}

impl SampleTarget<'_> {
    /// The first token of a choice, of any seed: for who measures.
    pub fn first() -> Self {
        Self::Next {
            point: SamplingPoint { seed: 0, position: 0, counts: &NO_COUNTS },
            pending: None,
        }
    }
}

impl SampleRequest<'_> {
    /// The draw of the step before whose token its counts do not know.
    pub fn pending(&self) -> Option<u32> {
        match self.token {
            SampleTarget::Given(_) => None,
            SampleTarget::Next { pending, .. } => pending,
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
    /// Rows of logits, in the order of the spans and, within one, of tokens.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Logits of row `row`, one for each token of the vocabulary.
    ///
    /// # Panics
    /// If `row` is not below [`StepOutput::rows`].
    pub fn row(&self, row: usize) -> &[f32] {
        assert!(row < self.rows, "a row of the step");
        &self.logits[row * self.vocabulary..][..self.vocabulary]
    }

    /// What was drawn, in the order of the plan's draws; `None` where a row
    /// had nothing to draw from.
    pub fn sampled(&self) -> &[Option<SampledToken>] {
        &self.sampled
    }

    /// As [`Self::drawn`], taken away.
    pub fn take_sampled(&mut self) -> impl Iterator<Item = Option<SampledToken>> + '_ {
        self.sampled.drain(..)
    }

    /// Says what was drawn: for a backend that draws by itself.
    pub fn set_sampled(&mut self, sampled: impl IntoIterator<Item = Option<SampledToken>>) {
        self.sampled.clear();
        self.sampled.extend(sampled);
    }

    /// Draws from the rows what the plan wants: for a backend whose rows are
    /// here, once they are whole.
    ///
    /// # Panics
    /// If the plan is fed by a step before, which no such backend can have.
    pub fn sample(&mut self, plan: &StepPlan<'_>) {
        assert!(
            plan.token_feedback.is_empty(),
            "a backend that does not run ahead takes no token feedback"
        );
        let Self { logits, vocabulary, sampled, sampler, .. } = self;
        sampled.clear();
        sampled.extend(plan.results.samples().iter().map(
            |&SampleRequest { row, params, token }| {
                let row = &logits[row as usize * *vocabulary..][..*vocabulary];
                match token {
                    SampleTarget::Next { point, .. } => sampler.sample(row, params, point),
                    SampleTarget::Given(token) => {
                        let top = params.top_logprobs.unwrap_or(0) as usize;
                        Some(SampledToken {
                            token,
                            logprobs: Some(token_logprobs(row, token, top)),
                        })
                    }
                }
            },
        ));
    }

    /// How long the device worked on the step, by its own clock; `None` where
    /// the device is the thread that called, whose clock the caller has.
    pub fn device_time(&self) -> Option<DeviceNanos> {
        self.device_time
    }

    /// Says how long the device worked: for a backend, after [`StepOutput::reset`].
    pub fn set_device_time(&mut self, time: DeviceNanos) {
        self.device_time = Some(time);
    }

    /// How long the step's data took to the device and back, by its own clock;
    /// `None` where the device is the host. Part of [`StepOutput::device_time`].
    pub fn transfers(&self) -> Option<Transfers> {
        self.transfers
    }

    /// Says how long they took: for a backend, after [`StepOutput::reset`].
    pub fn set_transfers(&mut self, transfers: Transfers) {
        self.transfers = Some(transfers);
    }

    /// Makes room for `rows` rows of `vocabulary` logits and hands it out for
    /// a backend to overwrite. What it holds before that is unspecified.
    pub fn reset(&mut self, rows: usize, vocabulary: usize) -> &mut [f32] {
        self.device_time = None;
        self.sampled.clear();
        self.transfers = None;
        let elements = rows * vocabulary;
        self.vocabulary = vocabulary;
        self.rows = rows;
        if self.logits.len() < elements {
            self.logits.resize(elements, 0.0);
        }
        &mut self.logits[..elements]
    }
}

impl ModelShape {
    /// What attention reads and computes for a token.
    pub fn attention(&self) -> AttentionShape {
        AttentionShape {
            kv_bytes_per_token: self.kv_bytes_per_token,
            flop_per_pair: 4
                * u64::from(self.layers)
                * u64::from(self.heads)
                * u64::from(self.head_dim),
        }
    }
}

/// Of a choice that has generated nothing.
static NO_COUNTS: TokenCounts = TokenCounts::new();

fn within(sum: u64, limit: u32, fault: impl FnOnce(u32) -> PlanFault) -> Result<(), PlanFault> {
    if sum <= u64::from(limit) { Ok(()) } else { Err(fault(limit)) }
}
