// SPDX-License-Identifier: Apache-2.0
/* accumulate, cast, sum_squares, digest and the optimizers. */
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};

/* Layouts of one count: flat, gaps in one tensor, in all, and 4-d views over 2-d ones. */
typedef enum layout { FLAT, STRIDED, MIXED, FOUR_AXES, LAYOUTS } layout;

static nd_tensor operand(nd_dtype dtype, layout how, int which, int64_t n, int64_t C)
{
    switch (how) {
    case FLAT:
        return nd_random_1d(dtype, n * C, 1.0f);
    case STRIDED:
        return nd_random_2d(dtype, n, C, 7, 1.0f);
    case MIXED:
        return nd_random_2d(dtype, n, C, which == 1 ? 9 : 0, 1.0f);
    default:
        return nd_random(dtype, 4, (int64_t[]){1, n, 2, C / 2}, which == 0 ? 4 : 0, 1.0f);
    }
}

static void add_once(const nd_backend *backend, int types, layout how, int64_t n, int64_t C)
{
    nd_tensor x = operand(dtypes[types & 1], how, 1, n, C);
    nd_tensor to = operand(dtypes[types >> 1 & 1], how, 0, n, C), acc[2], cast[2];
    nd_tensor f32 = operand(ND_DTYPE_F32, how, 0, n, C);
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        acc[s] = nd_clone(f32);
        cast[s] = nd_clone(to);
        ND_RUN(side, accumulate, .acc = acc[s], .x = x);
        ND_RUN(side, cast, .out = cast[s], .x = x);
    }
    /* One F32 addition, or one rounding: exact in any order of evaluation. */
    nd_expect_same(backend->name, "accumulate", acc[1], acc[0]);
    nd_expect_same(backend->name, "cast", cast[1], cast[0]);
    nd_case_free();
}

/* Gaps between rows, without a second tensor, in place of either. */
static void scale_once(const nd_backend *backend, nd_dtype dtype, int what, int64_t C)
{
    const float scale = 0.22f;
    nd_tensor x = nd_random_2d(dtype, 37, C, what == 1 ? 8 : 0, 1.0f);
    nd_tensor plus = nd_random_2d(dtype, 37, C, what == 2 ? 8 : 0, 1.0f), out[2];
    nd_tensor to = nd_random_2d(dtype, 37, C, what == 2 ? 4 : 0, 1.0f);
    for (int s = 0; s < 2; s++) {
        const nd_tensor from = nd_clone(x), add = nd_clone(plus);
        out[s] = what == 3 ? from : what == 4 ? add : nd_clone(to);
        ND_RUN(&backend->sides[s], axpy, .out = out[s], .x = from,
               .plus = what == 0 ? (nd_tensor){0} : add, .scale = scale);
    }
    /* The rounding of the product, which is below 4 and may be joined with the sum's. */
    nd_expect_close(backend->name, "axpy", out[1], out[0],
                    (nd_tolerance){.absolute = 4 * nd_eps_f32});
    nd_case_free();
}

/* Every BF16 widened, and F32 numbers around every rounding boundary, of every exponent,
 * narrowed. */
TEST_EACH_BACKEND(elementwise, casts_of_every_bf16_and_of_every_rounding_boundary)
{
    enum { CODES = 65536, PATTERNS = 6 };
    static const uint32_t lower[PATTERNS] = {0x0000, 0x7fff, 0x8000, 0x8001, 0xffff, 0x0001};
    nd_tensor narrow = nd_random_1d(ND_DTYPE_BF16, CODES * PATTERNS, 1.0f);
    nd_tensor wide = nd_random_1d(ND_DTYPE_F32, CODES * PATTERNS, 1.0f), back[2], up[2];
    for (uint32_t i = 0; i < CODES * PATTERNS; i++) {
        uint32_t bits = (i / PATTERNS) << 16 | lower[i % PATTERNS];
        memcpy((float *)wide.data + i, &bits, sizeof bits);
        ((nd_bf16 *)narrow.data)[i] = (nd_bf16)(i / PATTERNS);
    }
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        back[s] = nd_clone(narrow);
        up[s] = nd_clone(wide);
        ND_RUN(side, cast, .out = back[s], .x = wide);
        ND_RUN(side, cast, .out = up[s], .x = narrow);
    }
    nd_expect_same(backend->name, "cast to bf16", back[1], back[0]);
    nd_expect_same(backend->name, "cast to f32", up[1], up[0]);
}

