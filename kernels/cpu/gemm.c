// SPDX-License-Identifier: Apache-2.0
/* Multiplies: a product in pieces for the threads, a piece in blocks for the caches. */
#include "kernels/cpu/gemm.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "kernels/cpu/gemm_parts.h"
#include "runtime/base/math.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20 };

typedef struct call {
    const nd_gemm_kernels *kernels;
    const nd_gemm_product *p;
    int64_t k_block;
} call;

/* One thread's scratch, as nd_gemm_layout has it. */
typedef struct workspace {
    nd_gemm_word *b, *a;
    float *partial, *sums;
} workspace;

/* The position of a block of rows: whether its B is already packed, and whether another block needs
 * it. */
typedef enum sharing { ONLY_BLOCK, FIRST_BLOCK, LATER_BLOCK } sharing;

static void pack_a(const call *c, workspace *w, const nd_gemm_block *x)
{
    const nd_gemm_kernels *kernels = c->kernels;
    const bool transposed = c->p->a_transposed;
    nd_gemm_pack *pack = transposed ? kernels->pack_a_columns : kernels->pack_a_rows;
    const int64_t words = nd_gemm_words(c->kernels, x->depth);
    for (int64_t i = 0; i < x->rows; i += kernels->panel) {
        const int64_t row = x->row + i;
        const int rows = (int)nd_min(kernels->panel, x->rows - i), depth = (int)x->depth;
        pack(w->a + i * words, nd_gemm_operand_at(c->p->a, !transposed, row, x->k), rows, depth);
    }
}

/* The columns and the k of x, one panel of op(b) at most. */
static void pack_panel(const nd_gemm_kernels *kernels, const nd_gemm_product *p, nd_gemm_word *to,
                       const nd_gemm_block *x)
{
    const bool transposed = p->b_transposed;
    nd_gemm_pack *pack = transposed ? kernels->pack_b_rows : kernels->pack_b_columns;
    pack(to, nd_gemm_operand_at(p->b, transposed, x->column, x->k), (int)x->columns, (int)x->depth);
}

/* The j-th columns of a block, packed in the thread's scratch. */
static const nd_gemm_word *pack_in_scratch(const call *c, workspace *w,
                                           const nd_gemm_block *columns, int64_t j, sharing shared)
{
    nd_gemm_word *b = w->b + (shared == ONLY_BLOCK ? 0 : j * c->kernels->k_block / 2);
    if (shared != LATER_BLOCK) {
        pack_panel(c->kernels, c->p, b, columns);
    }
    return b;
}

/* From row to row. Not a multiple of 4 KiB, of which rows would share few lines of the first cache.
 */
static int64_t partial_stride(const nd_gemm_kernels *kernels)
{
    return kernels->partial_columns + CACHE_LINE / (int64_t)sizeof(float);
}

/* Where the sums of a block begin and where they go. `first`: the first column of `partial`. */
static nd_gemm_tile destination(const call *c, workspace *w, const nd_gemm_block *x, int64_t first)
{
    const bool begins = x->k == 0, ends = x->k + x->depth == c->p->k;
    const bool bf16 = c->p->c_bf16;
    const int64_t partial_row = partial_stride(c->kernels);
    float *partial = w->partial + (x->column - first);
    nd_gemm_tile t = {.rows = (int)x->rows,
                      .columns = (int)x->columns,
                      .words = (int)nd_gemm_words(c->kernels, x->depth),
                      .factor = 1.0f,
                      .sums = w->sums,
                      .c = (char *)c->p->c + (x->row * c->p->c_stride + x->column) * (bf16 ? 2 : 4),
                      .c_row = c->p->c_stride,
                      .bf16 = bf16};
    if (nd_gemm_sums_wait_in_c(c->p)) {
        t.from = c->p->accumulate || !begins ? t.c : NULL;
        t.from_row = t.c_row;
        return t;
    }
    t.from = begins ? NULL : partial;
    t.from_row = partial_row;
    if (!ends) {
        t.c = partial;
        t.c_row = partial_row;
        t.bf16 = false;
        return t;
    }
    t.add = c->p->accumulate;
    if (c->p->factors) {
        const nd_gemm_factors *f = c->p->factors;
        t.factor = f->all;
        t.row_factors = f->rows ? f->rows + x->row : NULL;
        t.column_factors = f->columns ? f->columns + x->column : NULL;
    }
    return t;
}

