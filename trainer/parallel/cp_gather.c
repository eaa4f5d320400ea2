// SPDX-License-Identifier: Apache-2.0
/* The method allgather. */
#include "trainer/parallel/cp_method.h"

#include <string.h>

#include "runtime/base/math.h"

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

/* Of separate documents, behind the bounds, for all tokens each, -1 for what is not there:
 *   order  (B S): for each key of the rank, those of a sample in the order of the text, its row in
 *          what arrives
 *   back   (B S): for each row that arrives, the key's number in that order
 *   sent   (B S): for each row that is sent, of each receiver as many, the token */
typedef struct key_orders {
    const int32_t *order, *back, *sent;
} key_orders;

static key_orders orders_of(const nd_dims *d, const int32_t *numbers)
{
    const int32_t *order = numbers + ND_CP_BOUNDS * d->T;
    const int64_t all = d->B * d->S;
    return (key_orders){order, order + all, order + 2 * all};
}

static int64_t gather_first_key_count(const nd_dims *d, int size)
{
    return ND_CP_BOUNDS * d->T + 3 * d->B * d->S;
}

/* deal->before for the keys of a sample that queries of a rank see. First keys never descend. */
static void count_seen(const nd_cp_deal *deal, int64_t b, int rank)
{
    const nd_dims *d = deal->d;
    const int32_t *places = deal->places + b * d->S + rank * d->s;
    int64_t done = 0;
    memset(deal->before, 0, (size_t)(d->S + 1) * sizeof *deal->before);
    for (int64_t i = 0; i < d->s; i++) {
        const int64_t first = deal->first_keys[b * d->S + places[i]];
        for (done = nd_max(done, first); done <= places[i]; done++) {
            deal->before[done + 1] = 1;
        }
    }
    for (int64_t i = 0; i < d->S; i++) {
        deal->before[i + 1] += deal->before[i];
    }
}

static bool is_counted(const nd_cp_deal *deal, int64_t place)
{
    return deal->before[place + 1] > deal->before[place];
}

/* The most keys that one rank has and another one sees. */
static int64_t most_seen(const nd_cp_deal *deal)
{
    const nd_dims *d = deal->d;
    int64_t most = 0;
    for (int to = 0; to < deal->size; to++) {
        memset(deal->counts, 0, (size_t)deal->size * sizeof *deal->counts);
        for (int64_t b = 0; b < d->B; b++) {
            count_seen(deal, b, to);
            for (int64_t i = 0; i < d->S; i++) {
                deal->counts[i / d->s] += is_counted(deal, deal->places[b * d->S + i]);
            }
        }
        for (int from = 0; from < deal->size; from++) {
            most = nd_max(most, from == to ? 0 : deal->counts[from]);
        }
    }
    return most;
}

static void all_keys(const nd_cp_deal *deal, int32_t *order, int32_t *back)
{
    const nd_dims *d = deal->d;
    for (int64_t i = 0; i < d->B * d->S; i++) { /* in rank order: r, b, row of the rank */
        const int64_t b = i / d->s % d->B, r = i / d->s / d->B;
        const int64_t key = b * d->S + deal->places[b * d->S + r * d->s + i % d->s];
        order[key] = (int32_t)i;
        back[i] = (int32_t)key;
    }
}

/* What arrives are `rows` keys of each rank, by ascending rank; the rank's own tokens are behind
 * them. */
static void seen_keys(const nd_cp_deal *deal, int64_t rows, int32_t *order, int32_t *back)
{
    const nd_dims *d = deal->d;
    memset(deal->counts, 0, (size_t)deal->size * sizeof *deal->counts);
    for (int64_t i = 0; i < d->B * d->S; i++) {
        const int64_t b = i / d->S, place = i % d->S, at = deal->at[i], from = at / d->s;
        if (place == 0) {
            count_seen(deal, b, deal->index);
        }
        if (is_counted(deal, place)) {
            const int64_t key = b * d->S + deal->before[place];
            const int64_t row = from == deal->index ? deal->size * rows + b * d->s + at % d->s
                                                    : from * rows + deal->counts[from]++;
            order[key] = (int32_t)row;
            back[row] = (int32_t)key;
        }
    }
}

