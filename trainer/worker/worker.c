// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/worker.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/pmix.h"
#include "trainer/context/cp.h"

enum { END_SECONDS = 30 }; /* for the ranks of PMIx to end together */

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

static nd_status store_network(void *context, nd_comm_network *out)
{
    nd_comm_network network = {0};
    const nd_channel *channel = nd_store_channel(context);
    ND_TRY(nd_channel_own_address(channel, &network.address));
    ND_TRY(nd_channel_tls(channel, false, &network.client));
    nd_status status = nd_channel_tls(channel, true, &network.server);
    if (status != ND_OK) {
        nd_tls_context_destroy(network.client);
        return status;
    }
    *out = network;
    return ND_OK;
}

/* Without ndlaunch each worker has a page of its own, which holds nothing about others. */
static const nd_progress *shared_page(const nd_worker *worker)
{
    return worker->identity.page.slots ? &worker->progress : NULL;
}

/* From the main thread; or with `ends` from one that ends the process because the main thread does
 * not return from CUDA or NCCL. */
static void on_comm_fault(void *context, nd_status status, const char *message, bool ends)
{
    nd_worker *worker = context;
    nd_error error = {.status = status};
    snprintf(error.message, sizeof error.message, "%s", message);
    nd_failure_record(nd_identity_record(&worker->identity), &error);
    if (ends) {
        nd_failure_end(&worker->failure, &error);
    }
}

static nd_status open_nccl(nd_worker *worker, const nd_config *config, nd_progress_slot *slot)
{
    nd_nccl_options options = {
        .rank = worker->identity.rank,
        .size = worker->identity.world_size,
        .timeout_seconds = config->launch.comm_timeout_seconds,
        .progress = slot,
        .page = shared_page(worker),
        .slot_of_rank = slot_of_rank,
        .slot_context = &worker->identity,
        .exchange = store_exchange,
        .exchange_context = worker->store,
        .device = worker->device,
        .alone = config->launch.nccl_alone,
        .max_blocks = (int)config->kernels.comm_blocks,
        .on_fault = on_comm_fault,
        .fault_context = worker,
    };
    if (worker->identity.local_world_size == worker->identity.world_size) {
        /* Nobody needs a key to talk to NCCL's bootstrap, so one host keeps it to itself. */
        setenv("NCCL_SOCKET_IFNAME", "=lo", 0);
    }
    return nd_transport_open_nccl(&options, &worker->transport);
}

static nd_status open_transport(nd_worker *worker, const nd_config *config)
{
    nd_progress_slot *slot = &worker->progress.slots[worker->identity.local_rank];
    bool gpu = worker->device->kind == ND_DEVICE_CUDA;
    if (config->launch.nccl_alone && !gpu) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.nccl_alone is true, but this run is on the CPU, as no GPU is "
                       "visible; set launch.nccl_alone: false (--nccl-alone false)");
    }
    if (worker->identity.world_size == 1 && !config->launch.nccl_alone) {
        return nd_transport_open_self(slot, &worker->transport);
    }
    if (gpu) {
        return open_nccl(worker, config, slot);
    }
    nd_ucx_options options = {
        .rank = worker->identity.rank,
        .size = worker->identity.world_size,
        .timeout_seconds = config->launch.comm_timeout_seconds,
        .progress = slot,
        .page = shared_page(worker),
        .slot_of_rank = slot_of_rank,
        .slot_context = &worker->identity,
        .exchange = store_exchange,
        .exchange_context = worker->store,
        .network = store_network,
    };
    return nd_transport_open_ucx(&options, &worker->transport);
}

/* Another rank was lost. Runs in the store's thread on rank 0, and on the others in the thread that
 * watches rank 0. */
static void on_lost(void *context, const char *message)
{
    nd_worker *worker = context;
    nd_failure_end_lost(&worker->failure, message);
}

/* For a worker of PMIx, launch.rdzv_endpoint names the address at which rank 0 listens. */
static nd_status apply_endpoint(nd_identity *id, const nd_config *config)
{
    if (id->source != ND_IDENTITY_PMIX || !config->launch.rdzv_endpoint[0]) {
        return ND_OK;
    }
    return nd_endpoint_parse(config->launch.rdzv_endpoint, id->master_addr, &id->master_port);
}

