// SPDX-License-Identifier: Apache-2.0
/* Faults: how they are seen, said, and ended. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/base/clock.h"
#include "runtime/comm/nccl/nccl_state.h"

enum { WATCH_NS = 20000000 };

nd_status nccl_again(nccl_state *state)
{
    return nd_fail(state->failed, "%s", state->message);
}

/* Ends the kernels that wait for a peer; the transport is of no use afterwards. */
static nd_status give_up(nccl_state *state)
{
    const nd_error *error = nd_error_last();
    state->failed = error->status;
    snprintf(state->message, sizeof state->message, "%s", error->message);
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        if (nc->native) {
            state->library.abort(nc->native);
            nc->native = NULL;
        }
    }
    if (state->world) {
        state->library.abort(state->world);
        state->world = NULL;
    }
    return nccl_again(state);
}

static void describe(const nccl_comm *nc, char *text, size_t size)
{
    if (!nc || nc->sequence == 0) {
        snprintf(text, size, "%s", nc ? nd_group_name(nc->comm->kind) : "the world");
        return;
    }
    snprintf(text, size, "%s of %s, operation %lld (%lld x %s)", nd_comm_op_name(nc->op),
             nd_group_name(nc->comm->kind), (long long)nc->sequence, (long long)nc->count,
             nd_dtype_name(nc->dtype));
}

nd_status nccl_failed(nd_transport *transport, const nccl_comm *nc, ncclResult_t result,
                      const char *call)
{
    nccl_state *state = nccl_state_of(transport);
    char where[160];
    const char *more = state->library.last_error(nc ? nc->native : state->world);
    bool memory = more && strstr(more, "out of memory");
    describe(nc, where, sizeof where);
    nd_status status = memory                                                   ? ND_ERR_RESOURCE
                       : result == ncclRemoteError || result == ncclSystemError ? ND_ERR_IO
                       : result == ncclInvalidUsage                             ? ND_ERR_CONFIG
                                                                                : ND_ERR_INTERNAL;
    nd_fail(status, "rank %d: NCCL error %d (%s) from %s, %s%s%.300s%s", transport->rank,
            (int)result, state->library.error_string(result), call, where,
            more && more[0] ? ": " : "", more ? more : "",
            memory ? "; it finds no memory beside the plan: use recompute, a smaller micro batch, "
                     "a shorter sequence or more shards"
                   : "");
    return give_up(state);
}

/* The first communicator whose latest operation has not run, the one entered first. */
static const nccl_comm *stuck_comm(const nccl_state *state)
{
    const nccl_comm *found = NULL;
    for (const nccl_comm *nc = state->comms; nc; nc = nc->next) {
        if (nc->last && cudaEventQuery(nc->last) == cudaErrorNotReady) {
            found = nc;
        }
    }
    return found;
}

static nd_status report_hang(nd_transport *transport, double seconds)
{
    const nccl_comm *nc = stuck_comm(nccl_state_of(transport));
    char where[160], members[128] = "";
    describe(nc, where, sizeof where);
    for (int i = 0, used = 0; nc && i < nc->comm->size && used < 100; i++) {
        if (nc->comm->ranks[i] != transport->rank) {
            used +=
                snprintf(members + used, sizeof members - (size_t)used, " %d", nc->comm->ranks[i]);
        }
    }
    nd_fail(ND_ERR_HANG,
            "rank %d waited %.1f s in %s, for any of the ranks%s; the deadline is "
            "launch.comm_timeout_seconds",
            transport->rank, seconds, nc ? where : "work of the GPU", members);
    return give_up(nccl_state_of(transport));
}

static nd_status check_peers(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    for (int r = 0; r < transport->size; r++) {
        struct pollfd ended = {.fd = state->peers[r].pidfd, .events = POLLIN};
        if (ended.fd >= 0 && poll(&ended, 1, 0) > 0) {
            char where[160];
            describe(stuck_comm(state), where, sizeof where);
            nd_fail(ND_ERR_IO, "rank %d has ended while rank %d waited for it in %s", r,
                    transport->rank, where);
            return give_up(state);
        }
    }
    return ND_OK;
}

nd_status nccl_watch(void *context, double seconds)
{
    nd_transport *transport = context;
    nccl_state *state = nccl_state_of(transport);
    int64_t now = nd_clock_ns();
    if (state->failed) {
        return nccl_again(state);
    }
    if (now - state->watched_ns < WATCH_NS) {
        return ND_OK;
    }
    state->watched_ns = now;
    for (const nccl_comm *nc = state->comms; nc; nc = nc->next) {
        ncclResult_t error = ncclSuccess;
        ncclResult_t asked = nc->native ? state->library.async_error(nc->native, &error) : 0;
        if (asked != ncclSuccess || (error != ncclSuccess && error != ncclInProgress)) {
            const nccl_comm *stuck = stuck_comm(state); /* what the error keeps from ending */
            return nccl_failed(transport, stuck ? stuck : nc, asked != ncclSuccess ? asked : error,
                               "a peer");
        }
    }
    ND_TRY(check_peers(transport));
    return seconds > transport->timeout_seconds ? report_hang(transport, seconds) : ND_OK;
}

nd_status nccl_settle(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                      ncclResult_t first, const char *what)
{
    nccl_state *state = nccl_state_of(transport);
    int64_t begin = nd_clock_ns();
    ncclResult_t result = first;
    while (result == ncclInProgress) {
        double seconds = (double)(nd_clock_ns() - begin) * 1e-9;
        ncclResult_t asked = state->library.async_error(native, &result);
        result = asked == ncclSuccess ? result : asked;
        if (result != ncclInProgress) {
            break;
        }
        ND_TRY(check_peers(transport));
        if (seconds > transport->timeout_seconds) {
            char where[160];
            describe(nc, where, sizeof where);
            nd_fail(ND_ERR_HANG,
                    "rank %d waited %.1f s for %s of %s with %d ranks; the deadline is "
                    "launch.comm_timeout_seconds",
                    transport->rank, seconds, what, where, transport->size);
            return give_up(state);
        }
        nanosleep(&(struct timespec){.tv_nsec = seconds < 0.01 ? 20000 : 1000000}, NULL);
    }
    return result == ncclSuccess ? ND_OK : nccl_failed(transport, nc, result, what);
}
