// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_SDPA_PARTS_H
#define ND_CUDA_SDPA_PARTS_H
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
 *
 * One row: of a single query row with such an LSE its backward makes NaN in dk and dv (seen with
 * 9.19 on an H200; 64, 65, 100 and 129 rows are right). Blocks with such a piece go to the plain
 * kernels.
 */
#include "kernels/cuda/context.h"
#include "kernels/cuda/documents.h"

/* Most bytes of scores of one call of a deterministic backward. */
enum { ND_SDPA_ORDERED_BYTES = 1 << 30 };

/* One call: query rows [row, row + rows), keys [key, key + keys), KV heads [kv, kv + kvs). */
typedef struct nd_sdpa_piece {
    int64_t row, rows, key, keys, kv, kvs;
    nd_sdpa_mask mask;
    bool first, last; /* of the pieces of these rows and heads */
    bool
        shows_form; /* may have a form that no piece of the first KV heads has, or is one of them */
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

/* True where calls of cuDNN can make the block: no piece is a single row, and it has no window, or
 * all rows are one band under the diagonal, whose pieces are whole. */
bool nd_sdpa_fits(const nd_attention *, int64_t ordered);

/* This says where a walk over the pieces is; it starts at zero. */
typedef struct nd_sdpa_walk {
    int band;
    int64_t kv, row_tile, key_tile;
} nd_sdpa_walk;

/* The next piece, or false after the last: by groups of KV heads, in those by rows, then keys. */
bool nd_sdpa_next(const nd_sdpa_cut *, nd_sdpa_walk *, nd_sdpa_piece *out);

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

/* One attention op as calls of cuDNN (sdpa_call.c): where the operands of a call lie, its forms,
 * and what goes through the scratch. */

typedef struct nd_sdpa_call {
    nd_cuda_context *context;
    bool backward;
    nd_attention_bwd_args x; /* of a forward: what it has too, with the out and lse that it makes */
    /* Set by nd_documents_take; of what follows, to_q, to_k, to_v and the scratch are then too. */
    nd_documents documents;
    nd_sdpa_cut cut;
    /* cuDNN writes these: the results themselves, or the scratch, which has room for one piece. */
    nd_tensor to_q, to_k, to_v;
    bool through_q, through_kv;
    nd_tensor sum_q;        /* F32: of a piece's rows, where their keys are cut */
    nd_tensor sum_k, sum_v; /* F32: of all keys, where pieces add up */
    nd_sdpa_layout layout;
    char *scratch;
} nd_sdpa_call;

nd_sdpa_call nd_sdpa_forward_call(nd_cuda_context *context, const nd_attention_fwd_args *x);

/* True if the tensor lies at a multiple of 16 bytes and has strides of multiples of 8 elements,
 * which the vector accesses of cuDNN need. */
bool nd_sdpa_is_aligned(nd_tensor t);
/* (B, S, heads, D) from a row and head on. */
nd_tensor nd_sdpa_at(nd_tensor t, int64_t row, int64_t head);
/* Rows and heads of a (B, S, heads, D) view. */
nd_tensor nd_sdpa_part(nd_tensor t, int64_t row, int64_t rows, int64_t head, int64_t heads);

/* Computes the cut, and what goes through the scratch, of a call whose operands are set. Makes the
 * plans of all its forms that do not exist yet. */
nd_status nd_sdpa_plan(nd_sdpa_call *call);
/* ND_ERR_INTERNAL when less than `bytes` of scratch were planned. */
nd_status nd_sdpa_check_scratch(const nd_sdpa_call *call, size_t bytes);

nd_sdpa_form nd_sdpa_form_of(const nd_sdpa_call *call, const nd_sdpa_piece *p);

#endif
