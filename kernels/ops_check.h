// SPDX-License-Identifier: Apache-2.0
#ifndef ND_KERNELS_OPS_CHECK_H
#define ND_KERNELS_OPS_CHECK_H
/* Small predicates with which every backend states an op's shape contract (ops.h) in ND_ASSERTs. */
#include "kernels/ops.h"
#include "runtime/base/math.h"
#include "runtime/tensor/fp8.h"

static inline bool nd_is_act(nd_tensor t)
{
    return t.dtype == ND_DTYPE_BF16 || t.dtype == ND_DTYPE_F32;
}

/* A 2-d view (n0, n1) with a contiguous last axis. */
static inline bool nd_is_2d(nd_tensor t, int64_t n0, int64_t n1)
{
    return t.axes == 2 && t.shape[0] == n0 && t.shape[1] == n1 && (n1 <= 1 || t.stride[1] == 1);
}

/* True if what `fuse` asks of a result (n0, n1) fits it, and the result goes somewhere. */
static inline bool nd_is_fuse_of(const nd_fuse *fuse, nd_tensor result, int64_t n0, int64_t n1)
{
    bool codes = fuse->codes.data;
    return (result.data || codes) && (!codes || (nd_dtype_is_fp8(fuse->codes.dtype) &&
                                                 fuse->scale && nd_is_2d(fuse->codes, n0, n1)));
}

static inline bool nd_is_2d_of(nd_tensor t, nd_dtype dtype, int64_t n0, int64_t n1)
{
    return t.dtype == dtype && nd_is_2d(t, n0, n1);
}

/* `n` contiguous elements, whatever the number of axes. */
static inline bool nd_is_vector(nd_tensor t, nd_dtype dtype, int64_t n)
{
    return t.dtype == dtype && nd_tensor_count(t) == n && nd_tensor_is_contiguous(t);
}

static inline bool nd_is_4d(nd_tensor t, int64_t n0, int64_t n1, int64_t n2, int64_t n3)
{
    return t.axes == 4 && t.shape[0] == n0 && t.shape[1] == n1 && t.shape[2] == n2 &&
           t.shape[3] == n3 && (n3 <= 1 || t.stride[3] == 1);
}

/* Bounds of attention's keys: absent, or a number for each row. */
static inline bool nd_are_bounds(nd_tensor first_key, nd_tensor end_key, const nd_attention *a)
{
    const int64_t rows = a->batch * a->sq;
    return (!first_key.data || nd_is_vector(first_key, ND_DTYPE_I32, rows)) &&
           (!end_key.data || (first_key.data && nd_is_vector(end_key, ND_DTYPE_I32, rows)));
}

/* Keys [begin, end), within those that there are; none where begin >= end. */
typedef struct nd_key_range {
    int64_t begin, end;
} nd_key_range;

/* The keys that query i of sample b sees. */
static inline nd_key_range nd_visible_keys(const nd_attention *a, nd_tensor first_key,
                                           nd_tensor end_key, int64_t b, int64_t i)
{
    const int64_t row = b * a->sq + i;
    const int64_t end = end_key.data ? ((const int32_t *)end_key.data)[row] : i + a->diag + 1;
    const int64_t window = a->window > 0 ? end - a->window : 0;
    const int64_t first = first_key.data ? ((const int32_t *)first_key.data)[row] : 0;
    return (nd_key_range){nd_min(nd_max(nd_max(window, first), 0), a->sk), nd_min(end, a->sk)};
}

/* Distance of element `index` (row-major over the shape) from the view's first, in elements of
 * memory. */
static inline int64_t nd_offset_of(nd_tensor t, int64_t index)
{
    int64_t at = 0;
    for (int axis = t.axes - 1; axis >= 0; axis--) {
        at += index % t.shape[axis] * t.stride[axis];
        index /= t.shape[axis];
    }
    return at;
}

#endif
