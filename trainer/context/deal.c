// SPDX-License-Identifier: Apache-2.0
#include "trainer/context/deal.h"

#include <stdbool.h>
#include <string.h>

#include "runtime/base/math.h"

/* Tiles have numbers in the order of the text. A shorter one ends each of the longest tiles where
 * `length` does not divide them, and stays with its rank. */
typedef struct deal {
    int64_t tokens, ranks; /* of a row; that it is dealt to */
    nd_deal_windows windows;
    const int32_t *first_keys;
    int64_t longest, length; /* of a tile; of those that are tried now */
    int64_t cuts, count;     /* tiles of one of the longest, of the row */
    int64_t *loads, *room;   /* (ranks): pairs dealt so far, tiles that fit */
    int64_t *pairs;          /* (most tiles) of each */
    int32_t *owners, *order; /* (most tiles): its rank; tiles, those with the most pairs first */
    int32_t *parents;        /* (2 ranks): owners of the longest */
} deal;

/* Counts pairs of the queries [begin, end), in all layers. */
static int64_t pairs_of(const deal *d, int64_t begin, int64_t end)
{
    const nd_deal_windows *w = &d->windows;
    int64_t pairs = 0;
    for (int64_t i = begin; i < end; i++) {
        const int64_t seen = i - (d->first_keys ? d->first_keys[i] : 0) + 1;
        pairs +=
            seen * (nd_max(w->layers, 1) - w->windowed) + nd_min(seen, w->window) * w->windowed;
    }
    return pairs;
}

static int64_t begin_of(const deal *d, int64_t tile)
{
    return tile / d->cuts * d->longest + tile % d->cuts * d->length;
}

static int64_t end_of(const deal *d, int64_t tile)
{
    return nd_min(begin_of(d, tile) + d->length, (tile / d->cuts + 1) * d->longest);
}

static bool is_short(const deal *d, int64_t tile)
{
    return d->longest % d->length > 0 && tile % d->cuts == d->cuts - 1;
}

/* Returns whether tile a has more pairs than b, or as many and a lower number. */
static bool comes_before(const deal *d, int32_t a, int32_t b)
{
    return d->pairs[a] != d->pairs[b] ? d->pairs[a] > d->pairs[b] : a < b;
}

/* In place, by Shell: qsort may allocate. */
static void sort_tiles(deal *d)
{
    for (int64_t i = 0; i < d->count; i++) {
        d->order[i] = (int32_t)i;
    }
    for (int64_t gap = d->count; gap > 1;) {
        gap = nd_max(gap * 5 / 11, 1);
        for (int64_t i = gap; i < d->count; i++) {
            const int32_t tile = d->order[i];
            int64_t at = i;
            for (; at >= gap && comes_before(d, tile, d->order[at - gap]); at -= gap) {
                d->order[at] = d->order[at - gap];
            }
            d->order[at] = tile;
        }
    }
}

static void cut_tiles(deal *d, int64_t length)
{
    d->length = length;
    d->cuts = nd_ceil_div(d->longest, length);
    d->count = d->tokens / d->longest * d->cuts;
    for (int64_t t = 0; t < d->count; t++) {
        d->pairs[t] = pairs_of(d, begin_of(d, t), end_of(d, t));
    }
    sort_tiles(d);
    memset(d->loads, 0, (size_t)d->ranks * sizeof *d->loads);
}

static void give_tile(deal *d, int64_t tile, int owner)
{
    d->owners[tile] = owner;
    d->loads[owner] += d->pairs[tile];
}

/* Deals the longest tiles. */
static void deal_tiles(deal *d)
{
    cut_tiles(d, d->longest);
    for (int64_t r = 0; r < d->ranks; r++) {
        d->room[r] = d->count / d->ranks;
    }
    for (int64_t t = 0; t < d->count; t++) {
        int64_t least = -1;
        for (int64_t r = 0; r < d->ranks; r++) {
            if (d->room[r] > 0 && (least < 0 || d->loads[r] < d->loads[least])) {
                least = r;
            }
        }
        give_tile(d, d->order[t], (int)least);
        d->room[least]--;
    }
    memcpy(d->parents, d->owners, (size_t)d->count * sizeof *d->parents);
}

/* Exchanges the tiles of two ranks that bring their loads closest; false: none do. Both ranks'
 * tiles descend, and so does what each of the first one's should be exchanged for. */
