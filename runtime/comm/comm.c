// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/comm.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/base/clock.h"
#include "runtime/comm/backend.h"

enum { DUPLICATES_MAX = 8 };

/* The group of one: every operation is at most one copy, none where send and receive place are the
 * same. A waiter needs no more than the stream's own order. */

static nd_status self_run(nd_comm *comm, nd_stream *stream, nd_comm_op op, const nd_comm_args *args,
                          nd_event *done)
{
    size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
    if (args->send != args->recv && bytes > 0) {
        if (stream) {
            ND_TRY(nd_copy(stream, args->recv, args->send, bytes));
        } else {
            memmove(args->recv, args->send, bytes);
        }
    }
    if (done) {
        done->finish = NULL;
        done->native = NULL;
    }
    return ND_OK;
}

static const nd_comm_backend self_backend = {.name = "self", .run = self_run};

nd_status nd_transport_open_self(nd_progress_slot *progress, nd_transport **out)
{
    const nd_transport_options options = {.size = 1, .timeout_seconds = 1, .progress = progress};
    return nd_transport_create(&self_backend, &options, 0, out);
}

/* The front of every backend: checks arguments, counts, numbers the operation and publishes it. */

const char *nd_comm_op_name(nd_comm_op op)
{
    static const char *const names[ND_COMM_OP_COUNT + 1] = {
        "all_reduce", "all_gather", "reduce_scatter", "broadcast",
        "exchange",   "all_to_all", "barrier",        "the communicator"};
    return op >= 0 && op <= ND_COMM_SETUP ? names[op] : "unknown";
}

static nd_status check_buffers(const nd_comm *comm, nd_comm_op op, const nd_comm_args *args)
{
    const int64_t count = args->count;
    const nd_dtype dtype = args->dtype;
    if (count < 0 || dtype < 0 || dtype >= ND_DTYPE_COUNT) {
        return nd_fail(ND_ERR_INTERNAL, "%s of %s: %lld elements of type %d is not a request",
                       nd_comm_op_name(op), nd_group_name(comm->kind), (long long)count,
                       (int)dtype);
    }
    if (count > 0 && (!args->send || !args->recv)) {
        return nd_fail(ND_ERR_INTERNAL, "%s of %s: no buffer for %lld elements",
                       nd_comm_op_name(op), nd_group_name(comm->kind), (long long)count);
    }
    return ND_OK;
}

/* The types of nd_reduce; NCCL sums more. */
static nd_status check_reduction(const nd_comm *comm, nd_comm_op op, const nd_comm_args *args)
{
    const nd_dtype dtype = args->dtype;
    const nd_redop redop = args->redop;
    const bool summed = dtype == ND_DTYPE_F32 || dtype == ND_DTYPE_BF16 || dtype == ND_DTYPE_F64 ||
                        dtype == ND_DTYPE_I64 || dtype == ND_DTYPE_I32;
    if (!summed || (redop != ND_REDOP_SUM && redop != ND_REDOP_MAX)) {
        return nd_fail(
            ND_ERR_INTERNAL, "%s of %s: no reduction %d of %s (f32, bf16, f64, i64, i32)",
            nd_comm_op_name(op), nd_group_name(comm->kind), (int)redop, nd_dtype_name(dtype));
    }
    return ND_OK;
}

static nd_status check_member(const nd_comm *comm, nd_comm_op op, int member)
{
    if (member < 0 || member >= comm->size) {
        return nd_fail(ND_ERR_INTERNAL, "%s of %s: member %d of a group of %d", nd_comm_op_name(op),
                       nd_group_name(comm->kind), member, comm->size);
    }
    return ND_OK;
}

/* Two places of a buffer are either one (in place) or apart. */
static nd_status check_apart(const nd_comm *comm, nd_comm_op op, const void *a, size_t a_bytes,
                             const void *b, size_t b_bytes)
{
    uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    if (x < y + b_bytes && y < x + a_bytes) {
        return nd_fail(ND_ERR_INTERNAL,
                       "%s of %s: send and receive buffer overlap (%zu and %zu bytes)",
                       nd_comm_op_name(op), nd_group_name(comm->kind), a_bytes, b_bytes);
    }
    return ND_OK;
}

