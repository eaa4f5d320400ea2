// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MESH_MESH_H
#define ND_MESH_MESH_H
/*
 * The n-dimensional mesh: ranks <-> coordinates, and the groups of ranks that share all coordinates
 * outside a set of axes. Pure arithmetic: no communication, no allocation, any size. The axes and
 * the groups are the rows of mesh.def.
 *
 * Axes outer to inner: pp, dp_replicate, dp_shard, cp, tp. The innermost varies fastest, so tp
 * peers are adjacent:
 *   rank = (((i_pp N_dp_replicate + i_dp_replicate) N_dp_shard + i_dp_shard) N_cp + i_cp) N_tp
 *          + i_tp
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/status.h"

#define ND_AXIS(id, ...)          ND_AXIS_##id,
#define ND_AXIS_RESERVED(id, ...) ND_AXIS_##id,
typedef enum nd_axis {
#include "runtime/mesh/mesh.def"
    ND_AXIS_COUNT
} nd_axis;

typedef struct nd_mesh {
    int size[ND_AXIS_COUNT]; /* each >= 1 */
    int ulysses;   /* ranks of cp that exchange heads with each other, divides cp; 0 is 1 */
    int kv_copies; /* adjacent ranks of tp that hold the same KV heads, divides tp; 0 is 1. It
                      depends on the model, and ranks have it, but no configuration. */
} nd_mesh;

typedef struct nd_coord {
    int at[ND_AXIS_COUNT];
} nd_coord;

/* Groups by name. Each is a set of axes; ranks of a group are ordered as in the mesh (inner axis
 * fastest). */
#define ND_GROUP(id, ...) ND_GROUP_##id,
typedef enum nd_group_kind {
#include "runtime/mesh/mesh.def"
    ND_GROUP_COUNT
} nd_group_kind;

/* The purposes of the bytes that a rank sends. */
typedef enum nd_traffic_kind {
    ND_TRAFFIC_WEIGHTS = 0, /* gathered: 1 byte an FP8 element, 2 a BF16 element */
    ND_TRAFFIC_GRADIENTS,   /* reduced: F32 */
    ND_TRAFFIC_ACTIVATIONS, /* between the ranks of tp */
    ND_TRAFFIC_KEYS_VALUES, /* between the ranks of cp */
    ND_TRAFFIC_OTHER,       /* loss, norms, amaxes */
    ND_TRAFFIC_COUNT
} nd_traffic_kind;

typedef struct nd_group_traffic {
    nd_traffic_kind all_gather, reduce_scatter, rest; /* by collective */
} nd_group_traffic;

/* A row of mesh.def. */
typedef struct nd_group_row {
    const char *name;  /* "dp_shard_cp" */
    unsigned axes;     /* bit set */
    int communicators; /* 0: nothing is sent within the group */
    nd_group_traffic carries;
    const char *use; /* "keys and values", for `ndtrain plan` */
} nd_group_row;
extern const nd_group_row nd_group_rows[ND_GROUP_COUNT];

const char *nd_axis_name(nd_axis axis); /* "dp_replicate" */
/* The reason why the axis has no size but 1 yet; NULL for an axis that can be chosen. */
const char *nd_axis_reserved(nd_axis axis);

const char *nd_group_name(nd_group_kind kind);
const char *nd_traffic_name(nd_traffic_kind kind); /* "weights" */

int nd_mesh_world_size(const nd_mesh *mesh);
nd_coord nd_mesh_coord_of(const nd_mesh *mesh, int rank);
int nd_mesh_rank_of(const nd_mesh *mesh, nd_coord coord);

/* Extent of the group, and this rank's place in it. */
int nd_mesh_group_size(const nd_mesh *mesh, nd_group_kind kind);
int nd_mesh_group_index(const nd_mesh *mesh, nd_group_kind kind, int rank);
/* World rank of member `index` of the group of `rank`. */
int nd_mesh_group_member(const nd_mesh *mesh, nd_group_kind kind, int rank, int index);

/* Returns whether two groups of every rank have the same members in the same order. */
bool nd_mesh_groups_are_equal(const nd_mesh *mesh, nd_group_kind one, nd_group_kind other);

/*
 * Compares the product of the axes with the number of workers. One axis that allows it may be -1:
 * it gets what is left. ND_ERR_CONFIG names each axis and both numbers.
 */
nd_status nd_mesh_resolve(nd_mesh *mesh, int64_t workers);

/* "2 x 2 x 1 x 2 (dp_replicate x dp_shard x cp x tp)"; returns buffer. */
const char *nd_mesh_format(const nd_mesh *mesh, char *buffer, size_t size);
/* The coordinates of a rank by the letters of the axes, "r1 s0 t1"; axes of size 1 are left out.
 * "" in a mesh of one rank. Returns buffer. */
const char *nd_mesh_format_rank(const nd_mesh *mesh, int rank, char *buffer, size_t size);

#endif
