// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/parts.h"

#include <criterion/criterion.h>
#include <math.h>

static nd_curve curve;

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

Test(curve, values_that_are_not_finite_and_empty_parts_are_left_out)
{
    nd_curve_begin(&curve, 10, 1, 100);
    nd_curve_add(&curve, 1, 5);
    nd_curve_add(&curve, 50, NAN);
    nd_curve_add(&curve, 51, INFINITY);
    nd_curve_add(&curve, 101, 7); /* of no step of the curve */
    nd_curve_add(&curve, 100, 6);
    nd_curve_end(&curve);
    cr_assert_eq(curve.parts, 2);
    cr_assert_eq(curve.part[1].step, 100);
    nd_curve_begin(&curve, 10, 1, 100);
    nd_curve_end(&curve);
    cr_assert_eq(curve.parts, 0);
}

/* A number of a column of lines with these values at steps 1, 2, ... */
static double number_of(const double *values, size_t count, const char *key)
{
    static nd_point points[8195];
    for (size_t i = 0; i < count; i++) {
        points[i] = (nd_point){(double)i + 1, values[i]};
    }
    nd_column column = {.name = "loss", .points = points, .count = count};
    const nd_metrics metrics = {.columns = &column, .count = 1};
    json_t *all = nd_columns_sum_up(&metrics);
    const json_t *number = json_object_get(json_object_get(all, "loss"), key);
    const double found = number ? json_number_value(number) : NAN;
    json_decref(all);
    return found;
}

Test(curve, a_column_is_summed_up)
{
    static const double values[] = {90, 80, 5, NAN, 1, 7, INFINITY, 3, 90, 1};
    static const struct {
        const char *key;
        double value;
    } wanted[] = {{"count", 8},     {"lost", 2},         {"sum", 277},
                  {"mean", 34.625}, {"first", 90},       {"last", 1},
                  {"least", 1},     {"end", 1},          {"least_step", 5},
                  {"largest", 90},  {"largest_step", 1}, {"median", 4} /* of 5, 1, 7, 3, 90, 1 */};
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        const double found = number_of(values, 10, wanted[i].key);
        cr_assert_eq(found, wanted[i].value, "%s is %g", wanted[i].key, found);
    }
    cr_assert(isnan(number_of(values + 3, 1, "least")));
    cr_assert_eq(number_of(values + 3, 1, "lost"), 1);
}

Test(curve, the_end_is_the_last_tenth)
{
    double values[512];
    for (int i = 0; i < 512; i++) {
        values[i] = i;
    }
    cr_assert_eq(number_of(values, 20, "end"), 18.5);
    values[19] = NAN;
    cr_assert_eq(number_of(values, 20, "end"), 18);
    cr_assert_eq(number_of(values, 512, "end"), 486.5, "at most 50 values");
}

/* The first two values do not count; if 8,193 follow them, only every second of these does. */
Test(curve, the_median_is_that_of_all_values_up_to_8192)
{
    static double values[8195];
    for (int i = 0; i < 8195; i++) {
        values[i] = i % 2;
    }
    cr_assert_eq(number_of(values, 8194, "median"), 0.5);
    cr_assert_eq(number_of(values, 8195, "median"), 0);
    cr_assert_eq(number_of(values, 1, "median"), 0);
}
