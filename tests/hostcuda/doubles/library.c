// SPDX-License-Identifier: Apache-2.0
/* In the place of runtime/device/cuda_library.c: the libraries' symbols are the doubles in this
 * program. */
#include <dlfcn.h>

#include "runtime/device/cuda_library.h"

nd_status nd_cuda_library_open(const char *what, const char *const *sonames,
                               const nd_cuda_symbol *symbols, size_t count)
{
    void *self = dlopen(NULL, RTLD_NOW);
    for (size_t i = 0; i < count; i++) {
        *symbols[i].to = dlsym(self, symbols[i].name);
        if (!*symbols[i].to) {
            return nd_fail(ND_ERR_INTERNAL, "%s: no double of %s", what, symbols[i].name);
        }
    }
    return ND_OK;
}
