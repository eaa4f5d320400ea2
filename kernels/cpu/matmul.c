// SPDX-License-Identifier: Apache-2.0
/*
 * Matrix products of the CPU backend: those of BF16 and of FP8 codes are ours (gemm.h) on CPUs with
 * AVX-512 or AMX; others are oneDNN's.
 *
 * Where the CPU has no BF16 dot products oneDNN has no BF16 product (AVX2) or a slow one (AVX-512):
 * what is not ours there is widened to F32, which is exact, tile by tile, multiplied in F32, and
 * the sum is rounded once.
 */
#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

/* Rows [row, row + rows) and columns [column, column + columns) of a matrix. */
typedef struct block {
    int64_t row, rows, column, columns;
} block;

typedef struct widening {
    float *tile;
    nd_tensor x;
    block at; /* as it is stored */
} widening;

static void widen_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const widening *w = args;
    const nd_tensor x = w->x;
    for (int64_t i = begin; i < end; i++) {
        const int64_t from = (w->at.row + i) * x.stride[0] + w->at.column;
        float *to = w->tile + i * ND_CPU_WIDEN_TILE;
        if (x.dtype == ND_DTYPE_BF16) {
            rows->cast(to, ND_DTYPE_F32, (const nd_bf16 *)x.data + from, ND_DTYPE_BF16,
                       w->at.columns);
        } else {
            rows->widen_fp8(to, (const uint8_t *)x.data + from, w->at.columns,
                            x.dtype == ND_DTYPE_F8_E4M3);
        }
    }
}

/* A block of op(x) as it is stored, widened; row stride ND_CPU_WIDEN_TILE. */
static void widen(nd_stream *stream, float *tile, nd_tensor x, bool transposed, block at)
{
    const block stored = transposed ? (block){at.column, at.columns, at.row, at.rows} : at;
    nd_cpu_each(stream, stored.rows, stored.columns, widen_rows, &(widening){tile, x, stored});
}

typedef struct storing {
    nd_tensor c;
    block at;
    const float *tile;
    const nd_gemm_factors *factors;
    bool accumulate;
} storing;

/* A block of c = tile factor (+ c), rounded once when c is BF16. */
static void store_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const storing *w = args;
    const nd_gemm_factors *f = w->factors;
    for (int64_t i = begin; i < end; i++) {
        const int64_t row = w->at.row + i;
        rows->scaled_sum(nd_at(w->c, row, w->at.column), w->tile + i * ND_CPU_WIDEN_TILE,
                         f->all * (f->rows ? f->rows[row] : 1.0f),
                         f->columns ? f->columns + w->at.column : NULL, w->accumulate,
                         w->at.columns, w->c.dtype == ND_DTYPE_BF16);
    }
}

/* Tiles of op(a) and op(b) are widened, their product is summed over k in F32. */
static nd_status multiply_widened(nd_stream *stream, nd_tensor c, nd_tensor a, nd_tensor b,
                                  const nd_dnnl_product *p, const nd_gemm_factors *factors)
{
    enum { T = ND_CPU_WIDEN_TILE };
    const nd_cpu_context *context = nd_cpu_context_of(stream);
    float *ta = context->widened, *tb = ta + T * T, *tc = tb + T * T;
    for (int64_t i = 0; i < p->m; i += T) {
        for (int64_t j = 0; j < p->n; j += T) {
            nd_dnnl_product tile = {.m = nd_min(T, p->m - i),
                                    .n = nd_min(T, p->n - j),
                                    .lda = T,
                                    .ldb = T,
                                    .ldc = T,
                                    .a_transposed = p->a_transposed,
                                    .b_transposed = p->b_transposed,
                                    .in = ND_DTYPE_F32,
                                    .out = ND_DTYPE_F32};
            for (int64_t l = 0; l < p->k; l += T) {
                tile.k = nd_min(T, p->k - l);
                tile.accumulate = l > 0;
                widen(stream, ta, a, p->a_transposed, (block){i, tile.m, l, tile.k});
                widen(stream, tb, b, p->b_transposed, (block){l, tile.k, j, tile.n});
                ND_TRY(nd_dnnl_matmul(context->dnnl, &tile, tc, ta, tb));
            }
            const storing w = {c, {i, tile.m, j, tile.n}, tc, factors, p->accumulate};
            nd_cpu_each(stream, tile.m, tile.n, store_rows, &w);
        }
    }
    return ND_OK;
}

