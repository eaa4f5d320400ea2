// SPDX-License-Identifier: Apache-2.0
#include "trainer/parallel/cp_method.h"

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

nd_status nd_cp_ring_fwd(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor acc = nd_tensor_2d(cp->acc, ND_DTYPE_F32, d->T, d->H * d->D);
    nd_tensor part = nd_tensor_2d(cp->part, d->act, d->T, d->H * d->D);
    ND_TRY(nd_cp_pack_kv(cp, qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived = {0};
        nd_cp_block blocks[2];
        if (step + 1 < comm->size) {
            ND_TRY(hop(cp, cp->visiting[step % 2], cp->visiting[(step + 1) % 2], d->act, &arrived));
        }
        nd_kv_source kv = nd_cp_buffer_source(d, cp->visiting[step % 2], d->act, d->s);
        int count = nd_cp_blocks_ring(comm->size, comm->index, step, d->chunk, blocks);
        for (int b = 0; b < count; b++) {
            int c = blocks[b].q_chunk;
            nd_attention a = nd_cp_describe(d, &blocks[b]);
            /* The first block of a chunk is the sum so far; both chunks have one in step 0. */
            ND_TRY(nd_cp_run_fwd(cp, &blocks[b], qkv, &kv, part,
                                 step == 0 ? cp->acc_lse : cp->part_lse));
            if (step > 0) {
                ND_OP(r, ND_TRACE_ATTENTION, lse_merge, .attention = a,
                      .acc = nd_cp_q_view(d, acc, c, 0, d->H),
                      .acc_lse = nd_cp_row_view(d, cp->acc_lse, c),
                      .out = nd_cp_q_view(d, part, c, 0, d->H),
                      .lse = nd_cp_row_view(d, cp->part_lse, c));
            }
        }
        if (step == 0) {
            ND_OP(r, ND_TRACE_ATTENTION, cast, .out = acc, .x = part);
        }
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
    }
    ND_OP(r, ND_TRACE_ATTENTION, cast, .out = o, .x = acc);
    return nd_copy(&r->stream, lse, cp->acc_lse, (size_t)(d->T * d->H) * 4);
}

nd_status nd_cp_ring_bwd(nd_cp *cp, nd_tensor dqkv, nd_tensor qkv, nd_tensor o, const float *lse,
                         nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor dq = nd_tensor_2d(cp->dq, ND_DTYPE_F32, d->T, d->H * d->D);
    size_t dkv_bytes = (size_t)(d->T * 2 * d->K * d->D) * 4;
    ND_TRY(nd_zero(&r->stream, dq.data, nd_tensor_bytes(dq)));
    ND_TRY(nd_zero(&r->stream, cp->dkv[0], dkv_bytes));
    ND_TRY(nd_cp_pack_kv(cp, qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived = {0};
        nd_cp_block blocks[2];
        if (step + 1 < comm->size) {
            ND_TRY(hop(cp, cp->visiting[step % 2], cp->visiting[(step + 1) % 2], d->act, &arrived));
        }
        nd_kv_source kv = nd_cp_buffer_source(d, cp->visiting[step % 2], d->act, d->s);
        nd_kv_source dkv = nd_cp_buffer_source(d, cp->dkv[step % 2], ND_DTYPE_F32, d->s);
        int count = nd_cp_blocks_ring(comm->size, comm->index, step, d->chunk, blocks);
        for (int b = 0; b < count; b++) {
            ND_TRY(nd_cp_run_bwd(cp, &blocks[b], dq, &dkv, qkv, &kv, o, lse, dout, true, true));
        }
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
        /* dK and dV follow their keys; the last hop brings our own home. */
        ND_TRY(hop(cp, cp->dkv[step % 2], cp->dkv[(step + 1) % 2], ND_DTYPE_F32, NULL));
    }
    ND_OP(r, ND_TRACE_ATTENTION, cast, .out = nd_tensor_columns(dqkv, 0, d->H * d->D), .x = dq);
    return nd_cp_store_dkv(cp, dqkv, cp->dkv[comm->size % 2]);
}
