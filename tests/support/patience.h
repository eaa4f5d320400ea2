// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_PATIENCE_H
#define ND_TESTS_SUPPORT_PATIENCE_H
/*
 * How long a test lets a program take. Sanitized programs are several times slower: .ci/run sets
 * ND_TEST_TIME_FACTOR to the multiple that they are allowed.
 */
#include <stdlib.h>

/* Whatever is done to it, a program must end within this time. */
enum { PATIENCE_SECONDS = 20 };

static inline double patience(double seconds)
{
    const char *factor = getenv("ND_TEST_TIME_FACTOR");
    double times = factor ? atof(factor) : 1;
    return times > 1 ? times * seconds : seconds;
}

#endif
