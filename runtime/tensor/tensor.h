// SPDX-License-Identifier: Apache-2.0
#ifndef ND_TENSOR_TENSOR_H
#define ND_TENSOR_TENSOR_H
/*
 * A tensor view: pointer, dtype, shape. It owns nothing and is passed by value.
 *
 * Row-major; the last axis is contiguous. `stride` is in elements, so a view may skip columns or
 * rows (a head of a (T, H D) activation, a slice of a gathered buffer). Shapes use the glossary of
 * docs/tour.md: B batch, S sequence, T = B S tokens, C hidden, H query heads, K KV heads, D head
 * size, F ffn, V vocabulary.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"
#include "runtime/tensor/dtype.h"

enum { ND_TENSOR_MAX_AXES = 4 };

typedef struct nd_tensor {
    void *data;
    nd_dtype dtype;
    int axes;
    int64_t shape[ND_TENSOR_MAX_AXES];
    int64_t stride[ND_TENSOR_MAX_AXES]; /* elements; stride[axes - 1] == 1 */
} nd_tensor;

nd_tensor nd_tensor_1d(void *data, nd_dtype dtype, int64_t n0);
nd_tensor nd_tensor_2d(void *data, nd_dtype dtype, int64_t n0, int64_t n1);
nd_tensor nd_tensor_3d(void *data, nd_dtype dtype, int64_t n0, int64_t n1, int64_t n2);
nd_tensor nd_tensor_4d(void *data, nd_dtype dtype, int64_t n0, int64_t n1, int64_t n2, int64_t n3);

int64_t nd_tensor_count(nd_tensor t); /* elements */
size_t nd_tensor_bytes(nd_tensor t);  /* count x element size (of a contiguous copy) */
bool nd_tensor_is_contiguous(nd_tensor t);

/* View of rows [begin, begin + count) of axis 0. */
nd_tensor nd_tensor_rows(nd_tensor t, int64_t begin, int64_t count);
/* View of columns [begin, begin + count) of the last axis. */
nd_tensor nd_tensor_columns(nd_tensor t, int64_t begin, int64_t count);

#endif
