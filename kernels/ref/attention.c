// SPDX-License-Identifier: Apache-2.0
#include "kernels/cached.h"
#include "kernels/ref/ref.h"

/*
 * Scores are computed again wherever they are needed, so scratch holds only the F64 sums of one
 * row: 2 D numbers. The backward runs twice over all pairs, once by query for dq and once by key
 * for dk and dv.
 */

static int64_t at4(nd_tensor t, int64_t b, int64_t s, int64_t h)
{
    return b * t.stride[0] + s * t.stride[1] + h * t.stride[2];
}

/* <x(b, i, h), y(b, j, g)> over the head size. */
static double dot(nd_tensor x, int64_t at_x, nd_tensor y, int64_t at_y, int64_t D)
{
    double sum = 0.0;
    for (int64_t d = 0; d < D; d++) {
        sum += (double)nd_ref_get(x, at_x + d) * nd_ref_get(y, at_y + d);
    }
    return sum;
}

static void check_queries(const nd_attention *a, nd_tensor t)
{
    ND_ASSERT(nd_is_act(t) && nd_is_4d(t, a->batch, a->sq, a->heads, a->head_dim));
}

static void check_keys(const nd_attention *a, nd_tensor t)
{
    ND_ASSERT(nd_is_act(t) && nd_is_4d(t, a->batch, a->sk, a->kv_heads, a->head_dim));
}

static void check_rows(const nd_attention *a, nd_tensor t)
{
    ND_ASSERT(nd_is_vector(t, ND_DTYPE_F32, a->batch * a->heads * a->sq));
    ND_ASSERT(a->kv_heads > 0 && a->heads % a->kv_heads == 0);
}

size_t nd_ref_attention_scratch(const nd_device *device, const nd_attention *a, nd_dtype act,
                                bool backward)
{
    return 2 * (size_t)a->head_dim * sizeof(double);
}

bool nd_ref_attention_uses_delta(const nd_device *device, const nd_attention *a, nd_dtype act)
{
    return true;
}

/* One query: out = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m), lse = m + log(sum). */
static void forward_row(const nd_attention_fwd_args *x, int64_t b, int64_t h, int64_t i)
{
    const nd_attention *a = &x->attention;
    const nd_tensor q = x->q, k = x->k, v = x->v;
    int64_t D = a->head_dim, kv = h / (a->heads / a->kv_heads);
    const nd_key_range keys = nd_visible_keys(a, x->first_key, x->end_key, b, i);
    const bool blind = keys.begin >= keys.end;
    int64_t at_q = at4(q, b, i, h), at_out = at4(x->out, b, i, h);
    double max = -INFINITY, total = 0.0, *sums = x->scratch;
    for (int64_t j = keys.begin; j < keys.end; j++) {
        max = fmax(max, a->scale * dot(q, at_q, k, at4(k, b, j, kv), D));
    }
    for (int64_t d = 0; d < D; d++) {
        sums[d] = 0.0;
    }
    for (int64_t j = keys.begin; j < keys.end; j++) {
        double p = exp(a->scale * dot(q, at_q, k, at4(k, b, j, kv), D) - max);
        total += p;
        for (int64_t d = 0; d < D; d++) {
            sums[d] += p * nd_ref_get(v, at4(v, b, j, kv) + d);
        }
    }
    ((float *)x->lse.data)[(b * a->heads + h) * a->sq + i] =
        blind ? -INFINITY : (float)(max + log(total));
    for (int64_t d = 0; d < D; d++) {
        nd_ref_put(x->out, at_out + d, blind ? 0.0 : sums[d] / total);
    }
}

nd_status nd_ref_attention_fwd(nd_stream *stream, const nd_attention_fwd_args *args)
{
    const nd_attention *a = &args->attention;
    check_queries(a, args->out);
    check_queries(a, args->q);
    check_keys(a, args->k);
    check_keys(a, args->v);
    check_rows(a, args->lse);
    ND_ASSERT(nd_are_bounds(args->first_key, args->end_key, a));
    for (int64_t b = 0; b < a->batch; b++) {
        for (int64_t h = 0; h < a->heads; h++) {
            for (int64_t i = 0; i < a->sq; i++) {
                forward_row(args, b, h, i);
            }
        }
    }
    return ND_OK;
}

