// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/tempdir.h"
#include "trainer/generate/sample.h"

enum { V = 40, DRAWS = 20000 };

static const nd_sampling plain = {.temperature = 1, .top_p = 1, .seed = 7};

static float logits[V];

/* Peaked, with two equal values. */
static void fill(void)
{
    for (int v = 0; v < V; v++) {
        logits[v] = 3.0f * sinf((float)v * 1.7f);
    }
    logits[31] = logits[9];
}

TestSuite(sample, .init = fill);

static int32_t draw_of(const nd_sampling *s, uint64_t request, uint64_t at)
{
    nd_candidate room[V];
    int32_t id = -1;
    cr_assert_eq(nd_sample(s, logits, V, (nd_draw){request, at}, room, &id), ND_OK, "%s",
                 nd_error_last()->message);
    return id;
}

/* Shares of the ids in many draws. */
static void shares_of(const nd_sampling *s, double share[V])
{
    memset(share, 0, V * sizeof *share);
    for (uint64_t i = 0; i < DRAWS; i++) {
        share[draw_of(s, i / 100, i % 100)] += 1.0 / DRAWS;
    }
}

/* Computes the shares that the filters leave by definition: one after another, likeliest first. */
static void expect(const nd_sampling *s, double share[V])
{
    int order[V];
    int64_t count = V, kept = 0;
    double weight[V], sum = 0, reached = 0;
    for (int v = 0; v < V; v++) {
        order[v] = v;
    }
    for (int i = 1; i < V; i++) { /* insertion keeps equal ones in the order of ids */
        for (int j = i; j > 0 && logits[order[j]] > logits[order[j - 1]]; j--) {
            int moved = order[j];
            order[j] = order[j - 1];
            order[j - 1] = moved;
        }
    }
    count = s->top_k > 0 && s->top_k < V ? s->top_k : V;
    for (int64_t i = 0; i < count; i++) {
        weight[i] = exp((logits[order[i]] - logits[order[0]]) / s->temperature);
        sum += weight[i];
    }
    for (; kept < count && (s->top_p == 1 || reached < s->top_p * sum); kept++) {
        reached += weight[kept];
    }
    while (kept > 0 && weight[kept - 1] < s->min_p) {
        kept--;
    }
    sum = 0;
    for (int64_t i = 0; i < kept; i++) {
        sum += weight[i];
    }
    memset(share, 0, V * sizeof *share);
    for (int64_t i = 0; i < kept; i++) {
        share[order[i]] = weight[i] / sum;
    }
}

Test(sample, greedy_takes_the_lowest_of_equal_ids)
{
    nd_sampling s = {.top_p = 1};
    logits[9] = logits[31] = 10;
    cr_expect_eq(draw_of(&s, 0, 0), 9);
    s = (nd_sampling){.temperature = 1, .top_k = 1, .top_p = 1};
    cr_expect_eq(draw_of(&s, 3, 5), 9, "the likeliest one alone");
}

/* 20,000 draws: five deviations of a share p are 5 sqrt(p (1 - p) / 20000), at most 0.018; five
 * draws more for rare ids, whose numbers are not normal. What is left out never comes. */
Test(sample, draws_follow_the_probabilities_that_the_filters_leave)
{
    static const nd_sampling cases[] = {
        {.temperature = 1, .top_p = 1, .seed = 7},
        {.temperature = 0.5, .top_p = 1, .seed = 7},
        {.temperature = 2, .top_p = 1, .top_k = 5, .seed = 7},
        {.temperature = 1, .top_p = 0.6, .seed = 7},
        {.temperature = 1, .top_p = 0.999, .seed = 7},
        {.temperature = 1, .top_p = 0.7, .top_k = 8, .seed = 7},
        {.temperature = 1, .top_p = 1, .min_p = 0.2, .seed = 7},
        {.temperature = 1.5, .top_p = 0.9, .top_k = 20, .min_p = 0.1, .seed = 7},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        double wanted[V], found[V];
        expect(&cases[i], wanted);
        shares_of(&cases[i], found);
        for (int v = 0; v < V; v++) {
            double bound = 5 * sqrt(wanted[v] * (1 - wanted[v]) / DRAWS);
            bound += wanted[v] > 0 ? 5.5 / DRAWS : 0;
            cr_expect(fabs(found[v] - wanted[v]) <= bound, "case %zu, id %d: %.4f, not %.4f", i, v,
                      found[v], wanted[v]);
        }
    }
}

/* Exactly these two ids come in many draws. */
static void assert_only(const nd_sampling *s, int first, int second)
{
    double share[V];
    shares_of(s, share);
    for (int v = 0; v < V; v++) {
        cr_expect_eq(share[v] > 0, v == first || v == second, "id %d has the share %g", v,
                     share[v]);
    }
}

