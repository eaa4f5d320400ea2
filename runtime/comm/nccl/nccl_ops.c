// SPDX-License-Identifier: Apache-2.0
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/comm/nccl/nccl_state.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

static ncclDataType_t type_of(nd_dtype dtype)
{
    switch (dtype) {
    case ND_DTYPE_F32:
        return ncclFloat32;
    case ND_DTYPE_BF16:
        return ncclBfloat16;
    case ND_DTYPE_F64:
        return ncclFloat64;
    case ND_DTYPE_I64:
        return ncclInt64;
    case ND_DTYPE_I32:
        return ncclInt32;
    default:
        return ncclUint8; /* FP8 codes are bytes on the wire; nothing sums them */
    }
}

static ncclRedOp_t reduction_of(nd_redop op)
{
    return op == ND_REDOP_MAX ? ncclMax : ncclSum;
}

static nccl_comm *nccl_comm_of(const nd_comm *comm)
{
    return comm->native;
}

static nd_status make_events(nd_device *device, nccl_comm *nc)
{
    for (int i = 0; i < NCCL_EVENTS; i++) {
        ND_CUDA(device, cudaEventCreateWithFlags(&nc->events[i], cudaEventDisableTiming));
    }
    return ND_OK;
}

static nd_status open_group(nd_transport *transport, nccl_comm *nc)
{
    nccl_state *state = nccl_state_of(transport);
    const nd_comm *comm = nc->comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    ND_TRY(make_events(state->device, nc));
    ND_TRY(nd_cuda_stream_init_urgent(state->device, &nc->stream));
    ncclResult_t result =
        state->library.split(state->world, comm->ranks[0], comm->index, &nc->native, &config);
    /* The parent is in progress until its child exists, the child until it is connected. */
    ND_TRY(nccl_settle(transport, nc, state->world, result, "the communicator"));
    return nccl_settle(transport, nc, nc->native, ncclInProgress, "the communicator");
}

static void nccl_destroy(nd_comm *comm)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm), **at = &state->comms;
    while (*at != nc) {
        at = &(*at)->next;
    }
    *at = nc->next;
    if (nc->native) {
        /* Destroying without work in flight does not wait for the peers; abort where the transport
         * has failed. */
        if (nd_stream_sync(&nc->stream) == ND_OK) {
            state->library.destroy(nc->native);
        } else if (nc->native) {
            state->library.abort(nc->native);
        }
    }
    state->device->table->stream_fini(&nc->stream);
    for (int i = 0; i < NCCL_EVENTS; i++) {
        if (nc->events[i]) {
            cudaEventDestroy(nc->events[i]);
        }
    }
    free(nc);
}

static nd_status nccl_create(nd_transport *transport, nd_comm *comm)
{
    nccl_state *state = nccl_state_of(transport);
    nccl_comm *nc = NULL;
    if (state->failed) {
        return nccl_again(state);
    }
    ND_TRY(ND_ALLOC(1, &nc));
    nc->comm = comm;
    nc->next = state->comms;
    state->comms = nc;
    comm->native = nc;
    nd_status status = open_group(transport, nc);
    if (status != ND_OK) {
        nccl_destroy(comm);
    }
    return status;
}

static cudaEvent_t next_event(nccl_comm *nc)
{
    cudaEvent_t event = nc->events[nc->next_event];
    nc->next_event = (nc->next_event + 1) % NCCL_EVENTS;
    return event;
}

/* Where an operation runs, with the waits that put it in order. */
static nd_status begin(nd_comm *comm, nd_stream *stream, nd_comm_op op, int64_t count,
                       nd_dtype dtype, const nd_event *done, cudaStream_t *out)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    cudaStream_t callers = nd_cuda_stream(stream), own = nd_cuda_stream(&nc->stream);
    if (state->failed) {
        return nccl_again(state);
    }
    nc->op = op;
    nc->sequence = comm->sequence;
    nc->count = count;
    nc->dtype = dtype;
    if (done) {
        cudaEvent_t ready = next_event(nc);
        ND_CUDA(state->device, cudaEventRecord(ready, callers));
        ND_CUDA(state->device, cudaStreamWaitEvent(own, ready, 0));
        *out = own;
        return ND_OK;
    }
    if (nc->on_own_stream) {
        ND_CUDA(state->device, cudaStreamWaitEvent(callers, nc->last, 0));
        nc->on_own_stream = false;
    }
    *out = callers;
    return ND_OK;
}

/* The first error of several calls is theirs. */
static void keep_first(ncclResult_t *kept, ncclResult_t result)
{
    bool fine = *kept == ncclSuccess || *kept == ncclInProgress;
    if (fine && result != ncclSuccess) {
        *kept = result;
    }
}

