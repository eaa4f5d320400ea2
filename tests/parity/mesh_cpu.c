// SPDX-License-Identifier: Apache-2.0
#include "tests/parity/mesh_run.h"
#include "trainer/rank.h"

nd_status mesh_rank_open(nd_rank *rank)
{
    ND_TRY(nd_device_open_cpu(1, &rank->device));
    nd_status status = nd_ops_cpu(rank->device, &rank->ops);
    if (status != ND_OK) {
        nd_device_close(rank->device);
        rank->device = NULL;
    }
    return status;
}

void mesh_rank_close(nd_rank *rank, nd_transport *local)
{
    nd_device_close(rank->device);
}
