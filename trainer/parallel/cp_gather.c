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
 *   sent   (B S): for each row that is sent, receiver by receiver, the token */
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

/* A key of deal->first_keys that rank `from` has and rank `to` sees. */
typedef void visit_key(const nd_cp_deal *deal, int64_t key, int from, int to, int32_t *sent);

/* All of a sample, in an order that every rank follows. A query sees the keys of its document up to
 * its own: from the document's end on, each key is seen by the ranks that have a later one. */
static void each_exchanged(const nd_cp_deal *deal, int64_t b, visit_key *visit, int32_t *sent)
{
    const nd_dims *d = deal->d;
    int64_t sharers = 0;
    for (int64_t place = d->S; place-- > 0;) {
        const int64_t key = b * d->S + place;
        const int from = (int)(deal->at[key] / d->s);
        bool is_new = true;
        for (int64_t i = 0; i < sharers; i++) {
            if (deal->sharers[i] == from) {
                is_new = false;
            } else {
                visit(deal, key, from, deal->sharers[i], sent);
            }
        }
        if (is_new) {
            deal->sharers[sharers++] = from;
        }
        sharers = deal->first_keys[key] == place ? 0 : sharers;
    }
}

/* Of all ranks in deal->counts, what each sends and what each receives; of this one in deal->sent.
 */
static void count_key(const nd_cp_deal *deal, int64_t key, int from, int to, int32_t *sent)
{
    deal->counts[from]++;
    deal->counts[deal->size + to]++;
    deal->sent[0]++;
    deal->sent[1 + to] += from == deal->index;
    deal->sent[1 + deal->size + from] += to == deal->index;
}

/* Whether no rank sends or receives half of what it would where all keys are gathered. */
static bool are_few(const nd_cp_deal *deal)
{
    const int64_t all = (deal->size - 1) * deal->d->T;
    int64_t most = 0;
    memset(deal->counts, 0, (size_t)(2 * deal->size) * sizeof *deal->counts);
    memset(deal->sent, 0, (size_t)(1 + 2 * deal->size) * sizeof *deal->sent);
    for (int64_t b = 0; b < deal->d->B; b++) {
        each_exchanged(deal, b, count_key, NULL);
    }
    for (int i = 0; i < 2 * deal->size; i++) {
        most = nd_max(most, deal->counts[i]);
    }
    return 2 * most < all;
}

/* deal->counts are the rows of what is sent to each rank and of what arrives from each that come
 * next. */
static void place_key(const nd_cp_deal *deal, int64_t key, int from, int to, int32_t *sent)
{
    const nd_dims *d = deal->d;
    if (from == deal->index) {
        sent[deal->counts[to]++] = (int32_t)(key / d->S * d->s + deal->at[key] % d->s);
    }
    if (to == deal->index) {
        deal->rows[key % d->S] = (int32_t)deal->counts[deal->size + from]++;
    }
}

/* deal->rows of a sample where the keys that are seen arrive: rank by rank, the rank's own tokens
 * behind them. */
static void find_seen(const nd_cp_deal *deal, int64_t b, int32_t *sent)
{
    const nd_dims *d = deal->d;
    const int64_t arrive = nd_comm_elements_before(deal->sent + 1 + deal->size, 0, deal->size);
    const int32_t *places = deal->places + b * d->S + deal->index * d->s;
    memset(deal->rows, -1, (size_t)d->S * sizeof *deal->rows);
    for (int64_t i = 0; i < d->s; i++) {
        deal->rows[places[i]] = (int32_t)(arrive + b * d->s + i);
    }
    each_exchanged(deal, b, place_key, sent);
}

/* Where all arrive, in rank order (size, B, s). */
static void find_all(const nd_cp_deal *deal, int64_t b)
{
    const nd_dims *d = deal->d;
    for (int64_t place = 0; place < d->S; place++) {
        const int64_t at = deal->at[b * d->S + place];
        deal->rows[place] = (int32_t)((at / d->s * d->B + b) * d->s + at % d->s);
    }
}

/* The keys of deal->rows that are there, in the order of the text. */
static void number_keys(const nd_cp_deal *deal, int64_t b, int32_t *order, int32_t *back)
{
    int32_t key = (int32_t)(b * deal->d->S);
    deal->before[0] = 0;
    for (int64_t place = 0; place < deal->d->S; place++) {
        const int32_t row = deal->rows[place];
        if (row >= 0) {
            order[key] = row;
            back[row] = key++;
        }
        deal->before[place + 1] = key - (int32_t)(b * deal->d->S);
    }
}

/* Where they are few, the keys that another rank sees are sent alone. */
static void gather_first_keys(const nd_cp_deal *deal, int32_t *out)
{
    const nd_dims *d = deal->d;
    const int64_t all = d->B * d->S;
    const bool few = deal->may_select && are_few(deal);
    int32_t *order = out + ND_CP_BOUNDS * d->T;
    memset(order, -1, (size_t)(3 * all) * sizeof *order);
    for (int i = 0; few && i < deal->size; i++) {
        deal->counts[i] = nd_comm_elements_before(deal->sent + 1, 0, i);
        deal->counts[deal->size + i] = nd_comm_elements_before(deal->sent + 1 + deal->size, 0, i);
    }
    for (int64_t b = 0; b < d->B; b++) {
        if (few) {
            find_seen(deal, b, order + 2 * all);
        } else {
            find_all(deal, b);
        }
        number_keys(deal, b, order, order + all);
        nd_cp_bounds(deal, b, out);
    }
    for (int i = 0; few && i < 1 + 2 * deal->size; i++) { /* elements of rows */
        deal->sent[i] *= 2 * d->K * d->D;
    }
    deal->sent[0] = few ? deal->sent[0] : -1;
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
    if (out.shape[0] == 0) {
        return ND_OK;
    }
    ND_OP(cp->rank, ND_TRACE_ATTENTION, embedding_fwd, .out = out, .ids = ids_of(ids, out.shape[0]),
          .table = x);
    return ND_OK;
}

