// SPDX-License-Identifier: Apache-2.0
#include "trainer/gpu.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"

nd_status nd_gpu_is_wanted(const nd_config *config, bool *out)
{
    int count = 0;
    *out = false;
    if (config->launch.device == ND_CHOOSE_CPU) {
        return ND_OK;
    }
    nd_status status = nd_cuda_count(&count);
    if (status != ND_OK && config->launch.device == ND_CHOOSE_AUTO) {
        nd_error_clear(); /* no GPU: the CPU it is, and the start says so */
        return ND_OK;
    }
    ND_TRY(status);
    *out = true;
    return ND_OK;
}

/* The GPU of a local rank, -1 when the list is too short. The list was checked with the configuration. */
static int gpu_of(const nd_config *config, int local_rank)
{
    const char *p = config->launch.gpu_ids;
    if (strcmp(p, "all") == 0) {
        return local_rank;
    }
    for (int i = 0; i < local_rank; i++) {
        p = strchr(p, ',');
        if (!p) {
            return -1;
        }
        p++;
    }
    return atoi(p);
}

nd_status nd_gpu_check(const nd_config *config, int local_workers)
{
    int count = 0;
    ND_TRY(nd_cuda_count(&count));
    for (int r = 0; r < local_workers; r++) {
        int gpu = gpu_of(config, r);
        if (gpu < 0 || gpu >= count) {
            return nd_fail(
                ND_ERR_CONFIG,
                "%d worker%s of this host need a GPU each; launch.gpu_ids is '%.60s' and "
                "%d %s visible; use fewer workers, or --device cpu",
                local_workers, local_workers == 1 ? "" : "s", config->launch.gpu_ids, count,
                count == 1 ? "is" : "are");
        }
    }
    return ND_OK;
}

nd_status nd_gpu_open(const nd_config *config, int local_rank, int local_workers,
                      nd_device **device, const nd_ops **ops)
{
    nd_device *gpu = NULL;
    ND_TRY(nd_gpu_check(config, local_workers));
    nd_cuda_options options = {.ordinal = gpu_of(config, local_rank),
                               .local_workers = local_workers,
                               .fp8 = config->train.precision == ND_PRECISION_FP8};
    ND_TRY(nd_device_open_cuda(&options, &gpu));
    nd_status status = nd_ops_cuda(gpu, config->train.deterministic, ops);
    if (status != ND_OK) {
        nd_device_close(gpu);
        return status;
    }
    *device = gpu;
    return ND_OK;
}
