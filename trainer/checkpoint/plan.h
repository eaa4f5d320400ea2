// SPDX-License-Identifier: Apache-2.0
#ifndef ND_CHECKPOINT_PLAN_H
#define ND_CHECKPOINT_PLAN_H
/*
 * Who writes what: the plan of a save is arithmetic on the layout. A rank computes its own part and
 * knows nothing of the others'; over all ranks of a mesh every element is written exactly once.
 *
 * The ranks that hold the same shard (dp_replicate of them) each write a part of it, cut by
 * elements and moved down to the beginning of a row. What several ranks of tp hold is written by
 * those that own it. Padding is not written.
 *
 * ND_CUT_VERSION counts these rules together with those of the layout (order of parameters,
 * alignments): a reader that computes where something lies must know the version.
 */
#include "trainer/checkpoint/rects.h"
#include "trainer/layout/layout.h"

enum { ND_CUT_VERSION = 1 };

/* A writer: one rank of the mesh, as far as its state goes. */
typedef struct nd_holder {
    int shard;             /* index in dp_shard_cp */
    int tp;                /* index in tp */
    int replica, replicas; /* index in dp_replicate and its size */
} nd_holder;

nd_holder nd_holder_of(const nd_mesh *mesh, int rank);
/* The inverse. */
int nd_holder_rank(const nd_mesh *mesh, const nd_holder *holder);

/* A rectangle of a parameter, and where it lies in the holder's flat state arrays, densely. */
typedef struct nd_piece {
    const nd_param *param;
    nd_rect_kind kind;
    nd_rect rect;
    int64_t state; /* first element */
} nd_piece;

/* What the holder has of a parameter, without padding: elements [begin, end) of the local block;
 * the first of them is element `state` of the flat state arrays. begin == end: nothing. */
typedef struct nd_held {
    nd_local_block block;
    int64_t begin, end, state;
} nd_held;

/* `layout` is that of the holder's tp index; its own shard_index does not matter. */
nd_held nd_held_part(const nd_layout *layout, const nd_param *param, int shard);

/* Visits the rectangles that the holder writes, in the order of their unit, then of the parameter
 * table; `layout` as above. */
nd_status nd_plan_each_written(const nd_layout *layout, const nd_holder *holder,
                               nd_status (*visit)(void *context, const nd_piece *piece),
                               void *context);

#endif
