// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/worker.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/failure.h"
#include "runtime/rdzv/pmix.h"
#include "trainer/worker/failure.h"

enum {
    KILLED_SECONDS = 30, /* for the end of a job that was aborted to reach this process */
    ECHO_SECONDS = 4     /* a lost peer is mostly another one's failure */
};

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

/* Without ndlaunch each worker has a page of its own, which says nothing about others. */
static const nd_progress *shared_page(const nd_worker *worker)
{
    return worker->identity.progress_fd >= 0 ? &worker->progress : NULL;
}

/*
 * Ranks that learn of one failure at the same time take turns, the lowest first: it aborts the job,
 * which kills the others before they say the same. A rank that gave its own reason has aborted it
 * already, hence the time before the first.
 */
static void wait_for_turn(const nd_worker *worker, double first_seconds)
{
    const double apart = 0.5, most = 10;
    double turn = apart * worker->identity.rank;
    usleep((useconds_t)((first_seconds + (turn < most ? turn : most)) * 1e6));
}

/* From the driving thread, or with `ends` from one that ends the process: then the driving one is
 * inside of CUDA or NCCL and settles nothing. */
static void on_comm_fault(void *context, nd_status status, const char *sentence, bool ends)
{
    const nd_worker *worker = context;
    nd_pmix *pmix = worker->identity.pmix;
    bool waits = status == ND_ERR_IO || status == ND_ERR_HANG;
    nd_failure_report(&worker->identity, status, sentence);
    if (ends && pmix && waits) {
        wait_for_turn(worker, status == ND_ERR_IO ? ECHO_SECONDS : 0);
    }
    if (ends) {
        nd_log_error("%s", sentence);
    }
    if (ends && pmix) {
        nd_pmix_abort(pmix, (int)status, sentence);
        sleep(KILLED_SECONDS);
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
        .on_fault = on_comm_fault,
        .fault_context = worker,
    };
    return nd_transport_open_nccl(&options, &worker->transport);
}

static nd_status open_transport(nd_worker *worker, const nd_config *config)
{
    nd_progress_slot *slot = &worker->progress.slots[worker->identity.local_rank];
    if (worker->identity.world_size == 1) {
        return nd_transport_open_self(slot, &worker->transport);
    }
    if (worker->device->kind == ND_DEVICE_CUDA) {
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
    };
    return nd_transport_open_ucx(&options, &worker->transport);
}

/* In the store's or the watch's thread. */
static void on_lost(void *context, const char *sentence)
{
    const nd_worker *worker = context;
    nd_pmix *pmix = worker->identity.pmix;
    if (pmix) {
        wait_for_turn(worker, 0.5);
    }
    nd_log_error("%s", sentence);
    if (pmix) {
        nd_pmix_abort(pmix, ND_ERR_IO, sentence);
        sleep(KILLED_SECONDS);
    }
    _exit(ND_ERR_IO);
}

/* Where PMIx started the worker, launch.rdzv_endpoint says at which of its addresses rank 0
 * listens. */
static nd_status take_endpoint(nd_identity *id, const nd_config *config)
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
    ND_TRY(nd_progress_open(id->progress_fd, id->local_world_size, &worker->progress));
    rank->progress = &worker->progress.slots[id->local_rank];
    atomic_store(&rank->progress->rank, id->rank);
    nd_progress_set_phase(rank->progress, ND_PHASE_RENDEZVOUS, 0);
    if (id->world_size == 1) {
        ND_TRY(nd_store_open_single(&worker->store));
    } else {
        ND_TRY(take_endpoint(id, config));
        ND_TRY(nd_store_open(id, config->launch.rdzv_timeout_seconds, &worker->store));
        ND_TRY(nd_store_watch(worker->store, on_lost, worker));
        ND_TRY(nd_store_barrier(worker->store, "start"));
        nd_store_set_timeout(worker->store,
                             config->launch.rdzv_timeout_seconds + nd_config_data_seconds(config));
    }
    worker->met = true;
    nd_progress_set_phase(rank->progress, ND_PHASE_INIT, 0);
    return nd_peers_meet(worker->store, id, &worker->peers);
}

