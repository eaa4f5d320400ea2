// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_ATTENTION_H
#define ND_CPU_ATTENTION_H
/*
 * Blocked attention: what attention_fwd.c, attention_bwd.c and attention.c share. That of one query
 * (attention_fwd.c) has no blocks.
 *
 * Queries are handled in row blocks: ND_TILE consecutive queries of one head. Scores are computed
 * transposed, keys in rows and queries in columns, so that maxima, sums, lse and delta are vectors
 * over queries, and so that the rows of K and V serve as left operands. The G = H / K query heads
 * that share a KV head are handled together: their row blocks use each packed tile of K and V.
 *
 * Numerics: scores, softmax, lse, delta and all sums are F32. With BF16 inputs on a CPU with BF16
 * products the probabilities and the score gradients are rounded to BF16 before they are multiplied
 * (their row sums are not); on other CPUs BF16 inputs are widened and nothing is rounded but the
 * results. Subnormal numbers may count as zero.
 *
 * Sizes of scratch depend on the extents and the thread count only, and allow for words of one F32.
 */
#include "kernels/cpu/tile.h"
#include "kernels/ops_check.h"
#include "runtime/base/math.h"

enum {
    ND_ATTENTION_STEP = 256, /* keys that the forward handles at a time */
    ND_ATTENTION_KEYS = 512, /* keys whose dK and dV a thread accumulates at a time, at most */
    ND_ATTENTION_BLOCKS = 8  /* row blocks that share a packed step of K and V in the forward */
};

static inline int64_t nd_attention_group(const nd_attention *a)
{
    return a->heads / a->kv_heads;
}

/* Row blocks of one head. */
static inline int64_t nd_attention_row_blocks(const nd_attention *a)
{
    return nd_ceil_div(a->sq, ND_TILE);
}

/* The queries of a row block see keys [begin, end): each query sees some of them, and all of
 * [all, all_end), which may be none. They see nothing where begin = end. */
typedef struct nd_seen_keys {
    int32_t begin, all, all_end, end;
} nd_seen_keys;

/* This says which keys a call's queries see. */
typedef struct nd_sight {
    const nd_attention *a;
    nd_tensor first_key, end_key;
    nd_seen_keys *blocks; /* (B, row blocks) */
} nd_sight;

/* Words of `blocks`. */
int64_t nd_attention_sight_words(const nd_attention *a);
void nd_attention_look(const nd_sight *s);

static inline const nd_seen_keys *nd_attention_seen(const nd_sight *s, int64_t b, int64_t q0)
{
    return &s->blocks[b * nd_attention_row_blocks(s->a) + q0 / ND_TILE];
}

/* Fills limits for the row block from q0 on, relative to key0; NULL when all `keys` are visible to
 * all its queries. */
const nd_key_limits *nd_attention_limits(const nd_sight *s, int64_t b, int64_t q0, int64_t key0,
                                         int keys, nd_key_limits *limits);

/* Cuts `count` 4-byte elements off a thread's scratch, aligned to 64 bytes. With base NULL only
 * *used advances. */
void *nd_attention_cut(char *base, size_t *used, int64_t count);

/* Row (b, i, h, 0) of a (B, S, H, D) view. */
static inline void *nd_attention_row(nd_tensor t, int64_t b, int64_t i, int64_t h)
{
    int64_t at = b * t.stride[0] + i * t.stride[1] + h * t.stride[2];
    return (char *)t.data + at * (t.dtype == ND_DTYPE_F32 ? 4 : 2);
}

/* Bytes for one call of the backward. */
size_t nd_attention_bwd_scratch(int threads, const nd_attention *a);

#endif
