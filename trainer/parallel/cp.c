// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp.h"

#include <math.h>
#include <string.h>

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
    if (step <=
        index) { /* an earlier rank: its first chunk is before both of ours, its second after both */
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

static nd_attention describe(const nd_dims *d, const nd_cp_block *block)
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
    nd_attention a = describe(d, &longest);
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

/* Rows of query chunk `c` of a (T, columns) tensor, `heads` heads from column `column`: (B, chunk, heads, D). */
static nd_tensor q_view(const nd_dims *d, nd_tensor t, int c, int64_t column, int64_t heads)
{
    nd_tensor v = nd_tensor_4d(t.data, t.dtype, d->B, d->chunk, heads, d->D);
    v.data =
        (char *)t.data + (size_t)(c * d->chunk * t.stride[0] + column) * nd_dtype_size(t.dtype);
    v.stride[0] = d->s * t.stride[0];
    v.stride[1] = t.stride[0];
    return v;
}

/* Keys [begin, begin + count) of a buffer of `rows` rows per sample and row stride `stride`: (B, count, K, D). */
static nd_tensor kv_view(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows, int64_t stride,
                         int64_t column, const nd_cp_block *block)
{
    nd_tensor v = nd_tensor_4d(data, dtype, d->B, block->kv_count, d->K, d->D);
    v.data = (char *)data + (size_t)(block->kv_begin * stride + column) * nd_dtype_size(dtype);
    v.stride[0] = rows * stride;
    v.stride[1] = stride;
    return v;
}

static nd_tensor row_view(const nd_dims *d, const float *base, int chunk)
{
    return nd_tensor_3d((float *)base + chunk * d->B * d->H * d->chunk, ND_DTYPE_F32, d->B, d->H,
                        d->chunk);
}

/* Where the keys of a block are: the projection itself (cp = 1), or a buffer of k v rows. */
typedef struct kv_source {
    void *data;
    nd_dtype dtype;
    int64_t rows, stride; /* rows per sample, elements per row */
    int64_t k, v;         /* first column of each */
} kv_source;

static kv_source local_source(const nd_dims *d, nd_tensor qkv)
{
    return (kv_source){qkv.data, qkv.dtype, d->s, qkv.stride[0], d->H * d->D, (d->H + d->K) * d->D};
}

static kv_source buffer_source(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows)
{
    return (kv_source){data, dtype, rows, 2 * d->K * d->D, 0, d->K * d->D};
}

static nd_status run_fwd(nd_cp *cp, const nd_cp_block *block, nd_tensor qkv, const kv_source *kv,
                         nd_tensor o, const float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_attention a = describe(d, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_fwd, &a, q_view(d, o, block->q_chunk, 0, d->H),
          row_view(d, lse, block->q_chunk), q_view(d, qkv, block->q_chunk, 0, d->H),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->k, block),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->v, block), cp->scratch);
    return ND_OK;
}

/* k and v columns of qkv, packed to rows of 2 K D. */
static nd_status pack_kv(nd_cp *cp, nd_tensor qkv, void *out)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, nd_tensor_2d(out, d->act, d->T, kv),
          nd_tensor_columns(qkv, d->H * d->D, kv));
    return ND_OK;
}

/* Copies between rank order (cp, B, s, X) and global order (B, S, X), X bytes wide rows, chunk by chunk. */
static nd_status reorder(nd_cp *cp, char *ranks, char *global, size_t row_bytes, bool to_global)
{
    const nd_dims *d = &cp->dims;
    int n = cp->rank->groups.by_kind[ND_GROUP_CP]->size;
    size_t bytes = (size_t)d->chunk * row_bytes;
    for (int p = 0; p < n; p++) {
        for (int64_t b = 0; b < d->B; b++) {
            for (int c = 0; c < 2; c++) {
                int64_t place = c == 0 ? p : 2 * n - 1 - p;
                char *in_ranks = ranks + (size_t)((p * d->B + b) * d->s + c * d->chunk) * row_bytes;
                char *in_global = global + (size_t)(b * d->S + place * d->chunk) * row_bytes;
                ND_TRY(to_global ? nd_copy(&cp->rank->stream, in_global, in_ranks, bytes)
                                 : nd_copy(&cp->rank->stream, in_ranks, in_global, bytes));
            }
        }
    }
    return ND_OK;
}

