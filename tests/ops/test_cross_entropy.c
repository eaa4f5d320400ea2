// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <float.h>
#include <math.h>

#include "tests/ops/conformance.h"

static const nd_dtype dtypes[] = {ND_DTYPE_F32, ND_DTYPE_BF16};

typedef struct ce_case {
    int64_t n, V, valid, gap;
    float deviation;
} ce_case;

static const ce_case cases[] = {
    {1, 1, 1, 0, 1.0f},       {9, 13, 11, 3, 2.0f},     {40, 64, 64, 0, 30.0f},
    {6, 9001, 9000, 7, 4.0f}, {600, 257, 257, 0, 1.0f}, {3, 16, 0, 0, 1.0f},
    {0, 16, 16, 0, 1.0f},
};

enum { CASES = sizeof cases / sizeof cases[0], FIRST = 20 };

/* Labels in the slice, in others, and not counted. */
static nd_tensor random_labels(int64_t n, int64_t V)
{
    nd_tensor labels = nd_random_ids(n, 0, FIRST + V + 10);
    for (int64_t i = 0; i < n; i += 3) {
        ((int32_t *)labels.data)[i] = i % 2 ? -100 : (int32_t)(FIRST + i % V);
    }
    return labels;
}

typedef struct ce_result {
    nd_tensor max, sum, target, rescaled, logits;
    double loss;
} ce_result;

static ce_result run(const nd_side *side, nd_tensor logits, nd_tensor labels, nd_tensor global_max,
                     const ce_case *c, const ce_result *stats)
{
    nd_tensor vector = nd_random_1d(ND_DTYPE_F32, c->n, 1.0f);
    ce_result r = {.max = nd_clone(vector), .sum = nd_clone(vector), .target = vector, .loss = 1.5};
    ND_RUN(side, ce_stats, .row_max = r.max, .row_sum = r.sum, .target = r.target, .logits = logits,
           .labels = labels, .first = FIRST, .valid = c->valid);
    stats = stats ? stats : &r; /* what follows starts from the same statistics on both sides */
    r.rescaled = nd_clone(stats->sum);
    ND_RUN(side, ce_rescale, .row_sum = r.rescaled, .row_max = stats->max,
           .global_max = global_max);
    ND_RUN(side, ce_loss, .loss_sum = &r.loss, .max = stats->max, .sum = stats->sum,
           .target = stats->target, .labels = labels);
    r.logits = nd_clone(logits);
    int64_t count = 4;
    ND_RUN(side, ce_bwd, .logits = r.logits, .max = stats->max, .sum = stats->sum, .labels = labels,
           .first = FIRST, .valid = c->valid, .count = &count);
    return r;
}

static void check_case(const nd_backend *backend, nd_dtype dtype, const ce_case *c)
{
    nd_tensor logits = nd_random_2d(dtype, c->n, c->V, c->gap, c->deviation);
    nd_tensor labels = random_labels(c->n, c->V);
    nd_tensor global_max = nd_random_1d(ND_DTYPE_F32, c->n, 0.0f);
    for (int64_t i = 0; i < c->n; i++) {
        nd_put(global_max, i, 5.0f * c->deviation + (float)(i % 7)); /* above every logit */
    }
    ce_result want = run(&backend->ref, logits, labels, global_max, c, NULL);
    ce_result got = run(&backend->side, logits, labels, global_max, c, &want);
    /* The sum: positive terms, each within 2e-7, and at most V additions. The maximum and the
     * target are exact. */
    nd_tolerance sum = {.relative = ((double)c->V / 8.0 + 4.0) * nd_eps_f32};
    /* exp of a difference of up to 10 deviations (its rounding counts that often), twice a
     * rounding. */
    nd_tolerance exp_of = {.relative = (4.0 + 10.0 * c->deviation) * nd_eps_f32, .absolute = 1e-37};
    nd_expect_same(backend->name, "ce_stats max", got.max, want.max);
    nd_expect_same(backend->name, "ce_stats target", got.target, want.target);
    nd_expect_close(backend->name, "ce_stats sum", got.sum, want.sum, sum);
    nd_expect_close(backend->name, "ce_rescale", got.rescaled, want.rescaled, exp_of);
    /* p - 1 cancels where p is near 1: there the error is that of p, which is at most 1, times the
     * scale 0.25. */
    nd_expect_close(backend->name, "ce_bwd", got.logits, want.logits,
                    (nd_tolerance){exp_of.relative, c->valid > 0 ? exp_of.relative * 0.25 : 0.0});
    double allowed = 1e-15 * (double)(c->n + 4) * (fabs(want.loss) + 1.0);
    bool same = isnan(want.loss) ? isnan(got.loss)
                                 : got.loss == want.loss || fabs(got.loss - want.loss) <= allowed;
    cr_assert(same, "%s: loss %.17g, the reference has %.17g", backend->name, got.loss, want.loss);
    nd_case_free();
}

