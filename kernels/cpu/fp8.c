// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fuse.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
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
    RUN = 16384, /* elements of one item of a row */
    STRIP = 128, /* columns of one item where columns are independent */
    BLOCK = 64   /* rows and columns of a block that is transposed */
};

/* The operands of an op; an item is `height` rows of `width` columns of x. */
typedef struct work {
    const nd_row_ops *kernels;
    nd_tensor x; /* (rows, columns) */
    nd_matrix fp8;
    bool e4m3, bf16, merge;
    float *amax;
    _Atomic uint32_t *most;        /* bits of the largest |x| so far; NULL: not wanted */
    _Atomic int64_t *counts;       /* two */
    int64_t height, width, across; /* across: items side by side */
} work;

typedef struct item {
    int64_t row, column, rows, columns;
} item;

static item item_of(const work *w, int64_t index)
{
    item t = {.row = index / w->across * w->height, .column = index % w->across * w->width};
    int64_t below = w->x.shape[0] - t.row, right = w->x.shape[1] - t.column;
    t.rows = below < w->height ? below : w->height;
    t.columns = right < w->width ? right : w->width;
    return t;
}

static void each_item(nd_stream *stream, work *w, int64_t height, int64_t width, nd_cpu_body body)
{
    w->height = height;
    w->width = width < w->x.shape[1] ? width : w->x.shape[1];
    if (nd_tensor_count(w->x) == 0) {
        return;
    }
    w->across = nd_ceil_div(w->x.shape[1], w->width);
    int64_t down = nd_ceil_div(w->x.shape[0], height);
    nd_cpu_parallel(stream, down * w->across, height * w->width, body, w);
}

static const void *x_at(const work *w, int64_t row, int64_t column)
{
    return nd_element_address(w->x, row * w->x.stride[0] + column);
}

static work work_of(nd_stream *stream, nd_tensor x)
{
    ND_ASSERT(nd_is_act(x));
    work w = {.kernels = nd_cpu_context_of(stream)->rows, .x = x, .bf16 = x.dtype == ND_DTYPE_BF16};
    if (x.axes == 1) {
        w.x = nd_tensor_2d(x.data, x.dtype, 1, x.shape[0]);
    }
    ND_ASSERT(nd_is_2d(w.x, w.x.shape[0], w.x.shape[1]));
    return w;
}

/* A matrix without gaps as one row. */
static void flatten(nd_tensor *t)
{
    if (nd_tensor_is_contiguous(*t)) {
        *t = nd_tensor_2d(t->data, t->dtype, 1, nd_tensor_count(*t));
    }
}

/* amax */

static void amax_of_tensor(void *arg, int64_t begin, int64_t end)
{
    const work *w = arg;
    uint32_t most = 0;
    for (int64_t index = begin; index < end; index++) {
        item t = item_of(w, index);
        uint32_t bits = w->kernels->amax(x_at(w, t.row, t.column), t.columns, w->bf16);
        most = bits > most ? bits : most;
    }
    nd_raise_largest(w->most, most);
}

static void amax_of_rows(void *arg, int64_t begin, int64_t end)
{
    const work *w = arg;
    for (int64_t row = begin; row < end; row++) {
        uint32_t bits = w->kernels->amax(x_at(w, row, 0), w->x.shape[1], w->bf16);
        uint32_t before = w->merge ? nd_size_bits(w->amax[row]) : 0;
        w->amax[row] = nd_size_of_bits(bits > before ? bits : before);
    }
}

static void amax_of_columns(void *arg, int64_t begin, int64_t end)
{
    const work *w = arg;
    for (int64_t index = begin; index < end; index++) {
        item t = item_of(w, index);
        for (int64_t row = 0; row < t.rows; row++) {
            w->kernels->amax_columns(w->amax + t.column, x_at(w, row, t.column), t.columns,
                                     w->bf16);
        }
    }
}

static void amax_tensor(nd_stream *stream, work w)
{
    _Atomic uint32_t most = w.merge ? nd_size_bits(*w.amax) : 0;
    w.most = &most;
    flatten(&w.x);
    each_item(stream, &w, 1, RUN, amax_of_tensor);
    *w.amax = nd_size_of_bits(most);
}

