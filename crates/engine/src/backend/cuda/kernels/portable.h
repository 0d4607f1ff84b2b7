// The compiler's features that the kernels use, without CUDA's headers. NVRTC compiles
// the definitions below; g++ compiles the same names from emulator.h.
//
// Every kernel takes one argument structure by value and uses static shared memory.
// Collective operations need all lanes of a warp, so lanes without work take part too.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// The upper half of an f32.
struct bf16 {
    u16 bits;
};

// The most that one thread moves at once.
struct alignas(16) Words4 {
    u32 words[4];
};
struct alignas(16) Floats4 {
    float at[4];
};
struct alignas(8) Words2 {
    u32 words[2];
};
struct alignas(8) Floats2 {
    float at[2];
};

constexpr u32 NONE = 0xffffffffu;
constexpr u32 WARP = 32;
constexpr float LOG2_E = 1.44269504f;
// The static shared memory that every device has.
constexpr u32 MOST_SHARED = 48 * 1024;

// PLANTED(bug) is true if a test has switched that bug on, to check that the tests find
// it. On a real device PLANTED is always false.
#ifdef TOLLGATE_EMULATED
#include "emulator.h"
#else

#define PLANTED(bug) false
#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
// Without overlapping launches (`Launches::Overlapping`) the next two functions do
// nothing.
//
// Lets the blocks of the next kernel in the stream start as soon as all blocks of this
// one have started. The next kernel waits in turn, so its start costs no time later.
DEVICE void release_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until the previous kernel in the stream has ended, and thereby all kernels
// before it.
DEVICE void await_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
#define FOLLOWING(bounds, wait, name, Args)                                                        \
    DEVICE void follow_##name(const Args& args);                                                   \
    extern "C" __global__ void bounds name(const Args args) {                                      \
        release_next();                                                                            \
        wait;                                                                                      \
        follow_##name(args);                                                                       \
    }                                                                                              \
    DEVICE void follow_##name(const Args& args)
#define KERNEL(name, threads, Args)                                                                \
    FOLLOWING(__launch_bounds__(threads), await_previous(), name, Args)
// Limits the registers so that `blocks` blocks fit on a multiprocessor.
#define DENSE_KERNEL(name, threads, blocks, Args)                                                  \
    FOLLOWING(__launch_bounds__(threads, blocks), await_previous(), name, Args)
// A kernel that calls `await_previous` itself. Before that call it may only read what
// no kernel of a step writes, such as weights.
#define EARLY_KERNEL(name, threads, Args) FOLLOWING(__launch_bounds__(threads), , name, Args)
#define SHARED(Type, name)                                                                         \
    static_assert(sizeof(Type) <= MOST_SHARED, "static shared memory");                            \
    __shared__ Type name

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }

DEVICE void sync_block() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }
DEVICE float shuffle_xor(float value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u32 shuffle_xor(u32 value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE u64 shuffle_xor(u64 value, u32 mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }
DEVICE double shuffle_xor(double value, u32 mask) {
    return __shfl_xor_sync(0xffffffffu, value, mask);
}

// Returns a bit for each lane whose argument is true.
DEVICE u32 ballot(bool says) { return __ballot_sync(0xffffffffu, says); }
DEVICE u32 count_bits(u32 bits) { return __popc(bits); }

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// Rounds to the nearest bf16, ties to even.
DEVICE bf16 narrow(float value) {
    bf16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
}
// Packs two bf16 into a word, `low` in the lower half.
DEVICE u32 narrow2(float low, float high) {
    u32 result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
    return result;
}

// Copies 16 bytes from global to shared memory, or zeros, without waiting.
DEVICE void copy_async(void* to, const void* from, bool is_there) {
    u32 place = (u32)__cvta_generic_to_shared(to);
    u32 bytes = is_there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place), "l"(from), "r"(bytes)
                 : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all groups of this thread but the latest `groups` have arrived.
template <int groups> DEVICE void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(groups) : "memory");
}