/* Statistics of tiles of columns, merged one after the other. */
static ce_result merged(const nd_side *side, nd_tensor logits, nd_tensor labels, int64_t columns,
                        int64_t valid)
{
    nd_tensor vector = nd_random_1d(ND_DTYPE_F32, logits.shape[0], 1.0f);
    ce_result r = {.max = nd_clone(vector), .sum = nd_clone(vector), .target = vector};
    for (int64_t begin = 0; begin < logits.shape[1]; begin += columns) {
        const int64_t rest = logits.shape[1] - begin, left = valid - begin;
        const int64_t count = rest < columns ? rest : columns;
        ND_RUN(side, ce_stats, .row_max = r.max, .row_sum = r.sum, .target = r.target,
               .logits = nd_tensor_columns(logits, begin, count), .labels = labels,
               .first = FIRST + begin,
               .valid = left < 0       ? 0
                        : left < count ? left
                                       : count,
               .merge = begin > 0);
    }
    return r;
}

TEST_EACH_BACKEND(cross_entropy, tiles_merge)
{
    static const struct {
        int64_t n, V, valid, columns;
        float slope; /* added from column to column: the largest logit is in the last tile */
    } tiles[] = {
        {1, 9, 9, 1, 0.0f},       {7, 40, 40, 16, 0.0f}, {5, 64, 33, 16, 0.0f},
        {6, 60, 60, 7, 3.0f},     {6, 60, 60, 7, -3.0f}, {40, 1000, 999, 512, 0.01f},
        {3, 9001, 9001, 4500, 0}, {4, 32, 0, 8, 0.0f},   {0, 32, 32, 8, 0.0f},
    };
    for (size_t t = 0; t < 2 * sizeof tiles / sizeof *tiles; t++) {
        const int64_t n = tiles[t / 2].n, V = tiles[t / 2].V, valid = tiles[t / 2].valid;
        nd_tensor logits = nd_random_2d(dtypes[t % 2], n, V, 3, 4.0f), labels = random_labels(n, V);
        for (int64_t i = 0; i < n * V; i++) {
            nd_put(logits, i, nd_get(logits, i) + tiles[t / 2].slope * (float)(i % V));
        }
        ce_result whole = merged(&backend->ref, logits, labels, V, valid);
        ce_result got = merged(&backend->side, logits, labels, tiles[t / 2].columns, valid);
        /* As of whole rows, and a factor for each tile: its difference, of at most 256, is rounded,
         * and its exponential. */
        double per_tile = 256.0 + 4.0, count = (double)(V / tiles[t / 2].columns + 1);
        nd_tolerance sum = {.relative = ((double)V / 8.0 + per_tile * count) * nd_eps_f32};
        nd_expect_same(backend->name, "max of tiles", got.max, whole.max);
        nd_expect_same(backend->name, "target of tiles", got.target, whole.target);
        nd_expect_close(backend->name, "sum of tiles", got.sum, whole.sum, sum);
        nd_case_free();
    }
}

/* Rows in whose tile t of 10 columns every logit is -inf where bit t of the row's number is set. */
static nd_tensor rows_with_masked_tiles(nd_dtype dtype)
{
    enum { N = 32, V = 50 };
    nd_tensor logits = nd_random_2d(dtype, N, V, 3, 4.0f);
    for (int64_t i = 0; i < N * V; i++) {
        if (i / V >> i % V / 10 & 1) {
            nd_put(logits, i, -INFINITY);
        }
    }
    return logits;
}

static void check_masked_tiles(const nd_side *side, const char *name, const ce_result *whole,
                               nd_tensor logits, nd_tensor labels)
{
    /* Five tiles: five roundings of a factor and of its difference, as in tiles_merge. */
    const nd_tolerance sum = {.relative = (50.0 / 8.0 + 5 * 260.0) * nd_eps_f32};
    for (int64_t columns = 10; columns <= 50; columns += 40) {
        ce_result got = merged(side, logits, labels, columns, 50);
        nd_expect_same(name, "max of masked tiles", got.max, whole->max);
        nd_expect_same(name, "target of masked tiles", got.target, whole->target);
        nd_expect_close(name, "sum of masked tiles", got.sum, whole->sum, sum);
    }
}

