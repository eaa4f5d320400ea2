// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "kernels/cpu/fuse.h"
#include "runtime/base/math.h"

/* The first piece of a row also brings its sum and rstd. */
static void forward(const nd_row_ops *rows, const void *args, void *const y[], int64_t i, int64_t c,
                    int64_t n)
{
    const nd_rmsnorm_fwd_args *w = args;
    const bool add = w->delta.data, bf16 = w->x.dtype == ND_DTYPE_BF16;
    float *rstd = (float *)w->rstd.data + i;
    if (c == 0 && w->squares.data) {
        *rstd = 1.0f / sqrtf(((const float *)w->squares.data)[i] / (float)w->width + w->eps);
    } else if (c == 0) {
        *rstd = rows->norm_rstd(add ? nd_row(w->sum, i) : NULL, nd_row(w->x, i),
                                add ? nd_row(w->delta, i) : NULL, w->x.shape[1], w->eps, bf16);
    }
    rows->norm_scale(y[0], nd_at(add ? w->sum : w->x, i, c), nd_element_address(w->weight, c),
                     w->plus, *rstd, n, bf16);
}

nd_status nd_cpu_rmsnorm_fwd(nd_stream *stream, const nd_rmsnorm_fwd_args *args)
{
    const nd_tensor y = args->y, delta = args->delta;
    int64_t n = y.shape[0], C = y.shape[1];
    ND_ASSERT(nd_is_act(y) && nd_is_2d(y, n, C) && nd_is_2d_of(args->x, y.dtype, n, C));
    ND_ASSERT(!delta.data || nd_is_2d_of(args->sum, y.dtype, n, C));
    ND_ASSERT(!delta.data || nd_is_2d_of(delta, y.dtype, n, C));
    ND_ASSERT(nd_is_vector(args->rstd, ND_DTYPE_F32, n) && nd_is_vector(args->weight, y.dtype, C));
    ND_ASSERT(!args->squares.data || nd_is_vector(args->squares, ND_DTYPE_F32, n));
    nd_cpu_fused(stream, 1, &y, &args->fuse, C, forward, args);
    return ND_OK;
}

typedef struct backward {
    const nd_rmsnorm_bwd_args *args;
    int64_t blocks;         /* row blocks; block b holds rows [n b / blocks, n (b + 1) / blocks) */
    float *partials;        /* (blocks, C): dweight of each block */
    _Atomic uint32_t *most; /* bits of the largest |dx| */
} backward;

/* The mean of w dy x over row i, or over the whole row that it is a part of. */
static float mean_of(const nd_row_ops *rows, const nd_rmsnorm_bwd_args *w, int64_t i)
{
    const int64_t C = w->dy.shape[1];
    return w->dots.data ? ((const float *)w->dots.data)[i] / (float)w->width
                        : rows->norm_dot(nd_row(w->dy, i), nd_row(w->x, i), w->weight.data, w->plus,
                                         C, w->dy.dtype == ND_DTYPE_BF16) /
                              (float)C;
}

static void backward_blocks(const nd_row_ops *rows, const void *arg, int64_t begin, int64_t end)
{
    const backward *b = arg;
    const nd_rmsnorm_bwd_args *w = b->args;
    const int64_t n = w->dy.shape[0], C = w->dy.shape[1];
    const bool bf16 = w->dy.dtype == ND_DTYPE_BF16;
    for (int64_t block = begin; block < end; block++) {
        float *partial = b->partials + block * C;
        memset(partial, 0, (size_t)C * sizeof *partial);
        for (int64_t i = n * block / b->blocks; i < n * (block + 1) / b->blocks; i++) {
            void *dx = nd_row(w->dx, i);
            rows->norm_bwd(dx, partial, nd_row(w->dy, i), w->dres.data ? nd_row(w->dres, i) : NULL,
                           nd_row(w->x, i), w->weight.data, w->plus,
                           ((const float *)w->rstd.data)[i], mean_of(rows, w, i), C, bf16);
            if (w->amax) {
                nd_raise_largest(b->most, rows->amax(dx, C, bf16));
            }
        }
    }
}

nd_status nd_cpu_rmsnorm_bwd(nd_stream *stream, const nd_rmsnorm_bwd_args *args)
{
    const nd_tensor dy = args->dy, dres = args->dres;
    int64_t n = dy.shape[0], C = dy.shape[1];
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(nd_is_act(dy) && nd_is_2d(dy, n, C) && nd_is_2d_of(args->dx, dy.dtype, n, C));
    ND_ASSERT(nd_is_2d_of(args->x, dy.dtype, n, C) && C > 0);
    ND_ASSERT(!dres.data || nd_is_2d_of(dres, dy.dtype, n, C));
    ND_ASSERT(nd_is_vector(args->dweight, ND_DTYPE_F32, C));
    ND_ASSERT(nd_is_vector(args->weight, dy.dtype, C) && nd_is_vector(args->rstd, ND_DTYPE_F32, n));
    ND_ASSERT(!args->dots.data || nd_is_vector(args->dots, ND_DTYPE_F32, n));
    _Atomic uint32_t most = args->amax ? nd_size_bits(*args->amax) : 0;
    /* There are as many blocks as the partial sums have room for, at most 32 and none without a
     * row. So their number follows from the shape alone. */
    const int64_t room = ND_CPU_NORM_COLUMNS / C;
    const backward w = {args, nd_min(nd_min(n, 32), room), (float *)context->partials, &most};
    ND_ASSERT(room > 0); /* nd_op_limits.hidden */
    if (n > 0) {
        nd_cpu_each(stream, w.blocks, n / w.blocks * C, backward_blocks, &w);
    }
    for (int64_t block = 0; block < w.blocks; block++) { /* dweight: the blocks in their order */
        context->rows->accumulate(args->dweight.data, w.partials + block * C, C, false);
    }
    if (args->amax) {
        *args->amax = nd_size_of_bits(most);
    }
    return ND_OK;
}

static void dot_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_row_dots_args *w = args;
    for (int64_t i = begin; i < end; i++) {
        ((float *)w->out.data)[i] =
            rows->norm_dot(nd_row(w->x, i), nd_row(w->y, i), w->weight.data, 0.0f, w->x.shape[1],
                           w->x.dtype == ND_DTYPE_BF16);
    }
}

nd_status nd_cpu_row_dots(nd_stream *stream, const nd_row_dots_args *args)
{
    const nd_tensor x = args->x;
    const int64_t n = x.shape[0], C = x.shape[1];
    ND_ASSERT(nd_is_act(x) && nd_is_2d(x, n, C) && nd_is_2d_of(args->y, x.dtype, n, C));
    ND_ASSERT(nd_is_vector(args->out, ND_DTYPE_F32, n));
    ND_ASSERT(!args->weight.data || nd_is_vector(args->weight, x.dtype, C));
    nd_cpu_each(stream, n, C, dot_rows, args);
    return ND_OK;
}
