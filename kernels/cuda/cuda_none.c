// SPDX-License-Identifier: Apache-2.0
/* The functions of cuda_ops.h in a program that was built without CUDA. */
#include "kernels/cuda/cuda_ops.h"

static nd_status absent(void)
{
    return nd_fail(ND_ERR_CONFIG, "this program was built without the CUDA backend; use --device "
                                  "cpu");
}

nd_status nd_ops_cuda(nd_device *device, bool deterministic, const nd_ops **out)
{
    return absent();
}

nd_status nd_ops_cuda_planner(const nd_ops **out)
{
    return absent();
}

const char *nd_ops_cuda_machine(const nd_device *device)
{
    return "none";
}

bool nd_ops_cuda_lacks_cudnn(void)
{
    return false;
}

size_t nd_ops_cuda_workspace(void)
{
    return 0;
}
