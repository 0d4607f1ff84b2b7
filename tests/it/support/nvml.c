/* A stand-in for libnvidia-ml.so.1: the functions of NVML that tollgate calls,
 * with the values of a text file (VALUES: lines of a name and a number) that a
 * test rewrites while it runs. It has no device; what passes with it says
 * nothing about one. A value that is not in the file is "not supported". With
 * KNOWN there are the devices alone whose UUIDs are in it. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

typedef void *handle;
enum { OK = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10, GPU_IS_LOST = 15 };

/* 0 where it is there, else the error to return. */
static int value(const char *name, unsigned long long *out) {
    char key[64];
    unsigned long long number;
    int found = NOT_SUPPORTED;
    FILE *file = fopen(VALUES, "r");
    if (!file) return NOT_SUPPORTED;
    while (fscanf(file, "%63s %llu", key, &number) == 2) {
        if (!strcmp(key, "lost") && number) found = GPU_IS_LOST;
        if (found != GPU_IS_LOST && !strcmp(key, name)) { *out = number; found = OK; }
    }
    fclose(file);
    return found;
}

static int small(const char *name, unsigned *out) {
    unsigned long long number = 0;
    int error = value(name, &number);
    if (!error) *out = (unsigned)number;
    return error;
}

int nvmlInit_v2(void) { return OK; }
int nvmlShutdown(void) { return OK; }

int nvmlSystemGetDriverVersion(char *out, unsigned length) {
    snprintf(out, length, "580.00");
    return OK;
}

/* A driver that hangs, where the values say so, does here. */
int nvmlDeviceGetHandleByUUID(const char *uuid, handle *out) {
    unsigned long long number;
    while (value("hangs", &number) == OK) sleep(1);
#ifdef KNOWN
    if (!strstr(KNOWN, uuid)) return NOT_FOUND;
#endif
    (void)uuid;
    *out = (handle)1;
    return value("none", &number) == GPU_IS_LOST ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetUtilizationRates(handle device, unsigned *out) {
    (void)device;
    out[1] = 0;
    return small("utilisation", &out[0]);
}

struct memory { unsigned version; unsigned long long total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(handle device, struct memory *out) {
    (void)device;
    int error = value("memory_total", &out->total);
    if (error) return error;
    error = value("memory_used", &out->used);
    out->free = out->total - out->used;
    return error;
}

int nvmlDeviceGetTemperature(handle device, int sensor, unsigned *out) {
    (void)device; (void)sensor;
    return small("temperature", out);
}
int nvmlDeviceGetPowerUsage(handle device, unsigned *out) { (void)device; return small("power", out); }
int nvmlDeviceGetEnforcedPowerLimit(handle device, unsigned *out) { (void)device; return small("power_limit", out); }
int nvmlDeviceGetTotalEnergyConsumption(handle device, unsigned long long *out) { (void)device; return value("energy", out); }
int nvmlDeviceGetClockInfo(handle device, int kind, unsigned *out) {
    (void)device;
    return small(kind == 2 ? "memory_clock" : "clock", out);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(handle device, unsigned long long *out) { (void)device; return value("throttle", out); }
int nvmlDeviceGetTotalEccErrors(handle device, int kind, int counter, unsigned long long *out) {
    (void)device; (void)counter;
    return value(kind == 1 ? "ecc_uncorrected" : "ecc_corrected", out);
}
/* A slice has a card that it is of. */
int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle slice, handle *out) {
    unsigned long long number;
    (void)slice;
    *out = (handle)1;
    return value("slice", &number);
}
int nvmlDeviceGetMigMode(handle device, unsigned *current, unsigned *pending) {
    (void)device;
    *pending = 0;
    return small("mig", current);
}

struct process { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; };
/* One process: the one that asks. */
int nvmlDeviceGetComputeRunningProcesses_v3(handle device, unsigned *count, struct process *out) {
    unsigned long long memory;
    (void)device;
    int error = value("memory_ours", &memory);
    if (error) return error;
    unsigned room = *count;
    *count = 1;
    if (!out || room < 1) return INSUFFICIENT_SIZE;
    out[0] = (struct process){ (unsigned)getpid(), memory, 0xffffffffu, 0xffffffffu };
    return OK;
}

int nvmlEventSetCreate(handle *out) { *out = (handle)2; return OK; }
int nvmlEventSetFree(handle set) { (void)set; return OK; }
int nvmlDeviceRegisterEvents(handle device, unsigned long long kinds, handle set) {
    (void)device; (void)kinds; (void)set;
    return OK;
}

struct event { handle device; unsigned long long kind, data; unsigned gpu_instance, compute_instance; };
/* A critical error each time that the number of them (xids) has grown. */
int nvmlEventSetWait_v2(handle set, struct event *out, unsigned wait) {
    static unsigned long long told;
    unsigned long long count = 0, xid = 0;
    (void)set; (void)wait;
    if (value("xids", &count) || value("xid", &xid) || count <= told) return TIMEOUT;
    told++;
    *out = (struct event){ (handle)1, 8, xid, 0, 0 };
    return OK;
}
