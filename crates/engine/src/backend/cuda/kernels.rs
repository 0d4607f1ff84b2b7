//! The CUDA kernels: their source, their arguments and their launches.
//!
//! `kernels/kernels.h` declares the same structures and explains each field; a test
//! compares the sizes. Nothing here touches a device: a [`Launch`] is data for a
//! driver, or for the emulator that tests run.
//!
//! Buffers need no padding, because kernels never touch rows behind the last one. Each
//! buffer begins at a multiple of 16 bytes. Rows of bf16 and of the residual stream are
//! multiples of 8 elements.

#[cfg(test)]
mod emulator;
#[cfg(test)]
mod fused;
#[cfg(test)]
mod tests;

/// The file that a compiler is given, by name and text.
pub const UNIT: (&str, &str) = ("kernels.cu", include_str!("kernels/kernels.cu"));
/// The files that [`UNIT`] includes, by name and text.
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
/// The names of all entry points.
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

/// The value that means "none" for a token, a slot or a source.
pub const NONE: u32 = u32::MAX;
/// The most query heads that one KV head may serve.
pub const MOST_GROUP: u32 = 16;

/// One launch of a kernel, without dynamic shared memory. The arguments are its only
/// parameter.
#[derive(Clone, Copy, Debug)]
pub struct Launch<A> {
    /// Name of the entry point.
    pub kernel: &'static str,
    /// Blocks in each direction.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// The kernel's only parameter.
    pub args: A,
}

/// Head sizes that the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadDim {
    /// Heads of 32 elements.
    D32,
    /// Heads of 64 elements.
    D64,
    /// Heads of 128 elements.
    D128,
}

/// The use of a linear layer's products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Epilogue {
    /// The products replace f32 output.
    F32,
    /// The products replace bf16 output.
    Bf16,
    /// The products are added to f32 output.
    Add,
}

impl HeadDim {
    /// All head sizes, for lookups by elements.
    pub const ALL: [Self; 3] = [Self::D32, Self::D64, Self::D128];

    /// Returns the variant with this many elements, if there is one.
    pub fn new(elements: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|head_dim| head_dim.elements() == elements)
    }

    /// Returns the elements of a head.
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
    /// Row of the first token in the step.
    pub row: u32,
    /// Number of tokens; 0 for an unused entry.
    pub tokens: u32,
    /// Position of the first token in the sequence.
    pub position: u32,
    /// Offset of the sequence's KV blocks in the list of all blocks.
    pub blocks: u32,
}

/// The bit of a count that marks a token which the prompt contains, too.
pub const PROMPTED: u32 = 1 << 31;

/// The parameters of one sample.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct SampleRow {
    /// Seed of the choice.
    pub seed: u64,
    /// Temperature; 0 for greedy sampling.
    pub temperature: f32,
    /// Probability that the likeliest tokens must reach together; others are not
    /// sampled.
    pub top_p: f32,
    /// Subtracted from the logit of each token that was generated before.
    pub presence: f32,
    /// Subtracted for each time that a token was generated before.
    pub frequency: f32,
    /// Tokens that the choice has generated so far.
    pub position: u32,
    /// Row of the logits.
    pub row: u32,
    /// A known token, to report its log-probability; [`NONE`] to sample a token.
    pub given: u32,
    /// Index of one more generated token in the previous step's samples, which the
    /// counts lack; or [`NONE`].
    pub pending: u32,
    /// Offset of the request's biases.
    pub biases: u32,
    /// Number of the request's biases.
    pub bias_count: u32,
    /// Offset of the request's counts of generated tokens.
    pub counts: u32,
    /// Number of the request's counts.
    pub count_count: u32,
    /// Number of likeliest tokens to report, at most [`MOST_TOP`]; [`NONE`] for no
    /// log-probabilities.
    pub top: u32,
    /// Number of likeliest tokens that may be sampled; 0 for all.
    pub top_k: u32,
    /// Factor of the repetition penalty; 1: none.
    pub repetition: f32,
    /// Index of the first token of its prompt in the list of prompts.
    pub prompt: u32,
    /// Distinct tokens of the prompt; 0 unless there is a repetition penalty.
    pub prompt_count: u32,
    /// Part of the likeliest token's weight that others must reach; 0: no cut.
    pub min_p: f32,
    /// Offset of the first word of its mask in the list of masks; [`NONE`]: no mask.
    pub mask: u32,
    /// Always 0: fills the structure to whole 64-bit words.
    pub unused: u32,
}

