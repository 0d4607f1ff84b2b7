// A driver without a GPU. It implements the calls that the engine makes, over this
// process's memory and the emulated kernels. The driver is deliberately adverse: memory
// starts poisoned, blocks run in any order, no work runs before it is waited for, and
// calls fail on request.
//
// Built with -DNO_KERNELS, it has no kernels, which is enough for the probe. Further
// macros make the driver old, incomplete, empty or busy, or make its devices slices. In
// a process of its own it fails as the files in STANDIN_FAULTS say.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <string>
#include <unistd.h>
#include <vector>

#include "stream.h"

#ifndef NO_KERNELS
#include "emulator.cpp"
#endif

#ifndef VERSION
#define VERSION 13000
#endif
#ifndef DEVICES
#define DEVICES 1
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef MAJOR
#define MAJOR 9
#endif
#ifdef SLICES
#define KIND "MIG"
#define NAME "Emulated H100 MIG 1g.10gb"
#else
#define KIND "GPU"
#endif
#ifndef NAME
#define NAME "Emulated H100"
#endif

typedef int Result;
enum {
    OK = 0,
    INVALID = 1,
    NO_MEMORY = 2,
    BUSY_CARD = 46,
    NO_CARD = 100,
    NOT_FOUND = 500,
    NOT_READY = 600,
    LAUNCH = 719,
    CAPTURING = 900,
};

static size_t total = 96u << 20, taken = 0;
static std::map<uintptr_t, size_t> held;
static int launches_left = -1;
static unsigned launches = 0, replays = 0, compiled = 0;

// Queued work. Items are counted from 1.
typedef std::vector<std::function<Result()>> Work;
static std::deque<std::function<Result()>> waiting;
static uint64_t put_so_far = 0, done_so_far = 0;
static Result broken = OK;       // nothing works after a failure
static Work* captured = nullptr; // work that is queued during a capture
static void put(std::function<Result()> work) {
    if (captured) {
        captured->push_back(std::move(work));
        return;
    }
    waiting.push_back(std::move(work));
    put_so_far++;
}
static Result run_to(uint64_t place) {
    while (done_so_far < place && !waiting.empty()) {
        std::function<Result()> work = std::move(waiting.front());
        waiting.pop_front();
        done_so_far++;
        if (broken == OK) {
            broken = work();
        }
    }
    return broken;
}
static Result run_all() { return run_to(put_so_far); }
static Stream the_stream = {put};

static int shown = DEVICES, first_shown = 0; // devices that this process may see
static int in_use = 0;                       // the one that it uses

// Settings of the running test.
extern "C" void standin_memory(size_t bytes) { total = bytes; }
extern "C" void standin_fail_after(int more) { launches_left = more; }
extern "C" unsigned standin_launches() { return launches; }
extern "C" unsigned standin_replays() { return replays; }
extern "C" size_t standin_taken() { return taken; }

// Returns true if a file asks this call to fail, once. The file `0.launch` is for
// device 0 and contains `fail` or `hang`.
static bool struck(const char* call) {
    const char* folder = getenv("STANDIN_FAULTS");
    std::string path = std::string(folder ? folder : "") + "/" + std::to_string(in_use) + "." + call;
    FILE* file = folder ? fopen(path.c_str(), "r") : nullptr;
    if (!file) {
        return false;
    }
    char fault[8] = "";
    fgets(fault, sizeof fault, file);
    fclose(file);
    unlink(path.c_str()); // the next process on this device must not find it
    while (strcmp(fault, "hang") == 0) {
        pause();
    }
    return true;
}

static std::string uuid_of(int device) {
    std::string text = KIND;
    for (int i = 0; i < 16; i++) {
        char byte[4];
        snprintf(byte, sizeof byte, i % 2 || i < 4 || i > 10 ? "%02x" : "-%02x", 16 * device + i);
        text += i == 0 ? std::string("-") + byte : byte;
    }
    return text;
}

// A process sees all devices or one slice. CUDA_VISIBLE_DEVICES names one of either.
extern "C" Result cuInit(unsigned) {
#ifdef SLICES
    shown = 1;
#endif
    if (const char* named = getenv("CUDA_VISIBLE_DEVICES")) {
        for (shown = 1; first_shown < DEVICES && uuid_of(first_shown) != named; first_shown++) {
        }
        if (first_shown == DEVICES) {
            return NO_CARD;
        }
    }
    return INIT;
}
extern "C" Result cuDriverGetVersion(int* version) {
    *version = VERSION;
    return OK;
}
extern "C" Result cuGetErrorName(int code, const char** name) {
    switch (code) {
    case NO_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return OK;
    case BUSY_CARD: *name = "CUDA_ERROR_DEVICE_UNAVAILABLE"; return OK;
    case NO_CARD: *name = "CUDA_ERROR_NO_DEVICE"; return OK;
    case LAUNCH: *name = "CUDA_ERROR_LAUNCH_FAILED"; return OK;
    case 803: *name = "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"; return OK;
    }
    *name = "CUDA_ERROR_OF_THE_STAND_IN";
    return OK;
}
extern "C" Result cuGetErrorString(int code, const char** text) {
    *text = code == 803 ? "system has unsupported display driver / cuda driver combination"
                        : "the stand-in says no";
    return OK;
}

