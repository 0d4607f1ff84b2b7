//! One step's forward: the kernels in their order, written once.
//!
//! Everything is put into one stream; nothing here waits.

use std::sync::Arc;

use super::choices::{DrawnPlaces, TOP_BYTES};
use super::driver::{Address, Context, DriverFault, Graph, Memory};
use super::kernels::{
    self, AnglesArgs, CombineArgs, DecodeArgs, EmbedArgs, FeedArgs, Finish, GateArgs, HeadDim,
    Launch, NormArgs, PrefillArgs, RopeArgs, SampleArgs,
};
use super::layout::{Layout, Places};
use super::machine::Machine;
use super::memory::{Buffers, Cache};
use super::products::{Product, Products};
use super::room::CHOICE_WORDS;
use super::weights::{Layer, Model};
use crate::model::ModelConfig;

/// All that a step reads and writes.
pub(super) struct Forward<'a> {
    pub(super) context: &'a Arc<Context>,
    pub(super) machine: &'a Machine,
    pub(super) products: &'a mut Products,
    pub(super) config: &'a ModelConfig,
    pub(super) head_dim: HeadDim,
    pub(super) model: &'a Model,
    pub(super) cache: &'a Cache,
    pub(super) buffers: &'a Buffers,
    /// The plan's words on the device.
    pub(super) plan: &'a Memory,
    pub(super) layout: &'a Layout,
    pub(super) places: Places,
    /// Parts that single tokens' attention is split into.
    pub(super) splits: u32,
    /// Tokens that one launch may draw.
    pub(super) draws_at_once: usize,
}

