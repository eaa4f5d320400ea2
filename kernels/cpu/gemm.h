// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_GEMM_H
#define ND_CPU_GEMM_H
/*
 * Our own products of BF16 and of FP8 codes, for CPUs with AVX-512 or AMX. On Zen 4 those of
 * AVX-512 come within 5 to 15 percent of what the registers can do, 5 percent closer than oneDNN
 * 2.6. matmul.c chooses.
 *
 * The result is cut into pieces for the threads; each is done in blocks: a panel of columns of B is
 * packed, multiplied with all rows of a block of A while they are in the second cache, and so on.
 * Where that packs the same columns too often, which is usual with AMX, all threads pack B together
 * first. With AVX-512 A is read where it lies if it has rows of an even number of BF16 that are not
 * to be cast; else, and always with AMX, it is packed too. Codes become BF16, which holds each of
 * their values exactly, while they are packed, and BF16 that is to be FP8 is rounded to them;
 * neither a widened copy of an operand nor its codes are made.
 *
 * Bits: a sum runs over k in order. With AVX-512 it is summed in blocks of k whose bounds depend on
 * k alone. With AMX it is one sum in steps of 32 from 0, or from c where c is F32, is added to and
 * has no factors. So the bits depend neither on the threads nor on the other extents.
 */
#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/dnnl_matmul.h"
#include "kernels/cpu/team.h"
#include "runtime/tensor/dtype.h"

/*
 * The inner loops for one instruction set: packing, and products of packed operands with the sums
 * in registers or tiles (gemm_kernels.c: AVX-512, gemm_amx.c: AMX). Nothing here allocates or
 * starts threads.
 *
 * A word is two consecutive BF16 of k, the even one below: what one lane multiplies
 * (bf16_words.h). Behind k a packed operand has zeros up to a whole word, and up to a multiple of
 * `words` words.
 */

typedef uint32_t nd_gemm_word;

/* This is packed next, and lies as it is stored: `rows` rows (0: nothing) of `bytes` bytes,
 * `stride` bytes apart. */
typedef struct nd_gemm_ahead {
    const char *data;
    int64_t stride;
    int rows, bytes;
} nd_gemm_ahead;

/* c (rows, columns) = (a b (+ from)) (factor row_factors) column_factors (+ c), rounded once when c
 * is BF16. */
typedef struct nd_gemm_tile {
    int rows, columns; /* columns: of one panel of B at most */
    int words;         /* a multiple of the kernels' */
    const nd_bf16 *a;  /* word l of row i begins at a + i a_row + l a_word; AMX: a packed panel */
    int64_t a_row, a_word;
    const nd_gemm_word *b; /* a packed panel: [words][columns of a panel] */
    const float *from;     /* (rows, columns) of row stride from_row, or NULL; may be c */
    int64_t from_row;
    float factor;
    const float *row_factors, *column_factors; /* (rows), (columns), or NULL: 1 */
    void *c;                                   /* BF16 or F32, row stride c_row */
    int64_t c_row;
    bool bf16, add;
    float *sums;         /* scratch: as many as a panel of A has rows and one of B columns */
    nd_gemm_ahead ahead; /* may be fetched into the caches meanwhile */
} nd_gemm_tile;

/* The sums of row i are multiplied by this. */
static inline float nd_gemm_row_factor(const nd_gemm_tile *t, int64_t i)
{
    return t->row_factors ? t->factor * t->row_factors[i] : t->factor;
}

/* A matrix as it is stored: BF16 or FP8 codes. */
typedef struct nd_gemm_operand {
    const void *data;
    nd_dtype dtype;
    int64_t stride; /* elements from row to row */
    /* Where scale is not NULL, BF16 becomes the values of FP8 codes of `format`, as make_form makes
     * them of numbers in its range (nd_matrix.rows in kernels/ops.h), with 0 for -0, of which no
     * sum differs. A line is a row of op(a) or a column of op(b). */
    nd_dtype format;
    const float *scale; /* of each line, or one of all */
    bool scale_per_line;
} nd_gemm_operand;

/* Packs `lines` rows or columns, of a panel at most, of x for `depth` of k; lines that a panel has
 * beyond them may be zero or anything. */
typedef void nd_gemm_pack(nd_gemm_word *to, nd_gemm_operand x, int lines, int depth);

