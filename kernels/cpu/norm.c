// SPDX-License-Identifier: Apache-2.0
#include <string.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/fuse.h"
#include "kernels/cpu/view.h"

typedef struct forward {
    const nd_row_ops *rows;
    nd_tensor sum, rstd, x, delta, weight;
    float eps;
    nd_cpu_result y;
} forward;

/* Row i: its sum, rstd and y. Returns the larger of `most` and the largest size in y. */
static uint32_t forward_row(const forward *w, int64_t i, uint32_t most)
{
    const bool add = w->delta.data, bf16 = w->x.dtype == ND_DTYPE_BF16;
    const nd_tensor from = add ? w->sum : w->x;
    float *rstd = (float *)w->rstd.data + i;
    *rstd = w->rows->norm_rstd(add ? nd_row(w->sum, i) : NULL, nd_row(w->x, i),
                               add ? nd_row(w->delta, i) : NULL, w->x.shape[1], w->eps, bf16);
    int64_t C = w->x.shape[1], piece = nd_cpu_piece_of(&w->y, C);
    float buffer[ND_CPU_PIECE];
    for (int64_t c = 0; c < C; c += piece) {
        int64_t n = C - c < piece ? C - c : piece;
        void *y = nd_cpu_piece_at(&w->y, i, c, buffer);
        w->rows->norm_scale(y, nd_element_address(from, i * from.stride[0] + c),
                            nd_element_address(w->weight, c), *rstd, n, bf16);
        most = nd_cpu_piece_done(&w->y, w->rows, y, i, c, n, most);
    }
    return most;
}

static void forward_rows(void *arg, int64_t begin, int64_t end)
{
    forward *w = arg;
    uint32_t most = 0;
    for (int64_t i = begin; i < end; i++) {
        most = forward_row(w, i, most);
    }
    nd_raise_largest(&w->y.most, most);
}

nd_status nd_cpu_rmsnorm_fwd(nd_stream *stream, const nd_rmsnorm_fwd_args *args)
{
    const nd_tensor y = args->y, sum = args->sum, rstd = args->rstd, x = args->x,
                    delta = args->delta, weight = args->weight;
    int64_t n = y.shape[0], C = y.shape[1];
    ND_ASSERT(nd_is_act(y) && nd_is_2d(y, n, C) && nd_is_2d_of(x, y.dtype, n, C));
    ND_ASSERT(!delta.data || nd_is_2d_of(sum, y.dtype, n, C));
    ND_ASSERT(!delta.data || nd_is_2d_of(delta, y.dtype, n, C));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, n) && nd_is_vector(weight, y.dtype, C));
    nd_cpu_context *context = nd_cpu_context_of(stream);
    forward w = {.rows = context->rows,
                 .sum = sum,
                 .rstd = rstd,
                 .x = x,
                 .delta = delta,
                 .weight = weight,
                 .eps = args->eps};
    ND_ASSERT(nd_is_fuse_of(&args->fuse, y, n, C));
    nd_cpu_result_begin(&w.y, y, &args->fuse);
    nd_cpu_parallel(stream, n, C, forward_rows, &w);
    nd_cpu_result_end(&w.y);
    return ND_OK;
}

typedef struct backward {
    const nd_row_ops *rows;
    nd_cpu_result dx;
    nd_tensor dweight, dy, dres, x, weight, rstd;
    int64_t blocks;  /* row blocks; block b holds rows [n b / blocks, n (b + 1) / blocks) */
    float *partials; /* (blocks, C): dweight of each block */
} backward;

static void backward_blocks(void *arg, int64_t begin, int64_t end)
{
    backward *w = arg;
    int64_t n = w->dy.shape[0], C = w->dy.shape[1];
    uint32_t most = 0;
    bool bf16 = w->dy.dtype == ND_DTYPE_BF16;
    for (int64_t block = begin; block < end; block++) {
        float *partial = w->partials + block * C;
        memset(partial, 0, (size_t)C * sizeof *partial);
        for (int64_t i = n * block / w->blocks; i < n * (block + 1) / w->blocks; i++) {
            void *dx = nd_row(w->dx.to, i);
            w->rows->norm_bwd(dx, partial, nd_row(w->dy, i),
                              w->dres.data ? nd_row(w->dres, i) : NULL, nd_row(w->x, i),
                              w->weight.data, ((const float *)w->rstd.data)[i], C, bf16);
            most = nd_cpu_piece_done(&w->dx, w->rows, dx, i, 0, C, most);
        }
    }
    nd_raise_largest(&w->dx.most, most);
}

/* dweight is the sum of the blocks in their order. */
static void combine_partials(const backward *w)
{
    int64_t C = w->dy.shape[1];
    for (int64_t block = 0; block < w->blocks; block++) {
        w->rows->accumulate(w->dweight.data, w->partials + block * C, C, false);
    }
}

/* As many blocks as the partial sums have room for, at most 32 and none without a row: a matter of
 * shape alone. */
static int64_t block_count(int64_t n, int64_t C)
{
    int64_t room = ND_CPU_NORM_COLUMNS / C, blocks = n < 32 ? n : 32;
    ND_ASSERT(room > 0); /* nd_op_limits.hidden */
    return blocks < room ? blocks : room;
}

nd_status nd_cpu_rmsnorm_bwd(nd_stream *stream, const nd_rmsnorm_bwd_args *args)
{
    const nd_tensor dx = args->dx, dweight = args->dweight, dy = args->dy, dres = args->dres,
                    x = args->x, weight = args->weight, rstd = args->rstd;
    int64_t n = dy.shape[0], C = dy.shape[1];
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(nd_is_act(dy) && nd_is_2d(dy, n, C) && nd_is_2d_of(dx, dy.dtype, n, C) && C > 0);
    ND_ASSERT(nd_is_2d_of(x, dy.dtype, n, C));
    ND_ASSERT(!dres.data || nd_is_2d_of(dres, dy.dtype, n, C));
    ND_ASSERT(nd_is_vector(dweight, ND_DTYPE_F32, C) && nd_is_vector(weight, dy.dtype, C));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, n));
    backward w = {.rows = context->rows,
                  .dweight = dweight,
                  .dy = dy,
                  .dres = dres,
                  .x = x,
                  .weight = weight,
                  .rstd = rstd,
                  .blocks = block_count(n, C),
                  .partials = (float *)context->partials};
    nd_cpu_result_begin(&w.dx, dx, &(nd_fuse){.amax = args->amax});
    if (n > 0) {
        nd_cpu_parallel(stream, w.blocks, n / w.blocks * C, backward_blocks, &w);
        combine_partials(&w);
    }
    nd_cpu_result_end(&w.dx);
    return ND_OK;
}
