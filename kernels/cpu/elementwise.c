// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/fuse.h"

#include <string.h>

#include "runtime/base/math.h"

enum {
    FLAT_RUN = 16384,     /* elements of one item where everything is contiguous */
    BIAS_RUN = 256,       /* columns of one item whose rows are added */
    SQUARES_BLOCK = 16384 /* elements whose squares are summed first */
};

/* Elements in row-major order, cut into runs that are contiguous in every view. */
typedef struct elementwise {
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

static void do_runs(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const elementwise *w = args;
    for (int64_t item = begin; item < end; item++) {
        const int64_t at = item * w->run, n = nd_min(w->count - at, w->run);
        void *out = nd_element_address(w->out, nd_offset_of(w->out, at));
        const void *x = nd_element_address(w->x, nd_offset_of(w->x, at));
        if (w->adds) {
            rows->accumulate(out, x, n, w->x.dtype == ND_DTYPE_BF16);
        } else {
            rows->cast(out, w->out.dtype, x, w->x.dtype, n);
        }
    }
}

/* The longest runs of both views, or pieces of fixed size when both are contiguous. */
static void do_all(nd_stream *stream, nd_tensor out, nd_tensor x, bool adds)
{
    const int64_t count = nd_tensor_count(out);
    const int64_t run = common_run(count, common_run(count, count, out), x);
    const elementwise w = {out, x, count, run == count ? FLAT_RUN : run, adds};
    ND_ASSERT(nd_is_act(out) && nd_is_act(x) && nd_tensor_count(x) == count);
    nd_cpu_each(stream, nd_ceil_div(count, w.run), w.run, do_runs, &w);
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

static void scaled_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_axpy_args *w = args;
    for (int64_t i = begin; i < end; i++) {
        rows->axpy(nd_row(w->out, i), nd_row(w->x, i), w->plus.data ? nd_row(w->plus, i) : NULL,
                   w->scale, w->out.shape[1], w->out.dtype == ND_DTYPE_BF16);
    }
}

nd_status nd_cpu_axpy(nd_stream *stream, const nd_axpy_args *args)
{
    const nd_tensor out = args->out, plus = args->plus;
    const int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_2d_of(args->x, out.dtype, n, C));
    ND_ASSERT(!plus.data || nd_is_2d_of(plus, out.dtype, n, C));
    nd_cpu_each(stream, n, C, scaled_rows, args);
    return ND_OK;
}

static void bias_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_bias_fwd_args *w = args;
    for (int64_t i = begin; i < end; i++) {
        rows->cast(nd_row(w->out, i), w->out.dtype, w->bias.data, w->bias.dtype, w->out.shape[1]);
    }
}

nd_status nd_cpu_bias_fwd(nd_stream *stream, const nd_bias_fwd_args *args)
{
    const nd_tensor out = args->out;
    int64_t n = out.shape[0], C = out.shape[1];
    ND_ASSERT(nd_is_act(out) && nd_is_2d(out, n, C) && nd_is_vector(args->bias, out.dtype, C));
    nd_cpu_each(stream, n, C, bias_rows, args);
    return ND_OK;
}

/* Pieces of columns; each adds its rows in their order. */
static void bias_columns(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_bias_bwd_args *w = args;
    const int64_t C = w->dout.shape[1];
    for (int64_t at = begin * BIAS_RUN; at < nd_min(end * BIAS_RUN, C); at += BIAS_RUN) {
        for (int64_t i = 0; i < w->dout.shape[0]; i++) {
            rows->accumulate((float *)w->dbias.data + at, nd_at(w->dout, i, at),
                             nd_min(C - at, BIAS_RUN), w->dout.dtype == ND_DTYPE_BF16);
        }
    }
}

nd_status nd_cpu_bias_bwd(nd_stream *stream, const nd_bias_bwd_args *args)
{
    const nd_tensor dout = args->dout;
    int64_t n = dout.shape[0], C = dout.shape[1];
    ND_ASSERT(nd_is_act(dout) && nd_is_2d(dout, n, C));
    ND_ASSERT(nd_is_vector(args->dbias, ND_DTYPE_F32, C));
    nd_cpu_each(stream, nd_ceil_div(C, BIAS_RUN), n * BIAS_RUN, bias_columns, args);
    return ND_OK;
}

