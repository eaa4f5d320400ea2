// SPDX-License-Identifier: Apache-2.0
/*
 * Products of FP8 matrices. Every FP8 value is a BF16 value, so codes are widened exactly,
 * multiplied as BF16 with F32 sums (gemm.h where that is there, else oneDNN), and the inverse
 * scales are applied to the sums before the one rounding.
 *
 * oneDNN multiplies sums by one number or by one per column for nothing, provided that c has no
 * gaps between its rows (with gaps it falls back to a plain loop, thousands of times slower), and
 * by one per row it cannot. Scales per row of op(a) that are powers of two (those of the rowwise
 * recipes) are put into the widened a, where they only change exponents. What is left, other scales
 * per row and, with oneDNN, a c with gaps, goes through F32 sums of CHUNK rows at a time and a pass
 * of our own.
 */
#include <math.h>

#include "kernels/cpu/matmul.h"
#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

enum {
    CHUNK = 256,       /* rows whose sums are kept in F32 */
    EXPONENT_MAX = 64, /* of scales that are put into operands: far from where BF16 ends */
    ALIGNMENT = 256
};

/* One operand in the form in which it exists, and how that form relates to op(x). */
typedef struct operand {
    nd_tensor stored;
    bool transposed; /* op(x) is the transpose of `stored` */
    const float *inverse;
    bool per_line; /* one inverse for each row of op(a) or column of op(b); else one */
} operand;

/* Where the parts of the caller's scratch begin, in bytes. */
typedef struct scratch {
    size_t a, b;      /* BF16, the widened operands, dense, as they are stored */
    size_t exponents; /* I16 (m), of the scales of op(a)'s rows */
    size_t columns;   /* F32 (n), factors of c's columns */
    size_t sums;      /* F32 (CHUNK, n) */
    size_t end;
} scratch;

static size_t after(size_t offset, int64_t count, size_t size)
{
    return offset + nd_round_up_bytes((size_t)count * size, ALIGNMENT);
}

static scratch scratch_of(int64_t m, int64_t n, int64_t k)
{
    scratch s = {.a = 0};
    s.b = after(s.a, m * k, sizeof(nd_bf16));
    s.exponents = after(s.b, k * n, sizeof(nd_bf16));
    s.columns = after(s.exponents, m, sizeof(int16_t));
    s.sums = after(s.columns, n, sizeof(float));
    s.end = after(s.sums, CHUNK * n, sizeof(float));
    return s;
}

size_t nd_cpu_matmul_fp8_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                                 nd_dtype act)
{
    const nd_cpu_context *context = device->native;
    return context->vectors < ND_CPU_ISA_AVX512_BF16 ? 0 : scratch_of(m, n, k).end;
}

/* `line`: the granularity that is constant along the summed axis. */
static operand operand_of(nd_fp8 x, bool transposed, nd_granularity line)
{
    bool plain = x.codes.data;
    operand o = {.stored = plain ? x.codes : x.transposed,
                 .transposed = plain ? transposed : !transposed,
                 .inverse = x.inverse,
                 .per_line = x.granularity != ND_PER_TENSOR};
    ND_ASSERT(o.stored.data && nd_dtype_is_fp8(o.stored.dtype));
    ND_ASSERT(nd_is_2d(o.stored, o.stored.shape[0], o.stored.shape[1]));
    ND_ASSERT(!o.per_line || x.granularity == line);
    return o;
}

/* log2 of every inverse when all are powers of two that may be put into an operand. */
static bool find_exponents(int16_t *exponents, const float *inverse, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        int exponent;
        if (frexpf(inverse[i], &exponent) != 0.5f || exponent > EXPONENT_MAX ||
            exponent < -EXPONENT_MAX) {
            return false;
        }
        exponents[i] = (int16_t)(exponent - 1);
    }
    return true;
}

typedef struct widening {
    const nd_row_ops *kernels;
    nd_tensor stored;
    nd_bf16 *out;
    const int16_t *row_exponents, *column_exponents;
} widening;

static void widen_rows(void *arg, int64_t begin, int64_t end)
{
    const widening *w = arg;
    int64_t columns = w->stored.shape[1], stride = w->stored.stride[0];
    w->kernels->widen_fp8_bf16(
        w->out + begin * columns, (const uint8_t *)w->stored.data + begin * stride, stride,
        end - begin, columns, w->stored.dtype == ND_DTYPE_F8_E4M3,
        w->row_exponents ? w->row_exponents + begin : NULL, w->column_exponents);
}

static void widen(nd_stream *stream, operand x, nd_bf16 *out, const int16_t *exponents)
{
    widening w = {.kernels = nd_cpu_context_of(stream)->rows, .stored = x.stored, .out = out};
    if (x.transposed) {
        w.column_exponents = exponents;
    } else {
        w.row_exponents = exponents;
    }
    nd_cpu_parallel(stream, x.stored.shape[0], x.stored.shape[1], widen_rows, &w);
}

typedef struct chunk {
    const nd_row_ops *kernels;
    nd_tensor c; /* (rows, n) */
    const float *sums;
    nd_cpu_factors factors; /* rows: of these rows */
    bool accumulate;
} chunk;

