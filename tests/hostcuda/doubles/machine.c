// SPDX-License-Identifier: Apache-2.0
/* The machine: its devices, their memory, errors. */
#include "tests/hostcuda/doubles/machine.h"

#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static const size_t POISONED_BYTES = (size_t)256 << 20; /* of an allocation, at most */

static double_device devices[MACHINE_DEVICES];
static nd_double_machine machine;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static _Thread_local int current;
static _Thread_local cudaError_t last_error;

void nd_double_violation(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    fputs("CUDA double: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    va_end(args);
    abort();
}

void nd_double_note_environment(const char *library, const char *const *names)
{
    const char *path = getenv("ND_DOUBLE_NOTES");
    FILE *notes = path ? fopen(path, "a") : NULL;
    char line[512];
    int used = snprintf(line, sizeof line, "%s", library);
    for (; notes && *names; names++) {
        const char *value = getenv(*names);
        used += snprintf(line + used, sizeof line - (size_t)used, " %s=%s", *names,
                         value ? value : "unset");
    }
    if (notes) {
        fprintf(notes, "%s\n", line);
        fclose(notes);
    }
}

static long number(const char *name, long otherwise)
{
    const char *text = getenv(name);
    return text && *text ? strtol(text, NULL, 10) : otherwise;
}

/* Says what a crash was when the host touched device memory; the access is then repeated and
 * crashes as usual. */
static void on_fault(int signal_number, siginfo_t *info, void *context)
{
    static const char text[] = "CUDA double: the host touched device memory\n";
    for (int d = 0; d < MACHINE_DEVICES; d++) {
        const double_device *device = &devices[d];
        for (int i = 0; i < device->region_count; i++) {
            const region *r = &device->regions[i];
            if (r->device && (char *)info->si_addr >= r->begin &&
                (char *)info->si_addr < r->begin + r->mapped) {
                ssize_t written = write(2, text, sizeof text - 1);
                (void)written;
            }
        }
    }
    signal(signal_number, SIG_DFL);
}

static void start(void)
{
    static const char *const read_once[] = {"CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING",
                                            NULL};
    const char *order = getenv("ND_DOUBLE_ORDER"), *capture = getenv("ND_DOUBLE_CAPTURE");
    nd_double_note_environment("cuda", read_once);
    machine.devices = (int)number("ND_DOUBLE_DEVICES", 8);
    machine.driver = (int)number("ND_DOUBLE_DRIVER", 13000);
    machine.capability = (int)number("ND_DOUBLE_CAPABILITY", 90);
    machine.memory = (size_t)number("ND_DOUBLE_MEMORY", 65536) << 20;
    machine.other = (int)number("ND_DOUBLE_OTHER", -1);
    machine.queue = number("ND_DOUBLE_QUEUE", 0);
    machine.order = order && strcmp(order, "eager") == 0         ? ND_DOUBLE_EAGER
                    : order && strcmp(order, "others") == 0      ? ND_DOUBLE_OTHERS
                    : order && strncmp(order, "random:", 7) == 0 ? ND_DOUBLE_RANDOM
                                                                 : ND_DOUBLE_LAZY;
    machine.seed = machine.order == ND_DOUBLE_RANDOM ? strtoull(order + 7, NULL, 10) : 0;
    machine.strict_capture = capture && strcmp(capture, "strict") == 0;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
}

nd_double_machine *nd_double_machine_get(void)
{
    pthread_once(&once, start);
    return &machine;
}

nd_double_counts nd_double_counts_get(void)
{
    return machine_current()->counts;
}

void nd_double_hot(bool hot)
{
    machine_current()->hot = hot;
}

double_device *machine_current(void)
{
    pthread_once(&once, start);
    return &devices[current];
}

uint64_t machine_draw(double_device *device)
{
    uint64_t x = machine.seed * 0x9e3779b97f4a7c15 + (uint64_t)(device - devices);
    x = x * 0xbf58476d1ce4e5b9 + ++device->draws;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return x ^ x >> 31;
}

bool machine_is_driver(const double_device *device)
{
    return pthread_equal(atomic_load(&device->driver), pthread_self());
}

cudaError_t machine_error(cudaError_t error)
{
    if (error != cudaSuccess && error != cudaErrorNotReady) {
        last_error = error;
    }
    return error;
}

void nd_double_break(cudaError_t error)
{
    machine_current()->broken = error;
}

static void protect(const double_device *device, int protection)
{
    for (int i = 0; i < device->region_count; i++) {
        const region *r = &device->regions[i];
        if (r->device && mprotect(r->begin, r->mapped, protection) != 0) {
            nd_double_violation("mprotect failed");
        }
    }
}

void machine_open(double_device *device)
{
    if (device->open++ == 0) {
        protect(device, PROT_READ | PROT_WRITE);
    }
}

void machine_close(double_device *device)
{
    if (--device->open == 0) {
        protect(device, PROT_NONE);
    }
}

const region *machine_find(const double_device *device, const void *p, size_t bytes)
{
    const char *begin = p;
    for (int i = 0; i < device->region_count; i++) {
        const region *r = &device->regions[i];
        if (begin < r->begin + r->bytes && begin + (bytes ? bytes : 1) > r->begin) {
            if (begin < r->begin || begin + bytes > r->begin + r->bytes) {
                nd_double_violation("%zu bytes at offset %td leave an allocation of %zu bytes",
                                    bytes, begin - r->begin, r->bytes);
            }
            return r;
        }
    }
    return NULL;
}

void nd_double_need_device(const char *what, const void *p, size_t bytes)
{
    const region *r = machine_find(machine_current(), p, bytes);
    if (!r || !r->device) {
        nd_double_violation("%s (%p, %zu bytes) is not memory of this device", what, p, bytes);
    }
}

static cudaError_t map(size_t bytes, bool device_memory, void **out)
{
    double_device *device = machine_current();
    long page = sysconf(_SC_PAGESIZE);
    size_t mapped = (bytes + (size_t)page - 1) / (size_t)page * (size_t)page;
    if (device->hot) {
        nd_double_violation("%zu bytes are allocated inside a step", bytes);
    }
    if (device->region_count == MACHINE_REGIONS) {
        nd_double_violation("more than %d allocations", MACHINE_REGIONS);
    }
    if (device_memory && device->used + mapped > machine.memory) {
        return machine_error(cudaErrorMemoryAllocation);
    }
    char *p = mmap(NULL, mapped, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) {
        return machine_error(cudaErrorMemoryAllocation);
    }
    memset(p, 0xa5, mapped < POISONED_BYTES ? mapped : POISONED_BYTES); /* it holds anything */
    if (device_memory && !device->open) {
        mprotect(p, mapped, PROT_NONE);
    }
    device->used += device_memory ? mapped : 0;
    device->counts.pinned_bytes += device_memory ? 0 : (long)bytes;
    device->counts.allocations++;
    device->regions[device->region_count++] = (region){p, bytes, mapped, device_memory};
    *out = p;
    return cudaSuccess;
}

static cudaError_t unmap(void *p, bool device_memory)
{
    double_device *device = machine_current();
    for (int i = 0; i < device->region_count; i++) {
        region *r = &device->regions[i];
        if (r->begin == p) {
            if (r->device != device_memory) {
                nd_double_violation("memory freed as another kind than it was allocated");
            }
            device->used -= device_memory ? r->mapped : 0;
            device->counts.pinned_bytes -= device_memory ? 0 : (long)r->bytes;
            device->counts.frees++;
            munmap(r->begin, r->mapped);
            *r = device->regions[--device->region_count];
            return cudaSuccess;
        }
    }
    return p ? machine_error(cudaErrorInvalidValue) : cudaSuccess;
}

cudaError_t cudaMalloc(void **out, size_t bytes)
{
    machine_outside_capture("cudaMalloc");
    return map(bytes, true, out);
}

/* Freeing waits for the device, and so for peers of what it still runs. */
static void wait_for_all(void)
{
    while (getenv("ND_DOUBLE_FREE")) {
        pause();
    }
    queue_wait_all(machine_current());
}

cudaError_t cudaFree(void *p)
{
    machine_outside_capture("cudaFree");
    wait_for_all();
    return unmap(p, true);
}

cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned flags)
{
    machine_outside_capture("cudaHostAlloc");
    return map(bytes, false, out);
}

