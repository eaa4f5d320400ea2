// SPDX-License-Identifier: Apache-2.0
/* Communicators and the transport: how they begin and end. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "runtime/base/log.h"
#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda.h"
#include "runtime/device/cuda_check.h"

enum {
    MORE_SECONDS = 10
}; /* more than the deadline: a thread that waits reports the fault better */

int nccl_call_begin(nd_transport *transport, const char *what)
{
    nccl_state *state = nccl_state_of(transport);
    int call = nd_call_limit_begin(state->limit, what, MORE_SECONDS + transport->timeout_seconds,
                                   "the host is inside NCCL", ND_ERR_HANG);
    pthread_mutex_lock(&state->calls);
    return call;
}

void nccl_call_end(nccl_state *state, int call)
{
    pthread_mutex_unlock(&state->calls);
    nd_call_limit_end(state->limit, call);
}

/* Two communicators: gathers of weights and reductions of gradients run beside products, whose
 * multiprocessors their blocks take. */
static bool runs_beside_products(nd_group_kind kind)
{
    return nd_group_communicators(kind) > 1;
}

static nd_status open_group(nd_transport *transport, nccl_comm *nc)
{
    nccl_state *state = nccl_state_of(transport);
    const nd_comm *comm = nc->comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    if (state->max_blocks > 0 && runs_beside_products(comm->kind)) {
        config.maxCTAs = state->max_blocks;
    }
    ND_TRY(nccl_ring_init(state->device, &nc->ring));
    ND_TRY(nd_cuda_stream_init_urgent(state->device, &nc->stream));
    int call = nccl_call_begin(transport, "ncclCommSplit");
    ncclResult_t result =
        state->library.split(state->world, comm->ranks[0], comm->index, &nc->native, &config);
    nccl_call_end(state, call);
    /* ncclCommSplit returns success before a thread of NCCL has created the child: the parent is in
     * progress until then, and the child until it is connected. */
    result = result == ncclSuccess ? ncclInProgress : result;
    ND_TRY(nccl_settle(transport, nc, state->world, result, "the communicator"));
    return nccl_settle(transport, nc, nc->native, ncclInProgress, "the communicator");
}

/* Every member calls this unless something failed; each waits for the others. */
static nd_status end_native(nd_transport *transport, const nccl_comm *nc, ncclComm_t *native)
{
    nccl_state *state = nccl_state_of(transport);
    int call = nccl_call_begin(transport, "ncclCommFinalize");
    ncclResult_t result = state->library.finalize(*native);
    nccl_call_end(state, call);
    ND_TRY(nccl_settle_end(transport, nc, *native, result));
    call = nccl_call_begin(transport, "ncclCommDestroy");
    state->library.destroy(*native);
    *native = NULL;
    nccl_call_end(state, call);
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
    nccl_ring_fini(&nc->ring);
    free(nc->group.ranks);
    free(nc);
}

/* A duplicate is made because it must not wait for others. */
static bool is_duplicate(const nd_comm *comm)
{
    return comm->id != (int)comm->kind;
}

/* The communicator of another group that serves this one too; NULL: it needs its own. All ranks
 * answer alike. */
static nccl_comm *find_shared(const nccl_state *state, const nd_comm *comm)
{
    for (nccl_comm *nc = state->comms; nc && !is_duplicate(comm); nc = nc->next) {
        if (comm->shares != comm->kind && nc->group.kind == comm->shares &&
            !is_duplicate(&nc->group)) {
            return nc;
        }
    }
    return NULL;
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

void nccl_destroy(nd_comm *comm)
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

nd_status nccl_create(nd_transport *transport, nd_comm *comm)
{
    nccl_state *state = nccl_state_of(transport);
    if (state->failed) {
        return nccl_again(state);
    }
    nccl_comm *nc = find_shared(state, comm);
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
void nccl_abandon(nd_transport *transport)
{
    if (!nccl_state_of(transport)->failed) {
        nccl_give_up(transport);
    }
}

void nccl_close(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    nd_device *device = state->device;
    if (state->world && !state->failed && end_native(transport, NULL, &state->world) != ND_OK) {
        nd_log_warning("%s", state->message);
    }
    nccl_thread_stop(transport);
    nd_call_limit_destroy(state->limit);
    if (device->waiting_context == transport) {
        device->while_waiting = NULL;
        device->waiting_context = NULL;
    }
    device->table->stream_fini(&state->stream);
    if (state->staging) {
        nd_device_free(device, state->staging, NCCL_STAGING_BYTES);
    }
    nd_cuda_pinned_free(device, state->pinned);
    for (int r = 0; state->peers && r < transport->size; r++) {
        if (state->peers[r].pidfd >= 0) {
            close(state->peers[r].pidfd);
        }
    }
    free(state->peers);
    nd_monitor_fini(&state->watching);
    pthread_mutex_destroy(&state->ring);
    pthread_mutex_destroy(&state->calls);
    free(state);
}
