// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_PIECES_H
#define ND_CHECKPOINT_PIECES_H
/*
 * A checkpoint is pieces of tensors in files.
 *
 * A piece is a rectangle of a tensor that lies densely in some rank's state. A rank holds a
 * contiguous range of its local block of a row-major matrix, which is at most three rectangles: the
 * rest of a row, full rows, the beginning of a row. Saving cuts ranges into pieces and writes each
 * to the file of its kind (shard.h); loading intersects the rectangles that it wants with those
 * that are stored, whatever mesh wrote them (source.h). What is here is pure arithmetic.
 *
 * Which pieces a rank writes follows from the layout: it knows nothing of the other ranks', and
 * over all ranks of a mesh every element is written exactly once. The ranks that hold the same
 * shard (dp_replicate of them) each write a part of it, cut by elements and moved down to the
 * beginning of a row. What several ranks of tp hold is written by those that own it. Padding is not
 * written.
 *
 * ND_CUT_VERSION counts these rules together with those of the layout (order of parameters,
 * alignments): a reader that computes where something lies must know the version.
 */
#include "trainer/layout/layout.h"

enum { ND_CUT_VERSION = 1 };

/* Rows and columns in the global tensor. A vector has one column; a scalar one element. */
typedef struct nd_rect {
    int axes; /* as the tensor is stored: 0, 1 or 2 */
    int64_t row, col;
    int64_t rows, cols;
} nd_rect;

/* The place of a rectangle in its range. Each kind has a file of its own, as torch's reader knows
 * one rectangle of a tensor in a file. */
typedef enum nd_rect_kind {
    ND_RECT_BODY = 0, /* full rows, or all of the range when it lies within one row */
    ND_RECT_HEAD,     /* the rest of a row */
    ND_RECT_TAIL,     /* the beginning of a row */
    ND_RECT_KIND_COUNT
} nd_rect_kind;

typedef struct nd_piece {
    const nd_param *param;
    nd_rect_kind kind;
    nd_rect rect;
    int64_t state;  /* its first element in the holder's flat state arrays */
    uint64_t begin; /* byte of its file where the first state array lies (shard.h) */
} nd_piece;

/* Cuts elements [begin, end) of a tensor's block into pieces, ascending; returns how many (0 to 3).
 * Element `begin` is element `state` of the state arrays. */
int nd_pieces_of_range(const nd_param *param, const nd_rect *block, int64_t begin, int64_t end,
                       int64_t state, nd_piece out[3]);

static inline int64_t nd_rect_elements(const nd_rect *rect)
{
    return rect->rows * rect->cols;
}

/* False: they share no element, and *out is not set. */
bool nd_rect_intersect(const nd_rect *a, const nd_rect *b, nd_rect *out);

/* A writer: one rank of the mesh, as far as its state goes. */
typedef struct nd_holder {
    int shard;             /* index in dp_shard_cp */
    int tp;                /* index in tp */
    int replica, replicas; /* index in dp_replicate and its size */
} nd_holder;

nd_holder nd_holder_of(const nd_mesh *mesh, int rank);
/* The inverse. */
int nd_holder_rank(const nd_mesh *mesh, const nd_holder *holder);

/* What the holder has of a parameter, without padding: elements [begin, end) of the local block;
 * the first of them is element `state` of the flat state arrays. begin == end: nothing. */
typedef struct nd_held {
    nd_rect block; /* what tensor parallelism leaves on the holder, without padding */
    int64_t begin, end, state;
} nd_held;

/* `layout` is that of the holder's tp index; its own shard_index does not matter. */
nd_held nd_held_part(const nd_layout *layout, const nd_param *param, int shard);

/* The pieces that the holder writes, in the order of their unit, then of the parameter table.
 * Returns how many: at most three for each parameter. `layout` as above. */
int nd_pieces_written(const nd_layout *layout, const nd_holder *holder, nd_piece *out);

#endif
