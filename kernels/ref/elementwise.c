// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

#include <math.h>
#include <string.h>

#include "runtime/base/rng.h"

nd_status nd_ref_accumulate(nd_stream *stream, const nd_accumulate_args *args)
{
    const nd_tensor acc = args->acc, x = args->x;
    int64_t count = nd_tensor_count(acc);
    ND_ASSERT(acc.dtype == ND_DTYPE_F32 && nd_is_act(x) && nd_tensor_count(x) == count);
    for (int64_t i = 0; i < count; i++) {
        int64_t at = nd_offset_of(acc, i);
        nd_ref_put(acc, at, nd_ref_get(acc, at) + nd_ref_get(x, nd_offset_of(x, i)));
    }
    return ND_OK;
}

nd_status nd_ref_cast(nd_stream *stream, const nd_cast_args *args)
{
    const nd_tensor out = args->out, x = args->x;
    int64_t count = nd_tensor_count(out);
    ND_ASSERT(nd_is_act(out) && nd_is_act(x) && nd_tensor_count(x) == count);
    for (int64_t i = 0; i < count; i++) {
        nd_ref_put(out, nd_offset_of(out, i), nd_ref_get(x, nd_offset_of(x, i)));
    }
    return ND_OK;
}

nd_status nd_ref_axpy(nd_stream *stream, const nd_axpy_args *args)
{
    const nd_tensor out = args->out, x = args->x, plus = args->plus;
    const int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_2d_of(x, out.dtype, n, C));
    ND_ASSERT(!plus.data || nd_is_2d_of(plus, out.dtype, n, C));
    for (int64_t i = 0; i < n; i++) {
        for (int64_t c = 0; c < C; c++) {
            double sum = (double)args->scale * nd_ref_get(x, i * x.stride[0] + c);
            sum += plus.data ? nd_ref_get(plus, i * plus.stride[0] + c) : 0.0;
            nd_ref_put(out, i * out.stride[0] + c, sum);
        }
    }
    return ND_OK;
}

nd_status nd_ref_sum_squares(nd_stream *stream, const nd_sum_squares_args *args)
{
    double sum = 0.0;
    for (int64_t i = 0; i < args->count; i++) {
        sum += (double)args->x[i] * args->x[i];
    }
    *args->out += sum;
    return ND_OK;
}

nd_status nd_ref_digest(nd_stream *stream, const nd_digest_args *args)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < args->count; i++) {
        uint32_t bits;
        memcpy(&bits, &args->x[i], sizeof bits);
        sum += (2 * (uint64_t)i + 1) * bits;
    }
    *args->out += sum;
    return ND_OK;
}

nd_status nd_ref_random_normal(nd_stream *stream, const nd_random_normal_args *args)
{
    for (int64_t i = 0; i < args->count; i++) {
        args->out[i] = args->deviation *
                       nd_rng_normal(args->seed, args->random_stream, args->first + (uint64_t)i);
    }
    return ND_OK;
}

nd_status nd_ref_embedding_fwd(nd_stream *stream, const nd_embedding_fwd_args *args)
{
    const nd_tensor out = args->out, ids = args->ids, table = args->table;
    int64_t n = out.shape[0], C = out.shape[1], V = table.shape[0];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_2d_of(table, out.dtype, V, C));
    ND_ASSERT(nd_is_vector(ids, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = ((const int32_t *)ids.data)[i] - args->first;
        bool here = row >= 0 && row < V;
        for (int64_t c = 0; c < C; c++) {
            nd_ref_put(out, i * out.stride[0] + c,
                       here ? nd_ref_get(table, row * table.stride[0] + c) : 0.0);
        }
    }
    return ND_OK;
}

nd_status nd_ref_embedding_bwd(nd_stream *stream, const nd_embedding_bwd_args *args)
{
    const nd_tensor dtable = args->dtable, ids = args->ids, dout = args->dout;
    int64_t n = dout.shape[0], C = dout.shape[1], V = dtable.shape[0];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C));
    ND_ASSERT(nd_is_2d_of(dtable, ND_DTYPE_F32, V, C) && nd_is_vector(ids, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t row = ((const int32_t *)ids.data)[i] - args->first;
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

/* The copy and the amax of a range. */
static void store_copy(const nd_flat_range *range, int64_t i, float p)
{
    if (range->copy) {
        range->copy[i - range->begin] = nd_bf16_from_f32(p);
    }
    if (range->amax) {
        *range->amax = nd_ref_larger(*range->amax, fabsf(p));
    }
}

nd_status nd_ref_adamw(nd_stream *stream, const nd_adamw_args *args)
{
    const nd_adamw *o = &args->hyper;
    float *p = args->p, *m = args->m, *v = args->v;
    const nd_flat_range *ranges = args->ranges;
    for (int r = 0; r < args->range_count; r++) {
        float decay = ranges[r].decay ? o->lr * o->weight_decay : 0.0f;
        for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) {
            float g = args->grad[i] * o->grad_scale;
            p[i] -= decay * p[i];
            m[i] = o->beta1 * m[i] + (1.0f - o->beta1) * g;
            v[i] = o->beta2 * v[i] + (1.0f - o->beta2) * g * g;
            p[i] -= o->lr * (m[i] / o->bias1) / (sqrtf(v[i] / o->bias2) + o->eps);
            store_copy(&ranges[r], i, p[i]);
        }
    }
    return ND_OK;
}

nd_status nd_ref_sgd(nd_stream *stream, const nd_sgd_args *args)
{
    const nd_adamw *o = &args->hyper;
    float *p = args->p;
    const nd_flat_range *ranges = args->ranges;
    for (int r = 0; r < args->range_count; r++) {
        float decay = ranges[r].decay ? o->weight_decay : 0.0f;
        for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) {
            p[i] -= o->lr * (args->grad[i] * o->grad_scale + decay * p[i]);
            store_copy(&ranges[r], i, p[i]);
        }
    }
    return ND_OK;
}
