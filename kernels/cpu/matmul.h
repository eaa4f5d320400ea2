// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_MATMUL_H
#define ND_CPU_MATMUL_H
/*
 * Matrix products of the CPU backend: those of BF16 and of FP8 codes are ours (gemm.h) on CPUs with
 * AVX-512 or AMX; others are oneDNN's.
 *
 * Where the CPU has no BF16 dot products oneDNN has no BF16 product (AVX2) or a slow one (AVX-512):
 * what is not ours there is widened to F32, which is exact, tile by tile, multiplied in F32, and
 * the sum is rounded once.
 */
#include "kernels/cpu/context.h"
#include "runtime/tensor/tensor.h"

/* c = op(a) op(b) factors (+ c) by our own kernels, where the context has them. c is BF16 or F32; p
 * has the extents, and whether operands are transposed and c is added to; factors and kept may
 * be NULL. */
void nd_cpu_multiply_own(nd_cpu_context *context, nd_tensor c, nd_gemm_operand a, nd_gemm_operand b,
                         const nd_dnnl_product *p, const nd_gemm_factors *factors,
                         nd_kept_form *kept);
/* The product of FP8 matrices (matmul_fp8.c). */
nd_status nd_cpu_product_fp8(nd_stream *stream, const nd_product_args *args,
                             const nd_dnnl_product *p);
/* A matrix of BF16 or of codes, as it is. */
nd_gemm_operand nd_cpu_operand_of(nd_tensor x);

/*
 * c = op(a) op(b) factor (+ c) by widening to F32. a and b BF16 or FP8 codes, c BF16 or F32; p has
 * the extents, and whether operands are transposed and c is added to. Only where the context has
 * tiles for it.
 */
nd_status nd_cpu_multiply_widened(nd_stream *stream, nd_tensor c, nd_tensor a, nd_tensor b,
                                  const nd_dnnl_product *p, const nd_gemm_factors *factors);

/* c (m, n) = a b^T + beta c of BF16 or F32, m <= ND_CPU_FEW_ROWS, whose rows are computed one by
 * one: their bits do not depend on m. */
enum { ND_CPU_FEW_ROWS = 8 };
void nd_cpu_multiply_few_rows(nd_stream *stream, const nd_product_args *args);

#endif
