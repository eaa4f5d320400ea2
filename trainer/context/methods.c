// SPDX-License-Identifier: Apache-2.0
/*
 * The methods of exchanging keys and values, and the blocks of attention that they have in common.
 *
 * allgather: ranks exchange either all keys or, of separate documents, those alone that other ranks
 * see. With CUDA graphs both have the same ops with the same extents, whatever the micro-batch is:
 * only the exchange differs, which runs between the graphs of a block. local is a ring of one rank
 * whose keys stay where they are.
 */
#include "trainer/context/method.h"

#include "runtime/base/math.h"

int nd_cp_blocks_gathered(int size, int index, int step, int64_t chunk, int64_t window,
                          nd_attention_block out[ND_CP_BLOCKS])
{
    if (size == 1) {
        out[0] = (nd_attention_block){0, chunk, 0, chunk, 0};
        return 1;
    }
    int64_t place[2] = {index, 2 * size - 1 - index};
    for (int c = 0; c < 2; c++) {
        out[c] =
            (nd_attention_block){c * chunk, chunk, 0, (place[c] + 1) * chunk, place[c] * chunk};
    }
    return 2;
}

/* With a window a block is a chunk of queries and one of keys, some of which it sees: first those
 * with the same number, where both are this rank's. */
static int blocks_with_window(int size, int index, int step, int64_t chunk, int64_t window,
                              nd_attention_block out[ND_CP_BLOCKS])
{
    const int64_t from = (index - step + size) % size;
    const int64_t queries[2] = {index, 2 * size - 1 - index}, keys[2] = {from, 2 * size - 1 - from};
    int count = 0;
    for (int64_t pair = 0; pair < 4; pair++) {
        const int64_t q = pair % 2, k = pair < 2 ? q : 1 - q;
        const int64_t between = (queries[q] - keys[k]) * chunk;
        if (between >= 0 && between - chunk + 1 < window) {
            out[count++] = (nd_attention_block){q * chunk, chunk, k * chunk, chunk, between};
        }
    }
    return count;
}

int nd_cp_blocks_ring(int size, int index, int step, int64_t chunk, int64_t window,
                      nd_attention_block out[ND_CP_BLOCKS])
{
    if (size == 1) {
        return nd_cp_blocks_gathered(size, index, step, chunk, window, out);
    }
    if (window > 0) {
        return blocks_with_window(size, index, step, chunk, window, out);
    }
    if (step == 0) {
        out[0] = (nd_attention_block){0, chunk, 0, chunk, 0};
        out[1] = (nd_attention_block){chunk, chunk, 0, 2 * chunk, chunk};
        return 2;
    }
    if (step <= index) { /* an earlier rank: one chunk before both of ours, one after */
        out[0] = (nd_attention_block){0, chunk, 0, chunk, chunk};
        out[1] = (nd_attention_block){chunk, chunk, 0, chunk, chunk};
        return 2;
    }
    /* A later rank: both its chunks are before our second one. */
    out[0] = (nd_attention_block){chunk, chunk, 0, 2 * chunk, 2 * chunk};
    return 1;
}

/* CUDA graphs, which are replayed whatever the documents are, have so many. A document is rarely
 * in more tiles of a rank (deal.h). */
enum { ROUNDS_OF_GRAPHS = 4 };

/* Says what the queries of the rank see of the keys of a step. In a step of a ring a window sees
 * other keys from row to row. */
static nd_segments segments_of(const nd_cp *cp, int step)
{
    if (cp->method->in_place || (cp->method->steps && step == 0 && cp->sight.window == 0)) {
        return ND_SEGMENTS_WHOLE;
    }
    return !cp->method->steps      ? ND_SEGMENTS_DIAGONAL
           : cp->sight.window == 0 ? ND_SEGMENTS_FLAT
                                   : ND_SEGMENTS_NONE;
}

