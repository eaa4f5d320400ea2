// SPDX-License-Identifier: Apache-2.0
#include "kernels/ref/ref.h"

static const nd_ops ref_ops = {
    .name = "ref",
    .matmul = nd_ref_matmul,
    .embedding_fwd = nd_ref_embedding_fwd,
    .embedding_bwd = nd_ref_embedding_bwd,
    .rmsnorm_fwd = nd_ref_rmsnorm_fwd,
    .rmsnorm_bwd = nd_ref_rmsnorm_bwd,
    .rope = nd_ref_rope,
    .swiglu_fwd = nd_ref_swiglu_fwd,
    .swiglu_bwd = nd_ref_swiglu_bwd,
    .attention_fwd = nd_ref_attention_fwd,
    .attention_delta = nd_ref_attention_delta,
    .attention_bwd = nd_ref_attention_bwd,
    .attention_scratch = nd_ref_attention_scratch,
    .lse_merge = nd_ref_lse_merge,
    .ce_stats = nd_ref_ce_stats,
    .ce_rescale = nd_ref_ce_rescale,
    .ce_loss = nd_ref_ce_loss,
    .ce_bwd = nd_ref_ce_bwd,
    .add = nd_ref_add,
    .accumulate = nd_ref_accumulate,
    .cast = nd_ref_cast,
    .sum_squares = nd_ref_sum_squares,
    .random_normal = nd_ref_random_normal,
    .adamw = nd_ref_adamw,
    .sgd = nd_ref_sgd,
    .amax = nd_ref_amax,
    .fp8_scale = nd_ref_fp8_scale,
    .fp8_delayed = nd_ref_fp8_delayed,
    .fp8_cast = nd_ref_fp8_cast,
    .fp8_transpose = nd_ref_fp8_transpose,
    .fp8_count = nd_ref_fp8_count,
    .matmul_fp8 = nd_ref_matmul_fp8,
    .matmul_fp8_scratch = nd_ref_matmul_fp8_scratch,
};

nd_status nd_ops_ref(const nd_ops **out)
{
    ND_TRY(nd_ops_check(&ref_ops));
    *out = &ref_ops;
    return ND_OK;
}
