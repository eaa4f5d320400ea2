// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"

static const nd_ops cpu_ops = {.name = "cpu",
                               .limits = {.hidden = ND_CPU_NORM_COLUMNS, .tokens = INT32_MAX},
                               .optimizer_measures = true,
                               ND_EACH_OP(ND_OP_ENTRY, nd_cpu_)
                                   ND_EACH_QUERY(ND_QUERY_ENTRY, nd_cpu_)};

nd_status nd_ops_cpu(nd_device *device, const nd_ops **out)
{
    ND_TRY(nd_ops_check(&cpu_ops));
    ND_TRY(nd_cpu_context_create(device));
    *out = &cpu_ops;
    return ND_OK;
}
