// SPDX-License-Identifier: Apache-2.0
#include "runtime/mesh/mesh.h"

#include <stdio.h>

#define BIT(axis) (1u << (axis))

static const char *const axis_names[ND_AXIS_COUNT] = {"pp", "dp_replicate", "dp_shard", "cp", "tp"};

static const struct {
    const char *name;
    unsigned axes;
} groups[ND_GROUP_COUNT] = {
    [ND_GROUP_DP_REPLICATE] = {"dp_replicate", BIT(ND_AXIS_DP_REPLICATE)},
    [ND_GROUP_DP_SHARD] = {"dp_shard", BIT(ND_AXIS_DP_SHARD)},
    [ND_GROUP_CP] = {"cp", BIT(ND_AXIS_CP)},
    [ND_GROUP_TP] = {"tp", BIT(ND_AXIS_TP)},
    [ND_GROUP_DP] = {"dp", BIT(ND_AXIS_DP_REPLICATE) | BIT(ND_AXIS_DP_SHARD)},
    [ND_GROUP_DP_SHARD_CP] = {"dp_shard_cp", BIT(ND_AXIS_DP_SHARD) | BIT(ND_AXIS_CP)},
    [ND_GROUP_DP_CP] = {"dp_cp",
                        BIT(ND_AXIS_DP_REPLICATE) | BIT(ND_AXIS_DP_SHARD) | BIT(ND_AXIS_CP)},
    [ND_GROUP_MODEL] = {"model", BIT(ND_AXIS_DP_SHARD) | BIT(ND_AXIS_CP) | BIT(ND_AXIS_TP)},
    [ND_GROUP_WORLD] = {"world", (1u << ND_AXIS_COUNT) - 1},
};

const char *nd_axis_name(nd_axis axis)
{
    return axis_names[axis];
}

const char *nd_group_name(nd_group_kind kind)
{
    return groups[kind].name;
}

unsigned nd_group_axes(nd_group_kind kind)
{
    return groups[kind].axes;
}

int nd_mesh_world_size(const nd_mesh *mesh)
{
    int n = 1;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        n *= mesh->size[a];
    }
    return n;
}

nd_coord nd_mesh_coord_of(const nd_mesh *mesh, int rank)
{
    nd_coord c;
    for (int a = ND_AXIS_COUNT - 1; a >= 0; a--) {
        c.at[a] = rank % mesh->size[a];
        rank /= mesh->size[a];
    }
    return c;
}

int nd_mesh_rank_of(const nd_mesh *mesh, nd_coord coord)
{
    int rank = 0;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        rank = rank * mesh->size[a] + coord.at[a];
    }
    return rank;
}

int nd_mesh_group_size(const nd_mesh *mesh, nd_group_kind kind)
{
    int n = 1;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        n *= groups[kind].axes & BIT(a) ? mesh->size[a] : 1;
    }
    return n;
}

int nd_mesh_group_index(const nd_mesh *mesh, nd_group_kind kind, int rank)
{
    nd_coord c = nd_mesh_coord_of(mesh, rank);
    int index = 0;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        if (groups[kind].axes & BIT(a)) {
            index = index * mesh->size[a] + c.at[a];
        }
    }
    return index;
}

int nd_mesh_group_member(const nd_mesh *mesh, nd_group_kind kind, int rank, int index)
{
    nd_coord c = nd_mesh_coord_of(mesh, rank);
    for (int a = ND_AXIS_COUNT - 1; a >= 0; a--) {
        if (groups[kind].axes & BIT(a)) {
            c.at[a] = index % mesh->size[a];
            index /= mesh->size[a];
        }
    }
    return nd_mesh_rank_of(mesh, c);
}

nd_status nd_mesh_resolve(nd_mesh *mesh, int64_t workers)
{
    int64_t others = 1;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        if (a == ND_AXIS_DP_SHARD && mesh->size[a] == -1) {
            continue;
        }
        if (mesh->size[a] < 1) {
            return nd_fail(ND_ERR_CONFIG, "mesh.%s is %d; it must be at least 1%s", axis_names[a],
                           mesh->size[a],
                           a == ND_AXIS_DP_SHARD ? ", or -1 for what is left of the worker count"
                                                 : "");
        }
        others *= mesh->size[a];
        if (others > 1 << 24) {
            return nd_fail(ND_ERR_CONFIG, "the mesh has more than %d ranks; check the axis sizes",
                           1 << 24);
        }
    }
    if (mesh->size[ND_AXIS_DP_SHARD] == -1) {
        if (workers < others || workers % others != 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "mesh.dp_shard is -1 (what is left), but dp_replicate %d x cp %d x tp "
                           "%d = %lld does not "
                           "divide the %lld workers; change an axis or launch.workers",
                           mesh->size[ND_AXIS_DP_REPLICATE], mesh->size[ND_AXIS_CP],
                           mesh->size[ND_AXIS_TP], (long long)others, (long long)workers);
        }
        mesh->size[ND_AXIS_DP_SHARD] = (int)(workers / others);
        return ND_OK;
    }
    if (others != workers) {
        return nd_fail(
            ND_ERR_CONFIG,
            "the mesh needs dp_replicate %d x dp_shard %d x cp %d x tp %d = %lld workers, but "
            "launch.workers is %lld; change an axis, set mesh.dp_shard to -1, or start %lld "
            "workers",
            mesh->size[ND_AXIS_DP_REPLICATE], mesh->size[ND_AXIS_DP_SHARD], mesh->size[ND_AXIS_CP],
            mesh->size[ND_AXIS_TP], (long long)others, (long long)workers, (long long)others);
    }
    return ND_OK;
}

const char *nd_mesh_format(const nd_mesh *mesh, char *buffer, size_t size)
{
    snprintf(buffer, size, "%d x %d x %d x %d (dp_replicate x dp_shard x cp x tp)",
             mesh->size[ND_AXIS_DP_REPLICATE], mesh->size[ND_AXIS_DP_SHARD], mesh->size[ND_AXIS_CP],
             mesh->size[ND_AXIS_TP]);
    return buffer;
}
