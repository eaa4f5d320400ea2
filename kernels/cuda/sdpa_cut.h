// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_SDPA_CUT_H
#define ND_CUDA_SDPA_CUT_H
/*
 * A block of attention as calls of cuDNN, and where the backward's scratch lies. Pure arithmetic.
 *
 * The rows of a block are, in order: blind ones, which see nothing; rows under a diagonal that ends
 * at the last key; rows that see all keys. The latter two are bands, cut into pieces.
 */
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/ops.h"

enum { ND_SDPA_ORDERED_BYTES = 1 << 30 };

/* One call: query rows [row, row + rows), keys [0, keys), KV heads [kv, kv + kvs). */
typedef struct nd_sdpa_piece {
    int64_t row, rows, keys, kv, kvs;
    nd_sdpa_mask mask;
} nd_sdpa_piece;

/* Rows [begin, end), `step` of them and kvs KV heads to a piece. */
typedef struct nd_sdpa_band {
    int64_t begin, end, step, kvs;
    bool causal;
} nd_sdpa_band;

typedef struct nd_sdpa_cut {
    nd_sdpa_band bands[2];
    int band_count;
    int64_t count;  /* of pieces */
    int64_t blind;  /* rows */
    bool adds_keys; /* a key's gradient comes from several pieces, or from none */
} nd_sdpa_cut;

/* ordered: so that the workspace of a deterministic backward is at most ND_SDPA_ORDERED_BYTES. */
nd_sdpa_cut nd_sdpa_cut_block(const nd_attention *, bool ordered);
/* Pieces of a band go by groups of KV heads, and in those by rows. */
nd_sdpa_piece nd_sdpa_piece_at(const nd_attention *, const nd_sdpa_cut *, int64_t index);
/* Bytes that cuDNN's plan of a piece needs. */
size_t nd_sdpa_workspace_by_formula(const nd_attention *, const nd_sdpa_piece *, bool backward,
                                    bool ordered);

/* Parts of the backward's scratch after the workspace, each aligned to 256 bytes. */
typedef struct nd_sdpa_layout {
    size_t dq, dk, dv;   /* BF16 results */
    size_t sum_k, sum_v; /* F32, where pieces add up */
    size_t end;
} nd_sdpa_layout;

nd_sdpa_layout nd_sdpa_layout_of(const nd_attention *, const nd_sdpa_cut *, size_t workspace);

#endif
