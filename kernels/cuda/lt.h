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
 * lt_plan.c makes and runs plans, lt_tune.c chooses among algorithms, matmul_lt.c turns the calls
 * of the backend into plans. One host thread at a time, the one that drives the device.
 */
#include "kernels/cuda/lt_choice.h"
#include "kernels/cuda/lt_library.h"
#include "kernels/ops.h"

typedef struct nd_lt nd_lt;

/* Opens cuBLASLt and allocates the workspace. ND_ERR_CONFIG when the library is missing or too
 * old. */
nd_status nd_lt_create(nd_device *device, int capability, nd_lt **out);
void nd_lt_destroy(nd_lt *lt); /* NULL is legal */

nd_status nd_lt_matmul(nd_lt *lt, nd_stream *stream, const nd_product_args *args);
nd_status nd_lt_matmul_fp8(nd_lt *lt, nd_stream *stream, const nd_product_args *args);

/* One form of a product in the library's own, column-major terms. */
typedef struct nd_lt_plan {
    nd_lt_key key;
    bool used, refused; /* refused: the library does not make it with vectors of scales */
    cublasLtMatmulDescOpaque_t desc;
    cublasLtMatrixLayoutOpaque_t a, b, d;
    cublasLtMatmulAlgo_t algorithm;
    size_t workspace;
    /* Autotune. */
    bool chosen;  /* by autotune, or installed from a record */
    bool touched; /* called since the last nd_ops_cuda_tune */
    int number;   /* in the order of first uses */
    int candidates, picked;
    double seconds, first_seconds;
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
    /* Plans are made and nothing is enqueued: operands need no memory, but addresses that are
     * aligned as those of the calls. */
    bool preparing;
    uint32_t told; /* kinds of vector forms whose refusal the log has */
    void *workspace;
    nd_lt_plan plans[ND_LT_PLANS]; /* open addressing */
};

/* Pointers of one call. Scales: NULL for 1. */
typedef struct nd_lt_operands {
    const void *a, *b;
    void *d;
    const float *scale_a, *scale_b;
} nd_lt_operands;

/* Makes the descriptor, the layouts and up to `wanted` algorithms, best first, for a plan of the
 * table. *found is at least 1 on success. Until a product sets its scales, their pointers lead into
 * the workspace. */
nd_status nd_lt_plan_init(nd_lt *lt, nd_lt_key key, int wanted, nd_lt_plan *plan,
                          cublasLtMatmulHeuristicResult_t *results, int *found);
/* Makes a plan from a recorded algorithm. ND_ERR_CONFIG when the library does not accept it, or
 * when a setting or its workspace differs from the record. */
nd_status nd_lt_plan_restore(nd_lt *lt, const nd_lt_choice *choice, nd_lt_plan *plan);
/* The place of a form in the table: its plan, or a free one. */
nd_lt_plan *nd_lt_slot(nd_lt *lt, const nd_lt_key *key);
/* Enqueues the product of a plan; nothing while plans are prepared. */
nd_status nd_lt_run(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x);
/* The settings of an algorithm; -1 where the library has no value. */
nd_lt_traits nd_lt_traits_of(const nd_lt_library *library, const cublasLtMatmulAlgo_t *algorithm);
/* Largest power of two, at most 256, that divides the address. */
int32_t nd_lt_alignment(const void *p);

/* Times the algorithms that the library proposed on the operands of the call, whose result is lost,
 * and keeps the fastest of those that a record can restore. plan->chosen stays false when there is
 * none; then the first algorithm of the library makes the product. */
nd_status nd_lt_choose(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x,
                       const cublasLtMatmulHeuristicResult_t *results, int found);

#endif
