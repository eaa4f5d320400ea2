// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "trainer/tune/measure.h"

enum { Q = 1, K = 2, V = 4 };

/* Seconds of masks 0 to 7, of which those count that are a part of `asked`. */
static int decide(int asked, double none, double q, double k, double qk, double v, double qv,
                  double kv, double all)
{
    double seconds[ND_LINEAR_SETS] = {none, q, k, qk, v, qv, kv, all};
    for (int mask = 0; mask < ND_LINEAR_SETS; mask++) {
        seconds[mask] = mask & ~asked ? NAN : seconds[mask];
    }
    return nd_decide(seconds, ND_LINEAR_SETS, asked);
}

Test(decide, fp8_stays_where_it_is_fastest)
{
    cr_expect_eq(decide(Q | K | V, 10, 9, 9, 8, 9, 8, 8, 5), Q | K | V);
    cr_expect_eq(decide(K | V, 10, 1, 9, 1, 9, 1, 6, 1), K | V, "q was not asked for");
}

Test(decide, what_loses_goes_to_bf16)
{
    cr_expect_eq(decide(Q | K | V, 10, 12, 12, 13, 12, 13, 13, 14), 0);
    cr_expect_eq(decide(Q | K | V, 10, 8, 11, 9, 11, 9, 12, 10), Q, "q alone gains");
    cr_expect_eq(decide(Q, 10, 10.5, 0, 0, 0, 0, 0, 0), 0);
    cr_expect_eq(decide(Q | K | V, 5, 5, 5, 5, 5, 5, 5, 10), K | V, "the nearest of equal times");
}

/* Times of one thing differ by 2 % from run to run: what was asked for is not given up for that. */
Test(decide, a_draw_is_as_it_was_asked)
{
    cr_expect_eq(decide(Q, 10, 10, 0, 0, 0, 0, 0, 0), Q);
    cr_expect_eq(decide(Q, 9.9, 10, 0, 0, 0, 0, 0, 0), Q);
    cr_expect_eq(decide(Q, 9.7, 10, 0, 0, 0, 0, 0, 0), 0);
    cr_expect_eq(decide(Q | K, 9.9, 10, 9.9, 10, 0, 0, 0, 0), Q | K);
}

Test(decide, without_a_time_it_is_as_it_was_asked)
{
    cr_expect_eq(decide(Q | K | V, 1, 1, 1, 1, 1, 1, 1, -1), Q | K | V);
    cr_expect_eq(decide(Q | K | V, 1, 1, 1, 1, 1, 1, 1, NAN), Q | K | V);
    cr_expect_eq(decide(Q | K | V, NAN, -1, NAN, 8, NAN, NAN, NAN, 10), Q | K,
                 "only what was timed is compared");
    cr_expect_eq(decide(0, 1, 0, 0, 0, 0, 0, 0, 0), 0);
}

/* the filter's linears */

static nd_config config_of(const char *filter)
{
    nd_config c = {
        .train = {.precision = ND_PRECISION_FP8, .sequence_length = 64, .micro_batch_size = 1}};
    c.fp8.filter = (char *)filter;
    return c;
}

static const nd_shape shape = {
    .vocab = 256, .hidden = 64, .ffn = 96, .layers = 3, .heads = 4, .kv_heads = 2, .head_dim = 16};

Test(decide, choices_are_taken_by_the_filter)
{
    nd_config c = config_of("accelerate");
    nd_filter f;
    nd_linear_choice choice;
    memset(&choice, -1, sizeof choice);
    choice.forced = false;
    cr_assert_eq(nd_filter_init(&f, &c, &shape), ND_OK);
    cr_expect_eq(nd_filter_mask(&f, 0, 0), K | V, "layer 0's q is the first linear");
    cr_expect_eq(nd_filter_mask(&f, 1, 0), Q | K | V);
    cr_expect_eq(nd_filter_mask(&f, 1, 2), 3);
    choice.fp8[0][K | V] = 0;
    choice.fp8[0][Q | K | V] = Q;
    choice.fp8[1][1] = 1;
    choice.fp8[2][3] = 2;
    choice.fp8[3][1] = 0;
    cr_assert_eq(nd_filter_choose(&f, &choice), ND_OK, "%s", nd_error_last()->message);
    cr_expect_eq(f.converted, 2 + 3 + 3, "q of two layers, o and up of three");
    cr_expect_eq(f.reasons[0], ND_FILTER_FIRST);
    cr_expect_eq(f.reasons[1], ND_FILTER_SLOWER);
    cr_expect(nd_filter_converts(&f, 2, 0) && nd_filter_converts(&f, 2, 3));
    cr_expect(!nd_filter_converts(&f, 2, 4) && nd_filter_converts(&f, 2, 5));
    nd_filter_fini(&f);
}

Test(decide, a_mask_without_a_choice_is_refused)
{
    nd_config c = config_of("down_proj");
    nd_filter f;
    nd_linear_choice choice = {.forced = false};
    choice.fp8[3][1] = -1;
    cr_assert_eq(nd_filter_init(&f, &c, &shape), ND_OK);
    cr_expect_eq(nd_filter_choose(&f, &choice), ND_ERR_DATA);
    cr_expect(strstr(nd_error_last()->message, "layer 0"), "%s", nd_error_last()->message);
    nd_filter_fini(&f);
}