extern "C" Result cuDeviceGetCount(int* count) {
    *count = shown;
    return OK;
}
extern "C" Result cuDeviceGet(int* device, int ordinal) {
    *device = first_shown + ordinal;
    return ordinal < shown ? OK : 101;
}
extern "C" Result cuDeviceGetName(char* name, int length, int) {
    snprintf(name, length, "%s", NAME);
    return OK;
}
extern "C" Result cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
    for (int i = 0; i < 16; i++) {
        uuid[i] = 16 * device + i;
    }
    return OK;
}
extern "C" Result cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
    case 16: *value = 4; return OK; // multiprocessors
    case 75: *value = MAJOR; return OK;
    case 76: *value = 0; return OK;
    }
    return INVALID;
}
extern "C" Result cuDevicePrimaryCtxRetain(void** context, int device) {
#ifdef BUSY
    return BUSY_CARD;
#else
    in_use = device;
    *context = &total;
    return OK;
#endif
}
extern "C" Result cuDevicePrimaryCtxRelease_v2(int) { return OK; }
extern "C" Result cuCtxSetCurrent(void*) { return OK; }

extern "C" Result cuMemGetInfo_v2(size_t* free, size_t* all) {
    *free = total - taken;
    *all = total;
    return OK;
}
extern "C" Result cuMemAlloc_v2(uint64_t* to, size_t bytes) {
    if (struck("alloc")) {
        total = taken; // for the rest of the process
    }
    if (captured || bytes == 0 || taken + bytes > total) {
        return captured ? CAPTURING : bytes == 0 ? INVALID : NO_MEMORY;
    }
#ifdef NO_KERNELS
    void* data = malloc(bytes);
#else
    void* data = tollgate_alloc(bytes);
#endif
    if (!data) {
        return NO_MEMORY;
    }
    taken += bytes;
    held[(uintptr_t)data] = bytes;
    *to = (uintptr_t)data;
    return OK;
}
extern "C" Result cuMemFree_v2(uint64_t at) {
    run_all();
    auto piece = held.find(at);
    if (piece == held.end()) {
        return INVALID;
    }
    taken -= piece->second;
    held.erase(piece);
#ifdef NO_KERNELS
    free((void*)at);
    return OK;
#else
    bool is_whole = tollgate_is_whole((void*)at);
    tollgate_free((void*)at);
    if (!is_whole) {
        fprintf(stderr, "stand-in: somebody wrote behind the end of a piece\n");
        abort();
    }
    return OK;
#endif
}
extern "C" Result cuMemHostAlloc(void** to, size_t bytes, unsigned) {
    *to = malloc(bytes);
    return *to ? OK : NO_MEMORY;
}
extern "C" Result cuMemFreeHost(void* at) {
    run_all();
    free(at);
    return OK;
}

// Returns true if the bytes lie within one piece.
static bool is_ours(uint64_t at, size_t bytes) {
    auto after = held.upper_bound(at);
    if (after == held.begin()) {
        return false;
    }
    auto piece = std::prev(after);
    return at + bytes <= piece->first + piece->second;
}
extern "C" Result cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void*) {
    if (!is_ours(to, bytes)) {
        return INVALID;
    }
    put([=] {
        memset((void*)to, value, bytes);
        return OK;
    });
    return OK;
}
// Queues a copy, whatever memory both sides are in.
static Result put_copy(uint64_t to, uint64_t from, size_t bytes) {
    put([=] {
        memmove((void*)to, (const void*)from, bytes);
        return OK;
    });
    return OK;
}
extern "C" Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    return is_ours(to, bytes) ? put_copy(to, (uint64_t)from, bytes) : INVALID;
}
extern "C" Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    return is_ours(from, bytes) ? put_copy((uint64_t)to, from, bytes) : INVALID;
}
extern "C" Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
    return is_ours(from, bytes) && is_ours(to, bytes) ? put_copy(to, from, bytes) : INVALID;
}

extern "C" Result cuStreamCreate(Stream** stream, unsigned) {
    *stream = &the_stream;
    return OK;
}
extern "C" Result cuStreamDestroy_v2(void*) {
    run_all();
    broken = OK; // a failure goes with its context
    return OK;
}
static Result wait_to(uint64_t place) {
    if (captured) {
        return CAPTURING;
    }
    return struck("wait") ? LAUNCH : run_to(place);
}
extern "C" Result cuStreamSynchronize(void*) { return wait_to(put_so_far); }

