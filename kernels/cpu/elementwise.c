// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"

#include <string.h>

#include "kernels/cpu/fuse.h"
#include "runtime/base/math.h"

enum {
    FLAT_RUN = 16384,     /* elements of one item where everything is contiguous */
    BIAS_RUN = 256,       /* columns of one item whose rows are added */
    SQUARES_BLOCK = 16384 /* elements whose squares are summed first */
};

/* Elements in row-major order, cut into runs that are contiguous in every view. */
typedef struct elementwise {
    const nd_row_ops *rows;
    nd_tensor out, x;
    int64_t count, run;
    bool adds; /* else x is cast */
} elementwise;

static int64_t common_run(int64_t count, int64_t run, nd_tensor t)
{
    int64_t own = nd_contiguous_count(t);
    if (own == count) {
        return run;
    }
    ND_ASSERT(run == count || run % own == 0 || own % run == 0);
    return own < run ? own : run;
}

/* The longest run of both views, or pieces of fixed size when both are contiguous. */
static elementwise elementwise_of(nd_stream *stream, nd_tensor out, nd_tensor x)
{
    elementwise w = {.rows = nd_cpu_context_of(stream)->rows, .out = out, .x = x};
    w.count = nd_tensor_count(out);
    ND_ASSERT(nd_is_act(out) && nd_is_act(x) && nd_tensor_count(x) == w.count);
    int64_t run = common_run(w.count, common_run(w.count, w.count, out), x);
    w.run = run == w.count ? FLAT_RUN : run;
    return w;
}

static void do_runs(void *arg, int64_t begin, int64_t end)
{
    const elementwise *w = arg;
    for (int64_t item = begin; item < end; item++) {
        const int64_t at = item * w->run, n = nd_min(w->count - at, w->run);
        void *out = nd_element_address(w->out, nd_offset_of(w->out, at));
        const void *x = nd_element_address(w->x, nd_offset_of(w->x, at));
        if (w->adds) {
            w->rows->accumulate(out, x, n, w->x.dtype == ND_DTYPE_BF16);
        } else {
            w->rows->cast(out, w->out.dtype, x, w->x.dtype, n);
        }
    }
}

static void do_all(nd_stream *stream, nd_tensor out, nd_tensor x, bool adds)
{
    elementwise w = elementwise_of(stream, out, x);
    w.adds = adds;
    nd_cpu_parallel(stream, nd_ceil_div(w.count, w.run), w.run, do_runs, &w);
}

nd_status nd_cpu_accumulate(nd_stream *stream, const nd_accumulate_args *args)
{
    ND_ASSERT(args->acc.dtype == ND_DTYPE_F32);
    do_all(stream, args->acc, args->x, true);
    return ND_OK;
}

nd_status nd_cpu_cast(nd_stream *stream, const nd_cast_args *args)
{
    do_all(stream, args->out, args->x, false);
    return ND_OK;
}

typedef struct scaled {
    const nd_row_ops *rows;
    nd_axpy_args args;
} scaled;

static void scaled_rows(void *arg, int64_t begin, int64_t end)
{
    const scaled *w = arg;
    const nd_axpy_args *x = &w->args;
    for (int64_t i = begin; i < end; i++) {
        w->rows->axpy(nd_row(x->out, i), nd_row(x->x, i), x->plus.data ? nd_row(x->plus, i) : NULL,
                      x->scale, x->out.shape[1], x->out.dtype == ND_DTYPE_BF16);
    }
}

nd_status nd_cpu_axpy(nd_stream *stream, const nd_axpy_args *args)
{
    const nd_tensor out = args->out, x = args->x, plus = args->plus;
    const int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_2d_of(x, out.dtype, n, C));
    ND_ASSERT(!plus.data || nd_is_2d_of(plus, out.dtype, n, C));
    scaled w = {.rows = nd_cpu_context_of(stream)->rows, .args = *args};
    nd_cpu_parallel(stream, n, C, scaled_rows, &w);
    return ND_OK;
}

static void bias_rows(void *arg, int64_t begin, int64_t end)
{
    const elementwise *w = arg;
    for (int64_t i = begin; i < end; i++) {
        w->rows->cast(nd_row(w->out, i), w->out.dtype, w->x.data, w->x.dtype, w->count);
    }
}

nd_status nd_cpu_bias_fwd(nd_stream *stream, const nd_bias_fwd_args *args)
{
    const nd_tensor out = args->out, bias = args->bias;
    int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_vector(bias, out.dtype, C));
    elementwise w = {
        .rows = nd_cpu_context_of(stream)->rows, .out = out, .x = bias, .count = C, .run = C};
    nd_cpu_parallel(stream, n, C, bias_rows, &w);
    return ND_OK;
}

