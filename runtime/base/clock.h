// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_CLOCK_H
#define ND_BASE_CLOCK_H
/* Monotonic time in nanoseconds: for durations, deadlines and the order of failures on one host. */
#include <stdint.h>
#include <time.h>

static inline int64_t nd_clock_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline double nd_clock_seconds(void)
{
    return (double)nd_clock_ns() * 1e-9;
}

#endif
