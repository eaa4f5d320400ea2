// SPDX-License-Identifier: Apache-2.0
/* What attention reads of a micro-batch of separate documents: which keys each query sees, among
 * those that the method brings, and which of them ranks send where they send those alone. */
#include "trainer/context/method.h"

#include <string.h>

#include "runtime/base/math.h"

/* Of sample b rank r of `size` has the tokens of places[b S + r s] and the s - 1 that follow. */
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

/* How many keys all ranks together send where they send those that are seen; -1 where some rank
 * would send or receive half of what it does where all are gathered. */
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

bool nd_cp_gathers(const nd_rank *rank)
{
    return nd_mesh_group_size(&rank->mesh, ND_GROUP_CP) > 1 &&
           !nd_cp_exchange_of(&rank->shape, rank->config).ring;
}

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

int64_t nd_cp_first_key_count(const nd_rank *rank, const nd_dims *tokens)
{
    const nd_dims d = nd_cp_dims_of_heads(rank, tokens);
    const int size = nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
    return nd_cp_gathers(rank) ? ND_CP_BOUNDS * d.T + lists_count(&d) : size * ND_CP_BOUNDS * d.T;
}

int64_t nd_cp_sent_count(const nd_rank *rank)
{
    return 1 + 3 * nd_mesh_group_size(&rank->mesh, ND_GROUP_CP);
}

size_t nd_cp_first_keys_bytes(const nd_dims *tokens)
{
    return (size_t)((2 * tokens->B + 1) * tokens->S + 1) * sizeof(int32_t);
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
    keys_of_ranks k = {.d = nd_cp_dims_of_heads(rank, tokens),
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
    if (nd_cp_gathers(rank)) {
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
