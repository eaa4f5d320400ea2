// SPDX-License-Identifier: Apache-2.0
#include "runtime/mesh/mesh.h"

#include <stdbool.h>
#include <stdio.h>

enum { RANKS_MAX = 1 << 24 };

static const struct {
    const char *name, *letter;
    int least;
    const char *reserved;
} axes[ND_AXIS_COUNT] = {
#define ND_AXIS(id, name, letter, initial, least, flags, help) {#name, #letter, least, NULL},
#define ND_AXIS_RESERVED(id, name, letter, flags, sentence)    {#name, #letter, 1, sentence},
#include "runtime/mesh/mesh.def"
};

#define AXIS(id) (1u << ND_AXIS_##id)
#define ALL_AXES ((1u << ND_AXIS_COUNT) - 1)
const nd_group_row nd_group_rows[ND_GROUP_COUNT] = {
#define ND_GROUP(id, name, axes, communicators, all_gather, reduce_scatter, rest, use)             \
    {#name,                                                                                        \
     axes,                                                                                         \
     communicators,                                                                                \
     {ND_TRAFFIC_##all_gather, ND_TRAFFIC_##reduce_scatter, ND_TRAFFIC_##rest},                    \
     use},
#include "runtime/mesh/mesh.def"
};

const char *nd_axis_name(nd_axis axis)
{
    return axes[axis].name;
}

const char *nd_axis_reserved(nd_axis axis)
{
    return axes[axis].reserved;
}

const char *nd_group_name(nd_group_kind kind)
{
    return nd_group_rows[kind].name;
}

const char *nd_traffic_name(nd_traffic_kind kind)
{
    static const char *const names[ND_TRAFFIC_COUNT] = {"weights", "gradients", "activations",
                                                        "keys_values", "other"};
    return names[kind];
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

/* The coordinates of a group on one axis: first, first + step and so on. */
typedef struct span {
    int first, step, count;
} span;

/* That of a rank with this coordinate. The groups cp and ulysses share the axis, and the group
 * kv_copies is a part of tp. */
static span span_of(const nd_mesh *mesh, nd_group_kind kind, int axis, int at)
{
    const int heads = mesh->ulysses > 1 ? mesh->ulysses : 1, size = mesh->size[axis];
    const int copies = mesh->kv_copies > 1 ? mesh->kv_copies : 1;
    if (!(nd_group_rows[kind].axes & 1u << axis)) {
        return (span){at, 1, 1};
    }
    return kind == ND_GROUP_CP          ? (span){at % heads, heads, size / heads}
           : kind == ND_GROUP_ULYSSES   ? (span){at - at % heads, 1, heads}
           : kind == ND_GROUP_KV_COPIES ? (span){at - at % copies, 1, copies}
                                        : (span){0, 1, size};
}

int nd_mesh_group_size(const nd_mesh *mesh, nd_group_kind kind)
{
    int n = 1;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        n *= span_of(mesh, kind, a, 0).count;
    }
    return n;
}

int nd_mesh_group_index(const nd_mesh *mesh, nd_group_kind kind, int rank)
{
    nd_coord c = nd_mesh_coord_of(mesh, rank);
    int index = 0;
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        const span s = span_of(mesh, kind, a, c.at[a]);
        index = index * s.count + (c.at[a] - s.first) / s.step;
    }
    return index;
}

int nd_mesh_group_member(const nd_mesh *mesh, nd_group_kind kind, int rank, int index)
{
    nd_coord c = nd_mesh_coord_of(mesh, rank);
    for (int a = ND_AXIS_COUNT - 1; a >= 0; a--) {
        const span s = span_of(mesh, kind, a, c.at[a]);
        c.at[a] = s.first + index % s.count * s.step;
        index /= s.count;
    }
    return nd_mesh_rank_of(mesh, c);
}

bool nd_mesh_groups_are_equal(const nd_mesh *mesh, nd_group_kind one, nd_group_kind other)
{
    for (int a = 0; a < ND_AXIS_COUNT; a++) {
        const span s = span_of(mesh, one, a, 0), o = span_of(mesh, other, a, 0);
        if (s.count != o.count || (s.count > 1 && s.step != o.step)) {
            return false;
        }
    }
    return true;
}

