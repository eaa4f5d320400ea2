// SPDX-License-Identifier: Apache-2.0
#include "trainer/run/version.h"

#include <hwloc.h>
#include <jansson.h>
#include <openssl/crypto.h>

#include "kernels/ops.h"
#include "runtime/comm/comm.h"

int nd_library_versions(nd_run_text out[ND_LIBRARY_COUNT])
{
    int n = 0;
    out[n++] = (nd_run_text){"oneDNN", nd_ops_library_version()};
    out[n++] = (nd_run_text){"OpenMP", nd_ops_openmp_version()};
    out[n++] = (nd_run_text){"UCX", nd_transport_ucx_version()};
    out[n++] = (nd_run_text){"jansson", jansson_version_str()};
    out[n++] = (nd_run_text){"OpenSSL", OpenSSL_version(OPENSSL_VERSION_STRING)};
    return n;
}
