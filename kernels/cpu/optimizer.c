// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/cpu/parallel.h"

enum { CHUNK = 4096 }; /* elements of one item */

typedef struct optimizer {
    const nd_row_ops *rows;
    const nd_adamw *o;
    float *p, *m, *v; /* m NULL: plain gradient descent */
    const float *grad;
    nd_flat_range range;
} optimizer;

static void update_chunks(void *arg, int64_t begin, int64_t end)
{
    const optimizer *w = arg;
    int64_t from = w->range.begin + begin * CHUNK, to = w->range.begin + end * CHUNK;
    int64_t n = (to < w->range.end ? to : w->range.end) - from;
    nd_bf16 *copy = w->range.copy ? w->range.copy + begin * CHUNK : NULL;
    if (w->m) {
        w->rows->adamw(w->o, w->range.decay, w->p + from, w->m + from, w->v + from, w->grad + from,
                       copy, n);
    } else {
        w->rows->sgd(w->o, w->range.decay, w->p + from, w->grad + from, copy, n);
    }
}

static void update(nd_stream *stream, optimizer *w, const nd_flat_range *ranges, int range_count)
{
    w->rows = nd_cpu_context_of(stream)->rows;
    for (int r = 0; r < range_count; r++) {
        ND_ASSERT(ranges[r].begin >= 0 && ranges[r].begin <= ranges[r].end);
        w->range = ranges[r];
        int64_t count = w->range.end - w->range.begin;
        nd_cpu_parallel(stream, (count + CHUNK - 1) / CHUNK, CHUNK, update_chunks, w);
    }
}

nd_status nd_cpu_adamw(nd_stream *stream, const nd_adamw *o, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count)
{
    optimizer w = {.o = o, .p = p, .m = m, .v = v, .grad = grad};
    update(stream, &w, ranges, range_count);
    return ND_OK;
}

nd_status nd_cpu_sgd(nd_stream *stream, const nd_adamw *o, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count)
{
    optimizer w = {.o = o, .p = p, .grad = grad};
    update(stream, &w, ranges, range_count);
    return ND_OK;
}
