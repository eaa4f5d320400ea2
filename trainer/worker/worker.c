// SPDX-License-Identifier: Apache-2.0
#include "trainer/worker/worker.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/device/affinity.h"
#include "runtime/device/gpu_choice.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/pmix.h"
#include "trainer/context/cp.h"
#include "trainer/tune/tune.h"

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

static void free_peers(nd_peers *peers)
{
    free(peers->hosts);
    free(peers->cards);
    *peers = (nd_peers){0};
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
        free_peers(&peers);
        return status;
    }
    *out = peers;
    return ND_OK;
}

/* All ranks call it with the device that each opened. ND_ERR_CONFIG naming two ranks whose devices
 * differ in kind or are the same GPU. */
static nd_status compare_devices(nd_worker *worker, const char *gpu)
{
    const int world = worker->identity.world_size;
    nd_peer_device own = {0}, *all = NULL;
    snprintf(own.kind, sizeof own.kind, "%s", worker->device->table->name);
    snprintf(own.gpu, sizeof own.gpu, "%s", gpu);
    ND_TRY(ND_ALLOC(world, &all));
    nd_status status = nd_store_exchange(worker->store, "devices", &own, all, sizeof own);
    for (int i = 0; i < world && status == ND_OK; i++) {
        all[i].kind[sizeof own.kind - 1] = all[i].gpu[sizeof own.gpu - 1] = '\0';
    }
    status = status == ND_OK ? nd_peers_check_devices(worker->peers.cards, all, world) : status;
    free(all);
    return status;
}

/* CPU, or which GPU. */

/* Resolves launch.device: *out is true for a GPU. ND_ERR_CONFIG with the reason when CUDA was asked
 * for and there is none. */
static nd_status is_gpu_wanted(const nd_config *config, bool *out)
{
    int count = 0;
    *out = false;
    if (config->launch.device == ND_CHOOSE_CPU) {
        return ND_OK;
    }
    /* CUDA reads these once, at its first call in a process; what the user has set stays. The
     * queues of the GPU that streams are spread over are eight by default, and streams that share
     * one wait for each other. */
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
    if (config->kernels.cuda_graphs) {
        setenv("CUDA_MODULE_LOADING", "EAGER", 0); /* loading a kernel would end a recording */
    }
    nd_status status = nd_cuda_count(&count);
    if (status != ND_OK && config->launch.device == ND_CHOOSE_AUTO) {
        nd_error_clear(); /* the start names the CPU as its device */
        return ND_OK;
    }
    if (status != ND_OK && nd_ops_cuda_lacks_cudnn()) {
        char first[ND_ERROR_MESSAGE_MAX];
        snprintf(first, sizeof first, "%s", nd_error_last()->message);
        return nd_fail(
            status,
            "%s; besides, this program was built without cuDNN's attention, which device cuda "
            "needs: run scripts/setup --cuda and scripts/build --cuda",
            first);
    }
    ND_TRY(status);
    *out = true;
    return ND_OK;
}

/* ND_ERR_CONFIG unless each of the `local_workers` of this host finds a GPU (launch.gpu_ids). */
static nd_status check_gpu_count(const nd_config *config, int local_workers)
{
    nd_gpu_request request = {
        .gpu_ids = config->launch.gpu_ids, .local_workers = local_workers, .launched = true};
    int ordinal;
    ND_TRY(nd_cuda_count(&request.visible));
    for (; request.local_rank < local_workers; request.local_rank++) {
        ND_TRY(nd_gpu_choose(&request, &ordinal));
    }
    return ND_OK;
}

/* Leaves multiprocessors to the collectives that gather weights and reduce gradients beside
 * products (kernels.comm_blocks, kernels.product_processors). */
static nd_status divide_gpu(const nd_config *config, nd_device *gpu)
{
    nd_cuda_info info;
    int64_t limit = config->kernels.product_processors;
    const int64_t blocks = nd_tuning_spared_processors(config);
    ND_TRY(nd_cuda_info_of(gpu, &info));
    if (blocks > 0) {
        limit = info.processors - blocks;
        if (limit < 1) {
            return nd_fail(ND_ERR_CONFIG,
                           "kernels.comm_blocks is %lld, which leaves none of the %d "
                           "multiprocessors of %s to products; set it to less",
                           (long long)blocks, info.processors, gpu->name);
        }
    }
    return nd_ops_cuda_limit_products(gpu, limit);
}

