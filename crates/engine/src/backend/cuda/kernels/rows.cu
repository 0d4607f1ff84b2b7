// Kernels that touch each element of a row once: embedding, norms, positions, gates.
#include "kernels.h"

KERNEL(feed, 256, FeedArgs) {
    u32 i = block_x() * 256 + thread_index();
    if (i < args.count && args.sources[i] != NONE) {
        u32 token = args.sampled[args.sources[i]];
        // A row without finite logits gives no token. Its sequence ends, so any valid
        // token serves here.
        args.tokens[i] = token == NONE ? 0 : token;
    }
}

KERNEL(fill, 256, FillArgs) {
    u64 i = (u64)block_x() * 256 + thread_index();
    if (i < args.count) {
        args.words[i] = args.value;
    }
}

KERNEL(copy_block, 256, CopyBlockArgs) {
    bf16* elements = (block_y() == 0 ? args.keys : args.values) + block_x() * args.layer_elements;
    const bf16* from = elements + (u64)args.from * args.block_elements;
    bf16* to = elements + (u64)args.to * args.block_elements;
    for (u32 i = thread_index() * 8; i < args.block_elements; i += 256 * 8) {
        *reinterpret_cast<Words4*>(to + i) = load8(from + i);
    }
}

KERNEL(embed, 256, EmbedArgs) {
    u32 row = block_x();
    const bf16* from = args.table + (u64)args.tokens[row] * args.hidden;
    float* to = args.residual + (u64)row * args.hidden;
    for (u32 i = thread_index() * 8; i < args.hidden; i += 256 * 8) {
        float values[8];
        widen8(values, load8(from + i));
        Floats4* vectors = reinterpret_cast<Floats4*>(to + i);
        vectors[0] = {values[0], values[1], values[2], values[3]};
        vectors[1] = {values[4], values[5], values[6], values[7]};
    }
}

KERNEL(angles, 64, AnglesArgs) {
    u32 token = block_x();
    double position = args.positions[token];
    float* to = args.angles + (u64)token * 2 * args.half;
    for (u32 i = thread_index(); i < args.half; i += 64) {
        sine_cosine(times(position, args.turns[i]), to[args.half + i], to[i]);
    }
}

struct NormSums {
    float warps[8];
};
// Elements that a block processes at once.
constexpr u32 NORM_STEP = 256 * 8;

DEVICE float sum_of_squares(const float (&x)[8], float sum) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum += x[j] * x[j];
    }
    return sum;
}
DEVICE void store_scaled(bf16* to, float (&x)[8], float scale, const float (&weight)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x[j] = x[j] * scale * weight[j];
    }
    store8(to, x);
}

// The first elements of a row, and all of a usual row, stay in registers. The weights
// are loaded while squares are summed, so that no thread waits for them afterwards.
KERNEL(rms_norm, 256, NormArgs) {
    SHARED(NormSums, sums);
    constexpr u32 HELD = 2;
    u32 first = thread_index() * 8, behind = first + HELD * NORM_STEP;
    float x[HELD][8] = {}, weight[HELD][8] = {};
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        if (first + k * NORM_STEP < args.width) {
            load8(weight[k], args.weight + first + k * NORM_STEP);
        }
    }
    u32 row = args.rows ? args.rows[block_x()] : block_x();
    const float* from = args.input + (u64)row * args.width;
    bf16* to = args.output + (u64)block_x() * args.width;
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        if (first + k * NORM_STEP < args.width) {
            load8(x[k], from + first + k * NORM_STEP);
        }
    }
    float squares = 0;
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        squares = sum_of_squares(x[k], squares);
    }
    for (u32 i = behind; i < args.width; i += NORM_STEP) {
        float more[8];
        load8(more, from + i);
        squares = sum_of_squares(more, squares);
    }
    squares = sum_of_lanes(squares, WARP);
    if (thread_index() % WARP == 0) {
        sums.warps[thread_index() / WARP] = squares;
    }
    if (!PLANTED(NormWithoutBarrier)) {
        sync_block();
    }
    squares = 0;
#pragma unroll
    for (int warp = 0; warp < 8; warp++) {
        squares += sums.warps[warp];
    }
    float scale = inverse_root(squares / (float)args.width + args.epsilon);
#pragma unroll
    for (u32 k = 0; k < HELD; k++) {
        if (first + k * NORM_STEP < args.width) {
            store_scaled(to + first + k * NORM_STEP, x[k], scale, weight[k]);
        }
    }
    for (u32 i = behind; i < args.width; i += NORM_STEP) {
        float more[8], more_weight[8];
        load8(more, from + i);
        load8(more_weight, args.weight + i);
        store_scaled(to + i, more, scale, more_weight);
    }
}

