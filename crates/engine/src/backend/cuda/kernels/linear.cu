// Linear layers: rows of activations times rows of weights, bf16 with f32 sums. One
// kernel computes many rows in tiles. The other computes few rows and reads the weights
// once, straight from memory.
#include "kernels.h"

// The epilogues: the use of the products.
struct StoreF32 {
    typedef float Element;
    DEVICE_MEMBER static void put(float* to, float value) { *to = value; }
    DEVICE_MEMBER static void put_both(float* to, float low, float high) {
        *reinterpret_cast<Floats2*>(to) = Floats2{{low, high}};
    }
};
struct StoreBf16 {
    typedef bf16 Element;
    DEVICE_MEMBER static void put(bf16* to, float value) { *to = narrow(value); }
    DEVICE_MEMBER static void put_both(bf16* to, float low, float high) {
        *reinterpret_cast<u32*>(to) = narrow2(low, high);
    }
};
struct AddF32 {
    typedef float Element;
    DEVICE_MEMBER static void put(float* to, float value) { *to += value; }
    DEVICE_MEMBER static void put_both(float* to, float low, float high) {
        Floats2 before = *reinterpret_cast<Floats2*>(to);
        *reinterpret_cast<Floats2*>(to) = Floats2{{before.at[0] + low, before.at[1] + high}};
    }
};

constexpr u32 TILE_DEPTH = 32;
constexpr u32 STAGES = 3;

// Rows of 64 bytes. Their 16-byte pieces are permuted so that the eight rows of a
// matrix lie in different banks.
struct Stage {
    bf16 input[TILE_ROWS * TILE_DEPTH];
    bf16 weights[TILE_COLUMNS * TILE_DEPTH];
};
struct Stages {
    alignas(128) Stage at[STAGES];
};
DEVICE u32 place_in_tile(u32 row, u32 piece) {
    return row * TILE_DEPTH + ((piece ^ (row / 2 % 4)) * 8);
}

// Loads 128 rows of a matrix and 32 of their columns, starting at `column`. Elements
// outside the matrix are zero.
DEVICE void load_tile(bf16* to, const bf16* from, u32 row, u32 rows, u32 column, u32 columns) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 at = i * 256 + thread_index();
        u32 down = at / 4, piece = at % 4;
        bool is_there = row + down < rows && column + piece * 8 < columns;
        const bf16* source = from + (is_there ? (u64)(row + down) * columns + column + piece * 8 : 0);
        copy_async(to + place_in_tile(down, piece), source, is_there);
    }
}

DEVICE void load_stage(Stages& stages, const LinearArgs& args, u32 step) {
    Stage& stage = stages.at[step % STAGES];
    u32 column = step * TILE_DEPTH;
    load_tile(stage.input, args.input, block_x() * TILE_ROWS, args.rows, column, args.depth);
    load_tile(stage.weights, args.weights, block_y() * TILE_COLUMNS, args.columns, column,
              args.depth);
}

// Eight warps, each with 64 rows and 32 columns of the tile. Blocks that run at the
// same time have the same weights and different rows, so that the weights are read from
// memory once.
template <class Epilogue> DEVICE void tiled(const LinearArgs& args) {
    SHARED(Stages, stages);
    u32 warp = thread_index() / WARP, lane = thread_index() % WARP;
    u32 warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    u32 steps = steps_of(args.depth, TILE_DEPTH);
    float sums[4][4][4] = {};
#pragma unroll
    for (u32 step = 0; step < STAGES - 1; step++) {
        if (step < steps) {
            load_stage(stages, args, step);
        }
        commit_copies();
    }
    for (u32 step = 0; step < steps; step++) {
        if (!PLANTED(LinearWithoutWait)) {
            wait_copies<STAGES - 2>();
        }
        // After the barrier, the data of this step have arrived for all threads, and no
        // thread still reads the stage that is loaded next.
        if (!PLANTED(LinearWithoutBarrier)) {
            sync_block();
        }
        if (step + STAGES - 1 < steps) {
            load_stage(stages, args, step + STAGES - 1);
        }
        commit_copies();
        const Stage& stage = stages.at[step % STAGES];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 a[4][4], b[2][4];
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                load_matrices(a[i], stage.input + place_in_tile(warp_row + i * 16 + lane % 16,
                                                                2 * half + lane / 16));
            }
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                // Two times eight columns, with the low and the high depth of each.
                u32 column = warp_column + j * 16 + lane / 16 * 8 + lane % 8;
                load_matrices(b[j], stage.weights + place_in_tile(column, 2 * half + lane / 8 % 2));
            }
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    multiply(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
                }
            }
        }
    }
    typename Epilogue::Element* output = static_cast<typename Epilogue::Element*>(args.output);
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 row = block_x() * TILE_ROWS + warp_row + i * 16 + lane / 4 + half * 8;
                u32 column = block_y() * TILE_COLUMNS + warp_column + j * 8 + lane % 4 * 2;
                if (row >= args.rows) {
                    continue;
                }
                typename Epilogue::Element* to = output + (u64)row * args.columns + column;
                // One store writes both elements if every row begins at an even index.
                if (column + 1 < args.columns && args.columns % 2 == 0) {
                    Epilogue::put_both(to, sums[i][j][2 * half], sums[i][j][2 * half + 1]);
                    continue;
                }
