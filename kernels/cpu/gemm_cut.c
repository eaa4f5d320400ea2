// SPDX-License-Identifier: Apache-2.0
/* How a product is cut into pieces for the threads, and who packs its operands: what takes the
 * least time by the costs of the kernels. */
#include "kernels/cpu/gemm_parts.h"

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
    /* What a product packs itself, it packs again for further columns or rows. */
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

int64_t nd_gemm_columns_together(const nd_gemm *gemm, const nd_gemm_product *p)
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
