// SPDX-License-Identifier: Apache-2.0
#include "trainer/layout/deal.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/math.h"

typedef struct tile {
    int64_t pairs, number, length; /* number: its first token */
    int owner;
} tile;

typedef struct deal {
    int64_t tokens, ranks; /* of a row; that it is dealt to */
    const int32_t *first_keys;
    tile *tiles;           /* (tokens): those of the length that is tried */
    int *owners;           /* (tokens): of the longest tiles */
    int64_t count;         /* tiles */
    int64_t *loads, *room; /* (ranks): pairs dealt so far, tiles that fit */
} deal;

/* Of equal tiles the first comes first. */
static int more_pairs_first(const void *a, const void *b)
{
    const tile *x = a, *y = b;
    return x->pairs != y->pairs ? (x->pairs < y->pairs) - (x->pairs > y->pairs)
                                : (x->number > y->number) - (x->number < y->number);
}

static int by_number(const void *a, const void *b)
{
    const tile *x = a, *y = b;
    return (x->number > y->number) - (x->number < y->number);
}

static int64_t pairs_of(const deal *d, int64_t begin, int64_t end)
{
    int64_t pairs = 0;
    for (int64_t i = begin; i < end; i++) {
        pairs += i - (d->first_keys ? d->first_keys[i] : 0) + 1;
    }
    return pairs;
}

/* Tiles of one length, those with the most pairs first; a shorter one ends each of the longest
 * tiles where `length` does not divide them, and stays with its rank. */
static void cut_tiles(deal *d, int64_t length, int64_t longest)
{
    d->count = 0;
    for (int64_t begin = 0; begin < d->tokens; begin += longest) {
        for (int64_t i = begin; i < begin + longest; i += length) {
            const int64_t end = nd_min(i + length, begin + longest);
            d->tiles[d->count++] = (tile){pairs_of(d, i, end), i, end - i, 0};
        }
    }
    qsort(d->tiles, (size_t)d->count, sizeof *d->tiles, more_pairs_first);
    memset(d->loads, 0, (size_t)d->ranks * sizeof *d->loads);
}

static void give(deal *d, tile *t, int owner)
{
    t->owner = owner;
    d->loads[owner] += t->pairs;
}

/* Deals the longest tiles. */
static void deal_tiles(deal *d, int64_t longest)
{
    const int64_t count = d->tokens / longest;
    cut_tiles(d, longest, longest);
    for (int64_t r = 0; r < d->ranks; r++) {
        d->room[r] = count / d->ranks;
    }
    for (int64_t t = 0; t < count; t++) {
        int64_t least = -1;
        for (int64_t r = 0; r < d->ranks; r++) {
            if (d->room[r] > 0 && (least < 0 || d->loads[r] < d->loads[least])) {
                least = r;
            }
        }
        give(d, &d->tiles[t], (int)least);
        d->owners[d->tiles[t].number / longest] = (int)least;
        d->room[least]--;
    }
}

/* Exchanges the tiles of two ranks that bring their loads closest; false: none do. Both ranks'
 * tiles descend, and so does what each of the first one's should be exchanged for. */
static bool swap_tiles(deal *d, int64_t count, int64_t length, int from, int to)
{
    const int64_t gap = d->loads[from] - d->loads[to];
    int64_t best = gap, above = -1, next = 0, give_at = -1, take_at = -1;
    for (int64_t i = 0; i < count; i++) {
        if (d->tiles[i].owner != from || d->tiles[i].length != length) {
            continue;
        }
        for (; next < count; next++) {
            const tile *t = &d->tiles[next];
            if (t->owner == to && t->length == length &&
                2 * t->pairs <= 2 * d->tiles[i].pairs - gap) {
                break;
            }
            above = t->owner == to && t->length == length ? next : above;
        }
        const int64_t candidates[] = {above, next < count ? next : -1};
        for (int c = 0; c < 2; c++) {
            const int64_t at = candidates[c];
            const int64_t off = at < 0 ? best : 2 * (d->tiles[i].pairs - d->tiles[at].pairs) - gap;
            if (nd_max(off, -off) < best) {
                best = nd_max(off, -off);
                give_at = i;
                take_at = at;
            }
        }
    }
    if (give_at < 0) {
        return false;
    }
    tile *given = &d->tiles[give_at], *taken = &d->tiles[take_at];
    d->loads[from] -= given->pairs;
    d->loads[to] -= taken->pairs;
    give(d, given, to);
    give(d, taken, from);
    return true;
}

