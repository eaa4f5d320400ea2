// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/comm.h"

nd_status nd_transport_open_ucx(const nd_transport_options *options, nd_transport **out)
{
    return nd_fail(ND_ERR_CONFIG,
                   "this build has no UCX, so CPU workers cannot talk to each other; install "
                   "libucx-dev, configure with -Ducx=enabled and build again, or run one worker");
}

nd_status nd_transport_check_ucx_room(int64_t local_workers)
{
    return ND_OK;
}

const char *nd_transport_ucx_version(bool open)
{
    return "none";
}