nd_status nd_cpu_amax(nd_stream *stream, const nd_amax_args *args)
{
    float *amax = args->amax;
    const nd_tensor x = args->x;
    nd_granularity granularity = args->granularity;
    work w = work_of(stream, x);
    w.amax = amax;
    w.merge = args->merge;
    ND_ASSERT(x.axes == 2 || granularity == ND_PER_TENSOR);
    if (granularity == ND_PER_TENSOR) {
        amax_tensor(stream, w);
        return ND_OK;
    }
    int64_t count = w.x.shape[granularity == ND_PER_ROW ? 0 : 1];
    if (!args->merge) {
        memset(amax, 0, (size_t)count * sizeof *amax);
    }
    if (granularity == ND_PER_ROW) {
        each_item(stream, &w, 1, w.x.shape[1], amax_of_rows);
    } else {
        each_item(stream, &w, w.x.shape[0], STRIP, amax_of_columns);
    }
    return ND_OK;
}

/* casts */

/* The scale of element (row, column). */
static const float *scale_at(const work *w, int64_t row, int64_t column)
{
    switch (w->fp8.granularity) {
    case ND_PER_ROW:
        return w->fp8.scale + row;
    case ND_PER_COLUMN:
        return w->fp8.scale + column;
    default:
        return w->fp8.scale;
    }
}

static void cast_piece(const work *w, uint8_t *codes, int64_t row, int64_t column, int64_t columns)
{
    w->kernels->cast_fp8(codes, x_at(w, row, column), scale_at(w, row, column),
                         w->fp8.granularity == ND_PER_COLUMN, columns, w->e4m3, w->bf16);
}

static uint32_t larger_amax(const work *w, uint32_t most, int64_t row, int64_t column,
                            int64_t columns)
{
    if (!w->most) {
        return 0;
    }
    uint32_t bits = w->kernels->amax(x_at(w, row, column), columns, w->bf16);
    return bits > most ? bits : most;
}

static void cast_rows(void *arg, int64_t begin, int64_t end)
{
    const work *w = arg;
    uint32_t most = 0;
    for (int64_t index = begin; index < end; index++) {
        item t = item_of(w, index);
        most = larger_amax(w, most, t.row, t.column, t.columns);
        uint8_t *codes = w->fp8.codes.data;
        cast_piece(w, codes + t.row * w->fp8.codes.stride[0] + t.column, t.row, t.column,
                   t.columns);
    }
    if (w->most) {
        nd_raise_largest(w->most, most);
    }
}

/* Blocks are cast into the stack, copied to `codes` if wanted, and transposed. */
static void cast_blocks(void *arg, int64_t begin, int64_t end)
{
    const work *w = arg;
    nd_tensor plain = w->fp8.codes, transposed = w->fp8.transposed;
    uint32_t most = 0;
    uint8_t block[BLOCK * BLOCK];
    for (int64_t index = begin; index < end; index++) {
        item t = item_of(w, index);
        for (int64_t i = 0; i < t.rows; i++) {
            most = larger_amax(w, most, t.row + i, t.column, t.columns);
            cast_piece(w, block + i * BLOCK, t.row + i, t.column, t.columns);
            if (plain.data) {
                memcpy((uint8_t *)plain.data + (t.row + i) * plain.stride[0] + t.column,
                       block + i * BLOCK, (size_t)t.columns);
            }
        }
        w->kernels->transpose_bytes((uint8_t *)transposed.data + t.column * transposed.stride[0] +
                                        t.row,
                                    transposed.stride[0], block, BLOCK, t.rows, t.columns);
    }
    if (w->most) {
        nd_raise_largest(w->most, most);
    }
}

/* The format of a matrix that x is cast to, after a check of its shape. Vectors become matrices of
 * one row. */
