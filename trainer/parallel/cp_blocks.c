// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

#include <string.h>

int nd_cp_blocks_gathered(int size, int index, int step, int64_t chunk, int64_t window,
                          nd_attention_block out[ND_CP_BLOCKS])
{
    if (size == 1) {
        out[0] = (nd_attention_block){0, 0, chunk, 0};
        return 1;
    }
    int64_t place[2] = {index, 2 * size - 1 - index};
    for (int c = 0; c < 2; c++) {
        out[c] = (nd_attention_block){c, 0, (place[c] + 1) * chunk, place[c] * chunk};
    }
    return 2;
}

/* With a window a block is a chunk of queries and one of keys, some of which it sees: first those
 * with the same number, where both are this rank's. */
static int blocks_with_window(int size, int index, int step, int64_t chunk, int64_t window,
                              nd_attention_block out[ND_CP_BLOCKS])
{
    const int64_t from = (index - step + size) % size;
    const int64_t queries[2] = {index, 2 * size - 1 - index}, keys[2] = {from, 2 * size - 1 - from};
    int count = 0;
    for (int64_t pair = 0; pair < 4; pair++) {
        const int64_t q = pair % 2, k = pair < 2 ? q : 1 - q;
        const int64_t between = (queries[q] - keys[k]) * chunk;
        if (between >= 0 && between - chunk + 1 < window) {
            out[count++] = (nd_attention_block){(int)q, k * chunk, chunk, between};
        }
    }
    return count;
}

int nd_cp_blocks_ring(int size, int index, int step, int64_t chunk, int64_t window,
                      nd_attention_block out[ND_CP_BLOCKS])
{
    if (size == 1) {
        return nd_cp_blocks_gathered(size, index, step, chunk, window, out);
    }
    if (window > 0) {
        return blocks_with_window(size, index, step, chunk, window, out);
    }
    if (step == 0) {
        out[0] = (nd_attention_block){0, 0, chunk, 0};
        out[1] = (nd_attention_block){1, 0, 2 * chunk, chunk};
        return 2;
    }
    if (step <= index) { /* an earlier rank: one chunk before both of ours, one after */
        out[0] = (nd_attention_block){0, 0, chunk, chunk};
        out[1] = (nd_attention_block){1, 0, chunk, chunk};
        return 2;
    }
    /* A later rank: both its chunks are before our second one. */
    out[0] = (nd_attention_block){1, 0, 2 * chunk, 2 * chunk};
    return 1;
}

nd_attention nd_cp_attention_of(const nd_cp *cp, const nd_attention_block *block)
{
    const nd_dims *d = &cp->dims;
    return (nd_attention){
        .batch = d->B,
        .sq = d->chunk,
        .sk = block->kv_count,
        .heads = d->H,
        .kv_heads = d->K,
        .head_dim = d->D,
        .diag = block->diag,
        .scale = d->attention_scale,
        .window = cp->sight.window,
    };
}

/* The answer is the same for every block: it depends only on dtypes, head counts and whether there
 * is a window, which some layers may have; with first keys it is always read. */
void nd_cp_want_delta(nd_cp *cp, nd_memplan *plan)
{
    const nd_dims *d = &cp->dims;
    nd_attention_block block = {0, 0, d->chunk, 0};
    nd_attention a = nd_cp_attention_of(cp, &block);
    bool used = cp->separate || cp->rank->ops->attention_uses_delta(cp->rank->device, &a, d->act);
    a.window = cp->rank->shape.window < d->S ? cp->rank->shape.window : 0;
    used |= cp->rank->ops->attention_uses_delta(cp->rank->device, &a, d->act);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: delta",
                    used ? (size_t)(d->T * d->H) * sizeof *cp->delta : 0, &cp->delta);
}

nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, int c, int64_t column, int64_t heads)
{
    nd_tensor v = nd_tensor_4d(t.data, t.dtype, d->B, d->chunk, heads, d->D);
    const int64_t first = c * d->chunk * t.stride[0] + column;
    v.data = t.data ? (char *)t.data + (size_t)first * nd_dtype_size(t.dtype) : NULL;
    v.stride[0] = d->s * t.stride[0];
    v.stride[1] = t.stride[0];
    return v;
}

