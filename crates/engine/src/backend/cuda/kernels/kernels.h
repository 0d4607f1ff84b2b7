// Every kernel's arguments: one structure, passed by value. kernels.rs declares the
// same structures and the rules of grids; a test compares their sizes.
//
// Buffers are token-major. Rows of bf16 are multiples of 8 elements and begin at 16
// bytes. The keys and values of one layer are [block][kv_head][16][head_dim], bf16, one
// array each.
#pragma once

#include "portable.h"

constexpr u32 BLOCK_TOKENS = 16;

// Some neighbouring tokens of one sequence.
struct Span {
    u32 row;      // row of the first token in the step
    u32 tokens;   // 0: an unused entry
    u32 position; // position of the first token in the sequence
    u32 blocks;   // offset of its KV blocks in the list of all blocks
};

// tokens[i] = sampled[sources[i]] if there is a source. One thread a token.
struct FeedArgs {
    u32* tokens;
    const u32* sources; // NONE: the token stays
    const u32* sampled;
    u32 count;
};

// words[i] = value.
struct FillArgs {
    u32* words;
    u64 count;
    u32 value;
};

// Copies block `from` into block `to` in all layers. Grid: layers, 2 (keys, values).
struct CopyBlockArgs {
    bf16* keys;
    bf16* values;
    u64 layer_elements;
    u32 block_elements;
    u32 from;
    u32 to;
};

// Fills the residual stream with the tokens' rows of the table. Grid: tokens.
struct EmbedArgs {
    float* residual;
    const bf16* table;
    const u32* tokens;
    u32 hidden;
};

// Computes cosines, then sines, of each token's angles. Grid: tokens.
struct AnglesArgs {
    float* angles;       // [token][2 half]
    const double* turns; // turns of each pair from one position to the next
    const u32* positions;
    u32 half;
};

// RMS norm of rows of the residual stream. Grid: rows of the output.
struct NormArgs {
    bf16* output;
    const float* input;
    const float* weight;
    const u32* rows; // rows of the input; null: the rows of the output
    float epsilon;
    u32 width;
};

// Turns the QKV projection into queries and cache entries: bias, norms of heads, rotary
// positions. Grid: tokens, steps of heads.
struct RopeArgs {
    bf16* queries; // [token][heads * d]
    bf16* keys;
    bf16* values;
    const float* qkv;        // [token][(heads + 2 kv_heads) * d]
    const float* bias;       // null: none
    const float* query_norm; // null: no norms of query and key heads
    const float* key_norm;
    const float* angles;
    const u32* slots; // block * 16 + token of the block; NONE: not written
    float epsilon;
    u32 heads;
    u32 kv_heads;
};

// Attention of single tokens, each in `splits` parts of its context. Grid: spans,
// kv_heads, splits.
struct DecodeArgs {
    bf16* output;     // [token][heads * d], written if splits is 1
    float* partial;   // [span][head][split][d], written otherwise
    Floats2* softmax; // [span][head][split]: largest score, sum
    const bf16* queries;
    const bf16* keys;
    const bf16* values;
    const Span* spans;
    const u32* blocks;
    float scale;
    u32 heads;
    u32 kv_heads;
    u32 splits;
    u32 window; // tokens that attention sees, including itself; 0: all
};

// Combines the parts of attention. Grid: spans, heads.
struct CombineArgs {
    bf16* output;
    const float* partial;
    const Floats2* softmax;
    const Span* spans;
    u32 heads;
    u32 splits;
};

// Causal attention of spans of at most PREFILL_ROWS / (heads / kv_heads) tokens. Grid:
// kv_heads, spans, so that blocks start in the order of spans. Spans with the most
// context should come first.
struct PrefillArgs {
    bf16* output;
    const bf16* queries;
    const bf16* keys;
    const bf16* values;
    const Span* spans;
    const u32* blocks;
    float scale;
    u32 heads;
    u32 kv_heads;
    u32 window;
};
constexpr u32 PREFILL_ROWS = 64;
// The most query heads that one KV head may serve.
constexpr u32 MOST_GROUP = 16;

// output = silu(gate) * up. Grid: rows, steps of the width.
struct GateArgs {
    bf16* output;        // [row][width]
    const bf16* gate_up; // [row][2 width]: gates, then the values they gate
    u32 width;
};

// output [row][column] = sum over depth of input [row][] * weights [column][].
struct LinearArgs {
    void* output; // [row][columns]
    const bf16* input;
    const bf16* weights;
    u32 rows;
    u32 columns;
    u32 depth;
};
constexpr u32 TILE_ROWS = 128;
constexpr u32 TILE_COLUMNS = 128;
// Columns of a block of the skinny kernels, for up to 8, 16 or 32 rows.
constexpr u32 SKINNY_COLUMNS = 16;

// The parameters of one sample. The kernel follows sample.rs bit for bit, except for
// the sums of top_p.
struct SampleRow {
    u64 seed;
    float temperature;
    float top_p;
    float presence;
    float frequency;
    u32 position;    // tokens that the choice has generated so far
    u32 row;         // row of the logits
    u32 given;       // a known token, whose log-probability is reported; NONE: a token is sampled
    u32 pending;     // index in `previous` of one more generated token, which the counts lack; or NONE
    u32 biases;      // offset in the lists of biases
    u32 bias_count;
    u32 counts;      // offset in the lists of counts
    u32 count_count;
    u32 top;         // number of likeliest tokens to report; NONE: no log-probabilities
    u32 top_k;       // number of likeliest tokens that may be sampled; 0: all
    float repetition; // divides or multiplies the logits of earlier tokens; 1: no change
    u32 prompt;       // offset in `prompt_tokens`
    u32 prompt_count; // 0 without a repetition penalty
    float min_p;      // part of the likeliest token's weight that others must reach; 0: no cut
    u32 mask;         // offset in `masks` of the tokens that may be sampled; NONE: all
    u32 unused;       // fills the structure to whole 64-bit words
};
// Marks a count whose token is in the prompt, too.
constexpr u32 PROMPTED = 0x80000000u;
constexpr u32 MOST_TOP = 20;

// Arguments of the sampling kernel. Grid: samples.
struct SampleArgs {
    u32* tokens;           // [sample]: the tokens; NONE if no logit is above -inf
    float* logprobs;       // [sample], written on request
    u32* top_tokens;       // [sample][MOST_TOP]
    float* top_logprobs;   // [sample][MOST_TOP]
    float* weights;        // [sample][vocabulary], scratch
    double* sums;          // [sample][vocabulary / 256, rounded up], scratch
    const SampleRow* rows; // [sample]
    const float* logits;   // [row][vocabulary]
    const u32* previous;   // the tokens of the previous step
    const u32* bias_tokens;
    const float* biases;
    const u32* count_tokens;
    const u32* counts;        // with PROMPTED where the token is in the prompt, too
    const u32* prompt_tokens; // each token of a prompt once
    const u32* masks;         // a bit for each token, lowest bit first
    u32 vocabulary;
};