/* In the order of seen_keys of the receivers. */
static void sent_tokens(const nd_cp_deal *deal, int64_t rows, int32_t *sent)
{
    const nd_dims *d = deal->d;
    for (int to = 0; to < deal->size; to++) {
        int32_t *next = sent + to * rows;
        for (int64_t b = 0; b < d->B && to != deal->index; b++) {
            const int32_t *places = deal->places + b * d->S + deal->index * d->s;
            count_seen(deal, b, to);
            for (int64_t i = 0; i < d->s; i++) {
                if (is_counted(deal, places[i])) {
                    *next++ = (int32_t)(b * d->s + i);
                }
            }
        }
    }
}

/* Fewer than half of the keys are sent alone. */
static int64_t gather_first_keys(const nd_cp_deal *deal, int32_t *out)
{
    const nd_dims *d = deal->d;
    const int64_t all = d->B * d->S, most = deal->may_select ? most_seen(deal) : d->T;
    const int64_t rows = 2 * most < d->T ? nd_max(most, 1) : 0;
    int32_t *order = out + ND_CP_BOUNDS * d->T;
    memset(order, -1, (size_t)(3 * all) * sizeof *order);
    if (rows > 0) {
        seen_keys(deal, rows, order, order + all);
        sent_tokens(deal, rows, order + 2 * all);
    } else {
        all_keys(deal, order, order + all);
    }
    for (int64_t b = 0; b < d->B; b++) {
        if (rows > 0) {
            count_seen(deal, b, deal->index);
        } else {
            nd_cp_count_keys(deal, deal->places + b * d->S, d->S);
        }
        nd_cp_bounds(deal, b, out);
    }
    return rows;
}

/* Rows of k and v, or of their gradients. */
static nd_tensor kv_rows(const nd_cp *cp, void *data, nd_dtype dtype, int64_t rows)
{
    return nd_tensor_2d(data, dtype, rows, 2 * cp->dims.K * cp->dims.D);
}

static nd_tensor ids_of(const int32_t *ids, int64_t count)
{
    return nd_tensor_1d((int32_t *)ids, ND_DTYPE_I32, count);
}

/* out row i = row ids[i] of x, or zeros where that is -1. */
static nd_status take_rows(nd_cp *cp, nd_tensor out, const int32_t *ids, nd_tensor x)
{
    ND_OP(cp->rank, ND_TRACE_ATTENTION, embedding_fwd, .out = out, .ids = ids_of(ids, out.shape[0]),
          .table = x);
    return ND_OK;
}

static nd_status exchange_rows(nd_cp *cp, nd_tensor send, void *recv, int64_t rows, nd_event *done)
{
    ND_RUN(cp->rank, ND_TRACE_COMMUNICATION,
           nd_comm_all_to_all(cp->rank->groups.by_kind[ND_GROUP_CP], &cp->rank->stream,
                              &(nd_comm_args){.send = send.data,
                                              .recv = recv,
                                              .count = rows * send.shape[1],
                                              .dtype = send.dtype},
                              done));
    return ND_OK;
}

/* What of other ranks' keys and values is seen, and behind it the rank's own, in visiting[0]. */
static nd_status exchange_seen(nd_cp *cp, nd_tensor qkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t rows = cp->sight.sent_rows, n = cp->rank->groups.by_kind[ND_GROUP_CP]->size;
    const nd_tensor out = kv_rows(cp, cp->global_kv, d->act, n * rows);
    nd_tensor own = kv_rows(cp, cp->visiting[0], d->act, n * rows + d->T);
    ND_TRY(take_rows(cp, out, orders_of(d, cp->sight.first_keys).sent,
                     nd_tensor_columns(qkv, d->H * d->D, 2 * d->K * d->D)));
    ND_TRY(exchange_rows(cp, out, cp->visiting[0], rows, NULL));
    own.data = (char *)own.data + (size_t)(n * rows * own.shape[1]) * nd_dtype_size(d->act);
    return nd_cp_pack_kv(cp, qkv, own.data);
}

/* K and V of all ranks, or those that are seen, in the order of the text. */
static nd_status gather_kv(nd_cp *cp, nd_tensor qkv, nd_kv_source *out)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    int64_t kv = 2 * d->K * d->D;
    *out = nd_cp_buffer_source(d, cp->global_kv, d->act, d->S);
    out->bounds = cp->sight.first_keys;
    if (cp->sight.sent_rows > 0) {
        ND_TRY(exchange_seen(cp, qkv));
    } else {
        ND_TRY(nd_cp_pack_kv(cp, qkv, cp->pack));
        ND_RUN(r, ND_TRACE_COMMUNICATION,
               nd_comm_all_gather(r->groups.by_kind[ND_GROUP_CP], &r->stream,
                                  &(nd_comm_args){.send = cp->pack,
                                                  .recv = cp->visiting[0],
                                                  .count = d->T * kv,
                                                  .dtype = d->act},
                                  NULL));
    }
    if (out->bounds) {
        return take_rows(cp, kv_rows(cp, cp->global_kv, d->act, d->B * d->S),
                         orders_of(d, out->bounds).order,
                         kv_rows(cp, cp->visiting[0], d->act, d->B * d->S));
    }
    ND_RUN(r, ND_TRACE_ATTENTION,
           reorder(cp, cp->visiting[0], cp->global_kv, (size_t)kv * nd_dtype_size(d->act), true));
    return ND_OK;
}