/* The block's rows of a source, from column `column`: (B, count, K, D). */
static nd_tensor kv_view(const nd_dims *d, const nd_kv_source *from, int64_t column,
                         const nd_attention_block *block)
{
    nd_tensor v = nd_tensor_4d(from->data, from->dtype, d->B, block->kv_count, d->K, d->D);
    v.data = (char *)from->data +
             (size_t)(block->kv_begin * from->stride + column) * nd_dtype_size(from->dtype);
    v.stride[0] = from->rows * from->stride;
    v.stride[1] = from->stride;
    return v;
}

nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, int chunk)
{
    return nd_tensor_3d((float *)base + chunk * d->B * d->H * d->chunk, ND_DTYPE_F32, d->B, d->H,
                        d->chunk);
}

int64_t nd_cp_gathered_first_key_count(const nd_rank *rank, const nd_dims *dims)
{
    return dims->T;
}

void nd_cp_gathered_first_keys(const nd_rank *rank, const nd_dims *d, const int32_t *sequence,
                               int32_t *out)
{
    const int64_t size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    const int64_t index = nd_mesh_group_index(&rank->mesh, ND_GROUP_CP, rank->rank);
    for (int64_t c = 0; c < d->chunks; c++) {
        const int64_t place = c == 0 ? index : 2 * size - 1 - index;
        for (int64_t b = 0; b < d->B; b++, out += d->chunk) {
            memcpy(out, sequence + b * d->S + place * d->chunk, (size_t)d->chunk * sizeof *out);
        }
    }
}

/* Those of a block's queries among its keys. */
static nd_tensor first_keys_of(const nd_dims *d, const nd_attention_block *block,
                               const nd_kv_source *kv)
{
    const int64_t at = block->kv_begin / d->chunk * d->chunks + block->q_chunk;
    return kv->first_keys ? nd_tensor_2d((int32_t *)kv->first_keys + at * d->B * d->chunk,
                                         ND_DTYPE_I32, d->B, d->chunk)
                          : (nd_tensor){0};
}

nd_kv_source nd_cp_local_source(const nd_dims *d, nd_tensor qkv)
{
    return (nd_kv_source){
        qkv.data, qkv.dtype, d->s, qkv.stride[0], d->H * d->D, (d->H + d->K) * d->D, NULL};
}

nd_kv_source nd_cp_buffer_source(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows)
{
    return (nd_kv_source){data, dtype, rows, 2 * d->K * d->D, 0, d->K * d->D, NULL};
}

nd_status nd_cp_block_forward(nd_cp *cp, const nd_attention_block *block, nd_tensor qkv,
                              const nd_kv_source *kv, nd_tensor o, const float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_attention a = nd_cp_attention_of(cp, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_fwd, .attention = a,
          .out = nd_cp_q_view(d, o, block->q_chunk, 0, d->H),
          .lse = nd_cp_row_view(d, lse, block->q_chunk),
          .q = nd_cp_q_view(d, qkv, block->q_chunk, 0, d->H), .k = kv_view(d, kv, kv->k, block),
          .v = kv_view(d, kv, kv->v, block), .first_key = first_keys_of(d, block, kv),
          .scratch = cp->scratch);
    return ND_OK;
}

nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_2d(out, d->act, d->T, kv),
          .x = nd_tensor_columns(qkv, d->H * d->D, kv));
    return ND_OK;
}

nd_status nd_cp_block_backward(nd_cp *cp, const nd_attention_block *block, const nd_cp_backward *b,
                               const nd_kv_source *kv, const nd_block_gradients *to)
{
    const nd_dims *d = &cp->dims;
    const nd_kv_source *dkv = &to->dkv;
    int c = block->q_chunk;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_bwd, .attention = nd_cp_attention_of(cp, block),
          .dq = nd_cp_q_view(d, to->dq, c, 0, d->H), .dk = kv_view(d, dkv, dkv->k, block),
          .dv = kv_view(d, dkv, dkv->v, block), .q = nd_cp_q_view(d, b->qkv, c, 0, d->H),
          .k = kv_view(d, kv, kv->k, block), .v = kv_view(d, kv, kv->v, block),
          .out = nd_cp_q_view(d, b->o, c, 0, d->H), .dout = nd_cp_q_view(d, b->dout, c, 0, d->H),
          .lse = nd_cp_row_view(d, b->lse, c),
          .delta = cp->delta ? nd_cp_row_view(d, cp->delta, c) : (nd_tensor){0},
          .first_key = first_keys_of(d, block, kv), .add_q = to->add_q, .add_kv = to->add_kv,
          .scratch = cp->scratch);
    return ND_OK;
}
