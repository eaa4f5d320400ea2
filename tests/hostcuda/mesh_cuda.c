// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/mesh_cuda.h"

#include "kernels/cuda/cuda_ops.h"
#include "tests/hostcuda/cuda_ranks.h"
#include "tests/parity/rank_device.h"
#include "trainer/rank.h"

static bool on_gpus, casts_units;

void mesh_use_gpus(bool gpus, bool cast_units)
{
    on_gpus = gpus;
    casts_units = cast_units;
}

static nd_status open_gpu(nd_rank *rank)
{
    nd_transport *local = rank->transport;
    rank->cast_units = casts_units;
    ND_TRY(cuda_rank_open(local, 100.0, &rank->device, &rank->transport));
    return nd_ops_cuda(rank->device, false, &rank->ops);
}

static nd_status open_cpu(nd_rank *rank)
{
    ND_TRY(nd_device_open_cpu(1, &rank->device));
    return nd_ops_cpu(rank->device, &rank->ops);
}

nd_status rank_device_open(nd_rank *rank)
{
    nd_transport *local = rank->transport;
    nd_status status = on_gpus ? open_gpu(rank) : open_cpu(rank);
    if (status != ND_OK) {
        rank_device_close(rank, local);
    }
    return status;
}

void rank_device_close(nd_rank *rank, nd_transport *local)
{
    if (rank->transport != local) {
        nd_transport_close(rank->transport);
    }
    nd_device_close(rank->device);
    rank->device = NULL;
}
