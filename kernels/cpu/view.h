// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CPU_VIEW_H
#define ND_CPU_VIEW_H
/* Rows and contiguous runs of views, for the elementwise ops. */
#include "kernels/ops_check.h"

/* Address `elements` into an F32, BF16 or I32 view. */
static inline void *nd_element_address(nd_tensor t, int64_t elements)
{
    return (char *)t.data + elements * (t.dtype == ND_DTYPE_BF16 ? 2 : 4);
}

/* Row i of a 2-d view. */
static inline void *nd_row(nd_tensor t, int64_t i)
{
    return nd_element_address(t, i * t.stride[0]);
}

/* Element (row, column) of a 2-d view. */
static inline void *nd_at(nd_tensor t, int64_t row, int64_t column)
{
    return nd_element_address(t, row * t.stride[0] + column);
}

/* Elements of the inner axes that lie without gaps: the whole count when the view is contiguous. */
static inline int64_t nd_contiguous_count(nd_tensor t)
{
    int64_t run = 1;
    for (int axis = t.axes - 1; axis >= 0; axis--) {
        if (t.shape[axis] != 1 && t.stride[axis] != run) {
            break;
        }
        run *= t.shape[axis];
    }
    return run;
}

#endif
