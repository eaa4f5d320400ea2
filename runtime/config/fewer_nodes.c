// SPDX-License-Identifier: Apache-2.0
/* A job that goes on with fewer nodes than it began with: what changes in its configuration. */
#include "runtime/config/reader.h"

static int64_t data_ranks(const nd_mesh *mesh)
{
    return nd_mesh_group_size(mesh, ND_GROUP_DP);
}

nd_status nd_config_with_nodes(const nd_config *config, int64_t nodes, nd_config *out)
{
    nd_config c = *config;
    int64_t workers = nodes * config->launch.nproc_per_node;
    ND_ASSERT(config->resolved && nodes >= 1 && nodes <= config->launch.nnodes);
    if (config->open_axis == ND_AXIS_COUNT && nodes < config->launch.nnodes) {
        return nd_fail(ND_ERR_CONFIG, "every axis of the mesh has a fixed size; set mesh.dp_shard "
                                      "or mesh.dp_replicate to -1, so that it can shrink");
    }
    if (config->open_axis != ND_AXIS_COUNT) {
        c.resolved_mesh.size[config->open_axis] = -1;
    }
    ND_TRY(nd_mesh_resolve(&c.resolved_mesh, workers));
    int64_t micro_batches =
                config->train.gradient_accumulation_steps * data_ranks(&config->resolved_mesh),
            ranks = data_ranks(&c.resolved_mesh);
    c.train.gradient_accumulation_steps = micro_batches / ranks;
    if (micro_batches % ranks != 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "the %lld micro-batches of a step do not divide over %lld data-parallel "
                       "ranks",
                       (long long)micro_batches, (long long)ranks);
    }
    ND_TRY(nd_field_check(&c, ND_FIELD_train_gradient_accumulation_steps));
    for (nd_axis a = 0; a < ND_AXIS_COUNT; a++) {
        int64_t *size = nd_axis_size(&c, a);
        if (size) {
            *size = c.resolved_mesh.size[a];
        }
    }
    c.launch.workers = workers;
    c.launch.nnodes = nodes;
    c.launch.node_rank = 0; /* places of a start count from 0, whatever nodes have them */
    c.launch.spare_nodes = c.launch.min_nodes = 0;
    *out = c;
    return ND_OK;
}