TEST_EACH_BACKEND(cross_entropy, tiles_of_minus_infinity_add_nothing_and_a_nan_stays)
{
    for (int d = 0; d < 2; d++) {
        nd_tensor logits = rows_with_masked_tiles(dtypes[d]), labels = random_labels(32, 50);
        ce_result whole = merged(&backend->ref, logits, labels, 50, 50);
        cr_assert(nd_get(whole.max, 31) == -INFINITY && nd_get(whole.sum, 31) == 0.0f,
                  "a row of -inf: maximum %g, sum %g", (double)nd_get(whole.max, 31),
                  (double)nd_get(whole.sum, 31));
        check_masked_tiles(&backend->ref, "ref", &whole, logits, labels);
        check_masked_tiles(&backend->side, backend->name, &whole, logits, labels);
        for (int64_t i = 0; i < 32; i++) {
            nd_put(logits, i * 50 + (7 * i + 23) % 50, NAN);
        }
        for (int64_t columns = 10; columns <= 50; columns += 40) {
            ce_result got = merged(&backend->side, logits, labels, columns, 50);
            for (int64_t i = 0; i < 32; i++) {
                cr_assert(isnan(nd_get(got.sum, i)), "%s: the NaN of row %d is lost", backend->name,
                          (int)i);
            }
        }
        nd_case_free();
    }
}

/* Masks of the most negative number are numbers, also where there is no other logit. */
TEST_EACH_BACKEND(cross_entropy, a_row_of_the_lowest_number_has_statistics)
{
    nd_tensor logits = nd_random_2d(ND_DTYPE_F32, 1, 50, 0, 1.0f), labels = nd_random_ids(1, 0, 50);
    for (int64_t i = 0; i < 50; i++) {
        nd_put(logits, i, -FLT_MAX);
    }
    ce_result got = merged(&backend->side, logits, labels, 10, 50);
    cr_assert(nd_get(got.max, 0) == -FLT_MAX && nd_get(got.sum, 0) == 50.0f,
              "%s: maximum %g, sum %g", backend->name, (double)nd_get(got.max, 0),
              (double)nd_get(got.sum, 0));
    nd_case_free();
}

/* A slice of -inf takes part with the sum 0, and one of NaN with NaN. */
TEST_EACH_BACKEND(cross_entropy, slices_of_minus_infinity_rescale)
{
    nd_tensor max = nd_random_1d(ND_DTYPE_F32, 4, 0.0f), sum = nd_clone(max),
              global = nd_clone(max);
    for (int64_t i = 0; i < 4; i++) {
        nd_put(max, i, -INFINITY);
        nd_put(sum, i, i < 2 ? 0.0f : NAN);
        nd_put(global, i, i % 2 ? -INFINITY : 3.0f);
    }
    ND_RUN(&backend->side, ce_rescale, .row_sum = sum, .row_max = max, .global_max = global);
    for (int64_t i = 0; i < 4; i++) {
        cr_assert(i < 2 ? nd_get(sum, i) == 0.0f : isnan(nd_get(sum, i)), "%s: sum %d is %g",
                  backend->name, (int)i, (double)nd_get(sum, i));
    }
    nd_case_free();
}

/*
 * With maximum 0, sum 1, scale 1 and labels elsewhere the gradient is exp(logit) itself. In F32 it
 * is within 2 ulp of the correctly rounded value, as CUDA documents its own, so within 2.5 of the
 * exact one (5 2^-24 of the value), as long as the result is a normal number, and 0 below.
 */
TEST_EACH_BACKEND(cross_entropy, the_exponential_is_within_two_ulp)
{
    enum { COUNT = 100000 };
    nd_tensor logits = nd_random_2d(ND_DTYPE_F32, 1, COUNT, 0, 1.0f),
              labels = nd_random_ids(1, 0, 1);
    nd_tensor zero = nd_random_1d(ND_DTYPE_F32, 1, 0.0f), one = nd_clone(zero);
    nd_put(one, 0, 1.0f);
    for (int64_t i = 0; i < COUNT; i++) {
        nd_put(logits, i, -100.0f * (float)i / COUNT);
    }
    nd_tensor got = nd_clone(logits);
    int64_t count = 1;
    ND_RUN(&backend->side, ce_bwd, .logits = got, .max = zero, .sum = one, .labels = labels,
           .first = COUNT, .valid = COUNT, .count = &count);
    for (int64_t i = 0; i < COUNT; i++) {
        double want = exp((double)nd_get(logits, i));
        double error = fabs(nd_get(got, i) - want),
               allowed = want < 0x1p-125 ? 0x1p-125 : want * 0x1.4p-22;
        cr_assert(error <= allowed, "%s: exp(%.9g) is %.9g instead of %.9g", backend->name,
                  (double)nd_get(logits, i), (double)nd_get(got, i), want);
    }
}

TEST_EACH_DRAW(cross_entropy, drawn)
{
    const int64_t V = draw_extent(d, 1100);
    const ce_case drawn = {draw_range(d, 0, 40), V, draw_range(d, 0, V), draw_range(d, 0, 20),
                           (float)draw_range(d, 1, 30)};
    for (int t = 0; t < 2; t++) {
        check_case(backend, dtypes[t], &cases[d->seed % CASES]);
        check_case(backend, dtypes[t], &drawn);
    }
}
