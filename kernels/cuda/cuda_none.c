// SPDX-License-Identifier: Apache-2.0
/* The functions of cuda_ops.h that need a GPU, in a program without the CUDA part. */
#include "kernels/cuda/cuda_ops.h"

#include "runtime/device/cuda.h"

nd_status nd_ops_cuda(nd_device *device, bool deterministic, const nd_ops **out)
{
    return nd_cuda_absent();
}

const char *nd_ops_cuda_machine(const nd_device *device)
{
    return "none";
}

bool nd_ops_cuda_windows_are_plain(const nd_device *device)
{
    return false;
}

bool nd_ops_cuda_documents_are_plain(const nd_device *device)
{
    return false;
}

bool nd_ops_cuda_lacks_cudnn(void)
{
    return false;
}

nd_status nd_ops_cuda_limit_products(nd_device *device, int64_t processors)
{
    return nd_cuda_absent();
}

void nd_ops_cuda_tune(nd_device *device, int candidates, double seconds)
{
}

int nd_ops_cuda_choices(const nd_device *device, nd_lt_choice out[ND_LT_PLANS])
{
    return 0;
}

nd_status nd_ops_cuda_install(nd_device *device, const nd_lt_choice *choices, int count)
{
    return nd_cuda_absent();
}

int nd_ops_cuda_unchosen(const nd_device *device)
{
    return 0;
}

void nd_ops_cuda_versions(const nd_device *device, int *capability, size_t *cublaslt)
{
    *capability = 0;
    *cublaslt = 0;
}

nd_status nd_ops_cuda_median(nd_stream *stream, nd_status (*call)(void *context, nd_stream *stream),
                             void *context, int repeats, double *seconds)
{
    return nd_cuda_absent();
}
