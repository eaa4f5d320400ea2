// SPDX-License-Identifier: Apache-2.0
#ifndef ND_BASE_MATH_H
#define ND_BASE_MATH_H
/* Integer arithmetic that the C library lacks, and the GiB. */
#include <stddef.h>
#include <stdint.h>

static const double nd_gib = 1073741824.0; /* bytes of a GiB */

static inline int64_t nd_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t nd_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline size_t nd_max_bytes(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* a / b rounded up; a >= 0, b > 0. */
static inline int64_t nd_ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

/* The smallest multiple of `to` that is not below n; n >= 0, to > 0. */
static inline int64_t nd_round_up(int64_t n, int64_t to)
{
    return nd_ceil_div(n, to) * to;
}

/* The greatest common divisor; of 0 and n it is n. */
static inline int64_t nd_gcd(int64_t a, int64_t b)
{
    while (b != 0) {
        const int64_t rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

static inline size_t nd_round_up_bytes(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

#endif
