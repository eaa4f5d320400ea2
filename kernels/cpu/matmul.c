// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/matmul.h"

#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* The stored matrix of op(x), rows [r0, r0 + rows) and columns [c0, c0 + columns) of op(x), widened; row stride T. */
static void widen(float *tile, nd_tensor x, bool transposed, int64_t r0, int64_t rows, int64_t c0,
                  int64_t columns)
{
    int64_t first = transposed ? c0 : r0, count = transposed ? columns : rows;
    int64_t left = transposed ? r0 : c0, width = transposed ? rows : columns;
    int64_t stride = x.stride[0];
    const nd_bf16 *source = (const nd_bf16 *)x.data + first * stride + left;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count; i++) {
        for (int64_t j = 0; j < width; j++) {
            tile[i * ND_CPU_WIDEN_TILE + j] = nd_bf16_to_f32(source[i * stride + j]);
        }
    }
}

/* c = tile (+ c), rounded once when c is BF16. */
static void store(nd_tensor c, int64_t r0, int64_t rows, int64_t c0, int64_t columns,
                  const float *tile, bool accumulate)
{
    int64_t stride = c.stride[0];
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < rows; i++) {
        const float *from = tile + i * ND_CPU_WIDEN_TILE;
        int64_t at = (r0 + i) * stride + c0;
        if (c.dtype == ND_DTYPE_F32) {
            float *to = (float *)c.data + at;
            for (int64_t j = 0; j < columns; j++) {
                to[j] = accumulate ? to[j] + from[j] : from[j];
            }
        } else {
            nd_bf16 *to = (nd_bf16 *)c.data + at;
            for (int64_t j = 0; j < columns; j++) {
                to[j] = nd_bf16_from_f32(accumulate ? nd_bf16_to_f32(to[j]) + from[j] : from[j]);
            }
        }
    }
}

/* BF16 operands without BF16 instructions: tiles of op(a) and op(b) widened, their product summed over k in F32. */
static nd_status multiply_widened(nd_cpu_context *context, nd_tensor c, nd_tensor a, nd_tensor b,
                                  const nd_dnnl_product *p)
{
    enum { T = ND_CPU_WIDEN_TILE };
    float *ta = context->widened, *tb = ta + T * T, *tc = tb + T * T;
    for (int64_t i = 0; i < p->m; i += T) {
        for (int64_t j = 0; j < p->n; j += T) {
            nd_dnnl_product tile = {.m = smaller(T, p->m - i),
                                    .n = smaller(T, p->n - j),
                                    .lda = T,
                                    .ldb = T,
                                    .ldc = T,
                                    .a_transposed = p->a_transposed,
                                    .b_transposed = p->b_transposed,
                                    .in = ND_DTYPE_F32,
                                    .out = ND_DTYPE_F32};
            for (int64_t l = 0; l < p->k; l += T) {
                tile.k = smaller(T, p->k - l);
                tile.accumulate = l > 0;
                widen(ta, a, p->a_transposed, i, tile.m, l, tile.k);
                widen(tb, b, p->b_transposed, l, tile.k, j, tile.n);
                ND_TRY(nd_dnnl_matmul(context->dnnl, &tile, tc, ta, tb));
            }
            store(c, i, tile.m, j, tile.n, tc, p->accumulate);
        }
    }
    return ND_OK;
}

nd_status nd_cpu_matmul(nd_stream *stream, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta)
{
    nd_cpu_context *context = nd_cpu_context_of(stream);
    nd_dnnl_product p = {.m = a.shape[a_transposed ? 1 : 0],
                         .n = b.shape[b_transposed ? 0 : 1],
                         .k = a.shape[a_transposed ? 0 : 1],
                         .lda = a.stride[0],
                         .ldb = b.stride[0],
                         .ldc = c.stride[0],
                         .a_transposed = a_transposed,
                         .b_transposed = b_transposed,
                         .accumulate = beta != 0.0f,
                         .in = a.dtype,
                         .out = c.dtype};
    ND_ASSERT(a.axes == 2 && b.axes == 2 && c.axes == 2 && a.dtype == b.dtype);
    ND_ASSERT(a.dtype == ND_DTYPE_F32 || a.dtype == ND_DTYPE_BF16);
    ND_ASSERT(c.dtype == ND_DTYPE_F32 || c.dtype == a.dtype);
    ND_ASSERT(b.shape[b_transposed ? 1 : 0] == p.k && c.shape[0] == p.m && c.shape[1] == p.n);
    ND_ASSERT(beta == 0.0f || beta == 1.0f);
    if (p.m == 0 || p.n == 0) {
        return ND_OK;
    }
    ND_ASSERT(p.k > 0);
    if (p.in == ND_DTYPE_BF16 && context->isa < ND_CPU_ISA_AVX512_BF16) {
        return multiply_widened(context, c, a, b, &p);
    }
    return nd_dnnl_matmul(context->dnnl, &p, c.data, a.data, b.data);
}
