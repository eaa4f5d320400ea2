// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_KERNELS_H
#define ND_CUDA_KERNELS_H
/*
 * Launchers of our CUDA kernels: every op of ND_EACH_KERNEL_OP, and what products and attention
 * need besides their libraries. Plain C, without CUDA headers; nothing is allocated and no launcher
 * waits. The tests compile the same .cu files for the host (tests/hostcuda).
 *
 * A launcher has the arguments of the op of its name (kernels/ops.h: formulas, shapes, aliases),
 * with the stream as a cudaStream_t, and returns a cudaError_t (0: launched). The caller checks
 * shapes: cuda.c asserts them. Any extents, strides and alignments work; pointers and row strides
 * of whole 16 bytes are the fast path. Pointers to results and operands are device memory; the
 * arguments, and the ranges of an optimizer, are host memory that is read before the launcher
 * returns.
 *
 * `scratch`: ND_CUDA_SCRATCH bytes of device memory, aligned to 256, for embedding_bwd, rmsnorm_bwd
 * and sum_squares; the others take NULL too. It is lent until the kernels have run, so streams that
 * run at the same time have one each. Its contents do not matter.
 *
 * Determinism: sums are in an order given by the shape and the number of processors of the GPU;
 * atomics only find maxima and count.
 */
#include "kernels/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *nd_cuda_queue; /* cudaStream_t */

enum {
    ND_CUDA_SCRATCH = 16 << 20,
    /* Most tokens of embedding_bwd: 20 bytes each, in whole tiles of its sort. */
    ND_CUDA_EMBEDDING_TOKENS = ND_CUDA_SCRATCH / 20 / 512 * 512,
    ND_PLAIN_HEAD_DIM = 256,                    /* the most of attention without cuDNN */
    ND_CUDA_NORM_COLUMNS = ND_CUDA_SCRATCH / 4, /* the most of rmsnorm_bwd: one block's sums */
    ND_CUDA_FP8_ROWS = 16                       /* what divides the rows of an FP8 product */
};

/* The limits that the table of ops and its planner have. */
#define ND_CUDA_LIMITS                                                                             \
    {                                                                                              \
        .hidden = ND_CUDA_NORM_COLUMNS, .head_dim = ND_PLAIN_HEAD_DIM, .tokens = INT32_MAX         \
    }

#define ND_CUDA_LAUNCHER(op, prefix)                                                               \
    int prefix##op(nd_cuda_queue, const nd_##op##_args *, void *scratch);
ND_EACH_KERNEL_OP(ND_CUDA_LAUNCHER, nd_cuda_)

/*
 * Attention without cuDNN, for what cuDNN does not take: F32, head sizes that are no multiple of 8
 * or above 128, rows that see no key. One thread per row, F32 throughout, a fixed order: correct on
 * every GPU, and slow. lse and delta may also be strided like views of rows, and without dk.data
 * only dq is computed; head_dim at most ND_PLAIN_HEAD_DIM. owners (documents.h): NULL, or I32 (2,
 * B, Sq): of each row who computes it, -1 for these kernels, and the end of its segment. Results of
 * other rows, and what they add to keys, are left out.
 */
int nd_cuda_attention_plain_fwd(nd_cuda_queue, const nd_attention_fwd_args *,
                                const int32_t *owners);
int nd_cuda_attention_plain_bwd(nd_cuda_queue, const nd_attention_bwd_args *,
                                const int32_t *owners);

/*
 * A library that multiplies codes only leaves this of an FP8 product: c (m, n) = product (m, n;
 * F32) a[i] b[j] + beta c. a: F32 (1), or (m) with a_rows; b: F32 (1), or (n) with b_columns.
 * product may be c.
 */
typedef struct nd_fp8_rescale_args {
    nd_tensor c, product; /* (m, n) */
    const float *a, *b;
    bool a_rows, b_columns;
    float beta;
} nd_fp8_rescale_args;
int nd_cuda_fp8_rescale(nd_cuda_queue, const nd_fp8_rescale_args *);
/* to[0] = *a, to[stride] = *b; both on the device. */
int nd_cuda_copy_scales(nd_cuda_queue, float *to, int stride, const float *a, const float *b);

#ifdef __cplusplus
}
#endif
#endif
