// SPDX-License-Identifier: Apache-2.0
/* What the kernels do beyond the op table: fused amax and casts, resident copies, scales of
 * products, fills. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "kernels/cuda/kernels.h"
#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};
static const nd_dtype formats[] = {ND_DTYPE_F8_E4M3, ND_DTYPE_F8_E5M2};
/* Scalars, packs, rows of several packs a thread, gaps of whole packs and of less. */
static const struct {
    int64_t n, C, gap;
} shapes[] = {{1, 1, 0}, {5, 13, 3}, {33, 64, 0}, {9, 1056, 16}, {40, 520, 8}, {2, 8208, 0}};

enum { SHAPES = sizeof shapes / sizeof shapes[0] };

typedef struct fused {
    nd_tensor stored, codes;
    float amax;
} fused;

/* Results stored, cast and measured one after the other: what the fused kernel must give, bit for
 * bit. */
static void expect_fused(const nd_side *ref, const char *what, nd_tensor want, fused got,
                         float before, float scale, bool stored)
{
    nd_stream stream = ref->stream;
    nd_tensor codes = nd_clone(got.codes);
    float inverse = 1.0f / scale, amax = before;
    nd_fp8 cast = {.codes = codes, .scale = &scale, .inverse = &inverse};
    ND_OK_OR_FAIL(ref->ops->fp8_cast(&stream, cast, &amax, want));
    if (stored) {
        nd_expect_same(what, "stored", got.stored, want);
    }
    nd_expect_same(what, "codes", got.codes, codes);
    cr_assert(got.amax == amax, "%s: amax %.9g, not %.9g", what, got.amax, amax);
}

static void norm_once(const nd_side *ref, const nd_side *gpu, nd_dtype dtype, nd_dtype format,
                      int shape, bool stored)
{
    int64_t n = shapes[shape].n, C = shapes[shape].C, gap = shapes[shape].gap;
    nd_tensor x = nd_random_2d(dtype, n, C, gap, 1.0f),
              delta = nd_random_2d(dtype, n, C, gap, 1.0f);
    nd_tensor weight = nd_random_1d(dtype, C, 1.0f), rstd = nd_random_1d(ND_DTYPE_F32, n, 1.0f);
    nd_tensor sum = nd_clone(x), plain = nd_clone(x), none = {0};
    float scale = 37.5f, before = 0.25f;
    fused got = {nd_clone(x), nd_blank_2d(format, n, C, gap), before};
    nd_cuda_fuse fuse = {.amax = &got.amax, .codes = got.codes, .scale = &scale};
    nd_stream stream = gpu->stream;
    ND_OK_OR_FAIL(gpu->ops->rmsnorm_fwd(&stream, plain, sum, rstd, x, delta, weight, 1e-5f));
    cr_assert_eq(nd_cuda_rmsnorm_fwd(NULL, stored ? got.stored : none, sum, rstd, x, delta, weight,
                                     1e-5f, &fuse),
                 0);
    expect_fused(ref, "rmsnorm_fwd", plain, got, before, scale, stored);
    nd_case_free();
}

static void swiglu_once(const nd_side *ref, const nd_side *gpu, nd_dtype dtype, nd_dtype format,
                        int shape, bool stored)
{
    int64_t n = shapes[shape].n, F = shapes[shape].C, gap = shapes[shape].gap;
    nd_tensor gate = nd_random_2d(dtype, n, F, gap, 2.0f),
              up = nd_random_2d(dtype, n, F, gap, 1.0f);
    nd_tensor dout = nd_random_2d(dtype, n, F, gap, 1.0f), plain[3], none = {0};
    float scale[3] = {37.5f, 5000.0f, 0.5f}, before = 100.0f;
    fused got[3];
    nd_cuda_fuse fuse[3];
    nd_stream stream = gpu->stream;
    for (int i = 0; i < 3; i++) {
        plain[i] = nd_clone(gate);
        got[i] = (fused){nd_clone(gate), nd_blank_2d(format, n, F, gap), before};
        fuse[i] = (nd_cuda_fuse){&got[i].amax, got[i].codes, &scale[i]};
    }
    ND_OK_OR_FAIL(gpu->ops->swiglu_fwd(&stream, plain[0], gate, up));
    ND_OK_OR_FAIL(gpu->ops->swiglu_bwd(&stream, plain[1], plain[2], dout, gate, up));
    cr_assert_eq(nd_cuda_swiglu_fwd(NULL, stored ? got[0].stored : none, gate, up, &fuse[0]), 0);
    cr_assert_eq(nd_cuda_swiglu_bwd(NULL, stored ? got[1].stored : none,
                                    stored ? got[2].stored : none, dout, gate, up, &fuse[1],
                                    &fuse[2]),
                 0);
    expect_fused(ref, "swiglu_fwd", plain[0], got[0], before, scale[0], stored);
    expect_fused(ref, "swiglu_bwd dgate", plain[1], got[1], before, scale[1], stored);
    expect_fused(ref, "swiglu_bwd dup", plain[2], got[2], before, scale[2], stored);
    nd_case_free();
}

