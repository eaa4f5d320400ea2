// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_OPS_H
#define ND_CUDA_OPS_H
/*
 * The CUDA backend's table. A program that was built without the CUDA part has these functions too:
 * those that need a GPU fail there with ND_ERR_CONFIG, those that a plan needs work (planner.c).
 */
#include "kernels/cuda/lt_choice.h"
#include "kernels/ops.h"

/* Opens cuBLASLt and cuDNN and creates the table and what its ops keep, which the device owns until
 * it is closed. deterministic: the backward of attention adds in a fixed order (everything else
 * always does). */
nd_status nd_ops_cuda(nd_device *device, bool deterministic, const nd_ops **out);
/* True in a program that was built with CUDA and without cudnn-frontend: nd_ops_cuda fails. */
bool nd_ops_cuda_lacks_cudnn(void);
/* A table for planning only, in every build: it has no ops but the queries, which take any
 * device. */
nd_ops nd_ops_cuda_planner(bool deterministic);

/* Facts about a device, and about the calls that were prepared on it. */
typedef struct nd_cuda_facts {
    char machine[96];     /* "sm_90, CUDA 13.0, driver 13.0, cuBLASLt 130100, cuDNN 91900" */
    int capability;       /* 90: Hopper */
    size_t cublaslt;      /* version, 130100 */
    bool plain_windows;   /* plain kernels compute attention for its window's sake (sdpa.h) */
    bool plain_documents; /* they compute whole calls of separate documents (documents.h) */
} nd_cuda_facts;

/* Borrowed from the device, after nd_ops_cuda. */
const nd_cuda_facts *nd_ops_cuda_facts(const nd_device *device);
/* True where cuDNN takes calls of such documents on Hopper. Every build can answer. */
bool nd_ops_cuda_takes_documents(const nd_attention *a, nd_dtype act, bool deterministic);

/*
 * Lays products out for so many of the GPU's multiprocessors, so that the blocks of a collective
 * that runs beside them find room; 0: for all. Before the first product. ND_ERR_CONFIG when the GPU
 * has fewer.
 */
nd_status nd_ops_cuda_limit_products(nd_device *device, int64_t processors);

/*
 * Autotune of the products, nd_ops.tuner of a GPU's ops.
 *   tune      until install the first use of a form times the library's best `candidates`
 *             algorithms on the operands of the call, whose result is lost, and keeps the fastest;
 *             after `seconds` in total the library's first choice. 0 or 1 candidates: off. Marks
 *             forms as not yet used
 *   choices   the forms used since tune, in the order of their first uses; returns how many
 *   install   forgets all forms, then adopts these choices, which may come from another run or
 *             rank. ND_ERR_CONFIG when the library does not accept one
 *   unchosen  forms met since install that were not among the choices
 *   median    seconds of what `call` enqueues: the median of `repeats` (16 at most) calls after a
 *             first one. Waits
 */
struct nd_tuner {
    void (*tune)(nd_device *device, int candidates, double seconds);
    int (*choices)(const nd_device *device, nd_lt_choice out[ND_LT_PLANS]);
    nd_status (*install)(nd_device *device, const nd_lt_choice *choices, int count);
    int (*unchosen)(const nd_device *device);
    nd_status (*median)(nd_stream *stream, nd_status (*call)(void *context, nd_stream *stream),
                        void *context, int repeats, double *seconds);
};

#endif
