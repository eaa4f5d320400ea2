// SPDX-License-Identifier: Apache-2.0
#include "trainer/step/parts.h"

#include <math.h>
#include <stdio.h>

/* Whether x holds NaN or infinity. Waits for the device, which a normal step does not. */
static nd_status is_bad(nd_model *m, nd_tensor x, bool *bad)
{
    nd_rank *r = m->rank;
    float amax = 0.0f;
    if (nd_tensor_count(x) > 0) {
        ND_OP(r, ND_TRACE_OPTIMIZER, amax, .amax = m->head.row_max, .x = x,
              .granularity = ND_PER_TENSOR);
        ND_TRY(nd_copy(&r->stream, &amax, m->head.row_max, sizeof amax));
        ND_TRY(nd_stream_sync(&r->stream));
    }
    *bad = !isfinite(amax);
    return ND_OK;
}

static nd_status is_bad_part(nd_model *m, float *state, const nd_param *p, bool *bad)
{
    nd_flat_range range = nd_layout_shard_range(m->layout, p);
    return is_bad(m, nd_tensor_1d(state + range.begin, ND_DTYPE_F32, range.end - range.begin), bad);
}

/* Number of the first bad tensor of this rank, in the order parameters, inputs of the L blocks and
 * of the head, gradients. */
static nd_status find_here(nd_model *m, int64_t *first)
{
    const nd_layout *layout = m->layout;
    int64_t params = layout->param_count, blocks = layout->layers + 1;
    bool bad = false;
    int64_t at = 0;
    for (; at < params && !bad; at++) {
        ND_TRY(is_bad_part(m, m->fsdp.master, &layout->params[at], &bad));
    }
    for (int64_t l = 0; l < blocks && !bad; l++, at++) {
        ND_TRY(is_bad(m, l < layout->layers ? m->set.blocks[l].x_in : m->set.head.x, &bad));
    }
    for (int64_t i = params - 1; i >= 0 && !bad; i--, at++) {
        ND_TRY(is_bad_part(m, m->fsdp.grad, &layout->params[i], &bad));
    }
    *first = bad ? at - 1 : 2 * params + blocks;
    return ND_OK;
}

static void describe(const nd_model *m, int64_t number, char name[ND_NONFINITE_NAME])
{
    const nd_layout *layout = m->layout;
    int64_t params = layout->param_count, blocks = layout->layers + 1;
    name[0] = '\0';
    if (number < params) {
        snprintf(name, ND_NONFINITE_NAME, "the weight %s", m->layout->params[number].name);
    } else if (number < params + layout->layers) {
        snprintf(name, ND_NONFINITE_NAME, "the input of layer %lld", (long long)(number - params));
    } else if (number < params + blocks) {
        snprintf(name, ND_NONFINITE_NAME, "the input of the final norm");
    } else if (number < 2 * params + blocks) {
        snprintf(name, ND_NONFINITE_NAME, "the gradient of %s",
                 m->layout->params[2 * params + blocks - 1 - number].name);
    }
}

nd_status nd_nonfinite_find(nd_model *m, char name[ND_NONFINITE_NAME])
{
    nd_rank *r = m->rank;
    int64_t first, *shared = &m->numbers->tokens;
    ND_TRY(find_here(m, &first));
    first = -first; /* the smallest number of all ranks is the maximum of the negatives */
    ND_TRY(nd_copy(&r->stream, shared, &first, sizeof first));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_reduce(r->groups.by_kind[ND_GROUP_WORLD], &r->stream, shared, 1,
                              ND_DTYPE_I64, ND_REDOP_MAX, NULL));
    ND_TRY(nd_copy(&r->stream, &first, shared, sizeof first));
    ND_TRY(nd_stream_sync(&r->stream));
    describe(m, -first, name);
    return ND_OK;
}
