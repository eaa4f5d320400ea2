// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/report.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

static double rows[ND_HISTOGRAM_BUCKETS][3];

Test(histogram, each_value_lies_within_its_bucket)
{
    static const float values[] = {0.0f, -0.0f, 1e-20f, 0x1p-47f, 0x1.7p-47f, 1.0f,     1.49f,
                                   1.5f, -1.0f, -2.99f, -3.0f,    65535.0f,   0x1p-48f, -0x1p-47f};
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        nd_histogram h = {0};
        nd_histogram_add(&h, &values[i], 1);
        cr_assert_eq(nd_histogram_rows(&h, rows), 1, "%g", (double)values[i]);
        double v = (double)values[i], low = rows[0][0], high = rows[0][1];
        cr_assert(low <= v && v <= high, "%g in %g to %g", v, low, high);
        cr_assert_eq(rows[0][2], 1);
        bool narrow = fabs(v) < 0x1p-47 || fabs(high - low) <= fabs(v) * 0.5 + 1e-30;
        cr_assert(narrow, "%g in %g to %g", v, low, high);
    }
}

Test(histogram, buckets_meet_without_gaps)
{
    const float ends[] = {-1e30f, 1e30f};
    nd_histogram h = {0};
    nd_histogram_add(&h, ends, 2);
    cr_assert_eq(nd_histogram_rows(&h, rows), ND_HISTOGRAM_BUCKETS);
    for (int i = 1; i < ND_HISTOGRAM_BUCKETS; i++) {
        cr_assert_eq(rows[i][0], rows[i - 1][1], "bucket %d", i);
        cr_assert_lt(rows[i][0], rows[i][1]);
    }
    cr_assert_eq(rows[0][2], 1);
    cr_assert_eq(rows[ND_HISTOGRAM_BUCKETS - 1][2], 1);
    cr_assert_eq(rows[ND_HISTOGRAM_BUCKETS - 1][1], 0x1p16);
}

Test(histogram, what_is_not_finite_is_counted_apart)
{
    const float values[] = {NAN, INFINITY, -INFINITY, 2.0f};
    nd_histogram h = {0};
    nd_histogram_add(&h, values, 4);
    cr_assert_eq(h.not_finite, 3);
    cr_assert_eq(nd_histogram_rows(&h, rows), 1);
    memset(&h, 0, sizeof h);
    cr_assert_eq(nd_histogram_rows(&h, rows), 0);
}