/* The blocks of a step, for what cp->sight says; keys: how many rows of them there are. Returns
 * their number. Where documents are separate, bounds say what is visible, and diag, which no op
 * reads then, what work is estimated: that of one document. */
static int blocks_of(const nd_cp *cp, int step, int64_t keys, nd_attention_block out[ND_CP_BLOCKS])
{
    const nd_mesh *mesh = &cp->rank->mesh;
    const int size = nd_mesh_group_size(mesh, ND_GROUP_CP);
    const int index = nd_mesh_group_index(mesh, ND_GROUP_CP, cp->rank->rank);
    const int64_t s = cp->dims.s;
    if (cp->sight.first_keys) {
        const bool graphs = cp->rank->config->kernels.cuda_graphs;
        out[0] = (nd_attention_block){0, s, 0, keys, (keys - s) / 2, segments_of(cp, step)};
        out[0].rounds = out[0].documents == ND_SEGMENTS_WHOLE ? 1
                        : graphs                              ? ROUNDS_OF_GRAPHS
                        : cp->sight.sent                      ? cp->sight.sent[1 + 2 * size + step]
                                                              : 1;
        return 1;
    }
    return cp->method->blocks(size, index, step, cp->dims.chunk, cp->sight.window, out);
}

static nd_attention attention_of(const nd_cp *cp, const nd_attention_block *block)
{
    const nd_dims *d = &cp->dims;
    return (nd_attention){
        .batch = d->B,
        .sq = block->q_count,
        .sk = block->kv_count,
        .heads = d->H,
        .kv_heads = d->K,
        .head_dim = d->D,
        .diag = block->diag,
        .scale = d->attention_scale,
        .window = cp->sight.first_keys && cp->method->steps ? 0 : cp->sight.window,
        .documents = block->documents,
        .rounds = block->rounds,
    };
}

/* The block's queries in a (T, H D) tensor, or in the first columns of a wider one: (B, q_count, H,
 * D). */
static nd_tensor q_view(const nd_dims *d, nd_tensor t, const nd_attention_block *block)
{
    nd_tensor v = nd_tensor_4d(t.data, t.dtype, d->B, block->q_count, d->H, d->D);
    const int64_t first = block->q_begin * t.stride[0];
    v.data = t.data ? (char *)t.data + (size_t)first * nd_dtype_size(t.dtype) : NULL;
    v.stride[0] = d->s * t.stride[0];
    v.stride[1] = t.stride[0];
    return v;
}

/* Returns where the keys of a block are: the projection itself (cp = 1), or a buffer of k v
 * rows. */
typedef struct kv_source {
    void *data;
    nd_dtype dtype;
    int64_t rows, stride;  /* rows per sample, elements per row */
    int64_t k, v;          /* first column of each */
    const int32_t *bounds; /* of nd_cp_first_keys, on the device; NULL: documents are joined */
} kv_source;

/* The block's rows of a source, from column `column`: (B, count, K, D). */
static nd_tensor kv_view(const nd_dims *d, const kv_source *from, int64_t column,
                         const nd_attention_block *block)
{
    nd_tensor v = nd_tensor_4d(from->data, from->dtype, d->B, block->kv_count, d->K, d->D);
    v.data = (char *)from->data +
             (size_t)(block->kv_begin * from->stride + column) * nd_dtype_size(from->dtype);
    v.stride[0] = from->rows * from->stride;
    v.stride[1] = from->stride;
    return v;
}

/* Their numbers in rows of T H: (B, H, q_count). */
static nd_tensor row_view(const nd_dims *d, const float *base, const nd_attention_block *block)
{
    return nd_tensor_3d((float *)base + block->q_begin * d->B * d->H, ND_DTYPE_F32, d->B, d->H,
                        block->q_count);
}

/* Row `of` of a block's bounds: among keys that travel, those of a window, which counts tokens of
 * the text, are in the second one. */
