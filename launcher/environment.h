// SPDX-License-Identifier: Apache-2.0
#ifndef ND_LAUNCHER_ENVIRONMENT_H
#define ND_LAUNCHER_ENVIRONMENT_H
/* The environment of a program that ndlaunch starts: a worker, or the check before them. */
#include "runtime/base/status.h"

typedef struct nd_variable {
    const char *name, *value;
} nd_variable;

/*
 * `own` over this process's environment, without what an outer launcher may have set there. *out
 * ends with NULL and is one block, owned by the caller; it borrows the texts of the environment.
 */
nd_status nd_environment_make(const nd_variable *own, int count, char ***out);

#endif
