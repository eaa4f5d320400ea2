// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/rank_device.h"

#include "trainer/rank.h"

nd_status rank_device_open(nd_rank *rank, int threads)
{
    ND_TRY(nd_device_open_cpu(threads, &rank->device));
    nd_status status = nd_ops_cpu(rank->device, &rank->ops);
    if (status != ND_OK) {
        nd_device_close(rank->device);
        rank->device = NULL;
    }
    return status;
}

void rank_device_close(nd_rank *rank, nd_transport *local)
{
    nd_device_close(rank->device);
}
