//! The forward pass of one step: all kernels in their order.
//!
//! Everything is queued in one stream. Nothing here waits.

use std::sync::Arc;

use super::capacity::SAMPLE_WORDS;
use super::driver::{Address, Context, DeviceMemory, DriverFault, Graph};
use super::gemm::{Gemm, GemmRunner};
use super::kernel_module::KernelModule;
use super::kernels::{
    self, AnglesArgs, CombineArgs, DecodeArgs, EmbedArgs, Epilogue, FeedArgs, GateArgs, HeadDim,
    Launch, NormArgs, PrefillArgs, RopeArgs, SampleArgs,
};
use super::layout::{PlanLayout, PlanOffsets};
use super::memory::{DeviceBuffers, DeviceCache};
use super::samples::{SampledLayout, TOP_BYTES};
use super::weights::{DeviceLayer, DeviceModel};
use crate::model::ModelConfig;

/// Everything that a step reads and writes.
pub(super) struct CudaForward<'a> {
    pub(super) context: &'a Arc<Context>,
    pub(super) module: &'a KernelModule,
    pub(super) gemms: &'a mut GemmRunner,
    pub(super) config: &'a ModelConfig,
    pub(super) head_dim: HeadDim,
    pub(super) model: &'a DeviceModel,
    pub(super) cache: &'a DeviceCache,
    pub(super) buffers: &'a DeviceBuffers,
    /// The packed plan on the device.
    pub(super) plan: &'a DeviceMemory,
    pub(super) layout: &'a PlanLayout,
    pub(super) offsets: PlanOffsets,
    /// Parts that the attention of single tokens is split into.
    pub(super) splits: u32,
    /// Samples that one launch may take.
    pub(super) samples_at_once: usize,
}

