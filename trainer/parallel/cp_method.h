// SPDX-License-Identifier: Apache-2.0
#ifndef ND_PARALLEL_CP_METHOD_H
#define ND_PARALLEL_CP_METHOD_H
/* For the files of cp alone: the methods of exchanging keys and values, and the blocks and views
 * that they use. */
#include "trainer/parallel/cp.h"

/* Tensors of an attention's backward: dqkv (T, QKV) from dout (T, H D). */
typedef struct nd_cp_backward {
    nd_tensor dqkv, qkv, o, dout;
    const float *lse;
} nd_cp_backward;

/* Where the tokens of a micro-batch of separate documents are. Of sample b rank r of `size` has
 * places[b S + r s] and the s - 1 that follow; `at` says for each place where in `places` it
 * stands. */
typedef struct nd_cp_deal {
    const nd_dims *d; /* of the rank's heads */
    int size, index;
    int64_t window;                     /* of some layers; 0: of none */
    bool may_select;                    /* not all keys need be sent */
    const int32_t *first_keys, *places; /* (B, S) */
    int64_t *sent;                      /* nd_cp_first_keys */
    int32_t *at;                        /* (B, S) */
    int32_t *before;                    /* (S + 1): how many of some keys have a place below each */
    int32_t *rows;                      /* scratch: (S) */
    int64_t *counts;                    /* scratch: (2, size) */
    int32_t *sharers;                   /* scratch: (size) */
} nd_cp_deal;

/* How the keys and values of the ranks reach the queries of this one. */
typedef struct nd_cp_method {
    /* Wants the method's buffers, and that of nd_cp_want_delta. */
    void (*plan)(nd_cp *cp, nd_memplan *plan);
    /* The blocks of rank `index` of `size` in one step of the exchange; returns their number. */
    int (*blocks)(int size, int index, int step, int64_t chunk, int64_t window,
                  nd_attention_block out[ND_CP_BLOCKS]);
    bool steps;    /* the exchange has `size` steps; else one */
    bool in_place; /* of one rank: keys, and their gradients, are in the projection */
    /* How many numbers first_keys makes; deal->sent[0] is -1 before. */
    int64_t (*first_key_count)(const nd_dims *d, int size);
    void (*first_keys)(const nd_cp_deal *deal, int32_t *out);
    nd_status (*forward)(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse);
    /* Begins cp->arriving, which brings cp->arrived. */
    nd_status (*backward)(nd_cp *cp, const nd_cp_backward *b);
    nd_status (*finish)(nd_cp *cp); /* of what has arrived; NULL: nothing is left to do */
} nd_cp_method;

/* local: one rank has all keys. */
extern const nd_cp_method nd_cp_method_gather, nd_cp_method_ring, nd_cp_method_local;

/* cp_heads.c */

/* The backward of the method's forward, for the rank's heads, of dims; of what cp->sight says. */
nd_status nd_cp_heads_backward(nd_cp *cp, const nd_cp_backward *b);
nd_status nd_cp_heads_backward_finish(nd_cp *cp, nd_tensor dqkv);

/* cp_ulysses.c */

/* dims of the rank's heads, with the tokens of all its group. */
nd_dims nd_cp_dims_of_heads(const nd_rank *rank, const nd_dims *tokens);
/* Wants the buffers. */
void nd_cp_ulysses_plan(nd_cp *cp, nd_memplan *plan);
/* Those of the heads between two exchanges, with the rank's tokens. */
nd_status nd_cp_ulysses_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse);
/* Begins cp->arriving, which the finish awaits. */
nd_status nd_cp_ulysses_backward(nd_cp *cp, const nd_cp_backward *b);
nd_status nd_cp_ulysses_backward_finish(nd_cp *cp, nd_tensor dqkv);

/* cp_blocks.c */

nd_attention nd_cp_attention_of(const nd_cp *cp, const nd_attention_block *block);
/* The blocks of a step, for what cp->sight says; keys: how many rows of them there are. Returns
 * their number. */
int nd_cp_blocks_of(const nd_cp *cp, int step, int64_t keys, nd_attention_block out[ND_CP_BLOCKS]);
/* The attention's delta, where the backend uses one. */
void nd_cp_want_delta(nd_cp *cp, nd_memplan *plan);

/* Where the keys of a block are: the projection itself (cp = 1), or a buffer of k v rows. */
typedef struct nd_kv_source {
    void *data;
    nd_dtype dtype;
    int64_t rows, stride;  /* rows per sample, elements per row */
    int64_t k, v;          /* first column of each */
    const int32_t *bounds; /* nd_cp_bounds, on the device; NULL: documents are joined */
} nd_kv_source;

/* deal->before for `count` keys of a sample, at these places. */
void nd_cp_count_keys(const nd_cp_deal *deal, const int32_t *places, int64_t count);
/* (ND_CP_BOUNDS, B, s): of each query of the rank the first key, the first one within the window,
 * and the end, among the keys of deal->before. This fills those of sample b. */
enum { ND_CP_BOUNDS = 3 };
void nd_cp_bounds(const nd_cp_deal *deal, int64_t b, int32_t *out);

nd_kv_source nd_cp_buffer_source(const nd_cp *cp, void *data, nd_dtype dtype, int64_t rows);

/* The block's queries in a (T, H D) tensor, or in the first columns of a wider one: (B, q_count, H,
 * D). */
nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, const nd_attention_block *block);
/* Their numbers in rows of T H: (B, H, q_count). */
nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, const nd_attention_block *block);

/* k and v columns of qkv, packed to rows of 2 K D. */
nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out);

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