static nd_tensor bounds_of(const nd_dims *d, const kv_source *kv, int64_t of)
{
    return kv->bounds ? nd_tensor_2d((int32_t *)kv->bounds + of * d->T, ND_DTYPE_I32, d->B, d->s)
                      : (nd_tensor){0};
}

static nd_tensor first_keys_of(const nd_cp *cp, const kv_source *kv)
{
    return bounds_of(&cp->dims, kv, cp->method->steps && cp->sight.window > 0);
}

static kv_source buffer_source(const nd_cp *cp, void *data, nd_dtype dtype, int64_t rows)
{
    const int64_t columns = cp->dims.K * cp->dims.D;
    return (kv_source){data, dtype, rows, 2 * columns, 0, columns, cp->sight.first_keys};
}

static nd_status block_forward(nd_cp *cp, const nd_attention_block *block, nd_tensor qkv,
                               const kv_source *kv, nd_tensor o, const float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_attention a = attention_of(cp, block);
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_fwd, .attention = a, .out = q_view(d, o, block),
          .lse = row_view(d, lse, block), .q = q_view(d, qkv, block),
          .k = kv_view(d, kv, kv->k, block), .v = kv_view(d, kv, kv->v, block),
          .first_key = first_keys_of(cp, kv), .end_key = bounds_of(d, kv, 2),
          .scratch = cp->scratch);
    return ND_OK;
}

/* k and v columns of qkv, packed to rows of 2 K D. */
static nd_status pack_kv(nd_cp *cp, nd_tensor qkv, void *out)
{
    const nd_dims *d = &cp->dims;
    int64_t kv = 2 * d->K * d->D;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_2d(out, d->act, d->T, kv),
          .x = nd_tensor_columns(qkv, d->H * d->D, kv));
    return ND_OK;
}

nd_status nd_cp_reorder(nd_cp *cp, const nd_dims *t, nd_group_kind group, void *ranks,
                        nd_tensor rows, bool to_rows)
{
    const int64_t members = nd_mesh_group_size(&cp->rank->mesh, group), width = rows.shape[1];
    const int64_t bytes = (int64_t)nd_dtype_size(rows.dtype);
    for (int64_t c = 0; c < 2; c++) {
        const int64_t first = c == 0 ? 0 : 2 * members - 1, step = c == 0 ? 1 : -1;
        char *of_ranks = (char *)ranks + c * t->chunk * width * bytes;
        char *at = (char *)rows.data + first * t->chunk * width * bytes;
        nd_tensor r = nd_tensor_4d(of_ranks, rows.dtype, members, t->B, t->chunk, width);
        nd_tensor x = nd_tensor_4d(at, rows.dtype, members, t->B, t->chunk, width);
        r.stride[0] = t->T * width;
        r.stride[1] = t->s * width;
        x.stride[0] = step * t->chunk * width;
        x.stride[1] = members * t->s * width;
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = to_rows ? x : r, .x = to_rows ? r : x);
    }
    return ND_OK;
}

/* The gradients of a block go here: dq (T, columns), dk and dv. They are added to what is there, or
 * not. */
typedef struct block_gradients {
    nd_tensor dq;
    kv_source dkv;
    bool add_q, add_kv;
} block_gradients;

static nd_status block_backward(nd_cp *cp, const nd_attention_block *block, const nd_cp_backward *b,
                                const kv_source *kv, const block_gradients *to)
{
    const nd_dims *d = &cp->dims;
    const kv_source *dkv = &to->dkv;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_bwd, .attention = attention_of(cp, block),
          .dq = q_view(d, to->dq, block), .dk = kv_view(d, dkv, dkv->k, block),
          .dv = kv_view(d, dkv, dkv->v, block), .q = q_view(d, b->qkv, block),
          .k = kv_view(d, kv, kv->k, block), .v = kv_view(d, kv, kv->v, block),
          .out = q_view(d, b->o, block), .dout = q_view(d, b->dout, block),
          .lse = row_view(d, b->lse, block),
          .delta = cp->delta ? row_view(d, cp->delta, block) : (nd_tensor){0},
          .first_key = first_keys_of(cp, kv), .end_key = bounds_of(d, kv, 2), .add_q = to->add_q,
          .add_kv = to->add_kv, .scratch = cp->scratch);
    return ND_OK;
}