/* Opens the GPU that this worker takes (runtime/device/gpu_choice.h). */
static nd_status open_gpu(const nd_config *config, const nd_identity *identity, nd_device **device,
                          const nd_ops **ops)
{
    nd_device *gpu = NULL;
    nd_gpu_request request = {.gpu_ids = config->launch.gpu_ids,
                              .local_rank = identity->local_rank,
                              .local_workers = identity->local_world_size,
                              .launched = identity->source == ND_IDENTITY_NDLAUNCH};
    nd_cuda_options options = {.fp8 = config->train.precision == ND_PRECISION_FP8};
    ND_TRY(nd_cuda_count(&request.visible));
    ND_TRY(nd_gpu_choose(&request, &options.ordinal));
    if (nd_gpu_is_seen_alone(&request) && identity->local_rank == 0) {
        nd_log_warning(
            "each of %d workers of this host sees one GPU alone, so NCCL may move data "
            "between them through host memory; let each task see all GPUs of its node "
            "(srun --gpus-per-node=%d without --gpus-per-task), and it takes that of its "
            "local rank",
            request.local_workers, request.local_workers);
    }
    options.local_workers = request.visible < request.local_workers ? 1 : request.local_workers;
    ND_TRY(nd_device_open_cuda(&options, &gpu));
    nd_status status = nd_ops_cuda(gpu, config->train.deterministic, ops);
    status = status == ND_OK ? divide_gpu(config, gpu) : status;
    if (status != ND_OK) {
        nd_device_close(gpu);
        return status;
    }
    *device = gpu;
    return ND_OK;
}

nd_status nd_worker_check_device(const nd_config *config, bool *gpu)
{
    ND_TRY(is_gpu_wanted(config, gpu));
    return *gpu ? check_gpu_count(config, (int)config->launch.nproc_per_node) : ND_OK;
}

nd_status nd_worker_check_room(const nd_worker *worker, double planned, int64_t world_size,
                               int64_t local_workers)
{
    /* 2: as if oneDNN multiplied, whose threads are as many again. */
    int64_t more = (int64_t)planned + ND_WORKER_LIBRARY_BYTES +
                   2 * worker->device->threads * nd_ops_cpu_stack_bytes();
    ND_TRY(nd_limits_check_memory(more, "a worker of this job"));
    return world_size > 1 ? nd_transport_check_ucx_room(local_workers) : ND_OK;
}

/* Opens device and ops only. A worker of device cpu that ndlaunch did not start first checks its
 * room (nd_worker_check_room): every rank does so before any of them takes more. */
static nd_status open_device(const nd_config *config, nd_worker *worker)
{
    bool gpu = false;
    const nd_identity *id = &worker->identity;
    ND_TRY(is_gpu_wanted(config, &gpu));
    /* Divides only a mask of CPUs that ranks share. */
    ND_TRY(nd_affinity_apply(worker->peers.share, worker->peers.sharers,
                             (int)config->launch.threads_per_worker, &worker->affinity));
    if (gpu) {
        return open_gpu(config, id, &worker->device, &worker->rank.ops);
    }
    if (config->kernels.comm_blocks > 0 || config->kernels.product_processors > 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.%s is set, but this run is on the CPU, as no GPU is visible; set "
                       "it to 0",
                       config->kernels.comm_blocks > 0 ? "comm_blocks" : "product_processors");
    }
    int count = 0;
    if (id->local_rank == 0 && config->launch.device == ND_CHOOSE_AUTO && nd_cuda_has_driver() &&
        nd_cuda_count(&count) != ND_OK) {
        nd_log_warning("device auto takes the CPU: %s", nd_error_last()->message);
        nd_error_clear();
    }
    ND_TRY(nd_device_open_cpu(worker->affinity.threads, &worker->device));
    /* ndlaunch has checked the room of its workers. No thread runs yet: its stack would count
     * twice. */
    if (id->source != ND_IDENTITY_NDLAUNCH) {
        ND_TRY(nd_worker_check_room(worker, 0, id->world_size, id->local_world_size));
    }
    /* Every product of a model has operands of the activations' type. */
    ND_TRY(nd_ops_cpu_start_threads(worker->device, config->train.precision == ND_PRECISION_FP32));
    return nd_ops_cpu(worker->device, &worker->rank.ops);
}

nd_status nd_worker_open_planner(const nd_config *config, nd_worker *worker)
{
    int threads = nd_affinity_threads((int)config->launch.nproc_per_node,
                                      (int)config->launch.threads_per_worker);
    ND_TRY(nd_device_open_cpu(threads, &worker->device));
    if (config->launch.device == ND_CHOOSE_CUDA) {
        worker->planner = nd_ops_cuda_planner(config->train.deterministic);
        worker->rank.ops = &worker->planner;
        return ND_OK;
    }
    return nd_ops_cpu(worker->device, &worker->rank.ops);
}

/* The end of a worker that fails. */

/* Seconds before a rank reports, for one that knows better to end the job. Ranks often fail for the
 * same reason of their own, such as a wrong setting: rank 0 speaks for them. Slurm soon ends a step
 * that has lost a process, so the first rank that hears of a loss waits only for the lines of a
 * rank that has just ended the job. */
static const double after_rank_0 = 0.5, after_a_loss = 0.1, after_the_reason = 4;
/* For the end of the job to reach this process. */
static const double kill_seconds = 30;

static void wait_seconds(double seconds)
{
    double end = nd_clock_seconds() + seconds;
    for (double left = seconds; left > 0; left = end - nd_clock_seconds()) {
        (void)poll(NULL, 0, (int)(left * 1e3 + 1)); /* a signal may end it early */
    }
}

