// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

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

/* allgather: `visiting[0]` holds what arrived, in rank order. */
static void plan_gathered(nd_cp *cp, nd_memplan *plan)
{
    const nd_dims *d = &cp->dims;
    size_t local = (size_t)(d->T * 2 * d->K * d->D),
           global = (size_t)(d->B * d->S * 2 * d->K * d->D);
    size_t act = nd_dtype_size(d->act);
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    nd_memplan_want(plan, scratch, "cp: packed k v", local * act, &cp->pack);
    nd_memplan_want(plan, scratch, "cp: arriving k v", global * act, &cp->visiting[0]);
    nd_memplan_want(plan, scratch, "cp: k v in global order", global * act, &cp->global_kv);
    nd_memplan_want(plan, scratch, "cp: dk dv", local * 4, &cp->dkv[0]);
    nd_memplan_want(plan, scratch, "cp: dk dv in global order", global * 4, &cp->dkv_global);
    nd_memplan_want(plan, scratch, "cp: dk dv in rank order", global * 4, &cp->dkv_ranks);
}

/* ring: two blocks of keys visit in turns, and the sums of their gradients travel with them. */
static void plan_ring(nd_cp *cp, nd_memplan *plan)
{
    const nd_dims *d = &cp->dims;
    size_t local = (size_t)(d->T * 2 * d->K * d->D), q = (size_t)(d->T * d->H * d->D);
    size_t act = nd_dtype_size(d->act);
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    nd_memplan_want(plan, scratch, "cp: packed k v", local * act, &cp->pack);
    nd_memplan_want(plan, scratch, "cp: arriving k v", local * act, &cp->visiting[0]);
    nd_memplan_want(plan, scratch, "cp: second k v", local * act, &cp->visiting[1]);
    nd_memplan_want(plan, scratch, "cp: dk dv", local * 4, &cp->dkv[0]);
    nd_memplan_want(plan, scratch, "cp: second dk dv", local * 4, &cp->dkv[1]);
    /* One is used forward, the other backward. */
    int dq = nd_memplan_want(plan, scratch, "cp: dq, merged output", q * 4, &cp->dq);
    nd_memplan_also(plan, dq, 0, &cp->acc);
    nd_memplan_want(plan, scratch, "cp: partial output", q * act, &cp->part);
}

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *dims, nd_memplan *plan)
{
    *cp = (nd_cp){.rank = rank, .dims = *dims, .method = rank->config->parallel.cp_comm};
    size_t rows = (size_t)(dims->T * dims->H) * sizeof(float);
    if (is_ring(cp)) {
        plan_ring(cp, plan);
    } else if (dims->chunks > 1) {
        plan_gathered(cp, plan);
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: delta", uses_delta(cp) ? rows : 0,
                    &cp->delta);
    if (is_ring(cp)) {
        int lse = nd_memplan_want(plan, ND_MEM_SCRATCH, "cp: lse of parts", 2 * rows, &cp->acc_lse);
        nd_memplan_also(plan, lse, rows, &cp->part_lse);
    }
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks", scratch_bytes(cp), &cp->scratch);
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
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, .attention = a,
              .delta = nd_cp_row_view(d, cp->delta, c), .out = nd_cp_q_view(d, o, c, 0, d->H),
              .dout = nd_cp_q_view(d, dout, c, 0, d->H));
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
