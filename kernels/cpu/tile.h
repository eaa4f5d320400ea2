// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_TILE_H
#define ND_CPU_TILE_H
/*
 * Small dense tiles for attention: products, packing, and the elementwise steps between the
 * products, in one table per instruction set and operand type. tile_kernels.c implements them and
 * is compiled once per instruction set.
 *
 * Operands are matrices of 32-bit words along k. A word is one F32, or two consecutive BF16 of k
 * (the lower half is the even one): the form that BF16 dot products and AMX tiles want. W(k) = k
 * for F32, (k + 1) / 2 for BF16, the missing last half being zero.
 *   A (m, k): row-major, [m][W(k)] words, row stride lda words.
 *   B (k, n): [W(k)][n] words, row stride ldb words; n is padded to a multiple of ND_TILE_PAD
 *   with zeros.
 * Results are F32 [m][n], also padded in n. Nothing here allocates or starts threads.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/tensor/dtype.h"

enum {
    ND_TILE_PAD = 16, /* columns are padded to this */
    ND_TILE = 64      /* queries per column tile, and keys per row tile */
};

/* A maximum of scores grows by more than this, in units of log2, or not at all, so that sums are
 * seldom rescaled. Probabilities are at most 2 to this power before they are divided by their sum:
 * see FlashAttention-4. */
#define ND_TILE_MAX_GROWTH 8.0f

typedef uint32_t nd_word;

/* The first and the last visible key of each query, relative to a tile of keys. */
typedef struct nd_key_limits {
    int32_t first[ND_TILE], last[ND_TILE];
} nd_key_limits;

/* One step of the online softmax over a tile of scores, transposed: keys in rows, queries in
 * columns. */
typedef struct nd_softmax_step {
    float *scores;               /* (keys, ND_TILE), overwritten */
    nd_word *p;                  /* out: B operand (k = keys, n = ND_TILE) of the probabilities */
    int keys;                    /* rows that exist */
    const nd_key_limits *limits; /* NULL: all are visible */
    float scale;                 /* scale log2(e): probabilities are powers of two */
    float *max;   /* (ND_TILE) running maximum (see above), in units of log2; in and out */
    float *sum;   /* (ND_TILE) running sum of the probabilities; in and out */
    float *alpha; /* (ND_TILE) out: factor by which everything before shrinks */
} nd_softmax_step;

/* Probabilities and score gradients of one tile, transposed like above. */
typedef struct nd_dscore_step {
    float *scores;       /* (keys, ND_TILE), overwritten */
    float *dp;           /* (keys, ND_TILE) dout v^T, overwritten */
    nd_word *p;          /* out: A operand (m = keys, k = ND_TILE) */
    nd_word *ds_rows;    /* out: A operand (m = keys, k = ND_TILE) of dscores */
    int64_t ld;          /* row stride of p and ds_rows */
    nd_word *ds_columns; /* out: B operand (k = keys, n = ND_TILE) of dscores */
    int keys;
    const nd_key_limits *limits; /* as above */
    const float *lse;   /* (ND_TILE) in units of log2; +inf for a query that sees nothing */
    const float *delta; /* (ND_TILE) */
    float scale;        /* of the scores, natural */
} nd_dscore_step;

typedef struct nd_tile_ops {
    const char *name;
    int group; /* elements of k per word: 1 or 2 */

    /* NULL, or what a thread calls before its first and after its last product of an op. */
    void (*begin)(void);
    void (*end)(void);

    /* c (m, n) = a b (+ c when add). `words` = W(k). */
    void (*gemm)(int m, int n, int words, const nd_word *a, int64_t lda, const nd_word *b,
                 int64_t ldb, float *c, int64_t ldc, bool add);

    /* Packing from act rows x (rows, columns) of row stride `stride`; dtype BF16 or F32 (F32 only
     * with F32 words). */
    /* A (rows, columns): k = columns. */
    void (*pack_a)(nd_word *a, int64_t lda, const void *x, nd_dtype dtype, int64_t stride, int rows,
                   int columns);
    /* B (columns, rows): k = columns, n = rows, padded to `n` columns. `temporary`: rows x
     * W(columns) words. */
    void (*pack_b_transposed)(nd_word *b, int64_t ldb, const void *x, nd_dtype dtype,
                              int64_t stride, int rows, int columns, nd_word *temporary);
    /* B (rows, columns): k = rows, n = columns, padded to ldb. */
    void (*pack_b)(nd_word *b, int64_t ldb, const void *x, nd_dtype dtype, int64_t stride, int rows,
                   int columns);
    /* A (columns, rows): k = rows. `temporary`: W(rows) x columns words. */
    void (*pack_a_transposed)(nd_word *a, int64_t lda, const void *x, nd_dtype dtype,
                              int64_t stride, int rows, int columns, nd_word *temporary);

    /* True if some alpha is not 1. */
    bool (*softmax)(const nd_softmax_step *step);
    void (*dscore)(const nd_dscore_step *step);

    /* c (m, ND_TILE) *= factor (ND_TILE), column by column. */
    void (*scale_columns)(float *c, int m, const float *factor);
    /* y (columns, rows) of dtype, row stride `stride`, = factor[column] x^T for x (rows, ND_TILE);
     * factor may be NULL. */
    void (*store_transposed)(void *y, nd_dtype dtype, int64_t stride, const float *x, int rows,
                             int columns, const float *factor, bool add, float *temporary);
} nd_tile_ops;

static inline void nd_tiles_begin(const nd_tile_ops *tiles)
{
    if (tiles->begin) {
        tiles->begin();
    }
}

static inline void nd_tiles_end(const nd_tile_ops *tiles)
{
    if (tiles->end) {
        tiles->end();
    }
}

/* One table per instruction set; the BF16 ones exist where the CPU multiplies BF16. */
extern const nd_tile_ops nd_tiles_f32_baseline, nd_tiles_f32_avx2, nd_tiles_f32_avx512;
extern const nd_tile_ops nd_tiles_f32_avx512_bf16, nd_tiles_bf16_avx512_bf16;

/* Products by AMX, the rest in AVX-512 BF16. The emulated tables have products in plain C and the
 * rest for the vectors they are named after. Where these have FMA the bits are those of AMX, except
 * in BF16 results below 2^-126: store_transposed makes them zero only with AVX512_BF16. */
extern const nd_tile_ops nd_tiles_bf16_amx;
extern const nd_tile_ops nd_tiles_bf16_amx_emulated_baseline, nd_tiles_bf16_amx_emulated_avx2;
extern const nd_tile_ops nd_tiles_bf16_amx_emulated_avx512;
extern const nd_tile_ops nd_tiles_bf16_amx_emulated_avx512_bf16;

/* tile_amx.c; a product may only be called between begin and end. */
void nd_tile_begin_amx(void);
void nd_tile_end_amx(void);
void nd_tile_gemm_amx(int m, int n, int words, const nd_word *a, int64_t lda, const nd_word *b,
                      int64_t ldb, float *c, int64_t ldc, bool add);
void nd_tile_begin_amx_emulated(void);
void nd_tile_end_amx_emulated(void);
void nd_tile_gemm_amx_emulated(int m, int n, int words, const nd_word *a, int64_t lda,
                               const nd_word *b, int64_t ldb, float *c, int64_t ldc, bool add);

#endif
