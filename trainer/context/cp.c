// SPDX-License-Identifier: Apache-2.0
/*
 * Attention by the method of the rank, and around it the exchange of tokens for heads among the
 * ranks of the group ulysses (Jacobs et al., DeepSpeed Ulysses, 2023). A message to a member has,
 * for each token of the sender, the columns of the receiver's heads: its q heads, then k and v.
 * Members are adjacent ranks of cp, so that their chunks in zig-zag order are two runs of the
 * sequence, ascending and descending by member.
 */
#include "trainer/context/method.h"

#include <string.h>

#include "runtime/base/math.h"

/* True where all keys, or those that are seen, are there at once. Elsewhere they travel, or
 * stay. */
static bool gathers(const nd_rank *rank)
{
    return nd_mesh_group_size(&rank->mesh, ND_GROUP_CP) > 1 &&
           !nd_cp_exchange_of(&rank->shape, rank->config).ring;
}

/* dims of the rank's heads, with the tokens of all ranks of the group ulysses. */
static nd_dims dims_of_heads(const nd_rank *rank, const nd_dims *tokens)
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
    cp->dims = dims_of_heads(rank, tokens);
    cp->method = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP) == 1 ? &nd_cp_method_local
                 : gathers(rank)                                   ? &nd_cp_method_gather
                                                                   : &nd_cp_method_ring;
    plan_ulysses(cp, plan);
    nd_cp_plan_method(cp, plan);
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

/* Exchanges all heads of the rank's tokens for the rank's heads of all members' tokens. */
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
        return cp->method->backward(cp, b);
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
    ND_TRY(cp->method->backward(cp, &of_heads));
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

/* Attention reads this of a micro-batch of separate documents: which keys each query sees, among
 * those that the method brings, and which of them ranks send where they send those alone. */

/* Rank r of `size` has of sample b the tokens of places[b S + r s] and the s - 1 that follow. */
typedef struct keys_of_ranks {
    nd_dims d; /* of the rank's heads */
    int size, index;
    int64_t window;                     /* of some layers; 0: of none */
    const int32_t *first_keys, *places; /* nd_cp_first_keys */
    int32_t *rows;   /* (B, S): the row of each place's key among those that attention reads;
                        -1: it is not there */
    int32_t *tokens; /* (T) some of a rank's */
    int32_t *before; /* (S + 1): how many keys of a sample that are there have a place below each */
} keys_of_ranks;

/* The places of a rank's tokens of a sample, ascending. */
static const int32_t *places_of(const keys_of_ranks *k, int64_t b, int rank)
{
    return k->places + b * k->d.S + rank * k->d.s;
}

/* The keys of some tokens of a rank, or of its first `count` ones, are in these rows. */
static void put_keys(const keys_of_ranks *k, int rank, const int32_t *tokens, int64_t count,
                     int64_t row)
{
    const int64_t S = k->d.S, s = k->d.s;
    for (int64_t i = 0; i < count; i++) {
        const int64_t token = tokens ? tokens[i] : i, b = token / s;
        k->rows[b * S + places_of(k, b, rank)[token % s]] = (int32_t)(row + i);
    }
}

/* Numbers the keys of k->rows in the order of the text. bounds (ND_CP_BOUNDS, T): of each query of
 * the rank the first key, the first one within the window, and the end. */
static void number_keys(const keys_of_ranks *k, int32_t *bounds, nd_cp_key_lists *lists)
{
    const nd_dims *d = &k->d;
    for (int64_t b = 0; b < d->B; b++) {
        const int32_t *places = places_of(k, b, k->index);
        const int32_t *first_keys = k->first_keys + b * d->S;
        k->before[0] = 0;
        for (int64_t place = 0; place < d->S; place++) {
            const int32_t row = k->rows[b * d->S + place], key = k->before[place];
            k->before[place + 1] = key + (row >= 0);
            if (lists && row >= 0) {
                lists->order[b * d->S + key] = row;
                lists->back[row] = (int32_t)(b * d->S + key);
            }
        }
        for (int64_t i = 0; i < d->s; i++) {
            const int64_t end = places[i] + 1, first = first_keys[places[i]];
            const int64_t near = k->window > 0 ? nd_max(first, end - k->window) : first;
            bounds[b * d->s + i] = k->before[first];
            bounds[d->T + b * d->s + i] = k->before[near];
            bounds[2 * d->T + b * d->s + i] = k->before[end];
        }
    }
}

/* The tokens of rank `from` whose keys rank `to` sees; returns their number. A query sees the keys
 * of its document up to its own, so a key is seen where the next token of `to` is of its document.
 */
