// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CONTEXT_METHOD_H
#define ND_CONTEXT_METHOD_H
/* For this folder alone: the methods of exchanging keys and values, and the blocks and views
 * that they use. */
#include "trainer/context/cp.h"

/* How the keys and values of the ranks reach the queries of this one. */
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

/* keys.c */

/* Whether all keys, or those that are seen, are there at once; else they travel, or stay. */
bool nd_cp_gathers(const nd_rank *rank);

/* dims of the rank's heads, with the tokens of all ranks of the group ulysses. */
nd_dims nd_cp_dims_of_heads(const nd_rank *rank, const nd_dims *tokens);

/* What nd_cp_first_keys makes: of each query of the rank the first key, the first one within the
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

/* blocks.c */

nd_attention nd_cp_attention_of(const nd_cp *cp, const nd_attention_block *block);
/* The blocks of a step, for what cp->sight says; keys: how many rows of them there are. Returns
 * their number. */
int nd_cp_blocks_of(const nd_cp *cp, int step, int64_t keys, nd_attention_block out[ND_CP_BLOCKS]);
/* Where the keys of a block are: the projection itself (cp = 1), or a buffer of k v rows. */
typedef struct nd_kv_source {
    void *data;
    nd_dtype dtype;
    int64_t rows, stride;  /* rows per sample, elements per row */
    int64_t k, v;          /* first column of each */
    const int32_t *bounds; /* of nd_cp_first_keys, on the device; NULL: documents are joined */
} nd_kv_source;

nd_kv_source nd_cp_buffer_source(const nd_cp *cp, void *data, nd_dtype dtype, int64_t rows);

/* The block's queries in a (T, H D) tensor, or in the first columns of a wider one: (B, q_count, H,
 * D). */
nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, const nd_attention_block *block);
/* Their numbers in rows of T H: (B, H, q_count). */
nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, const nd_attention_block *block);

/* k and v columns of qkv, packed to rows of 2 K D. */
nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out);

/* Copies between what the members of a group have in zig-zag order, each (B, s) rows of t, and all
 * of it in the order of the text: rows (B, members s). */
nd_status nd_cp_reorder(nd_cp *cp, const nd_dims *t, nd_group_kind group, void *ranks,
                        nd_tensor rows, bool to_rows);

/* One block forward, and all blocks of an exchange in one step. */
nd_status nd_cp_block_forward(nd_cp *cp, const nd_attention_block *block, nd_tensor qkv,
                              const nd_kv_source *kv, nd_tensor o, const float *lse);
nd_status nd_cp_blocks_forward(nd_cp *cp, nd_tensor qkv, const nd_kv_source *kv, nd_tensor o,
                               const float *lse);

/* Where the gradients of a block go: dq (T, columns), dk and dv; added to what is there, or not. */
typedef struct nd_block_gradients {
    nd_tensor dq;
    nd_kv_source dkv;
    bool add_q, add_kv;
} nd_block_gradients;

/* The blocks of a step backward, with the keys of kv. */
nd_status nd_cp_blocks_backward(nd_cp *cp, int step, const nd_cp_backward *b,
                                const nd_kv_source *kv, const nd_block_gradients *to);

#endif
