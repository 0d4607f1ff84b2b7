// An emulated device made of fibers: each thread of a block runs until it waits, then
// the next one runs. For tests only; the emulator does not model time.
//
// The emulator is deliberately adverse: shared memory starts as NaN, asynchronous
// copies happen as late as allowed (or, on request, as early), threads and blocks run
// in either order, and each buffer ends at a protected page.
#pragma once

#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <csignal>
#include <mutex>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

namespace emulated {

// The bugs that a test can switch on, in the order of the enumeration in emulator.rs.
enum Bug : u32 {
    None,
    NormWithoutBarrier,
    GateWithoutBound,
    DecodeWrongHead,
    DecodeMask,
    DecodeWithoutBarrier,
    LinearWithoutWait,
    LinearWithoutBarrier,
    LinearWithoutBound,
    PrefillWrongHead,
    PrefillMask,
    PrefillWithoutWait,
    PrefillWithoutBarrier,
    SampleWithoutBarrier,
    SampleTies,
    SkinnyWithoutBound,
};
extern thread_local u32 planted;

struct Copy {
    void* to;
    const void* from; // null: zeros
};

// One thread of the block.
struct Thread {
    u32 index;
    bool is_done;
    const u64* waits_on; // a generation; the thread waits until it differs from `while_at`
    u64 while_at;
    void* stack_pointer;
    ucontext_t context;
    std::vector<std::vector<Copy>> copies; // groups; the last is still open
};

// The words that the lanes of a warp exchange. Two buffers, so that one barrier for
// each exchange is enough.
struct Warp {
    u32 arrived;
    u32 operation;
    u64 generation;
    u32 slots[2][32][8];
};

struct Machine {
    Thread threads[1024];
    Warp warps[32];
    u32 thread_count, alive, arrived;
    u64 barrier;
    u32 block[3];
    u64 resumed;
    Thread* self;
    void (*kernel)(const void*);
    const void* args;
    bool is_eager;
    unsigned char* shared_end;
    unsigned char* shared_map;
    size_t shared_mapped;
    unsigned char* stacks;
    void* stack_pointer;
    ucontext_t context;
    sigjmp_buf escape;
    const void* touched;
    char error[512];
};
extern thread_local Machine* machine;

[[noreturn]] void fail(const char* what);
void wait_for(const u64* generation);
// Stores words for the warp and returns the buffer that all lanes have filled.
u32 (*exchange(u32 operation, const u32* words, u32 count))[8];
unsigned char* shared(size_t bytes);
void run_copies(std::vector<Copy>& group);

struct Entry {
    const char* name;
    void (*run)(const void*);
    size_t bytes;
    u32 threads;
    Entry* next;
    Entry(const char* name, void (*run)(const void*), size_t bytes, u32 threads);
};

inline u32 lane() { return machine->self->index % 32; }
inline float widen(u32 half) {
    u32 bits = half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

} // namespace emulated

#ifdef TOLLGATE_PLANTS
#define PLANTED(bug) (emulated::planted == emulated::Bug::bug)
#else
#define PLANTED(bug) false
#endif
#define DEVICE static inline
#define DEVICE_MEMBER inline
#define KERNEL(name, threads, Args)                                                                \
    static void name(const Args args);                                                             \
    static emulated::Entry entry_##name(                                                           \
        #name, [](const void* args) { name(*static_cast<const Args*>(args)); }, sizeof(Args),      \
        threads);                                                                                  \
    static void name(const Args args)
#define DENSE_KERNEL(name, threads, blocks, Args) KERNEL(name, threads, Args)
#define EARLY_KERNEL(name, threads, Args) KERNEL(name, threads, Args)
#define SHARED(Type, name)                                                                         \
    static_assert(sizeof(Type) <= MOST_SHARED, "static shared memory");                            \
    Type& name = *reinterpret_cast<Type*>(emulated::shared(sizeof(Type)))

DEVICE u32 thread_index() { return emulated::machine->self->index; }
DEVICE u32 block_x() { return emulated::machine->block[0]; }
DEVICE u32 block_y() { return emulated::machine->block[1]; }
DEVICE u32 block_z() { return emulated::machine->block[2]; }

DEVICE void sync_block() {
    emulated::Machine& m = *emulated::machine;
    if (++m.arrived == m.alive) {
        m.arrived = 0;
        m.barrier++;
    } else {
        emulated::wait_for(&m.barrier);
    }
}
DEVICE void sync_warp() { emulated::exchange(1, nullptr, 0); }
template <class T> DEVICE T shuffle_xor(T value, u32 mask) {
    u32 words[2] = {};
    memcpy(words, &value, sizeof value);
    memcpy(&value, emulated::exchange(2, words, sizeof value / 4)[emulated::lane() ^ mask],
           sizeof value);
    return value;
}

DEVICE u32 ballot(bool says) {
    u32 word = says, bits = 0;
    auto all = emulated::exchange(6, &word, 1);
    for (u32 lane = 0; lane < 32; lane++) {
        bits |= all[lane][0] << lane;
    }
    return bits;
}
DEVICE u32 count_bits(u32 bits) { return __builtin_popcount(bits); }

