//! What a step needs of the device's memory, all of it taken at the start:
//! activations between the kernels, the KV cache, and the plan's words.

use std::sync::Arc;

use super::choices::DrawnPlaces;
use super::driver::{Context, DriverFault, Event, Memory, Pinned};
use super::kernels::sums_of_sample;
use super::products::bucket;
use super::room::Room;
use crate::backend::{BLOCK_TOKENS, StepLimits};
use crate::model::ModelConfig;

/// Rows of tokens between the kernels.
pub(super) struct Buffers {
    /// f32 `[token][hidden]`.
    pub(super) residual: Memory,
    /// bf16 `[token][hidden]`.
    pub(super) normed: Memory,
    /// f32 `[token][queries, keys, values]`.
    pub(super) qkv: Memory,
    /// bf16 `[token][queries]`.
    pub(super) queries: Memory,
    /// bf16 `[token][queries]`.
    pub(super) attended: Memory,
    /// bf16 `[token][2 * intermediate]`.
    pub(super) gate_up: Memory,
    /// bf16 `[token][intermediate]`.
    pub(super) gated: Memory,
    /// f32 `[token][head_dim]`.
    pub(super) angles: Memory,
    /// f32 `[part][head_dim]`, for attention in parts.
    pub(super) partial: Memory,
    /// Two f32 a part.
    pub(super) softmax: Memory,
    /// f32 `[row][vocabulary]`.
    pub(super) logits: Memory,
    /// f32 `[row][vocabulary]`, for tokens that are drawn by chance.
    pub(super) weights: Memory,
    /// f64 `[row][256 tokens]`, likewise.
    pub(super) sums: Memory,
}

impl Buffers {
    pub(super) fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        limits: StepLimits,
        parts: usize,
    ) -> Result<Self, DriverFault> {
        let rows = bucket(limits.tokens) as usize;
        let draws = limits.logit_rows as usize;
        let logits = bucket(limits.logit_rows) as usize * config.vocabulary as usize;
        let (hidden, head) = (config.hidden as usize, config.head_dim as usize);
        let (queries, keys) = (config.query_width(), config.kv_width());
        let intermediate = config.intermediate as usize;
        let halves = |elements: usize| context.allocate(2 * elements);
        let floats = |elements: usize| context.allocate(4 * elements);
        Ok(Self {
            residual: floats(rows * hidden)?,
            normed: halves(rows * hidden)?,
            qkv: floats(rows * (queries + 2 * keys))?,
            queries: halves(rows * queries)?,
            attended: halves(rows * queries)?,
            gate_up: halves(rows * 2 * intermediate)?,
            gated: halves(rows * intermediate)?,
            angles: floats(rows * head)?,
            partial: floats(parts * head)?,
            softmax: floats(2 * parts)?,
            logits: floats(logits)?,
            weights: floats(draws * config.vocabulary as usize)?,
            sums: context.allocate(8 * draws * sums_of_sample(config.vocabulary) as usize)?,
        })
    }
}

/// What goes to the device for a step and what comes back. There are two, so
/// that one step can be made ready while the other runs.
pub(super) struct Slot {
    /// The plan's words, before they are copied.
    pub(super) plan: Pinned,
    /// What was drawn: it feeds the next step, too.
    pub(super) drawn: Memory,
    pub(super) host_drawn: Pinned,
    pub(super) began: Event,
    /// The plan is on the device.
    pub(super) loaded: Event,
    /// All that is wanted is computed.
    pub(super) computed: Event,
    pub(super) ended: Event,
    /// What is told of each draw.
    pub(super) told: Vec<Option<u32>>,
    /// Rows of logits that are wanted themselves.
    pub(super) rows: usize,
}

impl Slot {
    pub(super) fn new(context: &Arc<Context>, room: &Room) -> Result<Self, DriverFault> {
        let drawn = DrawnPlaces::of(room.draws).bytes();
        Ok(Self {
            plan: context.pinned(4 * room.words())?,
            drawn: context.allocate(drawn)?,
            host_drawn: context.pinned(drawn)?,
            began: context.event()?,
            loaded: context.event()?,
            computed: context.event()?,
            ended: context.event()?,
            told: Vec::with_capacity(room.draws),
            rows: 0,
        })
    }
}

/// Keys and values of every sequence: `[layer][block][kv_head][16][head_dim]`
/// in bf16, one array each.
pub(super) struct Cache {
    pub(super) keys: Memory,
    pub(super) values: Memory,
    pub(super) blocks: u32,
    pub(super) block_elements: u32,
}

impl Cache {
    /// Takes the memory and makes it zero: what another process left there is
    /// nobody's business.
    pub(super) fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        blocks: u32,
    ) -> Result<Self, DriverFault> {
        let block_elements = BLOCK_TOKENS * config.kv_width() as u32;
        let elements = config.layers as usize * blocks as usize * block_elements as usize;
        let (keys, values) = (context.allocate(2 * elements)?, context.allocate(2 * elements)?);
        context.clear(&keys)?;
        context.clear(&values)?;
        Ok(Self { keys, values, blocks, block_elements })
    }

    /// Elements of one layer in each array.
    pub(super) fn layer_elements(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.block_elements)
    }
}

/// Bytes of keys and values over all layers for one token.
pub(super) fn kv_bytes_per_token(config: &ModelConfig) -> u64 {
    2 * 2 * u64::from(config.layers) * config.kv_width() as u64
}