/* A matrix of BF16 or of codes, as it is. */
static nd_gemm_operand operand_as_stored(nd_tensor x)
{
    return (nd_gemm_operand){.data = x.data, .dtype = x.dtype, .stride = x.stride[0]};
}

/* c = op(a) op(b) factors (+ c) by our own kernels, where the context has them. c is BF16 or F32; p
 * has the extents, and whether operands are transposed and c is added to; factors and kept may
 * be NULL. */
static void multiply_own(nd_cpu_context *context, nd_tensor c, nd_gemm_operand a, nd_gemm_operand b,
                         const nd_dnnl_product *p, const nd_gemm_factors *factors,
                         nd_kept_form *kept)
{
    nd_gemm_product product = {.m = p->m,
                               .n = p->n,
                               .k = p->k,
                               .a = a,
                               .b = b,
                               .a_transposed = p->a_transposed,
                               .b_transposed = p->b_transposed,
                               .accumulate = p->accumulate,
                               .factors = factors,
                               .c = c.data,
                               .c_stride = c.stride[0],
                               .c_bf16 = c.dtype == ND_DTYPE_BF16};
    if (kept && !kept->made) {
        nd_gemm_pack_whole(context->gemm, &product, kept->memory);
        kept->made = true;
    }
    product.b_packed = kept ? kept->memory : NULL;
    nd_gemm_multiply(context->gemm, &product);
}

/* Tokens whose sum is complete in c before the next ones are added, in weight gradients that are
 * not our own products, which have blocks of their own (nd_gemm_sum_block). */
enum { SUM_BLOCK = 1024 };

/* A weight gradient, block by block of its tokens. */
static nd_status multiply_blocks(nd_stream *stream, const nd_product_args *args)
{
    const int64_t k = args->a.stored.shape[0];
    for (int64_t begin = 0; begin < k; begin += SUM_BLOCK) {
        const int64_t rows = nd_min(SUM_BLOCK, k - begin);
        nd_product_args x = *args;
        x.a.stored = nd_tensor_rows(args->a.stored, begin, rows);
        x.b.stored = nd_tensor_rows(args->b.stored, begin, rows);
        x.beta = begin > 0 ? 1.0f : args->beta;
        ND_TRY(nd_cpu_product(stream, &x));
    }
    return ND_OK;
}

/*
 * Products with few rows, as when a model continues a few texts: the time is that of reading b
 * once, from memory, which no packing may double. Their rows are computed one by one, so that their
 * bits do not depend on the number of rows.
 */

enum { FEW_ROWS = 8, BLOCK = 64 }; /* of b, whose results a thread holds */

static void dot_rows(const nd_row_ops *rows, const void *args, int64_t begin, int64_t end)
{
    const nd_product_args *p = args;
    const nd_tensor a = p->a.stored, b = p->b.stored;
    float sums[FEW_ROWS * BLOCK];
    for (int64_t first = begin; first < end; first += BLOCK) {
        const int64_t count = nd_min(BLOCK, end - first), m = a.shape[0];
        rows->dots(&(nd_row_dots){.x = a.data,
                                  .x_stride = a.stride[0],
                                  .vectors = m,
                                  .rows = nd_row(b, first),
                                  .stride = b.stride[0],
                                  .count = count,
                                  .k = a.shape[1],
                                  .bf16 = a.dtype == ND_DTYPE_BF16,
                                  .out = sums,
                                  .out_stride = BLOCK});
        for (int64_t i = 0; i < m; i++) {
            rows->scaled_sum(nd_at(p->c, i, first), sums + i * BLOCK, 1.0f, NULL, p->beta != 0.0f,
                             count, p->c.dtype == ND_DTYPE_BF16);
        }
    }
}

