// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_GEMM_BF16_H
#define ND_CPU_GEMM_BF16_H
/*
 * Our own BF16 products, for CPUs that have BF16 dot products but no AMX: on Zen 4 they come within
 * 5 to 15 percent of what the registers can do, 5 percent closer than oneDNN 2.6. matmul.c chooses.
 *
 * The result is cut among the threads; each thread takes its part in blocks: 64 columns of B are
 * packed, multiplied with all rows of a block of A while they are in the second cache, and so on. A
 * is read where it lies unless it is transposed. A sum runs over k in order, in blocks of k whose
 * bounds depend on k alone, so its bits depend neither on the threads nor on the other extents.
 */
#include "kernels/cpu/dnnl_matmul.h"
#include "kernels/cpu/gemm_kernels.h"

typedef struct nd_gemm nd_gemm;

nd_status nd_gemm_create(const nd_gemm_kernels *kernels, int threads, nd_gemm **out);
void nd_gemm_destroy(nd_gemm *gemm); /* NULL is legal */

/* Whether nd_gemm_multiply can do it: BF16 operands, k even. */
bool nd_gemm_supports(const nd_dnnl_product *product);

/* c = op(a) op(b) factors (+ c); factors as nd_dnnl_matmul takes them. Where the sum goes to an F32
 * c in blocks of k, each is multiplied. Allocates nothing. One call at a time. */
void nd_gemm_multiply(nd_gemm *gemm, const nd_dnnl_product *product, void *c, const nd_bf16 *a,
                      const nd_bf16 *b, const float *factors);

#endif
