// SPDX-License-Identifier: Apache-2.0
#ifndef ND_REF_REF_H
#define ND_REF_REF_H
/*
 * The oracle: every op of kernels/ops.h as the plainest loop that states its formula. One thread,
 * no blocking, no vectorisation. Stored values are F32 or BF16; formulas with sums or functions are
 * evaluated in F64 and rounded once when stored, so that a comparison measures the error of the
 * other backend. Plain F32 steps (accumulate, rescale, optimizers) are done in F32, in the
 * order that ops.h writes.
 */
#include <math.h>

#include "kernels/ops.h"
#include "kernels/ops_check.h"

/* torch.max: NaN where either is. */
static inline float nd_ref_larger(float a, float b)
{
    return isnan(a) || a > b ? a : b;
}

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

ND_EACH_OP(ND_OP_PROTOTYPE, nd_ref_)
ND_EACH_QUERY(ND_QUERY_PROTOTYPE, nd_ref_)

#endif