// Loads four 8x8 matrices of 16-bit elements. Lane l gives the address of row l % 8 of
// matrix l / 8 and receives elements 2 (l % 4) and the next one of row l / 4.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
    u32 place = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place)
                 : "memory");
}
// Loads the same matrices transposed.
DEVICE void load_matrices_transposed(u32 (&to)[4], const void* row) {
    u32 place = (u32)__cvta_generic_to_shared(row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(place)
                 : "memory");
}

// sums (16x8) += a (16x16, rows) * b (16x8, columns), bf16 with f32 sums. Lane l holds
// rows l / 4 and l / 4 + 8 of a and sums, and column l / 4 of b.
DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b_low), "r"(b_high));
}

DEVICE u32 atomic_add(u32* to, u32 value) { return atomicAdd(to, value); }
DEVICE u64 atomic_add(u64* to, u64 value) { return atomicAdd(to, value); }

DEVICE float exp2_fast(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
DEVICE float inverse_root(float x) { return rsqrtf(x); }
DEVICE float exponential_fast(float x) { return __expf(x); }
// Accurate to two units in the last place; 0 if b is above 2^126.
DEVICE float divided_fast(float a, float b) { return __fdividef(a, b); }
// Separate multiplications and additions, which the compiler must not fuse.
DEVICE float times(float a, float b) { return __fmul_rn(a, b); }
DEVICE float plus(float a, float b) { return __fadd_rn(a, b); }
DEVICE float divided(float a, float b) { return __fdiv_rn(a, b); }
DEVICE double times(double a, double b) { return __dmul_rn(a, b); }
DEVICE double plus(double a, double b) { return __dadd_rn(a, b); }
DEVICE double natural_log(double x) { return log(x); }
// Sine and cosine of `turns` whole turns.
DEVICE void sine_cosine(double turns, float& sine, float& cosine) {
    double s, c;
    sincospi(2.0 * (turns - rint(turns)), &s, &c);
    sine = (float)s;
    cosine = (float)c;
}
#endif

DEVICE float widen(bf16 value) { return float_of((u32)value.bits << 16); }
DEVICE float low_half(u32 pair) { return float_of(pair << 16); }
DEVICE float high_half(u32 pair) { return float_of(pair & 0xffff0000u); }
DEVICE float minus_infinity() { return float_of(0xff800000u); }
DEVICE float larger(float a, float b) { return a > b ? a : b; }
// One instruction. If one argument is NaN, the result is the other.
DEVICE float larger_number(float a, float b) { return fmaxf(a, b); }
template <class T> DEVICE T least_of(T a, T b) { return a < b ? a : b; }
template <class T> DEVICE T most_of(T a, T b) { return a > b ? a : b; }
DEVICE u32 steps_of(u32 count, u32 step) { return (count + step - 1) / step; }

template <class T> DEVICE T sum_of_lanes(T value, u32 lanes) {
    for (u32 mask = lanes / 2; mask > 0; mask /= 2) {
        value += shuffle_xor(value, mask);
    }
    return value;
}

// Whole rows of bf16 from global memory, 8 elements at once.
DEVICE Words4 load8(const bf16* from) { return *reinterpret_cast<const Words4*>(from); }
DEVICE void store8(bf16* to, const float (&values)[8]) {
    Words4 packed;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        packed.words[i] = narrow2(values[2 * i], values[2 * i + 1]);
    }
    *reinterpret_cast<Words4*>(to) = packed;
}
DEVICE void load8(float (&to)[8], const float* from) {
    const Floats4* vectors = reinterpret_cast<const Floats4*>(from);
    Floats4 low = vectors[0], high = vectors[1];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[i] = low.at[i];
        to[4 + i] = high.at[i];
    }
}
DEVICE void widen8(float (&to)[8], Words4 from) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        to[2 * i] = low_half(from.words[i]);
        to[2 * i + 1] = high_half(from.words[i]);
    }
}