/* The blocks of a step backward, with the keys of kv. */
static nd_status blocks_backward(nd_cp *cp, int step, const nd_cp_backward *b, const kv_source *kv,
                                 const block_gradients *to)
{
    nd_attention_block blocks[ND_CP_BLOCKS];
    const int count = blocks_of(cp, step, kv->rows, blocks);
    for (int i = 0; i < count; i++) {
        ND_TRY(block_backward(cp, &blocks[i], b, kv, to));
    }
    return ND_OK;
}

/* Attention by any method. */

/* The answer depends on dtypes, head counts, rows and whether there is a window. Parts of blocks
 * have the rows of one chunk or of two; two leave no single row behind tiles, so one chunk answers
 * for all. With first keys it is always read. */
static bool uses_delta(const nd_cp *cp)
{
    const int64_t chunk = cp->dims.chunk;
    const nd_attention a = attention_of(cp, &(nd_attention_block){0, chunk, 0, chunk, 0});
    const nd_ops *ops = cp->rank->ops;
    return cp->sight.first_keys || ops->attention_uses_delta(cp->rank->device, &a, cp->dims.act);
}

/* The largest need of all blocks of this rank, forward and backward, for what cp->sight says. */
static size_t scratch_bytes(const nd_cp *cp)
{
    const nd_rank *r = cp->rank;
    const bool travel = cp->method->steps;
    const int steps = travel ? nd_mesh_group_size(&r->mesh, ND_GROUP_CP) : 1;
    size_t bytes = 0;
    for (int step = 0; step < steps; step++) {
        nd_attention_block blocks[ND_CP_BLOCKS];
        const int count = blocks_of(cp, step, travel ? cp->dims.s : cp->dims.S, blocks);
        for (int i = 0; i < 2 * count; i++) {
            nd_attention a = attention_of(cp, &blocks[i / 2]);
            size_t asked = r->ops->attention_scratch(r->device, &a, cp->dims.act, i % 2 != 0);
            bytes = nd_max_bytes(bytes, asked);
        }
    }
    return bytes;
}

void nd_cp_plan_method(nd_cp *cp, nd_memplan *plan)
{
    static const int32_t some_key;
    const nd_dims *d = &cp->dims;
    const int64_t window = cp->rank->shape.window < d->S ? cp->rank->shape.window : 0;
    size_t scratch = 0;
    bool delta = false;
    if (cp->method->plan) {
        cp->method->plan(cp, plan);
    }
    for (int i = 0; i < 2 + cp->separate; i++) {
        cp->sight = (nd_sight){.window = i == 1 ? window : 0, .first_keys = i == 2 ? &some_key : 0};
        scratch = nd_max_bytes(scratch, scratch_bytes(cp));
        delta |= uses_delta(cp);
    }
    cp->sight = (nd_sight){0};
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: delta",
                    delta ? (size_t)(d->T * d->H) * sizeof *cp->delta : 0, &cp->delta);
    nd_memplan_want(plan, ND_MEM_SCRATCH, "attention: blocks", scratch, &cp->scratch);
}

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    const int64_t rows = cp->sight.first_keys ? d->s : d->chunk;
    for (int64_t at = 0; at < d->s && uses_delta(cp); at += rows) {
        const nd_attention_block all = {at, rows, 0, rows, 0};
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta, .attention = attention_of(cp, &all),
              .delta = row_view(d, cp->delta, &all), .out = q_view(d, o, &all),
              .dout = q_view(d, dout, &all));
    }
    return ND_OK;
}

/* allgather */

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

