// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/base/rng.h"
#include "tests/support/tempdir.h"
#include "trainer/data/dataset.h"

enum { MOST = ND_MIX_SOURCES };

static nd_dataset *mix; /* the last one; the next one closes it */

/* Sources of so many blocks, or of as many each, of which nothing is read. */
static void make_of(int count, const double *weights, const double *epochs, const int64_t *blocks,
                    int64_t each)
{
    nd_dataset_part parts[MOST];
    for (int j = 0; j < count; j++) {
        parts[j] = (nd_dataset_part){.data = calloc(1, sizeof(nd_dataset)),
                                     .name = "x",
                                     .weight = weights ? weights[j] : 0,
                                     .epochs = epochs ? epochs[j] : 0};
        parts[j].data->blocks = blocks ? blocks[j] : each;
        parts[j].data->path = strdup("x");
    }
    nd_dataset_close(mix);
    assert_ok(nd_dataset_blend(parts, count, &mix));
}

static void make(int count, const double *weights, const double *epochs, int64_t blocks)
{
    make_of(count, weights, epochs, NULL, blocks);
}

static nd_sample_place sample_at(int64_t i)
{
    return nd_blend_sample(mix->blend, i);
}

static int64_t count_of(int source, int64_t n)
{
    int64_t counts[MOST];
    cr_assert(nd_dataset_count_samples(mix, n, counts));
    return counts[source];
}

/* The rule of docs/formats.md word by word: every source is asked for every place. */
static int next_of(const int32_t *counts, const int32_t *given, int count, int64_t P, int64_t n)
{
    int best = -1, active = 0;
    for (int j = 0; j < count; j++) {
        active += counts[j] > 0;
    }
    const int64_t k = 2 * active - 2;
    for (int j = 0; j < count; j++) {
        int64_t c = counts[j], x = given[j];
        if (x < c && k * (c * n - x * P) >= P &&
            (best < 0 || (k * (x + 1) - 1) * counts[best] < (k * (given[best] + 1) - 1) * c)) {
            best = j;
        }
    }
    return best;
}

Test(mix, the_order_is_the_one_of_the_rule)
{
    for (uint64_t round = 0; round < 40; round++) {
        const int count = 2 + (int)(nd_rng_u64(2, round, 0) % 40);
        int32_t counts[MOST], given[MOST] = {0};
        double weights[MOST];
        int64_t P = 0;
        for (int j = 0; j < count; j++) { /* many are equal */
            counts[j] = 1 + (int32_t)(nd_rng_u64(2, round, 1 + (uint64_t)j) % (round % 2 ? 3 : 50));
            counts[0] = 1; /* so that no shorter period holds them */
            weights[j] = counts[j];
        }
        for (int j = 0; j < count; j++) {
            P += counts[j];
        }
        make(count, weights, NULL, 100);
        for (int64_t n = 1; n <= P; n++) {
            const nd_sample_place at = sample_at(n - 1), later = sample_at(5 * P + n - 1);
            cr_assert_eq(at.source, next_of(counts, given, count, P, n), "round %d, place %lld",
                         (int)round, (long long)n);
            cr_assert_eq(at.index, given[at.source]);
            cr_assert_eq(later.source, at.source);
            given[at.source]++;
        }
    }
}

/*
 * At every one of the first n prefixes each source has had its whole number of weights, give or
 * take less than one sample, and its samples come in order. Between two samples of a source its lag
 * grows, so that it is enough to look before and after each of them, and at the end.
 */
static void expect_bound(int count, const int64_t *weights, int64_t n)
{
    int64_t had[MOST] = {0}, sum = 0;
    for (int j = 0; j < count; j++) {
        sum += weights[j];
    }
    for (int64_t i = 0; i < n; i++) {
        const nd_sample_place at = sample_at(i);
        const int64_t w = weights[at.source], x = had[at.source]++;
        cr_assert(at.index == x && w * i - x * sum < sum && (x + 1) * sum - w * (i + 1) < sum,
                  "sample %lld is number %lld of source %d, after %lld of its %lld in %lld",
                  (long long)i, (long long)at.index, at.source, (long long)x, (long long)w,
                  (long long)sum);
    }
    for (int j = 0; j < count; j++) {
        cr_assert(llabs(had[j] * sum - weights[j] * n) < sum, "source %d has had %lld", j,
                  (long long)had[j]);
        cr_assert_eq(count_of(j, n), had[j]);
    }
}

