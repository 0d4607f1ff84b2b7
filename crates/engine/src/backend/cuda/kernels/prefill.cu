// Causal attention of many new tokens over their paged context, by the method of
// FlashAttention-2: a tile of queries stays while keys and values pass by. Rows of a
// tile are pairs of token and head of the group, so that the heads that share a KV head
// share its loads. The values are loaded while scores are computed; the next keys are
// loaded while values are summed.
#include "kernels.h"

constexpr u32 PREFILL_KEYS = 64;

template <u32 D> struct PrefillTiles {
    alignas(128) bf16 queries[PREFILL_ROWS * D];
    bf16 keys[PREFILL_KEYS * D];
    bf16 values[PREFILL_KEYS * D];
};

// The 16-byte pieces of a row are permuted so that eight rows of a matrix lie in
// different banks. The order repeats every eight rows, so the row eight rows further is
// at `place + 8 * D`. A piece's bits are bits of its place, so from piece 0 or 1, the
// piece 2 `step` further is at `place ^ step * 16`.
template <u32 D> DEVICE u32 place_in_rows(u32 row, u32 piece) {
    u32 by = D == 32 ? row / 2 % 4 : row % 8;
    return row * D + (piece ^ by) * 8;
}

template <u32 D>
DEVICE void load_query_tile(PrefillTiles<D>& tiles, const PrefillArgs& args, const Span& span) {
    constexpr u32 PIECES = D / 8;
    u32 group = args.heads / args.kv_heads, rows = span.tokens * group;
    u32 first_head = PLANTED(PrefillWrongHead) ? block_x() : block_x() * group;
#pragma unroll
    for (u32 i = 0; i < PREFILL_ROWS * PIECES / 128; i++) {
        u32 at = i * 128 + thread_index(), row = at / PIECES, piece = at % PIECES;
        bool is_there = row < rows;
        u64 from = is_there ? (u64)(span.row + row / group) * args.heads + first_head + row % group : 0;
        copy_async(tiles.queries + place_in_rows<D>(row, piece), args.queries + from * D + piece * 8,
                   is_there);
    }
}

// A thread's share of a tile of keys or values: one piece of every ROWS-th row, so that
// a few KV blocks contain all of it.
template <u32 D> struct PrefillShare {
    static constexpr u32 PIECES = D / 8, ROWS = 128 / PIECES;
    static constexpr u32 STEP = ROWS < BLOCK_TOKENS ? BLOCK_TOKENS : ROWS;
    static constexpr u32 BLOCKS = PREFILL_KEYS / STEP;
    u32 blocks[BLOCKS];
};

// Finds the blocks of positions `first` to `first + 63`. Positions behind the end use
// the last block, because the table has no blocks for them; their keys are masked.
template <u32 D>
DEVICE void look_up(PrefillShare<D>& share, const PrefillArgs& args, const Span& span, u32 first,
                    u32 end) {
    using Share = PrefillShare<D>;
    u32 row = thread_index() / Share::PIECES;
#pragma unroll
    for (u32 i = 0; i < Share::BLOCKS; i++) {
        u32 key = least_of(first + i * Share::STEP + row, end - 1);
        share.blocks[i] = args.blocks[span.blocks + key / BLOCK_TOKENS];
    }
}

// Loads the keys or values of positions `first` to `first + 63`. Unseen positions
// become zeros, because 0 times NaN is not 0.
template <u32 D>
DEVICE void load_key_tile(bf16* to, const bf16* cache, const PrefillArgs& args,
                          const PrefillShare<D>& share, u32 first, u32 begin, u32 end) {
    using Share = PrefillShare<D>;
    u32 row = thread_index() / Share::PIECES, piece = thread_index() % Share::PIECES;
    u64 pitch = (u64)args.kv_heads * BLOCK_TOKENS * D;
    cache += (block_x() * BLOCK_TOKENS + row % BLOCK_TOKENS) * D + piece * 8;
    to += place_in_rows<D>(row, piece);
#pragma unroll
    for (u32 i = 0; i < Share::BLOCKS; i++) {
        const bf16* from = cache + share.blocks[i] * pitch;
#pragma unroll
        for (u32 down = 0; down < Share::STEP; down += Share::ROWS) {
            u32 key = first + i * Share::STEP + down + row;
            bool is_there = key >= begin && key < end;
            copy_async(to + (i * Share::STEP + down) * D, from + down * D, is_there);
        }
    }
}

