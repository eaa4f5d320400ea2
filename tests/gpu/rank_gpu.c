// SPDX-License-Identifier: Apache-2.0
/* One worker on a GPU, or on its double. */
#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"
#include "tests/parity/rank_device.h"
#include "trainer/rank.h"

nd_status rank_device_open(nd_rank *rank, int threads)
{
    nd_cuda_options options = {.local_workers = 1,
                               .fp8 = rank->config->train.precision == ND_PRECISION_FP8};
    ND_TRY(nd_device_open_cuda(&options, &rank->device));
    nd_status status = nd_ops_cuda(rank->device, false, &rank->ops);
    if (status != ND_OK) {
        nd_device_close(rank->device);
        rank->device = NULL;
    }
    return status;
}

void rank_device_close(nd_rank *rank, nd_transport *local)
{
    nd_device_close(rank->device);
    rank->device = NULL;
}