static void squares_once(const nd_backend *backend, int64_t count)
{
    nd_tensor x = nd_random_1d(ND_DTYPE_F32, count, 1.0f);
    double sum[2] = {2.5, 2.5};
    for (int s = 0; s < 2; s++) {
        ND_RUN(&backend->sides[s], sum_squares, .out = &sum[s], .x = x.data, .count = count);
    }
    /* F64 sums of positive terms in two orders: each order errs by at most count x 2^-53. */
    double allowed = 2.0 * (double)(count + 1) * 0x1p-53 * sum[0];
    cr_assert(fabs(sum[1] - sum[0]) <= allowed, "%s: %.17g, the reference has %.17g", backend->name,
              sum[1], sum[0]);
    nd_case_free();
}

/* A copy, and a sum of n terms each of whose roundings is one of the running sum: Higham's
 * (n - 1) u sum |x|. */
static void bias_once(const nd_backend *backend, nd_dtype dtype, int64_t n, int64_t C)
{
    nd_tensor bias = nd_random_1d(dtype, C, 1.0f), before = nd_random_1d(ND_DTYPE_F32, C, 1.0f);
    nd_tensor x = nd_random_2d(dtype, n, C, 5, 1.0f), out[2], sum[2];
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        out[s] = nd_clone(x);
        sum[s] = nd_clone(before);
        ND_RUN(side, bias_bwd, .dbias = sum[s], .dout = x);
        ND_RUN(side, bias_fwd, .out = out[s], .bias = bias);
    }
    nd_expect_same(backend->name, "bias_fwd", out[1], out[0]);
    for (int64_t c = 0; c < C; c++) {
        double sizes = fabs(((float *)before.data)[c]);
        for (int64_t i = 0; i < n; i++) {
            sizes += fabs(dtype == ND_DTYPE_F32
                              ? (double)((float *)x.data)[i * x.stride[0] + c]
                              : (double)nd_bf16_to_f32(((nd_bf16 *)x.data)[i * x.stride[0] + c]));
        }
        const double a = ((float *)sum[1].data)[c], b = ((float *)sum[0].data)[c];
        cr_assert_leq(fabs(a - b), (double)(n + 1) * 0x1p-24 * sizes,
                      "%s: column %ld of %ld rows is %.9g, not %.9g", backend->name, (long)c,
                      (long)n, a, b);
    }
    nd_case_free();
}

/* Sums of integers are exact in any order. */
static void digest_once(const nd_backend *backend, int64_t count)
{
    nd_tensor x = nd_random_1d(ND_DTYPE_F32, count, 1.0f);
    uint64_t sums[2] = {5, 5}, changed = 5;
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        nd_stream own = side->stream;
        ND_OK_OR_FAIL(
            ND_CALL(side->ops, &own, digest, .out = &sums[s], .x = x.data, .count = count));
    }
    cr_assert_eq(sums[0], sums[1], "%s: %llx, the reference has %llx", backend->name,
                 (unsigned long long)sums[1], (unsigned long long)sums[0]);
    if (count > 0) {
        ((uint32_t *)x.data)[count / 2] ^= 1u << 31;
        ND_RUN(&backend->side, digest, .out = &changed, .x = x.data, .count = count);
        cr_assert_neq(changed, sums[0], "%s: a flipped sign goes unnoticed", backend->name);
    }
    nd_case_free();
}

static void normal_once(const nd_backend *backend, int64_t count, uint64_t first)
{
    nd_tensor out[2];
    for (int s = 0; s < 2; s++) {
        out[s] = nd_random_1d(ND_DTYPE_F32, count + 1, 1.0f);
        ((float *)out[s].data)[count] = 7.0f;
        ND_RUN(&backend->sides[s], random_normal, .out = out[s].data, .count = count,
               .deviation = 0.02f, .seed = 0x123456789abcdefu, .random_stream = 1ull << 33 | 5,
               .first = first);
    }
    cr_assert_eq(memcmp(out[0].data, out[1].data, (size_t)(count + 1) * 4), 0,
                 "%s: other bits than the reference in %lld values from %llu on", backend->name,
                 (long long)count, (unsigned long long)first);
    nd_case_free();
}

