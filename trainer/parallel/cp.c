// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

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
    ID_DELTA,
    ID_LSE,
    ID_SCRATCH
};

static bool is_ring(const nd_cp *cp)
{
    return cp->dims.chunks > 1 && cp->method == ND_CP_RING;
}

/* Of one block, as of any other: it depends on types and heads alone. */
static bool uses_delta(const nd_cp *cp)
{
    nd_cp_block block = {0, 0, cp->dims.chunk, 0};
    nd_attention a = nd_cp_describe(&cp->dims, &block);
    return cp->rank->ops->attention_uses_delta(cp->rank->device, &a, cp->dims.act);
}

/* The most of a block of this rank, forward or backward. */
static size_t scratch_bytes(const nd_cp *cp)
{
    const nd_rank *r = cp->rank;
    int size = r->mesh.size[ND_AXIS_CP], index = r->coord.at[ND_AXIS_CP];
    size_t bytes = 0;
    for (int step = 0; step < (is_ring(cp) ? size : 1); step++) {
        nd_cp_block blocks[2];
        int count = is_ring(cp) ? nd_cp_blocks_ring(size, index, step, cp->dims.chunk, blocks)
                                : nd_cp_blocks_gathered(size, index, cp->dims.chunk, blocks);
        for (int i = 0; i < 2 * count; i++) {
            nd_attention a = nd_cp_describe(&cp->dims, &blocks[i / 2]);
            size_t asked = r->ops->attention_scratch(r->device, &a, cp->dims.act, i % 2 != 0);
            bytes = asked > bytes ? asked : bytes;
        }
    }
    return bytes;
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
    cp->ids[ID_DELTA] =
        nd_memplan_add(plan, scratch, "attention: delta", uses_delta(cp) ? rows : 0, 4);
    cp->ids[ID_LSE] = nd_memplan_add(plan, scratch, "cp: lse of parts", ring ? 2 * rows : 0, 4);
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
    cp->delta = uses_delta(cp) ? nd_memplan_at(plan, cp->ids[ID_DELTA]) : NULL;
    cp->acc_lse = is_ring(cp) ? nd_memplan_at(plan, cp->ids[ID_LSE]) : NULL;
    cp->part_lse = is_ring(cp) ? cp->acc_lse + rows : NULL;
    cp->scratch = nd_memplan_at(plan, cp->ids[ID_SCRATCH]);
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

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    for (int c = 0; c < d->chunks && cp->delta; c++) {
        nd_cp_block all = {c, 0, d->chunk, 0};
        nd_attention a = nd_cp_describe(d, &all);
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, &a, nd_cp_row_view(d, cp->delta, c),
              nd_cp_q_view(d, o, c, 0, d->H), nd_cp_q_view(d, dout, c, 0, d->H));
    }
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
