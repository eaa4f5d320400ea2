// SPDX-License-Identifier: Apache-2.0
/*
 * BF16 products of matrices with gaps between their rows, for oneDNN: it takes such matrices only
 * in an implementation that allocates at every call, packing buffers for each thread and F32 sums
 * of the whole result. Here ROWS rows at a time are copied to where they have no gaps; the copies'
 * memory is the context's.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/parallel.h"
#include "kernels/cpu/view.h"

enum { ROWS = 1024, ALIGNMENT = 64 };

typedef struct copy {
    nd_tensor to, from;
} copy;

static void copy_some(void *arg, int64_t begin, int64_t end)
{
    const copy *w = arg;
    size_t bytes = (size_t)w->from.shape[1] * nd_dtype_size(w->from.dtype);
    for (int64_t i = begin; i < end; i++) {
        memcpy(nd_row(w->to, i), nd_row(w->from, i), bytes);
    }
}

static void copy_rows(nd_stream *stream, nd_tensor to, nd_tensor from)
{
    copy w = {to, from};
    nd_cpu_parallel(stream, from.shape[0], from.shape[1], copy_some, &w);
}

static bool has_gaps(nd_tensor x)
{
    return x.stride[0] != x.shape[1];
}

static int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Only a product larger than all before it allocates: after the first step none does. */
static nd_status reserve(nd_cpu_context *context, size_t bytes)
{
    if (bytes <= context->dense_bytes) {
        return ND_OK;
    }
    bytes = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    void *larger = aligned_alloc(ALIGNMENT, bytes);
    if (!larger) {
        return nd_fail(ND_ERR_INTERNAL, "Out of host memory: %.1f MiB wanted for a product.",
                       (double)bytes / 1048576.0);
    }
    free(context->dense);
    context->dense = larger;
    context->dense_bytes = bytes;
    return ND_OK;
}

bool nd_cpu_has_gaps(nd_tensor c, nd_tensor a, bool a_transposed)
{
    /* a's rows are those of c, or the summed ones of a c that is complete before the next. */
    return a_transposed ? has_gaps(a) && !has_gaps(c) && c.dtype == ND_DTYPE_F32
                        : has_gaps(a) || has_gaps(c);
}

/* The product of `rows` rows of a, from row `first` on; `whole` is that of all. */
static nd_status multiply_rows(nd_stream *stream, nd_tensor c, nd_tensor a, nd_tensor b,
                               const nd_dnnl_product *whole, int64_t first, int64_t rows)
{
    nd_cpu_context *context = nd_cpu_context_of(stream);
    nd_dnnl_product p = *whole;
    bool summed = p.a_transposed;
    nd_tensor from = nd_tensor_rows(a, first, rows), to = c;
    nd_tensor dense_a = nd_tensor_2d(context->dense, a.dtype, rows, a.shape[1]), dense_c;
    const nd_bf16 *b_rows = b.data;
    if (summed) { /* rows of b are summed along with those of a */
        p.k = rows;
        p.accumulate = p.accumulate || first > 0;
        b_rows += first * (p.b_transposed ? 1 : p.ldb);
    } else {
        p.m = rows;
        to = nd_tensor_rows(c, first, rows);
    }
    if (has_gaps(from)) {
        copy_rows(stream, dense_a, from);
        from = dense_a;
    }
    dense_c = to;
    if (has_gaps(to)) {
        size_t a_bytes = (size_t)ROWS * (size_t)a.shape[1] * sizeof(nd_bf16);
        dense_c = nd_tensor_2d((char *)context->dense + a_bytes, c.dtype, rows, c.shape[1]);
        if (p.accumulate) {
            copy_rows(stream, dense_c, to);
        }
    }
    p.lda = from.stride[0];
    p.ldc = dense_c.stride[0];
    ND_TRY(nd_dnnl_matmul(context->dnnl, &p, dense_c.data, from.data, b_rows, NULL));
    if (dense_c.data != to.data) {
        copy_rows(stream, to, dense_c);
    }
    return ND_OK;
}

nd_status nd_cpu_multiply_gaps(nd_stream *stream, nd_tensor c, nd_tensor a, nd_tensor b,
                               const nd_dnnl_product *p)
{
    size_t of_a = (size_t)a.shape[1] * sizeof(nd_bf16);
    size_t of_c = p->a_transposed ? 0 : (size_t)c.shape[1] * nd_dtype_size(c.dtype);
    ND_TRY(reserve(nd_cpu_context_of(stream), ROWS * (of_a + of_c)));
    for (int64_t i = 0; i < a.shape[0]; i += ROWS) {
        ND_TRY(multiply_rows(stream, c, a, b, p, i, smaller(ROWS, a.shape[0] - i)));
    }
    return ND_OK;
}
