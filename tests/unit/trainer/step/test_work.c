// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdint.h>

#include "runtime/base/math.h"
#include "trainer/step/parts.h"

/* The result of a reduction over the works of ranks: of equal ranks the lowest is named, and times
 * out of range are limited to it. */
Test(work, is_of_the_slowest_and_the_fastest_rank)
{
    static const struct {
        int count, ranks[4];
        double seconds[4];
        int slowest_rank;
        double slowest, fastest;
    } cases[] = {{4, {0, 1, 2, 3}, {0.5, 0.125, 2.25, 1.0}, 2, 2.25, 0.125},
                 {3, {9, 16777214, 5}, {3, 3, 3}, 5, 3, 3},
                 {1, {16777214}, {3}, 16777214, 3, 3},
                 {2, {0, 1}, {1e300, -1}, 0, 274877.906944, 0}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        int64_t most = INT64_MIN, least = INT64_MIN;
        for (int i = 0; i < cases[c].count; i++) {
            most = nd_max(most, nd_work_most(cases[c].seconds[i], cases[c].ranks[i]));
            least = nd_max(least, nd_work_least(cases[c].seconds[i]));
        }
        const nd_work work = nd_work_of(most, least);
        cr_expect_eq(work.slowest_rank, cases[c].slowest_rank, "case %zu", c);
        cr_expect_float_eq(work.slowest_seconds, cases[c].slowest, 1e-6, "case %zu", c);
        cr_expect_float_eq(work.fastest_seconds, cases[c].fastest, 1e-6, "case %zu", c);
    }
}

Test(work, that_is_not_known_has_no_rank)
{
    cr_assert_eq(nd_work_of(0, 0).slowest_rank, -1);
    cr_assert_eq(nd_work_of(0, 0).slowest_seconds, 0);
}
