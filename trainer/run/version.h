// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RUN_VERSION_H
#define ND_RUN_VERSION_H
/* Versions that a run's bits may depend on. ND_VERSION comes from the build. */
#include "trainer/run/run_json.h"

enum { ND_LIBRARY_COUNT = 6 };

/* Fills name and version of the libraries in use; returns their number. Strings are static. */
int nd_library_versions(nd_run_text out[ND_LIBRARY_COUNT]);

#endif
