// SPDX-License-Identifier: Apache-2.0
#include "runtime/device/cuda_library.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static nd_status resolve(const char *what, const char *soname, void *handle,
                         const nd_cuda_symbol *symbols, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        void *symbol = dlsym(handle, symbols[i].name);
        if (!symbol) {
            return nd_fail(ND_ERR_CONFIG,
                           "%s (%s) has no %s: it is older than this program needs; install the "
                           "version that docs/cuda.md names",
                           what, soname, symbols[i].name);
        }
        *symbols[i].to = symbol;
    }
    return ND_OK;
}

nd_status nd_cuda_library_open(const char *what, const char *const *sonames,
                               const nd_cuda_symbol *symbols, size_t count)
{
    char reasons[512] = "";
    for (int i = 0; sonames[i]; i++) {
        void *handle = dlopen(sonames[i], RTLD_NOW | RTLD_LOCAL);
        if (handle) {
            return resolve(what, sonames[i], handle, symbols, count);
        }
        size_t used = strlen(reasons);
        snprintf(reasons + used, sizeof reasons - used, "%s%s", used ? "; " : "", dlerror());
    }
    return nd_fail(ND_ERR_CONFIG,
                   "%s is needed for device cuda and cannot be opened: %s; install it, or name its "
                   "folder in LD_LIBRARY_PATH",
                   what, reasons);
}
