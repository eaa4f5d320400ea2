// SPDX-License-Identifier: Apache-2.0
#ifndef ND_MESH_MESH_H
#define ND_MESH_MESH_H
/*
 * The n-dimensional mesh: ranks <-> coordinates, and the groups of ranks that share all coordinates
 * outside a set of axes. Pure arithmetic: no communication, no allocation, any size.
 *
 * Axes outer to inner: pp, dp_replicate, dp_shard, cp, tp. The innermost varies fastest, so tp
 * peers are adjacent:
 *   rank = (((i_pp N_dp_replicate + i_dp_replicate) N_dp_shard + i_dp_shard) N_cp + i_cp) N_tp
 *          + i_tp
 */
#include <stdint.h>

#include "runtime/base/status.h"

typedef enum nd_axis {
    ND_AXIS_PP = 0, /* its place is kept; its size is 1 until pipeline parallelism exists */
    ND_AXIS_DP_REPLICATE,
    ND_AXIS_DP_SHARD,
    ND_AXIS_CP,
    ND_AXIS_TP,
    ND_AXIS_COUNT
} nd_axis;

typedef struct nd_mesh {
    int size[ND_AXIS_COUNT]; /* each >= 1 */
} nd_mesh;

typedef struct nd_coord {
    int at[ND_AXIS_COUNT];
} nd_coord;

/* Groups by name. Each is a set of axes; ranks of a group are ordered as in the mesh (inner axis
 * fastest). */
typedef enum nd_group_kind {
    ND_GROUP_DP_REPLICATE = 0, /* HSDP: all-reduce of gradients */
    ND_GROUP_DP_SHARD,
    ND_GROUP_CP,          /* KV exchange */
    ND_GROUP_TP,          /* tensor and sequence parallel collectives, vocabulary-parallel loss */
    ND_GROUP_DP,          /* dp_replicate x dp_shard: which samples */
    ND_GROUP_DP_SHARD_CP, /* parameter shards: all-gather of weights, reduce-scatter of gradients */
    ND_GROUP_DP_CP,       /* dp_replicate x dp_shard x cp: loss and token counts */
    ND_GROUP_MODEL,       /* dp_shard x cp x tp: gradient norm, weight amax */
    ND_GROUP_WORLD,
    ND_GROUP_COUNT
} nd_group_kind;

const char *nd_axis_name(nd_axis axis);        /* "dp_replicate" */
const char *nd_group_name(nd_group_kind kind); /* "dp_shard_cp" */
unsigned nd_group_axes(nd_group_kind kind);    /* bit set of 1u << nd_axis */

int nd_mesh_world_size(const nd_mesh *mesh);
nd_coord nd_mesh_coord_of(const nd_mesh *mesh, int rank);
int nd_mesh_rank_of(const nd_mesh *mesh, nd_coord coord);

/* Extent of the group, and this rank's place in it. */
int nd_mesh_group_size(const nd_mesh *mesh, nd_group_kind kind);
int nd_mesh_group_index(const nd_mesh *mesh, nd_group_kind kind, int rank);
/* World rank of member `index` of the group of `rank`. */
int nd_mesh_group_member(const nd_mesh *mesh, nd_group_kind kind, int rank, int index);

/*
 * Product of the axes against the number of workers; a dp_shard of -1 is filled with what is left.
 * ND_ERR_CONFIG names each axis and both numbers.
 */
nd_status nd_mesh_resolve(nd_mesh *mesh, int64_t workers);

/* "2 x 2 x 1 x 2 (dp_replicate x dp_shard x cp x tp)"; returns buffer. */
const char *nd_mesh_format(const nd_mesh *mesh, char *buffer, size_t size);

#endif
