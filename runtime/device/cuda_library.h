// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_LIBRARY_H
#define ND_DEVICE_CUDA_LIBRARY_H
/*
 * Libraries other than the CUDA runtime (cuBLASLt, cuDNN, NCCL) are opened at run time, so that one
 * program starts on machines with and without them, and names the missing library when it needs
 * one. They are searched where the loader searches (LD_LIBRARY_PATH and the system's folders), and
 * then in a toolkit that is named, a Python environment of which this program is a part, and the
 * toolkit that built it.
 */
#include <limits.h>
#include <stdbool.h>
#include <stddef.h>

#include "runtime/base/status.h"

typedef struct nd_cuda_symbol {
    const char *name;
    void **to;
} nd_cuda_symbol;

/*
 * Opens the first of `sonames` (NULL-terminated) that loads and resolves all symbols. ND_ERR_CONFIG
 * names `what`, the file names tried, and the loader's reason; or the symbol that the library
 * lacks. The library stays open.
 */
nd_status nd_cuda_library_open(const char *what, const char *const *sonames,
                               const nd_cuda_symbol *symbols, size_t count);

/* Loads a library, which stays open; `everywhere` makes its symbols visible to what is loaded
 * later. ND_ERR_CONFIG as above. */
nd_status nd_cuda_library_load(const char *what, const char *const *sonames, bool everywhere,
                               void **handle);

/*
 * Loads what another library will ask the loader for by its bare name, from the same places, where
 * the loader does not find it itself; and then also `beside`, a pattern of glob(7) in the same
 * folder, or NULL. Nothing happens when it is nowhere: the other library then reports it.
 */
void nd_cuda_library_preload(const char *name, const char *beside);

/* The places where libraries may lie; in every build, since only the file system is asked. */
typedef struct nd_cuda_places {
    const char *home, *path; /* CUDA_HOME and CUDA_PATH; NULL or "": not set */
    const char *program;     /* the path of the running program; "": not known */
    const char *toolkit;     /* the root of the toolkit that built the program; "": none */
} nd_cuda_places;

/*
 * The n-th existing file of this name, from 0, in this order: in the folders of the libraries of
 * CUDA_HOME and CUDA_PATH; in the NVIDIA packages of each Python environment above the program
 * (ENV/bin/ndtrain, ENV/lib/python3.11/site-packages/X/ndtrain); beside the toolkit. False: there
 * are not so many.
 */
bool nd_cuda_places_find(const nd_cuda_places *places, const char *name, int n,
                         char found[PATH_MAX]);

#endif