nd_status nd_ref_attention_delta(nd_stream *stream, const nd_attention_delta_args *args)
{
    const nd_attention *a = &args->attention;
    const nd_tensor delta = args->delta, out = args->out, dout = args->dout;
    check_queries(a, out);
    check_queries(a, dout);
    check_rows(a, delta);
    for (int64_t b = 0; b < a->batch; b++) {
        for (int64_t h = 0; h < a->heads; h++) {
            for (int64_t i = 0; i < a->sq; i++) {
                ((float *)delta.data)[(b * a->heads + h) * a->sq + i] =
                    (float)dot(out, at4(out, b, i, h), dout, at4(dout, b, i, h), a->head_dim);
            }
        }
    }
    return ND_OK;
}

typedef struct pair {
    double p, ds; /* probability of key j for query i, and the gradient of the raw product <q, k> */
} pair;

/* p = exp(s - lse); dp = <dout, v>; ds = p (dp - delta) scale. */
static pair pair_of(const nd_attention_bwd_args *x, int64_t b, int64_t h, int64_t i, int64_t j)
{
    const nd_attention *a = &x->attention;
    int64_t kv = h / (a->heads / a->kv_heads), D = a->head_dim;
    int64_t row = (b * a->heads + h) * a->sq + i;
    double s = a->scale * dot(x->q, at4(x->q, b, i, h), x->k, at4(x->k, b, j, kv), D);
    double dp = dot(x->dout, at4(x->dout, b, i, h), x->v, at4(x->v, b, j, kv), D);
    double p = exp(s - ((const float *)x->lse.data)[row]);
    return (pair){p, p * (dp - ((const float *)x->delta.data)[row]) * a->scale};
}

static void store_row(nd_tensor t, int64_t at, const double *sums, int64_t D, bool add)
{
    for (int64_t d = 0; d < D; d++) {
        nd_ref_put(t, at + d, (add ? nd_ref_get(t, at + d) : 0.0) + sums[d]);
    }
}

/* dq_i = sum_j ds_ij k_j. */
static void backward_query(const nd_attention_bwd_args *x, int64_t b, int64_t h, int64_t i)
{
    const nd_attention *a = &x->attention;
    double *sums = x->scratch;
    int64_t kv = h / (a->heads / a->kv_heads), D = a->head_dim;
    for (int64_t d = 0; d < D; d++) {
        sums[d] = 0.0;
    }
    const nd_key_range keys = nd_visible_keys(a, x->first_key, x->end_key, b, i);
    for (int64_t j = keys.begin; j < keys.end; j++) {
        pair y = pair_of(x, b, h, i, j);
        for (int64_t d = 0; d < D; d++) {
            sums[d] += y.ds * nd_ref_get(x->k, at4(x->k, b, j, kv) + d);
        }
    }
    store_row(x->dq, at4(x->dq, b, i, h), sums, D, x->add_q);
}

/* dk_j = sum_i ds_ij q_i and dv_j = sum_i p_ij dout_i, over all query heads of the group. */
static void backward_key(const nd_attention_bwd_args *x, int64_t b, int64_t kv, int64_t j)
{
    const nd_attention *a = &x->attention;
    int64_t group = a->heads / a->kv_heads, D = a->head_dim;
    double *sums_k = x->scratch, *sums_v = sums_k + D;
    for (int64_t d = 0; d < D; d++) {
        sums_k[d] = sums_v[d] = 0.0;
    }
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
        for (int64_t i = 0; i < a->sq; i++) {
            const nd_key_range keys = nd_visible_keys(a, x->first_key, x->end_key, b, i);
            if (j < keys.begin || j >= keys.end) {
                continue;
            }
            pair y = pair_of(x, b, h, i, j);
            for (int64_t d = 0; d < D; d++) {
                sums_k[d] += y.ds * nd_ref_get(x->q, at4(x->q, b, i, h) + d);
                sums_v[d] += y.p * nd_ref_get(x->dout, at4(x->dout, b, i, h) + d);
            }
        }
    }
    store_row(x->dk, at4(x->dk, b, j, kv), sums_k, D, x->add_kv);
    store_row(x->dv, at4(x->dv, b, j, kv), sums_v, D, x->add_kv);
}

