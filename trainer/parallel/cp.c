// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_impl.h"

#include <math.h>

enum {
    ID_PACK,
    ID_VISITING_0,
    ID_VISITING_1,
    ID_GLOBAL,
    ID_DKV_0,
    ID_DKV_1,
    ID_DKV_GLOBAL,
    ID_DKV_RANKS,
    ID_DQ,
    ID_PART,
    ID_ROWS,
    ID_SCRATCH
};

int nd_cp_blocks_gathered(int size, int index, int64_t chunk, nd_cp_block out[2])
{
    if (size == 1) {
        out[0] = (nd_cp_block){0, 0, chunk, 0};
        return 1;
    }
    int64_t place[2] = {index, 2 * size - 1 - index};
    for (int c = 0; c < 2; c++) {
        out[c] = (nd_cp_block){c, 0, (place[c] + 1) * chunk, place[c] * chunk};
    }
    return 2;
}

int nd_cp_blocks_ring(int size, int index, int step, int64_t chunk, nd_cp_block out[2])
{
    if (size == 1) {
        return nd_cp_blocks_gathered(size, index, chunk, out);
    }
    if (step == 0) {
        out[0] = (nd_cp_block){0, 0, chunk, 0};
        out[1] = (nd_cp_block){1, 0, 2 * chunk, chunk};
        return 2;
    }
    if (step <= index) { /* an earlier rank: one chunk before both of ours, one after */
        out[0] = (nd_cp_block){0, 0, chunk, chunk};
        out[1] = (nd_cp_block){1, 0, chunk, chunk};
        return 2;
    }
    out[0] = (nd_cp_block){1, 0, 2 * chunk,
                           2 * chunk}; /* a later rank: both its chunks are before our second */
    return 1;
}

static bool is_ring(const nd_cp *cp)
{
    return cp->dims.chunks > 1 && cp->method == ND_CP_RING;
}

nd_attention nd_cp_describe(const nd_dims *d, const nd_cp_block *block)
{
    return (nd_attention){
        .batch = d->B,
        .sq = d->chunk,
        .sk = block->kv_count,
        .heads = d->H,
        .kv_heads = d->K,
        .head_dim = d->D,
        .diag = block->diag,
        .scale = (float)(1.0 / sqrt((double)d->D)),
    };
}

static size_t scratch_bytes(const nd_cp *cp)
{
    const nd_dims *d = &cp->dims;
    int64_t keys = is_ring(cp) ? d->s : d->S; /* the longest block */
    nd_cp_block longest = {0, 0, keys, keys};
    nd_attention a = nd_cp_describe(d, &longest);
    size_t fwd = cp->rank->ops->attention_scratch(cp->rank->device, &a, d->act, false);
    size_t bwd = cp->rank->ops->attention_scratch(cp->rank->device, &a, d->act, true);
    return fwd > bwd ? fwd : bwd;
}

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *dims, nd_memplan *plan)
{
    const nd_dims *d = dims;
    *cp = (nd_cp){.rank = rank, .dims = *dims, .method = rank->config->parallel.cp_comm};
    bool split = d->chunks > 1, ring = is_ring(cp), gathered = split && !ring;
    size_t act = nd_dtype_size(d->act);
    int64_t kv = 2 * d->K * d->D, local = d->T * kv, global = d->B * d->S * kv,
            q = d->T * d->H * d->D;
    int64_t rows = d->T * d->H;
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    cp->ids[ID_PACK] = nd_memplan_add(plan, scratch, "cp: packed k v", split ? local : 0, act);
    /* allgather: slot 0 holds what arrived, in rank order; ring: two visiting blocks. */
    cp->ids[ID_VISITING_0] = nd_memplan_add(plan, scratch, "cp: arriving k v",
                                            gathered ? global
                                            : ring   ? local
                                                     : 0,
                                            act);
    cp->ids[ID_VISITING_1] = nd_memplan_add(plan, scratch, "cp: second k v", ring ? local : 0, act);
    cp->ids[ID_GLOBAL] =
        nd_memplan_add(plan, scratch, "cp: k v in global order", gathered ? global : 0, act);
    cp->ids[ID_DKV_0] = nd_memplan_add(plan, scratch, "cp: dk dv", split ? local : 0, 4);
    cp->ids[ID_DKV_1] = nd_memplan_add(plan, scratch, "cp: second dk dv", ring ? local : 0, 4);
    cp->ids[ID_DKV_GLOBAL] =
        nd_memplan_add(plan, scratch, "cp: dk dv in global order", gathered ? global : 0, 4);
    cp->ids[ID_DKV_RANKS] =
        nd_memplan_add(plan, scratch, "cp: dk dv in rank order", gathered ? global : 0, 4);
    cp->ids[ID_DQ] = nd_memplan_add(plan, scratch, "cp: dq, merged output", ring ? q : 0, 4);
    cp->ids[ID_PART] = nd_memplan_add(plan, scratch, "cp: partial output", ring ? q : 0, act);
    cp->ids[ID_ROWS] =
        nd_memplan_add(plan, scratch, "attention: delta, lse", ring ? 3 * rows : rows, 4);
    cp->ids[ID_SCRATCH] =
        nd_memplan_add(plan, scratch, "attention: blocks", (int64_t)scratch_bytes(cp), 1);
}

