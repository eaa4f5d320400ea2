// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_VARIABLES_H
#define ND_TESTS_SUPPORT_VARIABLES_H
/* Variables of the environment as texts, "NAME=value", which the environment keeps. */
#include <stdlib.h>

static inline void variables_set(const char *const *texts)
{
    for (; *texts; texts++) {
        putenv((char *)*texts);
    }
}

#define SET_VARIABLES(...) variables_set((const char *const[]){__VA_ARGS__, NULL})

#endif
