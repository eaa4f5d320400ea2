// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/worker.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/device/affinity.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/pmix.h"
#include "trainer/context/cp.h"

typedef struct placed {
    const char *host, *gpu;
    int rank;
} placed;

/* Orders by host and GPU, then by rank: equal ones become adjacent. */
static int by_gpu(const void *a, const void *b)
{
    const placed *x = a, *y = b;
    int order = strcmp(x->host, y->host);
    order = order ? order : strcmp(x->gpu, y->gpu);
    return order ? order : (x->rank > y->rank) - (x->rank < y->rank);
}

static nd_status check_gpus(const placed *sorted, int count)
{
    for (int i = 1; i < count; i++) {
        const placed *a = &sorted[i - 1], *b = &sorted[i];
        if (a->gpu[0] && strcmp(a->host, b->host) == 0 && strcmp(a->gpu, b->gpu) == 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "ranks %d and %d of host %s would both train on GPU %s; start fewer "
                           "tasks on a node, or let each see all GPUs (srun --gpus-per-node)",
                           a->rank, b->rank, a->host, a->gpu);
        }
    }
    return ND_OK;
}

nd_status nd_peers_check_devices(const nd_peer_card *cards, const nd_peer_device *devices,
                                 int count)
{
    placed *sorted = NULL;
    for (int i = 1; i < count; i++) {
        if (strcmp(devices[i].kind, devices[0].kind) != 0) {
            return nd_fail(ND_ERR_CONFIG,
                           "rank 0 (host %s) trains on %s, but rank %d (host %s) on %s; name one "
                           "with --device, or start the job on nodes that are alike",
                           cards[0].host, devices[0].kind, i, cards[i].host, devices[i].kind);
        }
    }
    ND_TRY(ND_ALLOC(count, &sorted));
    for (int i = 0; i < count; i++) {
        sorted[i] = (placed){cards[i].host, devices[i].gpu, i};
    }
    qsort(sorted, (size_t)count, sizeof *sorted, by_gpu);
    nd_status status = check_gpus(sorted, count);
    free(sorted);
    return status;
}

nd_status nd_peers_index(nd_peers *peers, int count, int rank)
{
    const nd_peer_card *own = &peers->cards[rank];
    peers->sharers = peers->share = 0;
    ND_TRY(ND_ALLOC(count, &peers->hosts));
    for (int i = 0; i < count; i++) {
        const nd_peer_card *card = &peers->cards[i];
        bool known = false; /* ranks of a host are adjacent or cyclic: looking back finds it soon */
        for (int k = peers->host_count - 1; k >= 0 && !known; k--) {
            known = strcmp(peers->hosts[k], card->host) == 0;
        }
        if (!known) {
            peers->hosts[peers->host_count++] = card->host;
        }
        if (card->cpus == own->cpus && strcmp(card->host, own->host) == 0) {
            peers->share += i < rank;
            peers->sharers++;
        }
    }
    return ND_OK;
}

/* Exchanges hosts and CPUs; all ranks call it. */
static nd_status meet_peers(nd_store *store, const nd_identity *identity, nd_peers *out)
{
    nd_peers peers = {0};
    nd_peer_card own = {0};
    snprintf(own.host, sizeof own.host, "%s", identity->host);
    ND_TRY(nd_affinity_digest(&own.cpus));
    ND_TRY(ND_ALLOC(identity->world_size, &peers.cards));
    nd_status status = nd_store_exchange(store, "hosts", &own, peers.cards, sizeof own);
    for (int i = 0; i < identity->world_size && status == ND_OK;
         i++) { /* another process sent them */
        peers.cards[i].host[sizeof own.host - 1] = '\0';
    }
    status =
        status == ND_OK ? nd_peers_index(&peers, identity->world_size, identity->rank) : status;
    if (status != ND_OK) {
        nd_peers_fini(&peers);
        return status;
    }
    *out = peers;
    return ND_OK;
}

/* All ranks call it with the device that each opened. ND_ERR_CONFIG naming two ranks whose devices
 * differ in kind or are the same GPU. */
static nd_status compare_devices(nd_store *store, const nd_identity *identity,
                                 const nd_peers *peers, const char *kind, const char *gpu)
{
    nd_peer_device own = {0}, *all = NULL;
    snprintf(own.kind, sizeof own.kind, "%s", kind);
    snprintf(own.gpu, sizeof own.gpu, "%s", gpu);
    ND_TRY(ND_ALLOC(identity->world_size, &all));
    nd_status status = nd_store_exchange(store, "devices", &own, all, sizeof own);
    for (int i = 0; i < identity->world_size && status == ND_OK; i++) {
        all[i].kind[sizeof own.kind - 1] = all[i].gpu[sizeof own.gpu - 1] = '\0';
    }
    status =
        status == ND_OK ? nd_peers_check_devices(peers->cards, all, identity->world_size) : status;
    free(all);
    return status;
}

void nd_peers_fini(nd_peers *peers)
{
    free(peers->hosts);
    free(peers->cards);
    *peers = (nd_peers){0};
}

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
    ND_TRY(nd_store_network(context, &network.address, &network.client, &network.server));
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

static nd_status open_transport(nd_worker *worker, const nd_config *config)
{
    const nd_identity *id = &worker->identity;
    const bool gpu = worker->device->kind == ND_DEVICE_CUDA, alone = config->launch.nccl_alone;
    const nd_transport_options options = {
        .rank = id->rank,
        .size = id->world_size,
        .timeout_seconds = config->launch.comm_timeout_seconds,
        .progress = &worker->progress.slots[id->local_rank],
        .page = shared_page(worker),
        .slot_of_rank = slot_of_rank,
        .slot_context = &worker->identity,
        .exchange = store_exchange,
        .exchange_context = worker->store,
        .network = store_network,
        .device = worker->device,
        .alone = alone,
        .max_blocks = (int)config->kernels.comm_blocks,
        .on_fault = on_comm_fault,
        .fault_context = worker,
    };
    if (alone && !gpu) {
        return nd_fail(ND_ERR_CONFIG,
                       "launch.nccl_alone is true, but this run is on the CPU, as no GPU is "
                       "visible; set launch.nccl_alone: false (--nccl-alone false)");
    }
    if (id->world_size == 1 && !alone) {
        return nd_transport_open_self(options.progress, &worker->transport);
    }
    if (!gpu) {
        return nd_transport_open_ucx(&options, &worker->transport);
    }
    if (id->local_world_size == id->world_size) {
        /* Nobody needs a key to talk to NCCL's bootstrap, so one host keeps it to itself. */
        setenv("NCCL_SOCKET_IFNAME", "=lo", 0);
    }
    return nd_transport_open_nccl(&options, &worker->transport);
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
    return meet_peers(worker->store, id, &worker->peers);
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
    ND_TRY(compare_devices(worker->store, id, &worker->peers, worker->device->table->name, gpu));
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
    nd_pmix_close(worker->identity.pmix, (int)status);
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
    nd_store_close(worker->store, failed);
    if (!failed && worker->identity.pmix && worker->met) {
        /* All end together: some settings of Slurm kill the step at the first task whose code is
         * not 0. */
        nd_pmix_end(worker->identity.pmix, END_SECONDS, (int)status);
    }
    nd_pmix_close(worker->identity.pmix, (int)status);
    worker->identity.pmix = NULL;
    nd_progress_close(&worker->progress);
    worker->identity.page = (nd_progress){0};
    return (int)status;
}
