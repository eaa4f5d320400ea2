// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_ATTENTION_PLAIN_H
#define ND_CUDA_ATTENTION_PLAIN_H
/*
 * Attention without cuDNN, for what cuDNN does not take: F32, head sizes that are no multiple of 8
 * or above 128, rows that see no key. One thread per row, F32 throughout, a fixed order: correct on
 * every GPU, and slow. Arguments as in kernels/ops.h, but lse and delta may be strided like views
 * of rows, and without dk.data only dq is computed; head_dim at most ND_PLAIN_HEAD_DIM. Returns a
 * cudaError_t.
 */
#include "kernels/cuda/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { ND_PLAIN_HEAD_DIM = 256 };

int nd_cuda_attention_plain_fwd(nd_cuda_queue, const nd_attention *, nd_tensor out, nd_tensor lse,
                                nd_tensor q, nd_tensor k, nd_tensor v);
int nd_cuda_attention_plain_bwd(nd_cuda_queue, const nd_attention *, nd_tensor dq, nd_tensor dk,
                                nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor dout,
                                nd_tensor lse, nd_tensor delta, bool add_q, bool add_kv);

#ifdef __cplusplus
}
#endif
#endif
