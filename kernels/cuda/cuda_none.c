// SPDX-License-Identifier: Apache-2.0
/* The functions of cuda_ops.h that need a GPU, in a program without the CUDA part. */
#include "kernels/cuda/cuda_ops.h"

#include "runtime/device/cuda.h"

nd_status nd_ops_cuda(nd_device *device, bool deterministic, const nd_ops **out)
{
    return nd_cuda_absent();
}

const nd_cuda_facts *nd_ops_cuda_facts(const nd_device *device)
{
    static const nd_cuda_facts none = {.machine = "none"};
    return &none;
}

bool nd_ops_cuda_lacks_cudnn(void)
{
    return false;
}

nd_status nd_ops_cuda_limit_products(nd_device *device, int64_t processors)
{
    return nd_cuda_absent();
}
