// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/kv_cache.h"

#include <math.h>

#include "runtime/base/math.h"

/* Columns of a row: keys, then values. */
static int64_t width_of(const nd_dims *d)
{
    return 2 * d->K * d->D;
}

int64_t nd_kv_round_rows(int64_t rows, int64_t unit, int64_t most)
{
    int64_t step = 1;
    while (16 * step <= rows) { /* the smallest power of two above a sixteenth of the rows */
        step *= 2;
    }
    return nd_min(nd_round_up(nd_round_up(rows, step), unit), most);
}

size_t nd_kv_cache_bytes(const nd_dims *d, nd_layer_range layers, int64_t slots, int64_t capacity)
{
    return (size_t)((layers.end - layers.begin) * slots * capacity * width_of(d)) *
           nd_dtype_size(d->act);
}

/* Rows of a segment against the keys of its slot. */
static nd_attention attention_of(const nd_dims *d, int64_t length, int64_t rows)
{
    return (nd_attention){.batch = 1,
                          .sq = rows,
                          .sk = length + rows,
                          .heads = d->H,
                          .kv_heads = d->K,
                          .head_dim = d->D,
                          .diag = length,
                          .scale = (float)(1.0 / sqrt((double)d->D))};
}

/* What is enough for any segment: no extent of one is larger, but a shorter one may be cut into
 * other tasks. */
static size_t scratch_bytes(const nd_kv_cache *cache)
{
    const nd_rank *r = cache->rank;
    size_t bytes = 0;
    for (int64_t rows = 1;; rows = nd_min(2 * rows, cache->dims.T)) {
        nd_attention a = attention_of(&cache->dims, nd_max(cache->capacity - rows, 0),
                                      nd_min(rows, cache->capacity));
        bytes =
            nd_max_bytes(bytes, r->ops->attention_scratch(r->device, &a, cache->dims.act, false));
        if (rows == cache->dims.T) {
            return bytes;
        }
    }
}

void nd_kv_cache_plan(nd_kv_cache *cache, nd_rank *rank, const nd_dims *dims, nd_layer_range layers,
                      const nd_kv_options *o, nd_memplan *plan)
{
    *cache = (nd_kv_cache){
        .rank = rank, .dims = *dims, .layers = layers, .slots = o->slots, .capacity = o->capacity};
    nd_memplan_want(plan, ND_MEM_CACHE, "keys and values",
                    nd_kv_cache_bytes(dims, layers, o->slots, o->capacity), &cache->memory);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention lse",
                    (size_t)(dims->T * dims->H) * sizeof *cache->lse, &cache->lse);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks", scratch_bytes(cache),
                    &cache->scratch);
}

void nd_kv_cache_begin(nd_kv_cache *cache, const nd_kv_call *call, int64_t T)
{
    int64_t rows = 0;
    for (int64_t i = 0; i < call->count; i++) {
        const nd_kv_segment *s = &call->segments[i];
        ND_ASSERT(s->slot >= 0 && s->slot < cache->slots && s->length >= 0 && s->rows >= 1);
        ND_ASSERT(s->length + s->rows <= cache->capacity);
        rows += s->rows;
    }
    ND_ASSERT(rows <= T && T <= cache->dims.T);
    cache->call = *call;
}

/* Rows [begin, begin + count) of a slot: (count, 2 K D). */
static nd_tensor slot_rows(const nd_kv_cache *cache, int64_t layer, int64_t slot, int64_t begin,
                           int64_t count)
{
    const nd_dims *d = &cache->dims;
    int64_t row = ((layer - cache->layers.begin) * cache->slots + slot) * cache->capacity + begin;
    char *data = (char *)cache->memory + (size_t)(row * width_of(d)) * nd_dtype_size(d->act);
    return nd_tensor_2d(data, d->act, count, width_of(d));
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

/* qkv (rows, QKV) and o (rows, H D) of one segment. */
static nd_status attend(nd_kv_cache *cache, int64_t layer, const nd_kv_segment *s, nd_tensor qkv,
                        nd_tensor o)
{
    const nd_dims *d = &cache->dims;
    nd_attention a = attention_of(d, s->length, s->rows);
    nd_tensor all = slot_rows(cache, layer, s->slot, 0, a.sk);
    ND_OP(cache->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_rows(all, s->length, s->rows),
          .x = nd_tensor_columns(qkv, d->H * d->D, width_of(d)));
    ND_OP(cache->rank, ND_TRACE_ATTENTION, attention_fwd, .attention = a,
          .out = heads_of(o, 0, d->H, d->D),
          .lse = nd_tensor_3d(cache->lse, ND_DTYPE_F32, 1, d->H, s->rows),
          .q = heads_of(qkv, 0, d->H, d->D), .k = heads_of(all, 0, d->K, d->D),
          .v = heads_of(all, d->K * d->D, d->K, d->D), .scratch = cache->scratch);
    return ND_OK;
}

nd_status nd_kv_cache_attention(nd_kv_cache *cache, int64_t layer, nd_tensor qkv, nd_tensor o)
{
    int64_t row = 0, T = qkv.shape[0];
    for (int64_t i = 0; i < cache->call.count; i++) {
        const nd_kv_segment *s = &cache->call.segments[i];
        ND_TRY(attend(cache, layer, s, nd_tensor_rows(qkv, row, s->rows),
                      nd_tensor_rows(o, row, s->rows)));
        row += s->rows;
    }
    nd_tensor rest = nd_tensor_rows(o, row, T - row);
    return row < T ? nd_zero(&cache->rank->stream, rest.data, nd_tensor_bytes(rest)) : ND_OK;
}
