// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REPORT_HISTOGRAM_H
#define ND_REPORT_HISTOGRAM_H
/*
 * How the values of a tensor are spread: counts in fixed buckets, two of each power of two from
 * 2^-47 to 2^16 on both sides of zero. As the buckets depend on nothing, counts of the parts of a
 * tensor are added up, and the sum is the same on every mesh.
 */
#include <stdint.h>

enum { ND_HISTOGRAM_HALVES = 126, ND_HISTOGRAM_BUCKETS = 2 * ND_HISTOGRAM_HALVES + 1 };

/* Only whole numbers, so that ranks add it up as an array of them. */
typedef struct nd_histogram {
    int64_t
        count[ND_HISTOGRAM_BUCKETS]; /* ascending; the middle one has what is nearer to zero than
                                            2^-47, the outer ones also what is beyond 2^16 */
    int64_t not_finite;
} nd_histogram;

void nd_histogram_add(nd_histogram *histogram, const float *values, int64_t count);

/* Rows of left edge, right edge, number: from the first bucket that has a value to the last one.
 * Returns how many, 0 when all are empty. */
int nd_histogram_rows(const nd_histogram *histogram, double rows[ND_HISTOGRAM_BUCKETS][3]);

#endif
