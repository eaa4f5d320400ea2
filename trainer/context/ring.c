// SPDX-License-Identifier: Apache-2.0
/* The methods ring, and local, which is a ring of one rank whose keys stay where they are. */
#include "trainer/context/method.h"

#include "runtime/base/math.h"

/* Two blocks of keys visit in turns, and the sums of their gradients travel with them. */
static void ring_plan(nd_cp *cp, nd_memplan *plan)
{
    const nd_dims *d = &cp->dims;
    size_t local = (size_t)(d->T * 2 * d->K * d->D), q = (size_t)(d->T * d->H * d->D);
    size_t act = nd_dtype_size(d->act), rows = (size_t)(d->T * d->H) * sizeof(float);
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    nd_memplan_want(plan, scratch, "cp: visiting k v", local * act, &cp->visiting[0]);
    nd_memplan_want(plan, scratch, "cp: second k v", local * act, &cp->visiting[1]);
    nd_memplan_want(plan, scratch, "cp: dk dv", local * 4, &cp->dkv[0]);
    nd_memplan_want(plan, scratch, "cp: second dk dv", local * 4, &cp->dkv[1]);
    /* One is used forward, the other backward. */
    int dq = nd_memplan_want(plan, scratch, "cp: dq, merged output", q * 4, &cp->dq);
    nd_memplan_also(plan, dq, 0, &cp->acc);
    nd_memplan_want(plan, scratch, "cp: partial output", q * act, &cp->part);
    int lse = nd_memplan_want(plan, scratch, "cp: lse of parts", 2 * rows, &cp->acc_lse);
    nd_memplan_also(plan, lse, rows, &cp->part_lse);
}

/* Begins one hop of the ring: `from` goes to the next rank, `to` arrives from the one before. */
static nd_status hop(nd_cp *cp, const void *from, void *to, nd_dtype dtype, nd_event *done)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    int next = (comm->index + 1) % comm->size, before = (comm->index + comm->size - 1) % comm->size;
    ND_COMM(r, comm, exchange, done, .send = from, .recv = to, .count = d->T * 2 * d->K * d->D,
            .dtype = dtype, .to = next, .from = before);
    return ND_OK;
}

static nd_kv_source visiting_kv(const nd_cp *cp, int step)
{
    const nd_dims *d = &cp->dims;
    nd_kv_source kv = nd_cp_buffer_source(cp, cp->visiting[step % 2], d->act, d->s);
    kv.bounds = kv.bounds ? kv.bounds + step * ND_CP_BOUNDS * d->T : NULL;
    return kv;
}

static nd_status ring_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor acc = nd_tensor_2d(cp->acc, ND_DTYPE_F32, d->T, d->H * d->D);
    nd_tensor part = nd_tensor_2d(cp->part, d->act, d->T, d->H * d->D);
    ND_TRY(nd_cp_pack_kv(cp, qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived = {0};
        nd_attention_block blocks[ND_CP_BLOCKS];
        if (step + 1 < comm->size) {
            ND_TRY(hop(cp, cp->visiting[step % 2], cp->visiting[(step + 1) % 2], d->act, &arrived));
        }
        nd_kv_source kv = visiting_kv(cp, step);
        const int count = nd_cp_blocks_of(cp, step, d->s, blocks);
        for (int b = 0; b < count; b++) {
            const nd_attention_block *block = &blocks[b];
            /* The first block of some queries is the sum so far; all queries have one in step 0. */
            const bool first = step == 0 && block->q_begin == b * block->q_count;
            ND_TRY(
                nd_cp_block_forward(cp, block, qkv, &kv, part, first ? cp->acc_lse : cp->part_lse));
            if (!first) {
                ND_OP(r, ND_TRACE_ATTENTION, lse_merge, .attention = nd_cp_attention_of(cp, block),
                      .acc = nd_cp_q_view(d, acc, block),
                      .acc_lse = nd_cp_row_view(d, cp->acc_lse, block),
                      .out = nd_cp_q_view(d, part, block),
                      .lse = nd_cp_row_view(d, cp->part_lse, block));
            } else if (block->q_begin + block->q_count == d->s) {
                ND_OP(r, ND_TRACE_ATTENTION, cast, .out = acc, .x = part);
            }
        }
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
    }
    ND_OP(r, ND_TRACE_ATTENTION, cast, .out = o, .x = acc);
    return nd_copy(&r->stream, lse, cp->acc_lse, (size_t)(d->T * d->H) * 4);
}

static nd_status ring_backward(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor dq = nd_tensor_2d(cp->dq, ND_DTYPE_F32, d->T, d->H * d->D);
    size_t dkv_bytes = (size_t)(d->T * 2 * d->K * d->D) * 4;
    ND_TRY(nd_zero(&r->stream, dq.data, nd_tensor_bytes(dq)));
    ND_TRY(nd_zero(&r->stream, cp->dkv[0], dkv_bytes));
    ND_TRY(nd_cp_pack_kv(cp, b->qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived = {0};
        if (step + 1 < comm->size) {
            ND_TRY(hop(cp, cp->visiting[step % 2], cp->visiting[(step + 1) % 2], d->act, &arrived));
        }
        nd_kv_source kv = visiting_kv(cp, step);
        const nd_block_gradients to = {
            .dq = dq,
            .dkv = nd_cp_buffer_source(cp, cp->dkv[step % 2], ND_DTYPE_F32, d->s),
            .add_q = true,
            .add_kv = true,
        };
        ND_TRY(nd_cp_blocks_backward(cp, step, b, &kv, &to));
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
        /* dK and dV follow their keys; the last hop brings this rank's own back. */
        ND_TRY(hop(cp, cp->dkv[step % 2], cp->dkv[(step + 1) % 2], ND_DTYPE_F32,
                   step + 1 < comm->size ? NULL : &cp->arriving.done));
    }
    ND_OP(r, ND_TRACE_ATTENTION, cast, .out = nd_tensor_columns(b->dqkv, 0, d->H * d->D), .x = dq);
    cp->arrived = cp->dkv[comm->size % 2];
    return ND_OK;
}

const nd_cp_method nd_cp_method_ring = {
    .plan = ring_plan,
    .blocks = nd_cp_blocks_ring,
    .steps = true,
    .forward = ring_forward,
    .backward = ring_backward,
};

/* Keys and values, or their gradients, among the columns of a projection. */
static nd_kv_source local_source(const nd_cp *cp, nd_tensor qkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t k = d->H * d->D, v = k + d->K * d->D;
    return (nd_kv_source){qkv.data, qkv.dtype, d->s, qkv.stride[0], k, v, cp->sight.first_keys};
}

static nd_status local_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_kv_source kv = local_source(cp, qkv);
    return nd_cp_blocks_forward(cp, qkv, &kv, o, lse);
}

static nd_status local_backward(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_kv_source kv = local_source(cp, b->qkv);
    const nd_block_gradients to = {.dq = b->dqkv, .dkv = local_source(cp, b->dqkv)};
    return nd_cp_blocks_backward(cp, 0, b, &kv, &to);
}

const nd_cp_method nd_cp_method_local = {
    .blocks = nd_cp_blocks_ring,
    .in_place = true,
    .forward = local_forward,
    .backward = local_backward,
};
