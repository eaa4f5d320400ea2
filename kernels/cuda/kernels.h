// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CUDA_KERNELS_H
#define ND_CUDA_KERNELS_H
/*
 * Launchers of our CUDA kernels: everything of kernels/ops.h but products and attention itself.
 * Plain C, without CUDA headers; nothing is allocated and no launcher waits. The tests compile the
 * same .cu files for the host (tests/hostcuda).
 *
 * Each launcher has the arguments of the op of its name (kernels/ops.h: formulas, shapes, aliases),
 * with the stream as a cudaStream_t, and returns a cudaError_t (0: launched). Shapes are the
 * caller's business: cuda.c asserts them. Any extents, strides and alignments work; pointers and
 * row strides of whole 16 bytes are the fast path. Pointers to results and operands are device
 * memory, structs given by pointer are read before the launcher returns.
 *
 * `scratch`: ND_CUDA_SCRATCH bytes of device memory, aligned to 256. Lent until the kernels have
 * run, so streams that run at the same time have one each. Its contents do not matter.
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
};

/* embedding */
int nd_cuda_embedding_fwd(nd_cuda_queue, nd_tensor out, nd_tensor ids, nd_tensor table,
                          int64_t first);
int nd_cuda_embedding_bwd(nd_cuda_queue, nd_tensor dtable, nd_tensor ids, nd_tensor dout,
                          int64_t first, void *scratch);

/* RMSNorm, RoPE, SwiGLU */
int nd_cuda_rmsnorm_fwd(nd_cuda_queue, nd_tensor y, nd_tensor sum, nd_tensor rstd, nd_tensor x,
                        nd_tensor delta, nd_tensor weight, float eps, const nd_fuse *fuse);
int nd_cuda_rmsnorm_bwd(nd_cuda_queue, nd_tensor dx, nd_tensor dweight, nd_tensor dy,
                        nd_tensor dres, nd_tensor x, nd_tensor weight, nd_tensor rstd,
                        void *scratch);
int nd_cuda_rope(nd_cuda_queue, nd_tensor out, nd_tensor x, nd_tensor positions, nd_rope_view table,
                 bool inverse);
int nd_cuda_swiglu_fwd(nd_cuda_queue, nd_tensor out, nd_tensor gate, nd_tensor up,
                       const nd_fuse *fuse);
int nd_cuda_swiglu_bwd(nd_cuda_queue, nd_tensor dgate, nd_tensor dup, nd_tensor dout,
                       nd_tensor gate, nd_tensor up, const nd_fuse *fuse_gate,
                       const nd_fuse *fuse_up);

/* beside attention */
int nd_cuda_attention_delta(nd_cuda_queue, const nd_attention *, nd_tensor delta, nd_tensor out,
                            nd_tensor dout);
int nd_cuda_lse_merge(nd_cuda_queue, const nd_attention *, nd_tensor acc, nd_tensor acc_lse,
                      nd_tensor out, nd_tensor lse);

/*
 * Attention without cuDNN, for what cuDNN does not take: F32, head sizes that are no multiple of 8
 * or above 128, rows that see no key. One thread per row, F32 throughout, a fixed order: correct on
 * every GPU, and slow. Arguments as in kernels/ops.h, but lse and delta may be strided like views
 * of rows, and without dk.data only dq is computed; head_dim at most ND_PLAIN_HEAD_DIM. Returns a
 * cudaError_t.
 */
enum { ND_PLAIN_HEAD_DIM = 256 };

int nd_cuda_attention_plain_fwd(nd_cuda_queue, const nd_attention *, nd_tensor out, nd_tensor lse,
                                nd_tensor q, nd_tensor k, nd_tensor v);
int nd_cuda_attention_plain_bwd(nd_cuda_queue, const nd_attention *, nd_tensor dq, nd_tensor dk,
                                nd_tensor dv, nd_tensor q, nd_tensor k, nd_tensor v, nd_tensor dout,
                                nd_tensor lse, nd_tensor delta, bool add_q, bool add_kv);

/* cross entropy */
int nd_cuda_ce_stats(nd_cuda_queue, nd_tensor row_max, nd_tensor row_sum, nd_tensor target,
                     nd_tensor logits, nd_tensor labels, int64_t first, int64_t valid);
int nd_cuda_ce_rescale(nd_cuda_queue, nd_tensor row_sum, nd_tensor row_max, nd_tensor global_max);
int nd_cuda_ce_loss(nd_cuda_queue, double *loss_sum, nd_tensor max, nd_tensor sum, nd_tensor target,
                    nd_tensor labels);
int nd_cuda_ce_bwd(nd_cuda_queue, nd_tensor logits, nd_tensor max, nd_tensor sum, nd_tensor labels,
                   int64_t first, int64_t valid, const int64_t *count);

/* elementwise, sums */
int nd_cuda_add(nd_cuda_queue, nd_tensor out, nd_tensor a, nd_tensor b);
int nd_cuda_accumulate(nd_cuda_queue, nd_tensor acc, nd_tensor x);
int nd_cuda_cast(nd_cuda_queue, nd_tensor out, nd_tensor x);
int nd_cuda_sum_squares(nd_cuda_queue, double *out, const float *x, int64_t count, void *scratch);
/* out (act, contiguous) = value. */
int nd_cuda_fill(nd_cuda_queue, nd_tensor out, float value);
int nd_cuda_random_normal(nd_cuda_queue, float *out, int64_t count, float deviation, uint64_t seed,
                          uint64_t random_stream, uint64_t first);

/* optimizers; ranges: host memory */
int nd_cuda_adamw(nd_cuda_queue, const nd_adamw *, float *p, float *m, float *v, const float *grad,
                  const nd_flat_range *ranges, int range_count);
int nd_cuda_sgd(nd_cuda_queue, const nd_adamw *, float *p, const float *grad,
                const nd_flat_range *ranges, int range_count);

/* FP8 */
int nd_cuda_amax(nd_cuda_queue, float *amax, nd_tensor x, nd_granularity granularity, bool merge);
int nd_cuda_fp8_scale(nd_cuda_queue, float *scale, float *inverse, const float *amax, int64_t count,
                      nd_dtype format, bool power_of_two);
int nd_cuda_fp8_delayed(nd_cuda_queue, const nd_fp8_history *history, nd_amax_algorithm algorithm);
int nd_cuda_fp8_cast(nd_cuda_queue, nd_fp8 out, float *amax, nd_tensor x);
int nd_cuda_fp8_transpose(nd_cuda_queue, nd_tensor out, nd_tensor codes);
int nd_cuda_fp8_count(nd_cuda_queue, int64_t *counts, nd_tensor x, nd_fp8 as);
/*
 * What a library leaves of matmul_fp8 that multiplies codes only: c (m, n) = product (m, n; F32)
 * a[i] b[j] + beta c. a: F32 (1), or (m) with a_rows; b: F32 (1), or (n) with b_columns. product
 * may be c.
 */
int nd_cuda_fp8_rescale(nd_cuda_queue, nd_tensor c, nd_tensor product, const float *a, bool a_rows,
                        const float *b, bool b_columns, float beta);

#ifdef __cplusplus
}
#endif
#endif
