//! The kernels: their source, what each is given, and how it is launched.
//!
//! `kernels/kernels.h` is the other half of this file and says what each field
//! means; a test compares the sizes. Nothing here touches a device: a
//! [`Launch`] is data, for a driver or for the emulator that tests run.
//!
//! Buffers need no padding: rows behind the last are never touched. Each
//! begins at a multiple of 16 bytes, and rows of bf16 and of the residual
//! stream are multiples of 8 elements.

#[cfg(test)]
mod emulator;
#[cfg(test)]
mod fused;
#[cfg(test)]
mod tests;

/// The unit that a compiler is given, and the files it includes by name.
pub const UNIT: (&str, &str) = ("kernels.cu", include_str!("kernels/kernels.cu"));
/// What [`UNIT`] includes: names and texts.
pub const INCLUDED: [(&str, &str); 7] = [
    ("portable.h", include_str!("kernels/portable.h")),
    ("kernels.h", include_str!("kernels/kernels.h")),
    ("decode.cu", include_str!("kernels/decode.cu")),
    ("linear.cu", include_str!("kernels/linear.cu")),
    ("prefill.cu", include_str!("kernels/prefill.cu")),
    ("rows.cu", include_str!("kernels/rows.cu")),
    ("sample.cu", include_str!("kernels/sample.cu")),
];
/// Options for NVRTC beside the architecture.
pub const OPTIONS: [&str; 1] = ["--std=c++17"];
/// Every entry point.
pub const NAMES: [&str; 32] = [
    "feed",
    "fill",
    "copy_block",
    "embed",
    "angles",
    "rms_norm",
    "rope_32",
    "rope_64",
    "rope_128",
    "decode_32",
    "decode_64",
    "decode_128",
    "combine_32",
    "combine_64",
    "combine_128",
    "prefill_32",
    "prefill_64",
    "prefill_128",
    "swiglu",
    "linear_f32",
    "linear_bf16",
    "linear_add",
    "skinny8_f32",
    "skinny8_bf16",
    "skinny8_add",
    "skinny16_f32",
    "skinny16_bf16",
    "skinny16_add",
    "skinny32_f32",
    "skinny32_bf16",
    "skinny32_add",
    "sample",
];

/// An address on a device; 0 is null.
pub type DevicePointer = u64;

/// In place of a token, a slot or a source: none.
pub const NONE: u32 = u32::MAX;
/// Query heads that one KV head may serve.
pub const MOST_GROUP: u32 = 16;

/// One launch: no dynamic shared memory, the arguments as the one parameter.
#[derive(Clone, Copy, Debug)]
pub struct Launch<A> {
    /// The entry point.
    pub kernel: &'static str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// The kernel's one parameter.
    pub args: A,
}

/// Sizes of heads that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadDim {
    /// 32 elements.
    D32,
    /// 64 elements.
    D64,
    /// 128 elements.
    D128,
}

/// What becomes of a linear layer's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// They replace f32.
    F32,
    /// They replace bf16.
    Bf16,
    /// They are added to f32.
    Add,
}

