// SPDX-License-Identifier: Apache-2.0
/*
 * Attention by the method of the rank, and around it the exchange of tokens for heads among the
 * ranks of the group ulysses (Jacobs et al., DeepSpeed Ulysses, 2023). A message to a member has,
 * for each token of the sender, the columns of the receiver's heads: its q heads, then k and v.
 * Members are adjacent ranks of cp, so that their chunks in zig-zag order are two runs of the
 * sequence, ascending and descending by member.
 */
#include "trainer/context/method.h"

#include "runtime/base/math.h"

static const nd_cp_method *method_of(const nd_rank *rank)
{
    const int size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    return size == 1             ? &nd_cp_method_local
           : nd_cp_gathers(rank) ? &nd_cp_method_gather
                                 : &nd_cp_method_ring;
}

/* The answer depends on dtypes, head counts, rows and whether there is a window. Parts of blocks
 * have the rows of one chunk or of two; two leave no single row behind tiles, so one chunk answers
 * for all. With first keys it is always read. */
static bool uses_delta(const nd_cp *cp)
{
    const int64_t chunk = cp->dims.chunk;
    const nd_attention a = nd_cp_attention_of(cp, &(nd_attention_block){0, chunk, 0, chunk, 0});
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
        const int count = nd_cp_blocks_of(cp, step, travel ? cp->dims.s : cp->dims.S, blocks);
        for (int i = 0; i < 2 * count; i++) {
            nd_attention a = nd_cp_attention_of(cp, &blocks[i / 2]);
            size_t asked = r->ops->attention_scratch(r->device, &a, cp->dims.act, i % 2 != 0);
            bytes = nd_max_bytes(bytes, asked);
        }
    }
    return bytes;
}

/* For layers with and without a window, and for micro-batches of separate documents. */
static void plan_attention(nd_cp *cp, nd_memplan *plan)
{
    static const int32_t some_key;
    const nd_dims *d = &cp->dims;
    const int64_t window = cp->rank->shape.window < d->S ? cp->rank->shape.window : 0;
    size_t scratch = 0;
    bool delta = false;
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

static void plan_ulysses(nd_cp *cp, nd_memplan *plan)
{
    nd_cp_ulysses *u = &cp->ulysses;
    u->members = nd_mesh_group_size(&cp->rank->mesh, ND_GROUP_ULYSSES);
    if (u->members == 1) {
        return;
    }
    const nd_dims *d = &cp->dims;
    const nd_mem_class scratch = ND_MEM_SCRATCH;
    const size_t act = nd_dtype_size(d->act), qkv = (size_t)(d->T * d->QKV) * act,
                 o = (size_t)(d->T * d->H * d->D) * act;
    const bool replicas = cp->tokens.K < u->members;
    nd_memplan_want(plan, scratch, "ulysses: messages", qkv, &u->out);
    nd_memplan_want(plan, scratch, "ulysses: arriving messages", qkv, &u->in);
    nd_memplan_want(plan, scratch, "ulysses: q k v of heads", qkv, &u->qkv);
    nd_memplan_want(plan, scratch, "ulysses: dq dk dv of heads", qkv, &u->dqkv);
    nd_memplan_want(plan, scratch, "ulysses: output of heads", o, &u->o);
    nd_memplan_want(plan, scratch, "ulysses: its gradient", o, &u->dout);
    nd_memplan_want(plan, scratch, "ulysses: sums over replicas",
                    replicas ? (size_t)(cp->tokens.T * cp->tokens.K * d->D) * 4 : 0, &u->sums);
}

void nd_cp_init(nd_cp *cp, nd_rank *rank, const nd_dims *tokens, bool separate, nd_memplan *plan)
{
    *cp = (nd_cp){.rank = rank, .tokens = *tokens, .separate = separate};
    cp->dims = nd_cp_dims_of_heads(rank, tokens);
    cp->method = method_of(rank);
    plan_ulysses(cp, plan);
    if (cp->method->plan) {
        cp->method->plan(cp, plan);
    }
    plan_attention(cp, plan);
}

static nd_status make_delta(nd_cp *cp, nd_tensor o, nd_tensor dout)
{
    const nd_dims *d = &cp->dims;
    const int64_t rows = cp->sight.first_keys ? d->s : d->chunk;
    for (int64_t at = 0; at < d->s && uses_delta(cp); at += rows) {
        const nd_attention_block all = {at, rows, 0, rows, 0};
        ND_OP(cp->rank, ND_TRACE_ATTENTION, attention_delta,
              .attention = nd_cp_attention_of(cp, &all),
              .delta = nd_cp_row_view(d, cp->delta, &all), .out = nd_cp_q_view(d, o, &all),
              .dout = nd_cp_q_view(d, dout, &all));
    }
    return ND_OK;
}

static nd_status heads_backward(nd_cp *cp, const nd_cp_backward *b)
{
    ND_TRY(make_delta(cp, b->o, b->dout));
    return cp->method->backward(cp, b);
}

static nd_status heads_backward_finish(nd_cp *cp, nd_tensor dqkv)
{
    const nd_dims *d = &cp->dims;
    const int64_t kv = 2 * d->K * d->D;
    ND_TRY(nd_exchange_finish(cp->rank, &cp->arriving));
    ND_TRY(cp->method->finish ? cp->method->finish(cp) : ND_OK);
    if (!cp->method->in_place) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = nd_tensor_columns(dqkv, d->H * d->D, kv),
              .x = nd_tensor_2d(cp->arrived, ND_DTYPE_F32, d->T, kv));
    }
    return ND_OK;
}

