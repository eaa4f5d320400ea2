// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_REDUCE_H
#define ND_COMM_REDUCE_H
/*
 * The arithmetic of a reduction: element i of dst is src[0][i] op src[1][i] op ... in ascending
 * order of the sources.
 *
 * F32, F64, I64 and I32 accumulate in the type itself, BF16 in F32 with one rounding at the end.
 * MAX of floating point gives NaN as soon as one operand is NaN. Element-wise, so the bits depend
 * neither on how a buffer was cut into slices nor on the width of the vector unit.
 */
#include <stdbool.h>

#include "runtime/comm/comm.h"

bool nd_reduce_supports(nd_dtype dtype);
/* dst may be one of the sources, but must not overlap any partly. n >= 1. */
void nd_reduce(nd_dtype dtype, nd_redop op, void *dst, const void *const *src, int n,
               int64_t count);

#endif
