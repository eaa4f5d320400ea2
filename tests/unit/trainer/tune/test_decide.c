// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

#include "tests/unit/trainer/shapes.h"
#include "trainer/tune/measure.h"

enum { Q = 1, K = 2, V = 4 };

/* Times of one thing differ by 2 % from run to run: what was asked for is not given up for that,
 * nor where there is no time. */
Test(decide, fp8_stays_unless_bf16_is_clearly_faster)
{
    static const double stays[][2] = {{5, 10}, {10, 10}, {10, 9.9}, {-1, 1},
                                      {1, -1}, {NAN, 1}, {1, NAN}};
    for (size_t i = 0; i < sizeof stays / sizeof *stays; i++) {
        cr_expect_not(nd_fp8_is_slower(stays[i][0], stays[i][1]), "%zu", i);
    }
    cr_expect(nd_fp8_is_slower(10, 9.7));
}

/* Other ranks wait for rank 0 in a collective: its deadline must not pass while rank 0 times. */
Test(decide, timing_leaves_most_of_a_collectives_deadline)
{
    cr_expect_float_eq(nd_tuning_budget(2, 90), 30, 1e-9);
    cr_expect_float_eq(nd_tuning_budget(8, 1800), 60, 1e-9, "a minute is enough for any model");
    cr_expect_float_eq(nd_tuning_budget(1, 1), 60, 1e-9, "nobody waits for a rank that is alone");
}

Test(decide, choices_are_taken_by_the_filter)
{
    const nd_config c = {
        .train = {.precision = ND_PRECISION_FP8, .sequence_length = 64, .micro_batch_size = 1},
        .fp8.filter = (char *)"accelerate"};
    const nd_shape shape = {SIZES(256, 64, 96, 3, 4, 2, 16)};
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