/* Ulysses. */

/* Heads that lie beside one another, as (T, groups, replicas, columns): member m has the columns of
 * group m / replicas. They begin at `column` of the rows of the rank's tokens, and at column_in of
 * those of messages, which have `width` columns. */
typedef struct heads {
    int64_t groups, replicas, columns, column, column_in, width;
} heads;

static nd_tensor view_of(const nd_cp *cp, const heads *h, void *data, int64_t column)
{
    char *first = (char *)data + column * (int64_t)nd_dtype_size(cp->dims.act);
    return nd_tensor_4d(first, cp->dims.act, cp->tokens.T, h->groups, h->replicas, h->columns);
}

static nd_tensor token_view(const nd_cp *cp, const heads *h, nd_tensor x)
{
    nd_tensor t = view_of(cp, h, x.data, h->column);
    t.stride[0] = x.stride[0];
    t.stride[1] = h->columns;
    t.stride[2] = 0;
    return t;
}

static nd_tensor message_view(const nd_cp *cp, const heads *h, void *messages)
{
    nd_tensor t = view_of(cp, h, messages, h->column_in);
    t.stride[0] = h->width;
    t.stride[2] = cp->tokens.T * h->width;
    t.stride[1] = h->replicas * t.stride[2];
    return t;
}

/* q, k and v of a projection, or with one part the heads of an output; returns their number. */
static int parts_of(const nd_cp *cp, bool output, heads parts[3])
{
    const nd_dims *t = &cp->tokens, *d = &cp->dims;
    const int64_t counts[] = {t->H, t->K, t->K}, members = cp->ulysses.members;
    heads next = {.width = output ? d->H * d->D : d->QKV};
    for (int i = 0; i < 3; i++) {
        next.groups = nd_min(counts[i], members);
        next.replicas = members / next.groups;
        next.columns = counts[i] / next.groups * d->D;
        parts[i] = next;
        next.column += next.groups * next.columns;
        next.column_in += next.columns;
    }
    return output ? 1 : 3;
}

static nd_status exchange(nd_cp *cp, int64_t width, nd_event *done)
{
    nd_rank *r = cp->rank;
    ND_COMM(r, r->groups.by_kind[ND_GROUP_ULYSSES], all_to_all, done, .send = cp->ulysses.out,
            .recv = cp->ulysses.in, .count = cp->tokens.T * width, .dtype = cp->dims.act);
    return ND_OK;
}

/* Messages, and rows of all members' tokens. */
static nd_status reorder(nd_cp *cp, void *messages, void *rows, int64_t width, bool to_rows)
{
    const nd_tensor all = nd_tensor_2d(rows, cp->dims.act, cp->dims.T, width);
    return nd_cp_reorder(cp, &cp->tokens, ND_GROUP_ULYSSES, messages, all, to_rows);
}

/* From all heads of the rank's tokens to the rank's heads of all members' tokens. */
static nd_status to_heads(nd_cp *cp, nd_tensor x, bool output, void *out)
{
    heads parts[3];
    const int count = parts_of(cp, output, parts);
    for (int i = 0; i < count; i++) {
        ND_OP(cp->rank, ND_TRACE_ATTENTION, cast,
              .out = message_view(cp, &parts[i], cp->ulysses.out),
              .x = token_view(cp, &parts[i], x));
    }
    ND_TRY(exchange(cp, parts[0].width, NULL));
    return reorder(cp, cp->ulysses.in, out, parts[0].width, true);
}

