// SPDX-License-Identifier: Apache-2.0

#include <stdlib.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/math.h"
#include "runtime/base/rng.h"
#include "runtime/tensor/fp8.h"
#include "trainer/tune/measure.h"

enum { REPEATS = 5, ALIGN = 256, PATTERN_BYTES = 1 << 16 };

/* Operands are filled with values: a product of zeros would need less power and so less time. */
enum { PATTERN_F32, PATTERN_BF16, PATTERN_E4M3, PATTERN_E5M2, PATTERN_ONES, PATTERNS };

static size_t span(const nd_call_matrix *m)
{
    int64_t elements = m->rows > 0 ? (m->rows - 1) * m->stride + m->columns : 0;
    return m->align == 0 ? 0 : (size_t)elements * nd_dtype_size((nd_dtype)m->dtype);
}

/* Byte offsets of the operands of a call. */
typedef struct places {
    size_t c, a, b, amax, scales[2], inverses[2], scratch, end;
} places;

static size_t place(size_t *at, size_t bytes)
{
    size_t begin = *at;
    *at += nd_round_up_bytes(bytes, ALIGN) + ALIGN;
    return begin;
}

static places places_of(const nd_rank *rank, const nd_call *call)
{
    places p = {0};
    size_t at = 0, entries = 1, scratch = 0;
    const nd_call_matrix *all[] = {&call->c, &call->a, &call->b};
    for (int i = 0; i < 3; i++) {
        const nd_call_matrix *m = all[i];
        const bool by_rows = m->axes == 1 || m->rows > m->columns;
        size_t longest = m->align ? (size_t)(by_rows ? m->rows : m->columns) : 1;
        entries = longest > entries && (call->kind == ND_CALL_FP8_SCALE ||
                                        call->a.along != ND_PER_TENSOR || call->b.along)
                      ? longest
                      : entries;
    }
    if (call->kind == ND_CALL_PRODUCT_FP8) {
        scratch = rank->ops->product_scratch(rank->device, call->c.rows, call->c.columns,
                                             call->a.columns, ND_DTYPE_BF16);
    }
    p.c = place(&at, span(&call->c));
    p.a = place(&at, span(&call->a));
    p.b = place(&at, span(&call->b));
    p.amax = place(&at, entries * 4);
    for (int i = 0; i < 2; i++) {
        p.scales[i] = place(&at, entries * 4);
        p.inverses[i] = place(&at, entries * 4);
    }
    p.scratch = place(&at, scratch);
    p.end = at;
    return p;
}

static char *pattern_of(const nd_bench *b, int pattern)
{
    return b->patterns + (size_t)pattern * PATTERN_BYTES;
}

static void make_patterns(nd_bench *b)
{
    for (int i = 0; i < PATTERN_BYTES; i++) {
        float value = nd_rng_normal(1, 2, (uint64_t)i);
        pattern_of(b, PATTERN_E4M3)[i] = (char)nd_fp8_from_f32(ND_DTYPE_F8_E4M3, value);
        pattern_of(b, PATTERN_E5M2)[i] = (char)nd_fp8_from_f32(ND_DTYPE_F8_E5M2, value);
        if (i < PATTERN_BYTES / 2) {
            ((nd_bf16 *)(void *)pattern_of(b, PATTERN_BF16))[i] = nd_bf16_from_f32(value);
        }
        if (i < PATTERN_BYTES / 4) {
            ((float *)(void *)pattern_of(b, PATTERN_F32))[i] = value;
            ((float *)(void *)pattern_of(b, PATTERN_ONES))[i] = 1.0f;
        }
    }
}

size_t nd_bench_bytes(const nd_rank *rank, const nd_calls *calls)
{
    size_t bytes = ALIGN;
    for (int i = 0; i < calls->count; i++) {
        places p = places_of(rank, &calls->entries[i].call);
        bytes = p.end > bytes ? p.end : bytes;
    }
    return bytes;
}