void nd_cp_bind(nd_cp *cp, const nd_memplan *plan)
{
    int64_t rows = cp->dims.T * cp->dims.H;
    cp->pack = nd_memplan_at(plan, cp->ids[ID_PACK]);
    cp->visiting[0] = nd_memplan_at(plan, cp->ids[ID_VISITING_0]);
    cp->visiting[1] = nd_memplan_at(plan, cp->ids[ID_VISITING_1]);
    cp->global_kv = nd_memplan_at(plan, cp->ids[ID_GLOBAL]);
    cp->dkv[0] = nd_memplan_at(plan, cp->ids[ID_DKV_0]);
    cp->dkv[1] = nd_memplan_at(plan, cp->ids[ID_DKV_1]);
    cp->dkv_global = nd_memplan_at(plan, cp->ids[ID_DKV_GLOBAL]);
    cp->dkv_ranks = nd_memplan_at(plan, cp->ids[ID_DKV_RANKS]);
    cp->dq = cp->acc =
        nd_memplan_at(plan, cp->ids[ID_DQ]); /* one is used forward, the other backward */
    cp->part = nd_memplan_at(plan, cp->ids[ID_PART]);
    cp->delta = nd_memplan_at(plan, cp->ids[ID_ROWS]);
    cp->acc_lse = is_ring(cp) ? cp->delta + rows : NULL;
    cp->part_lse = is_ring(cp) ? cp->delta + 2 * rows : NULL;
    cp->scratch = nd_memplan_at(plan, cp->ids[ID_SCRATCH]);
}

nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, int c, int64_t column, int64_t heads)
{
    nd_tensor v = nd_tensor_4d(t.data, t.dtype, d->B, d->chunk, heads, d->D);
    v.data =
        (char *)t.data + (size_t)(c * d->chunk * t.stride[0] + column) * nd_dtype_size(t.dtype);
    v.stride[0] = d->s * t.stride[0];
    v.stride[1] = t.stride[0];
    return v;
}

/* Keys [begin, begin + count) of a buffer of `rows` rows per sample and row stride `stride`: (B,
 * count, K, D). */
static nd_tensor kv_view(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows, int64_t stride,
                         int64_t column, const nd_cp_block *block)
{
    nd_tensor v = nd_tensor_4d(data, dtype, d->B, block->kv_count, d->K, d->D);
    v.data = (char *)data + (size_t)(block->kv_begin * stride + column) * nd_dtype_size(dtype);
    v.stride[0] = rows * stride;
    v.stride[1] = stride;
    return v;
}

nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, int chunk)
{
    return nd_tensor_3d((float *)base + chunk * d->B * d->H * d->chunk, ND_DTYPE_F32, d->B, d->H,
                        d->chunk);
}

nd_kv_source nd_cp_local_source(const nd_dims *d, nd_tensor qkv)
{
    return (nd_kv_source){qkv.data,      qkv.dtype,   d->s,
                          qkv.stride[0], d->H * d->D, (d->H + d->K) * d->D};
}