/* The rank with the most pairs, or with the fewest. */
static int rank_with(const deal *d, bool most)
{
    int found = 0;
    for (int r = 1; r < d->ranks; r++) {
        found = (most ? d->loads[r] > d->loads[found] : d->loads[r] < d->loads[found]) ? r : found;
    }
    return found;
}

static bool is_balanced(const deal *d, int64_t all)
{
    return (double)d->loads[rank_with(d, true)] * (double)d->ranks <= ND_DEAL_BALANCE * (double)all;
}

/* Shorter tiles begin where the longest ones were dealt, and are exchanged one by one. */
static void exchange_tiles(deal *d, int64_t length, int64_t longest, int64_t all)
{
    cut_tiles(d, length, longest);
    const int64_t count = d->count;
    for (int64_t t = 0; t < count; t++) {
        give(d, &d->tiles[t], d->owners[d->tiles[t].number / longest]);
    }
    for (int64_t swaps = 0; swaps < count && !is_balanced(d, all) &&
                            swap_tiles(d, count, length, rank_with(d, true), rank_with(d, false));
         swaps++) {
    }
}

/* The places of each rank's tiles, which ascend. */
static void place_tiles(deal *d, int32_t *places)
{
    const int64_t count = d->count;
    qsort(d->tiles, (size_t)count, sizeof *d->tiles, by_number);
    for (int64_t r = 0; r < d->ranks; r++) {
        d->room[r] = r * (d->tokens / d->ranks); /* where the rank's next tile goes */
    }
    for (int64_t t = 0; t < count; t++) {
        int64_t *to = &d->room[d->tiles[t].owner];
        for (int64_t i = 0; i < d->tiles[t].length; i++) {
            places[(*to)++] = (int32_t)(d->tiles[t].number + i);
        }
    }
}

nd_status nd_deal(const nd_deal_of *of, const int32_t *first_keys, int32_t *places,
                  nd_deal_pairs *pairs)
{
    deal d = {.tokens = of->sequence, .ranks = of->cp / of->ulysses, .first_keys = first_keys};
    const int64_t own = d.tokens / d.ranks, all = pairs_of(&d, 0, d.tokens);
    const int64_t longest = d.ranks > 1 ? own / 2 : own;
    int64_t length = longest;
    nd_status status = ND_OK;
    ND_ASSERT(own > 0 && own * d.ranks == d.tokens && (d.ranks == 1 || own % 2 == 0));
    ND_TRY_OUT(ND_ALLOC(d.tokens, &d.tiles));
    ND_TRY_OUT(ND_ALLOC(d.tokens, &d.owners));
    ND_TRY_OUT(ND_ALLOC(d.ranks, &d.loads));
    ND_TRY_OUT(ND_ALLOC(d.ranks, &d.room));
    deal_tiles(&d, length);
    while (!is_balanced(&d, all) && length > 1) {
        length = length / 2;
        exchange_tiles(&d, length, longest, all);
    }
    if (pairs) {
        *pairs = (nd_deal_pairs){.most = d.loads[rank_with(&d, true)], .all = all};
    }
    place_tiles(&d, places);
out:
    free(d.room);
    free(d.loads);
    free(d.owners);
    free(d.tiles);
    return status;
}

void nd_deal_local(const nd_deal_of *of, const int32_t *places, int index, int32_t *local)
{
    const int64_t part = of->sequence / of->cp / 2, u = of->ulysses, member = index % u;
    const int32_t *group = places + index / u * u * (of->sequence / of->cp);
    if (of->cp == 1) {
        memcpy(local, places, (size_t)of->sequence * sizeof *local);
        return;
    }
    memcpy(local, group + member * part, (size_t)part * sizeof *local);
    memcpy(local + part, group + (2 * u - 1 - member) * part, (size_t)part * sizeof *local);
}
