// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/cuda_trail.h"

#include <stdio.h>
#include <string.h>

static void format_trail(const nd_device *device, char *text, size_t size)
{
    const nd_cuda_trail *trail = &nd_cuda_device_of(device)->trail;
    size_t used = 0;
    text[0] = '\0';
    for (int i = 0; i < ND_CUDA_TRAIL && used < size; i++) {
        const char *op = trail->ops[(trail->next + i) % ND_CUDA_TRAIL];
        if (op) {
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", op);
        }
    }
}

nd_status nd_cuda_failed(const nd_device *device, cudaError_t error, const char *call)
{
    char trail[1024] = "";
    const char *name = cudaGetErrorName(error), *meaning = cudaGetErrorString(error);
    if (device && device->kind == ND_DEVICE_CUDA) {
        format_trail(device, trail, sizeof trail);
    }
    return nd_fail(error == cudaErrorMemoryAllocation ? ND_ERR_RESOURCE : ND_ERR_INTERNAL,
                   "CUDA error %d (%s: %s) from %.120s on %s%s%s%s", (int)error, name, meaning,
                   call, device ? device->name : "the GPU", trail[0] ? ", after the ops " : "",
                   trail,
                   trail[0] ? "; the fault may be of any of them, ND_CUDA_SYNC=1 finds which" : "");
}

void nd_cuda_ops_begin(nd_device *device, const char *name)
{
    nd_cuda_trail *trail = &nd_cuda_device_of(device)->trail;
    trail->captures = true;
    trail->captured_ops = 0;
    snprintf(trail->captured, sizeof trail->captured, "%s", name);
}

static void append_op(nd_cuda_trail *trail, const char *op)
{
    const char *end = ", ...)";
    size_t used = strlen(trail->captured), needed = strlen(op) + 2;
    if (used + needed + strlen(end) < sizeof trail->captured) {
        snprintf(trail->captured + used, sizeof trail->captured - used, "%s%s",
                 trail->captured_ops == 0 ? " (" : ", ", op);
        trail->captured_ops++;
    } else if (trail->captured[used - 1] != '.') {
        snprintf(trail->captured + used, sizeof trail->captured - used, ", ...");
    }
}

void nd_cuda_ops_end(nd_device *device, char out[ND_CUDA_OPS_MAX])
{
    nd_cuda_trail *trail = &nd_cuda_device_of(device)->trail;
    trail->captures = false;
    if (trail->captured_ops > 0) {
        strcat(trail->captured, ")"); /* append_op left room for it */
    }
    memcpy(out, trail->captured, ND_CUDA_OPS_MAX);
}

void nd_cuda_forget(nd_device *device, const char *op)
{
    nd_cuda_trail *trail = &nd_cuda_device_of(device)->trail;
    for (int i = 0; i < ND_CUDA_TRAIL; i++) {
        trail->ops[i] = trail->ops[i] == op ? NULL : trail->ops[i];
    }
}

nd_status nd_cuda_op_done(nd_stream *stream, const char *op, cudaError_t launched)
{
    nd_cuda_device *cuda = nd_cuda_device_of(stream->device);
    nd_cuda_trail *trail = &cuda->trail;
    if (trail->captures) {
        append_op(trail, op);
        return launched == cudaSuccess ? ND_OK : nd_cuda_failed(stream->device, launched, op);
    }
    trail->ops[trail->next] = op;
    trail->next = (trail->next + 1) % ND_CUDA_TRAIL;
    if (launched == cudaSuccess && cuda->sync_each_op) {
        launched = cudaStreamSynchronize(nd_cuda_stream(stream));
    }
    return launched == cudaSuccess ? ND_OK : nd_cuda_failed(stream->device, launched, op);
}