/* Part i of `parts` of its rows. */
static nd_gemm_ahead part_of(nd_gemm_ahead x, int64_t i, int64_t parts)
{
    if (x.rows > 0) {
        const int64_t begin = x.rows * i / parts;
        x.data += begin * x.stride;
        x.rows = (int)(x.rows * (i + 1) / parts - begin);
    }
    return x;
}

/* The tile's rows of packed panels. */
static void multiply_panels(const call *c, const workspace *w, nd_gemm_tile t)
{
    const int64_t rows = t.rows, size = t.bf16 ? 2 : 4, panel = c->kernels->panel;
    const nd_gemm_ahead ahead = t.ahead;
    char *to = t.c;
    const float *from = t.from, *factors = t.row_factors;
    t.a_row = c->kernels->a_row;
    t.a_word = c->kernels->a_word;
    for (int64_t i = 0; i < rows; i += panel) {
        t.rows = (int)nd_min(panel, rows - i);
        t.a = (const nd_bf16 *)(w->a + i * t.words);
        t.c = to + i * t.c_row * size;
        t.from = from ? from + i * t.from_row : NULL;
        t.row_factors = factors ? factors + i : NULL;
        t.ahead = part_of(ahead, i / panel, nd_ceil_div(rows, panel));
        c->kernels->multiply(&t);
    }
}

/* The columns of B behind these, as they are stored. The thread packs them next, except at the end
 * of its columns, or of a block of k whose columns it does not do all at once. */
static nd_gemm_ahead columns_behind(const call *c, const nd_gemm_block *columns)
{
    const nd_gemm_product *p = c->p;
    const int64_t column = columns->column + columns->columns, size = nd_dtype_size(p->b.dtype);
    const int64_t count = nd_min(c->kernels->columns, p->n - column);
    if (count <= 0) {
        return (nd_gemm_ahead){0};
    }
    const int64_t rows = p->b_transposed ? count : columns->depth;
    const int64_t elements = p->b_transposed ? columns->depth : count;
    return (nd_gemm_ahead){.data =
                               nd_gemm_operand_at(p->b, p->b_transposed, column, columns->k).data,
                           .stride = p->b.stride * size,
                           .rows = (int)rows,
                           .bytes = (int)(elements * size)};
}

static void multiply_block(const call *c, workspace *w, const nd_gemm_block *x, sharing shared)
{
    const int panel = c->kernels->columns;
    const nd_gemm_word *packed = c->p->b_packed;
    nd_gemm_block columns = *x;
    const bool packs_a = nd_gemm_packs_a(c->kernels, c->p);
    if (packs_a) {
        pack_a(c, w, x);
    }
    for (int64_t j = 0; j < x->columns; j += panel) {
        columns.column = x->column + j;
        columns.columns = nd_min(panel, x->columns - j);
        nd_gemm_tile t = destination(c, w, &columns, x->column);
        t.b = packed ? packed + nd_gemm_offset_of_b(c->kernels, c->p->k, columns.column, x->k)
                     : pack_in_scratch(c, w, &columns, j, shared);
        if (!packed && shared != LATER_BLOCK) {
            t.ahead = columns_behind(c, &columns);
        }
        if (packs_a) {
            multiply_panels(c, w, t);
        } else {
            t.a = nd_gemm_operand_at(c->p->a, true, x->row, x->k).data;
            t.a_row = c->p->a.stride;
            t.a_word = 2;
            c->kernels->multiply(&t);
        }
    }
}

/* All blocks of rows of one block of k and columns. */
static void multiply_rows(const call *c, workspace *w, nd_gemm_block x, int64_t row_end,
                          int64_t rows)
{
    sharing shared = row_end - x.row <= rows ? ONLY_BLOCK : FIRST_BLOCK;
    for (; x.row < row_end; x.row += rows) {
        x.rows = nd_min(rows, row_end - x.row);
        multiply_block(c, w, &x, shared);
        shared = LATER_BLOCK;
    }
}

