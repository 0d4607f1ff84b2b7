// Attention of one new token over its paged context (flash-decoding). A warp loads one
// KV block at a time into registers. The heads that share a KV head are the rows of one
// matrix product and share its loads.
#include "kernels.h"

// The results of a block's warps, which are combined at the end. Rows are one element
// longer than a head, so that heads lie in different banks.
template <u32 D> struct Found {
    float sums[4][MOST_GROUP][D + 1];
    float largest[4][MOST_GROUP];
    float total[4][MOST_GROUP];
};

// Dimensions are distributed over lanes so that each lane loads 16 neighbouring bytes
// (8 for values of heads of 32). A product over dimensions does not depend on their
// order, as long as queries and keys agree on it.
template <u32 D> struct Decode {
    static constexpr u32 CHUNKS = D / 32;  // chunks of a key's row: 16 bytes from each of 4 lanes
    static constexpr u32 VALUES = D / 8;   // dimensions of a value's row that a lane holds
    float sums[VALUES][4];                 // rows are heads, columns are one dimension of each lane
    float largest[2], total[2];            // values of heads g and g + 8
    u32 queries[2 * CHUNKS][4];
};

// Returns a KV block's rows of the KV head that this thread block computes.
template <u32 D> DEVICE const bf16* panel_of(const bf16* cache, u32 block, u32 kv_heads) {
    return cache + ((u64)block * kv_heads + block_y()) * BLOCK_TOKENS * D;
}

template <u32 D> DEVICE void load_queries(Decode<D>& state, const DecodeArgs& args, u32 row) {
    u32 lane = thread_index() % WARP, g = lane / 4, t = lane % 4;
    u32 group = args.heads / args.kv_heads;
    u32 first = PLANTED(DecodeWrongHead) ? block_y() : block_y() * group;
    const bf16* from = args.queries + ((u64)row * args.heads + first) * D + 8 * t;
#pragma unroll
    for (u32 chunk = 0; chunk < Decode<D>::CHUNKS; chunk++) {
        Words4 upper = {}, lower = {};
        if (g < group) {
            upper = load8(from + g * D + 32 * chunk);
        }
        if (g + 8 < group) {
            lower = load8(from + (g + 8) * D + 32 * chunk);
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            state.queries[2 * chunk + half][0] = upper.words[2 * half];
            state.queries[2 * chunk + half][1] = lower.words[2 * half];
            state.queries[2 * chunk + half][2] = upper.words[2 * half + 1];
            state.queries[2 * chunk + half][3] = lower.words[2 * half + 1];
        }
    }
#pragma unroll
    for (u32 i = 0; i < Decode<D>::VALUES; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            state.sums[i][j] = 0;
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        state.largest[i] = minus_infinity();
        state.total[i] = 0;
    }
}

// The values of four keys that a lane holds: dimensions 8 g to 8 g + 7 of each 64, or 4
// g to 4 g + 3 of 32.
template <u32 D> struct Values {
    u32 words[D / 16][4];
};
template <u32 D> DEVICE void load_values(Values<D>& to, const bf16* rows) {
    u32 lane = thread_index() % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const bf16* row = rows + (2 * t + i % 2 + i / 2 * 8) * D;
        if constexpr (D == 32) {
            Words2 words = *reinterpret_cast<const Words2*>(row + 4 * g);
            to.words[0][i] = words.words[0];
            to.words[1][i] = words.words[1];
        } else {
#pragma unroll
            for (u32 part = 0; part < D / 64; part++) {
                Words4 words = load8(row + 64 * part + 8 * g);
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    to.words[4 * part + j][i] = words.words[j];
                }
            }
        }
    }
}

// A KV block in registers.
template <u32 D> struct Loaded {
    Words4 keys[2][Decode<D>::CHUNKS];
    Values<D> values;
};
template <u32 D> DEVICE void load_block(Loaded<D>& to, const DecodeArgs& args, u32 block) {
    u32 lane = thread_index() % WARP, g = lane / 4, t = lane % 4;
    const bf16* keys = panel_of<D>(args.keys, block, args.kv_heads);
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
#pragma unroll
        for (u32 chunk = 0; chunk < Decode<D>::CHUNKS; chunk++) {
            to.keys[half][chunk] = load8(keys + (8 * half + g) * D + 32 * chunk + 8 * t);
        }
    }
    load_values<D>(to.values, panel_of<D>(args.values, block, args.kv_heads));
}

