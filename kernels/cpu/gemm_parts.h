// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_GEMM_PARTS_H
#define ND_CPU_GEMM_PARTS_H
/*
 * What the files of the products share: where blocks of operands lie, stored and packed (gemm.c
 * multiplies, gemm_cut.c cuts a product into pieces). The scratch of nd_gemm is that of one product
 * at a time, a part of it for each thread of the team.
 */
#include "kernels/cpu/gemm.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

/* One thread's scratch, in bytes from its beginning. */
typedef struct nd_gemm_layout {
    size_t b;       /* panels of B, of k_block each */
    size_t a;       /* a block of packed A */
    size_t partial; /* F32 (rows of a block, partial_stride): sums between blocks of k */
    size_t sums;    /* F32 (panel, columns): of the kernels */
    size_t end;
} nd_gemm_layout;

struct nd_gemm {
    const nd_gemm_kernels *kernels;
    nd_team *team;
    nd_gemm_layout layout;
    char *scratch;        /* [threads] */
    nd_gemm_word *shared; /* together_bytes: columns of B that all threads packed */
};

/* Rows and columns of a result, and k from `k` to k + depth. */
typedef struct nd_gemm_block {
    int64_t row, rows, column, columns, k, depth;
} nd_gemm_block;

/* Whether A is packed to the kernels' panels; else it is read as it lies. */
static inline bool nd_gemm_packs_a(const nd_gemm_kernels *kernels, const nd_gemm_product *p)
{
    return kernels->packs_a || p->a_transposed || p->a.dtype != ND_DTYPE_BF16 || p->a.scale ||
           p->k % 2 != 0;
}

static inline bool nd_gemm_can_be_packed(nd_gemm_operand x)
{
    return x.dtype == ND_DTYPE_BF16 || nd_dtype_is_fp8(x.dtype);
}

/* Words that `depth` of k take in a packed operand. */
static inline int64_t nd_gemm_words(const nd_gemm_kernels *kernels, int64_t depth)
{
    return nd_round_up(nd_ceil_div(depth, 2), kernels->words);
}

/* The products of a block of k have this many; the last one fewer. */
static inline int64_t nd_gemm_k_block(const nd_gemm_kernels *kernels, int64_t k)
{
    enum { ALIGNMENT = 32 }; /* elements of a cache line, and of a step of tiles */
    const int64_t blocks = nd_ceil_div(k, kernels->k_block);
    return nd_round_up(nd_ceil_div(k, blocks), ALIGNMENT);
}

/* Rows of A in a block. */
static inline int64_t nd_gemm_most_rows(const nd_gemm_kernels *kernels, const nd_gemm_product *p)
{
    const int64_t most = nd_gemm_packs_a(kernels, p) ? kernels->most_packed : kernels->most_rows;
    const int64_t units = kernels->most_of_a / nd_gemm_k_block(kernels, p->k) / kernels->rows;
    return kernels->most_of_a > 0 ? nd_min(most, units * kernels->rows) : most;
}

/* Whether the sums of a block of k wait in c for the next block; else they wait in scratch, so that
 * factors are applied once and a BF16 result is rounded once. */
static inline bool nd_gemm_sums_wait_in_c(const nd_gemm_product *p)
{
    return !p->c_bf16 && !p->factors;
}

/* In what order a part of a result is done: some columns of `span` rows with all of k before the
 * next ones, and these in blocks of `rows`. For further columns A is packed again, for further rows
 * B. */
typedef struct nd_gemm_order {
    int64_t rows, span, columns;
} nd_gemm_order;

/* Where sums wait in scratch for the next block of k, or where no packed B is shared, a block of
 * rows is done with all of k before the next one, and so are as many of its columns as keep their
 * sums in the caches. */
static inline nd_gemm_order nd_gemm_order_of(const nd_gemm_kernels *kernels,
                                             const nd_gemm_product *p, int64_t rows,
                                             int64_t columns)
{
    const int64_t most = nd_gemm_most_rows(kernels, p), blocks = nd_ceil_div(rows, most);
    const bool shared = kernels->shared_columns > 0;
    const bool waits = nd_gemm_k_block(kernels, p->k) < p->k;
    const bool partial = waits && !nd_gemm_sums_wait_in_c(p);
    nd_gemm_order by = {.rows = blocks < 2 ? most
                                           : nd_round_up(nd_ceil_div(rows, blocks), kernels->rows)};
    by.span = partial || !shared ? by.rows : rows;
    by.columns = partial || (waits && !shared) ? kernels->partial_columns
                 : by.rows < by.span           ? kernels->shared_columns
                                               : columns;
    return by;
}

/* x from a line and an element of k on. of_rows: its lines are the rows that are stored. */
static inline nd_gemm_operand nd_gemm_operand_at(nd_gemm_operand x, bool of_rows, int64_t line,
                                                 int64_t k)
{
    const int64_t size = x.dtype == ND_DTYPE_BF16 ? 2 : 1;
    x.data = (const char *)x.data + (of_rows ? line * x.stride + k : k * x.stride + line) * size;
    x.scale = x.scale && x.scale_per_line ? x.scale + line : x.scale;
    return x;
}

/* The words of the panel from `column` on, from element l of k on, in an op(b) that is packed as a
 * whole. Blocks of k begin at whole multiples of the kernels' words. */
static inline int64_t nd_gemm_offset_of_b(const nd_gemm_kernels *kernels, int64_t k, int64_t column,
                                          int64_t l)
{
    return column * nd_gemm_words(kernels, k) + l / 2 * kernels->columns;
}

/* gemm_cut.c */

/* Into how many parts the rows and the columns of a result are cut: the pieces of a region. */
typedef struct nd_gemm_cut {
    int64_t rows, columns;
} nd_gemm_cut;

/* The most pieces for each thread, up to ND_TEAM_PIECES, that take at most a 32nd longer than one
 * for each: each piece packs its operands. */
nd_gemm_cut nd_gemm_choose_cut(const nd_gemm_kernels *kernels, const nd_gemm_product *p,
                               int64_t threads);

/* How many columns of B all threads pack together before they multiply; 0: it is faster that each
 * piece packs its own, or too few have room. */
int64_t nd_gemm_columns_together(const nd_gemm *gemm, const nd_gemm_product *p);

#endif
