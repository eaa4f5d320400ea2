// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention.h"

#include "kernels/cpu/attention_blocks.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"

size_t nd_cpu_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    return backward ? nd_attention_bwd_scratch(device->threads, a)
                    : nd_attention_fwd_scratch(device->threads, a);
}

/* delta: one pass over rows of D */

bool nd_cpu_attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return true;
}

static inline float element(const void *row, bool bf16, int64_t d)
{
    return bf16 ? nd_bf16_to_f32(((const nd_bf16 *)row)[d]) : ((const float *)row)[d];
}

/* Eight partial sums, added in a fixed order. The types are constants where this is inlined. */
static inline __attribute__((always_inline)) float
dot_as(const void *x, const bool x_bf16, const void *y, const bool y_bf16, int64_t count)
{
    float partial[8] = {0};
    int64_t d = 0;
    for (; d + 8 <= count; d += 8) {
        for (int i = 0; i < 8; i++) {
            partial[i] += element(x, x_bf16, d + i) * element(y, y_bf16, d + i);
        }
    }
    for (; d < count; d++) {
        partial[0] += element(x, x_bf16, d) * element(y, y_bf16, d);
    }
    return ((partial[0] + partial[1]) + (partial[2] + partial[3])) +
           ((partial[4] + partial[5]) + (partial[6] + partial[7]));
}

static float dot(const void *x, bool x_bf16, const void *y, bool y_bf16, int64_t count)
{
    if (x_bf16 == y_bf16) {
        return x_bf16 ? dot_as(x, true, y, true, count) : dot_as(x, false, y, false, count);
    }
    return x_bf16 ? dot_as(x, true, y, false, count) : dot_as(x, false, y, true, count);
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
                    dot(nd_attention_row(out, b, i, h), out.dtype == ND_DTYPE_BF16,
                        nd_attention_row(dout, b, i, h), dout.dtype == ND_DTYPE_BF16, a->head_dim);
            }
        }
    }
    return ND_OK;
}
