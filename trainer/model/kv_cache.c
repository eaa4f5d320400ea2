// SPDX-License-Identifier: Apache-2.0
#include "trainer/model/kv_cache.h"

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

/* The extents of the largest segment. */
static nd_attention largest(const nd_kv_cache *cache)
{
    const nd_dims *d = &cache->dims;
    return (nd_attention){.batch = 1,
                          .sq = d->T,
                          .sk = cache->capacity,
                          .heads = d->H,
                          .kv_heads = d->K,
                          .head_dim = d->D,
                          .diag = cache->capacity,
                          .scale = d->attention_scale};
}

void nd_kv_cache_plan(nd_kv_cache *cache, nd_rank *rank, const nd_dims *dims, nd_layer_range layers,
                      const nd_kv_options *o, nd_memplan *plan)
{
    *cache = (nd_kv_cache){
        .rank = rank, .dims = *dims, .layers = layers, .slots = o->slots, .capacity = o->capacity};
    const int64_t rows = (layers.end - layers.begin) * o->slots * o->capacity;
    nd_memplan_want(plan, ND_MEM_CACHE, "keys and values",
                    (size_t)(rows * width_of(dims)) * nd_dtype_size(dims->act), &cache->memory);
    const nd_attention most = largest(cache);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks",
                    rank->ops->attention_cached_scratch(rank->device, &most, dims->act),
                    &cache->scratch);
}

int64_t nd_kv_cache_begin(nd_kv_cache *cache, const nd_kv_call *call, int64_t unit)
{
    cache->call = *call;
    cache->rows = 0;
    for (int64_t i = 0; i < call->count; i++) {
        const nd_kv_segment *s = &call->segments[i];
        ND_ASSERT(s->slot >= 0 && s->slot < cache->slots && s->length >= 0 && s->rows >= 1);
        ND_ASSERT(s->length + s->rows <= cache->capacity);
        cache->rows += s->rows;
    }
    ND_ASSERT(cache->rows <= cache->dims.T);
    return nd_kv_round_rows(cache->rows, unit, cache->dims.T);
}

nd_status nd_kv_cache_attention(nd_kv_cache *cache, int64_t layer, nd_tensor qkv, nd_tensor o)
{
    const int64_t rows = cache->rows, T = qkv.shape[0];
    const nd_dims *d = &cache->dims;
    const int64_t before = (layer - cache->layers.begin) * cache->slots * cache->capacity;
    char *slots = (char *)cache->memory + (size_t)(before * width_of(d)) * nd_dtype_size(d->act);
    nd_attention a = largest(cache);
    a.window = nd_shape_window(&cache->rank->shape, layer, cache->capacity);
    ND_OP(cache->rank, ND_TRACE_ATTENTION, attention_cached, .attention = a,
          .out = nd_tensor_rows(o, 0, rows), .qkv = nd_tensor_rows(qkv, 0, rows),
          .cache = nd_tensor_3d(slots, d->act, cache->slots, cache->capacity, width_of(d)),
          .segments = cache->call.segments, .count = cache->call.count, .scratch = cache->scratch);
    nd_tensor rest = nd_tensor_rows(o, rows, T - rows);
    return rows < T ? nd_zero(&cache->rank->stream, rest.data, nd_tensor_bytes(rest)) : ND_OK;
}