static nd_status gather_kv(nd_cp *cp, nd_tensor qkv, kv_source *out)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    int64_t kv = 2 * d->K * d->D;
    if (d->chunks == 1) {
        *out = local_source(d, qkv);
        return ND_OK;
    }
    ND_TRY(pack_kv(cp, qkv, cp->pack));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_gather(r->groups.by_kind[ND_GROUP_CP], &r->stream, cp->pack, cp->visiting[0],
                              d->T * kv, d->act, NULL));
    ND_RUN(r, ND_TRACE_ATTENTION,
           reorder(cp, cp->visiting[0], cp->global_kv, (size_t)kv * nd_dtype_size(d->act), true));
    *out = buffer_source(d, cp->global_kv, d->act, d->S);
    return ND_OK;
}

/* Begins one hop of the ring: `from` goes to the next rank, `to` arrives from the one before. */
static nd_status hop(nd_cp *cp, const void *from, void *to, nd_dtype dtype, nd_event *done)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    int next = (comm->index + 1) % comm->size, before = (comm->index + comm->size - 1) % comm->size;
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_exchange(comm, &r->stream, from, next, to, before, d->T * 2 * d->K * d->D, dtype,
                            done));
    return ND_OK;
}

static nd_status ring_fwd(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor acc = nd_tensor_2d(cp->acc, ND_DTYPE_F32, d->T, d->H * d->D);
    nd_tensor part = nd_tensor_2d(cp->part, d->act, d->T, d->H * d->D);
    ND_TRY(pack_kv(cp, qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived = {0};
        nd_cp_block blocks[2];
        if (step + 1 < comm->size) {
            ND_TRY(hop(cp, cp->visiting[step % 2], cp->visiting[(step + 1) % 2], d->act, &arrived));
        }
        kv_source kv = buffer_source(d, cp->visiting[step % 2], d->act, d->s);
        int count = nd_cp_blocks_ring(comm->size, comm->index, step, d->chunk, blocks);
        for (int b = 0; b < count; b++) {
            int c = blocks[b].q_chunk;
            nd_attention a = describe(d, &blocks[b]);
            /* The first block of a chunk is the sum so far; both chunks have one in step 0. */
            ND_TRY(run_fwd(cp, &blocks[b], qkv, &kv, part, step == 0 ? cp->acc_lse : cp->part_lse));
            if (step > 0) {
                ND_OP(r, ND_TRACE_ATTENTION, lse_merge, &a, q_view(d, acc, c, 0, d->H),
                      row_view(d, cp->acc_lse, c), q_view(d, part, c, 0, d->H),
                      row_view(d, cp->part_lse, c));
            }
        }
        if (step == 0) {
            ND_OP(r, ND_TRACE_ATTENTION, cast, acc, part);
        }
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
    }
    ND_OP(r, ND_TRACE_ATTENTION, cast, o, acc);
    return nd_copy(&r->stream, lse, cp->acc_lse, (size_t)(d->T * d->H) * 4);
}

nd_status nd_cp_attention_fwd(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_comm *comm = cp->rank->groups.by_kind[ND_GROUP_CP];
    kv_source kv;
    nd_cp_block blocks[2];
    if (is_ring(cp)) {
        return ring_fwd(cp, qkv, o, lse);
    }
    ND_TRY(gather_kv(cp, qkv, &kv));
    int count = nd_cp_blocks_gathered(comm->size, comm->index, d->chunk, blocks);
    for (int b = 0; b < count; b++) {
        ND_TRY(run_fwd(cp, &blocks[b], qkv, &kv, o, lse));
    }
    return ND_OK;
}

/* One block of the backward: dq into `dq`, dk and dv into `dkv`. */
static nd_status run_bwd(nd_cp *cp, const nd_cp_block *block, nd_tensor dq, const kv_source *dkv,
                         nd_tensor qkv, const kv_source *kv, nd_tensor o, const float *lse,
                         nd_tensor dout, bool add_q, bool add_kv)
{
    const nd_dims *d = &cp->dims;
    int c = block->q_chunk;
    nd_attention a = describe(d, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_bwd, &a, q_view(d, dq, c, 0, d->H),
          kv_view(d, dkv->data, dkv->dtype, dkv->rows, dkv->stride, dkv->k, block),
          kv_view(d, dkv->data, dkv->dtype, dkv->rows, dkv->stride, dkv->v, block),
          q_view(d, qkv, c, 0, d->H),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->k, block),
          kv_view(d, kv->data, kv->dtype, kv->rows, kv->stride, kv->v, block),
          q_view(d, o, c, 0, d->H), q_view(d, dout, c, 0, d->H), row_view(d, lse, c),
          row_view(d, cp->delta, c), add_q, add_kv, cp->scratch);
    return ND_OK;
}

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    for (int c = 0; c < d->chunks; c++) {
        nd_cp_block all = {c, 0, d->chunk, 0};
        nd_attention a = describe(d, &all);
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, &a, row_view(d, cp->delta, c),
              q_view(d, o, c, 0, d->H), q_view(d, dout, c, 0, d->H));
    }
    return ND_OK;
}

