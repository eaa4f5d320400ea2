// SPDX-License-Identifier: Apache-2.0
/* The suites of tests/ops against the CUDA backend: on a GPU, or on its double. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"
#include "tests/gpu/mirror.h"
#include "tests/ops/conformance.h"

void nd_best_backend(void (*check)(const nd_side *ref, const nd_backend *backend))
{
    nd_cuda_options options = {.local_workers = 1, .fp8 = true};
    for (int deterministic = 0; deterministic < 2; deterministic++) {
        nd_side ref;
        nd_backend backend = {0};
        nd_side *gpu = &backend.side;
        const nd_ops *ops = NULL;
        nd_side_open_ref(&ref);
        ND_OK_OR_FAIL(nd_device_open_cuda(&options, &gpu->device));
        ND_OK_OR_FAIL(nd_ops_cuda(gpu->device, deterministic, &ops));
        ND_OK_OR_FAIL(mirror_open(gpu->device, ops, &gpu->ops));
        ND_OK_OR_FAIL(gpu->device->table->stream_init(gpu->device, &gpu->stream));
        snprintf(backend.name, sizeof backend.name, "cuda, %.40s%s", gpu->device->name,
                 deterministic ? ", deterministic" : "");
        check(&ref, &backend);
        nd_case_free();
        gpu->device->table->stream_fini(&gpu->stream);
        mirror_close();
        nd_device_close(gpu->device);
        nd_side_close(&ref);
    }
}

void nd_each_backend(void (*check)(const nd_side *ref, const nd_backend *backend))
{
    nd_best_backend(check);
}
