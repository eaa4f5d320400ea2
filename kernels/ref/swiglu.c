// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "kernels/ref/ref.h"

static double sigmoid(double x)
{
    return 1.0 / (1.0 + exp(-x));
}

nd_status nd_ref_swiglu_fwd(nd_stream *stream, nd_tensor out, nd_tensor gate, nd_tensor up,
                            const nd_fuse *fuse)
{
    int64_t n = out.shape[0], F = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, F));
    ND_ASSERT(nd_is_2d_of(gate, out.dtype, n, F) && nd_is_2d_of(up, out.dtype, n, F));
    ND_ASSERT(nd_is_fuse_of(fuse, out, n, F));
    for (int64_t i = 0; i < n; i++) {
        for (int64_t f = 0; f < F; f++) {
            double g = nd_ref_get(gate, i * gate.stride[0] + f);
            double u = nd_ref_get(up, i * up.stride[0] + f);
            nd_ref_emit(out, fuse, i, f, g * sigmoid(g) * u);
        }
    }
    return ND_OK;
}

/* silu(g) = g s(g), silu'(g) = s (1 + g (1 - s)). */
nd_status nd_ref_swiglu_bwd(nd_stream *stream, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up, const nd_fuse *fuse_gate,
                            const nd_fuse *fuse_up)
{
    int64_t n = dout.shape[0], F = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, F));
    ND_ASSERT(nd_is_2d_of(gate, dout.dtype, n, F) && nd_is_2d_of(up, dout.dtype, n, F));
    ND_ASSERT(nd_is_2d_of(dgate, dout.dtype, n, F) && nd_is_2d_of(dup, dout.dtype, n, F));
    ND_ASSERT(nd_is_fuse_of(fuse_gate, dgate, n, F) && nd_is_fuse_of(fuse_up, dup, n, F));
    for (int64_t i = 0; i < n; i++) {
        for (int64_t f = 0; f < F; f++) {
            double g = nd_ref_get(gate, i * gate.stride[0] + f);
            double u = nd_ref_get(up, i * up.stride[0] + f);
            double d = nd_ref_get(dout, i * dout.stride[0] + f);
            double s = sigmoid(g);
            nd_ref_emit(dgate, fuse_gate, i, f, d * u * s * (1.0 + g * (1.0 - s)));
            nd_ref_emit(dup, fuse_up, i, f, d * g * s);
        }
    }
    return ND_OK;
}