static void finish_rows(void *arg, int64_t begin, int64_t end)
{
    const chunk *w = arg;
    const nd_cpu_factors *f = &w->factors;
    int64_t n = w->c.shape[1];
    for (int64_t i = begin; i < end; i++) {
        w->kernels->scaled_sum(nd_row(w->c, i), w->sums + i * n,
                               f->all * (f->rows ? f->rows[i] : 1.0f), f->columns, w->accumulate, n,
                               w->c.dtype == ND_DTYPE_BF16);
    }
}

/* Computes the sums of CHUNK rows of c at a time, then applies their factors. */
static nd_status multiply_chunks(nd_stream *stream, nd_tensor c, const nd_bf16 *a, const nd_bf16 *b,
                                 float *sums, const nd_dnnl_product *whole, const nd_cpu_factors *f)
{
    nd_cpu_context *context = nd_cpu_context_of(stream);
    for (int64_t i = 0; i < whole->m; i += CHUNK) {
        nd_dnnl_product p = *whole;
        p.m = whole->m - i < CHUNK ? whole->m - i : CHUNK;
        p.ldc = p.n;
        p.out = ND_DTYPE_F32;
        p.accumulate = false;
        ND_TRY(
            nd_dnnl_matmul(context->dnnl, &p, sums, a + (p.a_transposed ? i : i * p.lda), b, NULL));
        chunk w = {.kernels = context->rows,
                   .c = nd_tensor_rows(c, i, p.m),
                   .sums = sums,
                   .factors = *f,
                   .accumulate = whole->accumulate};
        w.factors.rows = f->rows ? f->rows + i : NULL;
        nd_cpu_parallel(stream, p.m, p.n, finish_rows, &w);
    }
    return ND_OK;
}

/* The factors of c's columns with `all` in them. */
static const float *columns_times(float *out, const float *columns, int64_t n, float all)
{
    if (all == 1.0f) {
        return columns;
    }
    for (int64_t j = 0; j < n; j++) {
        out[j] = all * columns[j];
    }
    return out;
}

static nd_status multiply_bf16(nd_stream *stream, nd_tensor c, operand x, operand y,
                               nd_dnnl_product p, nd_cpu_factors f, char *memory)
{
    const scratch s = scratch_of(p.m, p.n, p.k);
    nd_bf16 *a = (nd_bf16 *)(memory + s.a), *b = (nd_bf16 *)(memory + s.b);
    int16_t *exponents = (int16_t *)(memory + s.exponents);
    float *columns = (float *)(memory + s.columns), *sums = (float *)(memory + s.sums);
    bool put = f.rows && find_exponents(exponents, f.rows, p.m);
    f.rows = put ? NULL : f.rows;
    widen(stream, x, a, put ? exponents : NULL);
    widen(stream, y, b, NULL);
    p.in = ND_DTYPE_BF16;
    p.lda = x.stored.shape[1];
    p.ldb = y.stored.shape[1];
    nd_cpu_context *context = nd_cpu_context_of(stream);
    bool ours = context->gemm && nd_gemm_supports(context->gemm, &p);
    if (f.rows || (p.ldc != p.n && !ours)) {
        return multiply_chunks(stream, c, a, b, sums, &p, &f);
    }
    const float *factors = &f.all;
    p.factors = ND_DNNL_FACTOR_ONE;
    if (f.columns) {
        factors = columns_times(columns, f.columns, p.n, f.all);
        p.factors = ND_DNNL_FACTOR_EACH_COLUMN;
    }
    if (ours) {
        nd_gemm_multiply(context->gemm, &p, c.data, a, b, factors);
        return ND_OK;
    }
    return nd_dnnl_matmul(context->dnnl, &p, c.data, a, b, factors);
}

nd_status nd_cpu_matmul_fp8(nd_stream *stream, const nd_matmul_fp8_args *args)
{
    const nd_tensor c = args->c;
    float beta = args->beta;
    nd_cpu_context *context = nd_cpu_context_of(stream);
    operand x =
        operand_of(args->a, args->a_transposed, args->a_transposed ? ND_PER_COLUMN : ND_PER_ROW);
    operand y =
        operand_of(args->b, args->b_transposed, args->b_transposed ? ND_PER_ROW : ND_PER_COLUMN);
    nd_dnnl_product p = {.m = x.stored.shape[x.transposed ? 1 : 0],
                         .n = y.stored.shape[y.transposed ? 0 : 1],
                         .k = x.stored.shape[x.transposed ? 0 : 1],
                         .ldc = c.stride[0],
                         .a_transposed = x.transposed,
                         .b_transposed = y.transposed,
                         .accumulate = beta != 0.0f,
                         .out = c.dtype};
    nd_cpu_factors f = {.all = (x.per_line ? 1.0f : *x.inverse) * (y.per_line ? 1.0f : *y.inverse),
                        .rows = x.per_line ? x.inverse : NULL,
                        .columns = y.per_line ? y.inverse : NULL};
    ND_ASSERT(nd_is_act(c) && nd_is_2d(c, p.m, p.n) && (beta == 0.0f || beta == 1.0f));
    ND_ASSERT(y.stored.shape[y.transposed ? 1 : 0] == p.k);
    if (p.m == 0 || p.n == 0) {
        return ND_OK;
    }
    ND_ASSERT(p.k > 0);
    if (context->vectors < ND_CPU_ISA_AVX512_BF16) {
        return nd_cpu_multiply_widened(context, c, x.stored, y.stored, &p, &f);
    }
    return multiply_bf16(stream, c, x, y, p, f, args->scratch);
}
