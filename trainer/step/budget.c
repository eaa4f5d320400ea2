// SPDX-License-Identifier: Apache-2.0
#include "trainer/step/parts.h"

#include "kernels/cuda/cuda_ops.h"
#include "runtime/base/log.h"
#include "runtime/base/math.h"
#include "runtime/device/cuda.h"

/* Kernels' code, of this program and of libraries, which the driver loads when it is first used. */
static const size_t KERNEL_BYTES = (size_t)256 << 20;

/* The most that plans may take of a host's memory, or of a limit, while they hold packed weights,
 * which only save time. The rest is for libraries, stacks, files and other programs. */
static const double FULL_SHARE = 0.75;

/* The most that the transport may hold for this rank's groups. It is an upper bound: a group that
 * never reduces leaves its pages untouched, and one without a communicator is counted as one. */
static size_t staging_bytes(const nd_mesh *mesh)
{
    size_t bytes = 0;
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        int communicators = nd_group_communicators(kind);
        bytes += nd_comm_staging_bytes(nd_mesh_group_size(mesh, kind)) *
                 (size_t)(communicators > 0 ? communicators : 1);
    }
    return bytes;
}

static size_t loader_bytes(const nd_rank *rank)
{
    const char *path = rank->config->data.validation_path;
    nd_loader_options train = nd_loader_options_of(rank, false),
                      validation = nd_loader_options_of(rank, true);
    return nd_loader_bytes(&train) + (path && path[0] ? nd_loader_bytes(&validation) : 0);
}

/* What the driver and the libraries already hold: CUDA's context, kernels, cuBLASLt and cuDNN. For
 * a plan without a GPU, what they hold on one of 80 GB. */
static size_t context_bytes(const nd_rank *rank)
{
    nd_cuda_info gpu;
    size_t used = (size_t)1 << 30;
    if (rank->device->kind == ND_DEVICE_CUDA && nd_cuda_info_of(rank->device, &gpu) == ND_OK) {
        used = gpu.total_bytes - gpu.free_bytes;
        used -= used < nd_ops_cuda_workspace() ? used : nd_ops_cuda_workspace();
    }
    return used;
}

static size_t graph_bytes(const nd_graph_counts *graphs)
{
    return graphs ? nd_graphs_bytes(graphs) : 0;
}

size_t nd_budget_later(const nd_rank *rank, const nd_graph_counts *graphs)
{
    return nd_rank_is_gpu(rank)
               ? KERNEL_BYTES + nd_comm_nccl_bytes(&rank->mesh) + graph_bytes(graphs)
               : 0;
}

bool nd_budget_exceeds(size_t bytes, int workers, const nd_host_memory *host,
                       const nd_memory_limit *limit)
{
    const double all = (double)bytes * (double)nd_max(1, workers);
    const double share = FULL_SHARE * (double)host->physical;
    const double most = share < (double)host->available ? share : (double)host->available;
    return (host->physical > 0 && all > most) ||
           (limit->option && (double)bytes > FULL_SHARE * (double)limit->left);
}

bool nd_budget_has_room(const nd_rank *rank, const nd_memplan *plan, size_t more)
{
    const nd_host_memory host = nd_host_memory_read("");
    const nd_memory_limit limit = nd_limits_read_memory();
    return more == 0 ||
           !nd_budget_exceeds(plan->total + plan->external + more, rank->host_ranks, &host, &limit);
}

void nd_budget_plan(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan)
{
    if (nd_rank_is_gpu(rank)) {
        nd_memplan_add_external(plan, ND_MEM_SCRATCH, "workspaces of cuBLASLt and kernels",
                                nd_ops_cuda_workspace());
        nd_memplan_add_external(plan, ND_MEM_SCRATCH, "driver and libraries", context_bytes(rank));
        if (rank->config->kernels.cuda_graphs) {
            nd_memplan_add_external(plan, ND_MEM_SCRATCH, "CUDA graphs, estimated",
                                    graph_bytes(graphs));
        }
        nd_memplan_add_external(plan, ND_MEM_COMMUNICATION, "NCCL, estimated",
                                nd_comm_nccl_bytes(&rank->mesh));
        return;
    }
    nd_memplan_add_external(plan, ND_MEM_SCRATCH, "packed operands, partial sums",
                            nd_ops_cpu_workspace(rank->device));
    if (graphs) {
        nd_memplan_add_external(plan, ND_MEM_COMMUNICATION, "staging of reductions",
                                staging_bytes(&rank->mesh));
        nd_memplan_add_external(plan, ND_MEM_DATA, "prefetched batches", loader_bytes(rank));
    }
}

/* Only a warning: what comes after the plan is estimated, so the run may still fit. */
static void warn_of_later(const nd_rank *rank, size_t later, const nd_memplan *plan)
{
    nd_cuda_info gpu;
    if (rank->device->kind == ND_DEVICE_CUDA && nd_cuda_info_of(rank->device, &gpu) == ND_OK &&
        plan->total <= gpu.free_bytes && plan->total + later > gpu.free_bytes) {
        nd_log_warning(
            "the plan takes %.2f GiB of the %.2f that are free on %s, and kernels, NCCL "
            "and CUDA graphs will take about %.2f, so the first steps may run "
            "out of memory; recompute, a smaller micro-batch, a shorter sequence or more "
            "shards need less",
            (double)plan->total / nd_gib, (double)gpu.free_bytes / nd_gib, rank->device->name,
            (double)later / nd_gib);
    }
}

nd_status nd_budget_commit(const nd_rank *rank, const nd_graph_counts *graphs, nd_memplan *plan)
{
    size_t later = nd_budget_later(rank, graphs);
    warn_of_later(rank, later, plan);
    nd_status status = nd_memplan_commit(plan, rank->device);
    return status == ND_ERR_RESOURCE && later > 0
               ? nd_fail_context(status,
                                 "kernels, NCCL and CUDA graphs still need about %.2f GiB more",
                                 (double)later / nd_gib)
               : status;
}

nd_status nd_budget_explain(const nd_rank *rank, const nd_graph_counts *graphs,
                            const nd_memplan *plan, nd_status status)
{
    if (status != ND_ERR_RESOURCE || rank->device->kind != ND_DEVICE_CUDA) {
        return status;
    }
    return nd_fail_context(status,
                           "the plan holds %.2f GiB, and kernels, NCCL and CUDA graphs were "
                           "estimated at %.2f GiB more",
                           (double)plan->total / nd_gib,
                           (double)nd_budget_later(rank, graphs) / nd_gib);
}
