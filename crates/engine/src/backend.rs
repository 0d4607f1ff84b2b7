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

    /// Runs one step to its end: feeds every span's tokens, writes their keys
    /// and values, and fills `output` with the rows of logits asked for.
    ///
    /// # Errors
    /// [`BackendError::Plan`] when the plan breaks a rule of [`Span`] or of
    /// [`StepLimits`], before anything ran; [`BackendError::Device`] when the
    /// device failed, after which the backend is not to be used again.
    fn step(&mut self, plan: &StepPlan<'_>, output: &mut StepOutput) -> Result<(), BackendError>;

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
    /// The device failed in the middle of a step.
    #[error("device: {0}")]
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
    #[error("it ends at {end}, behind the context of {context}")]
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
    /// More rows than [`StepLimits::logit_rows`] up to and with this span.
    #[error("more than {limit} rows of logits in one step")]
    TooManyRows {
        /// The bound.
        limit: u32,
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

impl StepPlan<'_> {
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
        Ok(())
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

    /// As [`StepOutput::row`], for a sampler that works in place.
    ///
    /// # Panics
    /// If `row` is not below [`StepOutput::rows`].
    pub fn row_mut(&mut self, row: usize) -> &mut [f32] {
        assert!(row < self.rows, "a row of the step");
        &mut self.logits[row * self.vocabulary..][..self.vocabulary]
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

fn within(sum: u64, limit: u32, fault: impl FnOnce(u32) -> PlanFault) -> Result<(), PlanFault> {
    if sum <= u64::from(limit) { Ok(()) } else { Err(fault(limit)) }
}
