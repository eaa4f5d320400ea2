// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/gemm.h"

#include <omp.h>
#include <stdlib.h>

#include "runtime/base/math.h"

enum {
    K_BLOCK = 1024,        /* 64 columns of B are then 128 KiB, in the second cache */
    K_ALIGNMENT = 32,      /* elements of a cache line */
    ROWS = 1056,           /* rows of A that share a packed B: its packing is below 1 percent */
    ROWS_TRANSPOSED = 480, /* the same where A is packed: below 1 MiB */
    COLUMNS = 512,         /* columns of B that stay packed for several blocks of rows */
    PARTIAL_COLUMNS = 256, /* of the F32 sums between blocks of k, where the result is BF16 */
    CACHE_LINE = 64
};

/* One thread's scratch. */
typedef struct workspace {
    nd_gemm_word b[COLUMNS / ND_GEMM_COLUMNS][K_BLOCK / 2 * ND_GEMM_COLUMNS];
    nd_gemm_word a[ROWS_TRANSPOSED * (K_BLOCK / 2)]; /* [panel][words][ND_GEMM_PANEL] */
    float partial[ROWS * PARTIAL_COLUMNS];
} workspace;

struct nd_gemm {
    const nd_gemm_kernels *kernels;
    int threads;
    workspace *workspaces; /* [threads] */
};

typedef struct call {
    const nd_gemm_kernels *kernels;
    const nd_dnnl_product *p;
    char *c;
    const nd_bf16 *a, *b;
    float factor;
    const float *column_factors; /* (n), or NULL */
    int64_t k_block;
} call;

typedef struct block {
    int64_t row, rows, column, columns, k, depth;
} block;

static void pack_a(const call *c, workspace *w, const block *x)
{
    for (int64_t i = 0; i < x->rows; i += ND_GEMM_PANEL) {
        c->kernels->pack_panel(w->a + i * (x->depth / 2), c->a + x->k * c->p->lda + x->row + i,
                               c->p->lda, (int)nd_min(ND_GEMM_PANEL, x->rows - i),
                               (int)(x->depth / 2));
    }
}

static void pack_b(const call *c, nd_gemm_word *b, const block *x)
{
    const int64_t ld = c->p->ldb;
    const int columns = (int)x->columns, words = (int)(x->depth / 2);
    if (c->p->b_transposed) {
        c->kernels->pack_rows(b, c->b + x->column * ld + x->k, ld, columns, words);
    } else {
        c->kernels->pack_pairs(b, c->b + x->k * ld + x->column, ld, columns, words);
    }
}

/* Where the sums of a block go: to c directly, or, for a BF16 result of several blocks of k, to the
 * F32 sums between them. `first`: their first column. */
static nd_gemm_tile destination(const call *c, workspace *w, const block *x, int64_t first)
{
    const bool begins = x->k == 0, ends = x->k + x->depth == c->p->k;
    const bool bf16 = c->p->out == ND_DTYPE_BF16;
    float *partial = w->partial + (x->column - first);
    nd_gemm_tile t = {
        .rows = (int)x->rows, .columns = (int)x->columns, .words = (int)(x->depth / 2)};
    t.factor = 1.0f;
    if (bf16 && !ends) {
        t.c = partial;
        t.c_row = PARTIAL_COLUMNS;
        t.add = !begins;
        return t;
    }
    t.factor = c->factor;
    t.column_factors = c->column_factors ? c->column_factors + x->column : NULL;
    t.c = c->c + (x->row * c->p->ldc + x->column) * (bf16 ? 2 : 4);
    t.c_row = c->p->ldc;
    t.bf16 = bf16;
    t.from = bf16 && !begins ? partial : NULL;
    t.from_row = PARTIAL_COLUMNS;
    t.add = c->p->accumulate || (!bf16 && !begins);
    return t;
}

