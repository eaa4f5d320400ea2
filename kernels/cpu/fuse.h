// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_FUSE_H
#define ND_CPU_FUSE_H
/*
 * What the CPU ops do with a result in addition to storing it (nd_fuse), piece by piece of a row
 * while it is in the first cache; and the largest |x| of a tensor among threads.
 *
 * Sizes are the bits of |x|, which are ordered as the numbers are, with NaN above infinity. The
 * largest is the same in whatever order threads report theirs.
 */
#include <stdatomic.h>
#include <string.h>

#include "kernels/cpu/row_kernels.h"
#include "kernels/cpu/view.h"

enum { ND_CPU_PIECE = 2048 }; /* elements: whole vectors of every instruction set */

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

/* One result of an op. */
typedef struct nd_cpu_result {
    nd_tensor to; /* (rows, columns); data may be NULL */
    nd_fuse fuse; /* zeros: nothing */
    bool bf16;    /* else F32 */
    _Atomic uint32_t most;
} nd_cpu_result;

static inline void nd_cpu_result_begin(nd_cpu_result *r, nd_tensor to, const nd_fuse *fuse)
{
    r->to = to;
    r->fuse = *fuse;
    r->bf16 = to.dtype == ND_DTYPE_BF16;
    r->most = r->fuse.amax ? nd_size_bits(*r->fuse.amax) : 0;
}

static inline void nd_cpu_result_end(nd_cpu_result *r)
{
    if (r->fuse.amax) {
        *r->fuse.amax = nd_size_of_bits(r->most);
    }
}

/* Columns of a row that are computed at a time. */
static inline int64_t nd_cpu_piece_of(const nd_cpu_result *r, int64_t columns)
{
    bool whole = r->to.data && !r->fuse.amax && !r->fuse.codes.data;
    return whole || columns < ND_CPU_PIECE ? columns : ND_CPU_PIECE;
}

/* Where a piece of a row is computed: in the result, or in `buffer` where that is not stored. */
static inline void *nd_cpu_piece_at(const nd_cpu_result *r, int64_t row, int64_t column,
                                    float buffer[ND_CPU_PIECE])
{
    return r->to.data ? nd_element_address(r->to, row * r->to.stride[0] + column) : buffer;
}

/* Casts the computed piece `x` to codes. Returns the larger of `most` and the largest size in it.
 * */
static inline uint32_t nd_cpu_piece_done(const nd_cpu_result *r, const nd_row_ops *rows,
                                         const void *x, int64_t row, int64_t column, int64_t n,
                                         uint32_t most)
{
    const nd_tensor *codes = &r->fuse.codes;
    if (codes->data) {
        rows->cast_fp8((uint8_t *)codes->data + row * codes->stride[0] + column, x, r->fuse.scale,
                       false, n, codes->dtype == ND_DTYPE_F8_E4M3, r->bf16);
    }
    uint32_t bits = r->fuse.amax ? rows->amax(x, n, r->bf16) : 0;
    return bits > most ? bits : most;
}

#endif