// The sixteen rows of a warp. A lane has rows g and g + 8.
template <u32 D> struct PrefillRows {
    float sums[D / 8][4];
    float largest[2], total[2];
};

template <u32 D>
DEVICE void score_tile(float (&scores)[PREFILL_KEYS / 8][4], const PrefillTiles<D>& tiles) {
    u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
#pragma unroll
    for (u32 i = 0; i < PREFILL_KEYS / 8; i++) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            scores[i][k] = 0;
        }
    }
    u32 query_place = place_in_rows<D>(warp * 16 + lane % 16, lane / 16);
    u32 key_place = place_in_rows<D>(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    // Two steps at once; more do not fit in registers.
#pragma unroll 2
    for (u32 step = 0; step < D / 16; step++) {
        u32 query[4];
        load_matrices(query, tiles.queries + (query_place ^ step * 16));
#pragma unroll
        for (u32 i = 0; i < PREFILL_KEYS / 16; i++) {
            u32 key[4];
            load_matrices(key, tiles.keys + i * 16 * D + (key_place ^ step * 16));
            multiply(scores[2 * i], query, key[0], key[1]);
            multiply(scores[2 * i + 1], query, key[2], key[3]);
        }
    }
}

// Sets scores outside a row's visible keys to minus infinity.
template <u32 D>
DEVICE void mask_tile(float (&scores)[PREFILL_KEYS / 8][4], const PrefillArgs& args,
                      const Span& span, u32 first) {
    u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
    u32 group = args.heads / args.kv_heads;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = warp * 16 + lane / 4 + 8 * half;
        u32 end = span.position + row / group + (PLANTED(PrefillMask) ? 2 : 1);
        u32 begin = args.window > 0 && end > args.window ? end - args.window : 0;
#pragma unroll
        for (u32 i = 0; i < PREFILL_KEYS / 8; i++) {
#pragma unroll
            for (u32 odd = 0; odd < 2; odd++) {
                u32 key = first + i * 8 + lane % 4 * 2 + odd;
                if (key < begin || key >= end) {
                    scores[i][2 * half + odd] = minus_infinity();
                }
            }
        }
    }
}

// Turns scores into weights relative to the largest score so far, and rescales the
// earlier sums.
template <u32 D>
DEVICE void soften_tile(PrefillRows<D>& rows, float (&scores)[PREFILL_KEYS / 8][4], float scale) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float highest = rows.largest[half];
#pragma unroll
        for (u32 i = 0; i < PREFILL_KEYS / 8; i++) {
            highest = larger_number(highest, scores[i][2 * half]);
            highest = larger_number(highest, scores[i][2 * half + 1]);
        }
        highest = larger_number(highest, shuffle_xor(highest, 1));
        highest = larger_number(highest, shuffle_xor(highest, 2));
        // A row that has not seen any key yet has no largest score; 0 avoids NaN.
        float base = highest == minus_infinity() ? 0.0f : highest * scale;
        // The product is rounded before the subtraction, as `base` is. A tile that does
        // not change the largest score then corrects by exactly 1; otherwise a row
        // would depend on the extent of its tile.
        float correction = exp2_fast(plus(times(rows.largest[half], scale), -base));
        rows.largest[half] = highest;
        rows.total[half] *= correction;
#pragma unroll
        for (u32 i = 0; i < D / 8; i++) {
            rows.sums[i][2 * half] *= correction;
            rows.sums[i][2 * half + 1] *= correction;
        }
#pragma unroll
        for (u32 i = 0; i < PREFILL_KEYS / 8; i++) {
#pragma unroll
            for (u32 odd = 0; odd < 2; odd++) {
                float weight = exp2_fast(scores[i][2 * half + odd] * scale - base);
                scores[i][2 * half + odd] = weight;
                rows.total[half] += weight;
            }
        }
    }
}

