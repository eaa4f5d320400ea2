// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REF_REF_H
#define ND_REF_REF_H
/*
 * The oracle: every op of kernels/ops.h as the plainest loop that states its formula. One thread,
 * no blocking, no vectorisation. Stored values are F32 or BF16; formulas with sums or functions are
 * evaluated in F64 and rounded once when stored, so that a comparison measures the error of the
 * other backend. Plain F32 steps (add, accumulate, rescale, optimizers) are done in F32, in the
 * order that ops.h writes.
 */
#include "kernels/ops.h"
#include "kernels/ops_check.h"

/* Element `at` (an offset of memory, not of shape) of an F32 or BF16 view. */
static inline float nd_ref_get(nd_tensor t, int64_t at)
{
    return t.dtype == ND_DTYPE_F32 ? ((const float *)t.data)[at]
                                   : nd_bf16_to_f32(((const nd_bf16 *)t.data)[at]);
}

/* Rounds twice, to F32 and then to the view's dtype, as a kernel that computes in F32 does. */
static inline void nd_ref_put(nd_tensor t, int64_t at, double value)
{
    if (t.dtype == ND_DTYPE_F32) {
        ((float *)t.data)[at] = (float)value;
    } else {
        ((nd_bf16 *)t.data)[at] = nd_bf16_from_f32((float)value);
    }
}

/* Element (i, j) of a 2-d result: stored if `out` has data, and what `fuse` (may be NULL) asks
 * for. */
void nd_ref_emit(nd_tensor out, const nd_fuse *fuse, int64_t i, int64_t j, double value);

nd_status nd_ref_matmul(nd_stream *, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta);
nd_status nd_ref_embedding_fwd(nd_stream *, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first);
nd_status nd_ref_embedding_bwd(nd_stream *, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first);
nd_status nd_ref_rmsnorm_fwd(nd_stream *, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x,
                             nd_tensor delta, nd_tensor weight, float eps, const nd_fuse *fuse);
nd_status nd_ref_rmsnorm_bwd(nd_stream *, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                             nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd);
nd_status nd_ref_rope(nd_stream *, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse);
nd_status nd_ref_swiglu_fwd(nd_stream *, nd_tensor out, nd_tensor gate, nd_tensor up,
                            const nd_fuse *fuse);
nd_status nd_ref_swiglu_bwd(nd_stream *, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up, const nd_fuse *fuse_gate,
                            const nd_fuse *fuse_up);
nd_status nd_ref_attention_fwd(nd_stream *, const nd_attention *, nd_tensor out, nd_tensor lse,
                               nd_tensor q, nd_tensor k, nd_tensor v, void *scratch);
nd_status nd_ref_attention_delta(nd_stream *, const nd_attention *, nd_tensor delta, nd_tensor out,
                                 nd_tensor dout);
nd_status nd_ref_attention_bwd(nd_stream *, const nd_attention *, nd_tensor dq, nd_tensor dk,
                               nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out,
                               nd_tensor dout, nd_tensor lse, nd_tensor delta, bool add_q,
                               bool add_kv, void *scratch);
size_t nd_ref_attention_scratch(const nd_device *, const nd_attention *, nd_dtype act,
                                bool backward);
bool nd_ref_attention_uses_delta(const nd_device *, const nd_attention *, nd_dtype act);
nd_status nd_ref_lse_merge(nd_stream *, const nd_attention *, nd_tensor acc, nd_tensor acc_lse,
                           nd_tensor out, nd_tensor lse);
nd_status nd_ref_ce_stats(nd_stream *, nd_tensor row_max, nd_tensor row_sum, nd_tensor target,
                          nd_tensor logits, nd_tensor labels, int64_t first, int64_t valid);
nd_status nd_ref_ce_rescale(nd_stream *, nd_tensor row_sum, nd_tensor row_max,
                            nd_tensor global_max);
nd_status nd_ref_ce_loss(nd_stream *, double *loss_sum, nd_tensor max, nd_tensor sum,
                         nd_tensor target, nd_tensor labels);
nd_status nd_ref_ce_bwd(nd_stream *, nd_tensor logits, nd_tensor max, nd_tensor sum,
                        nd_tensor labels, int64_t first, int64_t valid, const int64_t *count);
nd_status nd_ref_add(nd_stream *, nd_tensor out, nd_tensor a, nd_tensor b);
nd_status nd_ref_accumulate(nd_stream *, nd_tensor acc, nd_tensor x);
nd_status nd_ref_cast(nd_stream *, nd_tensor out, nd_tensor x);
nd_status nd_ref_sum_squares(nd_stream *, double *out, const float *x, int64_t count);
nd_status nd_ref_random_normal(nd_stream *, float *out, int64_t count, float deviation,
                               uint64_t seed, uint64_t random_stream, uint64_t first);
nd_status nd_ref_adamw(nd_stream *, const nd_adamw *, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count);
nd_status nd_ref_sgd(nd_stream *, const nd_adamw *, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count);
nd_status nd_ref_amax(nd_stream *, float *amax, nd_tensor x, nd_granularity granularity,
                      bool merge);
nd_status nd_ref_fp8_scale(nd_stream *, float *scale, float *inverse, const float *amax,
                           int64_t count, nd_dtype format, bool power_of_two);
nd_status nd_ref_fp8_delayed(nd_stream *, const nd_fp8_history *history,
                             nd_amax_algorithm algorithm);
nd_status nd_ref_fp8_cast(nd_stream *, nd_fp8 out, float *amax, nd_tensor x);
nd_status nd_ref_fp8_transpose(nd_stream *, nd_tensor out, nd_tensor codes);
nd_status nd_ref_fp8_count(nd_stream *, int64_t counts[2], nd_tensor x, nd_fp8 as);
nd_status nd_ref_matmul_fp8(nd_stream *, nd_tensor c, nd_fp8 a, bool a_transposed, nd_fp8 b,
                            bool b_transposed, float beta, bool fast_accumulation, void *scratch);
size_t nd_ref_matmul_fp8_scratch(const nd_device *, int64_t m, int64_t n, int64_t k, nd_dtype act);

#endif