static void multiply_depth(const call *c, workspace *w, nd_gemm_block x, int64_t row_end,
                           int64_t rows)
{
    for (x.k = 0; x.k < c->p->k; x.k += c->k_block) {
        x.depth = nd_min(c->k_block, c->p->k - x.k);
        multiply_rows(c, w, x, row_end, rows);
    }
}

/* One thread's part of the result. */
static void multiply_part(const call *c, workspace *w, const nd_gemm_block *part)
{
    const int64_t row_end = part->row + part->rows, column_end = part->column + part->columns;
    const nd_gemm_order by = nd_gemm_order_of(c->kernels, c->p, part->rows, part->columns);
    nd_gemm_block x = *part;
    for (x.row = part->row; x.row < row_end; x.row += by.span) {
        for (x.column = part->column; x.column < column_end; x.column += by.columns) {
            x.columns = nd_min(by.columns, column_end - x.column);
            multiply_depth(c, w, x, nd_min(x.row + by.span, row_end), by.rows);
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

typedef struct pieces {
    const nd_gemm *gemm;
    const call *c;
    nd_gemm_cut by;
} pieces;

static void multiply_piece(void *arg, int64_t index)
{
    const pieces *all = arg;
    const call *c = all->c;
    const nd_gemm_layout *at = &all->gemm->layout;
    char *scratch = all->gemm->scratch + (size_t)nd_team_thread() * at->end;
    workspace w = {.b = (nd_gemm_word *)(scratch + at->b),
                   .a = (nd_gemm_word *)(scratch + at->a),
                   .partial = (float *)(scratch + at->partial),
                   .sums = (float *)(scratch + at->sums)};
    nd_gemm_block part;
    share(c->p->m, c->kernels->rows, all->by.rows, index / all->by.columns, &part.row, &part.rows);
    share(c->p->n, c->kernels->columns, all->by.columns, index % all->by.columns, &part.column,
          &part.columns);
    if (c->kernels->begin) {
        c->kernels->begin();
    }
    multiply_part(c, &w, &part);
    if (c->kernels->end) {
        c->kernels->end();
    }
}

/* One region. */
static void multiply_whole(nd_gemm *gemm, const nd_gemm_product *p)
{
    const call x = {gemm->kernels, p, nd_gemm_k_block(gemm->kernels, p->k)};
    pieces all = {gemm, &x, nd_gemm_choose_cut(gemm->kernels, p, nd_team_threads(gemm->team))};
    nd_team_run(gemm->team, all.by.rows * all.by.columns, multiply_piece, &all);
}

/* The product's columns [first, first + columns). */
static nd_gemm_product columns_of(const nd_gemm_product *p, const nd_gemm_factors *factors,
                                  int64_t first, int64_t columns)
{
    nd_gemm_product x = *p;
    x.n = columns;
    x.b = nd_gemm_operand_at(p->b, p->b_transposed, first, 0);
    x.c = (char *)p->c + first * (p->c_bf16 ? 2 : 4);
    x.factors = p->factors ? factors : NULL;
    return x;
}

static void multiply_together(nd_gemm *gemm, const nd_gemm_product *p, int64_t columns)
{
    nd_gemm_factors factors = p->factors ? *p->factors : (nd_gemm_factors){0};
    for (int64_t first = 0; first < p->n; first += columns) {
        nd_gemm_product x = columns_of(p, &factors, first, nd_min(columns, p->n - first));
        nd_gemm_pack_whole(gemm, &x, gemm->shared);
        x.b_packed = gemm->shared;
        multiply_whole(gemm, &x);
        factors.columns = factors.columns ? factors.columns + columns : NULL;
    }
}

void nd_gemm_multiply(nd_gemm *gemm, const nd_gemm_product *p)
{
    ND_ASSERT(nd_gemm_can_be_packed(p->a) && (p->b_packed || nd_gemm_can_be_packed(p->b)));
    const int64_t together = p->b_packed ? 0 : nd_gemm_columns_together(gemm, p);
    if (together > 0) {
        multiply_together(gemm, p, together);
    } else {
        multiply_whole(gemm, p);
    }
}

int64_t nd_gemm_sum_block(const nd_gemm *gemm, int64_t k)
{
    return nd_gemm_k_block(gemm->kernels, k);
}

/* Operands that are packed as a whole, before a product. */

typedef struct whole {
    const nd_gemm *gemm;
    const nd_gemm_product *p;
    nd_gemm_word *packed;
} whole;

/* One panel with all of k. */
static void pack_whole_panel(void *arg, int64_t index)
{
    const whole *w = arg;
    const nd_gemm_kernels *kernels = w->gemm->kernels;
    const int64_t k = w->p->k, block = nd_gemm_k_block(kernels, k);
    nd_gemm_block x = {.column = index * kernels->columns};
    x.columns = nd_min(kernels->columns, w->p->n - x.column);
    for (; x.k < k; x.k += block) {
        x.depth = nd_min(block, k - x.k);
        pack_panel(kernels, w->p, w->packed + nd_gemm_offset_of_b(kernels, k, x.column, x.k), &x);
    }
}

void nd_gemm_pack_whole(nd_gemm *gemm, const nd_gemm_product *p, nd_gemm_word *packed)
{
    ND_ASSERT(nd_gemm_can_be_packed(p->b));
    whole w = {gemm, p, packed};
    nd_team_run(gemm->team, nd_ceil_div(p->n, gemm->kernels->columns), pack_whole_panel, &w);
}

static size_t after(size_t offset, int64_t count, size_t size)
{
    return offset + nd_round_up_bytes((size_t)count * size, CACHE_LINE);
}

static nd_gemm_layout layout_of(const nd_gemm_kernels *kernels)
{
    const int64_t columns = kernels->columns, words = kernels->k_block / 2;
    const int64_t rows = nd_max(kernels->most_rows, kernels->most_packed);
    const int64_t of_a = kernels->most_of_a / 2;
    nd_gemm_layout at = {.b = 0};
    at.a = after(at.b, nd_max(columns, kernels->shared_columns) * words, sizeof(nd_gemm_word));
    at.partial = after(at.a, of_a > 0 ? of_a : kernels->most_packed * words, sizeof(nd_gemm_word));
    at.sums = after(at.partial, rows * partial_stride(kernels), sizeof(float));
    at.end = after(at.sums, kernels->panel * columns, sizeof(float));
    return at;
}

static size_t own_bytes(const nd_gemm *gemm)
{
    return (size_t)nd_team_threads(gemm->team) * gemm->layout.end;
}

size_t nd_gemm_bytes(const nd_gemm *gemm)
{
    return nd_round_up_bytes(own_bytes(gemm) + (size_t)gemm->kernels->together_bytes, HUGE_PAGE);
}

nd_status nd_gemm_create(const nd_gemm_kernels *kernels, nd_team *team, nd_gemm **out)
{
    nd_gemm *gemm = NULL;
    ND_TRY(ND_ALLOC(1, &gemm));
    gemm->kernels = kernels;
    gemm->team = team;
    gemm->layout = layout_of(kernels);
    gemm->scratch = aligned_alloc(HUGE_PAGE, nd_gemm_bytes(gemm));
    if (!gemm->scratch) {
        const double bytes = (double)nd_gemm_bytes(gemm);
        free(gemm);
        return nd_fail_memory("the packed operands of products (%.1f MiB)", bytes / 1048576.0);
    }
    /* A hint: panels are read from front to back, which is faster in large pages. */
    madvise(gemm->scratch, nd_gemm_bytes(gemm), MADV_HUGEPAGE);
    gemm->shared = (nd_gemm_word *)(gemm->scratch + own_bytes(gemm));
    *out = gemm;
    return ND_OK;
}

void nd_gemm_destroy(nd_gemm *gemm)
{
    if (gemm) {
        free(gemm->scratch);
        free(gemm);
    }
}