#pragma unroll
                for (u32 odd = 0; odd < 2; odd++) {
                    if (column + odd < args.columns || PLANTED(LinearWithoutBound)) {
                        Epilogue::put(to + odd, sums[i][j][2 * half + odd]);
                    }
                }
            }
        }
    }
}

KERNEL(linear_f32, 256, LinearArgs) { tiled<StoreF32>(args); }
KERNEL(linear_bf16, 256, LinearArgs) { tiled<StoreBf16>(args); }
KERNEL(linear_add, 256, LinearArgs) { tiled<AddF32>(args); }

template <u32 EIGHTS> struct Parts {
    float at[8][SKINNY_COLUMNS][8 * EIGHTS];
};

// The depth that a warp processes at once. Its next chunk lies behind those of the
// other warps.
constexpr u32 CHUNK_DEPTH = 64;
constexpr u32 TURN_DEPTH = 8 * CHUNK_DEPTH;

// A lane's share of a chunk.
template <u32 EIGHTS> struct Chunk {
    Words4 upper[2], lower[2], input[2][EIGHTS];
};
// The addresses that a lane reads from.
template <u32 EIGHTS> struct Sources {
    const bf16* upper;
    const bf16* lower;
    const bf16* input[EIGHTS];
    DEVICE_MEMBER void load_weights(Chunk<EIGHTS>& to, u32 i, u32 at) const {
        to.upper[i] = load8(upper + at);
        to.lower[i] = load8(lower + at);
    }
    DEVICE_MEMBER void load_input(Chunk<EIGHTS>& to, u32 i, u32 at) const {
#pragma unroll
        for (u32 eight = 0; eight < EIGHTS; eight++) {
            to.input[i][eight] = load8(input[eight] + at);
        }
    }
    DEVICE_MEMBER void load(Chunk<EIGHTS>& to, u32 i, u32 at) const {
        load_weights(to, i, at);
        load_input(to, i, at);
    }
    DEVICE_MEMBER void advance(u32 by) {
        upper += by;
        lower += by;
#pragma unroll
        for (u32 eight = 0; eight < EIGHTS; eight++) {
            input[eight] += by;
        }
    }
};

template <u32 EIGHTS> DEVICE void add_chunk(float (&sums)[EIGHTS][4], const Chunk<EIGHTS>& chunk) {
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 a[4] = {chunk.upper[i].words[2 * half], chunk.lower[i].words[2 * half],
                        chunk.upper[i].words[2 * half + 1], chunk.lower[i].words[2 * half + 1]};
#pragma unroll
            for (u32 eight = 0; eight < EIGHTS; eight++) {
                const Words4& b = chunk.input[i][eight];
                multiply(sums[eight], a, b.words[2 * half], b.words[2 * half + 1]);
            }
        }
    }
}

// Adds chunks whose loads are under way, and goes on to the chunks behind them.
template <u32 COUNT, u32 EIGHTS>
DEVICE void add_loaded(float (&sums)[EIGHTS][4], const Chunk<EIGHTS> (&chunks)[COUNT],
                       Sources<EIGHTS>& from, u32& start) {
    sync_warp(); // keeps the compiler from moving each load next to its product
#pragma unroll
    for (u32 k = 0; k < COUNT; k++) {
        add_chunk(sums, chunks[k]);
    }
    from.advance(COUNT * TURN_DEPTH);
    start += COUNT * TURN_DEPTH;
}

// Adds the first COUNT chunks; what lies behind the depth is 0 and changes no sum. The
// weights are under way before the previous kernel has ended, and no kernel writes them.
template <u32 COUNT, u32 EIGHTS>
DEVICE void add_first_chunks(float (&sums)[EIGHTS][4], Sources<EIGHTS>& from, u32& start,
                             u32 depth) {
    u32 t = thread_index() % 4;
    Chunk<EIGHTS> chunks[COUNT] = {};
#pragma unroll
    for (u32 k = 0; k < COUNT; k++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (start + k * TURN_DEPTH + 32 * i + 8 * t < depth) {
                from.load_weights(chunks[k], i, k * TURN_DEPTH + 32 * i);
            }
        }
    }
    await_previous();
#pragma unroll
    for (u32 k = 0; k < COUNT; k++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (start + k * TURN_DEPTH + 32 * i + 8 * t < depth) {
                from.load_input(chunks[k], i, k * TURN_DEPTH + 32 * i);
            }
        }
    }
    add_loaded(sums, chunks, from, start);
}

