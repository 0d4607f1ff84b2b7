// A driver without a card: the calls that the engine makes, over this
// process's memory and the emulated kernels. It is made to be unkind: memory
// comes poisoned, blocks run in any order, and it fails as it is told to.
//
// Built with -DNO_KERNELS it has no kernels, which is enough to be probed;
// further macros make it old, incomplete, empty or busy, or its devices slices.
// In a process of its own it fails as files in STANDIN_FAULTS say.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <unistd.h>

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
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_CARD = 100, BUSY_CARD = 46, NOT_FOUND = 500, LAUNCH = 719 };

static size_t total = 96u << 20, taken = 0;
static std::map<uintptr_t, size_t> held;
static int launches_left = -1;
static unsigned launches = 0, compiled = 0;
static int shown = DEVICES, first_shown = 0; // devices that this process may see
static int in_use = 0;                       // the one that it uses

// What a test tells it.
extern "C" void standin_memory(size_t bytes) { total = bytes; }
extern "C" void standin_fail_after(int more) { launches_left = more; }
extern "C" unsigned standin_launches() { return launches; }
extern "C" size_t standin_taken() { return taken; }

// Whether a file asks this call to fail, once: `0.launch` is device 0's, and
// says `fail` or `hang`.
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

// A process sees all cards, or one slice; CUDA_VISIBLE_DEVICES names one of either.
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
    if (bytes == 0 || taken + bytes > total) {
        return bytes == 0 ? INVALID : NO_MEMORY;
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
    free(at);
    return OK;
}

// Whether the bytes lie within one piece.
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
    memset((void*)to, value, bytes);
    return OK;
}
extern "C" Result cuMemcpyHtoD_v2(uint64_t to, const void* from, size_t bytes) {
    if (!is_ours(to, bytes)) {
        return INVALID;
    }
    memcpy((void*)to, from, bytes);
    return OK;
}
extern "C" Result cuMemcpyHtoDAsync_v2(uint64_t to, const void* from, size_t bytes, void*) {
    return cuMemcpyHtoD_v2(to, from, bytes);
}
extern "C" Result cuMemcpyDtoHAsync_v2(void* to, uint64_t from, size_t bytes, void*) {
    if (!is_ours(from, bytes)) {
        return INVALID;
    }
    memcpy(to, (const void*)from, bytes);
    return OK;
}
extern "C" Result cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void*) {
    if (!is_ours(from, bytes) || !is_ours(to, bytes)) {
        return INVALID;
    }
    memmove((void*)to, (const void*)from, bytes);
    return OK;
}

extern "C" Result cuStreamCreate(void** stream, unsigned) {
    *stream = &taken;
    return OK;
}
extern "C" Result cuStreamDestroy_v2(void*) { return OK; }
extern "C" Result cuStreamSynchronize(void*) { return struck("wait") ? LAUNCH : OK; }

typedef std::chrono::steady_clock Clock;
extern "C" Result cuEventCreate(Clock::time_point** event, unsigned) {
    *event = new Clock::time_point();
    return OK;
}
extern "C" Result cuEventRecord(Clock::time_point* event, void*) {
    *event = Clock::now();
    return OK;
}
#ifndef NO_ELAPSED
extern "C" Result cuEventElapsedTime_v2(float* ms, Clock::time_point* from, Clock::time_point* to) {
    *ms = std::chrono::duration<float, std::milli>(*to - *from).count();
    return OK;
}
#endif
extern "C" Result cuEventDestroy_v2(Clock::time_point* event) {
    delete event;
    return OK;
}

// Machine code is whatever begins with what the stand-in compiler writes.
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
extern "C" Result cuLaunchKernel(const void* function, unsigned x, unsigned y, unsigned z,
                                 unsigned threads, unsigned threads_y, unsigned threads_z,
                                 unsigned shared, void*, void** parameters, void**) {
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
    const unsigned grid[3] = {x, y, z};
    const char* error =
        tollgate_launch(entry->name, grid, threads, parameters[0], entry->bytes, launches % 4);
    if (error) {
        fprintf(stderr, "stand-in: %s\n", error);
        return LAUNCH;
    }
    return OK;
#else
    return NOT_FOUND;
#endif
}
