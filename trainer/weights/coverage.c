// SPDX-License-Identifier: Apache-2.0
#include "trainer/weights/coverage.h"

#include <stdlib.h>
#include <string.h>

void nd_coverage_fini(nd_coverage *coverage)
{
    free(coverage->ranges);
    *coverage = (nd_coverage){0};
}

/* Index of the first range that ends at or after x. */
static int64_t first_reaching(const nd_coverage *coverage, int64_t x)
{
    int64_t low = 0, high = coverage->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        if (coverage->ranges[middle].end < x) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

static nd_status reserve(nd_coverage *coverage)
{
    if (coverage->count < coverage->capacity) {
        return ND_OK;
    }
    int64_t wanted = coverage->capacity ? 2 * coverage->capacity : 4;
    nd_range *ranges = realloc(coverage->ranges, (size_t)wanted * sizeof *ranges);
    if (!ranges) {
        return nd_fail_memory("%lld ranges", (long long)wanted);
    }
    coverage->ranges = ranges;
    coverage->capacity = wanted;
    return ND_OK;
}

nd_status nd_coverage_add(nd_coverage *coverage, int64_t begin, int64_t end)
{
    if (begin >= end) {
        return ND_OK;
    }
    ND_TRY(reserve(coverage));
    nd_range *r = coverage->ranges;
    int64_t first = first_reaching(coverage, begin), last = first; /* ranges [first, last) touch */
    while (last < coverage->count && r[last].begin <= end) {
        begin = r[last].begin < begin ? r[last].begin : begin;
        end = r[last].end > end ? r[last].end : end;
        last++;
    }
    memmove(r + first + 1, r + last, (size_t)(coverage->count - last) * sizeof *r);
    r[first] = (nd_range){begin, end};
    coverage->count += 1 - (last - first);
    return ND_OK;
}

int64_t nd_coverage_first_gap(const nd_coverage *coverage, int64_t count)
{
    if (coverage->count == 0 || coverage->ranges[0].begin > 0) {
        return 0;
    }
    return coverage->ranges[0].end < count ? coverage->ranges[0].end : count;
}
