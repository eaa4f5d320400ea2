// SPDX-License-Identifier: Apache-2.0
/* Scales are few: one thread, plain loops. */
#include <float.h>
#include <math.h>

#include "kernels/cpu/cpu_ops.h"
#include "runtime/tensor/fp8.h"

enum {
    LANES = 16
}; /* tensors whose histories are gone through side by side: a cache line of each row */

nd_status nd_cpu_fp8_scale(nd_stream *stream, float *scale, float *inverse, const float *amax,
                           int64_t count, nd_dtype format, bool power_of_two)
{
    ND_ASSERT(nd_dtype_is_fp8(format));
    double limit = nd_fp8_max(format);
    for (int64_t i = 0; i < count; i++) {
        double size = amax[i];
        float s = (float)(limit / (size < 1e-12 ? 1e-12 : size)); /* a NaN is not below */
        if (power_of_two) {
            s = exp2f(floorf((float)log2((double)s)));
        }
        scale[i] = s;
        inverse[i] = 1.0f / s;
    }
    return ND_OK;
}

/* Moves the histories of `n` tensors on, those whose newest amax is 0 excepted; largest: of the old
 * rows. */
static void roll(const nd_fp8_history *h, int64_t first, int64_t n, float largest[LANES])
{
    float *newest = h->amax + first;
    for (int64_t l = 0; l < n; l++) {
        largest[l] = newest[l] > 0.0f ? newest[l] : 0.0f;
    }
    for (int64_t row = 1; row < h->length; row++) {
        float *here = newest + row * h->count;
        const float *next = row + 1 < h->length ? here + h->count : newest;
        for (int64_t l = 0; l < n; l++) {
            largest[l] = here[l] > largest[l] ? here[l] : largest[l];
            here[l] = newest[l] != 0.0f ? next[l] : here[l];
        }
    }
}

nd_status nd_cpu_fp8_delayed(nd_stream *stream, const nd_fp8_history *h,
                             nd_amax_algorithm algorithm)
{
    ND_ASSERT(h->length >= 1 && h->count >= 0);
    for (int64_t first = 0; first < h->count; first += LANES) {
        int64_t n = h->count - first < LANES ? h->count - first : LANES;
        float largest[LANES];
        roll(h, first, n, largest);
        for (int64_t i = first; i < first + n; i++) {
            bool follow_largest = algorithm == ND_AMAX_MAX && h->amax[i] != 0.0f;
            float amax = follow_largest ? largest[i - first] : h->amax[i];
            if (amax > 0.0f && amax <= FLT_MAX) {
                float scale = h->limit[i] / amax;
                h->scale[i] = scale <= FLT_MAX ? scale : FLT_MAX;
            }
            h->inverse[i] = 1.0f / h->scale[i];
            h->amax[i] = 0.0f;
        }
    }
    return ND_OK;
}