nd_status nd_worker_meet(nd_worker *worker, const nd_config *config)
{
    nd_identity *id = &worker->identity;
    nd_rank *rank = &worker->rank;
    worker->progress = id->page;
    ND_TRY(id->page.slots ? ND_OK : nd_progress_open(-1, id->local_world_size, &worker->progress));
    worker->failure.identity = id;
    rank->progress = &worker->progress.slots[id->local_rank];
    atomic_store(&rank->progress->rank, id->rank);
    nd_progress_set_phase(rank->progress, ND_PHASE_RENDEZVOUS, 0);
    if (id->world_size > 1) { /* else there is no store */
        ND_TRY(apply_endpoint(id, config));
        const nd_store_watch watch = {on_lost, worker};
        ND_TRY(nd_store_open(id, config->launch.rdzv_timeout_seconds, &watch, &worker->store));
        ND_TRY(nd_store_barrier(worker->store, "start"));
        nd_store_set_timeout(worker->store,
                             config->launch.rdzv_timeout_seconds + nd_config_data_seconds(config));
    }
    worker->met = true;
    nd_progress_set_phase(rank->progress, ND_PHASE_INIT, 0);
    return nd_peers_meet(worker->store, id, &worker->peers);
}

nd_status nd_worker_join(nd_worker *worker, const nd_config *config, const nd_shape *shape)
{
    nd_identity *id = &worker->identity;
    nd_rank *rank = &worker->rank;
    char gpu[ND_CUDA_ID_MAX];
    ND_TRY(nd_worker_open_device(config, id->local_rank, id->local_world_size, worker));
    nd_failure_slot *record = nd_identity_record(id);
    if (record) {
        snprintf(record->device, sizeof record->device, "%s", worker->device->table->name);
    }
    ND_TRY(nd_gpu_id(worker->device, gpu));
    ND_TRY(nd_peers_compare_devices(worker->store, id, &worker->peers, worker->device->table->name,
                                    gpu));
    ND_TRY(open_transport(worker, config));
    rank->rank = id->rank;
    rank->world_size = id->world_size;
    rank->host_ranks = id->local_world_size;
    rank->mesh = nd_shape_mesh(shape, config);
    rank->coord = nd_mesh_coord_of(&rank->mesh, id->rank);
    rank->config = config;
    rank->shape = *shape;
    rank->device = worker->device;
    rank->transport = worker->transport;
    ND_TRY(worker->device->table->stream_init(worker->device, &rank->stream));
    return nd_groups_create(worker->transport, &rank->mesh, &rank->groups);
}

void nd_worker_fail(nd_worker *worker, nd_status status)
{
    if (worker->error.status != ND_OK) {
        return;
    }
    worker->error = *nd_error_last();
    worker->error.status = status;
    worker->failure.identity = &worker->identity;
    nd_failure_end(&worker->failure, &worker->error);
    nd_transport_abandon(worker->transport);
}

/* Whether it is a failure. */
static bool report_end(nd_worker *worker, nd_status status)
{
    bool failed = status != ND_OK && status != ND_ERR_PREEMPTED;
    if (failed) {
        nd_worker_fail(worker, status);
    } else if (status != ND_OK) {
        nd_failure_record(nd_identity_record(&worker->identity), nd_error_last());
        nd_log_error("%s", nd_error_last()->message);
    }
    return failed;
}

_Noreturn void nd_worker_end(nd_worker *worker, nd_status status)
{
    report_end(worker, status);
    nd_identity_leave(&worker->identity, (int)status);
    _exit((int)status); /* what exit() runs could wait for the same call */
}

int nd_worker_close(nd_worker *worker, nd_status status)
{
    bool failed = report_end(worker, status);
    nd_groups_destroy(&worker->rank.groups);
    nd_transport_close(worker->transport);
    if (worker->rank.stream.device) {
        worker->device->table->stream_fini(&worker->rank.stream);
    }
    nd_device_close(worker->device);
    nd_peers_fini(&worker->peers);
    if (failed) {
        nd_store_abandon(worker->store);
    } else {
        nd_store_close(worker->store);
    }
    if (!failed && worker->identity.pmix && worker->met) {
        /* All end together: some settings of Slurm kill the step at the first task whose code is
         * not 0. */
        nd_pmix_end(worker->identity.pmix, END_SECONDS, (int)status);
    }
    nd_identity_leave(&worker->identity, (int)status);
    nd_progress_close(&worker->progress);
    worker->identity.page = (nd_progress){0};
    return (int)status;
}