/* F32 dq and dkv -> the columns of dqkv. */
static nd_status store_dkv(nd_cp *cp, nd_tensor dqkv, const float *dkv)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, nd_tensor_columns(dqkv, d->H * d->D, kv),
          nd_tensor_2d((float *)dkv, ND_DTYPE_F32, d->T, kv));
    return ND_OK;
}

static nd_status ring_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o, const float *lse,
                          nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor dq = nd_tensor_2d(cp->dq, ND_DTYPE_F32, d->T, d->H * d->D);
    size_t dkv_bytes = (size_t)(d->T * 2 * d->K * d->D) * 4;
    ND_TRY(nd_zero(&r->stream, dq.data, nd_tensor_bytes(dq)));
    ND_TRY(nd_zero(&r->stream, cp->dkv[0], dkv_bytes));
    ND_TRY(pack_kv(cp, qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived = {0};
        nd_cp_block blocks[2];
        if (step + 1 < comm->size) {
            ND_TRY(hop(cp, cp->visiting[step % 2], cp->visiting[(step + 1) % 2], d->act, &arrived));
        }
        kv_source kv = buffer_source(d, cp->visiting[step % 2], d->act, d->s);
        kv_source dkv = buffer_source(d, cp->dkv[step % 2], ND_DTYPE_F32, d->s);
        int count = nd_cp_blocks_ring(comm->size, comm->index, step, d->chunk, blocks);
        for (int b = 0; b < count; b++) {
            ND_TRY(run_bwd(cp, &blocks[b], dq, &dkv, qkv, &kv, o, lse, dout, true, true));
        }
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
        /* dK and dV follow their keys; the last hop brings our own home. */
        ND_TRY(hop(cp, cp->dkv[step % 2], cp->dkv[(step + 1) % 2], ND_DTYPE_F32, NULL));
    }
    ND_OP(r, ND_TRACE_ATTENTION, cast, nd_tensor_columns(dqkv, 0, d->H * d->D), dq);
    return store_dkv(cp, dqkv, cp->dkv[comm->size % 2]);
}

static nd_status gathered_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                              const float *lse, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    int64_t kv_columns = 2 * d->K * d->D;
    nd_cp_block blocks[2];
    kv_source kv, dkv = buffer_source(d, cp->dkv_global, ND_DTYPE_F32, d->S);
    ND_TRY(gather_kv(cp, qkv, &kv));
    ND_TRY(nd_zero(&r->stream, cp->dkv_global, (size_t)(d->B * d->S * kv_columns) * 4));
    int count = nd_cp_blocks_gathered(comm->size, comm->index, d->chunk, blocks);
    for (int b = 0; b < count; b++) {
        ND_TRY(run_bwd(cp, &blocks[b], dqkv, &dkv, qkv, &kv, o, lse, dout, false, true));
    }
    ND_RUN(
        r, ND_TRACE_ATTENTION,
        reorder(cp, (char *)cp->dkv_ranks, (char *)cp->dkv_global, (size_t)kv_columns * 4, false));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_reduce_scatter(comm, &r->stream, cp->dkv_ranks, cp->dkv[0], d->T * kv_columns,
                                  ND_DTYPE_F32, ND_REDOP_SUM, NULL));
    return store_dkv(cp, dqkv, cp->dkv[0]);
}

nd_status nd_cp_attention_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o,
                              const float *lse, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    nd_cp_block whole[2];
    ND_TRY(make_delta(cp, o, dout));
    if (is_ring(cp)) {
        return ring_bwd(cp, dqkv, qkv, o, lse, dout);
    }
    if (d->chunks > 1) {
        return gathered_bwd(cp, dqkv, qkv, o, lse, dout);
    }
    nd_cp_blocks_gathered(1, 0, d->chunk, whole);
    kv_source kv = local_source(d, qkv), dkv = local_source(d, dqkv);
    return run_bwd(cp, &whole[0], dqkv, &dkv, qkv, &kv, o, lse, dout, false, false);
}
