// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

#include "runtime/tensor/fp8.h"

/* Element (i, j) of op(t). */
static double element(nd_tensor t, bool transposed, int64_t i, int64_t j)
{
    return transposed ? nd_ref_get(t, j * t.stride[0] + i) : nd_ref_get(t, i * t.stride[0] + j);
}

static nd_status plain_product(const nd_product_args *args)
{
    const nd_tensor c = args->c, a = args->a.stored, b = args->b.stored;
    bool a_transposed = args->a_transposed;
    float beta = args->beta;
    int64_t m = c.shape[0], n = c.shape[1], k = a_transposed ? a.shape[0] : a.shape[1];
    ND_ASSERT(nd_is_act(a) && nd_is_act(b) && nd_is_act(c) && (beta == 0.0f || beta == 1.0f));
    ND_ASSERT(nd_is_2d(c, m, n));
    ND_ASSERT(a_transposed ? nd_is_2d(a, k, m) : nd_is_2d(a, m, k));
    ND_ASSERT(args->b_transposed ? nd_is_2d(b, n, k) : nd_is_2d(b, k, n));
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            int64_t at = i * c.stride[0] + j;
            double sum = beta == 0.0f ? 0.0 : nd_ref_get(c, at);
            for (int64_t p = 0; p < k; p++) {
                sum += element(a, a_transposed, i, p) * element(b, args->b_transposed, p, j);
            }
            nd_ref_put(c, at, sum);
        }
    }
    return ND_OK;
}

/* One operand, op(t) (rows, columns), its summed axis being `inner`. */
typedef struct operand {
    const uint8_t *codes;
    double values[256];  /* of each code */
    int64_t row, column; /* distance of adjacent elements along either axis of op(t) */
    const float *inverse;
    bool per_line; /* one scale per index of the axis that is not summed */
} operand;

static operand operand_of(nd_matrix t, bool transposed, int64_t rows, int64_t columns,
                          nd_granularity line)
{
    const nd_tensor stored = t.stored;
    const bool swap = transposed != t.transposed; /* op(t) is the transpose of what is stored */
    ND_ASSERT(nd_dtype_is_fp8(stored.dtype));
    ND_ASSERT(swap ? nd_is_2d(stored, columns, rows) : nd_is_2d(stored, rows, columns));
    ND_ASSERT(t.granularity == ND_PER_TENSOR || t.granularity == line);
    operand o = {.codes = stored.data,
                 .row = swap ? 1 : stored.stride[0],
                 .column = swap ? stored.stride[0] : 1,
                 .inverse = t.inverse,
                 .per_line = t.granularity != ND_PER_TENSOR};
    for (int code = 0; code < 256; code++) {
        o.values[code] = nd_fp8_to_f32(stored.dtype, (uint8_t)code);
    }
    return o;
}

static double code_value(const operand *t, int64_t i, int64_t j)
{
    return t->values[t->codes[i * t->row + j * t->column]];
}

static nd_status fp8_product(const nd_product_args *args)
{
    const nd_tensor c = args->c;
    const nd_matrix a = args->a;
    bool a_transposed = args->a_transposed;
    float beta = args->beta;
    int64_t m = c.shape[0], n = c.shape[1];
    int64_t k = a.stored.shape[a_transposed != a.transposed ? 0 : 1];
    ND_ASSERT(nd_is_act(c) && nd_is_2d(c, m, n) && (beta == 0.0f || beta == 1.0f));
    operand x = operand_of(a, a_transposed, m, k, a_transposed ? ND_PER_COLUMN : ND_PER_ROW);
    operand y = operand_of(args->b, args->b_transposed, k, n,
                           args->b_transposed ? ND_PER_ROW : ND_PER_COLUMN);
    for (int64_t i = 0; i < m; i++) {
        for (int64_t j = 0; j < n; j++) {
            int64_t at = i * c.stride[0] + j;
            double sum = 0.0, start = beta == 0.0f ? 0.0 : nd_ref_get(c, at);
            for (int64_t p = 0; p < k; p++) {
                sum += code_value(&x, i, p) * code_value(&y, p, j);
            }
            sum *= x.inverse[x.per_line ? i : 0];
            sum *= y.inverse[y.per_line ? j : 0];
            nd_ref_put(c, at, start + sum);
        }
    }
    return ND_OK;
}

nd_status nd_ref_product(nd_stream *stream, const nd_product_args *args)
{
    return nd_matrix_is_fp8(&args->a) ? fp8_product(args) : plain_product(args);
}

size_t nd_ref_product_scratch(const nd_device *device, int64_t m, int64_t n, int64_t k,
                              nd_dtype act)
{
    return 0;
}

nd_form_rule nd_ref_form(const nd_device *device, const nd_form_need *need)
{
    const bool cast = nd_dtype_is_fp8(need->format) && !nd_dtype_is_fp8(need->stored);
    return cast ? (nd_form_rule){ND_FORM_BY_OP, (size_t)(need->rows * need->columns)}
                : (nd_form_rule){ND_FORM_IS_STORED};
}
