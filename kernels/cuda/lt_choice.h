// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_LT_CHOICE_H
#define ND_CUDA_LT_CHOICE_H
/*
 * This says which algorithm of cuBLASLt makes a form of product, as autotune finds, records and
 * replays it, and how much memory products borrow. The header has no types of CUDA, so any build
 * can read and write records and plan memory.
 */
#include <stddef.h>
#include <stdint.h>

#include "kernels/ops.h"

enum {
    ND_LT_WORKSPACE = 32 << 20, /* what the library advises for Hopper */
    ND_LT_SCALES = 256,         /* bytes behind it, for the scales of one product */
    ND_LT_PRODUCT_BYTES =
        64 << 20, /* most scratch of a product whose scales are applied afterwards */
};

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
    int32_t processors;                /* that it is laid out for; 0: all of the GPU */
} nd_lt_key;

enum {
    ND_LT_PLANS = 1024,   /* more than the forms of a run */
    ND_LT_CANDIDATES = 16 /* most algorithms that are timed for one */
};

typedef struct nd_lt_choice {
    nd_lt_key key;
    uint64_t algorithm[8]; /* a cublasLtMatmulAlgo_t, valid for one version of the library */
    int64_t workspace;     /* bytes that the library asks for when it checks the algorithm */
    int64_t candidates;    /* how many were timed; 0: no time was left, or there was only one */
    int64_t picked;        /* its index in the library's own order, from 0 */
    double seconds;        /* of this algorithm, and of the library's first; 0: not timed */
    double first_seconds;
} nd_lt_choice;

#endif
