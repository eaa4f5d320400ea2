// SPDX-License-Identifier: Apache-2.0
/* Which rank made the others wait, through one reduction of two numbers. */
#include "trainer/step/parts.h"

enum { RANK_BITS = 24, TIME_BITS = 38 };
static const int64_t last_rank = ((int64_t)1 << RANK_BITS) - 1;
static const int64_t longest = (int64_t)1 << TIME_BITS; /* microseconds */

static int64_t microseconds(double seconds)
{
    double value = seconds * 1e6 + 0.5;
    return value >= (double)longest ? longest : value >= 1 ? (int64_t)value : 0;
}

/* Among ranks with equal times the lowest rank gets the largest number, so it wins the maximum. */
int64_t nd_work_most(double seconds, int rank)
{
    ND_ASSERT(rank >= 0 && rank < last_rank);
    return (microseconds(seconds) << RANK_BITS) + last_rank - rank;
}

/* The number is below 0, since 0 stands for a time that is not known. */
int64_t nd_work_least(double seconds)
{
    return -microseconds(seconds) - 1;
}

nd_work nd_work_of(int64_t most, int64_t least)
{
    if (most <= 0 || least >= 0) {
        return (nd_work){.slowest_rank = -1};
    }
    return (nd_work){.slowest_seconds = (double)(most >> RANK_BITS) * 1e-6,
                     .fastest_seconds = (double)(-least - 1) * 1e-6,
                     .slowest_rank = (int)(last_rank - (most & last_rank))};
}