static void check_fused(const nd_side *ref, const nd_backend *backend)
{
    for (int shape = 0; shape < SHAPES; shape++) {
        for (int choice = 0; choice < 8; choice++) {
            norm_once(ref, &backend->side, dtypes[choice & 1], formats[choice >> 1 & 1], shape,
                      choice >> 2);
            swiglu_once(ref, &backend->side, dtypes[choice & 1], formats[choice >> 1 & 1], shape,
                        choice >> 2);
        }
    }
}

Test(fuse, codes_and_amax_are_those_of_the_stored_result)
{
    nd_each_backend(check_fused);
}

/* Only an amax, and only of one of the two results; a NaN shows in it. */
static void check_amax_alone(const nd_side *ref, const nd_backend *backend)
{
    nd_tensor gate = nd_random_2d(ND_DTYPE_BF16, 20, 512, 0, 1.0f), up = nd_clone(gate);
    nd_tensor dout = nd_clone(gate), dgate = nd_clone(gate), dup = nd_clone(gate);
    float amax[2] = {0.0f, 0.0f}, want;
    nd_cuda_fuse fuse = {.amax = &amax[0]};
    nd_stream stream = ref->stream;
    cr_assert_eq(nd_cuda_swiglu_bwd(NULL, dgate, dup, dout, gate, up, NULL, &fuse), 0);
    ND_OK_OR_FAIL(ref->ops->amax(&stream, &want, dup, ND_PER_TENSOR, false));
    cr_assert(amax[0] == want && want > 0.0f);
    nd_put(gate, 20 * 512 - 1, NAN);
    fuse.amax = &amax[1];
    cr_assert_eq(nd_cuda_swiglu_fwd(NULL, dup, gate, up, &fuse), 0);
    cr_assert(isnan(amax[1]));
}

Test(fuse, amax_without_codes)
{
    nd_each_backend(check_amax_alone);
}

/* More ranges than one launch takes, some empty, ending anywhere; the copy is the updated
 * parameter, rounded. */
static void check_resident(const nd_side *ref, const nd_backend *backend)
{
    enum { COUNT = 40000, RANGES = 150 };
    static const nd_adamw o = {1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 0.7f, 0.19f, 0.0975f};
    for (int shift = 0; shift < 2; shift++) { /* 1: addresses that are not whole packs */
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
            nd_stream stream = ref->stream;
            side[s][0] = nd_clone(p);
            side[s][1] = nd_clone(m);
            side[s][2] = nd_clone(v);
            copies[s] = nd_clone(copy);
            float *x[3];
            for (int k = 0; k < 3; k++) {
                x[k] = (float *)side[s][k].data + shift;
            }
            const float *g = (const float *)grad.data + shift;
            nd_bf16 *resident = (nd_bf16 *)copies[s].data + shift;
            if (s == 0) {
                ND_OK_OR_FAIL(ref->ops->adamw(&stream, &o, x[0], x[1], x[2], g, ranges, RANGES));
                for (int r = 0; r < RANGES; r++) {
                    for (int64_t i = ranges[r].begin; i < ranges[r].end; i++) {
                        resident[i] = nd_bf16_from_f32(x[0][i]);
                    }
                }
            } else {
                cr_assert_eq(nd_cuda_adamw(NULL, &o, x[0], x[1], x[2], g, resident, ranges, RANGES),
                             0);
            }
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

Test(optimizer, ranges_and_the_resident_copy)
{
    nd_each_backend(check_resident);
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
    cr_assert_eq(nd_cuda_fp8_rescale(NULL, c, product, a.data, a_rows, b.data, b_columns, beta), 0);
    /* Two products and a sum of terms of up to about 2000. */
    nd_expect_close(backend->name, "fp8_rescale", c, want,
                    (nd_tolerance){.relative = 2 * nd_eps_f32, .absolute = 2000 * nd_eps_f32});
    nd_case_free();
}

static void check_rescale(const nd_side *ref, const nd_backend *backend)
{
    for (int choice = 0; choice < 8; choice++) {
        for (int d = 0; d < 2; d++) {
            rescale_once(backend, dtypes[d], 5, 7, 2, choice);
            rescale_once(backend, dtypes[d], 48, 80, 0, choice);
            rescale_once(backend, dtypes[d], 17, 1040, 16, choice);
        }
    }
}

Test(fp8, scales_after_a_product)
{
    nd_each_backend(check_rescale);
}

static void check_fill(const nd_side *ref, const nd_backend *backend)
{
    static const int64_t counts[] = {0, 1, 8, 12, 4096, 100003};
    for (int c = 0; c < 6; c++) {
        for (int d = 0; d < 2; d++) {
            nd_tensor x = nd_random_1d(dtypes[d], counts[c], 1.0f), want = nd_clone(x);
            for (int64_t i = 0; i < counts[c]; i++) {
                nd_put(want, i, -1.7f);
            }
            cr_assert_eq(nd_cuda_fill(NULL, x, -1.7f), 0);
            nd_expect_same(backend->name, "fill", x, want);
        }
    }
}

Test(elementwise, fill)
{
    nd_each_backend(check_fill);
}
