// SPDX-License-Identifier: Apache-2.0
/* Initial values. */
#include <stdlib.h>

#include "trainer/weights/weights.h"

enum { ONES = 1 << 14 };

typedef struct init_context {
    nd_fsdp *fsdp;
    float init_std;
    uint64_t seed;
    float *ones;
} init_context;

static nd_status set_to_one(init_context *c, float *to, int64_t count)
{
    nd_stream *stream = &c->fsdp->rank->stream;
    for (int64_t done = 0; done < count; done += ONES) {
        int64_t n = count - done < ONES ? count - done : ONES;
        ND_TRY(nd_copy(stream, to + done, c->ones, (size_t)n * sizeof *to));
    }
    return ND_OK;
}

/* A value depends on seed, parameter and the element's place in the whole tensor, whatever the
 * mesh. */
static nd_status init_span(void *context, const nd_span *span)
{
    init_context *c = context;
    nd_rank *r = c->fsdp->rank;
    float *to = c->fsdp->master + span->begin;
    int64_t count = span->rows * span->cols, adjacent = nd_span_adjacent(span);
    if (span->param->init == ND_INIT_ONE) {
        return set_to_one(c, to, count);
    }
    if (span->param->init == ND_INIT_ZERO) {
        return nd_zero(&r->stream, to, (size_t)count * sizeof *to);
    }
    for (int64_t done = 0; done < count; done += adjacent) {
        ND_TRY(ND_CALL(r->ops, &r->stream, random_normal, .out = to + done, .count = adjacent,
                       .deviation = c->init_std, .seed = c->seed,
                       .random_stream = span->param->random_stream,
                       .first = (uint64_t)nd_span_global(span, done)));
    }
    return ND_OK;
}

nd_status nd_weights_init(nd_fsdp *fsdp, double init_std, uint64_t seed)
{
    init_context context = {.fsdp = fsdp, .init_std = (float)init_std, .seed = seed};
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(ONES, &context.ones));
    for (int i = 0; i < ONES; i++) {
        context.ones[i] = 1.0f;
    }
    for (int u = 0; u < fsdp->layout->unit_count && status == ND_OK; u++) {
        status = nd_layout_each_span(fsdp->layout, &fsdp->layout->units[u],
                                     fsdp->layout->shard_index, init_span, &context);
    }
    nd_status synced = nd_stream_sync(&fsdp->rank->stream); /* `ones` is read until then */
    free(context.ones);
    nd_fsdp_weights_changed(fsdp);
    return status == ND_OK ? synced : status;
}
