// SPDX-License-Identifier: Apache-2.0
/* Operands that are packed as a whole, before a product: weights, activations and their codes, and
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

/* activations */

int64_t nd_gemm_activation_unit(const nd_gemm *gemm)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    ND_ASSERT(!kernels->packs_a ||
              (kernels->rows == kernels->columns && kernels->rows == 2 * kernels->words));
    return kernels->packs_a ? kernels->rows : 0;
}

size_t nd_gemm_activation_bytes(const nd_gemm *gemm, int64_t rows, int64_t columns, bool as_b)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    const int64_t depth = as_b ? rows : columns, lines = as_b ? columns : rows;
    return kernels->packs_a
               ? (size_t)(nd_round_up(lines, kernels->rows) * nd_gemm_words(kernels, depth)) *
                     sizeof(nd_gemm_word)
               : 0;
}

/* Rows of a unit at most, which begin at `row`. */
static void pack_rows_as_a(const nd_gemm_kernels *kernels, const nd_gemm_activation *to,
                           nd_gemm_operand x, const nd_gemm_part *part, int64_t row, int rows)
{
    for (int64_t j = 0, some; j < part->columns; j += some) {
        const int64_t column = part->column + j;
        some = nd_min(part->columns - j, nd_gemm_rest_of_block(kernels, to->columns, column));
        kernels->pack_a_rows(to->as_a +
                                 nd_gemm_offset_of_a(kernels, to->rows, to->columns, row, column),
                             nd_gemm_operand_at(x, true, 0, j), rows, (int)some);
    }
}

static void pack_rows_as_b(const nd_gemm_kernels *kernels, const nd_gemm_activation *to,
                           nd_gemm_operand x, const nd_gemm_part *part, int64_t row, int rows)
{
    const int64_t panel = kernels->columns, stride = panel * nd_gemm_words(kernels, to->rows);
    nd_gemm_word *b = to->as_b + nd_gemm_offset_of_b(kernels, to->rows, part->column, row);
    for (int64_t j = 0; j < part->columns; j += panel, b += stride) {
        kernels->pack_b_columns(b, nd_gemm_operand_at(x, false, j, 0),
                                (int)nd_min(panel, part->columns - j), rows);
    }
}

void nd_gemm_pack_part(const nd_gemm *gemm, const nd_gemm_activation *to, const nd_gemm_part *part)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    const int64_t unit = nd_gemm_activation_unit(gemm);
    ND_ASSERT(unit > 0 && part->row % unit == 0 && part->column % unit == 0);
    for (int64_t i = 0; i < part->rows; i += unit) {
        const int rows = (int)nd_min(unit, part->rows - i);
        const nd_gemm_operand x = {
            .data = part->x + i * part->stride, .dtype = ND_DTYPE_BF16, .stride = part->stride};
        if (to->as_a) {
            pack_rows_as_a(kernels, to, x, part, part->row + i, rows);
        }
        if (to->as_b) {
            pack_rows_as_b(kernels, to, x, part, part->row + i, rows);
        }
    }
}

void nd_gemm_unpack_row(const nd_gemm *gemm, const nd_gemm_activation *from, int64_t row,
                        int64_t column, int64_t count, nd_bf16 *to)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    const int64_t panel = kernels->columns, stride = panel * nd_gemm_words(kernels, from->rows);
    const nd_gemm_word *words = from->as_b + nd_gemm_offset_of_b(kernels, from->rows, column, row);
    const int half = row % 2 != 0 ? 16 : 0;
    ND_ASSERT(column % panel == 0);
    for (int64_t j = 0; j < count; j += panel, words += stride) {
        const int64_t some = nd_min(panel, count - j);
        for (int64_t i = 0; i < some; i++) {
            to[j + i] = (nd_bf16)(words[i] >> half);
        }
    }
}

size_t nd_gemm_codes_bytes(const nd_gemm *gemm, int64_t rows, int64_t columns)
{
    return gemm->kernels->cast
               ? (size_t)(nd_round_up(rows, ND_GEMM_CODES) * nd_round_up(columns, ND_GEMM_CODES))
               : 0;
}

nd_gemm_operand nd_gemm_codes_of(const nd_gemm *gemm, const uint8_t *codes, int64_t rows)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    ND_ASSERT(kernels->cast && kernels->columns == ND_GEMM_CODES);
    return (nd_gemm_operand){.data = codes,
                             .dtype = ND_DTYPE_F8_E4M3,
                             .stride = nd_round_up(rows, ND_GEMM_CODES),
                             .packed = true};
}

void nd_gemm_cast_rows(const nd_gemm *gemm, const nd_gemm_casting *to, int64_t row,
                       nd_gemm_operand x)
{
    const nd_gemm_kernels *kernels = gemm->kernels;
    const int64_t stride = nd_round_up(to->rows, ND_GEMM_CODES); /* of a column */
    const int rows = (int)nd_min(ND_GEMM_CODES, to->rows - row);
    ND_ASSERT(x.scale && !x.scale_per_line && x.format == ND_DTYPE_F8_E4M3);
    ND_ASSERT(row % ND_GEMM_CODES == 0 && kernels->rows == ND_GEMM_CODES);
    for (int64_t j = 0, some; j < to->columns; j += some) {
        nd_gemm_word *as_a = to->as_a;
        some = as_a ? nd_gemm_rest_of_block(kernels, to->columns, j) : to->columns;
        as_a = as_a ? as_a + nd_gemm_offset_of_a(kernels, to->rows, to->columns, row, j) : NULL;
        kernels->cast(to->codes + j * stride + row * ND_GEMM_CODES, stride * ND_GEMM_CODES, as_a,
                      nd_gemm_operand_at(x, true, 0, j), rows, (int)some);
    }
}