/* Pieces of columns; each adds its rows in their order. */
static void bias_columns(void *arg, int64_t begin, int64_t end)
{
    const elementwise *w = arg;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t at = piece * w->run;
        int64_t count = w->count - at < w->run ? w->count - at : w->run;
        for (int64_t i = 0; i < w->x.shape[0]; i++) {
            w->rows->accumulate(nd_element_address(w->out, at),
                                nd_element_address(w->x, i * w->x.stride[0] + at), count,
                                w->x.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_bias_bwd(nd_stream *stream, const nd_bias_bwd_args *args)
{
    const nd_tensor dbias = args->dbias, dout = args->dout;
    int64_t n = dout.shape[0], C = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C) && nd_is_vector(dbias, ND_DTYPE_F32, C));
    elementwise w = {.rows = nd_cpu_context_of(stream)->rows,
                     .out = dbias,
                     .x = dout,
                     .count = C,
                     .run = BIAS_RUN};
    nd_cpu_parallel(stream, nd_ceil_div(C, BIAS_RUN), n * w.run, bias_columns, &w);
    return ND_OK;
}

typedef struct squares {
    const nd_row_ops *rows;
    const float *x;
    int64_t count;
    double *partials;
} squares;

static void square_blocks(void *arg, int64_t begin, int64_t end)
{
    const squares *w = arg;
    for (int64_t block = begin; block < end; block++) {
        int64_t at = block * SQUARES_BLOCK, rest = w->count - at;
        w->partials[block] =
            w->rows->sum_squares(w->x + at, rest < SQUARES_BLOCK ? rest : SQUARES_BLOCK);
    }
}

/* Blocks are summed in order; a range with more blocks than there is room for is done in parts. */
nd_status nd_cpu_sum_squares(nd_stream *stream, const nd_sum_squares_args *args)
{
    int64_t count = args->count;
    nd_cpu_context *context = nd_cpu_context_of(stream);
    const int64_t part = (int64_t)ND_CPU_PARTIALS * SQUARES_BLOCK;
    double sum = 0.0;
    for (int64_t begin = 0; begin < count; begin += part) {
        squares w = {.rows = context->rows,
                     .x = args->x + begin,
                     .count = count - begin < part ? count - begin : part,
                     .partials = context->partials};
        int64_t blocks = nd_ceil_div(w.count, SQUARES_BLOCK);
        nd_cpu_parallel(stream, blocks, SQUARES_BLOCK, square_blocks, &w);
        for (int64_t block = 0; block < blocks; block++) {
            sum += context->partials[block];
        }
    }
    *args->out += sum;
    return ND_OK;
}

nd_status nd_cpu_digest(nd_stream *stream, const nd_digest_args *args)
{
    uint64_t sum = 0;
    for (int64_t i = 0; i < args->count; i++) {
        uint32_t bits;
        memcpy(&bits, &args->x[i], sizeof bits);
        sum += (2 * (uint64_t)i + 1) * bits;
    }
    *args->out += sum;
    return ND_OK;
}

typedef struct draws {
    const nd_row_ops *rows;
    float *out, deviation;
    int64_t count;
    uint64_t seed, stream, first;
} draws;

static void draw_runs(void *arg, int64_t begin, int64_t end)
{
    const draws *w = arg;
    int64_t at = begin * FLAT_RUN, stop = end * FLAT_RUN < w->count ? end * FLAT_RUN : w->count;
    w->rows->random_normal(w->out + at, w->deviation, w->seed, w->stream, w->first + (uint64_t)at,
                           stop - at);
}

nd_status nd_cpu_random_normal(nd_stream *stream, const nd_random_normal_args *args)
{
    draws w = {.rows = nd_cpu_context_of(stream)->rows,
               .out = args->out,
               .deviation = args->deviation,
               .count = args->count,
               .seed = args->seed,
               .stream = args->random_stream,
               .first = args->first};
    nd_cpu_parallel(stream, nd_ceil_div(args->count, FLAT_RUN), FLAT_RUN, draw_runs, &w);
    return ND_OK;
}

enum { CHUNK = 4096 }; /* elements of one item */

typedef struct optimizer {
    const nd_row_ops *rows;
    const nd_adamw *o;
    float *p, *m, *v; /* m NULL: plain gradient descent */
    const float *grad;
    nd_flat_range range;
    _Atomic uint32_t most; /* bits of the largest |p| */
} optimizer;

static void update_chunks(void *arg, int64_t begin, int64_t end)
{
    optimizer *w = arg;
    const nd_row_ops *rows = w->rows;
    int64_t from = w->range.begin + begin * CHUNK, to = w->range.begin + end * CHUNK;
    int64_t n = (to < w->range.end ? to : w->range.end) - from;
    nd_bf16 *copy = w->range.copy ? w->range.copy + begin * CHUNK : NULL;
    const uint32_t most =
        w->m ? rows->adamw(w->o, w->range.decay, w->p + from, w->m + from, w->v + from,
                           w->grad + from, copy, n)
             : rows->sgd(w->o, w->range.decay, w->p + from, w->grad + from, copy, n);
    nd_raise_largest(&w->most, most);
}

static void update(nd_stream *stream, optimizer *w, const nd_flat_range *ranges, int range_count)
{
    w->rows = nd_cpu_context_of(stream)->rows;
    for (int r = 0; r < range_count; r++) {
        ND_ASSERT(ranges[r].begin >= 0 && ranges[r].begin <= ranges[r].end);
        w->range = ranges[r];
        int64_t count = w->range.end - w->range.begin;
        w->most = w->range.amax ? nd_size_bits(*w->range.amax) : 0;
        nd_cpu_parallel(stream, nd_ceil_div(count, CHUNK), CHUNK, update_chunks, w);
        if (w->range.amax) {
            *w->range.amax = nd_size_of_bits(w->most);
        }
    }
}

nd_status nd_cpu_adamw(nd_stream *stream, const nd_adamw_args *args)
{
    const nd_adamw *o = &args->hyper;
    optimizer w = {.o = o, .p = args->p, .m = args->m, .v = args->v, .grad = args->grad};
    update(stream, &w, args->ranges, args->range_count);
    return ND_OK;
}

nd_status nd_cpu_sgd(nd_stream *stream, const nd_sgd_args *args)
{
    const nd_adamw *o = &args->hyper;
    optimizer w = {.o = o, .p = args->p, .grad = args->grad};
    update(stream, &w, args->ranges, args->range_count);
    return ND_OK;
}