/* The request is one that every backend can do. */
static nd_status check_request(const nd_comm *comm, nd_comm_op op, const nd_comm_args *args)
{
    ND_TRY(check_buffers(comm, op, args));
    const size_t element = nd_dtype_size(args->dtype), part = (size_t)args->count * element;
    const size_t whole = part * (size_t)comm->size, own = part * (size_t)comm->index;
    const char *send = args->send, *recv = args->recv;
    switch (op) {
    case ND_COMM_ALL_REDUCE:
        return check_reduction(comm, op, args);
    case ND_COMM_ALL_GATHER:
        return send == recv + own ? ND_OK : check_apart(comm, op, send, part, recv, whole);
    case ND_COMM_REDUCE_SCATTER:
        ND_TRY(check_reduction(comm, op, args));
        return recv == send + own ? ND_OK : check_apart(comm, op, send, whole, recv, part);
    case ND_COMM_BROADCAST:
        return check_member(comm, op, args->root);
    case ND_COMM_EXCHANGE:
        ND_TRY(check_member(comm, op, args->to));
        ND_TRY(check_member(comm, op, args->from));
        if ((args->to == comm->index) != (args->from == comm->index)) {
            return nd_fail(ND_ERR_INTERNAL,
                           "exchange of %s: member %d sends to %d but receives from %d; with "
                           "itself it must do both",
                           nd_group_name(comm->kind), comm->index, args->to, args->from);
        }
        return comm->size == 1 ? ND_OK : check_apart(comm, op, send, part, recv, part);
    case ND_COMM_ALL_TO_ALL: {
        const int64_t out = nd_comm_elements_before(args->sends, args->count, comm->size);
        const int64_t in = nd_comm_elements_before(args->receives, args->count, comm->size);
        ND_ASSERT(!args->sends == !args->receives && (comm->size > 1 || !args->sends));
        return comm->size == 1
                   ? ND_OK
                   : check_apart(comm, op, send, (size_t)out * element, recv, (size_t)in * element);
    }
    default:
        return ND_OK;
    }
}

/* Numbers the operation, and puts it between the graphs of a stream. `self` waits for no other
 * rank, so it leaves the last real collective on the page. */
static nd_status enter(nd_comm *comm, nd_stream *stream, nd_comm_op op, int64_t bytes)
{
    comm->sequence++;
    comm->stats.calls[op]++;
    if (comm->backend == &self_backend) {
        return ND_OK;
    }
    nd_progress_slot *slot = comm->transport->progress;
    if (!comm->backend->shows) {
        atomic_store_explicit(&slot->group, (int32_t)comm->kind, memory_order_relaxed);
        atomic_store_explicit(&slot->op, (int32_t)op, memory_order_relaxed);
        atomic_store_explicit(&slot->sequence, comm->sequence, memory_order_relaxed);
        atomic_store_explicit(&slot->bytes, bytes, memory_order_relaxed);
    }
    atomic_store_explicit(&slot->heartbeat_ns, nd_clock_ns(), memory_order_relaxed);
    return nd_stream_outside(stream);
}

/* Checks and enters an operation, and hands it to the backend where there is something to do. */
static nd_status run_op(nd_comm *comm, nd_stream *stream, nd_comm_op op, const nd_comm_args *args,
                        nd_event *done)
{
    ND_TRY(check_request(comm, op, args));
    ND_TRY(enter(comm, stream, op, args->count * (int64_t)nd_dtype_size(args->dtype)));
    if (args->count > 0 || op == ND_COMM_BARRIER) {
        return comm->backend->run(comm, stream, op, args, done);
    }
    if (done) {
        done->finish = NULL;
    }
    return ND_OK;
}

nd_status nd_comm_all_reduce(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                             nd_dtype dtype, nd_redop op, nd_event *done)
{
    const nd_comm_args args = {
        .send = buffer, .recv = buffer, .count = count, .dtype = dtype, .redop = op};
    return run_op(comm, stream, ND_COMM_ALL_REDUCE, &args, done);
}

nd_status nd_comm_all_gather(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                             nd_event *done)
{
    return run_op(comm, stream, ND_COMM_ALL_GATHER, args, done);
}

nd_status nd_comm_reduce_scatter(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    return run_op(comm, stream, ND_COMM_REDUCE_SCATTER, args, done);
}

nd_status nd_comm_broadcast(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                            nd_dtype dtype, int root, nd_event *done)
{
    const nd_comm_args args = {
        .send = buffer, .recv = buffer, .count = count, .dtype = dtype, .root = root};
    return run_op(comm, stream, ND_COMM_BROADCAST, &args, done);
}

nd_status nd_comm_exchange(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                           nd_event *done)
{
    return run_op(comm, stream, ND_COMM_EXCHANGE, args, done);
}

nd_status nd_comm_all_to_all(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                             nd_event *done)
{
    return run_op(comm, stream, ND_COMM_ALL_TO_ALL, args, done);
}

nd_status nd_comm_barrier(nd_comm *comm)
{
    const nd_comm_args nothing = {.dtype = ND_DTYPE_U8};
    return run_op(comm, NULL, ND_COMM_BARRIER, &nothing, NULL);
}

nd_status nd_comm_group_begin(nd_comm *comm)
{
    return comm->backend->group_begin ? comm->backend->group_begin(comm) : ND_OK;
}

nd_status nd_comm_group_end(nd_comm *comm)
{
    return comm->backend->group_end ? comm->backend->group_end(comm) : ND_OK;
}

