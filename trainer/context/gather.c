// SPDX-License-Identifier: Apache-2.0
/*
 * The method allgather. Ranks exchange either all keys or, of separate documents, those alone that
 * other ranks see. With CUDA graphs both have the same ops with the same extents, whatever the
 * micro-batch is: only the exchange differs, which runs between the graphs of a block.
 */
#include "trainer/context/method.h"

/* visiting[0] and dkv[0] are the ranks of kv_rows. */
static void gather_plan(nd_cp *cp, nd_memplan *plan)
{
    const nd_dims *d = &cp->dims;
    const size_t global = (size_t)(d->B * d->S * 2 * d->K * d->D),
                 ranks = global + (size_t)(d->T * 2 * d->K * d->D), act = nd_dtype_size(d->act);
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    nd_memplan_want(plan, scratch, "cp: k v in rank order", ranks * act, &cp->visiting[0]);
    nd_memplan_want(plan, scratch, "cp: k v in global order", global * act, &cp->global_kv);
    nd_memplan_want(plan, scratch, "cp: dk dv in rank order", ranks * 4, &cp->dkv[0]);
    nd_memplan_want(plan, scratch, "cp: dk dv in global order", global * 4, &cp->dkv_global);
}

/* Rows of keys and values, or of their gradients. */
typedef struct kv_rows {
    nd_tensor ranks;       /* (T + B S): the rank's own, and behind them what arrives */
    nd_tensor own, others; /* (T), (B S) of those */
    nd_tensor global;      /* (B S): in the order of the text */
    nd_cp_key_lists lists; /* of separate documents */
} kv_rows;

static kv_rows rows_of(const nd_cp *cp, void *ranks, void *global, nd_dtype dtype)
{
    const nd_dims *d = &cp->dims;
    const int64_t all = d->B * d->S, columns = 2 * d->K * d->D;
    kv_rows r = {.ranks = nd_tensor_2d(ranks, dtype, d->T + all, columns),
                 .global = nd_tensor_2d(global, dtype, all, columns)};
    r.own = nd_tensor_rows(r.ranks, 0, d->T);
    r.others = nd_tensor_rows(r.ranks, d->T, all);
    if (cp->sight.first_keys) {
        r.lists = nd_cp_key_lists_of(d, (int32_t *)cp->sight.first_keys);
    }
    return r;
}

static kv_rows gradients_of(const nd_cp *cp)
{
    return rows_of(cp, cp->dkv[0], cp->dkv_global, ND_DTYPE_F32);
}

static nd_tensor ids_of(const int32_t *ids, nd_tensor rows)
{
    return nd_tensor_1d((int32_t *)ids, ND_DTYPE_I32, rows.shape[0]);
}

/* Row i of out is row ids[i] of x, or zeros where that is -1. */
static nd_status take_rows(nd_cp *cp, nd_tensor out, const int32_t *ids, nd_tensor x)
{
    if (out.shape[0] > 0) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, embedding_fwd, .out = out, .ids = ids_of(ids, out),
              .table = x);
    }
    return ND_OK;
}

/* Joined documents: what arrives, and the order of the text. */
static nd_status reorder(nd_cp *cp, const kv_rows *r, bool to_global)
{
    return nd_cp_reorder(cp, &cp->dims, ND_GROUP_CP, r->others.data, r->global, to_global);
}

/* Whether the ranks exchange only keys that are seen. */
static bool is_selected(const nd_cp *cp)
{
    return cp->sight.sent && cp->sight.sent[0] >= 0;
}

/* The rows that lists.sent may name in this call: in graphs always as many as there is room for. */
static nd_tensor listed_rows(const nd_cp *cp, nd_tensor rows)
{
    const int size = cp->rank->groups.by_kind[ND_GROUP_CP]->size;
    const int64_t sent = is_selected(cp) ? nd_comm_elements_before(cp->sight.sent + 1, 0, size) : 0;
    const bool all = cp->sight.first_keys && cp->rank->config->kernels.cuda_graphs;
    return all ? rows : nd_tensor_rows(rows, 0, sent / rows.shape[1]);
}

