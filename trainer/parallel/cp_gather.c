// SPDX-License-Identifier: Apache-2.0
/* The method allgather. */
#include "trainer/parallel/cp_method.h"

/* `visiting[0]` holds what arrived, in rank order. */
static void gather_plan(nd_cp *cp, nd_memplan *plan)
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
    nd_cp_want_delta(cp, plan);
}

/* Copies between rank order (cp, B, s, X) and global order (B, S, X), X bytes wide rows, chunk by
 * chunk. */
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

/* K and V of all ranks, in global order. */
static nd_status gather_kv(nd_cp *cp, nd_tensor qkv, nd_kv_source *out)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    int64_t kv = 2 * d->K * d->D;
    ND_TRY(nd_cp_pack_kv(cp, qkv, cp->pack));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_all_gather(
               r->groups.by_kind[ND_GROUP_CP], &r->stream,
               &(nd_comm_args){
                   .send = cp->pack, .recv = cp->visiting[0], .count = d->T * kv, .dtype = d->act},
               NULL));
    ND_RUN(r, ND_TRACE_ATTENTION,
           reorder(cp, cp->visiting[0], cp->global_kv, (size_t)kv * nd_dtype_size(d->act), true));
    *out = nd_cp_buffer_source(d, cp->global_kv, d->act, d->S);
    out->first_keys = cp->sight.first_keys;
    return ND_OK;
}

static nd_status gather_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    nd_comm *comm = cp->rank->groups.by_kind[ND_GROUP_CP];
    nd_attention_block blocks[ND_CP_BLOCKS];
    nd_kv_source kv;
    ND_TRY(gather_kv(cp, qkv, &kv));
    int count =
        nd_cp_blocks_gathered(comm->size, comm->index, 0, cp->dims.chunk, cp->sight.window, blocks);
    for (int b = 0; b < count; b++) {
        ND_TRY(nd_cp_block_forward(cp, &blocks[b], qkv, &kv, o, lse));
    }
    return ND_OK;
}

static nd_status gather_backward(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    int64_t columns = 2 * d->K * d->D;
    nd_attention_block blocks[ND_CP_BLOCKS];
    nd_kv_source kv;
    const nd_block_gradients to = {
        .dq = b->dqkv,
        .dkv = nd_cp_buffer_source(d, cp->dkv_global, ND_DTYPE_F32, d->S),
        .add_kv = true,
    };
    ND_TRY(gather_kv(cp, b->qkv, &kv));
    ND_TRY(nd_zero(&r->stream, cp->dkv_global, (size_t)(d->B * d->S * columns) * 4));
    int count =
        nd_cp_blocks_gathered(comm->size, comm->index, 0, d->chunk, cp->sight.window, blocks);
    for (int i = 0; i < count; i++) {
        ND_TRY(nd_cp_block_backward(cp, &blocks[i], b, &kv, &to));
    }
    ND_RUN(r, ND_TRACE_ATTENTION,
           reorder(cp, (char *)cp->dkv_ranks, (char *)cp->dkv_global, (size_t)columns * 4, false));
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_reduce_scatter(comm, &r->stream,
                                  &(nd_comm_args){.send = cp->dkv_ranks,
                                                  .recv = cp->dkv[0],
                                                  .count = d->T * columns,
                                                  .dtype = ND_DTYPE_F32,
                                                  .redop = ND_REDOP_SUM},
                                  &cp->arriving.done));
    cp->arrived = cp->dkv[0];
    return ND_OK;
}

const nd_cp_method nd_cp_method_gather = {
    .plan = gather_plan,
    .blocks = nd_cp_blocks_gathered,
    .first_key_count = nd_cp_gathered_first_key_count,
    .first_keys = nd_cp_gathered_first_keys,
    .forward = gather_forward,
    .backward = gather_backward,
};