/* True where the ranks exchange only keys that are seen. */
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
static nd_status gather_kv(nd_cp *cp, nd_tensor qkv, kv_source *out)
{
    nd_rank *rank = cp->rank;
    const kv_rows r = rows_of(cp, cp->visiting[0], cp->global_kv, cp->dims.act);
    *out = buffer_source(cp, cp->global_kv, cp->dims.act, cp->dims.S);
    ND_TRY(pack_kv(cp, qkv, r.own.data));
    ND_TRY(take_rows(cp, listed_rows(cp, r.global), r.lists.sent, r.own));
    if (is_selected(cp)) {
        ND_TRY(exchange_seen(cp, false, r.global, r.others, NULL));
    } else {
        ND_COMM(rank, rank->groups.by_kind[ND_GROUP_CP], all_gather, NULL, .send = r.own.data,
                .recv = r.others.data, .count = nd_tensor_count(r.own), .dtype = cp->dims.act);
    }
    return out->bounds ? take_rows(cp, r.global, r.lists.order, r.ranks) : reorder(cp, &r, true);
}

/* Sends the gradients of the keys that this rank saw to their owners. What arrives are the sums of
 * all ranks or, of keys that are seen, what gather_finish adds to those of the rank itself. */
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

/* gather and local, where all keys are there at once */

/* Keys and values, or their gradients, among the columns of a projection. */
static kv_source local_source(const nd_cp *cp, nd_tensor qkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t k = d->H * d->D, v = k + d->K * d->D;
    return (kv_source){qkv.data, qkv.dtype, d->s, qkv.stride[0], k, v, cp->sight.first_keys};
}

/* All keys that the queries see: in the projection, or gathered. */
static nd_status find_keys(nd_cp *cp, nd_tensor qkv, kv_source *out)
{
    if (!cp->method->in_place) {
        return gather_kv(cp, qkv, out);
    }
    *out = local_source(cp, qkv);
    return ND_OK;
}

static nd_status forward_at_once(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    nd_attention_block blocks[ND_CP_BLOCKS];
    kv_source kv;
    ND_TRY(find_keys(cp, qkv, &kv));
    const int count = blocks_of(cp, 0, kv.rows, blocks);
    for (int i = 0; i < count; i++) {
        ND_TRY(block_forward(cp, &blocks[i], qkv, &kv, o, lse));
    }
    return ND_OK;
}

/* The gradients of gathered keys are sums over the blocks, which then go to the keys' ranks. */
static nd_status backward_at_once(nd_cp *cp, const nd_cp_backward *b)
{
    const nd_dims *d = &cp->dims;
    const bool sums = !cp->method->in_place;
    const size_t bytes = (size_t)(d->B * d->S * 2 * d->K * d->D) * sizeof *cp->dkv_global;
    const block_gradients to = {
        .dq = b->dqkv,
        .dkv = sums ? buffer_source(cp, cp->dkv_global, ND_DTYPE_F32, d->S)
                    : local_source(cp, b->dqkv),
        .add_kv = sums,
    };
    kv_source kv;
    ND_TRY(make_delta(cp, b->o, b->dout));
    ND_TRY(find_keys(cp, b->qkv, &kv));
    ND_TRY(sums ? nd_zero(&cp->rank->stream, cp->dkv_global, bytes) : ND_OK);
    ND_TRY(blocks_backward(cp, 0, b, &kv, &to));
    return sums ? return_gradients(cp) : ND_OK;
}

const nd_cp_method nd_cp_method_gather = {
    .plan = gather_plan,
    .blocks = nd_cp_blocks_gathered,
    .forward = forward_at_once,
    .backward = backward_at_once,
    .finish = gather_finish,
};

const nd_cp_method nd_cp_method_local = {
    .blocks = nd_cp_blocks_ring,
    .in_place = true,
    .forward = forward_at_once,
    .backward = backward_at_once,
};

/* ring */

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

/* Begins one hop of the ring behind a step: what the step has in one of two buffers goes to the
 * next rank, and the other buffer is filled by the rank before. */