nd_status nd_transport_create(const nd_comm_backend *backend, const nd_transport_options *options,
                              size_t native_bytes, nd_transport **out)
{
    nd_transport *transport = NULL;
    void *native = NULL;
    ND_TRY(ND_ALLOC(1, &transport));
    nd_status status = nd_alloc(native_bytes, 1, &native);
    if (status != ND_OK) {
        free(transport);
        return status;
    }
    *transport = (nd_transport){.backend = backend,
                                .rank = options->rank,
                                .size = options->size,
                                .alone = options->alone,
                                .timeout_seconds = options->timeout_seconds,
                                .progress = options->progress,
                                .page = options->page,
                                .slot_of_rank = options->slot_of_rank,
                                .slot_context = options->slot_context,
                                .native = native};
    *out = transport;
    return ND_OK;
}

void nd_transport_close(nd_transport *transport)
{
    if (transport) {
        if (transport->backend->close) {
            transport->backend->close(transport);
        }
        free(transport->native);
        free(transport);
    }
}

void nd_transport_abandon(nd_transport *transport)
{
    if (transport && transport->backend->abandon) {
        transport->backend->abandon(transport);
    }
}

/* Groups. */

nd_status nd_comm_create(nd_transport *transport, const nd_mesh *mesh, nd_group_kind kind,
                         int duplicate, nd_comm **out)
{
    if (nd_mesh_world_size(mesh) != transport->size) {
        return nd_fail(ND_ERR_INTERNAL, "a mesh of %d ranks on a transport of %d",
                       nd_mesh_world_size(mesh), transport->size);
    }
    ND_ASSERT(duplicate >= 0 && duplicate < DUPLICATES_MAX);
    nd_comm *comm = NULL;
    ND_TRY(ND_ALLOC(1, &comm));
    comm->transport = transport;
    comm->kind = kind;
    comm->shares = nd_comm_shared_group(mesh, kind);
    comm->id = (int)kind + ND_GROUP_COUNT * duplicate;
    comm->size = nd_mesh_group_size(mesh, kind);
    comm->index = nd_mesh_group_index(mesh, kind, transport->rank);
    comm->backend = comm->size == 1 && !transport->alone ? &self_backend : transport->backend;
    nd_status status = ND_ALLOC(comm->size, &comm->ranks);
    for (int i = 0; status == ND_OK && i < comm->size; i++) {
        comm->ranks[i] = nd_mesh_group_member(mesh, kind, transport->rank, i);
    }
    if (status == ND_OK && comm->backend->create) {
        status = comm->backend->create(transport, comm);
    }
    if (status != ND_OK) {
        free(comm->ranks);
        free(comm);
        return status;
    }
    *out = comm;
    return ND_OK;
}

void nd_comm_destroy(nd_comm *comm)
{
    if (comm) {
        if (comm->backend->destroy) {
            comm->backend->destroy(comm);
        }
        free(comm->ranks);
        free(comm);
    }
}

nd_group_kind nd_comm_shared_group(const nd_mesh *mesh, nd_group_kind kind)
{
    nd_group_traffic carries = nd_group_rows[kind].carries;
    bool small = carries.all_gather == ND_TRAFFIC_OTHER &&
                 carries.reduce_scatter == ND_TRAFFIC_OTHER && carries.rest == ND_TRAFFIC_OTHER;
    for (nd_group_kind other = 0; small && other < kind; other++) {
        if (nd_group_rows[other].communicators > 0 && nd_mesh_groups_are_equal(mesh, kind, other)) {
            return other;
        }
    }
    return kind;
}

size_t nd_comm_nccl_bytes(const nd_mesh *mesh)
{
    const size_t channels = 24, of_channel = (size_t)12 << 20;
    size_t communicators = 0;
    for (nd_group_kind kind = 0; kind < ND_GROUP_COUNT; kind++) {
        bool own = nd_mesh_group_size(mesh, kind) > 1 && nd_comm_shared_group(mesh, kind) == kind;
        communicators += own ? (size_t)nd_group_rows[kind].communicators : 0;
    }
    return communicators * channels * of_channel;
}

nd_status nd_groups_create(nd_transport *transport, const nd_mesh *mesh, nd_groups *out)
{
    nd_groups groups = {0};
    nd_status status = ND_OK;
    for (int copy = 0; copy < 2; copy++) {
        nd_comm **comms = copy == 0 ? groups.by_kind : groups.second;
        for (nd_group_kind kind = 0; status == ND_OK && kind < ND_GROUP_COUNT; kind++) {
            if (copy < nd_group_rows[kind].communicators) {
                status = nd_comm_create(transport, mesh, kind, copy, &comms[kind]);
            }
        }
    }
    if (status != ND_OK) {
        nd_groups_destroy(&groups);
        return status;
    }
    *out = groups;
    return ND_OK;
}

void nd_groups_destroy(nd_groups *groups)
{
    for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
        nd_comm_destroy(groups->second[kind]);
        groups->second[kind] = NULL;
    }
    for (int kind = 0; kind < ND_GROUP_COUNT; kind++) {
        nd_comm_destroy(groups->by_kind[kind]);
        groups->by_kind[kind] = NULL;
    }
}
