// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_LT_PLAN_H
#define ND_CUDA_LT_PLAN_H
/* One form of a cuBLASLt product in the library's own, column-major terms, and the table of
 * plans. */
#include <stdbool.h>

#include "kernels/cuda/lt_library.h"
#include "runtime/device/device.h"
#include "runtime/tensor/dtype.h"

typedef enum nd_lt_scaling {
    ND_LT_UNSCALED = 0,
    ND_LT_SCALARS, /* one per operand */
    ND_LT_VECTORS  /* (m) for A, (n) for B */
} nd_lt_scaling;

/* d (m, n) = op(A) op(B) + beta d, all column-major. Compared by bytes: no padding is left
 * unset. */
typedef struct nd_lt_key {
    int64_t m, n, k, lda, ldb, ldd;
    int32_t a, b, d; /* nd_dtype */
    int32_t a_transposed, b_transposed;
    int32_t beta;                      /* 0 or 1 */
    int32_t fast;                      /* accumulation with fewer bits */
    int32_t scaling;                   /* nd_lt_scaling */
    int32_t align_a, align_b, align_d; /* bytes, powers of two up to 256 */
    int32_t unused;
} nd_lt_key;

typedef struct nd_lt_plan {
    nd_lt_key key;
    bool used, refused; /* refused: the library has no algorithm for it */
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
} nd_lt_plan;

enum { ND_LT_CANDIDATES = 16 };

/* Descriptor, layouts and up to `wanted` algorithms, best first. *found is at least 1 on
 * success. */
nd_status nd_lt_plan_init(const nd_lt_library *library, cublasLtHandle_t handle, nd_lt_key key,
                          int wanted, nd_lt_plan *plan, cublasLtMatmulHeuristicResult_t *results,
                          int *found);
/* Largest power of two, at most 256, that divides the address. */
int32_t nd_lt_alignment(const void *p);

#endif
