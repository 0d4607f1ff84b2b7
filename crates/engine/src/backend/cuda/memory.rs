//! What a step needs of the device's memory, all of it taken at the start:
//! activations between the kernels, the KV cache, and the plan's words.

use std::sync::Arc;

use super::driver::{Context, DriverFault, Memory, Pinned};
use super::layout::Room;
use super::products::bucket;
use crate::backend::{BLOCK_TOKENS, StepLimits};
use crate::model::ModelConfig;

/// Rows of tokens between the kernels.
pub(super) struct Buffers {
    /// The plan's words, on the host and on the device.
    pub(super) plan: Pinned,
    pub(super) plan_words: Memory,
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
    /// f32 `[row][vocabulary]`, on the device and on the host.
    pub(super) logits: Memory,
    pub(super) host_logits: Pinned,
}

impl Buffers {
    pub(super) fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        limits: StepLimits,
        room: Room,
        parts: usize,
    ) -> Result<Self, DriverFault> {
        let rows = bucket(limits.tokens) as usize;
        let logits = bucket(limits.logit_rows) as usize * config.vocabulary as usize;
        let (hidden, head) = (config.hidden as usize, config.head_dim as usize);
        let (queries, keys) = (config.query_width(), config.kv_width());
        let intermediate = config.intermediate as usize;
        let halves = |elements: usize| context.allocate(2 * elements);
        let floats = |elements: usize| context.allocate(4 * elements);
        Ok(Self {
            plan: context.pinned(4 * room.words())?,
            plan_words: floats(room.words())?,
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
            host_logits: context
                .pinned(4 * limits.logit_rows as usize * config.vocabulary as usize)?,
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
