// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/comm.h"

#include <stdlib.h>

#include "runtime/base/clock.h"
#include "runtime/comm/backend.h"

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

static nd_status check_reduction(const nd_comm *comm, nd_comm_op op, const nd_comm_args *args)
{
    const nd_dtype dtype = args->dtype;
    const nd_redop redop = args->redop;
    if (!nd_reduce_supports(dtype) || (redop != ND_REDOP_SUM && redop != ND_REDOP_MAX)) {
        return nd_fail(ND_ERR_INTERNAL,
                       "%s of %s: no reduction %d of %s (f32, bf16, f64, i64, i32)",
                       nd_comm_op_name(op), nd_group_name(comm->kind), (int)redop,
                       dtype >= 0 && dtype < ND_DTYPE_COUNT ? nd_dtype_name(dtype) : "unknown");
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

/* Numbers the operation, and puts it between the graphs of a stream. `self` waits for no other
 * rank, so it leaves the last real collective on the page. */
static nd_status enter(nd_comm *comm, nd_stream *stream, nd_comm_op op, int64_t bytes)
{
    comm->sequence++;
    comm->stats.calls[op]++;
    if (comm->backend == &nd_self_backend) {
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

static nd_status nothing_to_do(nd_event *done)
{
    if (done) {
        done->finish = NULL;
    }
    return ND_OK;
}

/* Enters an operation whose arguments are right, and hands it to the backend. */
static nd_status run(nd_comm_call *call, nd_comm_op op, nd_comm *comm, nd_stream *stream,
                     const nd_comm_args *args, nd_event *done)
{
    ND_TRY(enter(comm, stream, op, args->count * (int64_t)nd_dtype_size(args->dtype)));
    return args->count == 0 ? nothing_to_do(done) : call(comm, stream, args, done);
}

nd_status nd_comm_all_reduce(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                             nd_dtype dtype, nd_redop op, nd_event *done)
{
    const nd_comm_args args = {
        .send = buffer, .recv = buffer, .count = count, .dtype = dtype, .redop = op};
    ND_TRY(check_buffers(comm, ND_COMM_ALL_REDUCE, &args));
    ND_TRY(check_reduction(comm, ND_COMM_ALL_REDUCE, &args));
    return run(comm->backend->all_reduce, ND_COMM_ALL_REDUCE, comm, stream, &args, done);
}

nd_status nd_comm_all_gather(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                             nd_event *done)
{
    ND_TRY(check_buffers(comm, ND_COMM_ALL_GATHER, args));
    size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
    if (args->send != (const char *)args->recv + (size_t)comm->index * bytes) {
        ND_TRY(check_apart(comm, ND_COMM_ALL_GATHER, args->send, bytes, args->recv,
                           bytes * (size_t)comm->size));
    }
    return run(comm->backend->all_gather, ND_COMM_ALL_GATHER, comm, stream, args, done);
}

nd_status nd_comm_reduce_scatter(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    ND_TRY(check_buffers(comm, ND_COMM_REDUCE_SCATTER, args));
    ND_TRY(check_reduction(comm, ND_COMM_REDUCE_SCATTER, args));
    size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
    if (args->recv != (const char *)args->send + (size_t)comm->index * bytes) {
        ND_TRY(check_apart(comm, ND_COMM_REDUCE_SCATTER, args->send, bytes * (size_t)comm->size,
                           args->recv, bytes));
    }
    return run(comm->backend->reduce_scatter, ND_COMM_REDUCE_SCATTER, comm, stream, args, done);
}

nd_status nd_comm_broadcast(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                            nd_dtype dtype, int root, nd_event *done)
{
    const nd_comm_args args = {
        .send = buffer, .recv = buffer, .count = count, .dtype = dtype, .root = root};
    ND_TRY(check_buffers(comm, ND_COMM_BROADCAST, &args));
    ND_TRY(check_member(comm, ND_COMM_BROADCAST, root));
    return run(comm->backend->broadcast, ND_COMM_BROADCAST, comm, stream, &args, done);
}

nd_status nd_comm_exchange(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                           nd_event *done)
{
    ND_TRY(check_buffers(comm, ND_COMM_EXCHANGE, args));
    ND_TRY(check_member(comm, ND_COMM_EXCHANGE, args->to));
    ND_TRY(check_member(comm, ND_COMM_EXCHANGE, args->from));
    if ((args->to == comm->index) != (args->from == comm->index)) {
        return nd_fail(ND_ERR_INTERNAL,
                       "exchange of %s: member %d sends to %d but receives from %d; with itself it "
                       "must do both",
                       nd_group_name(comm->kind), comm->index, args->to, args->from);
    }
    size_t bytes = (size_t)args->count * nd_dtype_size(args->dtype);
    if (comm->size > 1) {
        ND_TRY(check_apart(comm, ND_COMM_EXCHANGE, args->send, bytes, args->recv, bytes));
    }
    return run(comm->backend->exchange, ND_COMM_EXCHANGE, comm, stream, args, done);
}

nd_status nd_comm_all_to_all(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                             nd_event *done)
{
    ND_TRY(check_buffers(comm, ND_COMM_ALL_TO_ALL, args));
    const size_t element = nd_dtype_size(args->dtype);
    const int64_t sent = nd_comm_elements_before(args->sends, args->count, comm->size);
    const int64_t received = nd_comm_elements_before(args->receives, args->count, comm->size);
    ND_ASSERT(!args->sends == !args->receives && (comm->size > 1 || !args->sends));
    if (comm->size > 1) {
        ND_TRY(check_apart(comm, ND_COMM_ALL_TO_ALL, args->send, (size_t)sent * element, args->recv,
                           (size_t)received * element));
    }
    return run(comm->backend->all_to_all, ND_COMM_ALL_TO_ALL, comm, stream, args, done);
}

nd_status nd_comm_group_begin(nd_comm *comm)
{
    return comm->backend->group_begin ? comm->backend->group_begin(comm) : ND_OK;
}

nd_status nd_comm_group_end(nd_comm *comm)
{
    return comm->backend->group_end ? comm->backend->group_end(comm) : ND_OK;
}

nd_status nd_comm_barrier(nd_comm *comm)
{
    ND_TRY(enter(comm, NULL, ND_COMM_BARRIER, 0));
    return comm->backend->barrier(comm, NULL, NULL);
}

void nd_transport_close(nd_transport *transport)
{
    if (transport) {
        transport->backend->close(transport);
        free(transport);
    }
}

void nd_transport_abandon(nd_transport *transport)
{
    if (transport && transport->backend->abandon) {
        transport->backend->abandon(transport);
    }
}
