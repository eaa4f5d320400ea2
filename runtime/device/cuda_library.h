// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_LIBRARY_H
#define ND_DEVICE_CUDA_LIBRARY_H
/*
 * Libraries other than the CUDA runtime (cuBLASLt, cuDNN, NCCL) are opened at run time, so that one
 * program starts on machines with and without them, and names the missing library when it needs
 * one. They are searched where the loader searches (LD_LIBRARY_PATH and the system's folders), and
 * then in the places of cuda_places.h.
 */
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
 * Loads what another library will ask the loader for by its bare name, from the places of
 * cuda_places.h, where the loader does not find it itself; and then also `beside`, a pattern of
 * glob(7) in the same folder, or NULL. Nothing happens when it is nowhere: the other library then
 * reports it.
 */
void nd_cuda_library_preload(const char *name, const char *beside);

#endif
