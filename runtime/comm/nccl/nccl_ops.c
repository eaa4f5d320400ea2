// SPDX-License-Identifier: Apache-2.0
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/comm/nccl/nccl.h"
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

/* Makes the operation wait for the work that it depends on. */
static nd_status order(nccl_comm *nc, const nd_stream *stream, const nd_event *done,
                       cudaStream_t *out)
{
    const nccl_state *state = nccl_state_of(nc->comm->transport);
    cudaStream_t callers = nd_cuda_stream(stream), own = nd_cuda_stream(&nc->stream);
    cudaStream_t where = done ? own : callers;
    bool follows = nc->last_stream == where || nc->last_stream == callers;
    if (nc->last && !follows) {
        ND_CUDA(state->device, cudaStreamWaitEvent(where, nc->last, 0));
    }
    ND_CUDA(state->device, cudaEventRecord(nc->entry->begin, callers));
    if (done) {
        ND_CUDA(state->device, cudaStreamWaitEvent(own, nc->entry->begin, 0));
    }
    *out = where;
    return ND_OK;
}

/* The next entry of the communicator's ring, for the driving thread; waits while it is full. */
static nd_status claim_entry(nd_transport *transport, nccl_comm *nc, nccl_entry **out)
{
    nccl_state *state = nccl_state_of(transport);
    int64_t begin = nd_clock_ns();
    while (!nccl_ring_has_room(state, nc)) {
        ND_TRY(nccl_watch(transport, (double)(nd_clock_ns() - begin) * 1e-9));
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
    *out = &nc->ring.entries[nc->ring.head % NCCL_RING]; /* only this thread moves the head */
    return ND_OK;
}

/* Begins an operation: *out is the stream that it runs on. The calls of NCCL follow, and then
 * end(). */
static nd_status begin(nd_comm *comm, nd_stream *stream, nd_comm_op op, const nd_comm_args *args,
                       const nd_event *done, cudaStream_t *out)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    if (state->failed) {
        return nccl_again(state);
    }
    if (!nc->grouped) {
        ND_TRY(claim_entry(comm->transport, nc, &nc->entry));
    }
    nc->entry->kind = comm->kind;
    nc->entry->op = op; /* in a group: the last operation */
    nc->entry->sequence = comm->sequence;
    nc->entry->count = args->count;
    nc->entry->dtype = args->dtype;
    nd_status status = order(nc, stream, done, out);
    if (status != ND_OK) {
        nccl_group_close(state);
        return status;
    }
    if (!nc->grouped) {
        pthread_mutex_lock(&state->calls);
    }
    return ND_OK;
}

/* Keeps the first error of several calls. */
static void keep_first(ncclResult_t *kept, ncclResult_t result)
{
    bool fine = *kept == ncclSuccess || *kept == ncclInProgress;
    if (fine && result != ncclSuccess) {
        *kept = result;
    }
}

static void give_event(const nccl_comm *nc, nd_event *done)
{
    done->finish = NULL;
    done->native = nc->entry->end;
}

/* Records the end of what was enqueued on that stream as the communicator's latest operation. */
static nd_status record_end(nccl_comm *nc, cudaStream_t where)
{
    nccl_state *state = nccl_state_of(nc->comm->transport);
    nc->last = nc->entry->end;
    nc->last_stream = where;
    ND_CUDA(state->device, cudaEventRecord(nc->last, where));
    nccl_ring_enter(state, nc);
    return ND_OK;
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
    pthread_mutex_unlock(&state->calls);
    ND_TRY(nccl_settle(comm->transport, nc, nc->native, result, call));
    ND_TRY(record_end(nc, where));
    if (done) {
        give_event(nc, done);
    }
    return ND_OK;
}

/* NCCL enqueues the kernels of a group at its end, so its event is recorded there. */
static nd_status nccl_group_begin(nd_comm *comm)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    ND_ASSERT(!nc->grouped);
    if (state->failed) {
        return nccl_again(state);
    }
    ND_TRY(claim_entry(comm->transport, nc, &nc->entry));
    nc->grouped = true;
    pthread_mutex_lock(&state->calls);
    state->grouping = nc;
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
    state->grouping = NULL;
    keep_first(&nc->group_result, state->library.group_end());
    pthread_mutex_unlock(&state->calls);
    ND_TRY(nccl_settle(comm->transport, nc, nc->native, nc->group_result, "ncclGroupEnd"));
    return record_end(nc, nd_cuda_stream(&nc->stream));
}

static void count_bytes(nd_comm *comm, nd_comm_op op, int64_t elements, nd_dtype dtype)
{
    comm->stats.bytes_sent[op] += elements * (int64_t)nd_dtype_size(dtype);
}

/* A small all-reduce of host memory: the only operation that waits. */
static nd_status all_reduce_host(nd_comm *comm, nd_stream *stream, const nd_comm_args *args)
{
    nccl_state *state = nccl_state_of(comm->transport);
    size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
    cudaStream_t where = NULL;
    if (bytes > NCCL_STAGING_BYTES) {
        return nd_fail(ND_ERR_INTERNAL, "all_reduce of %s: %zu bytes of host memory (at most %d)",
                       nd_group_name(comm->kind), bytes, (int)NCCL_STAGING_BYTES);
    }
    memcpy(state->pinned, args->send, bytes);
    ND_TRY(nd_copy(stream, state->staging, state->pinned, bytes));
    ND_TRY(begin(comm, stream, ND_COMM_ALL_REDUCE, args, NULL, &where));
    ncclResult_t result = state->library.all_reduce(
        state->staging, state->staging, (size_t)args->count, type_of(args->dtype),
        reduction_of(args->redop), nccl_comm_of(comm)->native, where);
    ND_TRY(end(comm, result, "ncclAllReduce", where, NULL));
    ND_TRY(nd_copy(stream, state->pinned, state->staging, bytes));
    ND_TRY(nd_stream_sync(stream));
    memcpy(args->recv, state->pinned, bytes);
    return ND_OK;
}

