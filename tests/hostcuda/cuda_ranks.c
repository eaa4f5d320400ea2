// SPDX-License-Identifier: Apache-2.0
#include "tests/hostcuda/cuda_ranks.h"

#include <signal.h>
#include <unistd.h>

#include "runtime/device/cuda.h"

typedef struct exchange_context {
    nd_comm *comm;
    nd_stream stream;
} exchange_context;

static nd_status gather(exchange_context *c, const void *send, void *recv, size_t bytes)
{
    return nd_comm_all_gather(
        c->comm, &c->stream,
        &(nd_comm_args){.send = send, .recv = recv, .count = (int64_t)bytes, .dtype = ND_DTYPE_U8},
        NULL);
}

static int dying = -1;

void cuda_rank_dies(int rank)
{
    dying = rank;
}

/* A killed process whose parent has seen it: nothing is left to ask. */
static nd_status lose_one(exchange_context *c)
{
    enum { MOST = 64 };
    int own = (int)getpid(), all[MOST];
    ND_ASSERT(c->comm->size <= MOST);
    ND_TRY(gather(c, &own, all, sizeof own));
    if (c->comm->index == dying) {
        raise(SIGKILL);
    }
    while (kill(all[dying], 0) == 0) {
        usleep(1000);
    }
    return ND_OK;
}

static bool alone;

void cuda_rank_alone(bool on)
{
    alone = on;
}

static int max_blocks;

void cuda_rank_blocks(int blocks)
{
    max_blocks = blocks;
}

static nd_status exchange(void *context, const void *send, void *recv, size_t bytes)
{
    ND_TRY(gather(context, send, recv, bytes));
    return dying >= 0 ? lose_one(context) : ND_OK;
}

nd_status cuda_rank_open(nd_transport *local, double timeout_seconds, nd_device **device,
                         nd_transport **transport)
{
    nd_cuda_options options = {.ordinal = local->rank, .local_workers = local->size};
    nd_mesh mesh = {{1, 1, local->size, 1, 1}};
    nd_device *cpu = NULL;
    exchange_context context = {0};
    nd_status status = ND_OK;
    ND_TRY(nd_device_open_cuda(&options, device));
    if (local->size == 1 && !alone) {
        return nd_transport_open_self(local->progress, transport);
    }
    ND_TRY_OUT(nd_device_open_cpu(1, &cpu));
    ND_TRY_OUT(cpu->table->stream_init(cpu, &context.stream));
    ND_TRY_OUT(nd_comm_create(local, &mesh, ND_GROUP_WORLD, 7, &context.comm));
    nd_transport_options nccl = {.rank = local->rank,
                                 .size = local->size,
                                 .timeout_seconds = timeout_seconds,
                                 .progress = local->progress,
                                 .page = local->page,
                                 .slot_of_rank = local->slot_of_rank,
                                 .slot_context = local->slot_context,
                                 .exchange = exchange,
                                 .exchange_context = &context,
                                 .device = *device,
                                 .alone = alone,
                                 .max_blocks = max_blocks};
    status = nd_transport_open_nccl(&nccl, transport);
out:
    nd_comm_destroy(context.comm);
    nd_device_close(cpu);
    if (status != ND_OK) {
        nd_device_close(*device);
        *device = NULL;
    }
    return status;
}
