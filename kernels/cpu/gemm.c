// SPDX-License-Identifier: Apache-2.0
/* Multiplies: a product in pieces for the threads, a piece in blocks for the caches. The scratch of
 * nd_gemm is that of one product at a time, a part of it for each thread of the team. */
#include "kernels/cpu/gemm.h"

#include <stdlib.h>
#include <sys/mman.h>

#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

enum { CACHE_LINE = 64, HUGE_PAGE = 2 << 20 };

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

/* True where A is packed to the kernels' panels; elsewhere it is read as it lies. */
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

/* True where the sums of a block of k wait in c for the next block. Elsewhere they wait in scratch,
 * so that factors are applied once and a BF16 result is rounded once. */
static inline bool nd_gemm_sums_wait_in_c(const nd_gemm_product *p)
{
    return !p->c_bf16 && !p->factors;
}

/* The order in which a part of a result is done: some columns of `span` rows come with all of k
 * before the next ones, and these rows come in blocks of `rows`. For further columns A is packed
 * again, for further rows B. */
typedef struct nd_gemm_order {
    int64_t rows, span, columns;
} nd_gemm_order;

/* A block of rows is done with all of k before the next one where sums wait in scratch for the next
 * block of k, or where no packed B is shared. So are as many of its columns as keep their sums in
 * the caches. */
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

/* This part chooses how a product is cut into pieces for the threads, and who packs its operands.
 * It takes what needs the least time by the costs of the kernels. */

int64_t nd_gemm_most_packed_rows(const nd_gemm *gemm)
{
    return 50 * gemm->kernels->b_time;
}

size_t nd_gemm_packed_bytes(const nd_gemm *gemm, int64_t k, int64_t n)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    return (size_t)(nd_round_up(n, kernels->columns) * nd_gemm_words(kernels, k)) *
           sizeof(nd_gemm_word);
}

static int64_t cast_time_of(const nd_gemm_kernels *kernels, const nd_gemm_operand *x)
{
    return x->scale ? kernels->cast_time : 0;
}

static int64_t time_of_b(const nd_gemm_kernels *kernels, const nd_gemm_product *p)
{
    return kernels->b_time + cast_time_of(kernels, &p->b);
}

/* Time of the largest piece, in the kernels' unit. */
static int64_t time_of(const nd_gemm_kernels *kernels, const nd_gemm_product *p, nd_gemm_cut by)
{
    const int64_t rows = nd_round_up(nd_ceil_div(p->m, by.rows), kernels->rows);
    const int64_t columns = nd_round_up(nd_ceil_div(p->n, by.columns), kernels->columns);
    const nd_gemm_order order = nd_gemm_order_of(kernels, p, rows, columns);
    const int64_t a_time =
        nd_gemm_packs_a(kernels, p) ? kernels->a_time + cast_time_of(kernels, &p->a) : 0;
    const int64_t b_time = p->b_packed ? kernels->b_read_time : time_of_b(kernels, p);
    /* A product packs an operand again for further columns or rows, unless it was packed before. */
    const int64_t of_a = rows * nd_ceil_div(columns, order.columns);
    const int64_t of_b = columns * (p->b_packed ? 1 : nd_ceil_div(rows, order.span));
    return rows * columns + a_time * of_a + b_time * of_b;
}

/* The fastest cut into this many pieces. */
static nd_gemm_cut fastest_cut(const nd_gemm_kernels *kernels, const nd_gemm_product *p,
                               int64_t pieces)
{
    nd_gemm_cut best = {1, pieces};
    for (int64_t rows = 2; rows <= pieces; rows++) {
        const nd_gemm_cut by = {rows, pieces / rows};
        if (pieces % rows == 0 && time_of(kernels, p, by) < time_of(kernels, p, best)) {
            best = by;
        }
    }
    return best;
}

nd_gemm_cut nd_gemm_choose_cut(const nd_gemm_kernels *kernels, const nd_gemm_product *p,
                               int64_t threads)
{
    const nd_gemm_cut whole = fastest_cut(kernels, p, threads);
    const int64_t most = 33 * time_of(kernels, p, whole);
    for (int64_t each = ND_TEAM_PIECES; threads > 1 && each > 1; each--) {
        const nd_gemm_cut by = fastest_cut(kernels, p, threads * each);
        if (32 * each * time_of(kernels, p, by) <= most) {
            return by;
        }
    }
    return whole;
}

/* Returns how many columns of B all threads pack together before they multiply; 0: it is faster
 * that each piece packs its own, or too few have room. */
static int64_t columns_together(const nd_gemm *gemm, const nd_gemm_product *p)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    const int64_t threads = nd_team_threads(gemm->team), panel = kernels->columns;
    const int64_t panels =
        kernels->together_bytes / (int64_t)nd_gemm_packed_bytes(gemm, p->k, panel);
    const int64_t most = nd_min(panels * panel, nd_round_up(p->n, panel));
    nd_gemm_product packed = *p;
    packed.b_packed = gemm->shared;
    if (most == 0 || most < nd_min(kernels->least_together, p->n)) {
        return 0;
    }
    const int64_t parts = nd_ceil_div(p->n, most); /* of equal size; each packs A again */
    const int64_t columns = nd_round_up(nd_ceil_div(p->n, parts), panel);
    const int64_t apart = time_of(kernels, p, fastest_cut(kernels, p, threads));
    packed.n = columns;
    const int64_t together =
        parts * time_of(kernels, &packed, fastest_cut(kernels, &packed, threads)) +
        time_of_b(kernels, p) * nd_ceil_div(p->n, threads);
    return together < apart ? columns : 0;
}

/* the products */

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

/* The distance of rows is not a multiple of 4 KiB, because such rows would share few lines of the
 * first cache. */
static int64_t partial_stride(const nd_gemm_kernels *kernels)
{
    return kernels->partial_columns + CACHE_LINE / (int64_t)sizeof(float);
}

/* Says where the sums of a block begin and where they go. `first`: the first column of
 * `partial`. */
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
    const int64_t together = p->b_packed ? 0 : columns_together(gemm, p);
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