static uint64_t draw(uint64_t round, int j)
{
    return nd_rng_u64(7, round, (uint64_t)j);
}

/* Whole numbers, most of them with decimals of one, of up to 64 sources, whose period is exact. */
Test(mix, every_prefix_is_within_one_of_random_weights, .timeout = 120)
{
    for (uint64_t round = 0; round < 120; round++) {
        const int count = 2 + (int)(draw(round, MOST) % 63);
        const int64_t sum = round % 12 == 0 ? 1000000 : round % 3 == 0 ? 10000 : 1000;
        int64_t weights[MOST], left = sum;
        double asked[MOST];
        for (int j = 0; j < count; j++) { /* of what is left, and one for each that follows */
            const int64_t room = left - (count - 1 - j);
            weights[j] =
                j == count - 1 ? left : 1 + (int64_t)(draw(round, j) % (uint64_t)(room / 4 + 1));
            left -= weights[j];
            asked[j] = (double)weights[j] / (double)(round % 2 ? sum : 1);
        }
        make(count, asked, NULL, 100);
        cr_assert_eq(sum % mix->blend->period, 0, "a period of %lld",
                     (long long)mix->blend->period);
        expect_bound(count, weights, sum + sum / 3);
    }
}

/* Weights that no period holds are those of the nearest period, and kept as well as others. */
Test(mix, every_prefix_is_within_one_of_rounded_weights, .timeout = 120)
{
    for (uint64_t round = 0; round < 8; round++) {
        const int count = 2 + (int)(draw(round, MOST) % 63);
        double asked[MOST], sum = 0;
        int64_t weights[MOST];
        for (int j = 0; j < count; j++) { /* over some decades */
            asked[j] = exp2((double)(draw(round, j) >> 40) / (1 << 24) * (double)(2 * round + 1));
            sum += asked[j];
        }
        make(count, asked, NULL, 100);
        cr_assert_eq(mix->blend->period, ND_MIX_PERIOD);
        for (int j = 0; j < count; j++) {
            weights[j] = count_of(j, ND_MIX_PERIOD);
            const double change = (double)weights[j] / ND_MIX_PERIOD - asked[j] / sum;
            cr_assert(weights[j] >= 1 && fabs(change) < 1.0 / ND_MIX_PERIOD);
        }
        expect_bound(count, weights, ND_MIX_PERIOD + 1000);
    }
}

Test(mix, extreme_weights_keep_the_bound, .timeout = 120)
{
    static const struct {
        double asked[3];
        int64_t weights[3];
        int count;
    } cases[] = {{{4}, {1}, 1},
                 {{3, 3}, {1, 1}, 2},
                 {{0.1, 0.1, 0.1}, {1, 1, 1}, 3},
                 {{1, 999999}, {1, 999999}, 2},
                 {{1, 1e-6}, {1000000, 1}, 2},
                 {{0.999998, 1e-6, 1e-6}, {999998, 1, 1}, 3},
                 {{1, 1048575}, {1, ND_MIX_PERIOD - 1}, 2},
                 {{1e-300, 2e-300, 1e-300}, {1, 2, 1}, 3},
                 {{1, 1048576}, {1, ND_MIX_PERIOD - 1}, 2},
                 {{1, 1e-9}, {ND_MIX_PERIOD - 1, 1}, 2},
                 {{1e-30, 1, 1}, {1, ND_MIX_PERIOD / 2 - 1, ND_MIX_PERIOD / 2}, 3}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        make(cases[c].count, cases[c].asked, NULL, 100);
        expect_bound(cases[c].count, cases[c].weights, ND_MIX_PERIOD + 1000);
    }
}

Test(mix, a_hundred_sources_keep_the_bound_at_any_index)
{
    double asked[100];
    int64_t weights[100], sum = 0;
    for (int j = 0; j < 100; j++) {
        weights[j] = j % 3 ? 1 : 1 + j;
        asked[j] = (double)weights[j];
        sum += weights[j];
    }
    make(100, asked, NULL, 100);
    expect_bound(100, weights, 3 * sum + 7);
    for (int64_t n = 1000000000; n < 1000000000 + sum; n++) { /* as a resumed run begins */
        const nd_sample_place at = sample_at(n);
        cr_assert_eq(at.index, count_of(at.source, n));
        cr_assert(llabs(at.index * sum - weights[at.source] * n) < sum);
    }
}

