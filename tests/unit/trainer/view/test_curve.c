// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static nd_curve curve;

Test(curve, few_steps_are_kept_as_they_are)
{
    nd_curve_begin(&curve, 400, 11, 15);
    for (int step = 11; step <= 15; step++) {
        nd_curve_add(&curve, step, step * 2);
    }
    nd_curve_end(&curve);
    cr_assert_eq(curve.parts, 5);
    for (int i = 0; i < 5; i++) {
        const nd_curve_part *p = &curve.part[i];
        cr_assert(p->step == 11 + i && p->mean == 22 + 2 * i && p->low == p->high, "part %d", i);
    }
}

Test(curve, the_spike_of_one_step_among_a_million_survives)
{
    nd_curve_begin(&curve, 400, 1, 1000000);
    for (int step = 1; step <= 1000000; step++) {
        nd_curve_add(&curve, step, step == 777777 ? 50 : step == 123456 ? -3 : 1);
    }
    nd_curve_end(&curve);
    cr_assert_eq(curve.parts, 400);
    int64_t count = 0;
    for (int i = 0; i < curve.parts; i++) {
        const nd_curve_part *p = &curve.part[i];
        cr_assert(i == 0 || p->step > curve.part[i - 1].step);
        cr_assert(p->low <= p->mean && p->mean <= p->high);
        count += p->count;
    }
    cr_assert_eq(count, 1000000);
    cr_assert_eq(curve.part[777776 / 2500].high, 50);
    cr_assert_eq(curve.part[123455 / 2500].low, -3);
}

Test(curve, values_that_are_not_finite_are_counted_and_empty_parts_left_out)
{
    nd_curve_begin(&curve, 10, 1, 100);
    nd_curve_add(&curve, 1, 5);
    nd_curve_add(&curve, 50, NAN);
    nd_curve_add(&curve, 51, INFINITY);
    nd_curve_add(&curve, 101, 7); /* of no step of the curve */
    nd_curve_add(&curve, 100, 6);
    nd_curve_end(&curve);
    cr_assert_eq(curve.parts, 2);
    cr_assert_eq(curve.not_finite, 2);
    cr_assert_eq(curve.part[1].step, 100);
    nd_curve_begin(&curve, 10, 1, 100);
    nd_curve_end(&curve);
    cr_assert_eq(curve.parts, 0);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

Test(curve, the_median_is_that_of_a_sort)
{
    double values[101], sorted[101];
    unsigned state = 1;
    for (size_t count = 1; count <= 101; count++) {
        for (int kind = 0; kind < 4; kind++) { /* mixed, equal ones, rising, falling */
            for (size_t i = 0; i < count; i++) {
                state = state * 1664525u + 1013904223u;
                unsigned many = kind == 0 ? state >> 8 : (state >> 24) % 3;
                values[i] = kind < 2 ? (double)many : kind == 2 ? (double)i : -(double)i;
            }
            memcpy(sorted, values, sizeof values);
            qsort(sorted, count, sizeof *sorted, by_value);
            double low = sorted[(count - 1) / 2], high = sorted[count / 2];
            double got = nd_median(values, count);
            cr_assert_eq(got, (low + high) / 2, "%zu values of kind %d: %g", count, kind, got);
        }
    }
    cr_assert(isnan(nd_median(values, 0)));
}

Test(curve, figures_are_short)
{
    static const struct {
        double value;
        int digits;
        const char *text;
    } cases[] = {{0, 4, "0"},           {0.5, 4, "0.5"},       {2.34567, 5, "2.3457"},
                 {1234.5, 4, "1234.5"}, {12345, 4, "12.35 k"}, {56000000, 4, "56 M"},
                 {8.03e9, 4, "8.03 G"}, {0.0003, 4, "0.0003"}, {3e-7, 4, "3e-07"},
                 {-2.5, 4, "-2.5"},     {INFINITY, 4, "-"}};
    char text[64];
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        nd_figure(text, sizeof text, cases[i].value, cases[i].digits);
        cr_assert_str_eq(text, cases[i].text);
    }
}