static bool is_host(const void *p)
{
    struct cudaPointerAttributes attributes;
    return cudaPointerGetAttributes(&attributes, p) == cudaSuccess &&
           attributes.type != cudaMemoryTypeDevice;
}

static nd_status nccl_all_reduce(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_ALL_REDUCE, 2 * args->count * (comm->size - 1) / comm->size,
                args->dtype);
    if (!done && is_host(args->recv)) {
        return all_reduce_host(comm, stream, args);
    }
    ND_TRY(begin(comm, stream, ND_COMM_ALL_REDUCE, args, done, &where));
    ncclResult_t result =
        state->library.all_reduce(args->send, args->recv, (size_t)args->count, type_of(args->dtype),
                                  reduction_of(args->redop), nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclAllReduce", where, done);
}

static nd_status nccl_all_gather(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_ALL_GATHER, args->count * (comm->size - 1), args->dtype);
    ND_TRY(begin(comm, stream, ND_COMM_ALL_GATHER, args, done, &where));
    ncclResult_t result =
        state->library.all_gather(args->send, args->recv, (size_t)args->count, type_of(args->dtype),
                                  nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclAllGather", where, done);
}

static nd_status nccl_reduce_scatter(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                     nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_REDUCE_SCATTER, args->count * (comm->size - 1), args->dtype);
    ND_TRY(begin(comm, stream, ND_COMM_REDUCE_SCATTER, args, done, &where));
    ncclResult_t result = state->library.reduce_scatter(
        args->send, args->recv, (size_t)args->count, type_of(args->dtype),
        reduction_of(args->redop), nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclReduceScatter", where, done);
}

static nd_status nccl_broadcast(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    cudaStream_t where = NULL;
    count_bytes(comm, ND_COMM_BROADCAST, comm->index == args->root ? args->count : 0, args->dtype);
    ND_TRY(begin(comm, stream, ND_COMM_BROADCAST, args, done, &where));
    ncclResult_t result =
        state->library.broadcast(args->send, args->recv, (size_t)args->count, type_of(args->dtype),
                                 args->root, nccl_comm_of(comm)->native, where);
    return end(comm, result, "ncclBroadcast", where, done);
}

/* Sends and receives of one group. */
typedef struct group_call {
    const nccl_library *library;
    ncclComm_t native;
    cudaStream_t where;
    ncclResult_t result;
} group_call;

static nd_status nccl_exchange(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                               nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    const nccl_library *l = &state->library;
    group_call g = {l, nccl_comm_of(comm)->native, NULL, ncclSuccess};
    size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
    ND_TRY(begin(comm, stream, ND_COMM_EXCHANGE, args, done, &g.where));
    if (args->to == comm->index) {
        cudaError_t copied =
            args->send == args->recv
                ? cudaSuccess
                : cudaMemcpyAsync(args->recv, args->send, bytes, cudaMemcpyDefault, g.where);
        ND_TRY(end(comm, ncclSuccess, "a copy", g.where, done));
        ND_CUDA(state->device, copied);
        return ND_OK;
    }
    count_bytes(comm, ND_COMM_EXCHANGE, args->count, args->dtype);
    keep_first(&g.result, l->group_start());
    keep_first(&g.result, l->send(args->send, bytes, ncclUint8, args->to, g.native, g.where));
    keep_first(&g.result, l->recv(args->recv, bytes, ncclUint8, args->from, g.native, g.where));
    keep_first(&g.result, l->group_end());
    return end(comm, g.result, "ncclSend and ncclRecv", g.where, done);
}

static nd_status nccl_all_to_all(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    const nccl_library *l = &state->library;
    group_call g = {l, nccl_comm_of(comm)->native, NULL, ncclSuccess};
    const size_t element = nd_dtype_size(args->dtype);
    const char *from = args->send;
    char *to = args->recv;
    ND_TRY(begin(comm, stream, ND_COMM_ALL_TO_ALL, args, done, &g.where));
    keep_first(&g.result, l->group_start());
    for (int i = 0; i < comm->size; i++) {
        const int64_t sent = args->sends ? args->sends[i] : args->count;
        const int64_t received = args->receives ? args->receives[i] : args->count;
        const size_t out = (size_t)sent * element, in = (size_t)received * element;
        if (sent > 0) {
            keep_first(&g.result, l->send(from, out, ncclUint8, i, g.native, g.where));
        }
        if (received > 0) {
            keep_first(&g.result, l->recv(to, in, ncclUint8, i, g.native, g.where));
        }
        count_bytes(comm, ND_COMM_ALL_TO_ALL, i == comm->index ? 0 : sent, args->dtype);
        from += out;
        to += in;
    }
    keep_first(&g.result, l->group_end());
    return end(comm, g.result, "ncclSend and ncclRecv", g.where, done);
}

static nd_status nccl_barrier(nd_comm *comm, nd_stream *stream, nd_event *done)
{
    nccl_state *state = nccl_state_of(comm->transport);
    int64_t one = 1;
    ND_ASSERT(!done);
    const nd_comm_args args = {.send = &one, .recv = &one, .count = 1, .dtype = ND_DTYPE_I64};
    return all_reduce_host(comm, stream ? stream : &state->stream, &args);
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
    .shows = true, /* nccl_watch.c: what is entered may run much later */
    .abandon = nccl_abandon,
    .close = nccl_close,
};
