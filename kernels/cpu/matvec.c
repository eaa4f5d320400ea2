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

typedef struct product {
    const nd_row_ops *kernels;
    nd_tensor c, a, b;
    bool accumulate;
} product;

static void some_rows(void *arg, int64_t begin, int64_t end)
{
    const product *p = arg;
    float sums[ND_CPU_FEW_ROWS * BLOCK];
    for (int64_t first = begin; first < end; first += BLOCK) {
        const int64_t count = nd_min(BLOCK, end - first), m = p->a.shape[0];
        const nd_row_dots dots = {.x = p->a.data,
                                  .x_stride = p->a.stride[0],
                                  .vectors = m,
                                  .rows = nd_row(p->b, first),
                                  .stride = p->b.stride[0],
                                  .count = count,
                                  .k = p->a.shape[1],
                                  .bf16 = p->a.dtype == ND_DTYPE_BF16,
                                  .out = sums,
                                  .out_stride = BLOCK};
        p->kernels->dots(&dots);
        for (int64_t i = 0; i < m; i++) {
            p->kernels->scaled_sum(nd_element_address(p->c, i * p->c.stride[0] + first),
                                   sums + i * BLOCK, 1.0f, NULL, p->accumulate, count,
                                   p->c.dtype == ND_DTYPE_BF16);
        }
    }
}

void nd_cpu_multiply_few_rows(nd_stream *stream, const nd_product_args *args)
{
    const nd_tensor b = args->b.rows;
    product p = {nd_cpu_context_of(stream)->rows, args->c, args->a.rows, b, args->beta != 0.0f};
    nd_cpu_parallel(stream, b.shape[0], b.shape[1], some_rows, &p);
}
