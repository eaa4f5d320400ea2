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
        ND_OP(r, ND_TRACE_OPTIMIZER, amax, .amax = m->work.head.row_max, .x = x,
              .granularity = ND_PER_TENSOR);
        ND_TRY(nd_copy(&r->stream, &amax, m->work.head.row_max, sizeof amax));
        ND_TRY(nd_stream_sync(&r->stream));
    }
    *bad = !isfinite(amax);
    return ND_OK;
}

/*
 * Numbers of tensors in the order of the computation, the same on every rank whatever its stage:
 * the weights, by their numbers in the layout; the inputs of the L blocks and of the head; the
 * gradients, from the last weight's to the first's.
 */
typedef struct numbering {
    int64_t inputs, gradients, count;
} numbering;

/* The parameter whose gradient has this number; and the other way round. */
static int64_t mirrored(const numbering *n, int64_t number)
{
    return n->count - 1 - number;
}

/* Looks at the weights, or at their gradients, with numbers below *first. */
static nd_status find_param(nd_model *m, const numbering *n, bool gradients, int64_t *first)
{
    const nd_layout *layout = m->layout;
    float *state = gradients ? m->fsdp.grad : m->fsdp.master;
    for (int i = 0; i < layout->param_count; i++) {
        const nd_flat_range range = nd_layout_shard_range(layout, &layout->params[i]);
        const int64_t weight = nd_layout_number(layout, &layout->params[i]),
                      number = gradients ? mirrored(n, weight) : weight,
                      count = number < *first ? range.end - range.begin : 0;
        bool bad = false;
        ND_TRY(is_bad(m, nd_tensor_1d(state + range.begin, ND_DTYPE_F32, count), &bad));
        *first = bad ? number : *first;
    }
    return ND_OK;
}

static nd_status find_input(nd_model *m, const numbering *n, int64_t *first)
{
    const nd_layer_range layers = m->stage->layers;
    bool bad = false;
    for (int64_t l = layers.begin; l < layers.end + m->stage->has_head && !bad; l++) {
        for (int s = 0; s < m->set_count && !bad; s++) {
            const nd_activation_set *set = &m->sets[s];
            ND_TRY(is_bad(m, l < layers.end ? nd_set_block(set, l)->x_in : set->head.x, &bad));
        }
        *first = bad ? n->inputs + l : *first;
    }
    return ND_OK;
}

static void describe(const nd_layout *layout, const numbering *n, int64_t number,
                     char name[ND_NONFINITE_NAME])
{
    char param[ND_PARAM_NAME];
    name[0] = '\0';
    if (number < n->inputs) {
        nd_layout_name(layout, number, param);
        snprintf(name, ND_NONFINITE_NAME, "the weight %s", param);
    } else if (number < n->inputs + layout->layers) {
        snprintf(name, ND_NONFINITE_NAME, "the input of layer %lld",
                 (long long)(number - n->inputs));
    } else if (number < n->gradients) {
        snprintf(name, ND_NONFINITE_NAME, "the input of the final norm");
    } else if (number < n->count) {
        nd_layout_name(layout, mirrored(n, number), param);
        snprintf(name, ND_NONFINITE_NAME, "the gradient of %s", param);
    }
}

nd_status nd_nonfinite_find(nd_model *m, char name[ND_NONFINITE_NAME])
{
    nd_rank *r = m->rank;
    const int64_t weights = nd_layout_numbers(m->layout), inputs = m->layout->layers + 1;
    const numbering n = {weights, weights + inputs, 2 * weights + inputs};
    int64_t first = n.count, *shared = &m->numbers->tokens;
    ND_TRY(find_param(m, &n, false, &first));
    ND_TRY(first == n.count ? find_input(m, &n, &first) : ND_OK);
    ND_TRY(first == n.count ? find_param(m, &n, true, &first) : ND_OK);
    first = -first; /* the smallest number of all ranks is the maximum of the negatives */
    ND_TRY(nd_copy(&r->stream, shared, &first, sizeof first));
    ND_TRY(nd_all_reduce(r, ND_GROUP_WORLD, shared, 1, ND_DTYPE_I64, ND_REDOP_MAX));
    ND_TRY(nd_copy(&r->stream, &first, shared, sizeof first));
    ND_TRY(nd_stream_sync(&r->stream));
    describe(m->layout, &n, -first, name);
    return ND_OK;
}