/// Declares the structures of `kernels.h`, with the same fields in the same order.
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
    /// Arguments that turn sampled ids into the next step's tokens.
    FeedArgs {
        tokens: DevicePointer,
        sources: DevicePointer,
        sampled: DevicePointer,
        count: u32,
    }
    /// Arguments that fill words with one value.
    FillArgs {
        words: DevicePointer,
        count: u64,
        value: u32,
    }
    /// Arguments that copy a KV block, in all layers.
    CopyBlockArgs {
        keys: DevicePointer,
        values: DevicePointer,
        layer_elements: u64,
        block_elements: u32,
        from: u32,
        to: u32,
    }
    /// Arguments that read rows of the embedding.
    EmbedArgs {
        residual: DevicePointer,
        table: DevicePointer,
        tokens: DevicePointer,
        hidden: u32,
    }
    /// Arguments that compute cosines and sines of a step's positions.
    AnglesArgs {
        angles: DevicePointer,
        turns: DevicePointer,
        positions: DevicePointer,
        half: u32,
    }
    /// Arguments of the RMS norm.
    NormArgs {
        output: DevicePointer,
        input: DevicePointer,
        weight: DevicePointer,
        rows: DevicePointer,
        epsilon: f32,
        width: u32,
    }
    /// Arguments that turn the QKV projection into queries and cache entries.
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
    /// Arguments of attention for single tokens.
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
    /// Arguments that combine the parts of attention.
    CombineArgs {
        output: DevicePointer,
        partial: DevicePointer,
        softmax: DevicePointer,
        spans: DevicePointer,
        heads: u32,
        splits: u32,
    }
    /// Arguments of attention for tiles of new tokens.
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
    /// Arguments that compute `silu(gate) * up`.
    GateArgs {
        output: DevicePointer,
        gate_up: DevicePointer,
        width: u32,
    }
    /// Arguments of a linear layer.
    LinearArgs {
        output: DevicePointer,
        input: DevicePointer,
        weights: DevicePointer,
        rows: u32,
        columns: u32,
        depth: u32,
    }
    /// Arguments that sample tokens.
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
        prompt_tokens: DevicePointer,
        masks: DevicePointer,
        vocabulary: u32,
    }
}

/// Returns the launch that turns sampled ids into the next step's tokens.
pub fn feed(args: FeedArgs) -> Launch<FeedArgs> {
    Launch { kernel: "feed", grid: [args.count.div_ceil(256), 1, 1], threads: 256, args }
}

/// Returns the launch that fills at most 2^40 words with one value.
#[expect(clippy::expect_used, reason = "2^40 words are more than any device has")]
pub fn fill(args: FillArgs) -> Launch<FillArgs> {
    let blocks = u32::try_from(args.count.div_ceil(256)).expect("no buffer has so many words");
    Launch { kernel: "fill", grid: [blocks, 1, 1], threads: 256, args }
}

/// Returns the launch that copies a KV block in each of `layers` layers.
pub fn copy_block(args: CopyBlockArgs, layers: u32) -> Launch<CopyBlockArgs> {
    Launch { kernel: "copy_block", grid: [layers, 2, 1], threads: 256, args }
}

/// Returns the launch that fills the residual stream of `tokens` tokens.
pub fn embed(args: EmbedArgs, tokens: u32) -> Launch<EmbedArgs> {
    Launch { kernel: "embed", grid: [tokens, 1, 1], threads: 256, args }
}

/// Returns the launch that computes cosines and sines for `tokens` tokens.
pub fn angles(args: AnglesArgs, tokens: u32) -> Launch<AnglesArgs> {
    Launch { kernel: "angles", grid: [tokens, 1, 1], threads: 64, args }
}

/// Returns the launch that normalises `rows` rows of the output.
pub fn rms_norm(args: NormArgs, rows: u32) -> Launch<NormArgs> {
    Launch { kernel: "rms_norm", grid: [rows, 1, 1], threads: 256, args }
}

/// Returns the launch that rotates queries and keys of `tokens` tokens and writes the
/// cache.
pub fn rope(args: RopeArgs, tokens: u32, head_dim: HeadDim) -> Launch<RopeArgs> {
    let heads = args.heads + 2 * args.kv_heads;
    // Four elements a thread: two neighbours in each half of the head.
    let heads_of_block = 128 / (head_dim.elements() / 4);
    Launch {
        kernel: head_dim.pick(["rope_32", "rope_64", "rope_128"]),
        grid: [tokens, heads.div_ceil(heads_of_block), 1],
        threads: 128,
        args,
    }
}

