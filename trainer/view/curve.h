// SPDX-License-Identifier: Apache-2.0
#ifndef ND_VIEW_CURVE_H
#define ND_VIEW_CURVE_H
/*
 * A curve of any number of values over steps, reduced to at most ND_CURVE_MAX intervals of steps.
 * Each has its least, largest and mean value, so that the spike of a single step is kept.
 */
#include <stddef.h>
#include <stdint.h>

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
    int64_t not_finite;    /* values that are not drawn */
    double low, high;      /* of all parts; low > high: there is no value */
    nd_curve_part part[ND_CURVE_MAX];
} nd_curve;

/* Steps `first` to `last` in at most `parts` intervals of equal length. Add values in any order,
 * then end, which removes intervals without a value. */
void nd_curve_begin(nd_curve *curve, int parts, int64_t first, int64_t last);
void nd_curve_add(nd_curve *curve, int64_t step, double value);
void nd_curve_end(nd_curve *curve);

/* The median of the values, which are put into another order; the mean of the middle two of an even
 * number. NaN of none. */
double nd_median(double *values, size_t count);

/* A number for a person, with `digits` significant digits, at least 4, and 5 from 1000 to 9999:
 * "0.00031", "12.3 k", "1.25 M", "3.1e-07"; "-" when it is not finite. Returns text. */
char *nd_figure(char *text, size_t size, double value, int digits);

#endif
