// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_LT_STATE_H
#define ND_CUDA_LT_STATE_H
/* What matmul_lt.c and lt_tune.c share. */
#include "kernels/cuda/lt_plan.h"
#include "kernels/cuda/matmul_lt.h"

struct nd_lt {
    nd_device *device;
    nd_lt_library library;
    cublasLtHandle_t handle;
    int capability, candidates, plan_count;
    double deadline; /* of tuning, in seconds of nd_clock_seconds */
    bool installed;  /* choices were installed */
    bool preparing;  /* plans are made, nothing is enqueued */
    void *workspace;
    nd_lt_plan plans[ND_LT_PLANS]; /* open addressing */
};

/* Pointers of one call. Scales: NULL for 1. */
typedef struct nd_lt_operands {
    const void *a, *b;
    void *d;
    const float *scale_a, *scale_b;
} nd_lt_operands;

nd_status nd_lt_run(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x);
/* The place of a form in the table: its plan, or a free one. */
nd_lt_plan *nd_lt_slot(nd_lt *lt, const nd_lt_key *key);
/*
 * Times the algorithms that the library proposed on the operands of the call, whose result is lost,
 * and keeps the fastest of those that the library takes back from a record. plan->chosen stays
 * false when there is none: the library's first choice makes the product.
 */
nd_status nd_lt_choose(nd_lt *lt, nd_stream *stream, nd_lt_plan *plan, const nd_lt_operands *x,
                       const cublasLtMatmulHeuristicResult_t *results, int found);

#endif
