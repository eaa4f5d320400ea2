// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_OPS_H
#define ND_CPU_OPS_H
/* The CPU backend's ops, one per entry of kernels/ops.h, where their contracts are. cpu.c makes the
 * table of them. */
#include "kernels/ops.h"

nd_status nd_cpu_matmul(nd_stream *, nd_tensor c, nd_tensor a, bool a_transposed, nd_tensor b,
                        bool b_transposed, float beta);
nd_status nd_cpu_embedding_fwd(nd_stream *, nd_tensor out, nd_tensor ids, nd_tensor table,
                               int64_t first);
nd_status nd_cpu_embedding_bwd(nd_stream *, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                               int64_t first);
nd_status nd_cpu_rmsnorm_fwd(nd_stream *, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x,
                             nd_tensor delta, nd_tensor weight, float eps, const nd_fuse *fuse);
nd_status nd_cpu_rmsnorm_bwd(nd_stream *, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                             nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd);
nd_status nd_cpu_rope(nd_stream *, nd_tensor out, nd_tensor x, nd_tensor positions,
                      nd_rope_view table, bool inverse);
nd_status nd_cpu_swiglu_fwd(nd_stream *, nd_tensor out, nd_tensor gate, nd_tensor up,
                            const nd_fuse *fuse);
nd_status nd_cpu_swiglu_bwd(nd_stream *, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                            nd_tensor gate, nd_tensor up, const nd_fuse *fuse_gate,
                            const nd_fuse *fuse_up);
nd_status nd_cpu_attention_fwd(nd_stream *, const nd_attention *, nd_tensor out, nd_tensor lse,
                               nd_tensor q, nd_tensor k, nd_tensor v, void *scratch);
nd_status nd_cpu_attention_delta(nd_stream *, const nd_attention *, nd_tensor delta, nd_tensor out,
                                 nd_tensor dout);
nd_status nd_cpu_attention_bwd(nd_stream *, const nd_attention *, nd_tensor dq, nd_tensor dk,
                               nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor out,
                               nd_tensor dout, nd_tensor lse, nd_tensor delta, bool add_q,
                               bool add_kv, void *scratch);
size_t nd_cpu_attention_scratch(const nd_device *, const nd_attention *, nd_dtype act,
                                bool backward);
bool nd_cpu_attention_uses_delta(const nd_device *, const nd_attention *, nd_dtype act);
nd_status nd_cpu_lse_merge(nd_stream *, const nd_attention *, nd_tensor acc, nd_tensor acc_lse,
                           nd_tensor out, nd_tensor lse);
nd_status nd_cpu_ce_stats(nd_stream *, nd_tensor row_max, nd_tensor row_sum, nd_tensor target,
                          nd_tensor logits, nd_tensor labels, int64_t first, int64_t valid);
nd_status nd_cpu_ce_rescale(nd_stream *, nd_tensor row_sum, nd_tensor row_max,
                            nd_tensor global_max);
nd_status nd_cpu_ce_loss(nd_stream *, double *loss_sum, nd_tensor max, nd_tensor sum,
                         nd_tensor target, nd_tensor labels);
nd_status nd_cpu_ce_bwd(nd_stream *, nd_tensor logits, nd_tensor max, nd_tensor sum,
                        nd_tensor labels, int64_t first, int64_t valid, const int64_t *count);
nd_status nd_cpu_add(nd_stream *, nd_tensor out, nd_tensor a, nd_tensor b);
nd_status nd_cpu_accumulate(nd_stream *, nd_tensor acc, nd_tensor x);
nd_status nd_cpu_cast(nd_stream *, nd_tensor out, nd_tensor x);
nd_status nd_cpu_sum_squares(nd_stream *, double *out, const float *x, int64_t count);
nd_status nd_cpu_random_normal(nd_stream *, float *out, int64_t count, float deviation,
                               uint64_t seed, uint64_t random_stream, uint64_t first);
nd_status nd_cpu_adamw(nd_stream *, const nd_adamw *, float *p, float *m, float *v,
                       const float *grad, const nd_flat_range *ranges, int range_count);
nd_status nd_cpu_sgd(nd_stream *, const nd_adamw *, float *p, const float *grad,
                     const nd_flat_range *ranges, int range_count);
nd_status nd_cpu_amax(nd_stream *, float *amax, nd_tensor x, nd_granularity granularity,
                      bool merge);
nd_status nd_cpu_fp8_scale(nd_stream *, float *scale, float *inverse, const float *amax,
                           int64_t count, nd_dtype format, bool power_of_two);
nd_status nd_cpu_fp8_delayed(nd_stream *, const nd_fp8_history *history,
                             nd_amax_algorithm algorithm);
nd_status nd_cpu_fp8_cast(nd_stream *, nd_fp8 out, float *amax, nd_tensor x);
nd_status nd_cpu_fp8_transpose(nd_stream *, nd_tensor out, nd_tensor codes);
nd_status nd_cpu_fp8_count(nd_stream *, int64_t counts[2], nd_tensor x, nd_fp8 as);
nd_status nd_cpu_matmul_fp8(nd_stream *, nd_tensor c, nd_fp8 a, bool a_transposed, nd_fp8 b,
                            bool b_transposed, float beta, bool fast_accumulation, void *scratch);
size_t nd_cpu_matmul_fp8_scratch(const nd_device *, int64_t m, int64_t n, int64_t k, nd_dtype act);

#endif