static const nd_adamw settings = {.lr = 1e-2f,
                                  .beta1 = 0.9f,
                                  .beta2 = 0.95f,
                                  .eps = 1e-8f,
                                  .weight_decay = 0.1f,
                                  .grad_scale = 0.7f,
                                  .bias1 = 0.19f,
                                  .bias2 = 0.0975f};

enum { RANGES = 3 };

/* Where the ranges' copies lie, `want` gets what the side's cast makes of the parameters. */
static void cast_ranges(const nd_side *side, const nd_flat_range *ranges, nd_tensor p,
                        nd_tensor copies, nd_tensor want)
{
    for (int r = 0; r < RANGES; r++) {
        int64_t n = ranges[r].end - ranges[r].begin;
        if (ranges[r].copy) {
            int64_t at = ranges[r].copy - (nd_bf16 *)copies.data;
            nd_tensor to = nd_tensor_1d((nd_bf16 *)want.data + at, ND_DTYPE_BF16, n);
            nd_tensor from = nd_tensor_1d((float *)p.data + ranges[r].begin, ND_DTYPE_F32, n);
            ND_RUN(side, cast, .out = to, .x = from);
        }
    }
}

/* The ranges' amaxes before and after: merged with those of the updated parameters, by the side's
 * own op. */
typedef struct range_amaxes {
    float got[RANGES], want[RANGES];
} range_amaxes;

/* Gives amaxes to the ranges with a copy, where the side measures: one that is exceeded, and one
 * that stays. */
static void ask_amaxes(const nd_side *side, nd_flat_range *ranges, range_amaxes *x)
{
    *x = (range_amaxes){.got = {0.0f, 0.0f, 100.0f}, .want = {0.0f, 0.0f, 100.0f}};
    for (int r = 0; r < RANGES; r++) {
        ranges[r].amax = side->ops->optimizer_measures && ranges[r].copy ? &x->got[r] : NULL;
    }
}

static void expect_amaxes(const nd_side *side, const nd_flat_range *ranges, nd_tensor p,
                          range_amaxes *x)
{
    for (int r = 0; r < RANGES; r++) {
        nd_tensor of = nd_tensor_1d((float *)p.data + ranges[r].begin, ND_DTYPE_F32,
                                    ranges[r].end - ranges[r].begin);
        if (ranges[r].amax) {
            ND_RUN(side, amax, .amax = &x->want[r], .x = of, .granularity = ND_PER_TENSOR,
                   .merge = true);
        }
        cr_assert(x->got[r] == x->want[r] || (isnan(x->got[r]) && isnan(x->want[r])),
                  "%s: amax %d is %.9g, not %.9g", side->ops->name, r, (double)x->got[r],
                  (double)x->want[r]);
    }
}

