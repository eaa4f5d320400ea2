// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_SUPPORT_PEER_H
#define ND_TESTS_SUPPORT_PEER_H
#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

/* The Python that ND_PEER_PYTHON names if it has all of these modules, for instance "torch
 * transformers"; else NULL. A module that is there but cannot be imported is the test's failure. */
static inline const char *peer_python(const char *modules)
{
    const char *python = getenv("ND_PEER_PYTHON");
    char command[1024];
    if (!python || !*python) {
        return NULL;
    }
    int n = snprintf(command, sizeof command,
                     "'%s' -c 'import importlib.util, sys; sys.exit(not "
                     "all(map(importlib.util.find_spec, sys.argv[1:])))' %s",
                     python, modules);
    cr_assert_lt(n, (int)sizeof command);
    return system(command) == 0 ? python : NULL;
}

#endif
