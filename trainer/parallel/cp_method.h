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

/* How the keys and values of other ranks reach the queries of this one. */
typedef struct nd_cp_method {
    /* Wants the method's buffers, and that of nd_cp_want_delta. */
    void (*plan)(nd_cp *cp, nd_memplan *plan);
    /* The blocks of rank `index` of `size` in one step of the exchange; returns their number. */
    int (*blocks)(int size, int index, int step, int64_t chunk, int64_t window,
                  nd_attention_block out[ND_CP_BLOCKS]);
    bool steps; /* the exchange has `size` steps; else one */
    /* As nd_cp_first_key_count and nd_cp_first_keys, of the rank's heads. */
    int64_t (*first_key_count)(const nd_rank *rank, const nd_dims *dims);
    void (*first_keys)(const nd_rank *rank, const nd_dims *dims, const int32_t *sequence,
                       int32_t *out);
    nd_status (*forward)(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse);
    /* Begins cp->arriving, which brings cp->arrived. */
    nd_status (*backward)(nd_cp *cp, const nd_cp_backward *b);
} nd_cp_method;

extern const nd_cp_method nd_cp_method_gather, nd_cp_method_ring;

/* cp_heads.c */

/* Attention of the rank's heads, of dims, by the method; of what cp->sight says. */
nd_status nd_cp_heads_forward(nd_cp *cp, nd_tensor qkv, nd_tensor o, float *lse);
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
/* The attention's delta, where the backend uses one. */
void nd_cp_want_delta(nd_cp *cp, nd_memplan *plan);

/* Where the keys of a block are: the projection itself (cp = 1), or a buffer of k v rows. */
typedef struct nd_kv_source {
    void *data;
    nd_dtype dtype;
    int64_t rows, stride; /* rows per sample, elements per row */
    int64_t k, v;         /* first column of each */
    /* (key chunks, chunks, B, chunk): first keys of the queries of each chunk, counted from a
     * block's first key, of blocks that begin with each chunk of keys; NULL: none */
    const int32_t *first_keys;
} nd_kv_source;

/* First keys of all keys in global order, which blocks see from their beginning: (chunks, B,
 * chunk). */
int64_t nd_cp_gathered_first_key_count(const nd_rank *rank, const nd_dims *dims);
void nd_cp_gathered_first_keys(const nd_rank *rank, const nd_dims *dims, const int32_t *sequence,
                               int32_t *out);

nd_kv_source nd_cp_local_source(const nd_dims *d, nd_tensor qkv);
nd_kv_source nd_cp_buffer_source(const nd_dims *d, void *data, nd_dtype dtype, int64_t rows);

/* Rows of query chunk `c` of a (T, columns) tensor, `heads` heads from column `column`: (B, chunk,
 * heads, D). */
nd_tensor nd_cp_q_view(const nd_dims *d, nd_tensor t, int c, int64_t column, int64_t heads);
/* (B, H, chunk) of query chunk `chunk`. */
nd_tensor nd_cp_row_view(const nd_dims *d, const float *base, int chunk);

/* k and v columns of qkv, packed to rows of 2 K D. */
nd_status nd_cp_pack_kv(nd_cp *cp, nd_tensor qkv, void *out);

/* One block forward. fuse: of o, where the block is all of it; or NULL. */
nd_status nd_cp_block_forward(nd_cp *cp, const nd_attention_block *block, nd_tensor qkv,
                              const nd_kv_source *kv, nd_tensor o, const float *lse);

/* Where the gradients of a block go: dq (T, columns), dk and dv; added to what is there, or not. */
typedef struct nd_block_gradients {
    nd_tensor dq;
    nd_kv_source dkv;
    bool add_q, add_kv;
} nd_block_gradients;

/* One block backward, with the keys of kv. */
nd_status nd_cp_block_backward(nd_cp *cp, const nd_attention_block *block, const nd_cp_backward *b,
                               const nd_kv_source *kv, const nd_block_gradients *to);

#endif
