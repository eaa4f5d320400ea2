// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_CONTEXT_H
#define ND_CUDA_CONTEXT_H
/*
 * The CUDA ops keep this for one GPU: their table, cuBLASLt with its plans, the attention plans,
 * and the memory that a call borrows. nd_ops_cuda creates it in nd_device.native, and closing the
 * device destroys it.
 *
 * All ops of a rank run on one stream, so one workspace serves them; a second stream that computes
 * at the same time would need a workspace of its own.
 */
#include "kernels/cuda/attention_cudnn.h"
#include "kernels/cuda/cuda_ops.h"

struct nd_lt; /* lt.h */

typedef struct nd_cuda_context {
    nd_ops ops;
    nd_device *device;
    struct nd_lt *lt;
    nd_cudnn *cudnn;
    void *scratch;            /* ND_CUDA_SCRATCH bytes for the kernels */
    size_t attention_scratch; /* the most that was planned for a call of attention */
    int64_t ordered_bytes;    /* most bytes of scores of a deterministic call (sdpa_parts.h) */
    bool no_documents;        /* cuDNN has no plan for separate documents, or is wrong */
    int documents_checked;    /* bits: nd_segments and windows that were checked */
    bool attention_prepared;  /* plans were prepared, so attention_scratch is exact */
    nd_cuda_facts facts;
    bool deterministic; /* attention adds up gradients in a fixed order */
} nd_cuda_context;

static inline nd_cuda_context *nd_cuda_context_of(const nd_device *device)
{
    return device->native;
}

#endif
