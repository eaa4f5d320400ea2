// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_FUSE_H
#define ND_CPU_FUSE_H
/*
 * Helpers with which the CPU ops do what nd_fuse asks for beside storing a result, piece by piece
 * of a row while it is in the first cache; and the largest |x| of a tensor among threads.
 *
 * Sizes are the bits of |x|, which are ordered as the numbers are, with NaN above infinity. The
 * largest is the same in whatever order threads report theirs.
 */
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/context.h"
#include "kernels/cpu/view.h"

static inline uint32_t nd_size_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & 0x7fffffff;
}

static inline float nd_size_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void nd_raise_largest(_Atomic uint32_t *most, uint32_t bits)
{
    uint32_t seen = atomic_load_explicit(most, memory_order_relaxed);
    while (bits > seen && !atomic_compare_exchange_weak_explicit(
                              most, &seen, bits, memory_order_relaxed, memory_order_relaxed)) {
    }
}

/* Computes n elements of each result, from (row, column) on. Pieces of a row come in order. */
typedef void (*nd_cpu_piece)(const nd_row_ops *rows, const void *args, void *const out[],
                             int64_t row, int64_t column, int64_t n);

/* Computes `count` results, 2 at most, of equal shape (rows, columns), and what each of them fuses.
 * A result's data may be NULL, and fuse all zero. `work`: of one row, as in nd_cpu_each. */
void nd_cpu_fused(nd_stream *stream, int count, const nd_tensor *results, const nd_fuse *fuse,
                  int64_t work, nd_cpu_piece piece, const void *args);

#endif
