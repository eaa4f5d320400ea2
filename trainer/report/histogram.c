// SPDX-License-Identifier: Apache-2.0
#include "trainer/report/histogram.h"

#include <math.h>
#include <string.h>

/* An F32 without its sign, cut after the first bit of its fraction, counts half powers of two. */
enum { SHIFT = 22, LEAST = (127 - 47) * 2, INFINITE = 255 * 2, MIDDLE = ND_HISTOGRAM_HALVES };

void nd_histogram_add(nd_histogram *histogram, const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        int half = (int)((bits & 0x7fffffffu) >> SHIFT);
        if (half >= INFINITE) {
            histogram->not_finite++;
            continue;
        }
        int distance = half - LEAST + 1; /* from the middle */
        distance = distance < 0 ? 0 : distance < MIDDLE ? distance : MIDDLE;
        histogram->count[bits >> 31 ? MIDDLE - distance : MIDDLE + distance]++;
    }
}

/* The lower edge of the bucket that is so far from the middle, on the positive side; for one more
 * than the outermost, its upper edge. */
static double edge(int distance)
{
    int half = LEAST + distance - 1;
    return distance == 0 ? 0 : ldexp(half % 2 == 0 ? 1 : 1.5, half / 2 - 127);
}

static void fill_row(int bucket, int64_t count, double row[3])
{
    int distance = bucket < MIDDLE ? MIDDLE - bucket : bucket - MIDDLE;
    double near = edge(distance), far = edge(distance + 1);
    row[0] = distance == 0 ? -far : bucket < MIDDLE ? -far : near;
    row[1] = distance == 0 ? far : bucket < MIDDLE ? -near : far;
    row[2] = (double)count;
}

int nd_histogram_rows(const nd_histogram *histogram, double rows[ND_HISTOGRAM_BUCKETS][3])
{
    int first = 0, last = ND_HISTOGRAM_BUCKETS - 1;
    while (first <= last && histogram->count[first] == 0) {
        first++;
    }
    while (last > first && histogram->count[last] == 0) {
        last--;
    }
    for (int bucket = first; bucket <= last; bucket++) {
        fill_row(bucket, histogram->count[bucket], rows[bucket - first]);
    }
    return last - first + 1;
}
