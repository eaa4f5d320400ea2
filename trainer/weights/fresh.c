// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>

#include "trainer/parallel/fsdp.h"

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
static nd_status init_run(void *context, const nd_run *run)
{
    init_context *c = context;
    nd_rank *r = c->fsdp->rank;
    float *to = c->fsdp->master + run->state_begin;
    if (run->param->init == ND_INIT_ONE) {
        return set_to_one(c, to, run->count);
    }
    return ND_CALL(r->ops, &r->stream, random_normal, .out = to, .count = run->count,
                   .deviation = c->init_std, .seed = c->seed, .random_stream = run->param->stream,
                   .first = (uint64_t)run->global_begin);
}

nd_status nd_fsdp_init_weights(nd_fsdp *fsdp, double init_std, uint64_t seed)
{
    init_context context = {.fsdp = fsdp, .init_std = (float)init_std, .seed = seed};
    nd_status status = ND_OK;
    ND_TRY(ND_ALLOC(ONES, &context.ones));
    for (int i = 0; i < ONES; i++) {
        context.ones[i] = 1.0f;
    }
    for (int u = 0; u < fsdp->layout->unit_count && status == ND_OK; u++) {
        status = nd_layout_each_run(fsdp->layout, u, fsdp->layout->shard_index, init_run, &context);
    }
    nd_status synced = nd_stream_sync(&fsdp->rank->stream); /* `ones` is read until then */
    free(context.ones);
    nd_fsdp_weights_changed(fsdp);
    return status == ND_OK ? synced : status;
}
