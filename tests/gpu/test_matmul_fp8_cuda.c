// SPDX-License-Identifier: Apache-2.0
/* FP8 products in the forms that the CUDA backend supports: extents of multiples of 16, and the
 * layout whose rows run along the summed axis. */
#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/ops/conformance.h"

static const struct {
    int64_t m, n, k, gap;
} shapes[] = {{16, 16, 16, 0}, {64, 48, 128, 0}, {112, 16, 272, 16}, {32, 160, 80, 32}};

enum { SHAPES = sizeof shapes / sizeof *shapes };

/* Per tensor or per line of the axis that is not summed; transposed or not; only what the backend
 * reads is there. */
static nd_matrix operand(const nd_side *ref, int64_t lines, int64_t k, bool stored_along_k,
                         nd_dtype format, bool vector, int64_t gap)
{
    nd_matrix x = {.granularity = !vector          ? ND_PER_TENSOR
                                  : stored_along_k ? ND_PER_ROW
                                                   : ND_PER_COLUMN};
    int64_t rows = stored_along_k ? lines : k, columns = stored_along_k ? k : lines;
    int64_t groups = vector ? lines : 1;
    nd_tensor values = nd_random_2d(ND_DTYPE_BF16, rows, columns, 0, 1.0f);
    nd_tensor amax = nd_random_1d(ND_DTYPE_F32, groups, 1.0f);
    const nd_tensor codes = stored_along_k ? nd_blank_2d(format, rows, columns, gap)
                                           : nd_blank_2d(format, columns, rows, gap);
    x.stored = stored_along_k ? codes : (nd_tensor){0};
    x.scale = nd_random_1d(ND_DTYPE_F32, groups, 1.0f).data;
    /* Scales of tensors lie beside each other, so at no multiple of 16 bytes. */
    x.inverse = (float *)nd_random_1d(ND_DTYPE_F32, groups + 1, 1.0f).data + !vector;
    ND_RUN(ref, amax, .amax = amax.data, .x = values, .granularity = x.granularity);
    ND_RUN(ref, fp8_scale, .scale = x.scale, .inverse = x.inverse, .amax = amax.data,
           .count = groups, .format = format);
    ND_RUN(ref, make_form, .out = x, .transposed = stored_along_k ? (nd_tensor){0} : codes,
           .x = values);
    x.stored = codes;
    x.transposed = !stored_along_k;
    return x;
}

/*
 * The double sums in F32: as for matmul. A tensor core cuts a partial sum S to about 14 bits until
 * it is promoted after 128 products, that is 4 additions of 32, each off by at most 2^-13 |S|, all
 * to one side: 2^-11 |S| a promotion. |S| is the result's own size, and at most about 11 of a
 * random walk beside it: 2^-11 11 a promotion, at random over k / 128 of them; twice that.
 */
static nd_tolerance bound(const nd_backend *backend, int64_t k)
{
    nd_tolerance t = {.relative = 3.0 * nd_eps_f32, .absolute = 2.0 * (double)(k + 4) * nd_eps_f32};
    if (nd_has_tensor_cores(backend)) {
        t.relative += 0x1p-11;
        t.absolute += 0.01 * sqrt((double)k / 128.0 + 1.0);
    }
    return t;
}

static void multiply(const nd_backend *backend, int shape, int variant)
{
    int64_t m = shapes[shape].m, n = shapes[shape].n, k = shapes[shape].k, gap = shapes[shape].gap;
    bool at = variant & 1, bt = variant & 2, va = variant & 4, vb = variant & 8;
    float beta = variant & 16 ? 1.0f : 0.0f;
    nd_dtype out = variant & 32 ? ND_DTYPE_BF16 : ND_DTYPE_F32;
    nd_matrix a =
        operand(&backend->ref, m, k, !at, shape & 1 ? ND_DTYPE_F8_E5M2 : ND_DTYPE_F8_E4M3, va, gap);
    nd_matrix b = operand(&backend->ref, n, k, bt, ND_DTYPE_F8_E4M3, vb, gap);
    nd_tensor c = nd_random_2d(out, m, n, gap, 1.0f), result[2];
    void *scratch =
        malloc(backend->ref.ops->product_scratch(backend->ref.device, m, n, k, ND_DTYPE_BF16) + 1);
    if (beta == 0.0f) {
        nd_case_poison(c);
    }
    for (int s = 0; s < 2; s++) {
        result[s] = nd_clone(c);
        ND_RUN(&backend->sides[s], product, .c = result[s], .a = a, .a_transposed = at, .b = b,
               .b_transposed = bt, .beta = beta, .scratch = scratch);
    }
    char name[64];
    snprintf(name, sizeof name, "matmul_fp8 of shape %d, variant %d", shape, variant);
    nd_expect_close(backend->name, name, result[1], result[0], bound(backend, k));
    free(scratch);
    nd_case_free();
}

static void check_all(const nd_backend *backend)
{
    for (int variant = 0; variant < 64; variant++) {
        for (int shape = 0; shape < SHAPES; shape++) {
            multiply(backend, shape, variant);
        }
    }
}

Test(matmul_fp8_cuda, forms_and_scales)
{
    nd_best_backend(check_all);
}

/* A library without vectors of scales: the product of the codes, then our kernel. */
Test(matmul_fp8_cuda, an_older_library)
{
    setenv("ND_DOUBLE_CUBLASLT", "120800", 1);
    nd_best_backend(check_all);
}

/* On the double alone; elsewhere the library does what it does. */
Test(matmul_fp8_cuda, a_library_that_refuses_vectors_at_the_product)
{
    setenv("ND_DOUBLE_LT_VECTORS", "product", 1);
    nd_best_backend(check_all);
}

TEST_BEST_BACKEND(matmul_fp8_cuda, extents_that_are_no_multiples_of_16_are_said)
{
    nd_stream stream = backend->side.stream;
    nd_matrix a = operand(&backend->ref, 24, 32, true, ND_DTYPE_F8_E4M3, false, 0);
    nd_matrix b = operand(&backend->ref, 16, 32, true, ND_DTYPE_F8_E4M3, false, 0);
    nd_tensor c = nd_random_2d(ND_DTYPE_F32, 24, 16, 0, 1.0f);
    cr_expect_eq(
        ND_CALL(backend->side.ops, &stream, product, .c = c, .a = a, .b = b, .b_transposed = true),
        ND_ERR_INTERNAL);
    cr_expect(strstr(nd_error_last()->message, "multiples of 16"), "%s", nd_error_last()->message);
    nd_case_free();
}
