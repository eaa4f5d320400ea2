// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_PARTS_H
#define ND_VIEW_PARTS_H
/*
 * Parts of a report, private to trainer/view: a million values as few numbers, and the waits of
 * ranks for each other. What returns JSON returns NULL where memory ran out.
 */
#include <stdint.h>

#include "runtime/base/json.h"
#include "trainer/view/view.h"

/*
 * A curve of any number of values over steps, reduced to at most ND_CURVE_MAX intervals of steps.
 * Each has its least, largest and mean value, so that the spike of a single step is kept
 * (page.c).
 */
enum { ND_CURVE_MAX = 400 };

typedef struct nd_curve_part {
    double step; /* mean of the steps whose values it has */
    double low, high, mean;
    int64_t count;
} nd_curve_part;

typedef struct nd_curve {
    int64_t first, last; /* steps */
    int parts;
    double parts_per_step; /* while values are added */
    nd_curve_part part[ND_CURVE_MAX];
} nd_curve;

/* Steps `first` to `last` in at most `parts` intervals of equal length. Add values in any order,
 * then end, which removes intervals without a value. One that is not finite is left out. */
void nd_curve_begin(nd_curve *curve, int parts, int64_t first, int64_t last);
void nd_curve_add(nd_curve *curve, int64_t step, double value);
void nd_curve_end(nd_curve *curve);

/* {name: {"count", "lost", "sum", "mean", "first", "last", "least", "least_step", "largest",
 * "largest_step", "median", "end"}, ...} of all numbers. `lost` ones are not finite; the median
 * leaves out the first two; the end is the mean of the last tenth, at most 50. "layer" is that of
 * the largest where the lines name it. What is not known is left out. */
json_t *nd_columns_sum_up(const nd_metrics *metrics);

/* Adds to a run of the page, as "slowest" and "waits", the ranks that made others wait. */
nd_status nd_ranks_add(const nd_run_view *run, json_t **out);

#endif
