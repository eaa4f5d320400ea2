// SPDX-License-Identifier: Apache-2.0
/* The functions of cuda.h in a program that was built without the CUDA part. */
#include "runtime/device/cuda.h"

nd_status nd_cuda_absent(void)
{
    return nd_fail(ND_ERR_CONFIG, "device cuda needs the CUDA part, without which this program was "
                                  "built; build it with scripts/build --cuda, or use --device cpu");
}

nd_status nd_cuda_count(int *out)
{
    return nd_cuda_absent();
}

bool nd_cuda_has_driver(void)
{
    return false;
}

nd_status nd_device_open_cuda(const nd_cuda_options *options, nd_device **out)
{
    return nd_cuda_absent();
}

nd_status nd_cuda_info_of(nd_device *device, nd_cuda_info *out)
{
    return nd_cuda_absent();
}

void nd_cuda_give_up(nd_device *device)
{
}
