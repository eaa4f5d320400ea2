// SPDX-License-Identifier: Apache-2.0
/* Cases that the op suites do not reach: more ranges than a launch of an optimizer takes, and the
 * kernel that is not an op, which scales products. */
#include <criterion/criterion.h>
#include <math.h>

#include "kernels/cuda/kernels.h"
#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
/* More ranges than one launch takes, some empty, ending anywhere; the copy is the updated
 * parameter, rounded. */
TEST_EACH_BACKEND(optimizer, ranges_and_the_resident_copy)
{
    enum { COUNT = 40000, RANGES = 150 };
    static const nd_adamw o = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.7f, 0.19f, 0.0975f};
    /* 1: addresses that are not whole packs; 2: only those of the copy. */
    for (int shift = 0; shift < 3; shift++) {
        nd_tensor p = nd_random_1d(ND_DTYPE_F32, COUNT + 1, 1.0f), grad = nd_clone(p);
        nd_tensor m = nd_clone(p), v = nd_clone(p),
                  copy = nd_random_1d(ND_DTYPE_BF16, COUNT + 1, 1.0f);
        nd_flat_range ranges[RANGES];
        nd_tensor side[2][3], copies[2];
        for (int64_t i = 0; i <= COUNT; i++) {
            nd_put(v, i, 1.0f + fabsf(nd_get(v, i)));
        }
        for (int64_t r = 0; r < RANGES; r++) { /* a few elements lie between the ranges */
            int64_t begin = COUNT * r / RANGES + r % 3, end = COUNT * (r + 1) / RANGES - r % 5;
            ranges[r] = (nd_flat_range){begin, r % 17 == 4 ? begin : end, r % 2 == 1};
        }
        for (int s = 0; s < 2; s++) {
            nd_stream stream = backend->ref.stream;
            side[s][0] = nd_clone(p);
            side[s][1] = nd_clone(m);
            side[s][2] = nd_clone(v);
            copies[s] = nd_clone(copy);
            float *x[3];
            for (int k = 0; k < 3; k++) {
                x[k] = (float *)side[s][k].data + shift % 2;
            }
            const float *g = (const float *)grad.data + shift % 2;
            for (int r = 0; r < RANGES; r++) { /* every third has none */
                nd_bf16 *resident = (nd_bf16 *)copies[s].data + (shift + 1) / 2;
                ranges[r].copy = r % 3 == 1 ? NULL : resident + ranges[r].begin;
            }
            ND_OK_OR_FAIL(ND_CALL(backend->sides[s].ops, &stream, adamw, .hyper = o, .p = x[0],
                                  .m = x[1], .v = x[2], .grad = g, .ranges = ranges,
                                  .range_count = RANGES));
        }
        /* Terms up to about 5 and a step whose divisor is at least sqrt(v / bias2) > 1: a few
         * roundings. */
        nd_tolerance tolerance = {.absolute = 16 * nd_eps_f32};
        nd_expect_close(backend->name, "p", side[1][0], side[0][0], tolerance);
        nd_expect_close(backend->name, "m", side[1][1], side[0][1], tolerance);
        nd_expect_close(backend->name, "v", side[1][2], side[0][2], tolerance);
        nd_expect_close(backend->name, "copy", copies[1], copies[0], tolerance);
        nd_case_free();
    }
}

static void rescale_once(const nd_backend *backend, nd_dtype dtype, int64_t m, int64_t n,
                         int64_t gap, int choice)
{
    bool a_rows = choice & 1, b_columns = choice & 2;
    float beta = choice & 4 ? 1.0f : 0.0f;
    nd_tensor product = nd_random_2d(ND_DTYPE_F32, m, n, gap, 100.0f);
    nd_tensor c = nd_random_2d(dtype, m, n, gap, 1.0f), want = nd_clone(c);
    nd_tensor a = nd_random_1d(ND_DTYPE_F32, a_rows ? m : 1, 1.0f);
    nd_tensor b = nd_random_1d(ND_DTYPE_F32, b_columns ? n : 1, 1.0f);
    if (beta == 0.0f) {
        nd_case_poison(c); /* not read */
    }
    for (int64_t i = 0; i < m * n; i++) {
        double by = (double)nd_get(a, a_rows ? i / n : 0) * nd_get(b, b_columns ? i % n : 0);
        double before = beta == 0.0f ? 0.0 : nd_get(want, i);
        nd_put(want, i, (float)(nd_get(product, i) * by + before));
    }
    nd_fp8_rescale_args args = {.c = c,
                                .product = product,
                                .a = a.data,
                                .b = b.data,
                                .a_rows = a_rows,
                                .b_columns = b_columns,
                                .beta = beta};
    cr_assert_eq(nd_cuda_fp8_rescale(NULL, &args), 0);
    /* Two products and a sum of terms of up to about 2000. */
    nd_expect_close(backend->name, "fp8_rescale", c, want,
                    (nd_tolerance){.relative = 2 * nd_eps_f32, .absolute = 2000 * nd_eps_f32});
    nd_case_free();
}

TEST_EACH_BACKEND(fp8, scales_after_a_product)
{
    for (int choice = 0; choice < 8; choice++) {
        for (int d = 0; d < 2; d++) {
            rescale_once(backend, dtypes[d], 5, 7, 2, choice);
            rescale_once(backend, dtypes[d], 48, 80, 0, choice);
            rescale_once(backend, dtypes[d], 17, 1040, 16, choice);
        }
    }
}
