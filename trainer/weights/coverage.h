// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WEIGHTS_COVERAGE_H
#define ND_WEIGHTS_COVERAGE_H
/* The elements of a tensor that have been written: a sorted set of disjoint ranges. Ranges that
 * touch are merged. */
#include <stdint.h>

#include "runtime/base/status.h"

typedef struct nd_range {
    int64_t begin, end;
} nd_range;

typedef struct nd_coverage {
    nd_range *ranges; /* owned */
    int64_t count, capacity;
} nd_coverage; /* all zero is the empty set */

void nd_coverage_fini(nd_coverage *coverage);
nd_status nd_coverage_add(nd_coverage *coverage, int64_t begin, int64_t end);
/* The first element of [0, count) that is in no range; count when there is none. */
int64_t nd_coverage_first_gap(const nd_coverage *coverage, int64_t count);

#endif