nd_status nd_bench_open(nd_bench *bench, nd_rank *rank, const nd_calls *calls)
{
    nd_bench b = {.rank = rank, .bytes = nd_bench_bytes(rank, calls)};
    ND_TRY(ND_ALLOC(PATTERNS * PATTERN_BYTES, &b.patterns));
    make_patterns(&b);
    nd_status status = nd_device_alloc(rank->device, b.bytes, (void **)&b.memory);
    if (status != ND_OK) {
        free(b.patterns);
        return nd_fail_context(status, "allocating the operands of products that are timed");
    }
    *bench = b;
    return ND_OK;
}

void nd_bench_close(nd_bench *b)
{
    if (b->memory) {
        nd_device_free(b->rank->device, b->memory, b->bytes);
    }
    free(b->patterns);
    *b = (nd_bench){0};
}

/* Repeats the pattern, by copies of what is already on the device. */
static nd_status fill(const nd_bench *b, char *to, size_t bytes, int pattern)
{
    nd_stream *stream = &b->rank->stream;
    size_t filled = bytes < PATTERN_BYTES ? bytes : PATTERN_BYTES;
    if (bytes > 0) {
        ND_TRY(nd_copy(stream, to, pattern_of(b, pattern), filled));
    }
    while (filled < bytes) {
        size_t next = bytes - filled < filled ? bytes - filled : filled;
        ND_TRY(nd_copy(stream, to + filled, to, next));
        filled += next;
    }
    return ND_OK;
}

static nd_tensor tensor_at(const nd_bench *b, size_t at, const nd_call_matrix *m)
{
    char *data = b->memory + at + (m->align < ALIGN ? m->align : 0);
    if (m->align == 0) {
        return (nd_tensor){0};
    }
    if (m->axes == 1) {
        return nd_tensor_1d(data, (nd_dtype)m->dtype, m->rows);
    }
    nd_tensor t = nd_tensor_2d(data, (nd_dtype)m->dtype, m->rows, m->columns);
    t.stride[0] = m->stride;
    return t;
}

static nd_status fill_operand(const nd_bench *b, size_t at, const nd_call_matrix *m)
{
    int pattern = m->dtype == ND_DTYPE_F32       ? PATTERN_F32
                  : m->dtype == ND_DTYPE_BF16    ? PATTERN_BF16
                  : m->dtype == ND_DTYPE_F8_E5M2 ? PATTERN_E5M2
                                                 : PATTERN_E4M3;
    return m->align == 0 ? ND_OK : fill(b, tensor_at(b, at, m).data, span(m), pattern);
}

static nd_status fill_all(const nd_bench *b, const nd_call *call, const places *p)
{
    ND_TRY(fill_operand(b, p->a, &call->a));
    if (call->kind == ND_CALL_PRODUCT || call->kind == ND_CALL_PRODUCT_FP8) {
        ND_TRY(fill_operand(b, p->b, &call->b));
    }
    ND_TRY(fill(b, b->memory + p->amax, p->scratch - p->amax, PATTERN_ONES));
    return ND_OK;
}

/* A call and the memory of its operands. */
typedef struct bound_call {
    const nd_bench *bench;
    const nd_call *call;
    places at;
} bound_call;

static nd_matrix fp8_operand(const bound_call *x, int which, nd_tensor t, bool as_stored, int along)
{
    nd_matrix out = {.scale = (float *)(void *)(x->bench->memory + x->at.scales[which]),
                     .inverse = (float *)(void *)(x->bench->memory + x->at.inverses[which]),
                     .granularity = (nd_granularity)along};
    out.format = ND_DTYPE_F8_E4M3; /* of an operand that the product casts; E5M2 takes as long */
    out.stored = t;
    out.transposed = !as_stored && t.dtype != ND_DTYPE_BF16;
    return out;
}

/* True when products read transposed codes where the stored ones do not lie along the summed
 * axis. */
static bool transposes(const nd_rank *rank)
{
    const nd_dtype codes = ND_DTYPE_F8_E4M3;
    const nd_form_need need = {ND_W_OF_DX, 1, 1, 1, codes, codes, .uses = 1};
    return rank->ops->form(rank->device, &need).transposed;
}

