// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/attention.h"

#include <math.h>

#include "kernels/cpu/context.h"

int64_t nd_attention_sight_words(const nd_attention *a)
{
    return a->batch * nd_attention_row_blocks(a) * (int64_t)(sizeof(nd_seen_keys) / 4);
}

static nd_seen_keys look_at_block(const nd_sight *s, int64_t b, int64_t q0)
{
    const int64_t q_end = nd_min(q0 + ND_TILE, s->a->sq);
    int64_t begin = s->a->sk, all = 0, all_end = s->a->sk, end = 0;
    for (int64_t i = q0; i < q_end; i++) {
        const nd_key_range keys = nd_visible_keys(s->a, s->first_key, s->end_key, b, i);
        if (keys.begin < keys.end) {
            begin = nd_min(begin, keys.begin);
            end = nd_max(end, keys.end);
        }
        all = nd_max(all, keys.begin);
        all_end = nd_min(all_end, keys.end);
    }
    return (nd_seen_keys){(int32_t)nd_min(begin, end), (int32_t)all, (int32_t)all_end,
                          (int32_t)end};
}

void nd_attention_look(const nd_sight *s)
{
    const int64_t blocks = nd_attention_row_blocks(s->a);
    for (int64_t i = 0; i < s->a->batch * blocks; i++) {
        s->blocks[i] = look_at_block(s, i / blocks, i % blocks * ND_TILE);
    }
}

static int32_t limit_of(int64_t key, int64_t key0, int keys)
{
    return (int32_t)nd_min(nd_max(key - key0, -1), keys);
}

const nd_key_limits *nd_attention_limits(const nd_sight *s, int64_t b, int64_t q0, int64_t key0,
                                         int keys, nd_key_limits *limits)
{
    const nd_attention *a = s->a;
    const nd_seen_keys *sees = nd_attention_seen(s, b, q0);
    if (sees->all <= key0 && key0 + keys <= sees->all_end) {
        return NULL;
    }
    for (int r = 0; r < ND_TILE; r++) { /* rows behind the last query are as that one */
        const nd_key_range seen =
            nd_visible_keys(a, s->first_key, s->end_key, b, nd_min(q0 + r, a->sq - 1));
        limits->first[r] = limit_of(seen.begin, key0, keys);
        limits->last[r] = limit_of(seen.end - 1, key0, keys);
    }
    return limits;
}

void *nd_attention_cut(char *base, size_t *used, int64_t count)
{
    size_t at = *used;
    *used += nd_round_up_bytes((size_t)count * 4, 64);
    return base ? base + at : NULL;
}

/* delta: one pass over rows of D */

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

static void delta_tokens(const nd_row_ops *rows, const void *arg, int64_t begin, int64_t end)
{
    const nd_attention_delta_args *args = arg;
    const nd_attention *a = &args->attention;
    const nd_tensor out = args->out, dout = args->dout;
    float *to = args->delta.data;
    for (int64_t token = begin; token < end; token++) {
        const int64_t b = token / a->sq, i = token % a->sq;
        for (int64_t h = 0; h < a->heads; h++) {
            to[(b * a->heads + h) * a->sq + i] =
                dot(nd_attention_row(out, b, i, h), out.dtype == ND_DTYPE_BF16,
                    nd_attention_row(dout, b, i, h), dout.dtype == ND_DTYPE_BF16, a->head_dim);
        }
    }
}

nd_status nd_cpu_attention_delta(nd_stream *stream, const nd_attention_delta_args *args)
{
    const nd_attention *a = &args->attention;
    nd_cpu_each(stream, a->batch * a->sq, a->heads * a->head_dim, delta_tokens, args);
    return ND_OK;
}

/*
 * With e = exp(-|old - new|): lse' = max(old, new) + log(1 + e), and the sides weigh 1 / (1 + e)
 * and e / (1 + e), the larger one the former. A side of -inf gives e = 0. A side of weight 0 is not
 * read: acc may be uninitialised at first.
 */
static void merge_row(const nd_row_ops *rows, const nd_lse_merge_args *w, int64_t b, int64_t i,
                      int64_t h)
{
    const nd_attention *a = &w->attention;
    const int64_t row = (b * a->heads + h) * a->sq + i, D = a->head_dim;
    float *acc = nd_attention_row(w->acc, b, i, h), *acc_lse = (float *)w->acc_lse.data + row;
    const void *out = nd_attention_row(w->out, b, i, h);
    const float old = *acc_lse, new = ((const float *)w->lse.data)[row];
    if (new == -INFINITY) {
        return;
    }
    float e = expf(-fabsf(old - new)), large = 1.0f / (1.0f + e), small = e / (1.0f + e);
    bool keep_more = old > new;
    *acc_lse = (keep_more ? old : new) + log1pf(e);
    if (!keep_more && small == 0.0f) {
        rows->cast(acc, ND_DTYPE_F32, out, w->out.dtype, D);
    } else if (small != 0.0f) {
        rows->blend(acc, keep_more ? large : small, out, keep_more ? small : large, D,
                    w->out.dtype == ND_DTYPE_BF16);
    }
}

static void merge_tokens(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_lse_merge_args *w = args;
    for (int64_t token = begin; token < end; token++) {
        for (int64_t h = 0; h < w->attention.heads; h++) {
            merge_row(rows, w, token / w->attention.sq, token % w->attention.sq, h);
        }
    }
}

nd_status nd_cpu_lse_merge(nd_stream *stream, const nd_lse_merge_args *args)
{
    const nd_attention *a = &args->attention;
    const nd_tensor acc = args->acc, acc_lse = args->acc_lse, out = args->out, lse = args->lse;
    int64_t rows = a->batch * a->heads * a->sq;
    ND_ASSERT(nd_is_4d(acc, a->batch, a->sq, a->heads, a->head_dim) && acc.dtype == ND_DTYPE_F32);
    ND_ASSERT(nd_is_4d(out, a->batch, a->sq, a->heads, a->head_dim) && nd_is_act(out));
    ND_ASSERT(nd_is_vector(acc_lse, ND_DTYPE_F32, rows) && nd_is_vector(lse, ND_DTYPE_F32, rows));
    nd_cpu_each(stream, a->batch * a->sq, a->heads * a->head_dim, merge_tokens, args);
    return ND_OK;
}
