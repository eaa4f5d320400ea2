// SPDX-License-Identifier: Apache-2.0
#include "runtime/rdzv/pmix_library.h"

#include <dlfcn.h>
#include <string.h>

nd_status nd_pmix_library_open(nd_pmix_library *out)
{
    /* Its own plugins look for its symbols among the global ones. */
    nd_pmix_library library = {.handle = dlopen("libpmix.so.2", RTLD_NOW | RTLD_GLOBAL)};
    if (!library.handle) {
        const char *why = dlerror();
        return nd_fail(
            ND_ERR_CONFIG,
            "this worker was started by a PMIx launcher (srun --mpi=pmix or mpirun), but "
            "the PMIx library cannot be opened: %s; install it (Debian: libpmix2) on "
            "every node, or start one ndlaunch per node instead",
            why ? why : "libpmix.so.2 is missing");
    }
    void *found;
#define ND_PMIX_FIND(name)                                                                         \
    found = dlsym(library.handle, #name);                                                          \
    if (!found) {                                                                                  \
        return nd_fail(ND_ERR_CONFIG,                                                              \
                       "libpmix.so.2 has no function %s: it is no PMIx library of "                \
                       "version 2 or newer",                                                       \
                       #name);                                                                     \
    }                                                                                              \
    memcpy(&library.name, &found,                                                                  \
           sizeof found); /* a function's address, which C does not convert */
    ND_PMIX_FUNCTIONS(ND_PMIX_FIND)
#undef ND_PMIX_FIND
    *out = library;
    return ND_OK;
}