cudaError_t cudaFreeHost(void *p)
{
    machine_outside_capture("cudaFreeHost");
    wait_for_all();
    return unmap(p, false);
}

cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total)
{
    const double_device *device = machine_current();
    *total = machine.memory;
    *free_bytes = machine.memory - device->used;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *out, const void *p)
{
    const region *r = machine_find(machine_current(), p, 1);
    memset(out, 0, sizeof *out);
    out->type = !r          ? cudaMemoryTypeUnregistered
                : r->device ? cudaMemoryTypeDevice
                            : cudaMemoryTypeHost;
    out->device = current;
    return cudaSuccess;
}

static cudaError_t need_driver(void)
{
    const nd_double_machine *m = nd_double_machine_get();
    return m->devices == -2                               ? cudaErrorSystemNotReady
           : m->devices < 0 || m->driver < CUDART_VERSION ? cudaErrorInsufficientDriver
           : m->devices == 0                              ? cudaErrorNoDevice
                                                          : cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *out)
{
    *out = nd_double_machine_get()->devices == -1 ? 0 : machine.driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *out)
{
    *out = CUDART_VERSION;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceCount(int *out)
{
    cudaError_t error = need_driver();
    *out = error == cudaSuccess ? machine.devices : 0;
    return machine_error(error);
}

cudaError_t cudaSetDevice(int ordinal)
{
    if (need_driver() != cudaSuccess || ordinal < 0 || ordinal >= machine.devices ||
        ordinal >= MACHINE_DEVICES) {
        return machine_error(cudaErrorInvalidDevice);
    }
    current = ordinal;
    return cudaSuccess;
}

cudaError_t cudaGetDevice(int *out)
{
    *out = current;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal)
{
    if (need_driver() != cudaSuccess || ordinal < 0 || ordinal >= machine.devices) {
        return machine_error(cudaErrorInvalidDevice);
    }
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "%s",
             ordinal == machine.other ? "double of another GPU" : "double of a GPU");
    memcpy(out->uuid.bytes, machine.id, sizeof machine.id);
    out->major = machine.capability / 10;
    out->minor = machine.capability % 10;
    out->totalGlobalMem = machine.memory;
    out->multiProcessorCount = 132;
    out->warpSize = 32;
    out->sharedMemPerBlock = 49152;
    out->sharedMemPerBlockOptin = 232448;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *out, enum cudaDeviceAttr attribute, int ordinal)
{
    struct cudaDeviceProp gpu;
    cudaError_t error = cudaGetDeviceProperties(&gpu, ordinal);
    if (error != cudaSuccess) {
        return error;
    }
    *out = attribute == cudaDevAttrMultiProcessorCount            ? gpu.multiProcessorCount
           : attribute == cudaDevAttrMaxSharedMemoryPerBlockOptin ? (int)gpu.sharedMemPerBlockOptin
           : attribute == cudaDevAttrComputeCapabilityMajor       ? gpu.major
           : attribute == cudaDevAttrComputeCapabilityMinor       ? gpu.minor
                                                                  : -1;
    if (*out < 0) {
        nd_double_violation("cudaDeviceGetAttribute: attribute %d has no double", (int)attribute);
    }
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    double_device *device = machine_current();
    cudaError_t error = device->broken != cudaSuccess ? device->broken : last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    double_device *device = machine_current();
    return device->broken != cudaSuccess ? device->broken : last_error;
}

const char *cudaGetErrorName(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation   ? "cudaErrorMemoryAllocation"
           : error == cudaErrorECCUncorrectable ? "cudaErrorECCUncorrectable"
           : error == cudaErrorIllegalAddress   ? "cudaErrorIllegalAddress"
                                                : "cudaError";
}

const char *cudaGetErrorString(cudaError_t error)
{
    return error == cudaErrorMemoryAllocation ? "out of memory"
           : error == cudaErrorIllegalAddress ? "an illegal memory access was encountered"
           : error == cudaErrorSystemNotReady ? "system not yet initialized"
                                              : "an error of the double";
}
