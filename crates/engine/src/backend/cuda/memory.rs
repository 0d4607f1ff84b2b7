//! The device memory of a step: activations between the kernels, the KV cache, and the
//! packed plan. All of it is taken at the start.

use std::sync::Arc;

use super::capacity::StepCapacity;
use super::driver::{Context, CudaEvent, DeviceMemory, DriverFault, Pinned};
use super::gemm::bucket;
use super::kernels::sums_of_sample;
use super::samples::SampledLayout;
use crate::backend::{BLOCK_TOKENS, StepLimits};
use crate::model::ModelConfig;

/// Activations between the kernels, one row for each token.
pub(super) struct DeviceBuffers {
    /// The residual stream, f32 `[token][hidden]`.
    pub(super) residual: DeviceMemory,
    /// Normalised activations, bf16 `[token][hidden]`.
    pub(super) normed: DeviceMemory,
    /// The QKV projection's output, f32 `[token][queries, keys, values]`.
    pub(super) qkv: DeviceMemory,
    /// Queries after RoPE, bf16 `[token][queries]`.
    pub(super) queries: DeviceMemory,
    /// Attention's output, bf16 `[token][queries]`.
    pub(super) attended: DeviceMemory,
    /// The gate and up projections' output, bf16 `[token][2 * intermediate]`.
    pub(super) gate_up: DeviceMemory,
    /// `silu(gate) * up`, bf16 `[token][intermediate]`.
    pub(super) gated: DeviceMemory,
    /// Cosines and sines of the positions, f32 `[token][head_dim]`.
    pub(super) angles: DeviceMemory,
    /// Partial sums of split attention, f32 `[part][head_dim]`.
    pub(super) partial: DeviceMemory,
    /// The maximum and the sum of each part's softmax: two f32 a part.
    pub(super) softmax: DeviceMemory,
    /// Logits, f32 `[row][vocabulary]`.
    pub(super) logits: DeviceMemory,
    /// Sampling weights, f32 `[row][vocabulary]`. Greedy samples do not use them.
    pub(super) weights: DeviceMemory,
    /// Sums of sampling weights over 256 tokens each, f64 `[row][vocabulary / 256]`.
    pub(super) sums: DeviceMemory,
}

impl DeviceBuffers {
    pub(super) fn new(
        context: &Arc<Context>,
        config: &ModelConfig,
        limits: StepLimits,
        parts: usize,
    ) -> Result<Self, DriverFault> {
        // Matrix products run on whole buckets of rows, so the buffers must hold a
        // whole bucket.
        let rows = bucket(limits.tokens) as usize;
        let samples = limits.logit_rows as usize;
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
            weights: floats(samples * config.vocabulary as usize)?,
            sums: context.allocate(8 * samples * sums_of_sample(config.vocabulary) as usize)?,
        })
    }
}

/// Memory and events of one step. There are two slots, so that one step can be prepared
/// while the other runs.
pub(super) struct Slot {
    /// The packed plan in host memory, before the upload.
    pub(super) plan: Pinned,
    /// Samples on the device. The next step reads them as its input.
    pub(super) sampled: DeviceMemory,
    pub(super) host_sampled: Pinned,
    pub(super) began: CudaEvent,
    /// The event after the plan was uploaded.
    pub(super) loaded: CudaEvent,
    /// The event after the results were computed.
    pub(super) computed: CudaEvent,
    pub(super) ended: CudaEvent,
    /// The number of likeliest tokens to report with each sample.
    pub(super) top_counts: Vec<Option<u32>>,
    /// Rows of logits that the plan asked for; 0 if it asked for samples.
    pub(super) rows: usize,
}

impl Slot {
    pub(super) fn new(
        context: &Arc<Context>,
        capacity: &StepCapacity,
    ) -> Result<Self, DriverFault> {
        let sampled = SampledLayout::of(capacity.samples).bytes();
        Ok(Self {
            plan: context.pinned(4 * capacity.words())?,
            sampled: context.allocate(sampled)?,
            host_sampled: context.pinned(sampled)?,
            began: context.event()?,
            loaded: context.event()?,
            computed: context.event()?,
            ended: context.event()?,
            top_counts: Vec::with_capacity(capacity.samples),
            rows: 0,
        })
    }
}

/// Keys and values of every sequence, bf16 `[layer][block][kv_head][16][head_dim]`, one
/// array for each.
pub(super) struct DeviceCache {
    pub(super) keys: DeviceMemory,
    pub(super) values: DeviceMemory,
    pub(super) blocks: u32,
    pub(super) block_elements: u32,
}

impl DeviceCache {
    /// Takes the memory and fills it with zeros, so that no data of another process
    /// remain in it.
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

    /// Returns the elements of one layer in each array.
    pub(super) fn layer_elements(&self) -> u64 {
        u64::from(self.blocks) * u64::from(self.block_elements)
    }
}

/// Returns the bytes of keys and values over all layers for one token.
pub(super) fn kv_bytes_per_token(config: &ModelConfig) -> u64 {
    // Keys and values take two bytes an element each.
    2 * 2 * u64::from(config.layers) * config.kv_width() as u64
}
