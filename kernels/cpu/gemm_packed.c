// SPDX-License-Identifier: Apache-2.0
/* Operands that are packed as a whole, before a product: those that several products read, and
 * columns of B for all threads. */
#include "kernels/cpu/gemm_parts.h"

void nd_gemm_pack_panel(const nd_gemm_kernels *kernels, const nd_gemm_product *p, nd_gemm_word *to,
                        const nd_gemm_block *x)
{
    const bool transposed = p->b_transposed;
    nd_gemm_pack *pack = transposed ? kernels->pack_b_rows : kernels->pack_b_columns;
    pack(to, nd_gemm_operand_at(p->b, transposed, x->column, x->k), (int)x->columns, (int)x->depth);
}

size_t nd_gemm_packed_bytes(const nd_gemm *gemm, int64_t k, int64_t n)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    return (size_t)(nd_round_up(n, kernels->columns) * nd_gemm_words(kernels, k)) *
           sizeof(nd_gemm_word);
}

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
        nd_gemm_pack_panel(kernels, w->p,
                           w->packed + nd_gemm_offset_of_b(kernels, k, x.column, x.k), &x);
    }
}

void nd_gemm_pack_whole(nd_gemm *gemm, const nd_gemm_product *p, nd_gemm_word *packed)
{
    ND_ASSERT(nd_gemm_can_be_packed(p->b));
    whole w = {gemm, p, packed};
    nd_team_run(gemm->team, nd_ceil_div(p->n, gemm->kernels->columns), pack_whole_panel, &w);
}
