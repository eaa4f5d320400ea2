// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"
#include "runtime/tensor/fp8.h"

/* Element (i, j) of a 2-d result: stored if `out` has data, and what `fuse` asks for. */
static void emit(nd_tensor out, const nd_fuse *fuse, int64_t i, int64_t j, double value)
{
    float stored = (float)value;
    if (out.dtype == ND_DTYPE_BF16) {
        stored = nd_bf16_to_f32(nd_bf16_from_f32(stored));
    }
    if (out.data) {
        nd_ref_put(out, i * out.stride[0] + j, stored);
    }
    if (fuse->amax) {
        *fuse->amax = nd_ref_larger(*fuse->amax, fabsf(stored));
    }
    if (fuse->codes.data) {
        ((uint8_t *)fuse->codes.data)[i * fuse->codes.stride[0] + j] =
            nd_fp8_from_f32(fuse->codes.dtype, stored * *fuse->scale);
    }
}

nd_status nd_ref_rmsnorm_fwd(nd_stream *stream, const nd_rmsnorm_fwd_args *args)
{
    const nd_tensor y = args->y, sum = args->sum, rstd = args->rstd, x = args->x,
                    delta = args->delta, weight = args->weight;
    int64_t n = y.shape[0], C = y.shape[1];
    bool add = delta.data, whole = args->squares.data;
    nd_tensor in = add ? sum : x; /* what is normalised, rounded to act */
    ND_ASSERT(nd_is_act(y) && nd_is_2d(y, n, C) && nd_is_2d_of(x, y.dtype, n, C));
    ND_ASSERT(!add || (nd_is_2d_of(sum, y.dtype, n, C) && nd_is_2d_of(delta, y.dtype, n, C)));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, n) && nd_is_vector(weight, y.dtype, C));
    ND_ASSERT(nd_is_fuse_of(&args->fuse, y, n, C));
    ND_ASSERT(!whole || nd_is_vector(args->squares, ND_DTYPE_F32, n));
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
        const double all = whole ? ((float *)args->squares.data)[i] : squares;
        const double width = (double)(whole ? args->width : C);
        double r = 1.0 / sqrt(all / width + (double)args->eps);
        ((float *)rstd.data)[i] = (float)r;
        for (int64_t c = 0; c < C; c++) {
            emit(y, &args->fuse, i, c,
                 (nd_ref_get(weight, c) + (double)args->plus) * r *
                     nd_ref_get(in, i * in.stride[0] + c));
        }
    }
    return ND_OK;
}

/*
 * y_c = w_c x_c r with r = (mean(x^2) + eps)^(-1/2), so dr/dx_c = -r^3 x_c / C and
 *   dx_c = r (w_c dy_c - x_c r^2 mean_k(w_k dy_k x_k)),  dw_c = sum_i dy_c x_c r.
 */
nd_status nd_ref_rmsnorm_bwd(nd_stream *stream, const nd_rmsnorm_bwd_args *args)
{
    const nd_tensor dx = args->dx, dweight = args->dweight, dy = args->dy, dres = args->dres,
                    x = args->x, weight = args->weight, rstd = args->rstd;
    int64_t n = dy.shape[0], C = dy.shape[1];
    const nd_fuse fuse = {.amax = args->amax};
    bool add = dres.data, whole = args->dots.data;
    const float *r = rstd.data;
    const double plus = args->plus;
    ND_ASSERT(nd_is_act(dy) && nd_is_2d(dy, n, C) && nd_is_2d_of(dx, dy.dtype, n, C));
    ND_ASSERT(nd_is_2d_of(x, dy.dtype, n, C) && (!add || nd_is_2d_of(dres, dy.dtype, n, C)));
    ND_ASSERT(nd_is_vector(dweight, ND_DTYPE_F32, C) && nd_is_vector(weight, dy.dtype, C));
    ND_ASSERT(nd_is_vector(rstd, ND_DTYPE_F32, n));
    ND_ASSERT(!whole || nd_is_vector(args->dots, ND_DTYPE_F32, n));
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
            dot += (nd_ref_get(weight, c) + plus) * nd_ref_get(dy, i * dy.stride[0] + c) *
                   nd_ref_get(x, i * x.stride[0] + c);
        }
        double mean = whole ? ((float *)args->dots.data)[i] / (double)args->width : dot / (double)C;
        for (int64_t c = 0; c < C; c++) {
            double g = (nd_ref_get(weight, c) + plus) * nd_ref_get(dy, i * dy.stride[0] + c);
            double dn = r[i] * (g - nd_ref_get(x, i * x.stride[0] + c) * mean * r[i] * r[i]);
            double residual = add ? nd_ref_get(dres, i * dres.stride[0] + c) : 0.0;
            emit(dx, &fuse, i, c, residual + dn);
        }
    }
    return ND_OK;
}

nd_status nd_ref_row_dots(nd_stream *stream, const nd_row_dots_args *args)
{
    const nd_tensor out = args->out, x = args->x, y = args->y, weight = args->weight;
    int64_t n = x.shape[0], C = x.shape[1];
    ND_ASSERT(nd_is_act(x) && nd_is_2d(x, n, C) && nd_is_2d_of(y, x.dtype, n, C));
    ND_ASSERT(nd_is_vector(out, ND_DTYPE_F32, n));
    ND_ASSERT(!weight.data || nd_is_vector(weight, x.dtype, C));
    for (int64_t i = 0; i < n; i++) {
        double dot = 0.0;
        for (int64_t c = 0; c < C; c++) {
            double product =
                (double)nd_ref_get(x, i * x.stride[0] + c) * nd_ref_get(y, i * y.stride[0] + c);
            dot += weight.data ? nd_ref_get(weight, c) * product : product;
        }
        ((float *)out.data)[i] = (float)dot;
    }
    return ND_OK;
}

