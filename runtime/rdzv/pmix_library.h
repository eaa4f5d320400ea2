// SPDX-License-Identifier: Apache-2.0
#ifndef ND_RDZV_PMIX_LIBRARY_H
#define ND_RDZV_PMIX_LIBRARY_H
/* The functions of libpmix that nd_pmix calls. The macros of pmix.h are not used: some of them call
 * the library. */
#include <pmix.h>

#include "runtime/base/status.h"

#define ND_PMIX_FUNCTIONS(X)                                                                       \
    X(PMIx_Init)                                                                                   \
    X(PMIx_Finalize)                                                                               \
    X(PMIx_Abort)                                                                                  \
    X(PMIx_Put)                                                                                    \
    X(PMIx_Commit)                                                                                 \
    X(PMIx_Fence)                                                                                  \
    X(PMIx_Get)                                                                                    \
    X(PMIx_Error_string)

typedef struct nd_pmix_library {
    void *handle;
#define ND_PMIX_MEMBER(name) __typeof__(&name) name;
    ND_PMIX_FUNCTIONS(ND_PMIX_MEMBER)
#undef ND_PMIX_MEMBER
} nd_pmix_library;

/* ND_ERR_CONFIG with what to install. The library stays open: its threads may run on after
 * PMIx_Finalize. */
nd_status nd_pmix_library_open(nd_pmix_library *out);

#endif
