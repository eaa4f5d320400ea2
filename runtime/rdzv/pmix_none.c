// SPDX-License-Identifier: Apache-2.0
/* A program built without the PMIx headers. */
#include "runtime/rdzv/pmix.h"

static nd_status none(void)
{
    return nd_fail(
        ND_ERR_CONFIG,
        "this worker was started by a PMIx launcher (srun --mpi=pmix or mpirun), but the "
        "program was built without PMIx; install its headers (Debian: libpmix-dev), "
        "configure with -Dpmix=enabled and build again, or start one ndlaunch per node");
}

nd_status nd_pmix_open(nd_identity *identity, nd_pmix **out)
{
    return none();
}

void nd_pmix_close(nd_pmix *pmix, int exit_code)
{
}

nd_status nd_pmix_share(nd_pmix *pmix, const char *name, bool gives, void *bytes, size_t count,
                        double timeout_seconds)
{
    return none();
}

void nd_pmix_end(nd_pmix *pmix, double timeout_seconds, int exit_code)
{
}

void nd_pmix_abort(nd_pmix *pmix, int code, const char *message)
{
}