static nd_dtype format_of(nd_matrix *out, nd_tensor x)
{
    if (out->codes.data && out->codes.axes == 1) {
        out->codes = nd_tensor_2d(out->codes.data, out->codes.dtype, 1, out->codes.shape[0]);
    }
    nd_tensor plain = out->codes, transposed = out->transposed;
    nd_dtype format = plain.data ? plain.dtype : transposed.dtype;
    ND_ASSERT((plain.data || transposed.data) && nd_dtype_is_fp8(format));
    ND_ASSERT(!plain.data || nd_is_2d_of(plain, format, x.shape[0], x.shape[1]));
    ND_ASSERT(!transposed.data || nd_is_2d_of(transposed, format, x.shape[1], x.shape[0]));
    return format;
}

typedef struct transpose {
    const nd_row_ops *kernels;
    nd_tensor out, codes;
} transpose;

static void transpose_strips(void *arg, int64_t begin, int64_t end)
{
    const transpose *w = arg;
    int64_t rows = w->codes.shape[0], columns = w->codes.shape[1];
    for (int64_t strip = begin; strip < end; strip++) {
        int64_t row = strip * BLOCK, count = rows - row < BLOCK ? rows - row : BLOCK;
        w->kernels->transpose_bytes((uint8_t *)w->out.data + row, w->out.stride[0],
                                    (const uint8_t *)w->codes.data + row * w->codes.stride[0],
                                    w->codes.stride[0], count, columns);
    }
}

static nd_status transpose_codes(nd_stream *stream, nd_tensor out, nd_tensor codes)
{
    int64_t rows = codes.shape[0], columns = codes.shape[1];
    ND_ASSERT(nd_dtype_is_fp8(codes.dtype) && nd_is_2d(codes, rows, columns));
    ND_ASSERT(nd_is_2d_of(out, codes.dtype, columns, rows));
    transpose w = {.kernels = nd_cpu_context_of(stream)->rows, .out = out, .codes = codes};
    nd_cpu_parallel(stream, nd_ceil_div(rows, BLOCK), BLOCK * columns, transpose_strips, &w);
    return ND_OK;
}

nd_status nd_cpu_make_form(nd_stream *stream, const nd_make_form_args *args)
{
    nd_matrix out = args->out;
    float *amax = args->amax;
    if (nd_dtype_is_fp8(args->x.dtype)) {
        return transpose_codes(stream, out.transposed, args->x);
    }
    work w = work_of(stream, args->x);
    w.e4m3 = format_of(&out, w.x) == ND_DTYPE_F8_E4M3;
    w.fp8 = out;
    _Atomic uint32_t most = amax ? nd_size_bits(*amax) : 0;
    w.most = amax ? &most : NULL;
    if (out.transposed.data) {
        each_item(stream, &w, BLOCK, BLOCK, cast_blocks);
    } else {
        if (out.granularity == ND_PER_TENSOR && nd_tensor_is_contiguous(w.x) &&
            nd_tensor_is_contiguous(out.codes)) {
            flatten(&w.x);
            flatten(&w.fp8.codes);
        }
        each_item(stream, &w, 1, RUN, cast_rows);
    }
    if (amax) {
        *amax = nd_size_of_bits(most);
    }
    return ND_OK;
}

static void count_rows(void *arg, int64_t begin, int64_t end)
{
    const work *w = arg;
    int64_t found[2] = {0, 0};
    for (int64_t index = begin; index < end; index++) {
        item t = item_of(w, index);
        w->kernels->count_fp8(found, x_at(w, t.row, t.column), scale_at(w, t.row, t.column),
                              w->fp8.granularity == ND_PER_COLUMN, t.columns, w->e4m3, w->bf16);
    }
    for (int i = 0; i < 2; i++) {
        atomic_fetch_add_explicit(&w->counts[i], found[i], memory_order_relaxed);
    }
}

nd_status nd_cpu_fp8_count(nd_stream *stream, const nd_fp8_count_args *args)
{
    nd_matrix as = args->as;
    work w = work_of(stream, args->x);
    _Atomic int64_t found[2] = {0, 0};
    w.e4m3 = (as.rows.data ? as.format : format_of(&as, w.x)) == ND_DTYPE_F8_E4M3;
    w.fp8 = as;
    w.counts = found;
    each_item(stream, &w, 1, RUN, count_rows);
    args->counts[0] += found[0];
    args->counts[1] += found[1];
    return ND_OK;
}