typedef struct nd_gemm_kernels {
    /* The units in which a product is cut. */
    int rows;    /* that are multiplied at a time: threads take multiples */
    int columns; /* of a packed panel of B: [words][columns] */
    int panel;   /* rows of a packed panel of A: a multiple of `rows` */
    int words;   /* as above */
    /* The form of a packed panel of A, as in nd_gemm_tile. */
    int a_row, a_word;
    bool packs_a; /* always; else where it cannot be read as it lies */

    /* Extents of the blocks, by the sizes of the caches. */
    int k_block;         /* a multiple of 32 elements, a cache line */
    int most_rows;       /* of A that share a packed panel of B */
    int most_packed;     /* the same where A is packed: at most `panel`, or a multiple of it */
    int most_of_a;       /* elements of such rows in a block of k; 0: any number */
    int shared_columns;  /* of B that stay packed for several blocks of rows; 0: none do */
    int together_bytes;  /* of columns of B that all threads pack before they multiply; 0: never */
    int least_together;  /* columns: A is packed again for the next ones */
    int partial_columns; /* of the F32 sums between blocks of k that do not wait in c */

    /* Costs, by which products are cut. 1 is the time in which one sum of the result advances by
     * some of k (32 with AVX-512, 512 with AMX); these are the times in which as many of k of one
     * row of A are packed, of one column of B are packed, and of one column of B that somebody
     * packed before are read, beside the products; and what is added where packing casts. */
    int a_time, b_time, b_read_time, cast_time;

    /* These are called before and after the products of a thread's part; they may be NULL. */
    void (*begin)(void);
    void (*end)(void);
    void (*multiply)(const nd_gemm_tile *tile);
    /* A panel from rows of k, x (lines, k), or from x (k, lines). */
    nd_gemm_pack *pack_b_rows, *pack_b_columns, *pack_a_rows, *pack_a_columns;
} nd_gemm_kernels;

extern const nd_gemm_kernels nd_gemm_avx512, nd_gemm_avx512_bf16, nd_gemm_amx;
/* Tiles in plain C, with plain C or AVX-512 for the rest. */
extern const nd_gemm_kernels nd_gemm_amx_emulated, nd_gemm_amx_emulated_avx512;

/* The products. */

typedef struct nd_gemm nd_gemm;

/* The products run on the team's threads. */
nd_status nd_gemm_create(const nd_gemm_kernels *kernels, nd_team *team, nd_gemm **out);
void nd_gemm_destroy(nd_gemm *gemm); /* NULL is legal */
/* Returns the bytes that the products hold beside their operands, for all threads. */
size_t nd_gemm_bytes(const nd_gemm *gemm);

/* Sum (i, j) is multiplied by all rows[i] columns[j]; NULL counts as 1. */
typedef struct nd_gemm_factors {
    float all;
    const float *rows, *columns;
} nd_gemm_factors;

/* c (m, n) = op(a) op(b) factors (+ c), c BF16 or F32. */
typedef struct nd_gemm_product {
    int64_t m, n, k;
    nd_gemm_operand a, b;
    bool a_transposed, b_transposed, accumulate;
    const nd_gemm_factors *factors; /* NULL: none */
    void *c;
    int64_t c_stride;
    bool c_bf16;
    const nd_gemm_word *b_packed; /* NULL, or op(b) as nd_gemm_pack_whole left it: b is not read */
} nd_gemm_product;

/* Elements of k whose sums are complete in an F32 c without factors before the next ones are added.
 */
int64_t nd_gemm_sum_block(const nd_gemm *gemm, int64_t k);
/* A product of more rows gains less than 2 percent when its b is packed already. */
int64_t nd_gemm_most_packed_rows(const nd_gemm *gemm);

/*
 * A whole op(b) of (k, n) in the words that a product packs block by block: a panel after the
 * other, each with all of k. All threads pack together. Of the product only k, n, b and
 * b_transposed are read; the memory is aligned to 64.
 */
size_t nd_gemm_packed_bytes(const nd_gemm *gemm, int64_t k, int64_t n);
void nd_gemm_pack_whole(nd_gemm *gemm, const nd_gemm_product *product, nd_gemm_word *packed);

/* Into how many parts the rows and the columns of a result are cut: the pieces of a region. */
typedef struct nd_gemm_cut {
    int64_t rows, columns;
} nd_gemm_cut;

/* The most pieces for each thread, up to ND_TEAM_PIECES, that take at most a 32nd longer than one
 * for each: each piece packs its operands. */
nd_gemm_cut nd_gemm_choose_cut(const nd_gemm_kernels *kernels, const nd_gemm_product *p,
                               int64_t threads);

/* Allocates nothing. One call at a time. */
void nd_gemm_multiply(nd_gemm *gemm, const nd_gemm_product *product);

#endif