// Processes one KV block. Keys `from` to `to` of the block are seen.
template <u32 D>
DEVICE void attend_block(Decode<D>& state, const DecodeArgs& args, Loaded<D>& loaded, u32 from,
                         u32 to) {
    u32 t = thread_index() % 4;
    // Scores: rows are heads, columns are keys 2 t and 2 t + 1 of either half.
    float scores[2][4] = {};
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
#pragma unroll
        for (u32 chunk = 0; chunk < Decode<D>::CHUNKS; chunk++) {
            const Words4& key = loaded.keys[half][chunk];
            multiply(scores[half], state.queries[2 * chunk], key.words[0], key.words[1]);
            multiply(scores[half], state.queries[2 * chunk + 1], key.words[2], key.words[3]);
        }
    }
    float scale = args.scale * LOG2_E;
    float highest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 key = 8 * half + 2 * t + i % 2;
            bool is_seen = key >= from && key < to;
            scores[half][i] = is_seen ? scores[half][i] * scale : minus_infinity();
            highest[i / 2] = larger(highest[i / 2], scores[half][i]);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        highest[i] = larger(highest[i], shuffle_xor(highest[i], 1));
        highest[i] = larger(highest[i], shuffle_xor(highest[i], 2));
        highest[i] = larger(highest[i], state.largest[i]);
    }
    // At least one key is seen, so the highest score is a number.
    float correction[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        correction[i] = exp2_fast(state.largest[i] - highest[i]);
        state.largest[i] = highest[i];
        state.total[i] *= correction[i];
    }
    float weights[2][4];
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            weights[half][i] = exp2_fast(scores[half][i] - highest[i / 2]);
            state.total[i / 2] += weights[half][i];
        }
    }
    u32 packed[4] = {
        narrow2(weights[0][0], weights[0][1]), narrow2(weights[0][2], weights[0][3]),
        narrow2(weights[1][0], weights[1][1]), narrow2(weights[1][2], weights[1][3])};
#pragma unroll
    for (u32 pair = 0; pair < D / 16; pair++) {
        u32(&rows)[4] = loaded.values.words[pair];
        // Unseen values may hold any bits, and 0 times NaN is not 0, so they are
        // replaced by 0.
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 key = 2 * t + i % 2 + i / 2 * 8;
            rows[i] = key >= from && key < to ? rows[i] : 0;
        }
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
            float(&sums)[4] = state.sums[2 * pair + odd];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                sums[i] *= correction[i / 2];
            }
            u32 low = odd ? (rows[0] >> 16) | (rows[1] & 0xffff0000u)
                          : (rows[0] & 0xffff) | (rows[1] << 16);
            u32 high = odd ? (rows[2] >> 16) | (rows[3] & 0xffff0000u)
                           : (rows[2] & 0xffff) | (rows[3] << 16);
            multiply(sums, packed, low, high);
        }
    }
}

// Returns the dimension of column n of a lane's product i, in the order in which
// load_values has distributed the dimensions.
template <u32 D> DEVICE u32 dimension(u32 i, u32 n) {
    return D == 32 ? 4 * n + i : i / 8 * 64 + 8 * n + i % 8;
}

template <u32 D> DEVICE void leave(const Decode<D>& state, Found<D>& found, u32 group) {
    u32 warp = thread_index() / WARP, lane = thread_index() % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float total = sum_of_lanes(state.total[half], 4);
        u32 head = g + 8 * half;
        if (head >= group) {
            continue;
        }
        if (t == 0) {
            found.largest[warp][head] = state.largest[half];
            found.total[warp][head] = total;
        }
#pragma unroll
        for (u32 i = 0; i < Decode<D>::VALUES; i++) {
#pragma unroll
            for (u32 odd = 0; odd < 2; odd++) {
                found.sums[warp][head][dimension<D>(i, 2 * t + odd)] = state.sums[i][2 * half + odd];
            }
        }
    }
}