/* Keys that are seen, or their gradients, which go back. */
static nd_status exchange_seen(nd_cp *cp, bool back, nd_tensor send, nd_tensor recv, nd_event *done)
{
    nd_comm *comm = cp->rank->groups.by_kind[ND_GROUP_CP];
    const int64_t *to = cp->sight.sent + 1, *from = to + comm->size;
    ND_COMM(cp->rank, comm, all_to_all, done, .send = send.data, .recv = recv.data,
            .count = cp->sight.sent[0], .dtype = send.dtype, .sends = back ? from : to,
            .receives = back ? to : from);
    return ND_OK;
}

/* K and V of all ranks, or those that are seen, in the order of the text. */
static nd_status gather_kv(nd_cp *cp, nd_tensor qkv, nd_kv_source *out)
{
    nd_rank *rank = cp->rank;
    const kv_rows r = rows_of(cp, cp->visiting[0], cp->global_kv, cp->dims.act);
    *out = nd_cp_buffer_source(cp, cp->global_kv, cp->dims.act, cp->dims.S);
    ND_TRY(nd_cp_pack_kv(cp, qkv, r.own.data));
    ND_TRY(take_rows(cp, listed_rows(cp, r.global), r.lists.sent, r.own));
    if (is_selected(cp)) {
        ND_TRY(exchange_seen(cp, false, r.global, r.others, NULL));
    } else {
        ND_COMM(rank, rank->groups.by_kind[ND_GROUP_CP], all_gather, NULL, .send = r.own.data,
                .recv = r.others.data, .count = nd_tensor_count(r.own), .dtype = cp->dims.act);
    }
    return out->bounds ? take_rows(cp, r.global, r.lists.order, r.ranks) : reorder(cp, &r, true);
}

/* Of the keys that this rank saw: to their owners. What arrives are the sums of all ranks or, of
 * keys that are seen, what gather_finish adds to those of the rank itself. */
static nd_status return_gradients(nd_cp *cp)
{
    nd_rank *rank = cp->rank;
    const kv_rows r = gradients_of(cp);
    ND_TRY(cp->sight.first_keys ? take_rows(cp, r.ranks, r.lists.back, r.global)
                                : reorder(cp, &r, false));
    cp->arrived = r.own.data;
    if (is_selected(cp)) {
        return exchange_seen(cp, true, r.others, r.global, &cp->arriving.done);
    }
    ND_COMM(rank, rank->groups.by_kind[ND_GROUP_CP], reduce_scatter, &cp->arriving.done,
            .send = r.others.data, .recv = r.own.data, .count = nd_tensor_count(r.own),
            .dtype = ND_DTYPE_F32, .redop = ND_REDOP_SUM);
    return ND_OK;
}

/* By ascending rank; where all keys were gathered nothing is listed. */
static nd_status gather_finish(nd_cp *cp)
{
    const kv_rows r = gradients_of(cp);
    const nd_tensor sums = listed_rows(cp, r.global);
    if (sums.shape[0] > 0) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, embedding_bwd, .dtable = r.own,
              .ids = ids_of(r.lists.sent, sums), .dout = sums);
    }
    return ND_OK;
}

static nd_status gather_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    nd_kv_source kv;
    ND_TRY(gather_kv(cp, qkv, &kv));
    return nd_cp_blocks_forward(cp, qkv, &kv, o, lse);
}

static nd_status gather_backward(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_tensor sums = gradients_of(cp).global;
    nd_kv_source kv;
    const nd_block_gradients to = {
        .dq = b->dqkv,
        .dkv = nd_cp_buffer_source(cp, sums.data, ND_DTYPE_F32, cp->dims.S),
        .add_kv = true,
    };
    ND_TRY(gather_kv(cp, b->qkv, &kv));
    ND_TRY(nd_zero(&cp->rank->stream, sums.data, nd_tensor_bytes(sums)));
    ND_TRY(nd_cp_blocks_backward(cp, 0, b, &kv, &to));
    return return_gradients(cp);
}

const nd_cp_method nd_cp_method_gather = {
    .plan = gather_plan,
    .blocks = nd_cp_blocks_gathered,
    .forward = gather_forward,
    .backward = gather_backward,
    .finish = gather_finish,
};