// Adds whole chunks, COUNT at a time, as long as that many are left. All loads of a
// group start before the first product uses one: the number of outstanding loads
// decides the speed of this kernel.
template <u32 COUNT, u32 EIGHTS>
DEVICE void add_chunks(float (&sums)[EIGHTS][4], Sources<EIGHTS>& from, u32& start, u32 depth) {
    while (start + (COUNT - 1) * TURN_DEPTH + CHUNK_DEPTH <= depth) {
        Chunk<EIGHTS> chunks[COUNT];
#pragma unroll
        for (u32 k = 0; k < COUNT; k++) {
            from.load(chunks[k], 0, k * TURN_DEPTH);
            from.load(chunks[k], 1, k * TURN_DEPTH + 32);
        }
        add_loaded(sums, chunks, from, start);
    }
}

// Sixteen rows of weights are multiplied by 8, 16 or 32 rows of activations, straight
// from memory. The depth is distributed over lanes so that each loads 16 neighbouring
// bytes of both. Eight warps share the depth, and the weights are read once. More rows
// take more blocks. The order of a row's sum never depends on the other rows or on the
// number of chunks that are loaded at once.
template <class Epilogue, u32 EIGHTS> DEVICE void skinny(const LinearArgs& args) {
    SHARED(Parts<EIGHTS>, parts);
    u32 warp = thread_index() / WARP, lane = thread_index() % WARP, g = lane / 4, t = lane % 4;
    u32 groups = steps_of(args.rows, 8 * EIGHTS);
    u32 first_row = block_x() % groups * 8 * EIGHTS;
    u32 first_column = block_x() / groups * SKINNY_COLUMNS, column = first_column + g;
    // The same for all lanes of the warp, which must meet in `add_chunks`.
    u32 start = warp * CHUNK_DEPTH;
    // Lanes behind the last row or column load row or column 0 instead; their sums are
    // not used.
    bool has_upper = column < args.columns, has_lower = column + 8 < args.columns;
    Sources<EIGHTS> from;
    from.upper = args.weights + (u64)(has_upper ? column : 0) * args.depth + start + 8 * t;
    from.lower = args.weights + (u64)(has_lower ? column + 8 : 0) * args.depth + start + 8 * t;
#pragma unroll
    for (u32 eight = 0; eight < EIGHTS; eight++) {
        u32 row = first_row + 8 * eight + g;
        bool has_row = row < args.rows || PLANTED(SkinnyWithoutBound);
        from.input[eight] = args.input + (u64)(has_row ? row : 0) * args.depth + start + 8 * t;
    }
    float sums[EIGHTS][4] = {};
    // As many chunks at once as registers allow; with 32 rows, the sums need all
    // registers.
    add_first_chunks<4 / EIGHTS>(sums, from, start, args.depth);
    if constexpr (EIGHTS == 1) {
        add_chunks<4>(sums, from, start, args.depth);
    }
    if constexpr (EIGHTS <= 2) {
        add_chunks<2>(sums, from, start, args.depth);
    }
    for (; start < args.depth; start += TURN_DEPTH) {
        Chunk<EIGHTS> chunk = {};
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (start + 32 * i + 8 * t < args.depth) {
                from.load(chunk, i, 32 * i);
            }
        }
        sync_warp();
        add_chunk(sums, chunk);
        from.advance(TURN_DEPTH);
    }
#pragma unroll
    for (u32 eight = 0; eight < EIGHTS; eight++) {
#pragma unroll
        for (u32 k = 0; k < 4; k++) {
            parts.at[warp][g + k / 2 * 8][8 * eight + 2 * t + k % 2] = sums[eight][k];
        }
    }
    sync_block();
    for (u32 i = thread_index(); i < SKINNY_COLUMNS * 8 * EIGHTS; i += 256) {
        u32 across = i / SKINNY_COLUMNS, down = i % SKINNY_COLUMNS;
        u32 row = first_row + across, place = first_column + down;
        float sum = 0;
#pragma unroll
        for (u32 part = 0; part < 8; part++) {
            sum += parts.at[part][down][across];
        }
        if (row < args.rows && place < args.columns) {
            Epilogue::put(static_cast<typename Epilogue::Element*>(args.output) +
                            (u64)row * args.columns + place,
                        sum);
        }
    }
}

EARLY_KERNEL(skinny8_f32, 256, LinearArgs) { skinny<StoreF32, 1>(args); }
EARLY_KERNEL(skinny8_bf16, 256, LinearArgs) { skinny<StoreBf16, 1>(args); }
EARLY_KERNEL(skinny8_add, 256, LinearArgs) { skinny<AddF32, 1>(args); }
EARLY_KERNEL(skinny16_f32, 256, LinearArgs) { skinny<StoreF32, 2>(args); }
EARLY_KERNEL(skinny16_bf16, 256, LinearArgs) { skinny<StoreBf16, 2>(args); }
EARLY_KERNEL(skinny16_add, 256, LinearArgs) { skinny<AddF32, 2>(args); }
EARLY_KERNEL(skinny32_f32, 256, LinearArgs) { skinny<StoreF32, 4>(args); }
EARLY_KERNEL(skinny32_bf16, 256, LinearArgs) { skinny<StoreBf16, 4>(args); }
EARLY_KERNEL(skinny32_add, 256, LinearArgs) { skinny<AddF32, 4>(args); }