/* The tile's rows of packed panels. */
static void multiply_panels(const call *c, const workspace *w, nd_gemm_tile t)
{
    const int64_t rows = t.rows, size = t.bf16 ? 2 : 4;
    char *to = t.c;
    const float *from = t.from;
    t.a_row = 2;
    t.a_word = 2 * ND_GEMM_PANEL;
    for (int64_t i = 0; i < rows; i += ND_GEMM_PANEL) {
        t.rows = (int)nd_min(ND_GEMM_PANEL, rows - i);
        t.a = (const nd_bf16 *)(w->a + i * t.words);
        t.c = to + i * t.c_row * size;
        t.from = from ? from + i * t.from_row : NULL;
        c->kernels->multiply(&t);
    }
}

/* The position of a block of rows: whether its B is already packed, and whether another block needs
 * it. */
typedef enum sharing { ONLY_BLOCK, FIRST_BLOCK, LATER_BLOCK } sharing;

static void multiply_block(const call *c, workspace *w, const block *x, sharing shared)
{
    block columns = *x;
    if (c->p->a_transposed) {
        pack_a(c, w, x);
    }
    for (int64_t j = 0; j < x->columns; j += ND_GEMM_COLUMNS) {
        nd_gemm_word *b = w->b[shared == ONLY_BLOCK ? 0 : j / ND_GEMM_COLUMNS];
        columns.column = x->column + j;
        columns.columns = nd_min(ND_GEMM_COLUMNS, x->columns - j);
        if (shared != LATER_BLOCK) {
            pack_b(c, b, &columns);
        }
        nd_gemm_tile t = destination(c, w, &columns, x->column);
        t.b = b;
        if (c->p->a_transposed) {
            multiply_panels(c, w, t);
        } else {
            t.a = c->a + x->row * c->p->lda + x->k;
            t.a_row = c->p->lda;
            t.a_word = 2;
            c->kernels->multiply(&t);
        }
    }
}

/* Cuts `count` rows into blocks of equal size, `most` at most, of whole groups of rows. */
static int64_t block_rows(int64_t count, int64_t most)
{
    const int64_t blocks = nd_ceil_div(count, most);
    return blocks < 2 ? most : nd_ceil_div(nd_ceil_div(count, blocks), ND_GEMM_ROWS) * ND_GEMM_ROWS;
}

/* All blocks of rows of one block of k and columns. */
static void multiply_rows(const call *c, workspace *w, block x, int64_t row_end, int64_t rows)
{
    sharing shared = row_end - x.row <= rows ? ONLY_BLOCK : FIRST_BLOCK;
    for (; x.row < row_end; x.row += rows) {
        x.rows = nd_min(rows, row_end - x.row);
        multiply_block(c, w, &x, shared);
        shared = LATER_BLOCK;
    }
}

static void multiply_depth(const call *c, workspace *w, block x, int64_t row_end, int64_t rows)
{
    for (x.k = 0; x.k < c->p->k; x.k += c->k_block) {
        x.depth = nd_min(c->k_block, c->p->k - x.k);
        multiply_rows(c, w, x, row_end, rows);
    }
}

/* One thread's part of the result. Where sums wait in `partial` for the next block of k, a block of
 * rows is done with all of k before the next one. */
static void multiply_part(const call *c, workspace *w, const block *part)
{
    const int64_t row_end = part->row + part->rows, column_end = part->column + part->columns;
    const int64_t rows = block_rows(part->rows, c->p->a_transposed ? ROWS_TRANSPOSED : ROWS);
    const bool partial = c->p->out == ND_DTYPE_BF16 && c->k_block < c->p->k;
    const int64_t span = partial ? rows : part->rows;
    const int64_t columns = partial ? PARTIAL_COLUMNS : rows < span ? COLUMNS : part->columns;
    block x = *part;
    for (x.row = part->row; x.row < row_end; x.row += span) {
        for (x.column = part->column; x.column < column_end; x.column += columns) {
            x.columns = nd_min(columns, column_end - x.column);
            multiply_depth(c, w, x, nd_min(x.row + span, row_end), rows);
        }
    }
}

/* threads */

/* Part `index` of `parts` of [0, count), in whole units. */
static void share(int64_t count, int64_t unit, int64_t parts, int64_t index, int64_t *begin,
                  int64_t *length)
{
    const int64_t units = nd_ceil_div(count, unit);
    *begin = nd_min(units * index / parts * unit, count);
    *length = nd_min(units * (index + 1) / parts * unit, count) - *begin;
}