/* The tables of many phases share their memory. */
Test(mix, the_longest_period_depends_on_how_many_sources_end)
{
    static const struct {
        int limited;
        int64_t period;
    } cases[] = {{0, 1048576}, {3, 1048576}, {4, 838860}, {40, 102300}, {63, 65536}, {200, 65536}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        double weights[MOST], epochs[MOST];
        for (int j = 0; j < MOST; j++) {
            weights[j] = 1 + 1e-9 * j;
            epochs[j] = j < cases[c].limited;
        }
        make(MOST, weights, epochs, 3);
        cr_expect_eq(mix->blend->period, cases[c].period, "%d", cases[c].limited);
    }
}

Test(mix, a_source_ends_with_its_epochs_and_the_others_go_on)
{
    /* 10 blocks each: the first never ends, the second gives 15 samples, the third 5. */
    const double weights[] = {1, 1, 2}, epochs[] = {1e18, 1.5, 0.5};
    make(3, weights, epochs, 10);
    int64_t had[3] = {0};
    int64_t ended[3] = {0};
    for (int64_t i = 0; i < 500; i++) {
        nd_sample_place at = sample_at(i);
        cr_assert_eq(at.index, had[at.source]);
        had[at.source]++;
        ended[at.source] = i + 1;
    }
    cr_assert_eq(had[1], 15);
    cr_assert_eq(had[2], 5);
    cr_assert_eq(had[0], 480);
    cr_assert_eq(count_of(0, 500), 480);
    cr_assert_eq(count_of(1, 500), 15);
    cr_assert_eq(count_of(2, ended[2]), 5);
    cr_assert_eq(count_of(2, ended[2] - 1), 4);
    /* Half of the samples until 5 are gone; from then on every other one is of the second. */
    cr_assert(ended[2] >= 9 && ended[2] <= 11, "%lld", (long long)ended[2]);
    cr_assert(ended[1] >= 34 && ended[1] <= 37, "%lld", (long long)ended[1]);
    cr_assert_eq(mix->blend->samples, INT64_MAX);
}

Test(mix, epochs_without_weights_give_every_source_as_often_as_it_says)
{
    int64_t had[4] = {0};
    make_of(4, NULL, (double[]){1, 3, 0.5, 0.01}, (const int64_t[]){100, 33, 7, 20}, 0);
    cr_assert_eq(mix->blend->samples, 100 + 99 + 4 + 1);
    for (int64_t i = 0; i < mix->blend->samples; i++) {
        nd_sample_place at = sample_at(i);
        cr_assert_eq(at.index, had[at.source]++);
        double share = (double)(i + 1) * 99 / 204;
        cr_assert(at.source != 1 || fabs((double)had[1] - share) < 1.0 + 1e-9);
    }
    cr_assert_eq(had[0], 100);
    cr_assert_eq(had[1], 99);
    cr_assert_eq(had[2], 4);
    cr_assert_eq(had[3], 1, "a source gives one sample at least");
}

/* All in proportion to what they give, so they end at different times. */
Test(mix, each_of_256_sources_ends_with_its_own_epochs)
{
    double weights[MOST], epochs[MOST];
    int64_t had[MOST] = {0}, all = 0;
    for (int j = 0; j < MOST; j++) {
        weights[j] = 1 + j % 7;
        epochs[j] = 1 + 0.125 * j;
        all += (int64_t)round(8 * epochs[j]);
    }
    make(MOST, weights, epochs, 8);
    cr_assert_eq(mix->blend->samples, all);
    for (int64_t i = 0; i < all; i++) {
        nd_sample_place at = sample_at(i);
        cr_assert_eq(at.index, had[at.source]++);
    }
    for (int j = 0; j < MOST; j++) {
        cr_assert_eq(had[j], 8 + j);
        cr_assert_eq(count_of(j, all + 9), had[j]);
    }
}
