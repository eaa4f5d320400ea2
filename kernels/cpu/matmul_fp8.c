// SPDX-License-Identifier: Apache-2.0
/*
 * Products of FP8 matrices. Every FP8 value is a BF16 value, so codes are widened exactly,
 * multiplied with F32 sums, and the inverse scales are applied to the sums before the one rounding.
 * Our own products widen codes, or cast what is not cast yet, while they pack operands (gemm.h);
 * elsewhere tiles of codes are widened to F32.
 */
#include "kernels/cpu/context.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/view.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

/* One operand: what its sums are multiplied by beside what is packed. */
typedef struct operand {
    nd_gemm_operand packed; /* scale NULL: it is cast already */
    const float *inverse;
    bool per_line; /* one scale for each row of op(a) or column of op(b); else one */
} operand;

/* For the scales of an operand in parts, line by line: what its numbers are multiplied by, and what
 * the sums are. */
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
    operand o = {.packed = nd_cpu_operand_of(x->stored),
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

nd_status nd_cpu_product_fp8(nd_stream *stream, const nd_product_args *args,
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
        return nd_cpu_multiply_widened(stream, args->c, args->a.stored, args->b.stored, p, &f);
    }
    nd_cpu_multiply_own(context, args->c, x.packed, y.packed, p, &f, args->b.kept);
    return ND_OK;
}