/* A product of operands in BF16, or in F32, as they are stored. */
static nd_status product_plain(nd_stream *stream, const nd_product_args *args,
                               const nd_dnnl_product *p)
{
    const nd_tensor c = args->c, a = args->a.stored, b = args->b.stored;
    nd_cpu_context *context = nd_cpu_context_of(stream);
    ND_ASSERT(nd_is_act(a) && a.dtype == b.dtype);
    ND_ASSERT(c.dtype == ND_DTYPE_F32 || c.dtype == a.dtype);
    if (args->few_rows && p->m <= FEW_ROWS && !p->a_transposed && p->b_transposed) {
        nd_cpu_each(stream, p->n, p->k, dot_rows, args);
        return ND_OK;
    }
    if (context->gemm && p->in == ND_DTYPE_BF16) {
        multiply_own(context, c, operand_as_stored(a), operand_as_stored(b), p, NULL, args->b.kept);
        return ND_OK;
    }
    if (p->a_transposed && !p->b_transposed && c.dtype == ND_DTYPE_F32 && p->k > SUM_BLOCK) {
        return multiply_blocks(stream, args);
    }
    if (p->in == ND_DTYPE_BF16 && context->vectors < ND_CPU_ISA_AVX512_BF16) {
        return multiply_widened(stream, c, a, b, p, &(nd_gemm_factors){.all = 1.0f});
    }
    return nd_dnnl_matmul(context->dnnl, p, c.data, a.data, b.data);
}

/*
 * Products of FP8 matrices. Every FP8 value is a BF16 value, so codes are widened exactly,
 * multiplied with F32 sums, and the inverse scales are applied to the sums before the one rounding.
 * Our own products widen codes, or cast what is not cast yet, while they pack operands (gemm.h);
 * elsewhere tiles of codes are widened to F32.
 */

/* One operand: what its sums are multiplied by beside what is packed. */
typedef struct operand {
    nd_gemm_operand packed; /* scale NULL: it is cast already */
    const float *inverse;
    bool per_line; /* one scale for each row of op(a) or column of op(b); else one */
} operand;

/* The scratch holds the scales of an operand in parts line by line: the factors of its numbers, and
 * those of the sums. */
size_t nd_cpu_product_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                              nd_dtype act)
{
    const nd_cpu_context *context = device->native;
    return context->gemm ? 2 * (size_t)nd_max(m, n) * sizeof(float) : 0;
}

/* Gives each of the lines of x the scale of its part, and its sums their whole factor, which a
 * product of that part alone would find too. */
static void spread(operand *x, const nd_matrix *parts, int64_t lines, const operand *other,
                   float *scratch)
{
    float *scale = scratch, *inverse = scratch + lines;
    int64_t line = 0;
    ND_ASSERT(scratch && x->packed.scale && !x->per_line && !other->per_line);
    for (int p = 0; p < parts->parts; p++) {
        for (int64_t end = line + parts->lines[p]; line < end; line++) {
            scale[line] = parts->scale[p];
            inverse[line] = parts->inverse[p] * *other->inverse;
        }
    }
    ND_ASSERT(line == lines);
    x->packed.scale = scale;
    x->inverse = inverse;
    x->packed.scale_per_line = x->per_line = true;
}

/* `line`: the granularity that is constant along the summed axis. */
static operand operand_of(const nd_matrix *x, nd_granularity line)
{
    const bool cast = nd_dtype_is_fp8(x->stored.dtype);
    operand o = {.packed = operand_as_stored(x->stored),
                 .inverse = x->inverse,
                 .per_line = x->granularity != ND_PER_TENSOR};
    o.packed.format = x->format;
    o.packed.scale = cast ? NULL : x->scale;
    o.packed.scale_per_line = o.per_line;
    ND_ASSERT(!x->transposed); /* nd_cpu_form asks for none */
    ND_ASSERT(cast || (x->stored.dtype == ND_DTYPE_BF16 && nd_dtype_is_fp8(x->format)));
    ND_ASSERT(nd_is_2d(x->stored, x->stored.shape[0], x->stored.shape[1]));
    ND_ASSERT(!o.per_line || x->granularity == line);
    return o;
}