static void give_event(nccl_comm *nc, nd_event *done)
{
    done->finish = NULL;
    done->native = nc->last;
    nc->on_own_stream = true;
}

static nd_status end(nd_comm *comm, ncclResult_t result, const char *call, cudaStream_t where,
                     nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    if (nc->grouped) {
        ND_ASSERT(done);
        keep_first(&nc->group_result, result);
        give_event(nc, done);
        return ND_OK;
    }
    ND_TRY(nccl_settle(comm->transport, nc, nc->native, result, call));
    nc->last = next_event(nc);
    ND_CUDA(state->device, cudaEventRecord(nc->last, where));
    if (done) {
        give_event(nc, done);
    }
    return ND_OK;
}

/* The kernels of a group are enqueued at its end, and so is its event. */
static nd_status nccl_group_begin(nd_comm *comm)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    ND_ASSERT(!nc->grouped);
    if (state->failed) {
        return nccl_again(state);
    }
    nc->grouped = true;
    nc->last = next_event(nc);
    nc->group_result = ncclSuccess;
    keep_first(&nc->group_result, state->library.group_start());
    return ND_OK;
}

static nd_status nccl_group_end(nd_comm *comm)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    ND_ASSERT(nc->grouped);
    nc->grouped = false;
    keep_first(&nc->group_result, state->library.group_end());
    ND_TRY(nccl_settle(comm->transport, nc, nc->native, nc->group_result, "ncclGroupEnd"));
    ND_CUDA(state->device, cudaEventRecord(nc->last, nd_cuda_stream(&nc->stream)));
    return ND_OK;
}

static void count_bytes(nd_comm *comm, nd_comm_op op, int64_t elements, nd_dtype dtype)
{
    comm->stats.bytes_sent[op] += elements * (int64_t)nd_dtype_size(dtype);
}

/* A small all-reduce of host memory: the only operation that waits. */
static nd_status all_reduce_host(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                                 nd_dtype dtype, nd_redop op)
{
    nccl_state *state = nccl_state_of(comm->transport);
    size_t bytes = (size_t)count * nd_dtype_size(dtype);
    cudaStream_t where = NULL;
    if (bytes > NCCL_STAGE_BYTES) {
        return nd_fail(ND_ERR_INTERNAL, "all_reduce of %s: %zu bytes of host memory (at most %d)",
                       nd_group_name(comm->kind), bytes, (int)NCCL_STAGE_BYTES);
    }
    memcpy(state->pinned, buffer, bytes);
    ND_TRY(nd_copy(stream, state->stage, state->pinned, bytes));
    ND_TRY(begin(comm, stream, ND_COMM_ALL_REDUCE, count, dtype, NULL, &where));
    ncclResult_t result =
        state->library.all_reduce(state->stage, state->stage, (size_t)count, type_of(dtype),
                                  reduction_of(op), nccl_comm_of(comm)->native, where);
    ND_TRY(end(comm, result, "ncclAllReduce", where, NULL));
    ND_TRY(nd_copy(stream, state->pinned, state->stage, bytes));
    ND_TRY(nd_stream_sync(stream));
    memcpy(buffer, state->pinned, bytes);
    return ND_OK;
}

static bool is_host(const void *p)
{
    struct cudaPointerAttributes attributes;
    return cudaPointerGetAttributes(&attributes, p) == cudaSuccess &&
           attributes.type != cudaMemoryTypeDevice;
}

static nd_status nccl_all_reduce(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                                 nd_dtype dtype, nd_redop op, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_ALL_REDUCE, 2 * count * (comm->size - 1) / comm->size, dtype);
    if (!done && is_host(buffer)) {
        return all_reduce_host(comm, stream, buffer, count, dtype, op);
    }
    ND_TRY(begin(comm, stream, ND_COMM_ALL_REDUCE, count, dtype, done, &where));
    ncclResult_t result =
        state->library.all_reduce(buffer, buffer, (size_t)count, type_of(dtype), reduction_of(op),
                                  nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclAllReduce", where, done);
}

static nd_status nccl_all_gather(nd_comm *comm, nd_stream *stream, const void *send, void *recv,
                                 int64_t count, nd_dtype dtype, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_ALL_GATHER, count * (comm->size - 1), dtype);
    ND_TRY(begin(comm, stream, ND_COMM_ALL_GATHER, count, dtype, done, &where));
    ncclResult_t result = state->library.all_gather(send, recv, (size_t)count, type_of(dtype),
                                                    nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclAllGather", where, done);
}

static nd_status nccl_reduce_scatter(nd_comm *comm, nd_stream *stream, const void *send, void *recv,
                                     int64_t count, nd_dtype dtype, nd_redop op, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_REDUCE_SCATTER, count * (comm->size - 1), dtype);
    ND_TRY(begin(comm, stream, ND_COMM_REDUCE_SCATTER, count, dtype, done, &where));
    ncclResult_t result =
        state->library.reduce_scatter(send, recv, (size_t)count, type_of(dtype), reduction_of(op),
                                      nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclReduceScatter", where, done);
}