/* The way back in two halves: what arrives is there when `done` is. */
static nd_status begin_to_tokens(nd_cp *cp, void *rows, bool output, nd_event *done)
{
    heads parts[3];
    parts_of(cp, output, parts);
    ND_TRY(reorder(cp, cp->ulysses.out, rows, parts[0].width, false));
    return exchange(cp, parts[0].width, done);
}

/* A KV head that several members have has the sum of their gradients, in F32, by ascending
 * member. */
static nd_status add_replicas(nd_cp *cp, const heads *h, nd_tensor to)
{
    const nd_tensor sums =
        nd_tensor_4d(cp->ulysses.sums, ND_DTYPE_F32, cp->tokens.T, h->groups, 1, h->columns);
    nd_tensor from = message_view(cp, h, cp->ulysses.in);
    from.shape[2] = to.shape[2] = 1;
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = sums, .x = from);
    for (int64_t i = 1; i < h->replicas; i++) {
        from.data = (char *)from.data + from.stride[2] * (int64_t)nd_dtype_size(from.dtype);
        ND_OP(cp->rank, ND_TRACE_ATTENTION, accumulate, .acc = sums, .x = from);
    }
    ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = to, .x = sums);
    return ND_OK;
}

static nd_status finish_to_tokens(nd_cp *cp, nd_tensor out, bool output)
{
    heads parts[3];
    const int count = parts_of(cp, output, parts);
    for (int i = 0; i < count; i++) {
        const nd_tensor to = token_view(cp, &parts[i], out);
        if (to.shape[2] > 1) {
            ND_TRY(add_replicas(cp, &parts[i], to));
        } else {
            ND_OP(cp->rank, ND_TRACE_ATTENTION, cast, .out = to,
                  .x = message_view(cp, &parts[i], cp->ulysses.in));
        }
    }
    return ND_OK;
}

/* (T, QKV) and (T, H D) of the rank's heads. */
static nd_tensor projection(const nd_cp *cp, void *data)
{
    return nd_tensor_2d(data, cp->dims.act, cp->dims.T, cp->dims.QKV);
}

static nd_tensor output(const nd_cp *cp, void *data)
{
    return nd_tensor_2d(data, cp->dims.act, cp->dims.T, cp->dims.H * cp->dims.D);
}

nd_status nd_cp_attention_fwd(nd_cp *cp, nd_sight sight, nd_tensor qkv, nd_tensor o, float *lse)
{
    nd_cp_ulysses *u = &cp->ulysses;
    cp->sight = sight;
    if (u->members == 1) {
        return cp->method->forward(cp, qkv, o, lse);
    }
    ND_TRY(to_heads(cp, qkv, false, u->qkv));
    ND_TRY(cp->method->forward(cp, projection(cp, u->qkv), output(cp, u->o), lse));
    ND_TRY(begin_to_tokens(cp, u->o, true, NULL));
    return finish_to_tokens(cp, o, true);
}

nd_status nd_cp_attention_bwd(nd_cp *cp, nd_sight sight, const nd_cp_backward *b)
{
    nd_cp_ulysses *u = &cp->ulysses;
    cp->sight = sight;
    if (u->members == 1) {
        return heads_backward(cp, b);
    }
    const nd_cp_backward of_heads = {
        .dqkv = projection(cp, u->dqkv),
        .qkv = projection(cp, u->qkv),
        .o = output(cp, u->o),
        .dout = output(cp, u->dout),
        .lse = b->lse,
    };
    ND_TRY(to_heads(cp, b->qkv, false, u->qkv));
    ND_TRY(to_heads(cp, b->o, true, u->o));
    ND_TRY(to_heads(cp, b->dout, true, u->dout));
    ND_TRY(heads_backward(cp, &of_heads));
    ND_TRY(heads_backward_finish(cp, of_heads.dqkv));
    return begin_to_tokens(cp, u->dqkv, false, &cp->arriving.done);
}

nd_status nd_cp_attention_bwd_finish(nd_cp *cp, nd_tensor dqkv)
{
    if (cp->ulysses.members == 1) {
        return heads_backward_finish(cp, dqkv);
    }
    ND_TRY(nd_exchange_finish(cp->rank, &cp->arriving));
    return finish_to_tokens(cp, dqkv, false);
}