template <u32 D>
DEVICE void sum_tile(PrefillRows<D>& rows, const float (&weights)[PREFILL_KEYS / 8][4],
                     const PrefillTiles<D>& tiles) {
    u32 lane = thread_index() % WARP;
    u32 value_place = place_in_rows<D>(lane % 16, lane / 16);
#pragma unroll
    for (u32 step = 0; step < PREFILL_KEYS / 16; step++) {
        const float(&low)[4] = weights[2 * step];
        const float(&high)[4] = weights[2 * step + 1];
        u32 packed[4] = {narrow2(low[0], low[1]), narrow2(low[2], low[3]),
                         narrow2(high[0], high[1]), narrow2(high[2], high[3])};
#pragma unroll
        for (u32 i = 0; i < D / 16; i++) {
            u32 value[4];
            load_matrices_transposed(value, tiles.values + step * 16 * D + (value_place ^ i * 16));
            multiply(rows.sums[2 * i], packed, value[0], value[1]);
            multiply(rows.sums[2 * i + 1], packed, value[2], value[3]);
        }
    }
}

template <u32 D>
DEVICE void store_rows(const PrefillRows<D>& rows, const PrefillArgs& args, const Span& span) {
    u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
    u32 group = args.heads / args.kv_heads;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float inverse = 1.0f / sum_of_lanes(rows.total[half], 4);
        u32 row = warp * 16 + lane / 4 + 8 * half;
        if (row >= span.tokens * group) {
            continue;
        }
        u64 head = (u64)(span.row + row / group) * args.heads + block_x() * group + row % group;
        bf16* to = args.output + head * D + lane % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < D / 8; i++) {
            *reinterpret_cast<u32*>(to + i * 8) =
                narrow2(rows.sums[i][2 * half] * inverse, rows.sums[i][2 * half + 1] * inverse);
        }
    }
}

template <u32 D> DEVICE void prefill(const PrefillArgs& args) {
    SHARED(PrefillTiles<D>, tiles);
    Span span = args.spans[block_y()];
    if (span.tokens == 0) {
        return;
    }
    u32 end = span.position + span.tokens;
    u32 begin = args.window > 0 && span.position + 1 > args.window
                    ? span.position + 1 - args.window
                    : 0;
    u32 first = begin / PREFILL_KEYS * PREFILL_KEYS;
    float scale = args.scale * LOG2_E;
    PrefillRows<D> rows = {};
    rows.largest[0] = rows.largest[1] = minus_infinity();

    load_query_tile<D>(tiles, args, span);
    PrefillShare<D> share;
    look_up<D>(share, args, span, first, end);
    load_key_tile<D>(tiles.keys, args.keys, args, share, first, begin, end);
    commit_copies();
    for (; first < end; first += PREFILL_KEYS) {
        // The keys have arrived, and no thread still reads the previous values.
        wait_copies<0>();
        sync_block();
        load_key_tile<D>(tiles.values, args.values, args, share, first, begin, end);
        commit_copies();
        float scores[PREFILL_KEYS / 8][4];
        score_tile<D>(scores, tiles);
        if (first + PREFILL_KEYS > span.position + 1 || args.window > 0) {
            mask_tile<D>(scores, args, span, first);
        }
        soften_tile<D>(rows, scores, scale);
        look_up<D>(share, args, span, first + PREFILL_KEYS, end);
        // The values have arrived, and no thread still reads the keys.
        if (!PLANTED(PrefillWithoutWait)) {
            wait_copies<0>();
        }
        if (!PLANTED(PrefillWithoutBarrier)) {
            sync_block();
        }
        if (first + PREFILL_KEYS < end) {
            load_key_tile<D>(tiles.keys, args.keys, args, share, first + PREFILL_KEYS, begin, end);
        }
        commit_copies();
        sum_tile<D>(rows, scores, tiles);
    }
    store_rows<D>(rows, args, span);
}

KERNEL(prefill_32, 128, PrefillArgs) { prefill<32>(args); }
KERNEL(prefill_64, 128, PrefillArgs) { prefill<64>(args); }
DENSE_KERNEL(prefill_128, 128, 3, PrefillArgs) { prefill<128>(args); }