// D / 4 threads process a head of D elements. Each thread holds two neighbouring
// elements of either half, which are rotated together.
template <u32 D> DEVICE void rope(const RopeArgs& args) {
    constexpr u32 LANES = D / 4;
    u32 token = block_x();
    u32 all = args.heads + 2 * args.kv_heads;
    u32 head = block_y() * (128 / LANES) + thread_index() / LANES;
    u32 at = thread_index() % LANES * 2;
    // Lanes behind the last head take part, because shuffles need the whole warp.
    bool is_there = head < all;
    head = least_of(head, all - 1);
    bool is_query = head < args.heads, is_value = head >= args.heads + args.kv_heads;

    u32 column = head * D + at;
    const float* from = args.qkv + (u64)token * all * D + column;
    Floats2 low = *reinterpret_cast<const Floats2*>(from);
    Floats2 high = *reinterpret_cast<const Floats2*>(from + D / 2);
    // Loaded here although it is used later, so that there is only one wait for memory.
    u32 slot = args.slots[token];
    const float* angles = args.angles + (u64)token * D + at;
    Floats2 cosines = *reinterpret_cast<const Floats2*>(angles);
    Floats2 sines = *reinterpret_cast<const Floats2*>(angles + D / 2);
    float low_weight[2] = {}, high_weight[2] = {};
    if (args.query_norm && !is_value) {
        const float* weight = (is_query ? args.query_norm : args.key_norm) + at;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            low_weight[i] = weight[i];
            high_weight[i] = weight[D / 2 + i];
        }
    }
    if (args.bias) {
        Floats2 low_bias = *reinterpret_cast<const Floats2*>(args.bias + column);
        Floats2 high_bias = *reinterpret_cast<const Floats2*>(args.bias + column + D / 2);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            low.at[i] += low_bias.at[i];
            high.at[i] += high_bias.at[i];
        }
    }
    if (args.query_norm) {
        float squares = low.at[0] * low.at[0] + low.at[1] * low.at[1] + high.at[0] * high.at[0] +
                        high.at[1] * high.at[1];
        squares = sum_of_lanes(squares, LANES);
        if (!is_value) {
            float scale = inverse_root(squares / (float)D + args.epsilon);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                low.at[i] *= scale * low_weight[i];
                high.at[i] *= scale * high_weight[i];
            }
        }
    }
    if (!is_value) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float turned = low.at[i] * cosines.at[i] - high.at[i] * sines.at[i];
            high.at[i] = high.at[i] * cosines.at[i] + low.at[i] * sines.at[i];
            low.at[i] = turned;
        }
    }

    bf16* to;
    if (is_query) {
        to = args.queries + ((u64)token * args.heads + head) * D;
    } else {
        is_there = is_there && slot != NONE;
        u32 kv_head = is_value ? head - args.heads - args.kv_heads : head - args.heads;
        u64 row = ((u64)(slot / BLOCK_TOKENS) * args.kv_heads + kv_head) * BLOCK_TOKENS;
        to = (is_value ? args.values : args.keys) + (row + slot % BLOCK_TOKENS) * D;
    }
    if (is_there) {
        *reinterpret_cast<u32*>(to + at) = narrow2(low.at[0], low.at[1]);
        *reinterpret_cast<u32*>(to + at + D / 2) = narrow2(high.at[0], high.at[1]);
    }
}

KERNEL(rope_32, 128, RopeArgs) { rope<32>(args); }
KERNEL(rope_64, 128, RopeArgs) { rope<64>(args); }
KERNEL(rope_128, 128, RopeArgs) { rope<128>(args); }

KERNEL(swiglu, 128, GateArgs) {
    u32 i = (block_y() * 128 + thread_index()) * 8;
    if (i >= args.width && !PLANTED(GateWithoutBound)) {
        return;
    }
    const bf16* from = args.gate_up + (u64)block_x() * 2 * args.width + i;
    float gate[8], up[8];
    widen8(gate, load8(from));
    widen8(up, load8(from + args.width));
#pragma unroll
    for (int j = 0; j < 8; j++) {
        up[j] *= divided_fast(gate[j], 1.0f + exponential_fast(-gate[j]));
    }
    store8(args.output + (u64)block_x() * args.width + i, up);
}
