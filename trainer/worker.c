// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/log.h"
#include "runtime/rdzv/failure.h"

nd_status nd_worker_check_device(const nd_config *config)
{
    if (config->launch.device == ND_CHOOSE_CUDA) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.device is cuda for %lld workers, but this program was built without "
                       "the CUDA backend and "
                       "sees no GPU; use --device cpu",
                       (long long)config->launch.workers);
    }
    return ND_OK;
}

nd_status nd_worker_open_device(const nd_config *config, int local_rank, int local_workers,
                                nd_worker *worker)
{
    ND_TRY(nd_worker_check_device(config));
    ND_TRY(nd_affinity_apply(local_rank, local_workers, (int)config->launch.threads_per_worker,
                             &worker->affinity));
    ND_TRY(nd_device_open_cpu(worker->affinity.threads, &worker->device));
    return nd_ops_cpu(worker->device, &worker->rank.ops);
}

nd_status nd_worker_open_planner(const nd_config *config, nd_worker *worker)
{
    int threads = nd_affinity_threads((int)config->launch.nproc_per_node,
                                      (int)config->launch.threads_per_worker);
    ND_TRY(nd_device_open_cpu(threads, &worker->device));
    return nd_ops_cpu(worker->device, &worker->rank.ops);
}

static int slot_of_rank(void *context, int rank)
{
    const nd_identity *id = context;
    int slot = rank - (id->rank - id->local_rank);
    return slot >= 0 && slot < id->local_world_size ? slot : -1;
}

static nd_status store_exchange(void *context, const void *send, void *recv, size_t bytes)
{
    return nd_store_exchange(context, "communicator addresses", send, recv, bytes);
}

static nd_status open_transport(nd_worker *worker, const nd_config *config)
{
    nd_progress_slot *slot = &worker->progress.slots[worker->identity.local_rank];
    if (worker->identity.world_size == 1) {
        return nd_transport_open_self(slot, &worker->transport);
    }
    nd_ucx_options options = {
        .rank = worker->identity.rank,
        .size = worker->identity.world_size,
        .timeout_seconds = config->launch.comm_timeout_seconds,
        .progress = slot,
        .page = &worker->progress,
        .slot_of_rank = slot_of_rank,
        .slot_context = &worker->identity,
        .exchange = store_exchange,
        .exchange_context = worker->store,
    };
    return nd_transport_open_ucx(&options, &worker->transport);
}

nd_status nd_worker_meet(nd_worker *worker, const nd_config *config)
{
    nd_identity *id = &worker->identity;
    nd_rank *rank = &worker->rank;
    ND_TRY(nd_progress_open(id->progress_fd, id->local_world_size, &worker->progress));
    rank->progress = &worker->progress.slots[id->local_rank];
    atomic_store(&rank->progress->rank, id->rank);
    nd_progress_set_phase(rank->progress, ND_PHASE_RENDEZVOUS, 0);
    if (id->world_size == 1) {
        ND_TRY(nd_store_open_single(&worker->store));
    } else {
        ND_TRY(nd_store_open(id, config->launch.rdzv_timeout_seconds, &worker->store));
        ND_TRY(nd_store_barrier(worker->store, "start"));
        nd_store_set_timeout(worker->store,
                             config->launch.rdzv_timeout_seconds + nd_config_data_seconds(config));
    }
    nd_progress_set_phase(rank->progress, ND_PHASE_INIT, 0);
    return ND_OK;
}

nd_status nd_worker_join(nd_worker *worker, const nd_config *config, const nd_llama_shape *shape)
{
    nd_identity *id = &worker->identity;
    nd_rank *rank = &worker->rank;
    ND_TRY(nd_worker_open_device(config, id->local_rank, id->local_world_size, worker));
    nd_failure_set_device(id, worker->device->table->name);
    ND_TRY(nd_peers_meet(worker->store, id, "", &worker->peers));
    ND_TRY(open_transport(worker, config));
    rank->rank = id->rank;
    rank->world_size = id->world_size;
    rank->mesh = config->resolved_mesh;
    rank->coord = nd_mesh_coord_of(&rank->mesh, id->rank);
    rank->config = config;
    rank->shape = *shape;
    rank->device = worker->device;
    rank->transport = worker->transport;
    ND_TRY(worker->device->table->stream_init(worker->device, &rank->stream));
    return nd_groups_create(worker->transport, &rank->mesh, &rank->groups);
}

void nd_worker_close(nd_worker *worker)
{
    nd_groups_destroy(&worker->rank.groups);
    nd_transport_close(worker->transport);
    if (worker->rank.stream.device) {
        worker->device->table->stream_fini(&worker->rank.stream);
    }
    nd_device_close(worker->device);
    nd_peers_fini(&worker->peers);
    nd_store_close(worker->store);
    nd_progress_close(&worker->progress);
}
