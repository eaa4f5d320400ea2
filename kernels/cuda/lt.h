// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_LT_H
#define ND_CUDA_LT_H
/*
 * Matrix products through cuBLASLt: BF16, F32 and FP8. One plan (descriptor, layouts, algorithm)
 * per form of call, kept once it was made; a step whose forms were prepared asks the library for
 * nothing and allocates nothing.
 *
 * cuBLASLt is column-major: a row-major c (m, n) = op(a) op(b) is its c^T (n, m) = op(b)^T op(a)^T,
 * so its A is our b.
 *
 * One host thread at a time, the one that drives the device.
 */
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/lt_library.h"

typedef struct nd_lt nd_lt;

/* Opens cuBLASLt and allocates the workspace. ND_ERR_CONFIG when the library is missing or too
 * old. */
nd_status nd_lt_create(nd_device *device, int capability, nd_lt **out);
void nd_lt_destroy(nd_lt *lt); /* NULL is legal */

/* prepare: makes the plans and enqueues nothing. Operands need no memory then, but addresses that
 * are aligned as those of the call. */
nd_status nd_lt_product(nd_lt *lt, nd_stream *stream, const nd_product_args *args, bool prepare);

extern const struct nd_tuner nd_lt_tuner;

/* One form of a product in the library's own, column-major terms. */
typedef struct nd_lt_plan {
    nd_lt_choice record; /* its algorithm and traits are read by nd_tuner.choices */
    bool used, refused;  /* refused: the library does not make it with vectors of scales */
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    bool chosen;  /* by autotune, or installed from a record */
    bool touched; /* called since the last nd_tuner.tune */
    int number;   /* in the order of first uses */
} nd_lt_plan;

struct nd_lt {
    nd_device *device;
    nd_lt_library library;
    cublasLtHandle_t handle;
    int capability, plan_count; /* plan_count: forms met so far */
    int candidates;             /* that the first use of a form times; 0 or 1: none */
    int processors;             /* of new forms; 0: all of the GPU */
    double deadline; /* of tuning, on nd_clock_seconds: then the library's first choice */
    bool installed;  /* choices were installed */
    bool preparing;  /* in nd_lt_product */
    uint32_t told;   /* kinds of vector forms whose refusal the log has */
    void *workspace;
    nd_lt_plan plans[ND_LT_PLANS]; /* open addressing */
};

#endif
