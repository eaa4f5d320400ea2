// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/context.h"
#include "kernels/cpu/cpu_ops.h"
#include "kernels/ops.h"
nd_status nd_ops_cpu(nd_device *device, const nd_ops **out)
{
    static nd_ops table;
    const nd_ops *ref;
    ND_TRY(nd_ops_ref(&ref));
    ND_TRY(nd_cpu_context_create(device));
    table = *ref;
    table.name = "cpu";
    table.matmul = nd_cpu_matmul;
    table.attention_fwd = nd_cpu_attention_fwd;
    table.attention_bwd = nd_cpu_attention_bwd;
    table.attention_delta = nd_cpu_attention_delta;
    table.attention_scratch = nd_cpu_attention_scratch;
    *out = &table;
    return ND_OK;
}