/* Axes with a size of their own as "dp_replicate 2 x cp 1 x tp 4"; `skip` is left out
 * (ND_AXIS_COUNT: none). */
static const char *list_sizes(const nd_mesh *mesh, nd_axis skip, char *buffer, size_t size)
{
    size_t used = 0;
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        if (a != skip && !axes[a].reserved && used < size) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%s %d", used ? " x " : "",
                                     axes[a].name, mesh->size[a]);
        }
    }
    return buffer;
}

/* The axis of size -1, ND_AXIS_COUNT when there is none. Sizes below the least are refused, and so
 * is a second -1. */
static nd_status find_open_axis(const nd_mesh *mesh, nd_axis *out)
{
    nd_axis open = ND_AXIS_COUNT;
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        bool is_open = mesh->size[a] == -1 && axes[a].least == -1;
        if (mesh->size[a] < 1 && !is_open) {
            return nd_fail(ND_ERR_CONFIG, "mesh.%s is %d; it must be at least 1%s", axes[a].name,
                           mesh->size[a],
                           axes[a].least == -1 ? ", or -1 for what is left of the worker count"
                                               : "");
        }
        if (is_open && open != ND_AXIS_COUNT) {
            return nd_fail(ND_ERR_CONFIG,
                           "mesh.%s and mesh.%s are both -1; only one of them can be what is left",
                           axes[open].name, axes[a].name);
        }
        open = is_open ? a : open;
    }
    *out = open;
    return ND_OK;
}

nd_status nd_mesh_resolve(nd_mesh *mesh, int64_t workers)
{
    char sizes[256];
    nd_axis open = ND_AXIS_COUNT;
    int64_t product = 1;
    ND_TRY(find_open_axis(mesh, &open));
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        product *= a == open ? 1 : mesh->size[a];
        if (product > RANKS_MAX) {
            return nd_fail(ND_ERR_CONFIG, "the mesh has more than %d ranks; check the axis sizes",
                           RANKS_MAX);
        }
    }
    list_sizes(mesh, open, sizes, sizeof sizes);
    if (open == ND_AXIS_COUNT && product != workers) {
        return nd_fail(ND_ERR_CONFIG,
                       "the mesh needs %s = %lld workers, but launch.workers is %lld; change an "
                       "axis, set mesh.dp_shard to -1 where the product of the others divides the "
                       "workers, or start %lld workers",
                       sizes, (long long)product, (long long)workers, (long long)product);
    }
    if (open != ND_AXIS_COUNT) {
        if (workers < product || workers % product != 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "mesh.%s is -1 (what is left), but %s = %lld does not divide the %lld "
                           "workers; change an axis or launch.workers",
                           axes[open].name, sizes, (long long)product, (long long)workers);
        }
        mesh->size[open] = (int)(workers / product);
    }
    return ND_OK;
}

const char *nd_mesh_format(const nd_mesh *mesh, char *buffer, size_t size)
{
    char sizes[128] = "", names[128] = "";
    size_t s = 0, n = 0;
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        if (!axes[a].reserved) {
            const char *times = s ? " x " : "";
            s += (size_t)snprintf(sizes + s, sizeof sizes - s, "%s%d", times, mesh->size[a]);
            n += (size_t)snprintf(names + n, sizeof names - n, "%s%s", times, axes[a].name);
        }
    }
    snprintf(buffer, size, "%s (%s)", sizes, names);
    return buffer;
}

const char *nd_mesh_format_rank(const nd_mesh *mesh, int rank, char *buffer, size_t size)
{
    nd_coord c = nd_mesh_coord_of(mesh, rank);
    size_t used = 0;
    buffer[0] = '\0';
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        if (mesh->size[a] > 1 && used < size) {
            used += (size_t)snprintf(buffer + used, size - used, "%s%s%d", used ? " " : "",
                                     axes[a].letter, c.at[a]);
        }
    }
    return buffer;
}