static void optimizers_once(const nd_backend *backend, int64_t count)
{
    /* A range left out in the middle must stay as it is. */
    nd_flat_range ranges[] = {
        {0, count / 3, true}, {count / 3, count / 2, false}, {count / 2 + count / 8, count, true}};
    nd_tensor p = nd_random_1d(ND_DTYPE_F32, count, 1.0f),
              grad = nd_random_1d(ND_DTYPE_F32, count, 1.0f);
    nd_tensor m = nd_random_1d(ND_DTYPE_F32, count, 1.0f),
              v = nd_random_1d(ND_DTYPE_F32, count, 1.0f);
    nd_tensor adam[2][3], sgd[2], copies[2];
    for (int64_t i = 0; i < count; i++) {
        nd_put(v, i, fabsf(nd_get(v, i)));
    }
    for (int s = 0; s < 2; s++) {
        const nd_side *side = &backend->sides[s];
        range_amaxes amaxes;
        adam[s][0] = nd_clone(p);
        adam[s][1] = nd_clone(m);
        adam[s][2] = nd_clone(v);
        sgd[s] = nd_clone(p);
        copies[s] = nd_random_1d(ND_DTYPE_BF16, 2 * count, 1.0f);
        nd_tensor want = nd_clone(copies[s]);
        ranges[0].copy = copies[s].data; /* not where the parameters lie; the second has none */
        ranges[2].copy = (nd_bf16 *)copies[s].data + ranges[0].end;
        ask_amaxes(side, ranges, &amaxes);
        ND_RUN(side, adamw, .hyper = settings, .p = adam[s][0].data, .m = adam[s][1].data,
               .v = adam[s][2].data, .grad = grad.data, .ranges = ranges, .range_count = RANGES);
        expect_amaxes(side, ranges, adam[s][0], &amaxes);
        cast_ranges(side, ranges, adam[s][0], copies[s], want);
        ranges[0].copy += count;
        ranges[2].copy += count;
        ask_amaxes(side, ranges, &amaxes);
        ND_RUN(side, sgd, .hyper = settings, .p = sgd[s].data, .grad = grad.data, .ranges = ranges,
               .range_count = RANGES);
        expect_amaxes(side, ranges, sgd[s], &amaxes);
        cast_ranges(side, ranges, sgd[s], copies[s], want);
        nd_expect_same(side->ops->name, "copies of the parameters", copies[s], want);
    }
    /*
     * A few roundings of terms of size up to about 5. The step of AdamW is lr (m / bias1) / sqrt(v
     * / bias2): its relative error of some 8 eps counts in proportion to the step, which is below 5
     * here but where v is nearly 0, so that elements with a tiny v are compared by the step's own
     * size: |m| lr / bias1 / sqrt(v / bias2) <= 5 for v > 1e-5.
     */
    nd_tolerance tolerance = {.absolute = 40 * nd_eps_f32};
    for (int64_t i = 0; i < count; i++) {
        if (nd_get(adam[0][2], i) < 1e-5f) {
            nd_put(adam[0][0], i, 0.0f);
            nd_put(adam[1][0], i, 0.0f);
        }
    }
    nd_expect_close(backend->name, "adamw p", adam[1][0], adam[0][0], tolerance);
    nd_expect_close(backend->name, "adamw m", adam[1][1], adam[0][1], tolerance);
    nd_expect_close(backend->name, "adamw v", adam[1][2], adam[0][2], tolerance);
    nd_expect_close(backend->name, "sgd p", sgd[1], sgd[0], tolerance);
    for (int64_t i = ranges[1].end; i < ranges[2].begin; i++) {
        cr_assert(nd_get(adam[1][1], i) == nd_get(m, i) && nd_get(sgd[1], i) == nd_get(p, i),
                  "%s: element %lld is in no range and was changed", backend->name, (long long)i);
    }
    nd_case_free();
}

/* More than one thread's share of a range now and then. */
TEST_EACH_DRAW(optimizer, drawn)
{
    optimizers_once(backend, draw_once_in(d, 6) ? 200003 : draw_range(d, 8, 5000));
}

/* Around the packs and blocks of an op, more than one thread's share, or any number. */
static int64_t draw_count(nd_draw *d)
{
    return DRAW(d, 0, 1, 15, 16, 17, 255, 257, 16384, 16385, 100003, draw_extent(d, 2000),
                draw_extent(d, 40000));
}

TEST_EACH_DRAW(elementwise, drawn)
{
    const int64_t first = DRAW(d, 0, 0xfffffff9, 1ll << 40, draw_range(d, 0, 1 << 20));
    for (int t = 0; t < 2; t++) {
        add_once(backend, (int)draw_range(d, 0, 3), (layout)draw_range(d, 0, LAYOUTS - 1),
                 draw_range(d, 0, 70), 2 * draw_extent(d, 270));
        scale_once(backend, dtypes[t], (int)draw_range(d, 0, 4), draw_extent(d, 530));
        bias_once(backend, dtypes[t], draw_range(d, 1, 70), draw_extent(d, 600));
        squares_once(backend, draw_count(d));
        digest_once(backend, draw_count(d));
        normal_once(backend, draw_count(d), (uint64_t)first);
    }
}