/* An id that is exactly min_p times as likely as the likeliest stays: with 1, all that equal it. */
Test(sample, a_weight_that_equals_min_p_stays)
{
    logits[9] = logits[31] = 10;
    assert_only(&(nd_sampling){.temperature = 1, .top_p = 1, .min_p = 1, .seed = 7}, 9, 31);
}

/* Two of four equally likely ids are exactly half. */
Test(sample, a_share_that_is_reached_exactly_takes_no_further_id)
{
    for (int v = 0; v < V; v++) {
        logits[v] = v % 10 == 3 ? 1.0f : -INFINITY;
    }
    assert_only(&(nd_sampling){.temperature = 1, .top_p = 0.5, .seed = 7}, 3, 13);
}

/* All other ids are in order already. */
Test(sample, the_first_id_may_be_less_likely_than_the_second)
{
    for (int v = 0; v < V; v++) {
        logits[v] = v == 1 ? 2.0f : (float)(1 - v);
    }
    assert_only(&(nd_sampling){.temperature = 1, .top_p = 0.5, .seed = 7}, 1, 1);
}

Test(sample, a_draw_depends_on_seed_request_and_position_alone)
{
    nd_sampling other = plain;
    int differ[3] = {0};
    other.seed = 8;
    for (uint64_t i = 0; i < 100; i++) {
        int32_t id = draw_of(&plain, 5, i);
        cr_expect_eq(draw_of(&plain, 5, i), id);
        differ[0] += draw_of(&other, 5, i) != id;
        differ[1] += draw_of(&plain, 6, i) != id;
        differ[2] += draw_of(&plain, 5, i + 100) != id;
    }
    for (int i = 0; i < 3; i++) {
        cr_expect_gt(differ[i], 50, "%d of 100 draws differ", differ[i]);
    }
}

/* Another mesh adds in another order: logits differ in their last bits, and hardly any draw
 * does. */
Test(sample, last_bits_of_logits_change_hardly_any_draw)
{
    static const nd_sampling filtered = {.temperature = 1, .top_p = 0.97, .top_k = 30, .seed = 7};
    enum { SOME = 2000 };
    int32_t ids[SOME];
    int differ = 0;
    for (uint64_t i = 0; i < SOME; i++) {
        ids[i] = draw_of(&filtered, i, 0);
    }
    for (int v = 0; v < V; v++) {
        logits[v] = nextafterf(logits[v], v > 20 ? INFINITY : -INFINITY); /* 31 is before 9 */
    }
    for (uint64_t i = 0; i < SOME; i++) {
        differ += draw_of(&filtered, i, 0) != ids[i];
    }
    cr_expect_leq(differ, 1, "%d of 2000 draws differ", differ);
}

Test(sample, not_finite_logits_are_an_error)
{
    nd_candidate room[V];
    int32_t id;
    logits[3] = -INFINITY; /* a token that can never come */
    cr_expect_eq(nd_sample(&plain, logits, V, (nd_draw){0, 0}, room, &id), ND_OK);
    logits[4] = NAN;
    assert_fails(nd_sample(&plain, logits, V, (nd_draw){0, 0}, room, &id), ND_ERR_NUMERIC,
                 "token 4 is NaN");
    logits[4] = INFINITY;
    cr_expect_eq(nd_sample(&plain, logits, V, (nd_draw){0, 0}, room, &id), ND_ERR_NUMERIC);
}

Test(sample, settings_out_of_range_are_named)
{
    static const struct {
        nd_sampling sampling;
        const char *name;
    } cases[] = {{{.temperature = -0.1, .top_p = 1}, "--temperature"},
                 {{.temperature = NAN, .top_p = 1}, "--temperature"},
                 {{.temperature = INFINITY, .top_p = 1}, "--temperature"},
                 {{.top_k = -1, .top_p = 1}, "--top-k"},
                 {{.top_p = 0}, "--top-p"},
                 {{.top_p = 1.1}, "--top-p"},
                 {{.top_p = NAN}, "--top-p"},
                 {{.top_p = 1, .min_p = 2}, "--min-p"},
                 {{.top_p = 1, .min_p = -0.1}, "--min-p"},
                 {{.top_p = 1, .min_p = NAN}, "--min-p"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        assert_fails(nd_sampling_check(&cases[i].sampling), ND_ERR_CONFIG, cases[i].name);
    }
    cr_expect_eq(nd_sampling_check(&plain), ND_OK);
    cr_expect_eq(nd_sampling_check(&(nd_sampling){.top_p = 1, .min_p = 1}), ND_OK);
}

Test(sample, scores_are_log_probabilities)
{
    double sum = 0;
    for (int32_t v = 0; v < V; v++) {
        nd_token_score score;
        cr_assert_eq(nd_score_token(logits, V, v, &score), ND_OK);
        sum += exp(score.log_probability);
        cr_expect_leq(logits[v], logits[score.greedy]);
    }
    cr_expect_float_eq(sum, 1, 1e-12);
}
