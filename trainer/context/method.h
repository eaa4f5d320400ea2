// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONTEXT_METHOD_H
#define ND_CONTEXT_METHOD_H
/* This header is for its folder alone. It has the methods of exchanging keys and values, and the
 * blocks and views that they use. */
#include "trainer/context/cp.h"

/* This says how the keys and values of the ranks reach the queries of this one. */
typedef struct nd_cp_method {
    void (*plan)(nd_cp *cp, nd_memplan *plan); /* wants its buffers; NULL: it has none */
    /* The blocks of rank `index` of `size` in one step of the exchange; returns their number. */
    int (*blocks)(int size, int index, int step, int64_t chunk, int64_t window,
                  nd_attention_block out[ND_CP_BLOCKS]);
    bool steps;    /* the exchange has `size` steps; else one */
    bool in_place; /* of one rank: keys, and their gradients, are in the projection */
    nd_status (*forward)(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse);
    /* Begins cp->arriving, which brings cp->arrived. */
    nd_status (*backward)(nd_cp *cp, const nd_cp_backward *b);
    nd_status (*finish)(nd_cp *cp); /* of what has arrived; NULL: nothing is left to do */
} nd_cp_method;

/* local: one rank has all keys. */
extern const nd_cp_method nd_cp_method_gather, nd_cp_method_ring, nd_cp_method_local;

/* nd_cp_first_keys makes this: of each query of the rank the first key, the first one within the
 * window, and the end (ND_CP_BOUNDS, T), among the keys of a sample that are there, in the order of
 * the text; once for each step of an exchange in steps. */
enum { ND_CP_BOUNDS = 3 };

/* Behind them where keys are gathered; -1 stands for what is not there. */
typedef struct nd_cp_key_lists {
    int32_t *order; /* (B S): of each key that is there its row: the rank's own T, what arrives */
    int32_t *back;  /* (T + B S): of each row the number of its key in that order */
    int32_t *sent;  /* (B S): of each row that is sent, receiver by receiver, the rank's token;
                       none where all keys are gathered */
} nd_cp_key_lists;

static inline nd_cp_key_lists nd_cp_key_lists_of(const nd_dims *d, int32_t *numbers)
{
    int32_t *order = numbers + ND_CP_BOUNDS * d->T, *back = order + d->B * d->S;
    return (nd_cp_key_lists){order, back, back + d->T + d->B * d->S};
}

/* Wants what the method, and attention by it, need, for layers with and without a window, and for
 * micro-batches of separate documents. */
void nd_cp_plan_method(nd_cp *cp, nd_memplan *plan);

/* Copies between what the members of a group have in zig-zag order, each (B, s) rows of t, and all
 * of it in the order of the text: rows (B, members s). */
nd_status nd_cp_reorder(nd_cp *cp, const nd_dims *t, nd_group_kind group, void *ranks,
                        nd_tensor rows, bool to_rows);

#endif
