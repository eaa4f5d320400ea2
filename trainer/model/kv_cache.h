// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MODEL_KV_CACHE_H
#define ND_MODEL_KV_CACHE_H
/*
 * Keys and values of sequences that are being continued: what attention reads in place of the
 * micro-batch's own keys, so that each token is computed once.
 *
 * A slot holds one sequence, with room for `capacity` tokens in each layer; a token's keys and
 * values are adjacent. The keys are roped, in the compute dtype, whatever else is in the call. The
 * cache is part of the memory plan, is not shared between slots, and never grows.
 *
 * A call computes rows of several sequences at once: the first tokens of one, one token of each of
 * the others, or any mixture. It is a list of segments (kernels/ops.h). A segment's rows are
 * adjacent in the call, follow in its sequence on the `length` tokens that the slot holds, and each
 * sees these and the rows of its segment up to itself. There is no padding between segments. Behind
 * the last one rows may follow that belong to no sequence, of token 0 at position 0: so that tp
 * divides the rows, and so that there are few forms of products, of which libraries keep something.
 * Their attention output is 0.
 *
 * The tp ranks hold K / tp heads each. A slot's content is never moved: the caller knows its
 * length, and forgets tokens by passing a smaller one.
 */
#include "kernels/ops.h"
#include "runtime/device/memplan.h"
#include "trainer/layout/layout.h"
#include "trainer/rank.h"

typedef struct nd_kv_call {
    const nd_kv_segment *segments; /* in the order of their rows; no slot twice */
    int64_t count;
} nd_kv_call;

typedef struct nd_kv_options {
    int64_t
        tokens; /* rows of a call at most, a multiple of tp and, with FP8, of fp8_rows (ops.h) */
    int64_t slots, capacity;
    int64_t logits; /* rows whose logits are computed at once */
} nd_kv_options;

typedef struct nd_kv_cache {
    nd_rank *rank;
    nd_dims dims; /* T: rows of a call at most */
    nd_layer_range layers;
    int64_t slots, capacity;
    void *memory;    /* act (layers, slots, capacity, 2 K D): k, then v */
    void *scratch;   /* of the attention op */
    nd_kv_call call; /* that is being computed; borrowed */
    int64_t rows;    /* of its sequences */
} nd_kv_cache;

/* Returns how many rows are computed for so many: a multiple of `unit`, at most an eighth and
 * `unit` more, and not above `most`, which is a multiple of `unit`. */
int64_t nd_kv_round_rows(int64_t rows, int64_t unit, int64_t most);

/* Wants the memory. dims->T is the largest number of rows of a call. */
void nd_kv_cache_plan(nd_kv_cache *cache, nd_rank *rank, const nd_dims *dims, nd_layer_range layers,
                      const nd_kv_options *options, nd_memplan *plan);

/* The call that the next attentions belong to, checked against slots and capacity by assertions.
 * Returns its rows with those of no sequence, a multiple of `unit`. */
int64_t nd_kv_cache_begin(nd_kv_cache *cache, const nd_kv_call *call, int64_t unit);
/* Appends the keys and values of qkv (T, QKV), roped, to the slots, and writes o (T, H D). */
nd_status nd_kv_cache_attention(nd_kv_cache *cache, int64_t layer, nd_tensor qkv, nd_tensor o);

#endif