template <u32 D> DEVICE void decode(const DecodeArgs& args) {
    SHARED(Found<D>, found);
    Span span = args.spans[block_x()];
    if (span.tokens == 0) {
        return;
    }
    u32 group = args.heads / args.kv_heads;
    u32 end = span.position + 1;
    u32 begin = args.window > 0 && end > args.window ? end - args.window : 0;
    u32 first = begin / BLOCK_TOKENS, last = steps_of(end, BLOCK_TOKENS);
    u32 part = steps_of(last - first, args.splits);
    u32 from = first + block_z() * part;
    u32 to = least_of(from + part, last);

    Decode<D> state;
    load_queries<D>(state, args, span.row);
    // The warps take the blocks in turn. The next block is under way while a warp works
    // on this one, and so is the number of the block behind it.
    Loaded<D> loaded;
    u32 at = from + thread_index() / WARP;
    u32 next = at + 4 < to ? args.blocks[span.blocks + at + 4] : 0;
    if (at < to) {
        load_block<D>(loaded, args, args.blocks[span.blocks + at]);
    }
    for (; at < to; at += 4) {
        Loaded<D> ahead = loaded;
        if (at + 4 < to) {
            load_block<D>(ahead, args, next);
            next = at + 8 < to ? args.blocks[span.blocks + at + 8] : 0;
        }
        sync_warp(); // keeps the compiler from moving the loads behind the products
        u32 start = at * BLOCK_TOKENS;
        u32 low = most_of(begin, start) - start;
        u32 high = least_of(end - start + (PLANTED(DecodeMask) ? 1 : 0), BLOCK_TOKENS);
        attend_block<D>(state, args, loaded, low, high);
        loaded = ahead;
    }
    leave<D>(state, found, group);
    if (!PLANTED(DecodeWithoutBarrier)) {
        sync_block();
    }
    for (u32 i = thread_index(); i < group * D; i += 128) {
        u32 head = i / D, at = i % D;
        float largest = minus_infinity(), total = 0, sum = 0;
#pragma unroll
        for (u32 warp = 0; warp < 4; warp++) {
            largest = larger(largest, found.largest[warp][head]);
        }
#pragma unroll
        for (u32 warp = 0; warp < 4; warp++) {
            // A warp without keys has minus infinity. All warps may have minus
            // infinity.
            float by = found.largest[warp][head] == minus_infinity()
                           ? 0.0f
                           : exp2_fast(found.largest[warp][head] - largest);
            total += found.total[warp][head] * by;
            sum += found.sums[warp][head][at] * by;
        }
        u32 whole = block_y() * group + head;
        if (args.splits == 1) {
            args.output[((u64)span.row * args.heads + whole) * D + at] = narrow(sum / total);
            continue;
        }
        u64 place = ((u64)block_x() * args.heads + whole) * args.splits + block_z();
        args.partial[place * D + at] = sum;
        if (at == 0) {
            args.softmax[place] = Floats2{{largest, total}};
        }
    }
}

template <u32 D> DEVICE void combine(const CombineArgs& args) {
    Span span = args.spans[block_x()];
    if (span.tokens == 0) {
        return;
    }
    u64 place = ((u64)block_x() * args.heads + block_y()) * args.splits;
    float largest = minus_infinity(), total = 0, sum = 0;
    for (u32 split = 0; split < args.splits; split++) {
        largest = larger(largest, args.softmax[place + split].at[0]);
    }
    for (u32 split = 0; split < args.splits; split++) {
        Floats2 softmax = args.softmax[place + split];
        if (softmax.at[0] != minus_infinity()) {
            float by = exp2_fast(softmax.at[0] - largest);
            total += softmax.at[1] * by;
            sum += args.partial[(place + split) * D + thread_index()] * by;
        }
    }
    args.output[((u64)span.row * args.heads + block_y()) * D + thread_index()] =
        narrow(sum / total);
}

KERNEL(decode_32, 128, DecodeArgs) { decode<32>(args); }
KERNEL(decode_64, 128, DecodeArgs) { decode<64>(args); }
KERNEL(decode_128, 128, DecodeArgs) { decode<128>(args); }
KERNEL(combine_32, 32, CombineArgs) { combine<32>(args); }
KERNEL(combine_64, 64, CombineArgs) { combine<64>(args); }
KERNEL(combine_128, 128, CombineArgs) { combine<128>(args); }