static nd_status hop(nd_cp *cp, int step, void *const buffers[2], nd_dtype dtype, nd_event *done)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    int next = (comm->index + 1) % comm->size, before = (comm->index + comm->size - 1) % comm->size;
    ND_COMM(r, comm, exchange, done, .send = buffers[step % 2], .recv = buffers[(step + 1) % 2],
            .count = d->T * 2 * d->K * d->D, .dtype = dtype, .to = next, .from = before);
    return ND_OK;
}

/* kv: the keys that visit in this step. Those of the next one are there when they have arrived. */
static nd_status begin_step(nd_cp *cp, int step, kv_source *kv, nd_event *arrived)
{
    const nd_dims *d = &cp->dims;
    *arrived = (nd_event){0};
    *kv = buffer_source(cp, cp->visiting[step % 2], d->act, d->s);
    kv->bounds = kv->bounds ? kv->bounds + step * ND_CP_BOUNDS * d->T : NULL;
    return step + 1 < cp->rank->groups.by_kind[ND_GROUP_CP]->size
               ? hop(cp, step, cp->visiting, d->act, arrived)
               : ND_OK;
}

static nd_status ring_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    const nd_dims *d = &cp->dims;
    nd_rank *r = cp->rank;
    nd_comm *comm = r->groups.by_kind[ND_GROUP_CP];
    nd_tensor acc = nd_tensor_2d(cp->acc, ND_DTYPE_F32, d->T, d->H * d->D);
    nd_tensor part = nd_tensor_2d(cp->part, d->act, d->T, d->H * d->D);
    ND_TRY(pack_kv(cp, qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived;
        nd_attention_block blocks[ND_CP_BLOCKS];
        kv_source kv;
        ND_TRY(begin_step(cp, step, &kv, &arrived));
        const int count = blocks_of(cp, step, d->s, blocks);
        for (int b = 0; b < count; b++) {
            const nd_attention_block *block = &blocks[b];
            /* The first block of some queries is the sum so far; all queries have one in step 0. */
            const bool first = step == 0 && block->q_begin == b * block->q_count;
            ND_TRY(block_forward(cp, block, qkv, &kv, part, first ? cp->acc_lse : cp->part_lse));
            if (!first) {
                ND_OP(r, ND_TRACE_ATTENTION, lse_merge, .attention = attention_of(cp, block),
                      .acc = q_view(d, acc, block), .acc_lse = row_view(d, cp->acc_lse, block),
                      .out = q_view(d, part, block), .lse = row_view(d, cp->part_lse, block));
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
    void *const dkv[] = {cp->dkv[0], cp->dkv[1]};
    size_t dkv_bytes = (size_t)(d->T * 2 * d->K * d->D) * 4;
    ND_TRY(make_delta(cp, b->o, b->dout));
    ND_TRY(nd_zero(&r->stream, dq.data, nd_tensor_bytes(dq)));
    ND_TRY(nd_zero(&r->stream, cp->dkv[0], dkv_bytes));
    ND_TRY(pack_kv(cp, b->qkv, cp->visiting[0]));
    for (int step = 0; step < comm->size; step++) {
        nd_event arrived;
        kv_source kv;
        ND_TRY(begin_step(cp, step, &kv, &arrived));
        const block_gradients to = {
            .dq = dq,
            .dkv = buffer_source(cp, cp->dkv[step % 2], ND_DTYPE_F32, d->s),
            .add_q = true,
            .add_kv = true,
        };
        ND_TRY(blocks_backward(cp, step, b, &kv, &to));
        ND_RUN(r, ND_TRACE_COMMUNICATION, nd_stream_wait(&r->stream, &arrived));
        /* dK and dV follow their keys; the last hop brings this rank's own back. */
        ND_TRY(hop(cp, step, dkv, ND_DTYPE_F32, step + 1 < comm->size ? NULL : &cp->arriving.done));
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
