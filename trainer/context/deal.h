// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONTEXT_DEAL_H
#define ND_CONTEXT_DEAL_H
/*
 * This says which tokens of a row of S each rank of cp holds, so that all have as many tokens and
 * about as many visible pairs of a query and a key, summed over the layers: a layer with a window
 * sees fewer of a long document.
 *
 * The row is cut into two tiles for each rank, which are dealt by their visible pairs, the largest
 * first, each to the rank with the fewest so far that has room (longest processing time first). Of
 * one causal document that is zig-zag: rank r has tiles r and 2 ranks - 1 - r. Where a rank then
 * has more than ND_DEAL_BALANCE of the mean, the tiles are cut into shorter ones, of which the
 * ranks with the most and the fewest pairs exchange one after the other; and where that does not
 * suffice, into shorter ones still. So most of what a query sees is on its own rank where documents
 * are short.
 *
 * With Ulysses the members of a group of u adjacent ranks share what one of cp / u ranks is dealt:
 * member m has parts m and 2 u - 1 - m of 2 u. So they hold, whatever the order, what one rank of
 * cp / u would.
 *
 * All is a function of the borders of documents, which every rank of cp knows.
 */
#include <stddef.h>
#include <stdint.h>

#include "runtime/mesh/mesh.h"
#include "trainer/shape/shape.h"

#define ND_DEAL_BALANCE 1.02

/* `windowed` of `layers` layers see the last `window` keys alone. Zeros: one layer without one. */
typedef struct nd_deal_windows {
    int64_t window, windowed, layers;
} nd_deal_windows;

typedef struct nd_deal_of {
    int64_t sequence; /* S: a multiple of 2 cp, where there are several */
    int cp, ulysses;  /* ulysses divides cp */
    nd_deal_windows windows;
} nd_deal_of;

nd_deal_of nd_deal_of_mesh(const nd_shape *shape, const nd_mesh *mesh, int64_t sequence);

/* All visible pairs of the layers; those of the rank of cp / u with the most; and all if the row
 * were one document. */
typedef struct nd_deal_pairs {
    int64_t all, most, joined;
} nd_deal_pairs;

/* Scratch of nd_deal. */
size_t nd_deal_bytes(const nd_deal_of *of);
/*
 * places (S): the places in the text of the tokens that cp / u ranks are dealt, rank by rank and
 * ascending for each. first_keys (S): for each token the place of the first one of its document;
 * NULL: all are of one, and the order is zig-zag whatever the windows.
 */
nd_deal_pairs nd_deal(const nd_deal_of *of, const int32_t *first_keys, void *scratch,
                      int32_t *places);
/* local (S / cp): those of them that rank `index` of cp has, in its order. */
void nd_deal_local(const nd_deal_of *of, const int32_t *places, int index, int32_t *local);

#endif
