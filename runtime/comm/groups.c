// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/comm.h"

#include <stdlib.h>

#include "runtime/comm/backend.h"

enum { DUPLICATES_MAX = 8 };

static nd_status fill_members(nd_comm *comm, const nd_mesh *mesh)
{
    int rank = comm->transport->rank;
    ND_TRY(ND_ALLOC(comm->size, &comm->ranks));
    for (int i = 0; i < comm->size; i++) {
        comm->ranks[i] = nd_mesh_group_member(mesh, comm->kind, rank, i);
    }
    return ND_OK;
}

nd_status nd_comm_create(nd_transport *transport, const nd_mesh *mesh, nd_group_kind kind,
                         int duplicate, nd_comm **out)
{
    if (nd_mesh_world_size(mesh) != transport->size) {
        return nd_fail(ND_ERR_INTERNAL, "a mesh of %d ranks on a transport of %d",
                       nd_mesh_world_size(mesh), transport->size);
    }
    ND_ASSERT(duplicate >= 0 && duplicate < DUPLICATES_MAX);
    nd_comm *comm = NULL;
    ND_TRY(ND_ALLOC(1, &comm));
    comm->transport = transport;
    comm->kind = kind;
    comm->shares = nd_comm_shared_group(mesh, kind);
    comm->id = (int)kind + ND_GROUP_COUNT * duplicate;
    comm->size = nd_mesh_group_size(mesh, kind);
    comm->index = nd_mesh_group_index(mesh, kind, transport->rank);
    comm->backend = comm->size == 1 && !transport->alone ? &nd_self_backend : transport->backend;
    nd_status status = fill_members(comm, mesh);
    if (status == ND_OK) {
        status = comm->backend->create(transport, comm);
    }
    if (status != ND_OK) {
        free(comm->ranks);
        free(comm);
        return status;
    }
    *out = comm;
    return ND_OK;
}

void nd_comm_destroy(nd_comm *comm)
{
    if (comm) {
        comm->backend->destroy(comm);
        free(comm->ranks);
        free(comm);
    }
}

nd_group_kind nd_comm_shared_group(const nd_mesh *mesh, nd_group_kind kind)
{
    nd_group_traffic carries = nd_group_carries(kind);
    bool small = carries.all_gather == ND_TRAFFIC_OTHER &&
                 carries.reduce_scatter == ND_TRAFFIC_OTHER && carries.rest == ND_TRAFFIC_OTHER;
    for (nd_group_kind other = 0; small && other < kind; other++) {
        if (nd_group_communicators(other) > 0 && nd_mesh_groups_are_equal(mesh, kind, other)) {
            return other;
        }
    }
    return kind;
}

size_t nd_comm_nccl_bytes(const nd_mesh *mesh)
{
    const size_t channels = 24, of_channel = (size_t)12 << 20;
    size_t communicators = 0;
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        bool own = nd_mesh_group_size(mesh, kind) > 1 && nd_comm_shared_group(mesh, kind) == kind;
        communicators += own ? (size_t)nd_group_communicators(kind) : 0;
    }
    return communicators * channels * of_channel;
}

nd_status nd_groups_create(nd_transport *transport, const nd_mesh *mesh, nd_groups *out)
{
    nd_groups groups = {0};
    nd_status status = ND_OK;
    for (int copy = 0; copy < 2; copy++) {
        nd_comm **comms = copy == 0 ? groups.by_kind : groups.second;
        for (nd_group_kind kind = 0; status == ND_OK && kind < ND_GROUP_COUNT; kind++) {
            if (copy < nd_group_communicators(kind)) {
                status = nd_comm_create(transport, mesh, kind, copy, &comms[kind]);
            }
        }
    }
    if (status != ND_OK) {
        nd_groups_destroy(&groups);
        return status;
    }
    *out = groups;
    return ND_OK;
}

void nd_groups_destroy(nd_groups *groups)
{
    for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
        nd_comm_destroy(groups->second[kind]);
        groups->second[kind] = NULL;
    }
    for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
        nd_comm_destroy(groups->by_kind[kind]);
        groups->by_kind[kind] = NULL;
    }
}
