// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_MATMUL_H
#define ND_CPU_MATMUL_H
/*
 * Matrix products of the CPU backend: nd_cpu_matmul (declared in cpu_ops.h) hands them to oneDNN.
 *
 * Where the CPU has BF16 dot products (AVX512_BF16, AMX) oneDNN multiplies BF16 as it is. Elsewhere operands are
 * widened to F32, which is exact, tile by tile, multiplied in F32 and the sum is rounded once: on such CPUs oneDNN has
 * no BF16 product (AVX2) or one that is slower than this (AVX-512).
 */
#include <stddef.h>

enum { ND_CPU_WIDEN_TILE = 512 }; /* extents of a widened tile in m, n and k */

/* Floats of the three tiles (a, b, c) that the widening path needs. */
static inline size_t nd_cpu_widened_floats(void)
{
    return (size_t)3 * ND_CPU_WIDEN_TILE * ND_CPU_WIDEN_TILE;
}

#endif
