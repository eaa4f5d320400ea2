// SPDX-License-Identifier: Apache-2.0
/* The suites of tests/ops against the CUDA backend: on a GPU, or on its double. */
#include <criterion/criterion.h>
#include <stdio.h>

#include "kernels/cuda/context.h"
#include "kernels/cuda/cuda_ops.h"
#include "runtime/device/cuda.h"
#include "tests/gpu/mirror.h"
#include "tests/gpu/mirror_memory.h"
#include "tests/ops/conformance.h"

void nd_side_open_cuda(nd_side *side, bool fp8, bool deterministic)
{
    const nd_cuda_options options = {.local_workers = 1, .fp8 = fp8};
    ND_OK_OR_FAIL(nd_device_open_cuda(&options, &side->device));
    ND_OK_OR_FAIL(nd_ops_cuda(side->device, deterministic, &side->ops));
    ND_OK_OR_FAIL(side->device->table->stream_init(side->device, &side->stream));
}

void nd_best_backend(void (*check)(const nd_backend *backend))
{
    nd_backend backend = {0};
    nd_side *gpu = &backend.side;
    nd_side_open_ref(&backend.ref);
    nd_side_open_cuda(gpu, true, false);
    ND_OK_OR_FAIL(mirror_open(gpu->device, gpu->ops, &gpu->ops));
    nd_cuda_context *context = nd_cuda_context_of(gpu->device);
    context->attention_prepared = true; /* the mirror has scratch of its own, as large as this */
    context->attention_scratch = MIRROR_SCRATCH;
    do {
        snprintf(backend.name, sizeof backend.name, "cuda, %.40s%s", gpu->device->name,
                 context->deterministic ? ", deterministic" : "");
        check(&backend);
        nd_case_free();
        /* Once more where attention adds in a fixed order, if it was cuDNN's at all. */
        context->deterministic = !context->deterministic;
    } while (context->deterministic && nd_cudnn_plan_count(context->cudnn) > 0);
    cr_expect_leq(nd_cudnn_plan_count(context->cudnn), PLANS_OF_A_TEST, "%lld plans of cuDNN",
                  (long long)nd_cudnn_plan_count(context->cudnn));
    mirror_close();
    nd_side_close(gpu);
    nd_side_close(&backend.ref);
}

void nd_each_backend(void (*check)(const nd_backend *backend))
{
    nd_best_backend(check);
}
