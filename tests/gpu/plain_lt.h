// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TESTS_GPU_PLAIN_LT_H
#define ND_TESTS_GPU_PLAIN_LT_H
/*
 * A plain loop of cuBLASLt, against which products are measured: the first algorithm that the
 * library proposes for the form, 32 MiB of workspace, nothing of ours between two calls.
 */
#include "kernels/cuda/lt.h"

typedef struct plain_lt {
    nd_lt_library library;
    cublasLtHandle_t handle;
    nd_device *device;
    void *workspace;
} plain_lt;

nd_status plain_lt_init(plain_lt *plain, nd_device *device);

typedef struct plain_lt_form {
    int64_t m, n, k;
    bool a_transposed, b_transposed;
    nd_dtype a, b, c;
    float beta;
    bool fast_accumulation; /* FP8 */
    bool vectors; /* FP8: a scale for each row of a and of b, where `scale` leads to them */
} plain_lt_form;

/* Row-major c (m, n) = op(a) op(b), FP8 always a (m, k) b^T (n, k) with the scales given, on device
 * memory; the mean of `repeats` products after a first one. Waits. */
typedef struct plain_lt_operands {
    const void *a, *b;
    void *c;
    const float *scale; /* FP8: of a and of b */
} plain_lt_operands;
nd_status plain_lt_time(plain_lt *plain, nd_stream *stream, const plain_lt_form *form,
                        const plain_lt_operands *on, int repeats, double *seconds);

/* The library's answers for a form and for one product of it, each a cublasStatus_t, and CUDA's
 * answer when the GPU has made the product. -1: not asked, as the step before was refused. */
typedef struct plain_lt_answer {
    int heuristic, product, gpu;
    double seconds; /* of a second product */
} plain_lt_answer;
nd_status plain_lt_probe(plain_lt *plain, nd_stream *stream, const plain_lt_form *form,
                         const plain_lt_operands *on, plain_lt_answer *out);

#endif
