// SPDX-License-Identifier: Apache-2.0
/* The CPU backend's functions in a program that was built without it. */
#include "kernels/ops.h"

nd_status nd_ops_cpu(nd_device *device, const nd_ops **out)
{
    return nd_fail(ND_ERR_CONFIG,
                   "this program was built without the CPU backend (oneDNN and OpenMP were missing "
                   "or disabled); use --device cuda, or build again where they are");
}

nd_status nd_ops_cpu_start_threads(nd_device *device, bool f32)
{
    return ND_OK;
}

int64_t nd_ops_cpu_stack_bytes(void)
{
    return 0;
}

const char *nd_ops_machine(const nd_device *device)
{
    return device->name;
}

const char *nd_ops_products(const nd_device *device)
{
    return "none";
}

const char *nd_ops_library_version(void)
{
    return "none";
}

const char *nd_ops_openmp_version(void)
{
    return "none";
}