typedef struct squares {
    const float *x;
    int64_t count;
    double *partials;
} squares;

static void square_blocks(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const squares *w = args;
    for (int64_t block = begin; block < end; block++) {
        const int64_t at = block * SQUARES_BLOCK;
        w->partials[block] = rows->sum_squares(w->x + at, nd_min(w->count - at, SQUARES_BLOCK));
    }
}

/* Blocks are summed in order; a range with more blocks than there is room for is done in parts. */
nd_status nd_cpu_sum_squares(nd_stream *stream, const nd_sum_squares_args *args)
{
    double *partials = nd_cpu_context_of(stream)->partials, sum = 0.0;
    const int64_t part = (int64_t)ND_CPU_PARTIALS * SQUARES_BLOCK;
    for (int64_t begin = 0; begin < args->count; begin += part) {
        const squares w = {args->x + begin, nd_min(args->count - begin, part), partials};
        const int64_t blocks = nd_ceil_div(w.count, SQUARES_BLOCK);
        nd_cpu_each(stream, blocks, SQUARES_BLOCK, square_blocks, &w);
        for (int64_t block = 0; block < blocks; block++) {
            sum += partials[block];
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

static void draw_runs(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_random_normal_args *w = args;
    const int64_t at = begin * FLAT_RUN, stop = nd_min(end * FLAT_RUN, w->count);
    rows->random_normal(w->out + at, w->deviation, w->seed, w->random_stream,
                        w->first + (uint64_t)at, stop - at);
}

nd_status nd_cpu_random_normal(nd_stream *stream, const nd_random_normal_args *args)
{
    nd_cpu_each(stream, nd_ceil_div(args->count, FLAT_RUN), FLAT_RUN, draw_runs, args);
    return ND_OK;
}

enum { CHUNK = 4096 }; /* elements of one item */

typedef struct optimizer {
    const nd_adamw *o;
    float *p, *m, *v; /* m NULL: plain gradient descent */
    const float *grad;
    const nd_flat_range *range;
    _Atomic uint32_t *most; /* bits of the largest |p| */
} optimizer;

static void update_chunks(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const optimizer *w = args;
    const nd_flat_range *range = w->range;
    const int64_t from = range->begin + begin * CHUNK;
    const int64_t n = nd_min(range->begin + end * CHUNK, range->end) - from;
    nd_bf16 *copy = range->copy ? range->copy + begin * CHUNK : NULL;
    nd_raise_largest(w->most,
                     w->m ? rows->adamw(w->o, range->decay, w->p + from, w->m + from, w->v + from,
                                        w->grad + from, copy, n)
                          : rows->sgd(w->o, range->decay, w->p + from, w->grad + from, copy, n));
}

static void update(nd_stream *stream, optimizer *w, const nd_flat_range *ranges, int count)
{
    for (const nd_flat_range *r = ranges; r < ranges + count; r++) {
        _Atomic uint32_t most = r->amax ? nd_size_bits(*r->amax) : 0;
        ND_ASSERT(r->begin >= 0 && r->begin <= r->end);
        w->range = r;
        w->most = &most;
        nd_cpu_each(stream, nd_ceil_div(r->end - r->begin, CHUNK), CHUNK, update_chunks, w);
        if (r->amax) {
            *r->amax = nd_size_of_bits(most);
        }
    }
}

nd_status nd_cpu_adamw(nd_stream *stream, const nd_adamw_args *args)
{
    optimizer w = {.o = &args->hyper, .p = args->p, .m = args->m, .v = args->v, .grad = args->grad};
    update(stream, &w, args->ranges, args->range_count);
    return ND_OK;
}

nd_status nd_cpu_sgd(nd_stream *stream, const nd_sgd_args *args)
{
    optimizer w = {.o = &args->hyper, .p = args->p, .grad = args->grad};
    update(stream, &w, args->ranges, args->range_count);
    return ND_OK;
}
