// SPDX-License-Identifier: Apache-2.0
/*
 * Products with few rows, as when a model continues a few texts: the time is that of reading b
 * once, from memory, which no packing may double.
 */
#include "kernels/cpu/context.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"

enum { BLOCK = 64 }; /* rows of b whose results a thread holds */

static void some_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_product_args *p = args;
    const nd_tensor a = p->a.stored, b = p->b.stored;
    float sums[ND_CPU_FEW_ROWS * BLOCK];
    for (int64_t first = begin; first < end; first += BLOCK) {
        const int64_t count = nd_min(BLOCK, end - first), m = a.shape[0];
        rows->dots(&(nd_row_dots){.x = a.data,
                                  .x_stride = a.stride[0],
                                  .vectors = m,
                                  .rows = nd_row(b, first),
                                  .stride = b.stride[0],
                                  .count = count,
                                  .k = a.shape[1],
                                  .bf16 = a.dtype == ND_DTYPE_BF16,
                                  .out = sums,
                                  .out_stride = BLOCK});
        for (int64_t i = 0; i < m; i++) {
            rows->scaled_sum(nd_at(p->c, i, first), sums + i * BLOCK, 1.0f, NULL, p->beta != 0.0f,
                             count, p->c.dtype == ND_DTYPE_BF16);
        }
    }
}

void nd_cpu_multiply_few_rows(nd_stream *stream, const nd_product_args *args)
{
    const nd_tensor b = args->b.stored;
    nd_cpu_each(stream, b.shape[0], b.shape[1], some_rows, args);
}