impl CudaForward<'_> {
    /// Captures [`Self::run`] as a graph. Nothing runs.
    pub(super) fn capture(&mut self) -> Result<Graph, DriverFault> {
        let context = self.context;
        context.capture(|| self.run())
    }

    /// Queues the kernels from tokens to rows of logits.
    pub(super) fn run(&mut self) -> Result<(), DriverFault> {
        self.embed()?;
        let model = self.model;
        for (index, layer) in model.layers.iter().enumerate() {
            self.layer(layer, index)?;
        }
        self.head()
    }

    /// Writes tokens that the previous step sampled into this step's tokens.
    pub(super) fn feed(&self, sampled: &DeviceMemory) -> Result<(), DriverFault> {
        let count = self.layout.sources.len() as u32;
        // The driver refuses a grid without blocks.
        if count == 0 {
            return Ok(());
        }
        let args = FeedArgs {
            tokens: self.words(self.offsets.tokens),
            sources: self.words(self.offsets.sources),
            sampled: sampled.address().raw(),
            count,
        };
        self.launch(&kernels::feed(args))
    }

    /// Queues sampling from the rows of logits into `sampled`. `previous` holds the
    /// samples of the previous step.
    pub(super) fn sample(
        &self,
        sampled: &DeviceMemory,
        previous: &DeviceMemory,
    ) -> Result<(), DriverFault> {
        let samples = self.layout.samples.len();
        let (out, from) = (SampledLayout::of(samples), self.offsets.samples);
        let sampled = |place: usize| sampled.address().plus(place).raw();
        let vocabulary = self.config.vocabulary;
        // The buffers of sampling weights have rows for this many samples, so more
        // samples need several launches.
        for first in (0..samples).step_by(self.samples_at_once) {
            let args = SampleArgs {
                tokens: sampled(out.tokens() + 4 * first),
                logprobs: sampled(out.logprobs() + 4 * first),
                top_tokens: sampled(out.top_tokens() + TOP_BYTES * first),
                top_logprobs: sampled(out.top_logprobs() + TOP_BYTES * first),
                weights: self.buffers.weights.address().raw(),
                sums: self.buffers.sums.address().raw(),
                rows: self.words(from.rows + SAMPLE_WORDS * first),
                logits: self.buffers.logits.address().raw(),
                previous: previous.address().raw(),
                bias_tokens: self.words(from.bias_tokens),
                biases: self.words(from.biases),
                count_tokens: self.words(from.count_tokens),
                counts: self.words(from.counts),
                prompt_tokens: self.words(from.prompt_tokens),
                masks: self.words(from.masks),
                vocabulary,
            };
            let count = self.samples_at_once.min(samples - first) as u32;
            self.launch(&kernels::sample(args, count))?;
        }
        Ok(())
    }

    pub(super) fn embed(&self) -> Result<(), DriverFault> {
        let args = EmbedArgs {
            residual: self.buffers.residual.address().raw(),
            table: self.model.embedding.address().raw(),
            tokens: self.words(self.offsets.tokens),
            hidden: self.config.hidden,
        };
        self.launch(&kernels::embed(args, self.tokens()))?;
        let args = AnglesArgs {
            angles: self.buffers.angles.address().raw(),
            turns: self.model.turns.address().raw(),
            positions: self.words(self.offsets.positions),
            half: self.config.head_dim / 2,
        };
        self.launch(&kernels::angles(args, self.tokens()))
    }

    /// Queues one layer: attention, then the feed-forward network. Each adds its result
    /// to the residual stream.
    fn layer(&mut self, layer: &DeviceLayer, index: usize) -> Result<(), DriverFault> {
        let tokens = self.tokens();
        let LayerGemms { qkv, output, gate_up, down } =
            LayerGemms::new(self.config, self.buffers, layer, tokens);
        // All kernels of a step run in this order in one stream, so none needs a lock
        // or a wait.
        self.normalise(&layer.input_norm, 0, tokens)?;
        self.gemm(qkv)?;
        self.rope(layer, index)?;
        self.attend(layer, index)?;
        self.gemm(output)?;
        self.normalise(&layer.post_norm, 0, tokens)?;
        self.gemm(gate_up)?;
        self.gate()?;
        self.gemm(down)
    }

    pub(super) fn gate(&self) -> Result<(), DriverFault> {
        let args = GateArgs {
            output: self.buffers.gated.address().raw(),
            gate_up: self.buffers.gate_up.address().raw(),
            width: self.config.intermediate,
        };
        self.launch(&kernels::swiglu(args, self.tokens()))
    }

    /// Queues the last norm and the output head for the rows that produce logits.
    pub(super) fn head(&mut self) -> Result<(), DriverFault> {
        let rows = self.layout.logit_rows.len() as u32;
        // A part within a prompt needs no logits.
        if rows == 0 {
            return Ok(());
        }
        self.normalise(&self.model.norm, self.words(self.offsets.logit_rows), rows)?;
        self.gemm(head_gemm(self.config, self.buffers, self.model, rows))
    }

    /// Queues the norm of rows of the residual stream: the rows that the list at `rows`
    /// names, or all if `rows` is 0.
    pub(super) fn normalise(
        &self,
        weight: &DeviceMemory,
        rows: u64,
        count: u32,
    ) -> Result<(), DriverFault> {
        let args = NormArgs {
            output: self.buffers.normed.address().raw(),
            input: self.buffers.residual.address().raw(),
            weight: weight.address().raw(),
            rows,
            epsilon: self.config.norm_epsilon,
            width: self.config.hidden,
        };
        self.launch(&kernels::rms_norm(args, count))
    }

    pub(super) fn rope(&self, layer: &DeviceLayer, index: usize) -> Result<(), DriverFault> {
        let (keys, values) = self.layer_of_cache(index);
        // The kernels skip a null bias and null norms.
        let or_null = |memory: Option<&DeviceMemory>| memory.map_or(0, |it| it.address().raw());
        let args = RopeArgs {
            queries: self.buffers.queries.address().raw(),
            keys,
            values,
            qkv: self.buffers.qkv.address().raw(),
            bias: or_null(layer.qkv_bias.as_ref()),
            query_norm: or_null(layer.head_norms.as_ref().map(|(query, _)| query)),
            key_norm: or_null(layer.head_norms.as_ref().map(|(_, key)| key)),
            angles: self.buffers.angles.address().raw(),
            slots: self.words(self.offsets.slots),
            epsilon: self.config.norm_epsilon,
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
        };
        self.launch(&kernels::rope(args, self.tokens(), self.head_dim))
    }

    pub(super) fn attend(&self, layer: &DeviceLayer, index: usize) -> Result<(), DriverFault> {
        let (keys, values) = self.layer_of_cache(index);
        let ModelConfig { heads, kv_heads, head_dim, .. } = *self.config;
        let buffers = self.buffers;
        let (output, queries) = (buffers.attended.address().raw(), buffers.queries.address().raw());
        let (partial, softmax) = (buffers.partial.address().raw(), buffers.softmax.address().raw());
        let blocks = self.words(self.offsets.blocks);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (window, splits) = (layer.window, self.splits);
        let decodes = self.layout.decodes.len() as u32;
        if decodes > 0 {
            let spans = self.words(self.offsets.decodes);
            let args = DecodeArgs {
                output,
                partial,
                softmax,
                queries,
                keys,
                values,
                spans,
                blocks,
                scale,
                heads,
                kv_heads,
                splits,
                window,
            };
            self.launch(&kernels::decode(args, decodes, self.head_dim))?;
            // With one part the decode kernel has written the final output itself.
            if splits > 1 {
                let args = CombineArgs { output, partial, softmax, spans, heads, splits };
                self.launch(&kernels::combine(args, decodes, self.head_dim))?;
            }
        }
        let prefills = self.layout.prefills.len() as u32;
        if prefills > 0 {
            let args = PrefillArgs {
                output,
                queries,
                keys,
                values,
                spans: self.words(self.offsets.prefills),
                blocks,
                scale,
                heads,
                kv_heads,
                window,
            };
            self.launch(&kernels::prefill(args, prefills, self.head_dim))?;
        }
        Ok(())
    }

    pub(super) fn gemm(&mut self, gemm: Gemm) -> Result<(), DriverFault> {
        // SAFETY: the conditions of `launch` hold, and buffers of rows hold a whole
        // bucket.
        unsafe { self.gemms.run(self.context, self.module, gemm) }
    }

    fn launch<A>(&self, launch: &Launch<A>) -> Result<(), DriverFault> {
        // SAFETY: every buffer was taken for the most that a step may ask for, and the
        // plan was checked against these limits: tokens, rows, blocks of the pool, and
        // tables that cover their spans.
        unsafe { self.module.launch(self.context, launch) }
    }

    pub(super) fn tokens(&self) -> u32 {
        self.layout.tokens.len() as u32
    }

    /// Returns the address of a word of the plan.
    fn words(&self, place: usize) -> u64 {
        self.plan.address().plus(4 * place).raw()
    }

    /// Returns the addresses of the keys and values of one layer.
    fn layer_of_cache(&self, index: usize) -> (u64, u64) {
        let bytes = 2 * index * self.cache.layer_elements() as usize;
        let place = |memory: &DeviceMemory| -> Address { memory.at(bytes) };
        (place(&self.cache.keys).raw(), place(&self.cache.values).raw())
    }
}