static nd_status product_fp8(nd_stream *stream, const nd_product_args *args,
                             const nd_dnnl_product *p)
{
    nd_cpu_context *context = nd_cpu_context_of(stream);
    operand x = operand_of(&args->a, p->a_transposed ? ND_PER_COLUMN : ND_PER_ROW);
    operand y = operand_of(&args->b, p->b_transposed ? ND_PER_ROW : ND_PER_COLUMN);
    ND_ASSERT(args->a.parts == 0 || args->b.parts == 0);
    if (args->a.parts > 0) {
        spread(&x, &args->a, p->m, &y, args->scratch);
    } else if (args->b.parts > 0) {
        spread(&y, &args->b, p->n, &x, args->scratch);
    }
    const bool spreads = args->a.parts > 0 || args->b.parts > 0;
    nd_gemm_factors f = {.all = (x.per_line || spreads ? 1.0f : *x.inverse) *
                                (y.per_line || spreads ? 1.0f : *y.inverse),
                         .rows = x.per_line ? x.inverse : NULL,
                         .columns = y.per_line ? y.inverse : NULL};
    if (!context->gemm) {
        ND_ASSERT(!x.packed.scale && !y.packed.scale);
        return multiply_widened(stream, args->c, args->a.stored, args->b.stored, p, &f);
    }
    multiply_own(context, args->c, x.packed, y.packed, p, &f, args->b.kept);
    return ND_OK;
}

nd_status nd_cpu_product(nd_stream *stream, const nd_product_args *args)
{
    const nd_tensor c = args->c, a = args->a.stored, b = args->b.stored;
    const bool a_transposed = args->a_transposed, b_transposed = args->b_transposed;
    const nd_dnnl_product p = {.m = a.shape[a_transposed],
                               .n = b.shape[!b_transposed],
                               .k = a.shape[!a_transposed],
                               .lda = a.stride[0],
                               .ldb = b.stride[0],
                               .ldc = c.stride[0],
                               .a_transposed = a_transposed,
                               .b_transposed = b_transposed,
                               .accumulate = args->beta != 0.0f,
                               .in = a.dtype,
                               .out = c.dtype};
    ND_ASSERT(a.axes == 2 && b.axes == 2 && b.shape[b_transposed] == p.k);
    ND_ASSERT(nd_is_act(c) && nd_is_2d(c, p.m, p.n));
    ND_ASSERT(args->beta == 0.0f || args->beta == 1.0f);
    if (p.m == 0 || p.n == 0) {
        return ND_OK;
    }
    ND_ASSERT(p.k > 0);
    return nd_matrix_is_fp8(&args->a) ? product_fp8(stream, args, &p)
                                      : product_plain(stream, args, &p);
}

static nd_form_rule form_of(const nd_cpu_context *context, const nd_form_need *need)
{
    const bool codes = nd_dtype_is_fp8(need->stored), fp8 = nd_dtype_is_fp8(need->format);
    const bool is_b =
        need->role == ND_W_OF_Y || need->role == ND_W_OF_DX || need->role == ND_X_OF_DW;
    if (fp8 && !codes && (!context->gemm || need->measured)) {
        return (nd_form_rule){ND_FORM_BY_OP, (size_t)(need->rows * need->columns)};
    }
    /* A packed form costs as much memory as the weight in BF16. */
    const bool keeps = context->gemm && context->packing != ND_CPU_PACKING_ANEW &&
                       (context->packing == ND_CPU_PACKING_KEPT ||
                        need->others <= nd_gemm_most_packed_rows(context->gemm));
    if (is_b && need->uses > 1 && keeps && (need->stored == ND_DTYPE_BF16 || codes)) {
        const bool transposed = need->role == ND_W_OF_Y;
        return (nd_form_rule){ND_FORM_BY_PRODUCT,
                              nd_gemm_packed_bytes(context->gemm,
                                                   transposed ? need->columns : need->rows,
                                                   transposed ? need->rows : need->columns)};
    }
    return (nd_form_rule){fp8 && !codes ? ND_FORM_BY_PRODUCT : ND_FORM_IS_STORED};
}

nd_form_rule nd_cpu_form(const nd_device *device, const nd_form_need *need)
{
    const nd_cpu_context *context = device->native;
    const bool cast = nd_dtype_is_fp8(need->stored) || nd_dtype_is_fp8(need->format);
    nd_form_rule rule = form_of(context, need);
    if (!cast && (need->role == ND_DY_OF_DW || need->role == ND_X_OF_DW)) {
        rule.block = context->gemm && need->stored == ND_DTYPE_BF16
                         ? nd_gemm_sum_block(context->gemm, need->rows)
                         : SUM_BLOCK;
    }
    return rule;
}