static int64_t find_seen(const keys_of_ranks *k, int from, int to, int32_t *tokens)
{
    const int64_t s = k->d.s;
    int64_t count = 0;
    for (int64_t b = 0; b < k->d.B && from != to; b++) {
        const int32_t *first_keys = k->first_keys + b * k->d.S;
        const int32_t *keys = places_of(k, b, from), *queries = places_of(k, b, to);
        for (int64_t i = 0, next = 0; i < s; i++) {
            while (next < s && queries[next] < keys[i]) {
                next++;
            }
            if (next < s && first_keys[queries[next]] <= keys[i]) {
                tokens[count++] = (int32_t)(b * s + i);
            }
        }
    }
    return count;
}

/* Returns how many keys all ranks together send where they send those that are seen; -1 where some
 * rank would send or receive half of what it does where all are gathered. */
static int64_t count_seen(const keys_of_ranks *k)
{
    int64_t all = 0, most = 0;
    for (int rank = 0; rank < k->size; rank++) {
        int64_t sends = 0, receives = 0;
        for (int other = 0; other < k->size; other++) {
            sends += find_seen(k, rank, other, k->tokens);
            receives += find_seen(k, other, rank, k->tokens);
        }
        all += sends;
        most = nd_max(most, nd_max(sends, receives));
    }
    return 2 * most < (k->size - 1) * k->d.T ? all : -1;
}

static int64_t lists_count(const nd_dims *d)
{
    return 3 * d->B * d->S + d->T;
}

/* Rows are the rank's own keys, and behind them what arrives: of each rank those that are seen, or
 * all, among which its own are once more. */
static void list_gathered(const keys_of_ranks *k, int32_t *out, int64_t *elements)
{
    const int64_t T = k->d.T, columns = 2 * k->d.K * k->d.D, all = count_seen(k);
    nd_cp_key_lists lists = nd_cp_key_lists_of(&k->d, out);
    int64_t arrive = T, sent = 0;
    memset(lists.order, -1, (size_t)lists_count(&k->d) * sizeof *lists.order);
    elements[0] = all < 0 ? all : all * columns;
    put_keys(k, k->index, NULL, T, 0);
    for (int other = 0; other < k->size; other++) {
        if (all < 0) {
            put_keys(k, other, NULL, T, (other + 1) * T);
            continue;
        }
        const int64_t receives = find_seen(k, other, k->index, k->tokens);
        const int64_t sends = find_seen(k, k->index, other, lists.sent + sent);
        put_keys(k, other, k->tokens, receives, arrive);
        elements[1 + other] = sends * columns;
        elements[1 + k->size + other] = receives * columns;
        arrive += receives;
        sent += sends;
    }
    number_keys(k, out, &lists);
}

nd_cp_key_sizes nd_cp_key_sizes_of(const nd_rank *rank, const nd_dims *tokens)
{
    const nd_dims d = dims_of_heads(rank, tokens);
    const int size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    const int64_t bounds = ND_CP_BOUNDS * d.T;
    return (nd_cp_key_sizes){.numbers = gathers(rank) ? bounds + lists_count(&d) : size * bounds,
                             .sent = 1 + 3 * size,
                             .scratch = ((2 * d.B + 1) * d.S + 1) * (int64_t)sizeof(int32_t)};
}

/* nd_attention.rounds, of rows that see `more` keys more than the one before in a segment. */
static int64_t rounds_of(const nd_dims *d, const int32_t *bounds, int more)
{
    const int32_t *first = bounds, *end = bounds + 2 * d->T;
    int64_t most = 1, count = 1;
    for (int64_t i = 1; i < d->T; i++) {
        const bool follows = i % d->s > 0 && first[i] == first[i - 1] && end[i - 1] > first[i];
        count = follows ? count + (end[i] != end[i - 1] + more) : 1;
        most = nd_max(most, count);
    }
    return most;
}

void nd_cp_first_keys(const nd_rank *rank, const nd_dims *tokens, const int32_t *first_keys,
                      const int32_t *places, void *scratch, int32_t *out, int64_t *elements)
{
    keys_of_ranks k = {.d = dims_of_heads(rank, tokens),
                       .size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP),
                       .index = nd_mesh_group_index(&rank->mesh, ND_GROUP_CP, rank->rank),
                       .window = rank->shape.window,
                       .first_keys = first_keys,
                       .places = places,
                       .rows = scratch};
    const size_t bytes = (size_t)(k.d.B * k.d.S) * sizeof *k.rows;
    k.tokens = k.rows + k.d.B * k.d.S;
    k.before = k.tokens + k.d.T;
    memset(k.rows, -1, bytes);
    int64_t *rounds = elements + 1 + 2 * k.size;
    elements[0] = -1;
    if (gathers(rank)) {
        list_gathered(&k, out, elements);
        rounds[0] = rounds_of(&k.d, out, 1);
        return;
    }
    for (int step = 0; step < k.size; step++, out += ND_CP_BOUNDS * k.d.T) {
        memset(k.rows, -1, bytes);
        put_keys(&k, (k.index - step + k.size) % k.size, NULL, k.d.T, 0);
        number_keys(&k, out, NULL);
        rounds[step] = rounds_of(&k.d, out, step == 0);
    }
}
