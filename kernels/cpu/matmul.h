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

/* c (m, n) = a b^T + beta c of BF16 or F32, m <= ND_CPU_FEW_ROWS, whose rows are computed one by
 * one: their bits do not depend on m. */
enum { ND_CPU_FEW_ROWS = 8 };
void nd_cpu_multiply_few_rows(nd_stream *stream, const nd_product_args *args);

#endif