static nd_status run(void *context, nd_stream *s)
{
    const bound_call *x = context;
    const nd_bench *b = x->bench;
    const nd_call *call = x->call;
    const nd_ops *ops = b->rank->ops;
    nd_tensor c = tensor_at(b, x->at.c, &call->c), a = tensor_at(b, x->at.a, &call->a);
    nd_tensor second = tensor_at(b, x->at.b, &call->b);
    float *amax = (float *)(void *)(b->memory + x->at.amax);
    bool at = call->a_transposed, bt = call->b_transposed;
    const bool as_stored = !transposes(b->rank); /* whatever the axis */
    nd_matrix fa, fb;
    switch ((nd_call_kind)call->kind) {
    case ND_CALL_PRODUCT:
        return ND_CALL(ops, s, product, .c = c, .a = nd_rows(a), .a_transposed = at,
                       .b = nd_rows(second), .b_transposed = bt, .beta = (float)call->beta);
    case ND_CALL_PRODUCT_FP8:
        fa = fp8_operand(x, 0, a, !at || as_stored, call->a.along);
        fb = fp8_operand(x, 1, second, bt || as_stored, call->b.along);
        return ND_CALL(ops, s, product, .c = c, .a = fa, .a_transposed = at, .b = fb,
                       .b_transposed = bt, .beta = (float)call->beta,
                       .fast_accumulation = call->fast, .scratch = b->memory + x->at.scratch);
    case ND_CALL_AMAX:
        return ND_CALL(ops, s, amax, .amax = amax, .x = a,
                       .granularity = (nd_granularity)call->a.along, .merge = call->merges);
    case ND_CALL_FP8_SCALE:
        fa = fp8_operand(x, 0, a, true, ND_PER_TENSOR);
        return ND_CALL(ops, s, fp8_scale, .scale = fa.scale, .inverse = fa.inverse, .amax = amax,
                       .count = call->a.rows, .format = ND_DTYPE_F8_E4M3);
    case ND_CALL_FP8_CAST:
        fa = fp8_operand(x, 0, c, true, call->a.along);
        return ND_CALL(ops, s, make_form, .out = fa, .transposed = second,
                       .amax = call->merges ? amax : NULL, .x = a);
    case ND_CALL_FP8_TRANSPOSE:
        return ND_CALL(ops, s, make_form, .transposed = c, .x = a);
    case ND_CALL_CAST:
        return ND_CALL(ops, s, cast, .out = c, .x = a);
    }
    return ND_OK;
}

nd_status nd_bench_run(nd_bench *b, const nd_call *call)
{
    bound_call x = {b, call, places_of(b->rank, call)};
    ND_ASSERT(x.at.end <= b->bytes);
    ND_TRY(fill_all(b, call, &x.at));
    return run(&x, &b->rank->stream);
}

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double nd_bench_median(double *times, int count)
{
    qsort(times, (size_t)count, sizeof *times, by_value);
    return times[count / 2];
}

/* On a CPU, where a call is complete when it returns. */
static nd_status host_median(bound_call *x, nd_stream *stream, double *seconds)
{
    double times[REPEATS];
    ND_TRY(run(x, stream)); /* which makes what the library keeps */
    for (int i = 0; i < REPEATS; i++) {
        const double begin = nd_clock_seconds();
        ND_TRY(run(x, stream));
        times[i] = nd_clock_seconds() - begin;
    }
    *seconds = nd_bench_median(times, REPEATS);
    return ND_OK;
}

nd_status nd_bench_time(nd_bench *b, const nd_call *call, double *seconds)
{
    bound_call x = {b, call, places_of(b->rank, call)};
    nd_stream *stream = &b->rank->stream;
    ND_ASSERT(x.at.end <= b->bytes);
    ND_TRY(fill_all(b, call, &x.at));
    return nd_rank_is_gpu(b->rank) ? nd_ops_cuda_median(stream, run, &x, REPEATS, seconds)
                                   : host_median(&x, stream, seconds);
}
