// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/p2p.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

/*
 * Chooses the plan of an operation. The choice depends only on what all members know (count, type,
 * size), so that all of them choose alike. Bounds measured with nd_bench_comm, eight ranks on two
 * cores.
 */
enum {
    DIRECT_MAX = 8,             /* members; with more, short operations need log2 n steps */
    SHORT_REDUCE_BYTES = 32768, /* all-reduce: total received when everything is gathered at once */
    SHORT_GATHER_BYTES = 4096,  /* all-gather of many: one block */
};
static const size_t STAGING_BYTES = 2u << 20;         /* of a communicator, at least */
static const size_t STAGING_BYTES_PER_MEMBER = 32768; /* and two rounds of 16 KiB from each */

size_t nd_comm_staging_bytes(int size)
{
    if (size <= 1) {
        return 0;
    }
    size_t bytes = (size_t)size * STAGING_BYTES_PER_MEMBER;
    return bytes < STAGING_BYTES ? STAGING_BYTES : bytes;
}

static nd_status map_staging(nd_p2p_comm *pc, size_t bytes)
{
    /* Untouched pages cost nothing: only communicators that reduce use theirs. */
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        return nd_fail_memory("the staging buffer of a group (%zu bytes)", bytes);
    }
    pc->staging = p;
    pc->staging_bytes = bytes;
    return ND_OK;
}

static nd_status connect_members(nd_comm *comm)
{
    nd_p2p_transport *native = nd_p2p_of(comm);
    for (int k = 1; k < comm->size && comm->size <= DIRECT_MAX * 2; k++) {
        int member = (comm->index + k) % comm->size;
        ND_TRY(native->p2p->connect(comm->transport, comm->ranks[member]));
    }
    return comm->backend->barrier(comm, NULL, NULL);
}

static void p2p_destroy(nd_comm *comm)
{
    nd_p2p_comm *pc = comm->native;
    if (!pc) {
        return;
    }
    nd_p2p_transport *native = nd_p2p_of(comm);
    /* Dropped in mid-air by a rank that failed elsewhere: no orderly end any more. That rank's
     * error stays as it is. */
    if (pc->active > 0 && native->failed == ND_OK) {
        native->failed = ND_ERR_INTERNAL;
        snprintf(native->message, sizeof native->message,
                 "%s was destroyed with pending operations", nd_group_name(comm->kind));
        nd_p2p_abandon(native);
    }
    for (nd_p2p_comm **at = &native->comms; *at; at = &(*at)->next) {
        if (*at == pc) {
            *at = pc->next;
            break;
        }
    }
    if (pc->staging) {
        munmap(pc->staging, pc->staging_bytes);
    }
    free(pc->sources);
    free(pc);
    comm->native = NULL;
}

static nd_status p2p_create(nd_transport *transport, nd_comm *comm)
{
    nd_p2p_transport *native = transport->native;
    nd_p2p_comm *pc = NULL;
    nd_status status = ND_ALLOC(1, &pc);
    if (status != ND_OK) {
        return status;
    }
    comm->native = pc;
    pc->comm = comm;
    pc->next = native->comms;
    native->comms = pc;
    for (int i = 0; i < ND_P2P_PENDING; i++) {
        pc->ops[i].comm = comm;
    }
    ND_TRY_OUT(ND_ALLOC(comm->size, &pc->sources));
    ND_TRY_OUT(map_staging(pc, transport->staging_bytes > 0 ? transport->staging_bytes
                                                            : nd_comm_staging_bytes(comm->size)));
    status = connect_members(comm);
    if (status != ND_OK) {
        nd_fail_context(status, "the members of %s met for the first time",
                        nd_group_name(comm->kind));
    }
out:
    if (status != ND_OK) {
        p2p_destroy(comm);
    }
    return status;
}

/* What every operation copies from its arguments. */
static nd_p2p_op op_of(nd_comm_op kind, const nd_p2p_plan *plan, const nd_comm_args *args)
{
    size_t element = nd_dtype_size(args->dtype);
    return (nd_p2p_op){.plan = plan,
                       .kind = kind,
                       .dtype = args->dtype,
                       .redop = args->redop,
                       .root = args->root,
                       .to = args->to,
                       .from = args->from,
                       .count = args->count,
                       .send = args->send,
                       .recv = args->recv,
                       .sends = args->sends,
                       .receives = args->receives,
                       .element = element,
                       .block = (size_t)args->count * element};
}

