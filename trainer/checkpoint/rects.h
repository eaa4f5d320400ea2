// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_RECTS_H
#define ND_CHECKPOINT_RECTS_H
/*
 * Rectangles of a tensor: the currency in which checkpoints are written, found and loaded.
 *
 * A rank holds a contiguous range of its local block of a row-major matrix. Such a range is at most
 * three rectangles: the rest of a row, full rows, the beginning of a row. Saving cuts ranges into
 * rectangles; loading intersects the rectangles that it wants with those that are stored, whatever
 * mesh wrote them. Pure arithmetic on the caller's storage.
 */
#include <stdbool.h>
#include <stdint.h>

/* Rows and columns in the global tensor. A vector has one column; a scalar one element. */
typedef struct nd_rect {
    int axes; /* as the tensor is stored: 0, 1 or 2 */
    int64_t row, col;
    int64_t rows, cols;
} nd_rect;

/* The part of a tensor that tensor parallelism leaves on one rank, without padding. */
typedef struct nd_local_block {
    int axes;
    int64_t row, col;   /* of its first element in the global tensor */
    int64_t rows, cols; /* of the block */
} nd_local_block;

/* The place of a rectangle in its range. Each kind has a file of its own, as torch's reader knows
 * one rectangle of a tensor in a file. */
typedef enum nd_rect_kind {
    ND_RECT_BODY = 0, /* full rows, or all of the range when it lies within one row */
    ND_RECT_HEAD,     /* the rest of a row */
    ND_RECT_TAIL,     /* the beginning of a row */
    ND_RECT_KIND_COUNT
} nd_rect_kind;

typedef struct nd_rect_part {
    nd_rect rect;
    nd_rect_kind kind;
    int64_t offset; /* of its first element, from the beginning of the range */
} nd_rect_part;

/* Cuts elements [begin, end) of the block into rectangles, ascending; returns how many (0 to 3). */
int nd_rects_of_range(const nd_local_block *block, int64_t begin, int64_t end, nd_rect_part out[3]);

static inline int64_t nd_rect_elements(const nd_rect *rect)
{
    return rect->rows * rect->cols;
}

/* False: they share no element, and *out is not set. */
bool nd_rect_intersect(const nd_rect *a, const nd_rect *b, nd_rect *out);

#endif
