// SPDX-License-Identifier: Apache-2.0
#include "kernels/cached.h"

#include "kernels/ops_check.h"
#include "runtime/base/math.h"

nd_attention nd_attention_of_segment(const nd_attention *a, int64_t rows, int64_t tokens)
{
    return (nd_attention){.batch = 1,
                          .sq = rows,
                          .sk = tokens,
                          .heads = a->heads,
                          .kv_heads = a->kv_heads,
                          .head_dim = a->head_dim,
                          .diag = tokens - rows,
                          .scale = a->scale,
                          .window = a->window};
}

size_t nd_cached_lse_bytes(const nd_attention *a, int64_t rows)
{
    return nd_round_up_bytes((size_t)(rows * a->heads) * sizeof(float), 64);
}

/* (1, rows, heads, D) of rows with free strides: `heads` heads from column `column`. */
static nd_tensor heads_of(nd_tensor rows, int64_t column, int64_t heads, int64_t D)
{
    nd_tensor from = nd_tensor_columns(rows, column, heads * D);
    nd_tensor v = nd_tensor_4d(from.data, from.dtype, 1, rows.shape[0], heads, D);
    v.stride[0] = rows.shape[0] * rows.stride[0];
    v.stride[1] = rows.stride[0];
    return v;
}

/* The first `count` rows of a slot: (count, 2 K D). */
static nd_tensor slot_rows(nd_tensor cache, int64_t slot, int64_t count)
{
    const int64_t at = slot * cache.stride[0];
    char *data = (char *)cache.data + at * (int64_t)nd_dtype_size(cache.dtype);
    return nd_tensor_2d(data, cache.dtype, count, cache.shape[2]);
}

/* qkv and out: rows of one segment. */
static nd_status attend(nd_stream *stream, const nd_cached_ops *ops,
                        const nd_attention_cached_args *x, const nd_kv_segment *s, nd_tensor qkv,
                        nd_tensor out)
{
    const int64_t H = x->attention.heads, K = x->attention.kv_heads, D = x->attention.head_dim;
    const nd_attention a = nd_attention_of_segment(&x->attention, s->rows, s->length + s->rows);
    const nd_tensor all = slot_rows(x->cache, s->slot, a.sk);
    ND_TRY(ops->cast(stream, &(nd_cast_args){.out = nd_tensor_rows(all, s->length, s->rows),
                                             .x = nd_tensor_columns(qkv, H * D, 2 * K * D)}));
    return ops->attention_fwd(
        stream, &(nd_attention_fwd_args){
                    .attention = a,
                    .out = heads_of(out, 0, H, D),
                    .lse = nd_tensor_3d(x->scratch, ND_DTYPE_F32, 1, H, s->rows),
                    .q = heads_of(qkv, 0, H, D),
                    .k = heads_of(all, 0, K, D),
                    .v = heads_of(all, K * D, K, D),
                    .scratch = (char *)x->scratch + nd_cached_lse_bytes(&x->attention, s->rows),
                    .few_rows = true});
}

nd_status nd_attention_cached_by(nd_stream *stream, const nd_cached_ops *ops,
                                 const nd_attention_cached_args *x)
{
    int64_t row = 0;
    ND_ASSERT(x->cache.axes == 3 && nd_tensor_is_contiguous(x->cache));
    for (int64_t i = 0; i < x->count; i++) {
        const nd_kv_segment *s = &x->segments[i];
        ND_ASSERT(s->slot >= 0 && s->slot < x->cache.shape[0] && s->length >= 0 && s->rows >= 1);
        ND_ASSERT(s->length + s->rows <= x->cache.shape[1]);
        ND_TRY(attend(stream, ops, x, s, nd_tensor_rows(x->qkv, row, s->rows),
                      nd_tensor_rows(x->out, row, s->rows)));
        row += s->rows;
    }
    return ND_OK;
}
