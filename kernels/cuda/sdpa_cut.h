// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_SDPA_CUT_H
#define ND_CUDA_SDPA_CUT_H
/*
 * A block of attention as calls of cuDNN, and where their scratch lies. Pure arithmetic.
 *
 * The rows of a block are, in order: blind ones, which see nothing; rows under a diagonal that ends
 * at the last key; rows that see all keys. The latter two are bands. A band is one piece for some
 * KV heads, or, where a deterministic backward would need too large a workspace for one KV head, a
 * grid of tiles: rows by keys, with squares along the diagonal. Tiles are alike but for the last
 * ones, so however long a sequence is, a handful of forms makes its pieces.
 *
 * Half tiles: cuDNN's backward on Hopper walks over keys by 128, and where they end with 64 and no
 * mask hides the rest of the tile, it takes exp(0 - LSE) of what is not there: NaN in dq of rows
 * with LSE below -ln FLT_MAX = -88.7 (pytorch/pytorch#196678, NVIDIA/cudnn-frontend#628; versions
 * up to 9.30). Such unmasked keys go as two equal halves, which end with 32 or 96.
 */
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/ops.h"

/* Most bytes of scores of one call of a deterministic backward. */
enum { ND_SDPA_ORDERED_BYTES = 1 << 30 };

/* One call: query rows [row, row + rows), keys [key, key + keys), KV heads [kv, kv + kvs). */
typedef struct nd_sdpa_piece {
    int64_t row, rows, key, keys, kv, kvs;
    nd_sdpa_mask mask;
    bool first, last; /* of the pieces of these rows and heads */
} nd_sdpa_piece;

/* Rows [begin, end), of which all see keys [0, prefix). */
typedef struct nd_sdpa_band {
    int64_t begin, end, prefix;
    int64_t rows, keys, kvs; /* of a piece; keys: of those of the prefix */
    bool causal;             /* row begin + i sees i + 1 keys after the prefix */
    bool halves;             /* the last piece of the prefix goes as two */
    bool whole;              /* one piece has all rows and keys */
} nd_sdpa_band;

typedef struct nd_sdpa_cut {
    nd_sdpa_band bands[2];
    int band_count;
    int64_t blind;                /* rows */
    int64_t kv_heads;             /* of the block */
    int64_t rows, keys, kvs;      /* the most of a piece */
    bool adds_queries, adds_keys; /* a gradient comes from several pieces (a key's: or from none) */
} nd_sdpa_cut;

/* ordered: the most bytes of scores of a call (ND_SDPA_ORDERED_BYTES), at least a tile of 128 rows
 * and keys; 0: any number. no_half_tiles: no unmasked piece has 64 keys more than a multiple of
 * 128. */
nd_sdpa_cut nd_sdpa_cut_block(const nd_attention *, int64_t ordered, bool no_half_tiles);

/* Where a walk over the pieces is; starts at zero. */
typedef struct nd_sdpa_walk {
    int band;
    int64_t kv, row_tile, key_tile;
} nd_sdpa_walk;

/* The next piece, or false after the last: by groups of KV heads, in those by rows, then keys. */
bool nd_sdpa_next(const nd_sdpa_cut *, nd_sdpa_walk *, nd_sdpa_piece *out);
/* Whether the piece may have a form that no piece of the first KV heads has, or is one of those. */
bool nd_sdpa_shows_form(const nd_sdpa_cut *, const nd_sdpa_piece *);

/* Bytes that cuDNN's plan of a piece needs. */
size_t nd_sdpa_workspace_by_formula(const nd_attention *, const nd_sdpa_piece *, bool backward,
                                    bool ordered);

/* Parts of a call's scratch after the workspace, each aligned to 256 bytes. */
typedef struct nd_sdpa_layout {
    size_t stats;        /* F32 (B, H, Sq) of a piece, packed */
    size_t dq, dk, dv;   /* BF16 results of a piece */
    size_t sum_q;        /* F32 (B, Sq, H, D) of a piece's rows, where keys are cut */
    size_t sum_k, sum_v; /* F32 (B, Sk, K, D), where pieces add up */
    size_t end;
} nd_sdpa_layout;

nd_sdpa_layout nd_sdpa_layout_of(const nd_attention *, const nd_sdpa_cut *, size_t workspace,
                                 bool backward);

#endif
