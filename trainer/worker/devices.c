// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/log.h"
#include "runtime/base/process.h"
#include "runtime/device/gpu_choice.h"
#include "trainer/tune/tune.h"
#include "trainer/worker/worker.h"

nd_status nd_gpu_is_wanted(const nd_config *config, bool *out)
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
static nd_status check_gpus(const nd_config *config, int local_workers)
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

nd_status nd_worker_check_device(const nd_config *config)
{
    bool gpu = false;
    ND_TRY(nd_gpu_is_wanted(config, &gpu));
    return gpu ? check_gpus(config, (int)config->launch.nproc_per_node) : ND_OK;
}

/* ndlaunch has checked that of its workers. */
static nd_status check_room_of_one(const nd_worker *worker)
{
    const nd_identity *id = &worker->identity;
    return id->source == ND_IDENTITY_NDLAUNCH
               ? ND_OK
               : nd_worker_check_room(worker, 0, id->world_size, id->local_world_size);
}

nd_status nd_worker_open_device(const nd_config *config, int local_rank, int local_workers,
                                nd_worker *worker)
{
    bool gpu = false,
         met = worker->peers.sharers > 0; /* divide only a mask of CPUs that ranks share */
    ND_TRY(nd_gpu_is_wanted(config, &gpu));
    ND_TRY(nd_affinity_apply(met ? worker->peers.share : local_rank,
                             met ? worker->peers.sharers : local_workers,
                             (int)config->launch.threads_per_worker, &worker->affinity));
    if (gpu) {
        return open_gpu(config, &worker->identity, &worker->device, &worker->rank.ops);
    }
    if (config->kernels.comm_blocks > 0 || config->kernels.product_processors > 0) {
        return nd_fail(ND_ERR_CONFIG,
                       "kernels.%s is set, but this run is on the CPU, as no GPU is visible; set "
                       "it to 0",
                       config->kernels.comm_blocks > 0 ? "comm_blocks" : "product_processors");
    }
    int count = 0;
    if (local_rank == 0 && config->launch.device == ND_CHOOSE_AUTO && nd_cuda_has_driver() &&
        nd_cuda_count(&count) != ND_OK) {
        nd_log_warning("device auto takes the CPU: %s", nd_error_last()->message);
        nd_error_clear();
    }
    ND_TRY(nd_device_open_cpu(worker->affinity.threads, &worker->device));
    ND_TRY(check_room_of_one(worker)); /* which does not count threads that run already */
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

nd_status nd_worker_check_room(const nd_worker *worker, double planned, int64_t world_size,
                               int64_t local_workers)
{
    /* 2: as if oneDNN multiplied, whose threads are as many again. */
    int64_t more = (int64_t)planned + ND_WORKER_LIBRARY_BYTES +
                   2 * worker->device->threads * nd_ops_cpu_stack_bytes();
    ND_TRY(nd_limits_check_memory(more, "a worker of this job"));
    return world_size > 1 ? nd_transport_check_ucx_room(local_workers) : ND_OK;
}

nd_status nd_gpu_id(nd_device *device, char out[ND_CUDA_ID_MAX])
{
    nd_cuda_info info = {0};
    if (device->kind == ND_DEVICE_CUDA) {
        ND_TRY(nd_cuda_info_of(device, &info));
    }
    memcpy(out, info.id, ND_CUDA_ID_MAX);
    return ND_OK;
}

const char *nd_device_machine(const nd_device *device)
{
    return device->kind == ND_DEVICE_CUDA ? nd_ops_cuda_machine(device) : nd_ops_machine(device);
}