nd_status nd_worker_join(nd_worker *worker, const nd_config *config, const nd_llama_shape *shape)
{
    nd_identity *id = &worker->identity;
    nd_rank *rank = &worker->rank;
    char gpu[ND_CUDA_ID_MAX];
    ND_TRY(nd_worker_open_device(config, id->local_rank, id->local_world_size, worker));
    nd_failure_set_device(id, worker->device->table->name);
    ND_TRY(nd_gpu_id(worker->device, gpu));
    ND_TRY(nd_peers_compare_devices(worker->store, id, &worker->peers, worker->device->table->name,
                                    gpu));
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

/* All ranks fail for one reason, mostly; those that may only echo another one's wait for it. */
static void wait_for_speaker(const nd_worker *worker, nd_status status, bool first)
{
    if (status == ND_ERR_HANG && first) {
        return;
    }
    if (worker->voice == ND_VOICE_ALIKE && worker->identity.rank > 0) {
        wait_for_turn(worker, 2); /* rank 0 reads the same configuration and files */
    } else if (worker->voice == ND_VOICE_ECHO || status == ND_ERR_IO || status == ND_ERR_HANG) {
        wait_for_turn(worker, ECHO_SECONDS);
    }
}

/* Ranks that no ndlaunch watches settle among themselves who speaks. */
static bool settles(const nd_worker *worker)
{
    return worker->identity.source != ND_IDENTITY_NDLAUNCH && worker->identity.world_size > 1;
}

static void settle_speaker(const nd_worker *worker, nd_status status, char *silent, size_t capacity)
{
    bool first = false;
    if (status == ND_ERR_HANG && worker->met) {
        nd_hang_report(worker, &first, silent, capacity);
    }
    if (worker->identity.pmix) {
        wait_for_speaker(worker, status, first);
    }
}

static void say(const nd_worker *worker, nd_status status, const char *text)
{
    nd_failure_report(&worker->identity, status, text); /* first: ndlaunch knows the line by it */
    nd_log_error("%s", text);
}

/* Peers know nothing of the failure until the reason is out; where PMIx started this process, it
 * ends all of them then. */
static void tell(const nd_worker *worker)
{
    nd_pmix *pmix = worker->identity.pmix;
    const nd_error *failure = &worker->failure;
    char text[ND_ERROR_MESSAGE_MAX + 300], silent[300] = "";
    snprintf(text, sizeof text, "%s", failure->message);
    if (settles(worker)) {
        settle_speaker(worker, failure->status, silent, sizeof silent);
        snprintf(text + strlen(text), sizeof text - strlen(text), "%s", silent);
    }
    say(worker, failure->status, text);
    if (pmix) {
        nd_pmix_abort(pmix, (int)failure->status, text);
        sleep(worker->identity.world_size > 1 ? KILLED_SECONDS : 0);
    }
}

void nd_worker_fail(nd_worker *worker, nd_status status, const char *message)
{
    if (worker->failure.status != ND_OK) {
        return;
    }
    worker->failure.status = status;
    snprintf(worker->failure.message, sizeof worker->failure.message, "%s", message);
    tell(worker);
    nd_fail(status, "%s", worker->failure.message); /* the store's calls may have left another */
    nd_transport_abandon(worker->transport);
}

int nd_worker_close(nd_worker *worker, nd_status status, const char *message)
{
    bool failed = status != ND_OK && status != ND_ERR_PREEMPTED;
    if (failed) {
        nd_worker_fail(worker, status, message);
    } else if (message) {
        say(worker, status, message);
    }
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
        nd_pmix_end(worker->identity.pmix, KILLED_SECONDS, (int)status);
    }
    nd_identity_leave(&worker->identity, (int)status);
    nd_progress_close(&worker->progress);
    return (int)status;
}
