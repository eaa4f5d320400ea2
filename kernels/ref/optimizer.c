// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "kernels/ref/ref.h"

static void copy(const nd_flat_range *range, int64_t i, float p)
{
    if (range->copy) {
        range->copy[i - range->begin] = nd_bf16_from_f32(p);
    }
}

nd_status nd_ref_adamw(nd_stream *stream, const nd_adamw *o, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count)
{
    for (int r = 0; r < range_count; r++) {
        float decay = ranges[r].decay ? o->lr * o->weight_decay : 0.0f;
        for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) {
            float g = grad[i] * o->grad_scale;
            p[i] -= decay * p[i];
            m[i] = o->beta1 * m[i] + (1.0f - o->beta1) * g;
            v[i] = o->beta2 * v[i] + (1.0f - o->beta2) * g * g;
            p[i] -= o->lr * (m[i] / o->bias1) / (sqrtf(v[i] / o->bias2) + o->eps);
            copy(&ranges[r], i, p[i]);
        }
    }
    return ND_OK;
}

nd_status nd_ref_sgd(nd_stream *stream, const nd_adamw *o, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count)
{
    for (int r = 0; r < range_count; r++) {
        float decay = ranges[r].decay ? o->weight_decay : 0.0f;
        for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) {
            p[i] -= o->lr * (grad[i] * o->grad_scale + decay * p[i]);
            copy(&ranges[r], i, p[i]);
        }
    }
    return ND_OK;
}