DEVICE u32 bits_of(float value) {
    u32 bits;
    memcpy(&bits, &value, 4);
    return bits;
}
DEVICE float float_of(u32 bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
DEVICE bf16 narrow(float value) {
    u32 bits = bits_of(value);
    if (value != value) {
        return bf16{0x7fff};
    }
    return bf16{(u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}
DEVICE u32 narrow2(float low, float high) {
    return (u32)narrow(low).bits | (u32)narrow(high).bits << 16;
}

DEVICE void copy_async(void* to, const void* from, bool is_there) {
    if ((uintptr_t)to % 16 || (is_there && (uintptr_t)from % 16)) {
        emulated::fail("an asynchronous copy of 16 bytes is not aligned to 16");
    }
    emulated::Thread& self = *emulated::machine->self;
    self.copies.back().push_back({to, is_there ? from : nullptr});
    if (emulated::machine->is_eager) {
        emulated::run_copies(self.copies.back());
    }
}
DEVICE void commit_copies() { emulated::machine->self->copies.emplace_back(); }
// A kernel begins when the previous one has ended.
DEVICE void await_previous() {}
template <int groups> DEVICE void wait_copies() {
    auto& copies = emulated::machine->self->copies;
    // The open group does not count.
    while (copies.size() > 1 + groups) {
        emulated::run_copies(copies.front());
        copies.erase(copies.begin());
    }
}

DEVICE void load_matrices(u32 (&to)[4], const void* row, bool transposed = false) {
    if ((uintptr_t)row % 16) {
        emulated::fail("a row of a matrix is not aligned to 16");
    }
    u32 words[4];
    memcpy(words, row, 16);
    auto all = emulated::exchange(transposed ? 4 : 3, words, 4);
    u32 lane = emulated::lane();
    for (u32 matrix = 0; matrix < 4; matrix++) {
        auto element = [&](u32 row, u32 column) -> u32 {
            return all[8 * matrix + row][column / 2] >> (16 * (column % 2)) & 0xffff;
        };
        u32 row = lane / 4, column = lane % 4 * 2;
        to[matrix] = transposed ? element(column, row) | element(column + 1, row) << 16
                                : element(row, column) | element(row, column + 1) << 16;
    }
}
DEVICE void load_matrices_transposed(u32 (&to)[4], const void* row) {
    load_matrices(to, row, true);
}

DEVICE void multiply(float (&sums)[4], const u32 (&a)[4], u32 b_low, u32 b_high) {
    u32 words[6] = {a[0], a[1], a[2], a[3], b_low, b_high};
    auto all = emulated::exchange(5, words, 6);
    u32 row = emulated::lane() / 4, column = emulated::lane() % 4 * 2;
    for (u32 quad = 0; quad < 4; quad++) {
        const u32* rows = all[4 * row + quad];
        for (u32 j = 0; j < 2; j++) {
            const u32* columns = all[4 * (column + j) + quad];
            for (u32 part = 0; part < 2; part++) { // k below 8, and from 8 on
                for (u32 half = 0; half < 2; half++) {
                    float b = emulated::widen(columns[4 + part] >> (16 * half) & 0xffff);
                    sums[j] += emulated::widen(rows[2 * part] >> (16 * half) & 0xffff) * b;
                    sums[2 + j] += emulated::widen(rows[2 * part + 1] >> (16 * half) & 0xffff) * b;
                }
            }
        }
    }
}

template <class T> DEVICE T atomic_add(T* to, T value) {
    T before = *to;
    *to = before + value;
    return before;
}

DEVICE float exp2_fast(float x) { return std::exp2(x); }
DEVICE float inverse_root(float x) { return 1.0f / std::sqrt(x); }
DEVICE float exponential_fast(float x) { return std::exp(x); }
DEVICE float divided_fast(float a, float b) {
    return a * (std::fabs(b) > 0x1p126f ? 0.0f : 1.0f / b);
}
// Keeps the compiler from fusing the value with another operation. All other operations
// may be fused, as on a real device.
template <class Number> DEVICE Number rounded(Number value) {
#if defined(__x86_64__)
    asm("" : "+x"(value));
#elif defined(__aarch64__)
    asm("" : "+w"(value));
#else
    asm("" : "+m"(value));
#endif
    return value;
}
DEVICE float times(float a, float b) { return rounded(a * b); }
DEVICE float plus(float a, float b) { return rounded(a + b); }
DEVICE float divided(float a, float b) { return a / b; }
DEVICE double times(double a, double b) { return rounded(a * b); }
DEVICE double plus(double a, double b) { return rounded(a + b); }
DEVICE double natural_log(double x) { return std::log(x); }
DEVICE void sine_cosine(double turns, float& sine, float& cosine) {
    double angle = (turns - std::rint(turns)) * 6.283185307179586476925;
    sine = (float)std::sin(angle);
    cosine = (float)std::cos(angle);
}