nd_kv_source nd_cp_buffer_source(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows)
{
    return (nd_kv_source){data, dtype, rows, 2 * d->K * d->D, 0, d->K * d->D};
}

nd_status nd_cp_run_fwd(nd_cp *cp, const nd_cp_block *block, nd_tensor qkv, const nd_kv_source *kv,
                        nd_tensor o, const float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_attention a = nd_cp_describe(d, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_fwd, &a,
          nd_cp_q_view(d, o, block->q_chunk, 0, d->H), nd_cp_row_view(d, lse, block->q_chunk),
          nd_cp_q_view(d, qkv, block->q_chunk, 0, d->H),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->k, block),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->v, block), cp->scratch);
    return ND_OK;
}

nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, nd_tensor_2d(out, d->act, d->T, kv),
          nd_tensor_columns(qkv, d->H * d->D, kv));
    return ND_OK;
}

nd_status nd_cp_attention_fwd(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_comm *comm = cp->rank->groups.by_kind[ND_GROUP_CP];
    nd_kv_source kv;
    nd_cp_block blocks[2];
    if (is_ring(cp)) {
        return nd_cp_ring_fwd(cp, qkv, o, lse);
    }
    ND_TRY(nd_cp_gather_kv(cp, qkv, &kv));
    int count = nd_cp_blocks_gathered(comm->size, comm->index, d->chunk, blocks);
    for (int b = 0; b < count; b++) {
        ND_TRY(nd_cp_run_fwd(cp, &blocks[b], qkv, &kv, o, lse));
    }
    return ND_OK;
}

nd_status nd_cp_run_bwd(nd_cp *cp, const nd_cp_block *block, nd_tensor dq, const nd_kv_source *dkv,
                        nd_tensor qkv, const nd_kv_source *kv, nd_tensor o, const float *lse,
                        nd_tensor dout, bool add_q, bool add_kv)
{
    const nd_dims *d = &cp->dims;
    int c = block->q_chunk;
    nd_attention a = nd_cp_describe(d, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_bwd, &a, nd_cp_q_view(d, dq, c, 0, d->H),
          kv_view(d, dkv->data, dkv->dtype, dkv->rows, dkv->stride, dkv->k, block),
          kv_view(d, dkv->data, dkv->dtype, dkv->rows, dkv->stride, dkv->v, block),
          nd_cp_q_view(d, qkv, c, 0, d->H),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->k, block),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->v, block),
          nd_cp_q_view(d, o, c, 0, d->H), nd_cp_q_view(d, dout, c, 0, d->H),
          nd_cp_row_view(d, lse, c), nd_cp_row_view(d, cp->delta, c), add_q, add_kv, cp->scratch);
    return ND_OK;
}

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    for (int c = 0; c < d->chunks; c++) {
        nd_cp_block all = {c, 0, d->chunk, 0};
        nd_attention a = nd_cp_describe(d, &all);
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, &a, nd_cp_row_view(d, cp->delta, c),
              nd_cp_q_view(d, o, c, 0, d->H), nd_cp_q_view(d, dout, c, 0, d->H));
    }
    return ND_OK;
}

nd_status nd_cp_store_dkv(nd_cp *cp, nd_tensor dqkv, const float *dkv)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, nd_tensor_columns(dqkv, d->H * d->D, kv),
          nd_tensor_2d((float *)dkv, ND_DTYPE_F32, d->T, kv));
    return ND_OK;
}

nd_status nd_cp_attention_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                              const float *lse, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    nd_cp_block whole[2];
    ND_TRY(make_delta(cp, o, dout));
    if (is_ring(cp)) {
        return nd_cp_ring_bwd(cp, dqkv, qkv, o, lse, dout);
    }
    if (d->chunks > 1) {
        return nd_cp_gathered_bwd(cp, dqkv, qkv, o, lse, dout);
    }
    nd_cp_blocks_gathered(1, 0, d->chunk, whole);
    nd_kv_source kv = nd_cp_local_source(d, qkv), dkv = nd_cp_local_source(d, dqkv);
    return nd_cp_run_bwd(cp, &whole[0], dqkv, &dkv, qkv, &kv, o, lse, dout, false, false);
}
