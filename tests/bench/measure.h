// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BENCH_MEASURE_H
#define ND_BENCH_MEASURE_H
#include <stdlib.h>
#include <time.h>

/* This clock has the CPU time of the process or of the thread. */
static inline double nd_bench_cpu_seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static inline int nd_bench_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The middle of `count` values, which it sorts. */
static inline double nd_bench_median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, nd_bench_compare);
    return values[count / 2];
}

#endif