impl HeadDim {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::D32, Self::D64, Self::D128];

    /// The one with this many elements.
    pub fn new(elements: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|head_dim| head_dim.elements() == elements)
    }

    /// Elements of a head.
    pub fn elements(self) -> u32 {
        match self {
            Self::D32 => 32,
            Self::D64 => 64,
            Self::D128 => 128,
        }
    }

    fn pick(self, names: [&'static str; 3]) -> &'static str {
        match self {
            Self::D32 => names[0],
            Self::D64 => names[1],
            Self::D128 => names[2],
        }
    }
}

impl Epilogue {
    fn pick(self, names: [&'static str; 3]) -> &'static str {
        match self {
            Self::F32 => names[0],
            Self::Bf16 => names[1],
            Self::Add => names[2],
        }
    }
}

/// Some neighbouring tokens of one sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelSpan {
    /// Row of its first token in the step.
    pub row: u32,
    /// 0: none, a place held free.
    pub tokens: u32,
    /// Position of its first token in the sequence.
    pub position: u32,
    /// Where its KV blocks begin in the list of all.
    pub blocks: u32,
}

/// How one token is drawn.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SampleRow {
    /// The choice's own seed.
    pub seed: u64,
    /// 0 is greedy.
    pub temperature: f32,
    /// Of the likeliest tokens that together reach this probability.
    pub top_p: f32,
    /// Taken off the logit of each token that was generated before.
    pub presence: f32,
    /// Taken off for each time it was.
    pub frequency: f32,
    /// Tokens that the choice has generated before.
    pub position: u32,
    /// Row of the logits.
    pub row: u32,
    /// A token whose log-probability is wanted; [`NONE`]: one is drawn.
    pub given: u32,
    /// Where in the tokens of the step before there is one more that was
    /// generated, not among the counts yet; or [`NONE`].
    pub pending: u32,
    /// Where its biases begin.
    pub biases: u32,
    /// How many there are.
    pub bias_count: u32,
    /// Where its counts of tokens generated before begin.
    pub counts: u32,
    /// How many there are.
    pub count_count: u32,
    /// Likeliest tokens reported, [`MOST_TOP`] at most; [`NONE`]: no
    /// log-probabilities.
    pub top: u32,
    /// Only so many of the likeliest are drawn from; 0: all.
    pub top_k: u32,
}

/// Declares the structures of `kernels.h`: the same fields in the same order.
macro_rules! arguments {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* })*) => {
        $($(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug)]
        #[allow(missing_docs, reason = "kernels.h says what each field is")]
        pub struct $name { $($(#[$field_doc])* pub $field: $type,)* })*
    };
}

arguments! {
    /// Sampled ids become the next step's tokens.
    FeedArgs {
        tokens: DevicePointer,
        sources: DevicePointer,
        sampled: DevicePointer,
        count: u32,
    }
    /// Words of one value.
    FillArgs {
        words: DevicePointer,
        count: u64,
        value: u32,
    }
    /// A KV block, all layers of it, into another.
    CopyBlockArgs {
        keys: DevicePointer,
        values: DevicePointer,
        layer_elements: u64,
        block_elements: u32,
        from: u32,
        to: u32,
    }
    /// Rows of the embedding.
    EmbedArgs {
        residual: DevicePointer,
        table: DevicePointer,
        tokens: DevicePointer,
        hidden: u32,
    }
    /// Cosines and sines of a step's positions.
    AnglesArgs {
        angles: DevicePointer,
        turns: DevicePointer,
        positions: DevicePointer,
        half: u32,
    }
    /// RMS norm.
    NormArgs {
        output: DevicePointer,
        input: DevicePointer,
        weight: DevicePointer,
        rows: DevicePointer,
        epsilon: f32,
        width: u32,
    }
    /// From the QKV projection to queries and cache.
    RopeArgs {
        queries: DevicePointer,
        keys: DevicePointer,
        values: DevicePointer,
        qkv: DevicePointer,
        bias: DevicePointer,
        query_norm: DevicePointer,
        key_norm: DevicePointer,
        angles: DevicePointer,
        slots: DevicePointer,
        epsilon: f32,
        heads: u32,
        kv_heads: u32,
    }
    /// Attention of single tokens.
    DecodeArgs {
        output: DevicePointer,
        partial: DevicePointer,
        softmax: DevicePointer,
        queries: DevicePointer,
        keys: DevicePointer,
        values: DevicePointer,
        spans: DevicePointer,
        blocks: DevicePointer,
        scale: f32,
        heads: u32,
        kv_heads: u32,
        splits: u32,
        window: u32,
    }
    /// The parts of attention together.
    CombineArgs {
        output: DevicePointer,
        partial: DevicePointer,
        softmax: DevicePointer,
        spans: DevicePointer,
        heads: u32,
        splits: u32,
    }
    /// Attention of tiles of new tokens.
    PrefillArgs {
        output: DevicePointer,
        queries: DevicePointer,
        keys: DevicePointer,
        values: DevicePointer,
        spans: DevicePointer,
        blocks: DevicePointer,
        scale: f32,
        heads: u32,
        kv_heads: u32,
        window: u32,
    }
    /// `silu(gate) * up`.
    GateArgs {
        output: DevicePointer,
        gate_up: DevicePointer,
        width: u32,
    }
    /// A linear layer.
    LinearArgs {
        output: DevicePointer,
        input: DevicePointer,
        weights: DevicePointer,
        rows: u32,
        columns: u32,
        depth: u32,
    }
    /// Drawing tokens.
    SampleArgs {
        tokens: DevicePointer,
        logprobs: DevicePointer,
        top_tokens: DevicePointer,
        top_logprobs: DevicePointer,
        weights: DevicePointer,
        sums: DevicePointer,
        rows: DevicePointer,
        logits: DevicePointer,
        previous: DevicePointer,
        bias_tokens: DevicePointer,
        biases: DevicePointer,
        count_tokens: DevicePointer,
        counts: DevicePointer,
        vocabulary: u32,
    }
}

/// Sampled ids become the next step's tokens.
pub fn feed(args: FeedArgs) -> Launch<FeedArgs> {
    Launch { kernel: "feed", grid: [args.count.div_ceil(256), 1, 1], threads: 256, args }
}

/// Words of one value, 2^40 at most.
pub fn fill(args: FillArgs) -> Launch<FillArgs> {
    let blocks = u32::try_from(args.count.div_ceil(256)).expect("no buffer has so many words");
    Launch { kernel: "fill", grid: [blocks, 1, 1], threads: 256, args }
}

/// A KV block into another, in each of `layers` layers.
pub fn copy_block(args: CopyBlockArgs, layers: u32) -> Launch<CopyBlockArgs> {
    Launch { kernel: "copy_block", grid: [layers, 2, 1], threads: 256, args }
}

/// The residual stream of `tokens` tokens.
pub fn embed(args: EmbedArgs, tokens: u32) -> Launch<EmbedArgs> {
    Launch { kernel: "embed", grid: [tokens, 1, 1], threads: 256, args }
}

/// Cosines and sines for `tokens` tokens.
pub fn angles(args: AnglesArgs, tokens: u32) -> Launch<AnglesArgs> {
    Launch { kernel: "angles", grid: [tokens, 1, 1], threads: 64, args }
}

/// `rows` rows of the output.
pub fn rms_norm(args: NormArgs, rows: u32) -> Launch<NormArgs> {
    Launch { kernel: "rms_norm", grid: [rows, 1, 1], threads: 256, args }
}

/// Queries, keys and values of `tokens` tokens.
pub fn rope(args: RopeArgs, tokens: u32, head_dim: HeadDim) -> Launch<RopeArgs> {
    let heads = args.heads + 2 * args.kv_heads;
    let heads_of_block = 128 / (head_dim.elements() / 4);
    Launch {
        kernel: head_dim.pick(["rope_32", "rope_64", "rope_128"]),
        grid: [tokens, heads.div_ceil(heads_of_block), 1],
        threads: 128,
        args,
    }
}

/// Attention of `spans` spans of one token each. With more than one split,
/// [`combine`] comes next.
pub fn decode(args: DecodeArgs, spans: u32, head_dim: HeadDim) -> Launch<DecodeArgs> {
    Launch {
        kernel: head_dim.pick(["decode_32", "decode_64", "decode_128"]),
        grid: [spans, args.kv_heads, args.splits],
        threads: 128,
        args,
    }
}

/// What [`decode`] has left in parts.
pub fn combine(args: CombineArgs, spans: u32, head_dim: HeadDim) -> Launch<CombineArgs> {
    Launch {
        kernel: head_dim.pick(["combine_32", "combine_64", "combine_128"]),
        grid: [spans, args.heads, 1],
        threads: head_dim.elements(),
        args,
    }
}

/// Attention of `spans` spans of at most [`tile_tokens`] tokens each. Heads run
/// fastest in the grid: a device begins its blocks in that order, so all heads
/// of the first span come before the second one.
pub fn prefill(args: PrefillArgs, spans: u32, head_dim: HeadDim) -> Launch<PrefillArgs> {
    // No step has as many tokens, so none has as many spans.
    assert!(spans <= MOST_GRID_Y, "{spans} spans");
    Launch {
        kernel: head_dim.pick(["prefill_32", "prefill_64", "prefill_128"]),
        grid: [args.kv_heads, spans, 1],
        threads: 128,
        args,
    }
}

/// Tokens of one span of [`prefill`] at most, where `group` query heads share
/// a KV head. Longer ones are cut.
pub fn tile_tokens(group: u32) -> u32 {
    PREFILL_ROWS / group
}

/// `rows` rows.
pub fn swiglu(args: GateArgs, rows: u32) -> Launch<GateArgs> {
    Launch { kernel: "swiglu", grid: [rows, args.width.div_ceil(128 * 8), 1], threads: 128, args }
}

/// A linear layer, by the kernel that fits its rows.
pub fn linear(args: LinearArgs, epilogue: Epilogue) -> Launch<LinearArgs> {
    if args.rows <= SKINNY_ROWS { skinny(args, epilogue) } else { tiled(args, epilogue) }
}

/// A linear layer of any number of rows, and of 8 million columns at most.
pub fn tiled(args: LinearArgs, epilogue: Epilogue) -> Launch<LinearArgs> {
    Launch {
        kernel: epilogue.pick(["linear_f32", "linear_bf16", "linear_add"]),
        grid: [args.rows.div_ceil(TILE_ROWS), args.columns.div_ceil(TILE_COLUMNS), 1],
        threads: 256,
        args,
    }
}

/// A linear layer by a kernel for few rows, which reads all weights again for
/// every [`SKINNY_ROWS`]. A row's sums are the same to the bit whatever rows
/// there are beside it.
pub fn skinny(args: LinearArgs, epilogue: Epilogue) -> Launch<LinearArgs> {
    let (rows, names) = match args.rows {
        0..=8 => (8, ["skinny8_f32", "skinny8_bf16", "skinny8_add"]),
        9..=16 => (16, ["skinny16_f32", "skinny16_bf16", "skinny16_add"]),
        _ => (SKINNY_ROWS, ["skinny32_f32", "skinny32_bf16", "skinny32_add"]),
    };
    Launch {
        kernel: epilogue.pick(names),
        grid: [args.columns.div_ceil(SKINNY_COLUMNS) * args.rows.div_ceil(rows), 1, 1],
        threads: 256,
        args,
    }
}

/// Draws `samples` tokens.
pub fn sample(args: SampleArgs, samples: u32) -> Launch<SampleArgs> {
    Launch { kernel: "sample", grid: [samples, 1, 1], threads: 512, args }
}

/// Elements of [`SampleArgs::sums`] for one sample.
pub fn sums_of_sample(vocabulary: u32) -> u32 {
    vocabulary.div_ceil(256)
}

/// Likeliest tokens that [`sample`] reports at most; its lists have this pitch.
pub const MOST_TOP: u32 = 20;
/// Rows of activations that the kernels for few rows take at once.
pub const SKINNY_ROWS: u32 = 32;
const SKINNY_COLUMNS: u32 = 16;
const PREFILL_ROWS: u32 = 64;
/// Blocks of a grid in any direction but the first.
const MOST_GRID_Y: u32 = 65_535;
const TILE_ROWS: u32 = 128;
const TILE_COLUMNS: u32 = 128;
