// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/host.h"

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

static nd_status map_staging(nd_host_comm *hc, size_t bytes)
{
    /* Untouched pages cost nothing: only communicators that reduce use theirs. */
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        return nd_fail_memory("the staging buffer of a group (%zu bytes)", bytes);
    }
    hc->staging = p;
    hc->staging_bytes = bytes;
    return ND_OK;
}

static nd_status connect_members(nd_comm *comm)
{
    nd_host_transport *host = nd_host_of(comm);
    for (int k = 1; k < comm->size && comm->size <= DIRECT_MAX * 2; k++) {
        int member = (comm->index + k) % comm->size;
        ND_TRY(host->p2p->connect(comm->transport, comm->ranks[member]));
    }
    return comm->backend->barrier(comm, NULL, NULL);
}

static void host_destroy(nd_comm *comm)
{
    nd_host_comm *hc = comm->native;
    if (!hc) {
        return;
    }
    nd_host_transport *host = nd_host_of(comm);
    /* Dropped in mid-air by a rank that failed elsewhere: no orderly end any more. That rank's
     * error stays as it is. */
    if (hc->active > 0 && host->failed == ND_OK) {
        host->failed = ND_ERR_INTERNAL;
        snprintf(host->message, sizeof host->message, "%s was destroyed with pending operations",
                 nd_group_name(comm->kind));
        nd_host_abandon(host);
    }
    for (nd_host_comm **at = &host->comms; *at; at = &(*at)->next) {
        if (*at == hc) {
            *at = hc->next;
            break;
        }
    }
    if (hc->staging) {
        munmap(hc->staging, hc->staging_bytes);
    }
    free(hc->sources);
    free(hc);
    comm->native = NULL;
}

static nd_status host_create(nd_transport *transport, nd_comm *comm)
{
    nd_host_transport *host = transport->native;
    nd_host_comm *hc = NULL;
    nd_status status = ND_ALLOC(1, &hc);
    if (status != ND_OK) {
        return status;
    }
    comm->native = hc;
    hc->comm = comm;
    hc->next = host->comms;
    host->comms = hc;
    for (int i = 0; i < ND_HOST_PENDING; i++) {
        hc->ops[i].comm = comm;
    }
    ND_TRY_OUT(ND_ALLOC(comm->size, &hc->sources));
    ND_TRY_OUT(map_staging(hc, nd_comm_staging_bytes(comm->size)));
    status = connect_members(comm);
    if (status != ND_OK) {
        nd_fail_context(status, "the members of %s met for the first time",
                        nd_group_name(comm->kind));
    }
out:
    if (status != ND_OK) {
        host_destroy(comm);
    }
    return status;
}

/* What every operation copies from its arguments. */
static nd_host_op op_of(nd_comm_op kind, const nd_host_plan *plan, const nd_comm_args *args)
{
    size_t element = nd_dtype_size(args->dtype);
    return (nd_host_op){.plan = plan,
                        .kind = kind,
                        .dtype = args->dtype,
                        .redop = args->redop,
                        .root = args->root,
                        .to = args->to,
                        .from = args->from,
                        .count = args->count,
                        .send = args->send,
                        .recv = args->recv,
                        .element = element,
                        .block = (size_t)args->count * element};
}

static nd_status host_all_reduce(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    const nd_host_comm *hc = comm->native;
    nd_host_op op = op_of(ND_COMM_ALL_REDUCE, &nd_plan_reduce, args);
    size_t gathered = op.block * (size_t)comm->size;
    bool few = comm->size <= DIRECT_MAX;
    op.chunk = nd_plan_reduce_chunk(comm, hc->staging_bytes, op.element);
    if (gathered - op.block <= SHORT_REDUCE_BYTES && gathered <= hc->staging_bytes) {
        op.plan = few ? &nd_plan_gather : &nd_plan_bruck;
    }
    return nd_host_enqueue(comm, &op, done);
}

static nd_status host_all_gather(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    const nd_host_comm *hc = comm->native;
    nd_host_op op = op_of(ND_COMM_ALL_GATHER, &nd_plan_direct, args);
    bool stepwise = comm->size > DIRECT_MAX && op.block <= SHORT_GATHER_BYTES &&
                    op.block * (size_t)comm->size <= hc->staging_bytes;
    op.plan = stepwise ? &nd_plan_bruck : op.plan;
    return nd_host_enqueue(comm, &op, done);
}

static nd_status host_reduce_scatter(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                     nd_event *done)
{
    const nd_host_comm *hc = comm->native;
    nd_host_op op = op_of(ND_COMM_REDUCE_SCATTER, &nd_plan_reduce, args);
    op.chunk = nd_plan_reduce_chunk(comm, hc->staging_bytes, op.element);
    return nd_host_enqueue(comm, &op, done);
}

static nd_status host_broadcast(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                nd_event *done)
{
    nd_host_op op = op_of(ND_COMM_BROADCAST, &nd_plan_tree, args);
    return nd_host_enqueue(comm, &op, done);
}

static nd_status host_exchange(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                               nd_event *done)
{
    nd_host_op op = op_of(ND_COMM_EXCHANGE, &nd_plan_direct, args);
    return nd_host_enqueue(comm, &op, done);
}

static nd_status host_all_to_all(nd_comm *comm, nd_stream *stream, const nd_comm_args *args,
                                 nd_event *done)
{
    nd_host_op op = op_of(ND_COMM_ALL_TO_ALL, &nd_plan_direct, args);
    return nd_host_enqueue(comm, &op, done);
}

static nd_status host_barrier(nd_comm *comm, nd_stream *stream, nd_event *done)
{
    nd_host_op op = {.plan = comm->size <= DIRECT_MAX ? &nd_plan_direct : &nd_plan_barrier,
                     .kind = ND_COMM_BARRIER,
                     .dtype = ND_DTYPE_U8};
    return nd_host_enqueue(comm, &op, done);
}

static void host_close(nd_transport *transport)
{
    nd_host_transport *host = transport->native;
    if (host) {
        ND_ASSERT(host->comms == NULL); /* communicators are destroyed before their transport */
        host->p2p->close(transport, host->failed != ND_OK);
        free(host);
    }
}

#define HOST_BACKEND(NAME)                                                                         \
    {                                                                                              \
        .name = (NAME), .create = host_create, .destroy = host_destroy,                            \
        .all_reduce = host_all_reduce, .all_gather = host_all_gather,                              \
        .reduce_scatter = host_reduce_scatter, .broadcast = host_broadcast,                        \
        .exchange = host_exchange, .all_to_all = host_all_to_all, .barrier = host_barrier,         \
        .close = host_close                                                                        \
    }

const nd_comm_backend nd_host_local_backend = HOST_BACKEND("local");
const nd_comm_backend nd_host_ucx_backend = HOST_BACKEND("ucx");

nd_status nd_host_transport_create(const nd_comm_backend *backend, const nd_p2p *p2p,
                                   nd_transport **out)
{
    nd_transport *transport = NULL;
    nd_host_transport *host = NULL;
    ND_TRY(ND_ALLOC(1, &transport));
    nd_status status = ND_ALLOC(1, &host);
    if (status != ND_OK) {
        free(transport);
        return status;
    }
    host->p2p = p2p;
    transport->backend = backend;
    transport->native = host;
    *out = transport;
    return ND_OK;
}
