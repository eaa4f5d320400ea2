// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"
#include "runtime/base/rng.h"

nd_status nd_ref_add(nd_stream *stream, nd_tensor out, nd_tensor a, nd_tensor b)
{
    int64_t count = nd_tensor_count(out);
    ND_ASSERT(nd_is_act(out) && nd_is_act(a) && nd_is_act(b));
    ND_ASSERT(nd_tensor_count(a) == count && nd_tensor_count(b) == count);
    for (int64_t i = 0; i < count; i++) {
        nd_ref_put(out, nd_offset_of(out, i),
                   nd_ref_get(a, nd_offset_of(a, i)) + nd_ref_get(b, nd_offset_of(b, i)));
    }
    return ND_OK;
}

nd_status nd_ref_accumulate(nd_stream *stream, nd_tensor acc, nd_tensor x)
{
    ND_ASSERT(acc.dtype == ND_DTYPE_F32);
    return nd_ref_add(stream, acc, acc, x);
}

nd_status nd_ref_cast(nd_stream *stream, nd_tensor out, nd_tensor x)
{
    int64_t count = nd_tensor_count(out);
    ND_ASSERT(nd_is_act(out) && nd_is_act(x) && nd_tensor_count(x) == count);
    for (int64_t i = 0; i < count; i++) {
        nd_ref_put(out, nd_offset_of(out, i), nd_ref_get(x, nd_offset_of(x, i)));
    }
    return ND_OK;
}

nd_status nd_ref_sum_squares(nd_stream *stream, double *out, const float *x, int64_t count)
{
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
        sum += (double)x[i] * x[i];
    }
    *out += sum;
    return ND_OK;
}

nd_status nd_ref_random_normal(nd_stream *stream, float *out, int64_t count, float deviation,
                               uint64_t seed, uint64_t random_stream, uint64_t first)
{
    for (int64_t i = 0; i < count; i++) {
        out[i] = deviation * nd_rng_normal(seed, random_stream, first + (uint64_t)i);
    }
    return ND_OK;
}