impl Forward<'_> {
    /// [`Self::run`] as a graph, in place of running it.
    pub(super) fn capture(&mut self) -> Result<Graph, DriverFault> {
        let context = self.context;
        context.capture(|| self.run())
    }

    /// From tokens to rows of logits.
    pub(super) fn run(&mut self) -> Result<(), DriverFault> {
        self.embed()?;
        let model = self.model;
        for (index, layer) in model.layers.iter().enumerate() {
            self.layer(layer, index)?;
        }
        self.head()
    }

    /// The tokens that the step before drew take their places.
    pub(super) fn feed(&self, sampled: &Memory) -> Result<(), DriverFault> {
        let count = self.layout.sources.len() as u32;
        if count == 0 {
            return Ok(());
        }
        let args = FeedArgs {
            tokens: self.words(self.places.tokens),
            sources: self.words(self.places.sources),
            sampled: sampled.address().raw(),
            count,
        };
        self.launch(&kernels::feed(args))
    }

    /// Draws from the rows of logits into `drawn`, `previous` being what the
    /// step before drew.
    pub(super) fn draw(&self, drawn: &Memory, previous: &Memory) -> Result<(), DriverFault> {
        let draws = self.layout.choices.len();
        let (out, from) = (DrawnPlaces::of(draws), self.places.choices);
        let drawn = |place: usize| drawn.address().plus(place).raw();
        let vocabulary = self.config.vocabulary;
        // As many at once as there are rows for what is left of the logits.
        for first in (0..draws).step_by(self.draws_at_once) {
            let args = SampleArgs {
                tokens: drawn(out.tokens() + 4 * first),
                logprobs: drawn(out.logprobs() + 4 * first),
                top_tokens: drawn(out.top_tokens() + TOP_BYTES * first),
                top_logprobs: drawn(out.top_logprobs() + TOP_BYTES * first),
                weights: self.buffers.weights.address().raw(),
                sums: self.buffers.sums.address().raw(),
                rows: self.words(from.rows + CHOICE_WORDS * first),
                logits: self.buffers.logits.address().raw(),
                previous: previous.address().raw(),
                bias_tokens: self.words(from.bias_tokens),
                biases: self.words(from.biases),
                count_tokens: self.words(from.count_tokens),
                counts: self.words(from.counts),
                vocabulary,
            };
            let count = self.draws_at_once.min(draws - first) as u32;
            self.launch(&kernels::sample(args, count))?;
        }
        Ok(())
    }

    pub(super) fn embed(&self) -> Result<(), DriverFault> {
        let args = EmbedArgs {
            residual: self.buffers.residual.address().raw(),
            table: self.model.embedding.address().raw(),
            tokens: self.words(self.places.tokens),
            hidden: self.config.hidden,
        };
        self.launch(&kernels::embed(args, self.tokens()))?;
        let args = AnglesArgs {
            angles: self.buffers.angles.address().raw(),
            turns: self.model.turns.address().raw(),
            positions: self.words(self.places.positions),
            half: self.config.head_dim / 2,
        };
        self.launch(&kernels::angles(args, self.tokens()))
    }

    /// Attention, then the feed-forward, each added to the stream.
    fn layer(&mut self, layer: &Layer, index: usize) -> Result<(), DriverFault> {
        let tokens = self.tokens();
        let LayerProducts { qkv, output, gate_up, down } =
            LayerProducts::new(self.config, self.buffers, layer, tokens);
        self.normalise(&layer.input_norm, 0, tokens)?;
        self.product(qkv)?;
        self.rope(layer, index)?;
        self.attend(layer, index)?;
        self.product(output)?;
        self.normalise(&layer.post_norm, 0, tokens)?;
        self.product(gate_up)?;
        self.gate()?;
        self.product(down)
    }

    pub(super) fn gate(&self) -> Result<(), DriverFault> {
        let args = GateArgs {
            output: self.buffers.gated.address().raw(),
            gate_up: self.buffers.gate_up.address().raw(),
            width: self.config.intermediate,
        };
        self.launch(&kernels::swiglu(args, self.tokens()))
    }

    /// The last norm and the output head, for the rows that want logits.
    pub(super) fn head(&mut self) -> Result<(), DriverFault> {
        let rows = self.layout.logit_rows.len() as u32;
        if rows == 0 {
            return Ok(());
        }
        self.normalise(&self.model.norm, self.words(self.places.logit_rows), rows)?;
        self.product(head_product(self.config, self.buffers, self.model, rows))
    }

    /// Rows of the stream, normalised: those that `rows` lists, or all.
    pub(super) fn normalise(
        &self,
        weight: &Memory,
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

    pub(super) fn rope(&self, layer: &Layer, index: usize) -> Result<(), DriverFault> {
        let (keys, values) = self.layer_of_cache(index);
        let or_null = |memory: Option<&Memory>| memory.map_or(0, |it| it.address().raw());
        let args = RopeArgs {
            queries: self.buffers.queries.address().raw(),
            keys,
            values,
            qkv: self.buffers.qkv.address().raw(),
            bias: or_null(layer.qkv_bias.as_ref()),
            query_norm: or_null(layer.head_norms.as_ref().map(|(query, _)| query)),
            key_norm: or_null(layer.head_norms.as_ref().map(|(_, key)| key)),
            angles: self.buffers.angles.address().raw(),
            slots: self.words(self.places.slots),
            epsilon: self.config.norm_epsilon,
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
        };
        self.launch(&kernels::rope(args, self.tokens(), self.head_dim))
    }

    pub(super) fn attend(&self, layer: &Layer, index: usize) -> Result<(), DriverFault> {
        let (keys, values) = self.layer_of_cache(index);
        let ModelConfig { heads, kv_heads, head_dim, .. } = *self.config;
        let buffers = self.buffers;
        let (output, queries) = (buffers.attended.address().raw(), buffers.queries.address().raw());
        let (partial, softmax) = (buffers.partial.address().raw(), buffers.softmax.address().raw());
        let blocks = self.words(self.places.blocks);
        let scale = 1.0 / (head_dim as f32).sqrt();
        let (window, splits) = (layer.window, self.splits);
        let decodes = self.layout.decodes.len() as u32;
        if decodes > 0 {
            let spans = self.words(self.places.decodes);
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
                spans: self.words(self.places.prefills),
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

    pub(super) fn product(&mut self, product: Product) -> Result<(), DriverFault> {
        // SAFETY: as in `launch`; buffers of rows hold a whole bucket of them.
        unsafe { self.products.run(self.context, self.machine, product) }
    }

    fn launch<A>(&self, launch: &Launch<A>) -> Result<(), DriverFault> {
        // SAFETY: every buffer was taken for the most that a step may ask
        // for, and the plan was checked against that: tokens, rows, blocks of
        // the pool, and tables that cover their spans.
        unsafe { self.machine.launch(self.context, launch) }
    }

    pub(super) fn tokens(&self) -> u32 {
        self.layout.tokens.len() as u32
    }

    /// A place among the plan's words.
    fn words(&self, place: usize) -> u64 {
        self.plan.address().plus(4 * place).raw()
    }

    /// Keys and values of one layer.
    fn layer_of_cache(&self, index: usize) -> (u64, u64) {
        let bytes = 2 * index * self.cache.layer_elements() as usize;
        let place = |memory: &Memory| -> Address { memory.at(bytes) };
        (place(&self.cache.keys).raw(), place(&self.cache.values).raw())
    }
}

/// The linear layers of one layer of the model, for so many tokens.
pub(super) struct LayerProducts {
    pub(super) qkv: Product,
    pub(super) output: Product,
    pub(super) gate_up: Product,
    pub(super) down: Product,
}

impl LayerProducts {
    pub(super) fn new(config: &ModelConfig, buffers: &Buffers, layer: &Layer, rows: u32) -> Self {
        let ModelConfig { hidden, intermediate, .. } = *config;
        let queries = config.query_width() as u32;
        let product = |from: &Memory, weights: &Memory, to: &Memory, [columns, depth]: [u32; 2]| {
            let [input, weights, output] = [from, weights, to].map(Memory::address);
            Product { input, weights, output, rows, columns, depth, finish: Finish::F32 }
        };
        let b = buffers;
        let adds = |product| Product { finish: Finish::Add, ..product };
        let qkv = queries + 2 * config.kv_width() as u32;
        let gate_up = product(&b.normed, &layer.gate_up, &b.gate_up, [2 * intermediate, hidden]);
        Self {
            qkv: product(&b.normed, &layer.qkv, &b.qkv, [qkv, hidden]),
            output: adds(product(&b.attended, &layer.output, &b.residual, [hidden, queries])),
            gate_up: Product { finish: Finish::Bf16, ..gate_up },
            down: adds(product(&b.gated, &layer.down, &b.residual, [hidden, intermediate])),
        }
    }

    /// In the order of a step.
    pub(super) fn all(self) -> [Product; 4] {
        let Self { qkv, output, gate_up, down } = self;
        [qkv, output, gate_up, down]
    }
}

/// The output head, for so many rows of logits.
pub(super) fn head_product(
    config: &ModelConfig,
    buffers: &Buffers,
    model: &Model,
    rows: u32,
) -> Product {
    Product {
        input: buffers.normed.address(),
        weights: model.head().address(),
        output: buffers.logits.address(),
        rows,
        columns: config.vocabulary,
        depth: config.hidden,
        finish: Finish::F32,
    }
}