static bool swap_tiles(deal *d, int from, int to)
{
    const int64_t gap = d->loads[from] - d->loads[to];
    int64_t best = gap, above = -1, next = 0, give_at = -1, take_at = -1;
    for (int64_t i = 0; i < d->count; i++) {
        const int32_t given = d->order[i];
        if (d->owners[given] != from || is_short(d, given)) {
            continue;
        }
        for (; next < d->count; next++) {
            const int32_t t = d->order[next];
            const bool fits = d->owners[t] == to && !is_short(d, t);
            if (fits && 2 * d->pairs[t] <= 2 * d->pairs[given] - gap) {
                break;
            }
            above = fits ? t : above;
        }
        const int64_t candidates[] = {above, next < d->count ? d->order[next] : -1};
        for (int c = 0; c < 2; c++) {
            const int64_t at = candidates[c];
            const int64_t off = at < 0 ? best : 2 * (d->pairs[given] - d->pairs[at]) - gap;
            if (nd_max(off, -off) < best) {
                best = nd_max(off, -off);
                give_at = given;
                take_at = at;
            }
        }
    }
    if (give_at < 0) {
        return false;
    }
    d->loads[from] -= d->pairs[give_at];
    d->loads[to] -= d->pairs[take_at];
    give_tile(d, give_at, to);
    give_tile(d, take_at, from);
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
static void exchange_tiles(deal *d, int64_t length, int64_t all)
{
    int64_t swaps = 0;
    cut_tiles(d, length);
    for (int64_t t = 0; t < d->count; t++) {
        give_tile(d, t, d->parents[t / d->cuts]);
    }
    while (swaps < d->count && !is_balanced(d, all) &&
           swap_tiles(d, rank_with(d, true), rank_with(d, false))) {
        swaps++;
    }
}

/* The places of each rank's tiles, which ascend. */
static void place_tiles(deal *d, int32_t *places)
{
    for (int64_t r = 0; r < d->ranks; r++) {
        d->room[r] = r * (d->tokens / d->ranks); /* where the rank's next tile goes */
    }
    for (int64_t t = 0; t < d->count; t++) {
        int64_t *to = &d->room[d->owners[t]];
        for (int64_t i = begin_of(d, t); i < end_of(d, t); i++) {
            places[(*to)++] = (int32_t)i;
        }
    }
}

nd_deal_of nd_deal_of_mesh(const nd_shape *shape, const nd_mesh *mesh, int64_t sequence)
{
    nd_deal_of of = {.sequence = sequence,
                     .cp = mesh->size[ND_AXIS_CP],
                     .ulysses = nd_mesh_group_size(mesh, ND_GROUP_ULYSSES),
                     .windows = {.window = shape->window, .layers = shape->layers}};
    for (int64_t l = 0; l < shape->layers; l++) {
        of.windows.windowed += nd_shape_window(shape, l, sequence) > 0;
    }
    return of;
}

/* One rank has one tile, and several may have tiles of one token. */
static int64_t most_tiles(const nd_deal_of *of)
{
    return of->cp > of->ulysses ? of->sequence : 1;
}

size_t nd_deal_bytes(const nd_deal_of *of)
{
    const size_t ranks = (size_t)(of->cp / of->ulysses), tiles = (size_t)most_tiles(of);
    return (2 * ranks + tiles) * sizeof(int64_t) + (2 * tiles + 2 * ranks) * sizeof(int32_t);
}

nd_deal_pairs nd_deal(const nd_deal_of *of, const int32_t *first_keys, void *scratch,
                      int32_t *places)
{
    const int64_t ranks = of->cp / of->ulysses, tiles = most_tiles(of);
    const int64_t own = of->sequence / ranks;
    deal d = {.tokens = of->sequence,
              .ranks = ranks,
              .longest = ranks > 1 ? own / 2 : own,
              .loads = scratch};
    d.room = d.loads + ranks;
    d.pairs = d.room + ranks;
    d.owners = (int32_t *)(d.pairs + tiles);
    d.order = d.owners + tiles;
    d.parents = d.order + tiles;
    ND_ASSERT(own > 0 && own * ranks == d.tokens && (ranks == 1 || own % 2 == 0));
    d.windows = first_keys ? of->windows : d.windows;
    nd_deal_pairs pairs = {.joined = pairs_of(&d, 0, d.tokens)};
    d.first_keys = first_keys;
    pairs.all = pairs_of(&d, 0, d.tokens);
    deal_tiles(&d);
    for (int64_t length = d.longest / 2; !is_balanced(&d, pairs.all) && length > 0; length /= 2) {
        exchange_tiles(&d, length, pairs.all);
    }
    pairs.most = d.loads[rank_with(&d, true)];
    place_tiles(&d, places);
    return pairs;
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
