// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fuse.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

/* Scales are few: one thread, plain loops. */

enum {
    LANES = 16
}; /* tensors whose histories are handled side by side: a cache line of each row */

nd_status nd_cpu_fp8_scale(nd_stream *stream, const nd_fp8_scale_args *args)
{
    ND_ASSERT(nd_dtype_is_fp8(args->format));
    double limit = nd_fp8_max(args->format);
    for (int64_t i = 0; i < args->count; i++) {
        double size = args->amax[i];
        float s = (float)(limit / (size < 1e-12 ? 1e-12 : size)); /* a NaN is not below */
        if (args->power_of_two) {
            s = exp2f(floorf((float)log2((double)s)));
        }
        args->scale[i] = s;
        args->inverse[i] = 1.0f / s;
    }
    return ND_OK;
}

/* Shifts the histories of `n` tensors by one step, except those whose newest amax is 0. largest: of
 * the old rows. */
static void roll(const nd_fp8_history *h, int64_t first, int64_t n, float largest[LANES])
{
    float *newest = h->amax + first;
    for (int64_t l = 0; l < n; l++) {
        largest[l] = newest[l] > 0.0f ? newest[l] : 0.0f;
    }
    for (int64_t row = 1; row < h->length; row++) {
        float *here = newest + row * h->count;
        const float *next = row + 1 < h->length ? here + h->count : newest;
        for (int64_t l = 0; l < n; l++) {
            largest[l] = here[l] > largest[l] ? here[l] : largest[l];
            here[l] = newest[l] != 0.0f ? next[l] : here[l];
        }
    }
}

nd_status nd_cpu_fp8_delayed(nd_stream *stream, const nd_fp8_delayed_args *args)
{
    const nd_fp8_history *h = &args->history;
    ND_ASSERT(h->length >= 1 && h->count >= 0);
    for (int64_t first = 0; first < h->count; first += LANES) {
        int64_t n = h->count - first < LANES ? h->count - first : LANES;
        float largest[LANES];
        roll(h, first, n, largest);
        for (int64_t i = first; i < first + n; i++) {
            bool follow_largest = args->algorithm == ND_AMAX_MAX && h->amax[i] != 0.0f;
            float amax = follow_largest ? largest[i - first] : h->amax[i];
            if (amax > 0.0f && amax <= FLT_MAX) {
                float scale = h->limit[i] / amax;
                h->scale[i] = scale <= FLT_MAX ? scale : FLT_MAX;
            }
            h->inverse[i] = 1.0f / h->scale[i];
            h->amax[i] = 0.0f;
        }
    }
    return ND_OK;
}

enum {
    RUN = 16384, /* elements of a piece of a row */
    STRIP = 128  /* columns of one item where columns are independent */
};

/* One call casts, measures or counts each piece of the rows of x, by what is set here. */
typedef struct work {
    nd_tensor x;     /* (rows, columns) */
    int64_t across;  /* pieces of a row */
    nd_tensor codes; /* data NULL: it is not cast */
    const nd_matrix *as;
    bool e4m3;
    _Atomic uint32_t *most;  /* bits of the largest |x| so far; NULL: not wanted */
    _Atomic int64_t *counts; /* two; NULL: not wanted */
} work;

static nd_tensor matrix_of(nd_tensor x)
{
    const nd_tensor m = x.axes == 1 ? nd_tensor_2d(x.data, x.dtype, 1, x.shape[0]) : x;
    ND_ASSERT(nd_is_2d(m, m.shape[0], m.shape[1]));
    return m;
}

/* A matrix without gaps is one row, unless its rows have scales. */
static nd_tensor flat(nd_tensor m, bool flatten)
{
    return flatten ? nd_tensor_2d(m.data, m.dtype, 1, nd_tensor_count(m)) : m;
}

static void do_pieces(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const work *w = args;
    const bool bf16 = w->x.dtype == ND_DTYPE_BF16;
    uint32_t most = 0;
    int64_t found[2] = {0, 0};
    for (int64_t index = begin; index < end; index++) {
        const int64_t row = index / w->across, column = index % w->across * RUN;
        const int64_t n = nd_min(w->x.shape[1] - column, RUN);
        const void *x = nd_at(w->x, row, column);
        const bool each = w->as->granularity == ND_PER_COLUMN;
        const float *scale = w->as->scale + (each                               ? column
                                             : w->as->granularity == ND_PER_ROW ? row
                                                                                : 0);
        if (w->most) {
            const uint32_t bits = rows->amax(x, n, bf16);
            most = bits > most ? bits : most;
        }
        if (w->codes.data) {
            uint8_t *codes = (uint8_t *)w->codes.data + row * w->codes.stride[0] + column;
            rows->cast_fp8(codes, x, scale, each, n, w->e4m3, bf16);
        }
        if (w->counts) {
            rows->count_fp8(found, x, scale, each, n, w->e4m3, bf16);
        }
    }
    if (w->most) {
        nd_raise_largest(w->most, most);
    }
    for (int i = 0; i < 2 && w->counts; i++) {
        atomic_fetch_add_explicit(&w->counts[i], found[i], memory_order_relaxed);
    }
}

