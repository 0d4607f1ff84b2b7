// The emulated device's scheduler and memory, and the functions that tests call.
#define TOLLGATE_EMULATED
#include "kernels.cu"

namespace emulated {

thread_local Machine* machine;
thread_local u32 planted;

static const size_t STACK = 64 * 1024;
static const size_t PAGE = 4096;
static Entry* entries;

Entry::Entry(const char* name, void (*run)(const void*), size_t bytes, u32 threads)
    : name(name), run(run), bytes(bytes), threads(threads), next(entries) {
    entries = this;
}

// --- fibers ---------------------------------------------------------------

#if defined(__x86_64__) && !defined(TOLLGATE_UCONTEXT)
extern "C" void tollgate_switch(void** from, void* to);
asm(R"(
.text
tollgate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
static void resume(Thread& thread) { tollgate_switch(&machine->stack_pointer, thread.stack_pointer); }
static void suspend() {
    tollgate_switch(&machine->self->stack_pointer, machine->stack_pointer);
}
static void prepare(Thread& thread, unsigned char* stack, void (*body)()) {
    u64* top = reinterpret_cast<u64*>(stack + STACK) - 2;
    *top = reinterpret_cast<u64>(body); // where `ret` goes, with the stack as a call leaves it
    memset(top - 6, 0, 6 * 8);
    thread.stack_pointer = top - 6;
}
#else
static void resume(Thread& thread) { swapcontext(&machine->context, &thread.context); }
static void suspend() { swapcontext(&machine->self->context, &machine->context); }
static void prepare(Thread& thread, unsigned char* stack, void (*body)()) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stack;
    thread.context.uc_stack.ss_size = STACK;
    thread.context.uc_link = nullptr;
    makecontext(&thread.context, body, 0);
}
#endif

static void body() {
    machine->kernel(machine->args);
    machine->self->is_done = true;
    machine->alive--;
    // A barrier waits only for threads that have not ended.
    if (machine->alive > 0 && machine->arrived == machine->alive) {
        machine->arrived = 0;
        machine->barrier++;
    }
    suspend();
}

void fail(const char* what) {
    snprintf(machine->error, sizeof machine->error, "block (%u, %u, %u), thread %u: %s",
             machine->block[0], machine->block[1], machine->block[2], machine->self->index, what);
    siglongjmp(machine->escape, 1);
}

void wait_for(const u64* generation) {
    machine->self->waits_on = generation;
    machine->self->while_at = *generation;
    suspend();
}

u32 (*exchange(u32 operation, const u32* words, u32 count))[8] {
    Warp& warp = machine->warps[machine->self->index / 32];
    auto buffer = warp.slots[warp.generation % 2];
    if (warp.arrived > 0 && warp.operation != operation) {
        fail("lanes of one warp meet at different collectives");
    }
    warp.operation = operation;
    for (u32 i = 0; i < count; i++) {
        buffer[lane()][i] = words[i];
    }
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        warp.generation++;
    } else {
        wait_for(&warp.generation);
    }
    return buffer;
}

unsigned char* shared(size_t bytes) { return machine->shared_end - (bytes + 15) / 16 * 16; }

void run_copies(std::vector<Copy>& group) {
    for (Copy& copy : group) {
        if (copy.from) {
            memcpy(copy.to, copy.from, 16);
        } else {
            memset(copy.to, 0, 16);
        }
    }
    group.clear();
}

static void run_block(bool backwards) {
    Machine& m = *machine;
    m.alive = m.thread_count;
    m.arrived = 0;
    memset(m.shared_end - MOST_SHARED, 0xff, MOST_SHARED);
    for (u32 i = 0; i < m.thread_count; i++) {
        Thread& thread = m.threads[i];
        thread.index = i;
        thread.is_done = false;
        thread.waits_on = nullptr;
        thread.copies.assign(1, {});
        m.warps[i / 32].arrived = 0;
        prepare(thread, m.stacks + i * STACK, body);
    }
    while (m.alive > 0) {
        bool moved = false;
        for (u32 i = 0; i < m.thread_count; i++) {
            Thread& thread = m.threads[backwards ? m.thread_count - 1 - i : i];
            if (thread.is_done || (thread.waits_on && *thread.waits_on == thread.while_at)) {
                continue;
            }
            thread.waits_on = nullptr;
            m.self = &thread;
            resume(thread);
            moved = true;
        }
        if (!moved) {
            fail("waits at a barrier that others never reach");
        }
    }
}

// --- memory ---------------------------------------------------------------

struct Piece {
    unsigned char *map, *data, *guard;
    size_t bytes, mapped;
    bool is_whole() const {
        for (unsigned char* slack = data + bytes; slack < guard; slack++) {
            if (*slack != 0xa5) {
                return false;
            }
        }
        return true;
    }
};
static std::mutex pieces_lock;
static std::vector<Piece> pieces;

// Maps `bytes` bytes that end, up to rounding to 16, at a protected page.
static Piece map_piece(size_t bytes) {
    size_t rounded = (bytes + 15) / 16 * 16;
    size_t pages = (rounded + PAGE - 1) / PAGE * PAGE;
    size_t mapped = pages + 2 * PAGE;
    void* map = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        return Piece{};
    }
    Piece piece;
    piece.map = static_cast<unsigned char*>(map);
    piece.guard = piece.map + PAGE + pages;
    piece.data = piece.guard - rounded;
    piece.bytes = bytes;
    piece.mapped = mapped;
    mprotect(piece.map + PAGE, pages, PROT_READ | PROT_WRITE);
    memset(piece.map + PAGE, 0xff, pages);
    memset(piece.data + bytes, 0xa5, rounded - bytes);
    return piece;
}