// A graph is the work that was queued during the capture.
extern "C" Result cuStreamBeginCapture_v2(void*, int) {
#ifdef NO_GRAPHS
    return 801; // CUDA_ERROR_NOT_SUPPORTED
#else
    if (captured) {
        return CAPTURING;
    }
    captured = new Work();
    return OK;
#endif
}
extern "C" Result cuStreamEndCapture(void*, Work** graph) {
    *graph = captured;
    captured = nullptr;
    return OK;
}
extern "C" Result cuGraphInstantiateWithFlags(Work** ready, const Work* graph, unsigned long long) {
    *ready = new Work(*graph);
    return OK;
}
extern "C" Result cuGraphLaunch(const Work* graph, void*) {
    replays++;
    if (struck("launch")) {
        return LAUNCH;
    }
    for (const std::function<Result()>& work : *graph) {
        put(work);
    }
    return broken;
}
extern "C" Result cuGraphExecDestroy(Work* graph) {
    run_all();
    delete graph;
    return OK;
}
extern "C" Result cuGraphDestroy(Work* graph) {
    delete graph;
    return OK;
}

typedef std::chrono::steady_clock Clock;
struct Event {
    Clock::time_point at;
    uint64_t place = 0;
};
extern "C" Result cuEventCreate(Event** event, unsigned) {
    *event = new Event();
    return OK;
}
extern "C" Result cuEventRecord(Event* event, void*) {
    put([event] {
        event->at = Clock::now();
        return OK;
    });
    event->place = put_so_far;
    return OK;
}
extern "C" Result cuEventSynchronize(Event* event) { return wait_to(event->place); }
#ifndef NO_ELAPSED
extern "C" Result cuEventElapsedTime_v2(float* ms, Event* from, Event* to) {
    if (done_so_far < from->place || done_so_far < to->place) {
        return NOT_READY;
    }
    *ms = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return OK;
}
#endif
extern "C" Result cuEventDestroy_v2(Event* event) {
    run_all();
    delete event;
    return OK;
}

// Machine code is any image that begins with the stand-in compiler's mark.
extern "C" Result cuModuleLoadData(void** module, const void* image) {
    if (strncmp((const char*)image, "stand-in code", 13) != 0) {
        return 200; // CUDA_ERROR_INVALID_IMAGE
    }
    *module = &held;
    return OK;
}
extern "C" Result cuModuleUnload(void*) { return OK; }
extern "C" Result cuModuleGetFunction(const void** function, void*, const char* name) {
#ifndef NO_KERNELS
    for (Entry* entry = entries; entry; entry = entry->next) {
        if (strcmp(entry->name, name) == 0) {
            *function = entry;
            return OK;
        }
    }
#endif
    return NOT_FOUND;
}
// The fields of the driver's structures that are read.
struct Attribute {
    int id;
    char pad[4];
    int value;
};
struct LaunchConfig {
    unsigned x, y, z, threads, threads_y, threads_z, shared;
    void* stream;
    const Attribute* attributes;
    unsigned attribute_count;
};
extern "C" Result cuLaunchKernelEx(const LaunchConfig* config, const void* function,
                                   void** parameters, void**) {
    constexpr int PROGRAMMATIC_STREAM_SERIALIZATION = 6;
    const auto [x, y, z, threads, threads_y, threads_z, shared, stream, attributes, count] = *config;
    if (count > 1 || (count == 1 && (attributes->id != PROGRAMMATIC_STREAM_SERIALIZATION ||
                                     attributes->value != 1))) {
        return INVALID;
    }
    launches++;
    if (launches_left == 0 || struck("launch")) {
        return LAUNCH;
    }
    launches_left -= launches_left > 0;
    if (x == 0 || y == 0 || z == 0 || threads_y != 1 || threads_z != 1 || shared != 0) {
        return INVALID; // as a driver says it of an empty grid
    }
#ifndef NO_KERNELS
    const Entry* entry = static_cast<const Entry*>(function);
    const char* bytes = static_cast<const char*>(parameters[0]);
    std::vector<char> arguments(bytes, bytes + entry->bytes);
    unsigned order = launches % 4;
    put([=] {
        const unsigned grid[3] = {x, y, z};
        std::vector<char> copy = arguments;
        const char* error = tollgate_launch(entry->name, grid, threads, copy.data(), entry->bytes, order);
        if (error) {
            fprintf(stderr, "stand-in: %s\n", error);
        }
        return error ? LAUNCH : OK;
    });
    return broken;
#else
    return NOT_FOUND;
#endif
}
