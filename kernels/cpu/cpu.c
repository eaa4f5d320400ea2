// SPDX-License-Identifier: Apache-2.0
#include "kernels/cpu/cpu_ops.h"

#include "kernels/cpu/context.h"

static const nd_ops cpu_ops = {
    .name = "cpu",
    .matmul = nd_cpu_matmul,
    .embedding_fwd = nd_cpu_embedding_fwd,
    .embedding_bwd = nd_cpu_embedding_bwd,
    .rmsnorm_fwd = nd_cpu_rmsnorm_fwd,
    .rmsnorm_bwd = nd_cpu_rmsnorm_bwd,
    .rope = nd_cpu_rope,
    .swiglu_fwd = nd_cpu_swiglu_fwd,
    .swiglu_bwd = nd_cpu_swiglu_bwd,
    .attention_fwd = nd_cpu_attention_fwd,
    .attention_delta = nd_cpu_attention_delta,
    .attention_bwd = nd_cpu_attention_bwd,
    .attention_scratch = nd_cpu_attention_scratch,
    .lse_merge = nd_cpu_lse_merge,
    .ce_stats = nd_cpu_ce_stats,
    .ce_rescale = nd_cpu_ce_rescale,
    .ce_loss = nd_cpu_ce_loss,
    .ce_bwd = nd_cpu_ce_bwd,
    .add = nd_cpu_add,
    .accumulate = nd_cpu_accumulate,
    .cast = nd_cpu_cast,
    .sum_squares = nd_cpu_sum_squares,
    .random_normal = nd_cpu_random_normal,
    .adamw = nd_cpu_adamw,
    .sgd = nd_cpu_sgd,
    .amax = nd_cpu_amax,
    .fp8_scale = nd_cpu_fp8_scale,
    .fp8_delayed = nd_cpu_fp8_delayed,
    .fp8_cast = nd_cpu_fp8_cast,
    .fp8_transpose = nd_cpu_fp8_transpose,
    .fp8_count = nd_cpu_fp8_count,
    .matmul_fp8 = nd_cpu_matmul_fp8,
    .matmul_fp8_scratch = nd_cpu_matmul_fp8_scratch,
};

nd_status nd_ops_cpu(nd_device *device, const nd_ops **out)
{
    ND_TRY(nd_ops_check(&cpu_ops));
    ND_TRY(nd_cpu_context_create(device));
    *out = &cpu_ops;
    return ND_OK;
}
