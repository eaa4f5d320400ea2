// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/cuda_recent_ops.h"

#include <stdio.h>
#include <string.h>

#include "runtime/base/math.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

static void format_recent_ops(const nd_device *device, char *text, size_t size)
{
    const nd_cuda_recent_ops *recent = &nd_cuda_device_of(device)->recent_ops;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ND_CUDA_RECENT_OPS && used < size; i++) {
        const char *op = recent->ops[(recent->next + i) % ND_CUDA_RECENT_OPS];
        if (op) {
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", op);
        }
    }
}

/* Faults that the program does not cause: their status, and what to do. */
typedef struct known_fault {
    cudaError_t error;
    nd_status status;
    const char *fix;
} known_fault;

static const known_fault known_faults[] = {
    {cudaErrorMemoryAllocation, ND_ERR_RESOURCE,
     "device memory outside the plan is used up; use recompute, a smaller micro batch, a shorter "
     "sequence or more shards"},
    {cudaErrorDevicesUnavailable, ND_ERR_RESOURCE,
     "another process has this GPU for itself, or its compute mode admits none (nvidia-smi -q -d "
     "COMPUTE)"},
    {cudaErrorNoKernelImageForDevice, ND_ERR_CONFIG,
     "this program was built for other GPUs; build it on this machine, or with "
     "-Dgpu_architectures"},
    {cudaErrorSystemNotReady, ND_ERR_CONFIG,
     "GPUs behind NVSwitch need the fabric manager; start it (systemctl start "
     "nvidia-fabricmanager)"},
    {cudaErrorSystemDriverMismatch, ND_ERR_CONFIG,
     "the driver's module and its libraries are of different versions; restart the machine after "
     "an update of the driver"},
    {cudaErrorCompatNotSupportedOnDevice, ND_ERR_CONFIG,
     "the CUDA compatibility package does not support this GPU; take it out of LD_LIBRARY_PATH"},
    {cudaErrorECCUncorrectable, ND_ERR_INTERNAL,
     "the GPU's memory has a fault that cannot be corrected; choose another GPU (nvidia-smi -q -d "
     "ECC)"},
    {cudaErrorNvlinkUncorrectable, ND_ERR_INTERNAL,
     "an NVLink has a fault that cannot be corrected; choose another GPU (nvidia-smi nvlink -e)"},
};

static const known_fault *find_known(cudaError_t error)
{
    for (size_t i = 0; i < sizeof known_faults / sizeof *known_faults; i++) {
        if (known_faults[i].error == error) {
            return &known_faults[i];
        }
    }
    return NULL;
}

/* What is free when there is no memory: ", 0.25 of 79.10 GiB are free". */
static void format_free(cudaError_t error, char *text, size_t size)
{
    size_t free_bytes = 0, total = 0;
    text[0] = '\0';
    if (error == cudaErrorMemoryAllocation && cudaMemGetInfo(&free_bytes, &total) == cudaSuccess) {
        snprintf(text, size, ", %.2f of %.2f GiB are free", (double)free_bytes / nd_gib,
                 (double)total / nd_gib);
    }
}

nd_status nd_cuda_failed(const nd_device *device, cudaError_t error, const char *call)
{
    char ops[1024] = "", left[64];
    const char *name = cudaGetErrorName(error), *meaning = cudaGetErrorString(error);
    const known_fault *known = find_known(error);
    cudaGetLastError(); /* clears a fault that is not sticky, so that it is reported once */
    format_free(error, left, sizeof left);
    bool of_cuda = device && device->kind == ND_DEVICE_CUDA;
    if (!known && of_cuda && !nd_cuda_device_of(device)->sync_each_op) {
        format_recent_ops(device, ops, sizeof ops);
    }
    return nd_fail(known ? known->status : ND_ERR_INTERNAL,
                   "CUDA error %d (%s: %s) from %.120s on %s%s%s%s%s%s%s", (int)error, name,
                   meaning, call, device ? device->name : "the GPU", left, known ? "; " : "",
                   known ? known->fix : "", ops[0] ? ", after the ops " : "", ops,
                   ops[0] ? "; the fault may be of any of them, ND_CUDA_SYNC=1 finds which" : "");
}

nd_status nd_cuda_stuck(const nd_device *device, double seconds)
{
    char ops[1024];
    format_recent_ops(device, ops, sizeof ops);
    return nd_fail(ND_ERR_HANG,
                   "%s has not ended in %.1f s what was enqueued on it%s%s; see nvidia-smi and the "
                   "kernel's log (Xid)",
                   device->name, seconds, ops[0] ? ", last the ops " : "", ops);
}

static void append_op(nd_cuda_recent_ops *recent, const char *op)
{
    const char *end = ", ...)";
    size_t used = strlen(recent->captured), needed = strlen(op) + 2;
    if (used + needed + strlen(end) < sizeof recent->captured) {
        snprintf(recent->captured + used, sizeof recent->captured - used, "%s%s",
                 recent->captured_ops == 0 ? " (" : ", ", op);
        recent->captured_ops++;
    } else if (recent->captured[used - 1] != '.') {
        snprintf(recent->captured + used, sizeof recent->captured - used, ", ...");
    }
}

bool nd_cuda_note_op(nd_device *device, const char *op)
{
    nd_cuda_recent_ops *recent = &nd_cuda_device_of(device)->recent_ops;
    if (recent->captures) {
        append_op(recent, op);
        return false;
    }
    recent->ops[recent->next] = op;
    recent->next = (recent->next + 1) % ND_CUDA_RECENT_OPS;
    return true;
}