nd_status nd_ref_attention_bwd(nd_stream *stream, const nd_attention_bwd_args *args)
{
    const nd_attention *a = &args->attention;
    check_queries(a, args->q);
    check_queries(a, args->dout);
    check_queries(a, args->dq);
    check_keys(a, args->k);
    check_keys(a, args->v);
    check_keys(a, args->dk);
    check_keys(a, args->dv);
    check_rows(a, args->lse);
    check_rows(a, args->delta);
    ND_ASSERT(nd_are_bounds(args->first_key, args->end_key, a));
    ND_ASSERT(!args->add_q || args->dq.dtype == ND_DTYPE_F32);
    ND_ASSERT(!args->add_kv || (args->dk.dtype == ND_DTYPE_F32 && args->dv.dtype == ND_DTYPE_F32));
    for (int64_t b = 0; b < a->batch; b++) {
        for (int64_t h = 0; h < a->heads; h++) {
            for (int64_t i = 0; i < a->sq; i++) {
                backward_query(args, b, h, i);
            }
        }
        for (int64_t kv = 0; kv < a->kv_heads; kv++) {
            for (int64_t j = 0; j < a->sk; j++) {
                backward_key(args, b, kv, j);
            }
        }
    }
    return ND_OK;
}

/* The larger lse is subtracted first, so that nothing overflows; where acc_lse is -inf acc is not
 * read. */
nd_status nd_ref_lse_merge(nd_stream *stream, const nd_lse_merge_args *args)
{
    const nd_attention *a = &args->attention;
    const nd_tensor acc = args->acc, acc_lse = args->acc_lse, out = args->out, lse = args->lse;
    check_queries(a, acc);
    check_queries(a, out);
    check_rows(a, acc_lse);
    check_rows(a, lse);
    ND_ASSERT(acc.dtype == ND_DTYPE_F32);
    for (int64_t b = 0; b < a->batch; b++) {
        for (int64_t h = 0; h < a->heads; h++) {
            for (int64_t i = 0; i < a->sq; i++) {
                int64_t row = (b * a->heads + h) * a->sq + i;
                float *old = (float *)acc_lse.data + row;
                float new = ((const float *)lse.data)[row];
                if (new == -INFINITY) {
                    continue;
                }
                double max = fmax(*old, new);
                double merged = max + log(exp(*old - max) + exp(new - max));
                double keep = exp(*old - merged), take = exp(new - merged);
                for (int64_t d = 0; d < a->head_dim; d++) {
                    int64_t at = at4(acc, b, i, h) + d;
                    double taken = nd_ref_get(out, at4(out, b, i, h) + d) * take;
                    double kept = keep == 0.0 ? 0.0 : nd_ref_get(acc, at) * keep;
                    nd_ref_put(acc, at, kept + taken);
                }
                *old = (float)merged;
            }
        }
    }
    return ND_OK;
}

size_t nd_ref_attention_cached_scratch(const nd_device *device, const nd_attention *most,
                                       nd_dtype act)
{
    return nd_cached_lse_bytes(most, most->sq) + nd_ref_attention_scratch(device, most, act, false);
}

nd_status nd_ref_attention_cached(nd_stream *stream, const nd_attention_cached_args *x)
{
    const nd_cached_ops ops = {nd_ref_cast, nd_ref_attention_fwd};
    return nd_attention_cached_by(stream, &ops, x);
}
