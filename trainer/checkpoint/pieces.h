// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_PIECES_H
#define ND_CHECKPOINT_PIECES_H
/*
 * A checkpoint is pieces of tensors in files.
 *
 * A piece is a rectangle of a tensor that lies densely in some rank's state (nd_span). A rank holds
 * a contiguous range of its local block of a row-major matrix, which is at most three rectangles:
 * the rest of a row, full rows, the beginning of a row. Saving cuts ranges into pieces and writes
 * each to the file of its kind (shard.h); loading intersects the rectangles that it wants with
 * those that are stored, whatever mesh wrote them (source.h). What is here is pure arithmetic.
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

/* The place of a piece in its range. Each kind has a file of its own, as torch's reader knows one
 * rectangle of a tensor in a file. */
typedef enum nd_piece_kind {
    ND_PIECE_BODY = 0, /* full rows, or all of the range when it lies within one row */
    ND_PIECE_HEAD,     /* the rest of a row */
    ND_PIECE_TAIL,     /* the beginning of a row */
    ND_PIECE_KINDS
} nd_piece_kind;

typedef struct nd_piece {
    nd_span span;
    nd_piece_kind kind;
    /* Set by nd_shard_plan_init: */
    uint64_t begin; /* byte of its file where the first state array lies */
    int64_t before; /* elements of all state arrays of the pieces before it */
} nd_piece;

static inline int64_t nd_span_elements(const nd_span *span)
{
    return span->rows * span->cols;
}

/* The rows and columns that two rectangles of a tensor share. False: none, and *out is not set. */
bool nd_span_intersect(const nd_span *a, const nd_span *b, nd_span *out);

/* A writer: one rank of the mesh, as far as its state goes. */
typedef struct nd_holder {
    int shard;             /* index in dp_shard_cp */
    int tp;                /* index in tp */
    int replica, replicas; /* index in dp_replicate and its size */
} nd_holder;

nd_holder nd_holder_of(const nd_mesh *mesh, int rank);
/* The inverse. */
int nd_holder_rank(const nd_mesh *mesh, const nd_holder *holder);

/* The pieces that the holder writes, in the order of their unit, then of the parameter table.
 * Returns how many: at most three for each parameter. `layout` is that of the holder's tp index;
 * its own shard_index does not matter. */
int nd_pieces_written(const nd_layout *layout, const nd_holder *holder, nd_piece *out);

#endif