static nd_status p2p_all_reduce(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                nd_event *done)
{
    const nd_p2p_comm *pc = comm->native;
    nd_p2p_op op = op_of(ND_COMM_ALL_REDUCE, &nd_plan_reduce, args);
    size_t gathered = op.block * (size_t)comm->size;
    bool few = comm->size <= DIRECT_MAX;
    op.chunk = nd_plan_reduce_chunk(comm, pc->staging_bytes, op.element);
    if (gathered - op.block <= SHORT_REDUCE_BYTES && gathered <= pc->staging_bytes) {
        op.plan = few ? &nd_plan_gather : &nd_plan_bruck;
    }
    return nd_p2p_enqueue(comm, &op, done);
}

static nd_status p2p_all_gather(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                nd_event *done)
{
    const nd_p2p_comm *pc = comm->native;
    nd_p2p_op op = op_of(ND_COMM_ALL_GATHER, &nd_plan_direct, args);
    bool stepwise = comm->size > DIRECT_MAX && op.block <= SHORT_GATHER_BYTES &&
                    op.block * (size_t)comm->size <= pc->staging_bytes;
    op.plan = stepwise ? &nd_plan_bruck : op.plan;
    return nd_p2p_enqueue(comm, &op, done);
}

static nd_status p2p_reduce_scatter(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                    nd_event *done)
{
    const nd_p2p_comm *pc = comm->native;
    nd_p2p_op op = op_of(ND_COMM_REDUCE_SCATTER, &nd_plan_reduce, args);
    op.chunk = nd_plan_reduce_chunk(comm, pc->staging_bytes, op.element);
    return nd_p2p_enqueue(comm, &op, done);
}

static nd_status p2p_broadcast(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                               nd_event *done)
{
    nd_p2p_op op = op_of(ND_COMM_BROADCAST, &nd_plan_tree, args);
    return nd_p2p_enqueue(comm, &op, done);
}

static nd_status p2p_exchange(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                              nd_event *done)
{
    nd_p2p_op op = op_of(ND_COMM_EXCHANGE, &nd_plan_direct, args);
    return nd_p2p_enqueue(comm, &op, done);
}

static nd_status p2p_all_to_all(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                nd_event *done)
{
    nd_p2p_op op = op_of(ND_COMM_ALL_TO_ALL, &nd_plan_direct, args);
    return nd_p2p_enqueue(comm, &op, done);
}

static nd_status p2p_barrier(nd_comm *comm, nd_stream *stream, nd_event *done)
{
    nd_p2p_op op = {.plan = comm->size <= DIRECT_MAX ? &nd_plan_direct : &nd_plan_barrier,
                    .kind = ND_COMM_BARRIER,
                    .dtype = ND_DTYPE_U8};
    return nd_p2p_enqueue(comm, &op, done);
}

static void p2p_close(nd_transport *transport)
{
    nd_p2p_transport *native = transport->native;
    if (native) {
        ND_ASSERT(native->comms == NULL); /* communicators are destroyed before their transport */
        native->p2p->close(transport, native->failed != ND_OK);
        free(native);
    }
}

#define HOST_BACKEND(NAME)                                                                         \
    {                                                                                              \
        .name = (NAME), .create = p2p_create, .destroy = p2p_destroy,                              \
        .all_reduce = p2p_all_reduce, .all_gather = p2p_all_gather,                                \
        .reduce_scatter = p2p_reduce_scatter, .broadcast = p2p_broadcast,                          \
        .exchange = p2p_exchange, .all_to_all = p2p_all_to_all, .barrier = p2p_barrier,            \
        .close = p2p_close                                                                         \
    }

const nd_comm_backend nd_p2p_local_backend = HOST_BACKEND("local");
const nd_comm_backend nd_p2p_ucx_backend = HOST_BACKEND("ucx");

nd_status nd_p2p_transport_create(const nd_comm_backend *backend, const nd_p2p *p2p,
                                  nd_transport **out)
{
    nd_transport *transport = NULL;
    nd_p2p_transport *native = NULL;
    ND_TRY(ND_ALLOC(1, &transport));
    nd_status status = ND_ALLOC(1, &native);
    if (status != ND_OK) {
        free(transport);
        return status;
    }
    native->p2p = p2p;
    transport->backend = backend;
    transport->native = native;
    *out = transport;
    return ND_OK;
}