/* False: another thread has reported. The page comes first: ndlaunch recognises the line by it. */
static bool report(nd_worker *worker, const nd_error *error)
{
    const nd_identity *id = &worker->identity;
    if (!nd_gate_enter(&worker->gate, nd_clock_after(kill_seconds))) {
        return false;
    }
    const bool reports = !worker->reported;
    worker->reported = true;
    if (reports) {
        nd_failure_record(&id->page, id->local_rank, error);
        nd_log_error("%s", error->message);
    }
    if (reports && error->status == ND_ERR_HANG && id->source != ND_IDENTITY_NDLAUNCH) {
        /* Ranks that wait for others name them, before the end of this one ends them. */
        wait_seconds(id->world_size > 1 ? after_the_reason : 0);
    }
    if (reports && id->pmix) {
        nd_pmix_abort(id->pmix, (int)error->status, error->message);
        wait_seconds(id->world_size > 1 ? kill_seconds : 0);
    }
    nd_gate_leave(&worker->gate);
    return reports;
}

static bool ends_job(const nd_identity *id)
{
    return id->pmix && id->world_size > 1;
}

void nd_worker_report(nd_worker *worker, const nd_error *error)
{
    const nd_identity *id = &worker->identity;
    const bool may_be_elsewhere = error->cause == ND_CAUSE_ELSEWHERE ||
                                  (error->cause != ND_CAUSE_LOCAL && error->status == ND_ERR_IO);
    if (ends_job(id) && error->status != ND_ERR_HANG) {
        wait_seconds(may_be_elsewhere ? after_the_reason : id->rank > 0 ? after_rank_0 : 0);
    }
    (void)report(worker, error);
}

void nd_worker_report_loss(void *context, const char *message)
{
    nd_worker *worker = context;
    const nd_identity *id = &worker->identity;
    nd_error error = {.status = ND_ERR_IO};
    snprintf(error.message, sizeof error.message, "%s", message);
    /* Rank 0 hears of the others, and they of rank 0. One of them that fails at this moment for a
     * reason of its own, or that knows why rank 0 has ended, says that in place of the loss. */
    const bool first = id->rank <= (ends_job(id) ? 1 : 0);
    wait_seconds(!first ? after_rank_0 : ends_job(id) ? after_a_loss : 0);
    if (report(worker, &error)) {
        _exit(ND_ERR_IO);
    }
}

/* A worker of a job. */

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

/* From the main thread; or with `ends` from one that ends the process because the main thread does
 * not return from CUDA or NCCL. */
static void on_comm_fault(void *context, nd_status status, const char *message, bool ends)
{
    nd_worker *worker = context;
    nd_error error = {.status = status};
    snprintf(error.message, sizeof error.message, "%s", message);
    nd_failure_record(&worker->identity.page, worker->identity.local_rank, &error);
    if (ends) {
        nd_worker_report(worker, &error);
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
        /* Without ndlaunch each worker has a page of its own, which holds nothing about others. */
        .page = id->page.slots ? &worker->progress : NULL,
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

nd_status nd_worker_meet(nd_worker *worker, const nd_config *config)
{
    nd_identity *id = &worker->identity;
    nd_rank *rank = &worker->rank;
    worker->progress = id->page;
    ND_TRY(id->page.slots ? ND_OK : nd_progress_open(-1, id->local_world_size, &worker->progress));
    rank->progress = &worker->progress.slots[id->local_rank];
    atomic_store(&rank->progress->rank, id->rank);
    nd_progress_set_phase(rank->progress, ND_PHASE_RENDEZVOUS, 0);
    if (id->world_size > 1) { /* else there is no store */
        /* For a worker of PMIx, the endpoint is the address at which rank 0 listens. */
        const char *endpoint = config->launch.rdzv_endpoint;
        ND_TRY(id->source == ND_IDENTITY_PMIX && endpoint[0]
                   ? nd_endpoint_parse(endpoint, id->master_addr, &id->master_port)
                   : ND_OK);
        const nd_store_watch watch = {nd_worker_report_loss, worker};
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
    nd_cuda_info gpu = {0}; /* the driver may give no id */
    ND_TRY(open_device(config, worker));
    nd_failure_slot *record = nd_failure_slot_of(&id->page, id->local_rank);
    if (record) {
        snprintf(record->device, sizeof record->device, "%s", worker->device->table->name);
    }
    ND_TRY(worker->device->kind == ND_DEVICE_CUDA ? nd_cuda_info_of(worker->device, &gpu) : ND_OK);
    ND_TRY(compare_devices(worker, gpu.id));
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
    nd_worker_report(worker, &worker->error);
    nd_transport_abandon(worker->transport);
}

/* Reports how the worker ended; returns whether it failed. */
static bool report_end(nd_worker *worker, nd_status status)
{
    bool failed = status != ND_OK && status != ND_ERR_PREEMPTED;
    if (failed) {
        nd_worker_fail(worker, status);
    } else if (status != ND_OK) {
        nd_failure_record(&worker->identity.page, worker->identity.local_rank, nd_error_last());
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
    free_peers(&worker->peers);
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