/* Whether the ranks exchange only keys that are seen. */
static bool is_selected(const nd_cp *cp)
{
    return cp->sight.sent && cp->sight.sent[0] >= 0;
}

/* Keys that are seen, as they are sent and as they arrive. */
typedef struct seen_keys {
    const int64_t *to, *from; /* elements of each rank */
    int64_t sent, arrive;     /* rows */
} seen_keys;

static seen_keys seen_keys_of(const nd_cp *cp)
{
    const int size = cp->rank->groups.by_kind[ND_GROUP_CP]->size;
    const int64_t *to = cp->sight.sent + 1, columns = 2 * cp->dims.K * cp->dims.D;
    return (seen_keys){to, to + size, nd_comm_elements_before(to, 0, size) / columns,
                       nd_comm_elements_before(to + size, 0, size) / columns};
}

/* Rows of those keys, or of their gradients, which go back. */
static nd_status exchange_rows(nd_cp *cp, bool back, nd_dtype dtype, const void *send, void *recv,
                               nd_event *done)
{
    const seen_keys seen = seen_keys_of(cp);
    ND_RUN(cp->rank, ND_TRACE_COMMUNICATION,
           nd_comm_all_to_all(cp->rank->groups.by_kind[ND_GROUP_CP], &cp->rank->stream,
                              &(nd_comm_args){.send = send,
                                              .recv = recv,
                                              .count = cp->sight.sent[0],
                                              .dtype = dtype,
                                              .sends = back ? seen.from : seen.to,
                                              .receives = back ? seen.to : seen.from},
                              done));
    return ND_OK;
}

/* What of other ranks' keys and values is seen, and behind it the rank's own, in visiting[0]. */
static nd_status exchange_seen(nd_cp *cp, nd_tensor qkv)
{
    const nd_dims *d = &cp->dims;
    const seen_keys seen = seen_keys_of(cp);
    const size_t row = (size_t)(2 * d->K * d->D) * nd_dtype_size(d->act);
    ND_TRY(take_rows(cp, kv_rows(cp, cp->global_kv, d->act, seen.sent),
                     orders_of(d, cp->sight.first_keys).sent,
                     nd_tensor_columns(qkv, d->H * d->D, 2 * d->K * d->D)));
    ND_TRY(exchange_rows(cp, false, d->act, cp->global_kv, cp->visiting[0], NULL));
    return nd_cp_pack_kv(cp, qkv, (char *)cp->visiting[0] + (size_t)seen.arrive * row);
}

/* K and V of all ranks, or those that are seen, in the order of the text. */
static nd_status gather_kv(nd_cp *cp, nd_tensor qkv, nd_kv_source *out)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    int64_t kv = 2 * d->K * d->D;
    *out = nd_cp_buffer_source(cp, cp->global_kv, d->act, d->S);
    if (is_selected(cp)) {
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
    const int64_t columns = 2 * d->K * d->D;
    const nd_tensor ranks = kv_rows(cp, cp->dkv_ranks, ND_DTYPE_F32, d->B * d->S);
    if (cp->sight.first_keys) {
        ND_TRY(take_rows(cp, ranks, orders_of(d, cp->sight.first_keys).back,
                         kv_rows(cp, cp->dkv_global, ND_DTYPE_F32, d->B * d->S)));
    } else {
        ND_RUN(
            r, ND_TRACE_ATTENTION,
            reorder(cp, (char *)cp->dkv_ranks, (char *)cp->dkv_global, (size_t)columns * 4, false));
    }
    if (is_selected(cp)) { /* added to those of the rank's own, behind them */
        cp->arrived = cp->dkv_ranks + seen_keys_of(cp).arrive * columns;
        return exchange_rows(cp, true, ND_DTYPE_F32, cp->dkv_ranks, cp->dkv_global,
                             &cp->arriving.done);
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
    const int64_t rows = is_selected(cp) ? seen_keys_of(cp).sent : 0;
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
    nd_kv_source kv;
    ND_TRY(gather_kv(cp, qkv, &kv));
    return nd_cp_blocks_forward(cp, qkv, &kv, o, lse);
}

static nd_status gather_backward(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_dims *d = &cp->dims;
    nd_kv_source kv;
    const nd_block_gradients to = {
        .dq = b->dqkv,
        .dkv = nd_cp_buffer_source(cp, cp->dkv_global, ND_DTYPE_F32, d->S),
        .add_kv = true,
    };
    ND_TRY(gather_kv(cp, b->qkv, &kv));
    ND_TRY(nd_zero(&cp->rank->stream, cp->dkv_global, (size_t)(d->B * d->S * 2 * d->K * d->D) * 4));
    ND_TRY(nd_cp_blocks_backward(cp, 0, b, &kv, &to));
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
