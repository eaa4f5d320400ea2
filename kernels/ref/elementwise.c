// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

#include <math.h>

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

nd_status nd_ref_embedding_fwd(nd_stream *stream, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first)
{
    int64_t n = out.shape[0], C = out.shape[1], V = table.shape[0];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_2d_of(table, out.dtype, V, C));
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = ((const int32_t *)ids.data)[i] - first;
        bool here = row >= 0 && row < V;
        for (int64_t c = 0; c < C; c++) {
            nd_ref_put(out, i * out.stride[0] + c,
                       here ? nd_ref_get(table, row * table.stride[0] + c) : 0.0);
        }
    }
    return ND_OK;
}

nd_status nd_ref_embedding_bwd(nd_stream *stream, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first)
{
    int64_t n = dout.shape[0], C = dout.shape[1], V = dtable.shape[0];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C));
    ND_ASSERT(nd_is_2d_of(dtable, ND_DTYPE_F32, V, C) && nd_is_vector(ids, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = ((const int32_t *)ids.data)[i] - first;
        if (row < 0 || row >= V) {
            continue;
        }
        float *sum = (float *)dtable.data + row * dtable.stride[0];
        for (int64_t c = 0; c < C; c++) {
            sum[c] += nd_ref_get(dout, i * dout.stride[0] + c);
        }
    }
    return ND_OK;
}

static void store_copy(const nd_flat_range *range, int64_t i, float p)
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
            store_copy(&ranges[r], i, p[i]);
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
            store_copy(&ranges[r], i, p[i]);
        }
    }
    return ND_OK;
}
