// SPDX-License-Identifier: Apache-2.0
#include <criterion/criterion.h>
#include <stdint.h>

#include "trainer/step/parts.h"

/* What a reduction over ranks makes of their works. */
static nd_work reduced(const double *seconds, const int *ranks, int count)
{
    int64_t most = INT64_MIN, least = INT64_MIN;
    for (int i = 0; i < count; i++) {
        int64_t m = nd_work_most(seconds[i], ranks[i]), l = nd_work_least(seconds[i]);
        most = m > most ? m : most;
        least = l > least ? l : least;
    }
    return nd_work_of(most, least);
}

Test(work, is_of_the_slowest_and_the_fastest_rank)
{
    static const int ranks[] = {0, 1, 2, 3};
    static const double seconds[] = {0.5, 0.125, 2.25, 1.0};
    nd_work work = reduced(seconds, ranks, 4);
    cr_assert_float_eq(work.slowest_seconds, 2.25, 1e-6);
    cr_assert_float_eq(work.fastest_seconds, 0.125, 1e-6);
    cr_assert_eq(work.slowest_rank, 2);
}

Test(work, of_equal_ranks_the_lowest_is_named)
{
    static const int ranks[] = {9, 16777214, 5};
    static const double seconds[] = {3, 3, 3};
    cr_assert_eq(reduced(seconds, ranks, 3).slowest_rank, 5);
    cr_assert_eq(reduced(seconds, ranks + 1, 1).slowest_rank, 16777214);
}

Test(work, times_out_of_range_stay_in_it)
{
    static const int ranks[] = {0, 1};
    static const double seconds[] = {1e300, -1};
    nd_work work = reduced(seconds, ranks, 2);
    cr_assert_eq(work.slowest_rank, 0);
    cr_assert_float_eq(work.slowest_seconds, 274877.906944, 1e-6);
    cr_assert_eq(work.fastest_seconds, 0);
}

Test(work, that_is_not_known_has_no_rank)
{
    cr_assert_eq(nd_work_of(0, 0).slowest_rank, -1);
    cr_assert_eq(nd_work_of(0, 0).slowest_seconds, 0);
}
