// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention.h"

#include <math.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"

const int32_t *nd_attention_limit(const nd_attention *a, int64_t q0, int64_t key0, int keys,
                                  int32_t limit[ND_TILE])
{
    if (key0 + keys - 1 <= q0 + a->diag) {
        return NULL;
    }
    for (int r = 0; r < ND_TILE; r++) {
        int64_t last = q0 + r + a->diag - key0;
        limit[r] = (int32_t)(last < -1 ? -1 : last > keys ? keys : last);
    }
    return limit;
}

void *nd_attention_cut(char *base, size_t *used, int64_t count)
{
    size_t at = *used;
    *used += ((size_t)count * 4 + 63) / 64 * 64;
    return base ? base + at : NULL;
}

size_t nd_cpu_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    return backward ? nd_attention_bwd_scratch(device->threads, a)
                    : nd_attention_fwd_scratch(device->threads, a);
}

/* delta: one pass over rows of D */

static inline float element(const void *row, nd_dtype dtype, int64_t d)
{
    return dtype == ND_DTYPE_F32 ? ((const float *)row)[d]
                                 : nd_bf16_to_f32(((const nd_bf16 *)row)[d]);
}

/* Eight partial sums, added in a fixed order. */
static float dot(const void *x, nd_dtype x_dtype, const void *y, nd_dtype y_dtype, int64_t count)
{
    float partial[8] = {0};
    int64_t d = 0;
    for (; d + 8 <= count; d += 8) {
        for (int i = 0; i < 8; i++) {
            partial[i] += element(x, x_dtype, d + i) * element(y, y_dtype, d + i);
        }
    }
    for (; d < count; d++) {
        partial[0] += element(x, x_dtype, d) * element(y, y_dtype, d);
    }
    return ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
           ((partial[4] + partial[5]) + (partial[6] + partial[7]));
}

nd_status nd_cpu_attention_delta(nd_stream *stream, const nd_attention *a, nd_tensor delta,
                                 nd_tensor out, nd_tensor dout)
{
    nd_cpu_context_of(stream);
    float *to = delta.data;
#pragma omp parallel for schedule(static) collapse(2)
    for (int64_t b = 0; b < a->batch; b++) {
        for (int64_t i = 0; i < a->sq; i++) {
            for (int64_t h = 0; h < a->heads; h++) {
                to[(b * a->heads + h) * a->sq + i] =
                    dot(nd_attention_row(out, b, i, h), out.dtype, nd_attention_row(dout, b, i, h),
                        dout.dtype, a->head_dim);
            }
        }
    }
    return ND_OK;
}
