// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_ops.h"

#include "kernels/cpu/context.h"
#include "kernels/ops_list.h"

#define ENTRY(op) .op = nd_cpu_##op,

static const nd_ops cpu_ops = {.name = "cpu", ND_EACH_OP(ENTRY)};

nd_status nd_ops_cpu(nd_device *device, const nd_ops **out)
{
    ND_TRY(nd_ops_check(&cpu_ops));
    ND_TRY(nd_cpu_context_create(device));
    *out = &cpu_ops;
    return ND_OK;
}