/// Returns the launch of attention for `spans` spans of one token each. With more than
/// one split, [`combine`] must follow.
pub fn decode(args: DecodeArgs, spans: u32, head_dim: HeadDim) -> Launch<DecodeArgs> {
    Launch {
        kernel: head_dim.pick(["decode_32", "decode_64", "decode_128"]),
        grid: [spans, args.kv_heads, args.splits],
        threads: 128,
        args,
    }
}

/// Returns the launch that combines the parts that [`decode`] has written.
pub fn combine(args: CombineArgs, spans: u32, head_dim: HeadDim) -> Launch<CombineArgs> {
    Launch {
        kernel: head_dim.pick(["combine_32", "combine_64", "combine_128"]),
        grid: [spans, args.heads, 1],
        threads: head_dim.elements(),
        args,
    }
}

/// Returns the launch of attention for `spans` spans of at most [`tile_tokens`] tokens
/// each. Heads run fastest in the grid. A device starts blocks in that order, so all
/// heads of the first span come before the second span.
pub fn prefill(args: PrefillArgs, spans: u32, head_dim: HeadDim) -> Launch<PrefillArgs> {
    // A step has fewer tokens than this limit, and so fewer spans.
    assert!(spans <= MOST_GRID_Y, "{spans} spans");
    Launch {
        kernel: head_dim.pick(["prefill_32", "prefill_64", "prefill_128"]),
        grid: [args.kv_heads, spans, 1],
        threads: 128,
        args,
    }
}

/// Returns the most tokens of one span of [`prefill`], for `group` query heads that
/// share a KV head. Longer spans must be cut.
pub fn tile_tokens(group: u32) -> u32 {
    PREFILL_ROWS / group
}

/// Returns the launch of `silu(gate) * up` for `rows` rows.
pub fn swiglu(args: GateArgs, rows: u32) -> Launch<GateArgs> {
    Launch { kernel: "swiglu", grid: [rows, args.width.div_ceil(128 * 8), 1], threads: 128, args }
}

/// Returns the launch of a linear layer, with the kernel that fits its number of rows.
pub fn linear(args: LinearArgs, epilogue: Epilogue) -> Launch<LinearArgs> {
    if args.rows <= SKINNY_ROWS { skinny(args, epilogue) } else { tiled(args, epilogue) }
}

/// Returns the launch of a linear layer of any number of rows and at most 8 million
/// columns.
pub fn tiled(args: LinearArgs, epilogue: Epilogue) -> Launch<LinearArgs> {
    Launch {
        kernel: epilogue.pick(["linear_f32", "linear_bf16", "linear_add"]),
        // Rows run fastest, so that blocks with the same weights run at the same time.
        grid: [args.rows.div_ceil(TILE_ROWS), args.columns.div_ceil(TILE_COLUMNS), 1],
        threads: 256,
        args,
    }
}

/// Returns the launch of a linear layer with the kernel for few rows, which reads all
/// weights once for every [`SKINNY_ROWS`]. A row's sums are bit-identical whatever the
/// other rows are.
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

/// Returns the launch that takes `samples` samples.
pub fn sample(args: SampleArgs, samples: u32) -> Launch<SampleArgs> {
    Launch { kernel: "sample", grid: [samples, 1, 1], threads: 1_024, args }
}

/// Returns the elements of [`SampleArgs::sums`] for one sample.
pub fn sums_of_sample(vocabulary: u32) -> u32 {
    vocabulary.div_ceil(256)
}

/// The most likeliest tokens that [`sample`] reports, which is also the pitch of its
/// lists.
pub const MOST_TOP: u32 = 20;
/// Rows of activations that the kernels for few rows take at once.
pub const SKINNY_ROWS: u32 = 32;
// These must equal the constants of `kernels.h`: the grid is computed from them.
const SKINNY_COLUMNS: u32 = 16;
const PREFILL_ROWS: u32 = 64;
/// The most blocks of a grid in any direction but the first.
const MOST_GRID_Y: u32 = 65_535;
const TILE_ROWS: u32 = 128;
const TILE_COLUMNS: u32 = 128;