/* Of the keys of all ranks that this one saw: to their owners, whose sums arrive. */
static nd_status return_gradients(nd_cp *cp)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    const int64_t columns = 2 * d->K * d->D, rows = cp->sight.sent_rows;
    const nd_tensor ranks = kv_rows(cp, cp->dkv_ranks, ND_DTYPE_F32, d->B * d->S);
    if (cp->sight.first_keys) {
        ND_TRY(take_rows(cp, ranks, orders_of(d, cp->sight.first_keys).back,
                         kv_rows(cp, cp->dkv_global, ND_DTYPE_F32, d->B * d->S)));
    } else {
        ND_RUN(
            r, ND_TRACE_ATTENTION,
            reorder(cp, (char *)cp->dkv_ranks, (char *)cp->dkv_global, (size_t)columns * 4, false));
    }
    if (rows > 0) { /* added to those of the rank's own, behind them */
        cp->arrived = cp->dkv_ranks + comm->size * rows * columns;
        return exchange_rows(cp, ranks, cp->dkv_global, rows, &cp->arriving.done);
    }
    cp->arrived = cp->dkv[0];
    ND_RUN(r, ND_TRACE_COMMUNICATION,
           nd_comm_reduce_scatter(comm, &r->stream,
                                  &(nd_comm_args){.send = cp->dkv_ranks,
                                                  .recv = cp->dkv[0],
                                                  .count = d->T * columns,
                                                  .dtype = ND_DTYPE_F32,
                                                  .redop = ND_REDOP_SUM},
                                  &cp->arriving.done));
    return ND_OK;
}

/* By ascending rank. */
static nd_status gather_finish(nd_cp *cp)
{
    const nd_dims *d = &cp->dims;
    const int64_t rows = cp->sight.sent_rows * cp->rank->groups.by_kind[ND_GROUP_CP]->size;
    if (rows > 0) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, embedding_bwd,
              .dtable = kv_rows(cp, (float *)cp->arrived, ND_DTYPE_F32, d->T),
              .ids = ids_of(orders_of(d, cp->sight.first_keys).sent, rows),
              .dout = kv_rows(cp, cp->dkv_global, ND_DTYPE_F32, rows));
    }
    return ND_OK;
}

static nd_status gather_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    nd_attention_block blocks[ND_CP_BLOCKS];
    nd_kv_source kv;
    ND_TRY(gather_kv(cp, qkv, &kv));
    const int count = nd_cp_blocks_of(cp, 0, cp->dims.S, blocks);
    for (int b = 0; b < count; b++) {
        ND_TRY(nd_cp_block_forward(cp, &blocks[b], qkv, &kv, o, lse));
    }
    return ND_OK;
}

static nd_status gather_backward(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_dims *d = &cp->dims;
    nd_attention_block blocks[ND_CP_BLOCKS];
    nd_kv_source kv;
    const nd_block_gradients to = {
        .dq = b->dqkv,
        .dkv = nd_cp_buffer_source(d, cp->dkv_global, ND_DTYPE_F32, d->S),
        .add_kv = true,
    };
    ND_TRY(gather_kv(cp, b->qkv, &kv));
    ND_TRY(nd_zero(&cp->rank->stream, cp->dkv_global, (size_t)(d->B * d->S * 2 * d->K * d->D) * 4));
    const int count = nd_cp_blocks_of(cp, 0, d->S, blocks);
    for (int i = 0; i < count; i++) {
        ND_TRY(nd_cp_block_backward(cp, &blocks[i], b, &kv, &to));
    }
    return return_gradients(cp);
}

const nd_cp_method nd_cp_method_gather = {
    .plan = gather_plan,
    .blocks = nd_cp_blocks_gathered,
    .first_key_count = gather_first_key_count,
    .first_keys = gather_first_keys,
    .forward = gather_forward,
    .backward = gather_backward,
    .finish = gather_finish,
};