static struct sigaction before[2];

static void on_fault(int signal, siginfo_t* info, void* context) {
    if (machine && machine->kernel) {
        machine->touched = info->si_addr;
        siglongjmp(machine->escape, 2);
    }
    struct sigaction& previous = before[signal == SIGBUS];
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal, info, context);
    } else {
        sigaction(signal, &previous, nullptr);
    }
}

static void catch_faults() {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
}

static void describe_fault() {
    Machine& m = *machine;
    const unsigned char* at = static_cast<const unsigned char*>(m.touched);
    char where[200] = "memory outside any piece";
    std::lock_guard<std::mutex> lock(pieces_lock);
    for (const Piece& piece : pieces) {
        if (at >= piece.map && at < piece.map + piece.mapped) {
            snprintf(where, sizeof where, "byte %td of a piece of %zu", at - piece.data,
                     piece.bytes);
        }
    }
    if (at >= m.shared_end && at < m.shared_end + PAGE) {
        snprintf(where, sizeof where, "byte %td behind shared memory", at - m.shared_end);
    }
    snprintf(m.error, sizeof m.error, "block (%u, %u, %u), thread %u: touched %s", m.block[0],
             m.block[1], m.block[2], m.self ? m.self->index : 0, where);
}

static Machine* new_machine() {
    static std::once_flag once;
    std::call_once(once, catch_faults);
    Machine* m = new Machine();
    Piece shared = map_piece(MOST_SHARED);
    void* stacks = mmap(nullptr, 1024 * STACK, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!shared.map || stacks == MAP_FAILED) {
        abort();
    }
    m->shared_end = shared.guard;
    m->shared_map = shared.map;
    m->shared_mapped = shared.mapped;
    m->stacks = static_cast<unsigned char*>(stacks);
    return m;
}

// The emulated device of a launching thread, which lives as long as the thread.
struct Owner {
    Machine* owned = nullptr;
    ~Owner() {
        if (owned) {
            munmap(owned->shared_map, owned->shared_mapped);
            munmap(owned->stacks, 1024 * STACK);
            delete owned;
            machine = nullptr;
        }
    }
};
static thread_local Owner owner;

static bool run(const Entry& entry, const u32* grid, const void* args, u32 order) {
    if (!machine) {
        machine = owner.owned = new_machine();
    }
    Machine& m = *machine;
    m.self = nullptr;
    m.thread_count = entry.threads;
    m.args = args;
    m.is_eager = order & 2;
    m.error[0] = 0;
    // Set last: from here on, a fault belongs to the kernel.
    m.kernel = entry.run;
    int came = sigsetjmp(m.escape, 1);
    if (came == 0) {
        u64 blocks = (u64)grid[0] * grid[1] * grid[2];
        for (u64 i = 0; i < blocks; i++) {
            u64 block = order & 1 ? blocks - 1 - i : i;
            m.block[0] = block % grid[0];
            m.block[1] = block / grid[0] % grid[1];
            m.block[2] = block / grid[0] / grid[1];
            run_block(order & 1);
        }
    } else if (came == 2) {
        describe_fault();
    }
    m.kernel = nullptr;
    return came == 0;
}

} // namespace emulated

using namespace emulated;

extern "C" void* tollgate_alloc(size_t bytes) {
    Piece piece = map_piece(bytes);
    if (piece.map) {
        std::lock_guard<std::mutex> lock(pieces_lock);
        pieces.push_back(piece);
    }
    return piece.data;
}

extern "C" void tollgate_free(void* data) {
    std::lock_guard<std::mutex> lock(pieces_lock);
    for (size_t i = 0; i < pieces.size(); i++) {
        if (pieces[i].data == data) {
            munmap(pieces[i].map, pieces[i].mapped);
            pieces.erase(pieces.begin() + i);
            return;
        }
    }
}

// Returns true if nothing was written between the end of the piece and its guard page.
extern "C" bool tollgate_is_whole(void* data) {
    std::lock_guard<std::mutex> lock(pieces_lock);
    for (const Piece& piece : pieces) {
        if (piece.data == data) {
            return piece.is_whole();
        }
    }
    return false;
}

// Applies to further launches of this thread.
extern "C" void tollgate_plant(u32 bug) { planted = bug; }

// `order`: bit 0 runs blocks and threads from the last to the first, bit 1 performs
// copies at once. Returns null, or a sentence about the failure.
extern "C" const char* tollgate_launch(const char* name, const u32* grid, u32 threads,
                                       const void* args, size_t bytes, u32 order) {
    static thread_local char said[700];
    for (Entry* entry = entries; entry; entry = entry->next) {
        if (strcmp(entry->name, name) != 0) {
            continue;
        }
        if (entry->bytes != bytes || entry->threads != threads) {
            snprintf(said, sizeof said, "%s takes %zu bytes and %u threads, not %zu and %u", name,
                     entry->bytes, entry->threads, bytes, threads);
            return said;
        }
        if (run(*entry, grid, args, order)) {
            return nullptr;
        }
        snprintf(said, sizeof said, "%s: %s", name, machine->error);
        return said;
    }
    snprintf(said, sizeof said, "no kernel is called %s", name);
    return said;
}