static nd_status nccl_broadcast(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                                nd_dtype dtype, int root, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_BROADCAST, comm->index == root ? count : 0, dtype);
    ND_TRY(begin(comm, stream, ND_COMM_BROADCAST, count, dtype, done, &where));
    ncclResult_t result = state->library.broadcast(buffer, buffer, (size_t)count, type_of(dtype),
                                                   root, nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclBroadcast", where, done);
}

/* Sends and receives of one group. */
typedef struct group_call {
    const nccl_library *library;
    ncclComm_t native;
    cudaStream_t where;
    ncclResult_t result;
} group_call;

static nd_status nccl_exchange(nd_comm *comm, nd_stream *stream, const void *send, int to,
                               void *recv, int from, int64_t count, nd_dtype dtype, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    const nccl_library *l = &state->library;
    group_call g = {l, nccl_comm_of(comm)->native, NULL, ncclSuccess};
    size_t bytes = (size_t)count * nd_dtype_size(dtype);
    ND_TRY(begin(comm, stream, ND_COMM_EXCHANGE, count, dtype, done, &g.where));
    if (to == comm->index) {
        if (send != recv) {
            ND_CUDA(state->device, cudaMemcpyAsync(recv, send, bytes, cudaMemcpyDefault, g.where));
        }
        return end(comm, ncclSuccess, "a copy", g.where, done);
    }
    count_bytes(comm, ND_COMM_EXCHANGE, count, dtype);
    keep_first(&g.result, l->group_start());
    keep_first(&g.result, l->send(send, bytes, ncclUint8, to, g.native, g.where));
    keep_first(&g.result, l->recv(recv, bytes, ncclUint8, from, g.native, g.where));
    keep_first(&g.result, l->group_end());
    return end(comm, g.result, "ncclSend and ncclRecv", g.where, done);
}

static nd_status nccl_all_to_all(nd_comm *comm, nd_stream *stream, const void *send, void *recv,
                                 int64_t count, nd_dtype dtype, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    const nccl_library *l = &state->library;
    group_call g = {l, nccl_comm_of(comm)->native, NULL, ncclSuccess};
    size_t bytes = (size_t)count * nd_dtype_size(dtype);
    count_bytes(comm, ND_COMM_ALL_TO_ALL, count * (comm->size - 1), dtype);
    ND_TRY(begin(comm, stream, ND_COMM_ALL_TO_ALL, count, dtype, done, &g.where));
    keep_first(&g.result, l->group_start());
    for (int i = 0; i < comm->size; i++) {
        size_t at = (size_t)i * bytes;
        keep_first(&g.result,
                   l->send((const char *)send + at, bytes, ncclUint8, i, g.native, g.where));
        keep_first(&g.result, l->recv((char *)recv + at, bytes, ncclUint8, i, g.native, g.where));
    }
    keep_first(&g.result, l->group_end());
    return end(comm, g.result, "ncclSend and ncclRecv", g.where, done);
}

static nd_status nccl_barrier(nd_comm *comm, nd_stream *stream, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    int64_t one = 1;
    ND_ASSERT(!done);
    return all_reduce_host(comm, stream ? stream : &state->stream, &one, 1, ND_DTYPE_I64,
                           ND_REDOP_SUM);
}

static void nccl_close(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    nd_device *device = state->device;
    if (state->world) {
        state->library.destroy(state->world);
    }
    if (device && device->idle_context == transport) {
        device->idle = NULL;
        device->idle_context = NULL;
    }
    if (state->stream.native) {
        device->table->stream_fini(&state->stream);
    }
    if (state->stage) {
        nd_device_free(device, state->stage, NCCL_STAGE_BYTES);
    }
    nd_cuda_pinned_free(device, state->pinned);
    for (int r = 0; state->peers && r < transport->size; r++) {
        if (state->peers[r].pidfd >= 0) {
            close(state->peers[r].pidfd);
        }
    }
    free(state->peers);
    free(state);
}

const nd_comm_backend nd_nccl_backend = {
    .name = "nccl",
    .create = nccl_create,
    .destroy = nccl_destroy,
    .all_reduce = nccl_all_reduce,
    .all_gather = nccl_all_gather,
    .reduce_scatter = nccl_reduce_scatter,
    .broadcast = nccl_broadcast,
    .exchange = nccl_exchange,
    .all_to_all = nccl_all_to_all,
    .barrier = nccl_barrier,
    .group_begin = nccl_group_begin,
    .group_end = nccl_group_end,
    .close = nccl_close,
};
