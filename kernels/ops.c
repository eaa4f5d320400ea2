// SPDX-License-Identifier: Apache-2.0
#include "kernels/ops.h"

#include <stddef.h>

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

/* One pointer per op from the first on: an op added to the struct must be added to the list
 * above. */
#define ND_COUNT_OP(op) +1
_Static_assert(sizeof(nd_ops) - offsetof(nd_ops, matmul) ==
                   (0 ND_EACH_OP(ND_COUNT_OP)) * sizeof(void (*)(void)),
               "ND_EACH_OP lists every op of nd_ops");

nd_status nd_ops_check(const nd_ops *ops)
{
#define ND_CHECK_OP(op)                                                                            \
    if (!ops->op) {                                                                                \
        return nd_fail(ND_ERR_INTERNAL,                                                            \
                       "the \"%s\" backend does not implement the op \"" #op "\"", ops->name);     \
    }
    ND_EACH_OP(ND_CHECK_OP)
#undef ND_CHECK_OP
    return ND_OK;
}