static void each_piece(nd_stream *stream, work *w)
{
    ND_ASSERT(nd_is_act(w->x));
    w->across = nd_ceil_div(w->x.shape[1], RUN);
    nd_cpu_each(stream, w->x.shape[0] * w->across, nd_min(RUN, w->x.shape[1]), do_pieces, w);
}

static void amax_of_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_amax_args *w = args;
    for (int64_t row = begin; row < end; row++) {
        const uint32_t bits =
            rows->amax(nd_row(w->x, row), w->x.shape[1], w->x.dtype == ND_DTYPE_BF16);
        const uint32_t before = w->merge ? nd_size_bits(w->amax[row]) : 0;
        w->amax[row] = nd_size_of_bits(bits > before ? bits : before);
    }
}

static void amax_of_columns(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_amax_args *w = args;
    const int64_t first = begin * STRIP, n = nd_min(end * STRIP, w->x.shape[1]) - first;
    if (!w->merge) {
        memset(w->amax + first, 0, (size_t)n * sizeof *w->amax);
    }
    for (int64_t row = 0; row < w->x.shape[0]; row++) {
        rows->amax_columns(w->amax + first, nd_at(w->x, row, first), n,
                           w->x.dtype == ND_DTYPE_BF16);
    }
}

nd_status nd_cpu_amax(nd_stream *stream, const nd_amax_args *args)
{
    const nd_tensor x = matrix_of(args->x);
    ND_ASSERT(args->x.axes == 2 || args->granularity == ND_PER_TENSOR);
    if (args->granularity == ND_PER_ROW) {
        nd_cpu_each(stream, x.shape[0], x.shape[1], amax_of_rows, args);
    } else if (args->granularity == ND_PER_COLUMN) {
        nd_cpu_each(stream, nd_ceil_div(x.shape[1], STRIP), x.shape[0] * STRIP, amax_of_columns,
                    args);
    } else {
        _Atomic uint32_t most = args->merge ? nd_size_bits(*args->amax) : 0;
        work w = {.x = flat(x, nd_tensor_is_contiguous(x)),
                  .as = &(nd_matrix){.scale = args->amax},
                  .most = &most};
        each_piece(stream, &w);
        *args->amax = nd_size_of_bits(most);
    }
    return ND_OK;
}

nd_status nd_cpu_make_form(nd_stream *stream, const nd_make_form_args *args)
{
    const nd_tensor x = matrix_of(args->x), codes = matrix_of(args->out.stored);
    const bool one_row = args->out.granularity == ND_PER_TENSOR && nd_tensor_is_contiguous(x) &&
                         nd_tensor_is_contiguous(codes);
    _Atomic uint32_t most = args->amax ? nd_size_bits(*args->amax) : 0;
    work w = {.x = flat(x, one_row),
              .codes = flat(codes, one_row),
              .as = &args->out,
              .e4m3 = codes.dtype == ND_DTYPE_F8_E4M3,
              .most = args->amax ? &most : NULL};
    ND_ASSERT(nd_dtype_is_fp8(codes.dtype) && nd_is_2d(codes, x.shape[0], x.shape[1]));
    ND_ASSERT(!args->transposed.data); /* nd_cpu_form asks for none */
    each_piece(stream, &w);
    if (args->amax) {
        *args->amax = nd_size_of_bits(most);
    }
    return ND_OK;
}

nd_status nd_cpu_fp8_count(nd_stream *stream, const nd_fp8_count_args *args)
{
    _Atomic int64_t found[2] = {0, 0};
    work w = {.x = matrix_of(args->x),
              .as = &args->as,
              .e4m3 = args->as.format == ND_DTYPE_F8_E4M3,
              .counts = found};
    each_piece(stream, &w);
    args->counts[0] += found[0];
    args->counts[1] += found[1];
    return ND_OK;
}
