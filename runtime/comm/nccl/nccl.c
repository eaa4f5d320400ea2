// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/nccl/nccl.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"
#include "runtime/device/cuda_library.h"

/* Operations. */

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

/* Begins an operation: *out is the stream that it runs on. The calls of NCCL follow, and then
 * end_op(). */
static nd_status begin_op(nd_comm *comm, nd_stream *stream, nd_comm_op op, const nd_comm_args *args,
                          const nd_event *done, cudaStream_t *out)
{
    nccl_state *state = nccl_state_of(comm->transport);
    nccl_comm *nc = nccl_comm_of(comm);
    ND_TRY(nccl_failure(state));
    if (!nc->grouped) {
        ND_TRY(nccl_claim_entry(comm->transport, nc));
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
    pthread_mutex_lock(&state->ring);
    nc->ring.head++;
    pthread_mutex_unlock(&state->ring);
    return ND_OK;
}

static nd_status end_op(nd_comm *comm, ncclResult_t result, const char *call, cudaStream_t where,
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
    ND_TRY(nccl_settle(comm->transport, nc, nc->native, result, call, false));
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
    ND_TRY(nccl_failure(state));
    ND_TRY(nccl_claim_entry(comm->transport, nc));
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
    ND_TRY(nccl_settle(comm->transport, nc, nc->native, nc->group_result, "ncclGroupEnd", false));
    return record_end(nc, nd_cuda_stream(&nc->stream));
}

/* Elements that this rank puts on the wire. */
static int64_t sent_elements(const nd_comm *comm, nd_comm_op op, const nd_comm_args *args)
{
    const int64_t others = comm->size - 1;
    switch (op) {
    case ND_COMM_ALL_REDUCE:
        return 2 * args->count * others / comm->size;
    case ND_COMM_BROADCAST:
        return comm->index == args->root ? args->count : 0;
    case ND_COMM_EXCHANGE:
        return args->to == comm->index ? 0 : args->count;
    default:
        return args->sends
                   ? nd_comm_elements_before(args->sends, 0, comm->size) - args->sends[comm->index]
                   : args->count * others;
    }
}

/* The calls of NCCL for an operation. */
static ncclResult_t call_nccl(nd_comm *comm, nd_comm_op op, const nd_comm_args *args,
                              cudaStream_t where)
{
    const nccl_library *l = &nccl_state_of(comm->transport)->library;
    ncclComm_t native = nccl_comm_of(comm)->native;
    const ncclDataType_t type = type_of(args->dtype);
    const ncclRedOp_t redop = args->redop == ND_REDOP_MAX ? ncclMax : ncclSum;
    const size_t count = (size_t)args->count, element = nd_dtype_size(args->dtype);
    const char *from = args->send;
    char *to = args->recv;
    ncclResult_t result = ncclSuccess;
    switch (op) {
    case ND_COMM_ALL_REDUCE:
        return l->all_reduce(from, to, count, type, redop, native, where);
    case ND_COMM_ALL_GATHER:
        return l->all_gather(from, to, count, type, native, where);
    case ND_COMM_REDUCE_SCATTER:
        return l->reduce_scatter(from, to, count, type, redop, native, where);
    case ND_COMM_BROADCAST:
        return l->broadcast(from, to, count, type, args->root, native, where);
    case ND_COMM_EXCHANGE:
        keep_first(&result, l->group_start());
        keep_first(&result, l->send(from, count * element, ncclUint8, args->to, native, where));
        keep_first(&result, l->recv(to, count * element, ncclUint8, args->from, native, where));
        keep_first(&result, l->group_end());
        return result;
    default: /* all_to_all */
        keep_first(&result, l->group_start());
        for (int i = 0; i < comm->size; i++) {
            const size_t out = (args->sends ? (size_t)args->sends[i] : count) * element;
            const size_t in = (args->receives ? (size_t)args->receives[i] : count) * element;
            if (out > 0) {
                keep_first(&result, l->send(from, out, ncclUint8, i, native, where));
            }
            if (in > 0) {
                keep_first(&result, l->recv(to, in, ncclUint8, i, native, where));
            }
            from += out;
            to += in;
        }
        keep_first(&result, l->group_end());
        return result;
    }
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
    nd_comm_args staged = *args;
    staged.send = staged.recv = state->staging;
    memcpy(state->pinned, args->send, bytes);
    ND_TRY(nd_copy(stream, state->staging, state->pinned, bytes));
    ND_TRY(begin_op(comm, stream, ND_COMM_ALL_REDUCE, args, NULL, &where));
    ncclResult_t result = call_nccl(comm, ND_COMM_ALL_REDUCE, &staged, where);
    ND_TRY(end_op(comm, result, "ncclAllReduce", where, NULL));
    ND_TRY(nd_copy(stream, state->pinned, state->staging, bytes));
    ND_TRY(nd_stream_sync(stream));
    memcpy(args->recv, state->pinned, bytes);
    return ND_OK;
}

static nd_status nccl_run(nd_comm *comm, nd_stream *stream, nd_comm_op op, const nd_comm_args *args,
                          nd_event *done)
{
    static const char *const calls[ND_COMM_OP_COUNT] = {
        "ncclAllReduce", "ncclAllGather",         "ncclReduceScatter",
        "ncclBroadcast", "ncclSend and ncclRecv", "ncclSend and ncclRecv"};
    nccl_state *state = nccl_state_of(comm->transport);
    struct cudaPointerAttributes attributes;
    cudaStream_t where = NULL;
    if (op == ND_COMM_BARRIER) {
        int64_t one = 1;
        const nd_comm_args sum = {.send = &one, .recv = &one, .count = 1, .dtype = ND_DTYPE_I64};
        return all_reduce_host(comm, stream ? stream : &state->stream, &sum);
    }
    comm->stats.bytes_sent[op] +=
        sent_elements(comm, op, args) * (int64_t)nd_dtype_size(args->dtype);
    if (op == ND_COMM_ALL_REDUCE && !done &&
        cudaPointerGetAttributes(&attributes, args->recv) == cudaSuccess &&
        attributes.type != cudaMemoryTypeDevice) {
        return all_reduce_host(comm, stream, args);
    }
    ND_TRY(begin_op(comm, stream, op, args, done, &where));
    if (op == ND_COMM_EXCHANGE && args->to == comm->index) {
        size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
        cudaError_t copied =
            args->send == args->recv
                ? cudaSuccess
                : cudaMemcpyAsync(args->recv, args->send, bytes, cudaMemcpyDefault, where);
        ND_TRY(end_op(comm, ncclSuccess, "a copy", where, done));
        ND_CUDA(state->device, copied);
        return ND_OK;
    }
    return end_op(comm, call_nccl(comm, op, args, where), calls[op], where, done);
}

/* Communicators: how they begin and end. */

enum {
    MORE_SECONDS = 10
}; /* more than the deadline: a thread that waits reports the fault better */

/* Before and after a call that creates or ends a communicator; holds `calls` meanwhile. Such a call
 * should return at once: the process ends when it does not return within the deadline and ten
 * seconds. */
static int call_begin(nd_transport *transport, const char *what)
{
    nccl_state *state = nccl_state_of(transport);
    int call = nd_call_limit_begin(state->limit, what, MORE_SECONDS + transport->timeout_seconds,
                                   "the host is inside NCCL", ND_ERR_HANG);
    pthread_mutex_lock(&state->calls);
    return call;
}

static void call_end(nccl_state *state, int call)
{
    pthread_mutex_unlock(&state->calls);
    nd_call_limit_end(state->limit, call);
}

static void ring_fini(nccl_ring *ring)
{
    for (int i = 0; i < NCCL_RING; i++) {
        nccl_entry *e = &ring->entries[i];
        if (e->begin) {
            cudaEventDestroy(e->begin);
        }
        if (e->end) {
            cudaEventDestroy(e->end);
        }
    }
}

static nd_status open_group(nd_transport *transport, nccl_comm *nc)
{
    nccl_state *state = nccl_state_of(transport);
    const nd_comm *comm = nc->comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    /* Gathers of weights and reductions of gradients run beside products, whose multiprocessors
     * their blocks take. Their group has two communicators. */
    if (state->max_blocks > 0 && nd_group_rows[comm->kind].communicators > 1) {
        config.maxCTAs = state->max_blocks;
    }
    for (int i = 0; i < NCCL_RING; i++) {
        nccl_entry *e = &nc->ring.entries[i];
        ND_CUDA(state->device, cudaEventCreateWithFlags(&e->begin, cudaEventDisableTiming));
        ND_CUDA(state->device, cudaEventCreateWithFlags(&e->end, cudaEventDisableTiming));
    }
    ND_TRY(state->device->table->stream_init_urgent(state->device, &nc->stream));
    int call = call_begin(transport, "ncclCommSplit");
    ncclResult_t result =
        state->library.split(state->world, comm->ranks[0], comm->index, &nc->native, &config);
    call_end(state, call);
    /* ncclCommSplit returns success before a thread of NCCL has created the child: the parent is in
     * progress until then, and the child until it is connected. */
    result = result == ncclSuccess ? ncclInProgress : result;
    ND_TRY(nccl_settle(transport, nc, state->world, result, "the communicator", false));
    return nccl_settle(transport, nc, nc->native, ncclInProgress, "the communicator", false);
}

/* Every member calls this unless something failed; each waits for the others. */
static nd_status end_native(nd_transport *transport, const nccl_comm *nc, ncclComm_t *native)
{
    nccl_state *state = nccl_state_of(transport);
    int call = call_begin(transport, "ncclCommFinalize");
    ncclResult_t result = state->library.finalize(*native);
    call_end(state, call);
    ND_TRY(nccl_settle(transport, nc, *native, result, "ncclCommFinalize", true));
    call = call_begin(transport, "ncclCommDestroy");
    state->library.destroy(*native);
    *native = NULL;
    call_end(state, call);
    return ND_OK;
}

/* Under both locks, because the watching thread reads the list. Every communicator in it is
 * complete. */
static void link_comm(nccl_state *state, nccl_comm *nc, bool in)
{
    nccl_comm **at = &state->comms;
    pthread_mutex_lock(&state->ring);
    pthread_mutex_lock(&state->calls);
    if (in) {
        nc->next = state->comms;
        state->comms = nc;
    } else {
        while (*at != nc) {
            at = &(*at)->next;
        }
        *at = nc->next;
    }
    pthread_mutex_unlock(&state->calls);
    pthread_mutex_unlock(&state->ring);
}

static void free_comm(nccl_state *state, nccl_comm *nc)
{
    state->device->table->stream_fini(&nc->stream);
    ring_fini(&nc->ring);
    free(nc->group.ranks);
    free(nc);
}

/* A duplicate is made because it must not wait for others. */
static bool is_duplicate(const nd_comm *comm)
{
    return comm->id != (int)comm->kind;
}

static nd_status new_comm(const nd_comm *comm, nccl_comm **out)
{
    nccl_comm *nc = NULL;
    ND_TRY(ND_ALLOC(1, &nc));
    nc->group = *comm;
    nc->group.ranks = NULL;
    nc->comm = &nc->group;
    nc->users = 1;
    nd_status status = ND_ALLOC(comm->size, &nc->group.ranks);
    if (status != ND_OK) {
        free(nc);
        return status;
    }
    memcpy(nc->group.ranks, comm->ranks, (size_t)comm->size * sizeof *comm->ranks);
    *out = nc;
    return ND_OK;
}

static void nccl_destroy(nd_comm *comm)
{
    nd_transport *transport = comm->transport;
    nccl_state *state = nccl_state_of(transport);
    nccl_comm *nc = nccl_comm_of(comm);
    if (--nc->users > 0) {
        return;
    }
    nc->entry = NULL; /* what is waited for now is no operation */
    if (!state->failed &&
        (nd_stream_sync(&nc->stream) != ND_OK || end_native(transport, nc, &nc->native) != ND_OK)) {
        nccl_give_up(transport);
        nd_log_warning("%s", state->message); /* no caller reports it: the run itself is complete */
    }
    link_comm(state, nc, false);
    free_comm(state, nc);
}

static nd_status nccl_create(nd_transport *transport, nd_comm *comm)
{
    nccl_state *state = nccl_state_of(transport);
    ND_TRY(nccl_failure(state));
    /* The communicator of another group may serve this one too. All ranks answer alike. */
    nccl_comm *nc = is_duplicate(comm) || comm->shares == comm->kind ? NULL : state->comms;
    while (nc && (nc->group.kind != comm->shares || is_duplicate(&nc->group))) {
        nc = nc->next;
    }
    if (nc) {
        nc->users++;
        comm->native = nc;
        return ND_OK;
    }
    ND_TRY(new_comm(comm, &nc));
    comm->native = nc;
    state->making = nc;
    nd_status status = open_group(transport, nc);
    if (status != ND_OK) {
        status = nccl_give_up(transport);
        state->making = NULL;
        free_comm(state, nc);
        return status;
    }
    state->making = NULL;
    link_comm(state, nc, true);
    return ND_OK;
}

/* Does not touch the error record: callers may have added context since the fault. */
static void nccl_abandon(nd_transport *transport)
{
    if (!nccl_state_of(transport)->failed) {
        nccl_give_up(transport);
    }
}

static void nccl_close(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    nd_device *device = state->device;
    if (state->world && !state->failed && end_native(transport, NULL, &state->world) != ND_OK) {
        nd_log_warning("%s", state->message);
    }
    nccl_watch_stop(transport);
    nd_call_limit_destroy(state->limit);
    device->table->stream_fini(&state->stream);
    if (state->staging) {
        nd_device_free(device, state->staging, NCCL_STAGING_BYTES);
    }
    device->table->host_free(device, state->pinned);
    for (int r = 0; state->peers && r < transport->size; r++) {
        if (state->peers[r].pidfd >= 0) {
            close(state->peers[r].pidfd);
        }
    }
    free(state->peers);
    nd_monitor_fini(&state->watching);
    pthread_mutex_destroy(&state->ring);
    pthread_mutex_destroy(&state->calls);
}

/* The transport. */

/*
 * Version 2.26.2 in the encoding of version(). In older versions, a thread that uses another
 * communicator after a non-blocking call on one has ended finds the state of that call and crashes
 * (NVIDIA/nccl, issue 1605), and an abort may not return.
 */
enum { OLDEST = 22602 };

/* 21403 becomes "2.14.3"; before version 2.8 the minor version had one digit. */
static void format_version(int version, char *text, size_t size)
{
    int major = version < 10000 ? 1000 : 10000;
    snprintf(text, size, "%d.%d.%d", version / major, version % major / 100, version % 100);
}

static nd_status open_library(nccl_library *out)
{
    static const char *const names[] = {"libnccl.so.2", NULL};
    nccl_library library;
    const nd_cuda_symbol symbols[] = {
        {"ncclGetVersion", (void **)&library.version},
        {"ncclGetUniqueId", (void **)&library.unique_id},
        {"ncclCommInitRankConfig", (void **)&library.init},
        {"ncclCommSplit", (void **)&library.split},
        {"ncclCommGetAsyncError", (void **)&library.async_error},
        {"ncclCommFinalize", (void **)&library.finalize},
        {"ncclCommDestroy", (void **)&library.destroy},
        {"ncclCommAbort", (void **)&library.abort},
        {"ncclAllReduce", (void **)&library.all_reduce},
        {"ncclAllGather", (void **)&library.all_gather},
        {"ncclReduceScatter", (void **)&library.reduce_scatter},
        {"ncclBroadcast", (void **)&library.broadcast},
        {"ncclSend", (void **)&library.send},
        {"ncclRecv", (void **)&library.recv},
        {"ncclGroupStart", (void **)&library.group_start},
        {"ncclGroupEnd", (void **)&library.group_end},
        {"ncclGetErrorString", (void **)&library.error_string},
        {"ncclGetLastError", (void **)&library.last_error},
    };
    int version = 0;
    ND_TRY(nd_cuda_library_open("NCCL", names, symbols, sizeof symbols / sizeof *symbols));
    library.version(&version);
    if (version < OLDEST) {
        char here[32], oldest[32];
        format_version(version, here, sizeof here);
        format_version(OLDEST, oldest, sizeof oldest);
        return nd_fail(ND_ERR_CONFIG,
                       "NCCL here is version %s and several GPUs need %s or newer; install a newer "
                       "NCCL",
                       here, oldest);
    }
    *out = library;
    return ND_OK;
}

/* The facts about a rank that it sends to all others before NCCL is initialised. */
typedef struct card {
    ncclUniqueId id; /* rank 0's counts */
    uint64_t host;
    int32_t pid;
} card;

static nd_status exchange_cards(nccl_state *state, const nd_transport_options *options, card **out)
{
    card mine, *all = NULL;
    memset(&mine, 0, sizeof mine);
    mine.pid = (int32_t)getpid();
    ND_TRY(nd_report_host((const char *const[]){"pid", NULL}, &mine.host));
    if (options->rank == 0) {
        ncclResult_t result = state->library.unique_id(&mine.id);
        if (result != ncclSuccess) {
            return nd_fail(ND_ERR_INTERNAL, "NCCL error %d (%s) from ncclGetUniqueId", (int)result,
                           state->library.error_string(result));
        }
    }
    ND_TRY(ND_ALLOC(options->size, &all));
    nd_status status = options->exchange(options->exchange_context, &mine, all, sizeof mine);
    if (status != ND_OK) {
        free(all);
        return status;
    }
    for (int r = 0; r < options->size; r++) {
        if (all[r].host == mine.host && all[r].pid != mine.pid) {
            state->peers[r].pid = all[r].pid;
            state->peers[r].pidfd = (int)syscall(SYS_pidfd_open, all[r].pid, 0);
            bool gone = state->peers[r].pidfd < 0 && errno == ESRCH; /* otherwise an older kernel */
            state->peers[r].gone_ns = gone ? nd_clock_ns() : 0;
        }
    }
    *out = all;
    return ND_OK;
}

static nd_status open_world(nd_transport *transport, const nd_transport_options *options)
{
    nccl_state *state = nccl_state_of(transport);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    card *cards = NULL;
    config.blocking = 0;
    ND_TRY(exchange_cards(state, options, &cards));
    int call = call_begin(transport, "ncclCommInitRankConfig");
    ncclResult_t result =
        state->library.init(&state->world, options->size, cards[0].id, options->rank, &config);
    call_end(state, call);
    free(cards);
    return nccl_settle(transport, NULL, state->world, result, "the start of NCCL", false);
}

static nd_status open_transport(nd_transport *transport, const nd_transport_options *options)
{
    nccl_state *state = nccl_state_of(transport);
    nd_device *device = options->device;
    state->device = device;
    state->max_blocks = options->max_blocks;
    state->on_fault = options->on_fault;
    state->fault_context = options->fault_context;
    state->progress_ns = nd_clock_ns();
    pthread_mutex_init(&state->calls, NULL);
    pthread_mutex_init(&state->ring, NULL);
    state->watching = (nd_monitor)ND_MONITOR_INIT;
    ND_TRY(ND_ALLOC(options->size, &state->peers));
    for (int r = 0; r < options->size; r++) {
        state->peers[r].pidfd = -1;
    }
    ND_TRY(nd_call_limit_create(&state->limit));
    ND_TRY(open_library(&state->library));
    ND_TRY(device->table->stream_init(device, &state->stream));
    ND_TRY(nd_device_alloc(device, NCCL_STAGING_BYTES, &state->staging));
    ND_TRY(device->table->host_alloc(device, NCCL_STAGING_BYTES, &state->pinned));
    ND_TRY(nccl_watch_start(transport)); /* before there is a communicator that peers wait for */
    return open_world(transport, options);
}

static const nd_comm_backend nccl_backend = {
    .name = "nccl",
    .create = nccl_create,
    .destroy = nccl_destroy,
    .run = nccl_run,
    .group_begin = nccl_group_begin,
    .group_end = nccl_group_end,
    .shows = true, /* nccl_watch.c: what is entered may run much later */
    .abandon = nccl_abandon,
    .close = nccl_close,
};

nd_status nd_transport_open_nccl(const nd_transport_options *options, nd_transport **out)
{
    ND_ASSERT(options->progress && options->exchange && options->timeout_seconds > 0);
    nd_transport *transport = NULL;
    ND_TRY(nd_transport_create(&nccl_backend, options, sizeof(nccl_state), &transport));
    nd_status status = open_transport(transport, options);
    if (status != ND_OK) {
        nd_transport_close(transport);
        return status;
    }
    *out = transport;
    return ND_OK;
}
