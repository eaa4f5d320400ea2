// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_GEMM_H
#define ND_CPU_GEMM_H
/*
 * Our own BF16 products, for CPUs that have AVX-512 but no AMX: on Zen 4 they come within 5 to 15
 * percent of what the registers can do, 5 percent closer than oneDNN 2.6. matmul.c chooses.
 *
 * The result is cut among the threads; each thread takes its part in blocks: 64 columns of B are
 * packed, multiplied with all rows of a block of A while they are in the second cache, and so on. A
 * is read where it lies unless it is transposed. A sum runs over k in order, in blocks of k whose
 * bounds depend on k alone, so its bits depend neither on the threads nor on the other extents.
 */
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/dnnl_matmul.h"
#include "runtime/tensor/dtype.h"

/*
 * The inner loops of our own BF16 products (gemm_bf16.c) for CPUs with AVX-512: packing, and
 * products of packed operands with the sums in registers. Nothing here allocates or starts threads.
 *
 * A word is two consecutive BF16 of k, the even one below: what one lane multiplies
 * (bf16_words.h). k is even throughout.
 */

typedef uint32_t nd_gemm_word;

enum {
    ND_GEMM_COLUMNS = 64, /* columns of a packed B */
    ND_GEMM_ROWS = 6,     /* rows of A that are multiplied at a time */
    ND_GEMM_PANEL = 96    /* rows of a panel of a packed A */
};

/* c (rows, columns) = (a b (+ from)) factor column_factors (+ c), rounded once when c is BF16. */
typedef struct nd_gemm_tile {
    int rows, columns; /* columns <= ND_GEMM_COLUMNS */
    int words;         /* k / 2 */
    const nd_bf16 *a;  /* word l of row i begins at a + i a_row + l a_word */
    int64_t a_row, a_word;
    const nd_gemm_word *b; /* [words][ND_GEMM_COLUMNS] */
    const float *from;     /* (rows, columns) of row stride from_row, or NULL */
    int64_t from_row;
    float factor;
    const float *column_factors; /* (columns), or NULL: 1 */
    void *c;                     /* BF16 or F32, row stride c_row */
    int64_t c_row;
    bool bf16, add;
} nd_gemm_tile;

typedef struct nd_gemm_kernels {
    void (*multiply)(const nd_gemm_tile *tile);
    /* B from `columns` rows x (columns, k) of row stride `stride`: k is the contiguous axis. */
    void (*pack_rows)(nd_gemm_word *b, const nd_bf16 *x, int64_t stride, int columns, int words);
    /* B from x (k, columns) of row stride `stride`. */
    void (*pack_pairs)(nd_gemm_word *b, const nd_bf16 *x, int64_t stride, int columns, int words);
    /* The same for A, from x (k, rows): [words][ND_GEMM_PANEL]. */
    void (*pack_panel)(nd_gemm_word *a, const nd_bf16 *x, int64_t stride, int rows, int words);
} nd_gemm_kernels;

extern const nd_gemm_kernels nd_gemm_avx512, nd_gemm_avx512_bf16;

/* The products. */

typedef struct nd_gemm nd_gemm;

nd_status nd_gemm_create(const nd_gemm_kernels *kernels, int threads, nd_gemm **out);
void nd_gemm_destroy(nd_gemm *gemm); /* NULL is legal */

/* Whether nd_gemm_multiply supports the product: BF16 operands, k even. */
bool nd_gemm_supports(const nd_dnnl_product *product);

/* c = op(a) op(b) factors (+ c), with factors as in nd_dnnl_matmul. Where sums go to an F32 c in
 * blocks of k, each block is multiplied. Allocates nothing. One call at a time. */
void nd_gemm_multiply(nd_gemm *gemm, const nd_dnnl_product *product, void *c, const nd_bf16 *a,
                      const nd_bf16 *b, const float *factors);

#endif
