// SPDX-License-Identifier: Apache-2.0
#include <float.h>

#include "kernels/ref/ref.h"
#include "runtime/tensor/fp8.h"

/* x as (rows, columns); a vector is one row. */
static nd_tensor matrix_of(nd_tensor x)
{
    ND_ASSERT(nd_is_act(x));
    if (x.axes == 1) {
        return nd_tensor_2d(x.data, x.dtype, 1, x.shape[0]);
    }
    ND_ASSERT(nd_is_2d(x, x.shape[0], x.shape[1]));
    return x;
}

/* Returns the scale that belongs to element (i, j). */
static int64_t group(nd_granularity granularity, int64_t i, int64_t j)
{
    return granularity == ND_PER_TENSOR ? 0 : granularity == ND_PER_ROW ? i : j;
}

nd_status nd_ref_amax(nd_stream *stream, const nd_amax_args *args)
{
    float *amax = args->amax;
    const nd_tensor x = args->x;
    nd_granularity granularity = args->granularity;
    nd_tensor m = matrix_of(x);
    ND_ASSERT(x.axes == 2 || granularity == ND_PER_TENSOR);
    int64_t rows = m.shape[0], columns = m.shape[1];
    int64_t groups = granularity == ND_PER_TENSOR ? 1 : granularity == ND_PER_ROW ? rows : columns;
    for (int64_t g = 0; g < groups && !args->merge; g++) {
        amax[g] = 0.0f;
    }
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) {
            int64_t g = group(granularity, i, j);
            amax[g] = nd_ref_larger(amax[g], fabsf(nd_ref_get(m, i * m.stride[0] + j)));
        }
    }
    return ND_OK;
}

nd_status nd_ref_fp8_scale(nd_stream *stream, const nd_fp8_scale_args *args)
{
    float *scale = args->scale;
    ND_ASSERT(nd_dtype_is_fp8(args->format));
    for (int64_t i = 0; i < args->count; i++) {
        double least = args->amax[i] < 1e-12 ? 1e-12 : args->amax[i];
        scale[i] = (float)((double)nd_fp8_max(args->format) / least);
        if (args->power_of_two) {
            scale[i] = exp2f(floorf((float)log2((double)scale[i])));
        }
        args->inverse[i] = 1.0f / scale[i];
    }
    return ND_OK;
}

/* The amax that the scale of tensor i follows; shifts its history by one step. */
static float roll(const nd_fp8_history *h, int64_t i, nd_amax_algorithm algorithm)
{
    float newest = h->amax[i], largest = 0.0f;
    if (newest == 0.0f) {
        return 0.0f;
    }
    for (int64_t row = 0; row < h->length; row++) {
        largest = fmaxf(largest, h->amax[row * h->count + i]);
    }
    for (int64_t row = 1; row + 1 < h->length; row++) {
        h->amax[row * h->count + i] = h->amax[(row + 1) * h->count + i];
    }
    h->amax[(h->length - 1) * h->count + i] = newest;
    h->amax[i] = 0.0f;
    return algorithm == ND_AMAX_MAX ? largest : newest;
}

nd_status nd_ref_fp8_delayed(nd_stream *stream, const nd_fp8_delayed_args *args)
{
    const nd_fp8_history *h = &args->history;
    ND_ASSERT(h->length >= 1);
    for (int64_t i = 0; i < h->count; i++) {
        float amax = roll(h, i, args->algorithm);
        if (isfinite(amax) && amax > 0.0f) {
            float scale = h->limit[i] / amax;
            h->scale[i] = isinf(scale) ? FLT_MAX : scale;
        }
        h->inverse[i] = 1.0f / h->scale[i];
    }
    return ND_OK;
}

static nd_status transpose(nd_tensor out, nd_tensor codes)
{
    int64_t rows = codes.shape[0], columns = codes.shape[1];
    ND_ASSERT(nd_dtype_is_fp8(codes.dtype) && nd_is_2d(codes, rows, columns));
    ND_ASSERT(nd_is_2d_of(out, codes.dtype, columns, rows));
    for (int64_t i = 0; i < rows; i++) {
        for (int64_t j = 0; j < columns; j++) {
            ((uint8_t *)out.data)[j * out.stride[0] + i] =
                ((const uint8_t *)codes.data)[i * codes.stride[0] + j];
        }
    }
    return ND_OK;
}

nd_status nd_ref_make_form(nd_stream *stream, const nd_make_form_args *args)
{
    const nd_tensor x = args->x, plain = args->out.stored, transposed = args->transposed;
    if (nd_dtype_is_fp8(x.dtype)) {
        return transpose(transposed, x);
    }
    const nd_tensor m = matrix_of(x);
    const nd_dtype format = plain.data ? plain.dtype : transposed.dtype;
    ND_ASSERT((plain.data || transposed.data) && nd_dtype_is_fp8(format));
    ND_ASSERT(!plain.data || plain.axes == 1 || nd_is_2d(plain, m.shape[0], m.shape[1]));
    ND_ASSERT(nd_tensor_count(plain.data ? plain : transposed) == nd_tensor_count(x));
    ND_ASSERT(!transposed.data || nd_is_2d_of(transposed, format, m.shape[1], m.shape[0]));
    for (int64_t i = 0; i < m.shape[0]; i++) {
        for (int64_t j = 0; j < m.shape[1]; j++) {
            const float value = nd_ref_get(m, i * m.stride[0] + j);
            const float scaled = value * args->out.scale[group(args->out.granularity, i, j)];
            const uint8_t code = nd_fp8_from_f32(format, scaled);
            if (plain.data) {
                ((uint8_t *)plain.data)[i * (plain.axes == 2 ? plain.stride[0] : 0) + j] = code;
            }
            if (transposed.data) {
                ((uint8_t *)transposed.data)[j * transposed.stride[0] + i] = code;
            }
        }
    }
    return args->amax
               ? nd_ref_amax(stream, &(nd_amax_args){.amax = args->amax, .x = x, .merge = true})
               : ND_OK;
}

nd_status nd_ref_fp8_count(nd_stream *stream, const nd_fp8_count_args *args)
{
    const nd_matrix as = args->as;
    nd_tensor m = matrix_of(args->x);
    for (int64_t i = 0; i < m.shape[0]; i++) {
        for (int64_t j = 0; j < m.shape[1]; j++) {
            float value = nd_ref_get(m, i * m.stride[0] + j);
            float scaled = value * as.scale[group(as.granularity, i, j)];
            args->counts[0] += value != 0.0f && (nd_fp8_from_f32(as.format, scaled) & 0x7f) == 0;
            args->counts[1] += fabsf(scaled) > nd_fp8_max(as.format);
        }
    }
    return ND_OK;
}