nd_status nd_ref_rope(nd_stream *stream, const nd_rope_args *args)
{
    const nd_tensor out = args->out, x = args->x, positions = args->positions;
    const nd_rope_view table = args->table;
    int64_t n = x.shape[0], heads = x.shape[1], half = x.shape[2] / 2;
    ND_ASSERT(nd_is_act(x) && x.axes == 3 && x.shape[2] % 2 == 0 && x.stride[2] == 1);
    ND_ASSERT(out.axes == 3 && out.dtype == x.dtype && out.shape[0] == n && out.stride[2] == 1);
    ND_ASSERT(out.shape[1] == heads && out.shape[2] == x.shape[2]);
    ND_ASSERT(nd_is_vector(positions, ND_DTYPE_I32, n));
    for (int64_t i = 0; i < n; i++) {
        int64_t position = ((const int32_t *)positions.data)[i];
        ND_ASSERT(position >= 0 && position < table.positions);
        for (int64_t h = 0; h < heads; h++) {
            int64_t from = i * x.stride[0] + h * x.stride[1];
            int64_t to = i * out.stride[0] + h * out.stride[1];
            for (int64_t d = 0; d < half; d++) {
                double cosine = table.cos[position * half + d];
                double sine = table.sin[position * half + d] * (args->inverse ? -1.0 : 1.0);
                double low = nd_ref_get(x, from + d), high = nd_ref_get(x, from + d + half);
                nd_ref_put(out, to + d, low * cosine - high * sine);
                nd_ref_put(out, to + d + half, high * cosine + low * sine);
            }
        }
    }
    return ND_OK;
}

/* sigmoid(z), and dz/dg in *slope. */
static double gate_of(double g, bool gelu, double *slope)
{
    const double z = gelu ? g * (ND_GELU_LINEAR + ND_GELU_CUBIC * g * g) : g;
    *slope = gelu ? ND_GELU_LINEAR + 3.0 * ND_GELU_CUBIC * g * g : 1.0;
    return 1.0 / (1.0 + exp(-z));
}

nd_status nd_ref_swiglu_fwd(nd_stream *stream, const nd_swiglu_fwd_args *args)
{
    const nd_tensor out = args->out, gate = args->gate, up = args->up;
    int64_t n = out.shape[0], F = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, F));
    ND_ASSERT(nd_is_2d_of(gate, out.dtype, n, F) && nd_is_2d_of(up, out.dtype, n, F));
    ND_ASSERT(nd_is_fuse_of(&args->fuse, out, n, F));
    double slope;
    for (int64_t i = 0; i < n; i++) {
        for (int64_t f = 0; f < F; f++) {
            double g = nd_ref_get(gate, i * gate.stride[0] + f);
            double u = nd_ref_get(up, i * up.stride[0] + f);
            emit(out, &args->fuse, i, f, g * gate_of(g, args->gelu, &slope) * u);
        }
    }
    return ND_OK;
}

/* (g s(z))' = s (1 + g (1 - s) z'). */
nd_status nd_ref_swiglu_bwd(nd_stream *stream, const nd_swiglu_bwd_args *args)
{
    const nd_tensor dgate = args->dgate, dup = args->dup, dout = args->dout, gate = args->gate,
                    up = args->up;
    int64_t n = dout.shape[0], F = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, F));
    ND_ASSERT(nd_is_2d_of(gate, dout.dtype, n, F) && nd_is_2d_of(up, dout.dtype, n, F));
    ND_ASSERT(nd_is_2d_of(dgate, dout.dtype, n, F) && nd_is_2d_of(dup, dout.dtype, n, F));
    ND_ASSERT(nd_is_fuse_of(&args->fuse[0], dgate, n, F) &&
              nd_is_fuse_of(&args->fuse[1], dup, n, F));
    for (int64_t i = 0; i < n; i++) {
        for (int64_t f = 0; f < F; f++) {
            double g = nd_ref_get(gate, i * gate.stride[0] + f);
            double u = nd_ref_get(up, i * up.stride[0] + f);
            double d = nd_ref_get(dout, i * dout.stride[0] + f);
            double slope, s = gate_of(g, args->gelu, &slope);
            emit(dgate, &args->fuse[0], i, f, d * u * s * (1.0 + g * (1.0 - s) * slope));
            emit(dup, &args->fuse[1], i, f, d * g * s);
        }
    }
    return ND_OK;
}

nd_status nd_ref_bias_fwd(nd_stream *stream, const nd_bias_fwd_args *args)
{
    const nd_tensor out = args->out, bias = args->bias;
    int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_vector(bias, out.dtype, C));
    for (int64_t i = 0; i < n; i++) {
        for (int64_t c = 0; c < C; c++) {
            nd_ref_put(out, i * out.stride[0] + c, nd_ref_get(bias, c));
        }
    }
    return ND_OK;
}

nd_status nd_ref_bias_bwd(nd_stream *stream, const nd_bias_bwd_args *args)
{
    const nd_tensor dbias = args->dbias, dout = args->dout;
    int64_t n = dout.shape[0], C = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C) && nd_is_vector(dbias, ND_DTYPE_F32, C));
    for (int64_t c = 0; c < C; c++) {
        double sum = nd_ref_get(dbias, c);
        for (int64_t i = 0; i < n; i++) {
            sum += nd_ref_get(dout, i * dout.stride[0] + c);
        }
        nd_ref_put(dbias, c, sum);
    }
    return ND_OK;
}
