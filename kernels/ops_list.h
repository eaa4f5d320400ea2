// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_OPS_LIST_H
#define ND_KERNELS_OPS_LIST_H
/* Every op of nd_ops in its order (ops.c checks it), for tables and whatever else goes over all:
 * a table is {ND_EACH_OP(ENTRY)} with ENTRY(op) as `.op = function of that name,`. */
#define ND_EACH_OP(X)                                                                              \
    X(matmul)                                                                                      \
    X(embedding_fwd)                                                                               \
    X(embedding_bwd)                                                                               \
    X(rmsnorm_fwd)                                                                                 \
    X(rmsnorm_bwd)                                                                                 \
    X(rope)                                                                                        \
    X(swiglu_fwd)                                                                                  \
    X(swiglu_bwd)                                                                                  \
    X(attention_fwd)                                                                               \
    X(attention_delta)                                                                             \
    X(attention_bwd)                                                                               \
    X(attention_scratch)                                                                           \
    X(attention_uses_delta)                                                                        \
    X(lse_merge)                                                                                   \
    X(ce_stats)                                                                                    \
    X(ce_rescale)                                                                                  \
    X(ce_loss)                                                                                     \
    X(ce_bwd)                                                                                      \
    X(add)                                                                                         \
    X(accumulate)                                                                                  \
    X(cast)                                                                                        \
    X(sum_squares)                                                                                 \
    X(random_normal)                                                                               \
    X(adamw)                                                                                       \
    X(sgd)                                                                                         \
    X(amax)                                                                                        \
    X(fp8_scale)                                                                                   \
    X(fp8_delayed)                                                                                 \
    X(fp8_cast)                                                                                    \
    X(fp8_transpose)                                                                               \
    X(fp8_count)                                                                                   \
    X(matmul_fp8)                                                                                  \
    X(matmul_fp8_scratch)

#endif
