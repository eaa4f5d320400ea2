// SPDX-License-Identifier: Apache-2.0
#include <math.h>

#include "kernels/ref/ref.h"

nd_status nd_ref_rmsnorm_fwd(nd_stream *stream, nd_tensor y, nd_tensor sum, nd_tensor rstd,
                             nd_tensor x, nd_tensor delta, nd_tensor weight, float eps,
                             const nd_fuse *fuse)
{
    int64_t n = y.shape[0], C = y.shape[1];
    bool add = delta.data;
    nd_tensor in = add ? sum : x; /* what is normalised, rounded to act */
    ND_ASSERT(nd_is_act(y) && nd_is_2d(y, n, C) && nd_is_2d_of(x, y.dtype, n, C));
    ND_ASSERT(!add || (nd_is_2d_of(sum, y.dtype, n, C) && nd_is_2d_of(delta, y.dtype, n, C)));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, n) && nd_is_vector(weight, y.dtype, C));
    ND_ASSERT(nd_is_fuse_of(fuse, y, n, C));
    for (int64_t i = 0; i < n; i++) {
        double squares = 0.0;
        for (int64_t c = 0; c < C; c++) {
            if (add) {
                float s =
                    nd_ref_get(x, i * x.stride[0] + c) + nd_ref_get(delta, i * delta.stride[0] + c);
                nd_ref_put(sum, i * sum.stride[0] + c, s);
            }
            double value = nd_ref_get(in, i * in.stride[0] + c);
            squares += value * value;
        }
        double r = 1.0 / sqrt(squares / (double)C + (double)eps);
        ((float *)rstd.data)[i] = (float)r;
        for (int64_t c = 0; c < C; c++) {
            nd_ref_emit(y, fuse, i, c,
                        nd_ref_get(weight, c) * r * nd_ref_get(in, i * in.stride[0] + c));
        }
    }
    return ND_OK;
}

/*
 * y_c = w_c x_c r with r = (mean(x^2) + eps)^(-1/2), so dr/dx_c = -r^3 x_c / C and
 *   dx_c = r (w_c dy_c - x_c r^2 mean_k(w_k dy_k x_k)),  dw_c = sum_i dy_c x_c r.
 */
nd_status nd_ref_rmsnorm_bwd(nd_stream *stream, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                             nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd)
{
    int64_t n = dy.shape[0], C = dy.shape[1];
    bool add = dres.data;
    const float *r = rstd.data;
    ND_ASSERT(nd_is_act(dy) && nd_is_2d(dy, n, C) && nd_is_2d_of(dx, dy.dtype, n, C));
    ND_ASSERT(nd_is_2d_of(x, dy.dtype, n, C) && (!add || nd_is_2d_of(dres, dy.dtype, n, C)));
    ND_ASSERT(nd_is_vector(dweight, ND_DTYPE_F32, C) && nd_is_vector(weight, dy.dtype, C));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, n));
    for (int64_t c = 0; c < C; c++) { /* first, because dx may be dy */
        double sum = ((float *)dweight.data)[c];
        for (int64_t i = 0; i < n; i++) {
            sum += (double)nd_ref_get(dy, i * dy.stride[0] + c) *
                   nd_ref_get(x, i * x.stride[0] + c) * r[i];
        }
        ((float *)dweight.data)[c] = (float)sum;
    }
    for (int64_t i = 0; i < n; i++) {
        double dot = 0.0;
        for (int64_t c = 0; c < C; c++) {
            dot += (double)nd_ref_get(weight, c) * nd_ref_get(dy, i * dy.stride[0] + c) *
                   nd_ref_get(x, i * x.stride[0] + c);
        }
        double mean = dot / (double)C;
        for (int64_t c = 0; c < C; c++) {
            double g = (double)nd_ref_get(weight, c) * nd_ref_get(dy, i * dy.stride[0] + c);
            double dn = r[i] * (g - nd_ref_get(x, i * x.stride[0] + c) * mean * r[i] * r[i]);
            double residual = add ? nd_ref_get(dres, i * dres.stride[0] + c) : 0.0;
            nd_ref_put(dx, i * dx.stride[0] + c, residual + dn);
        }
    }
    return ND_OK;
}
