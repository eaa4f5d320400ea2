// SPDX-License-Identifier: Apache-2.0
/*
 * The ranks of the group ulysses exchange tokens for heads (Jacobs et al., DeepSpeed Ulysses,
 * 2023). A message to a member has, for each token of the sender, the columns of the receiver's
 * heads: its q heads, then k and v. Members are adjacent ranks of cp, so that their chunks in
 * zig-zag order are two runs of the sequence, ascending and descending by member.
 */
#include "trainer/context/method.h"

#include "runtime/base/math.h"

nd_dims nd_cp_dims_of_heads(const nd_rank *rank, const nd_dims *tokens)
{
    const int members = nd_mesh_group_size(&rank->mesh, ND_GROUP_ULYSSES);
    nd_dims d = *tokens;
    d.s *= members;
    d.T *= members;
    d.H /= members;
    d.K = nd_max(d.K / members, 1);
    d.QKV = (d.H + 2 * d.K) * d.D;
    d.chunks = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP) > 1 ? 2 : 1;
    d.chunk = d.s / d.chunks;
    return d;
}

void nd_cp_ulysses_plan(nd_cp *cp, nd_memplan *plan)
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

nd_status nd_cp_ulysses_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse)
{
    nd_cp_ulysses *u = &cp->ulysses;
    ND_TRY(to_heads(cp, qkv, false, u->qkv));
    ND_TRY(cp->method->forward(cp, projection(cp, u->qkv), output(cp, u->o), lse));
    ND_TRY(begin_to_tokens(cp, u->o, true, NULL));
    return finish_to_tokens(cp, o, true);
}

nd_status nd_cp_ulysses_backward(nd_cp *cp, const nd_cp_backward *b)
{
    nd_cp_ulysses *u = &cp->ulysses;
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
    ND_TRY(nd_cp_heads_backward(cp, &of_heads));
    ND_TRY(nd_cp_heads_backward_finish(cp, of_heads.dqkv));
    return begin_to_tokens(cp, u->dqkv, false, &cp->arriving.done);
}

nd_status nd_cp_ulysses_backward_finish(nd_cp *cp, nd_tensor dqkv)
{
    ND_TRY(nd_exchange_finish(cp->rank, &cp->arriving));
    return finish_to_tokens(cp, dqkv, false);
}
