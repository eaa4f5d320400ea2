// SPDX-License-Identifier: Apache-2.0
/* Copies and fills on streams. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/hostcuda/doubles/machine.h"

typedef struct copy_call {
    void *dst;
    const void *src;
    size_t bytes;
    int value;
    unsigned char inline_source[]; /* pageable host memory is read when the copy is enqueued */
} copy_call;

static nd_double_state run_copy(void *closure)
{
    copy_call *call = closure;
    memmove(call->dst, call->src ? call->src : call->inline_source, call->bytes);
    return ND_DOUBLE_DONE;
}

static nd_double_state run_set(void *closure)
{
    copy_call *call = closure;
    const region *r = machine_find(machine_current(), call->dst, call->bytes);
    if (call->value == 0 && r && call->dst == r->begin && call->bytes == r->bytes) {
        madvise(r->begin, r->mapped, MADV_DONTNEED); /* all of it is zero, and no page is held */
    } else {
        memset(call->dst, call->value, call->bytes);
    }
    return ND_DOUBLE_DONE;
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind,
                            cudaStream_t stream)
{
    double_device *device = machine_current();
    const region *to = machine_find(device, dst, bytes), *from = machine_find(device, src, bytes);
    bool pageable = !to || !from;
    if (kind != cudaMemcpyDefault) {
        nd_double_violation("cudaMemcpyAsync of a stated kind: say cudaMemcpyDefault");
    }
    if (pageable && device->hot) {
        nd_double_violation("a copy of %zu bytes %s pageable memory inside a step", bytes,
                            from ? "to" : "from");
    }
    if (pageable && stream->capture) {
        return machine_end_capture(stream);
    }
    size_t held = from ? 0 : bytes;
    copy_call *call = malloc(sizeof *call + held);
    *call = (copy_call){.dst = dst, .src = from ? src : NULL, .bytes = bytes};
    if (!from) {
        memcpy(call->inline_source, src, bytes);
    }
    cudaError_t error = nd_double_submit(stream, run_copy, call, sizeof *call + held);
    free(call);
    if (error == cudaSuccess && !to) {
        queue_wait(device, stream); /* into pageable memory: returns when it has arrived */
        error = device->broken;
    }
    return error;
}

cudaError_t cudaMemsetAsync(void *dst, int value, size_t bytes, cudaStream_t stream)
{
    copy_call call = {.dst = dst, .bytes = bytes, .value = value};
    nd_double_need_device("cudaMemsetAsync", dst, bytes);
    return nd_double_submit(stream, run_set, &call, sizeof call);
}
