// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_DRAWN_DRAW_H
#define TESTS_DRAWN_DRAW_H
/* Numbers that follow from a seed: draw number n of a case is the same on every machine. */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/rng.h"

typedef struct nd_draw {
    uint64_t seed, count;
} nd_draw;

/* From low to high, both included. */
static inline int64_t draw_range(nd_draw *d, int64_t low, int64_t high)
{
    return low + (int64_t)(nd_rng_u64(d->seed, 42, d->count++) % (uint64_t)(high - low + 1));
}

static inline bool draw_once_in(nd_draw *d, int64_t times)
{
    return draw_range(d, 1, times) == 1;
}

static inline int64_t draw_of(nd_draw *d, const int64_t *values, int64_t count)
{
    return values[draw_range(d, 0, count - 1)];
}

/* From 1 to most: as often as any, one at or beside a multiple of 16. */
static inline int64_t draw_extent(nd_draw *d, int64_t most)
{
    const int64_t any = draw_range(d, 1, most), beside = 16 * (any / 16 + 1) + draw_range(d, -1, 1);
    return draw_once_in(d, 2) || beside > most ? any : beside;
}

/* One of the numbers that follow. */
#define DRAW(d, ...)                                                                               \
    draw_of((d), (const int64_t[]){__VA_ARGS__},                                                   \
            (int64_t)(sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t)))

#endif