/* Time of the largest part, in cycles for each 32 of k: products, and packing at 0.15 (rows of B),
 * 0.07 (A) cycles an element. */
static int64_t time_of(const nd_dnnl_product *p, int64_t row_parts, int64_t column_parts)
{
    const int64_t row_block = p->a_transposed ? ROWS_TRANSPOSED : ROWS;
    const int64_t rows = nd_ceil_div(nd_ceil_div(p->m, ND_GEMM_ROWS), row_parts) * ND_GEMM_ROWS;
    const int64_t columns =
        nd_ceil_div(nd_ceil_div(p->n, ND_GEMM_COLUMNS), column_parts) * ND_GEMM_COLUMNS;
    return rows * columns + 5 * columns * nd_ceil_div(rows, row_block) +
           (p->a_transposed ? 2 * rows : 0);
}

/* How many parts of rows; the columns are cut into threads / that many. */
static int64_t choose_row_parts(const nd_dnnl_product *p, int64_t threads)
{
    int64_t best = 1;
    for (int64_t parts = 2; parts <= threads; parts++) {
        if (threads % parts == 0 &&
            time_of(p, parts, threads / parts) < time_of(p, best, threads / best)) {
            best = parts;
        }
    }
    return best;
}

static void multiply_share(const call *c, workspace *w, int64_t row_parts, int64_t column_parts,
                           int64_t index)
{
    block part;
    share(c->p->m, ND_GEMM_ROWS, row_parts, index / column_parts, &part.row, &part.rows);
    share(c->p->n, ND_GEMM_COLUMNS, column_parts, index % column_parts, &part.column,
          &part.columns);
    multiply_part(c, w, &part);
}

void nd_gemm_multiply(nd_gemm *gemm, const nd_dnnl_product *p, void *c, const nd_bf16 *a,
                      const nd_bf16 *b, const float *factors)
{
    ND_ASSERT(nd_gemm_supports(p));
    const int64_t blocks = nd_ceil_div(p->k, K_BLOCK);
    const call x = {.kernels = gemm->kernels,
                    .p = p,
                    .c = c,
                    .a = a,
                    .b = b,
                    .factor = p->factors == ND_DNNL_FACTOR_ONE ? *factors : 1.0f,
                    .column_factors = p->factors == ND_DNNL_FACTOR_EACH_COLUMN ? factors : NULL,
                    .k_block = nd_ceil_div(nd_ceil_div(p->k, blocks), K_ALIGNMENT) * K_ALIGNMENT};
    if (gemm->threads == 1) {
        multiply_share(&x, gemm->workspaces, 1, 1, 0);
        return;
    }
    const int64_t row_parts = choose_row_parts(p, gemm->threads);
#pragma omp parallel for schedule(static, 1) num_threads(gemm->threads)
    for (int index = 0; index < gemm->threads; index++) {
        multiply_share(&x, &gemm->workspaces[index], row_parts, gemm->threads / row_parts, index);
    }
}

bool nd_gemm_supports(const nd_dnnl_product *p)
{
    return p->in == ND_DTYPE_BF16 && p->k % 2 == 0;
}

nd_status nd_gemm_create(const nd_gemm_kernels *kernels, int threads, nd_gemm **out)
{
    nd_gemm *gemm = NULL;
    ND_TRY(ND_ALLOC(1, &gemm));
    gemm->kernels = kernels;
    gemm->threads = threads;
    gemm->workspaces = aligned_alloc(CACHE_LINE, (size_t)threads * sizeof(workspace));
    if (!gemm->workspaces) {
        free(gemm);
        return nd_fail_memory("the packed operands of products (%.1f MiB)",
                              (double)threads * sizeof(workspace) / 1048576.0);
    }
    *out = gemm;
    return ND_OK;
}

void nd_gemm_destroy(nd_gemm *gemm)
{
    if (gemm) {
        free(gemm->workspaces);
        free(gemm);
    }
}