/// The matrix products of one layer for a number of tokens.
pub(super) struct LayerGemms {
    pub(super) qkv: Gemm,
    pub(super) output: Gemm,
    pub(super) gate_up: Gemm,
    pub(super) down: Gemm,
}

impl LayerGemms {
    pub(super) fn new(
        config: &ModelConfig,
        buffers: &DeviceBuffers,
        layer: &DeviceLayer,
        rows: u32,
    ) -> Self {
        let ModelConfig { hidden, intermediate, .. } = *config;
        let queries = config.query_width() as u32;
        let gemm = |from: &DeviceMemory,
                    weights: &DeviceMemory,
                    to: &DeviceMemory,
                    [columns, depth]: [u32; 2]| {
            let [input, weights, output] = [from, weights, to].map(DeviceMemory::address);
            Gemm { input, weights, output, rows, columns, depth, epilogue: Epilogue::F32 }
        };
        let b = buffers;
        let adds = |gemm| Gemm { epilogue: Epilogue::Add, ..gemm };
        let qkv = queries + 2 * config.kv_width() as u32;
        let gate_up = gemm(&b.normed, &layer.gate_up, &b.gate_up, [2 * intermediate, hidden]);
        Self {
            qkv: gemm(&b.normed, &layer.qkv, &b.qkv, [qkv, hidden]),
            output: adds(gemm(&b.attended, &layer.output, &b.residual, [hidden, queries])),
            gate_up: Gemm { epilogue: Epilogue::Bf16, ..gate_up },
            down: adds(gemm(&b.gated, &layer.down, &b.residual, [hidden, intermediate])),
        }
    }

    /// Returns the products in the order of a step.
    pub(super) fn all(self) -> [Gemm; 4] {
        let Self { qkv, output, gate_up, down } = self;
        [qkv, output, gate_up, down]
    }
}

/// Returns the matrix product of the output head for a number of rows.
pub(super) fn head_gemm(
    config: &ModelConfig,
    buffers: &DeviceBuffers,
    model: &DeviceModel,
    rows: u32,
) -> Gemm {
    Gemm {
        input: buffers.normed.address(),
        weights: model.head().address(),
        output: buffers.logits.address(),
        rows,
        columns: config.vocabulary,
        depth: config.hidden,
        epilogue: Epilogue::F32,
    }
}
