// SPDX-License-Identifier: Apache-2.0
#ifndef ND_DEVICE_CUDA_LIBRARY_H
#define ND_DEVICE_CUDA_LIBRARY_H
/*
 * Libraries other than the CUDA runtime (cuBLASLt, cuDNN, NCCL) are opened at run time, so that one
 * program starts on machines with and without them, and names the missing library when it needs
 * one.
 */
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

#endif
