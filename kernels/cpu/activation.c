// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fuse.h"

static void rotate_tokens(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_rope_args *w = args;
    const nd_tensor out = w->out, x = w->x;
    const int64_t half = x.shape[2] / 2;
    for (int64_t i = begin; i < end; i++) {
        const int64_t position = ((const int32_t *)w->positions.data)[i];
        ND_ASSERT(position >= 0 && position < w->table.positions);
        for (int64_t h = 0; h < x.shape[1]; h++) {
            rows->rope(nd_at(out, i, h * out.stride[1]), nd_at(x, i, h * x.stride[1]),
                       w->table.cos + position * half, w->table.sin + position * half, half,
                       w->inverse ? -1.0f : 1.0f, x.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_rope(nd_stream *stream, const nd_rope_args *args)
{
    const nd_tensor out = args->out, x = args->x;
    int64_t n = x.shape[0];
    ND_ASSERT(nd_is_act(x) && x.axes == 3 && x.shape[2] % 2 == 0 && x.stride[2] == 1);
    ND_ASSERT(out.axes == 3 && out.dtype == x.dtype && out.shape[0] == n && out.stride[2] == 1);
    ND_ASSERT(out.shape[1] == x.shape[1] && out.shape[2] == x.shape[2]);
    ND_ASSERT(nd_is_vector(args->positions, ND_DTYPE_I32, n));
    nd_cpu_each(stream, n, x.shape[1] * x.shape[2], rotate_tokens, args);
    return ND_OK;
}

enum { WORK = 4 }; /* an element of SwiGLU costs about four of a plain sum */

static void swiglu_forward(const nd_row_ops *rows, const void *args, void *const out[], int64_t i,
                           int64_t f, int64_t n)
{
    const nd_swiglu_fwd_args *w = args;
    rows->swiglu_fwd(out[0], nd_at(w->gate, i, f), nd_at(w->up, i, f), n,
                     w->out.dtype == ND_DTYPE_BF16, w->gelu);
}

nd_status nd_cpu_swiglu_fwd(nd_stream *stream, const nd_swiglu_fwd_args *args)
{
    const nd_tensor out = args->out, gate = args->gate, up = args->up;
    int64_t n = out.shape[0], F = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, F));
    ND_ASSERT(nd_is_2d_of(gate, out.dtype, n, F) && nd_is_2d_of(up, out.dtype, n, F));
    nd_cpu_fused(stream, 1, &out, &args->fuse, WORK * F, swiglu_forward, args);
    return ND_OK;
}

static void swiglu_backward(const nd_row_ops *rows, const void *args, void *const out[], int64_t i,
                            int64_t f, int64_t n)
{
    const nd_swiglu_bwd_args *w = args;
    rows->swiglu_bwd(out[0], out[1], nd_at(w->dout, i, f), nd_at(w->gate, i, f), nd_at(w->up, i, f),
                     n, w->dout.dtype == ND_DTYPE_BF16, w->gelu);
}

nd_status nd_cpu_swiglu_bwd(nd_stream *stream, const nd_swiglu_bwd_args *args)
{
    const nd_tensor d[2] = {args->dgate, args->dup}, dout = args->dout;
    int64_t n = dout.shape[0], F = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, F));
    ND_ASSERT(nd_is_2d_of(args->gate, dout.dtype, n, F) && nd_is_2d_of(args->up, dout.dtype, n, F));
    ND_ASSERT(nd_is_2d_of(d[0], dout.dtype, n, F) && nd_is_2d_of(d[1], dout.dtype, n, F));
    nd_cpu_fused(stream, 2, d, args->fuse, WORK * F, swiglu_backward, args);
    return ND_OK;
}
