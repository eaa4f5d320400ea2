// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_DRAWN_DRAW_H
#define TESTS_DRAWN_DRAW_H
/* Numbers that follow from a seed: draw number n of a case is the same on every machine. */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/rng.h"

typedef struct draw {
    uint64_t seed, count;
} draw;

/* From low to high, both included. */
static inline int64_t draw_range(draw *d, int64_t low, int64_t high)
{
    return low + (int64_t)(nd_rng_u64(d->seed, 42, d->count++) % (uint64_t)(high - low + 1));
}

static inline bool draw_once_in(draw *d, int64_t times)
{
    return draw_range(d, 1, times) == 1;
}

static inline int64_t draw_of(draw *d, const int64_t *values, int64_t count)
{
    return values[draw_range(d, 0, count - 1)];
}

/* One of the numbers that follow. */
#define DRAW(d, ...)                                                                               \
    draw_of((d), (const int64_t[]){__VA_ARGS__},                                                   \
            (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

#endif
