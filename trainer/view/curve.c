// SPDX-License-Identifier: Apache-2.0
#include "trainer/view/curve.h"

#include <math.h>
#include <stdio.h>

void nd_curve_begin(nd_curve *curve, int parts, int64_t first, int64_t last)
{
    int64_t steps = last >= first ? last - first + 1 : 1;
    parts = parts < 1 ? 1 : parts > ND_CURVE_MAX ? ND_CURVE_MAX : parts;
    curve->first = first;
    curve->last = last;
    curve->parts = steps < parts ? (int)steps : parts;
    curve->parts_per_step = (double)curve->parts / (double)steps;
    curve->not_finite = 0;
    curve->low = INFINITY;
    curve->high = -INFINITY;
    for (int i = 0; i < curve->parts; i++) {
        curve->part[i] = (nd_curve_part){0, INFINITY, -INFINITY, 0, 0};
    }
}

/* While values are added, step and mean hold sums. */
void nd_curve_add(nd_curve *curve, int64_t step, double value)
{
    if (step < curve->first || step > curve->last) {
        return;
    }
    if (!isfinite(value)) {
        curve->not_finite++;
        return;
    }
    int i = (int)((double)(step - curve->first) * curve->parts_per_step);
    nd_curve_part *part = &curve->part[i < curve->parts ? i : curve->parts - 1];
    part->step += (double)step;
    part->mean += value;
    part->low = value < part->low ? value : part->low;
    part->high = value > part->high ? value : part->high;
    part->count++;
}

void nd_curve_end(nd_curve *curve)
{
    int kept = 0;
    for (int i = 0; i < curve->parts; i++) {
        nd_curve_part part = curve->part[i];
        if (part.count == 0) {
            continue;
        }
        part.step /= (double)part.count;
        part.mean /= (double)part.count;
        curve->low = part.low < curve->low ? part.low : curve->low;
        curve->high = part.high > curve->high ? part.high : curve->high;
        curve->part[kept++] = part;
    }
    curve->parts = kept;
}

static void swap(double *a, double *b)
{
    double t = *a;
    *a = *b;
    *b = t;
}

/* Hoare's selection: afterwards values[k] is what a sort would put there, none before it is larger
 * and none behind it smaller. */
static double select_at(double *values, size_t count, size_t k)
{
    size_t low = 0, high = count - 1;
    while (low < high) {
        double pivot = values[low + (high - low) / 2];
        size_t i = low, j = high;
        for (;;) {
            while (values[i] < pivot) {
                i++;
            }
            while (values[j] > pivot) {
                j--;
            }
            if (i >= j) {
                break;
            }
            swap(&values[i++], &values[j--]);
        }
        /* Now [low, j] <= pivot <= [j + 1, high]. */
        if (k <= j) {
            high = j;
        } else {
            low = j + 1;
        }
    }
    return values[k];
}

double nd_median(double *values, size_t count)
{
    if (count == 0) {
        return NAN;
    }
    double upper = select_at(values, count, count / 2);
    if (count % 2 == 1) {
        return upper;
    }
    double lower = values[0]; /* the largest of the lower half */
    for (size_t i = 1; i < count / 2; i++) {
        lower = values[i] > lower ? values[i] : lower;
    }
    return (lower + upper) / 2;
}

char *nd_figure(char *text, size_t size, double value, int digits)
{
    static const struct {
        double from, factor;
        const char *unit;
    } units[] = {{1e12, 1e12, " T"}, {1e9, 1e9, " G"}, {1e6, 1e6, " M"}, {1e4, 1e3, " k"}};
    size_t i = 0;
    while (i < 4 && fabs(value) < units[i].from) {
        i++;
    }
    if (!isfinite(value)) {
        snprintf(text, size, "-");
    } else if (i < 4) {
        snprintf(text, size, "%.*g%s", digits, value / units[i].factor, units[i].unit);
    } else {
        snprintf(text, size, "%.*g", fabs(value) >= 1000 ? 5 : digits, value);
    }
    return text;
}
