// SPDX-License-Identifier: Apache-2.0
/* Faults: how they are seen and ended. */
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda.h"

enum { WATCH_NS = 20000000, OTHER_THREADS_END_SECONDS = 60 };

/* The limit for work of the GPU while no operation runs. */
static const double COMPUTE_SECONDS = 3600;

/* All ranks of a job that ends in good order end within this time. */
static const int64_t COMMON_END_NS = 300000000;

nd_status nccl_again(nccl_state *state)
{
    return nd_fail(state->failed, "%s", state->message);
}

/* Closes a group that a failure left open. */
void nccl_group_close(nccl_state *state)
{
    if (state->grouping) {
        state->grouping->grouped = false;
        state->grouping = NULL;
        state->library.group_end();
        pthread_mutex_unlock(&state->calls);
    }
}

static void *abort_one(void *argument)
{
    nccl_comm *nc = argument;
    nccl_state *state = nccl_state_of(nc->comm->transport);
    cudaSetDevice(state->device->ordinal);
    state->library.abort(nc->native);
    nc->native = NULL;
    return NULL;
}

/* Each abort runs in a thread of its own: it frees memory, which may wait for a kernel of another
 * communicator that is not aborted yet. A group call does not help: the end of a group of
 * non-blocking communicators may return before the aborts do, and then nothing can be asked for
 * their state. */
static void abort_groups(nccl_state *state)
{
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        nc->has_aborter = nc->native && pthread_create(&nc->aborter, NULL, abort_one, nc) == 0;
    }
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        if (!nc->has_aborter && nc->native) {
            abort_one(nc);
        }
    }
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        if (nc->has_aborter) {
            pthread_join(nc->aborter, NULL);
        }
    }
}

/* Ends the kernels that wait for a peer. A limit ends the process when an abort does not return. */
static void abort_all(nccl_state *state)
{
    int call = nd_call_limit_begin(state->limit, "ncclCommAbort", NCCL_ABORT_SECONDS,
                                   state->message, (int)state->failed);
    nccl_group_close(state);
    pthread_mutex_lock(&state->calls);
    abort_groups(state);
    if (state->world) { /* has no kernels; the others' parent */
        state->library.abort(state->world);
        state->world = NULL;
    }
    if (state->making && state->making->native) { /* its parent's abort ended what made it */
        abort_one(state->making);
    }
    pthread_mutex_unlock(&state->calls);
    nd_call_limit_end(state->limit, call);
}

nd_status nccl_give_up(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    const nd_error *error = nd_error_last();
    if (state->failed) {
        return nccl_again(state);
    }
    if (atomic_exchange(&state->taken, true)) {
        sleep(OTHER_THREADS_END_SECONDS); /* the other thread ends this process */
    }
    state->failed = error->status ? error->status : ND_ERR_INTERNAL;
    snprintf(state->message, sizeof state->message, "%s", error->message);
    if (state->on_fault) {
        state->on_fault(state->fault_context, state->failed, state->message, false);
    }
    nd_cuda_give_up(state->device); /* a kernel of the caller may wait for what is aborted */
    abort_all(state);
    return nccl_again(state);
}

/* Under `calls`. */
static nd_status fail(const nd_transport *transport, ncclComm_t native, const char *where,
                      ncclResult_t result, const char *call)
{
    const nccl_state *state = nccl_state_of(transport);
    const char *more = state->library.last_error(native);
    bool memory = more && strstr(more, "out of memory");
    char peers[600];
    nccl_report_peers(transport, peers, sizeof peers);
    nd_status status = memory                                                   ? ND_ERR_RESOURCE
                       : result == ncclRemoteError || result == ncclSystemError ? ND_ERR_IO
                       : result == ncclInvalidUsage                             ? ND_ERR_CONFIG
                                                                                : ND_ERR_INTERNAL;
    return nd_fail(status, "rank %d: NCCL error %d (%s) from %s, %s%s%.300s%s%s", transport->rank,
                   (int)result, state->library.error_string(result), call, where,
                   more && more[0] ? ": " : "", more ? more : "",
                   memory
                       ? "; NCCL found no memory outside the plan: use recompute, a smaller micro "
                         "batch, a shorter sequence or more shards"
                       : "",
                   peers);
}

static nd_status call_failed(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                             ncclResult_t result, const char *call)
{
    nccl_state *state = nccl_state_of(transport);
    char where[160];
    nccl_describe(nc ? nc->comm : NULL, nc ? nc->entry : NULL, where, sizeof where);
    pthread_mutex_lock(&state->ring);
    pthread_mutex_lock(&state->calls);
    fail(transport, native, where, result, call);
    pthread_mutex_unlock(&state->calls);
    pthread_mutex_unlock(&state->ring);
    return nccl_give_up(transport);
}

/* What this rank waits for, as a look finds it. */
typedef struct waiting {
    const nd_comm *comm; /* NULL: all ranks */
    const nccl_entry *entry;
    char where[200];
    bool pending;    /* otherwise for nothing of its peers */
    bool ends;       /* a communicator, in good order: peers may have ended theirs, and be gone */
    int64_t from_ns; /* 0: it has not begun */
} waiting;

/* Only one thread at a time may call NCCL. When the other thread is inside NCCL, `asked` is false
 * and a later look asks again. */
static nd_status check_errors(const nd_transport *transport, const waiting *w, bool *asked)
{
    nccl_state *state = nccl_state_of(transport);
    nd_status status = ND_OK;
    *asked = pthread_mutex_trylock(&state->calls) == 0;
    if (!*asked) {
        return ND_OK;
    }
    for (const nccl_comm *nc = state->comms; nc && status == ND_OK; nc = nc->next) {
        ncclResult_t error = ncclSuccess;
        ncclResult_t answer =
            nc->native ? state->library.async_error(nc->native, &error) : ncclSuccess;
        error = answer != ncclSuccess ? answer : error;
        if (error != ncclSuccess && error != ncclInProgress) {
            char group[160];
            nccl_describe(nc->comm, NULL, group, sizeof group);
            status = fail(transport, nc->native, w->pending ? w->where : group, error,
                          error == ncclRemoteError ? "a peer" : "what it had begun");
        }
    }
    pthread_mutex_unlock(&state->calls);
    return status;
}

/* Between two questions to NCCL: it launches most operations within some tens of microseconds,
 * which a sleep would make longer. */
static void pause_since(int64_t begin_ns)
{
    const int64_t spin_ns = 50000, long_ns = 10000000;
    int64_t waited = nd_clock_ns() - begin_ns;
    if (waited < spin_ns) {
        sched_yield();
    } else {
        nanosleep(&(struct timespec){.tv_nsec = waited > long_ns ? 1000000 : 20000}, NULL);
    }
}

static bool waits_for_peers(const waiting *w)
{
    return w->pending && !w->ends;
}

/* A peer that ended later may have ended because of the first. */
static bool goes_before(const nccl_state *state, const nd_comm *comm, int rank, int other)
{
    int64_t one = state->peers[rank].gone_ns, two = state->peers[other].gone_ns;
    return one != two ? one < two : nccl_is_member(comm, rank) && !nccl_is_member(comm, other);
}

/* A peer that has ended has done its part of what is pending here, or never will. */
static nd_status check_peers(const nd_transport *transport, const waiting *w)
{
    const nccl_state *state = nccl_state_of(transport);
    int64_t now = nd_clock_ns();
    int gone = -1;
    for (int r = 0; r < transport->size && waits_for_peers(w); r++) {
        int64_t missed = state->peers[r].missed_ns;
        if (missed && now - missed > COMMON_END_NS &&
            (gone < 0 || goes_before(state, w->comm, r, gone))) {
            gone = r;
        }
    }
    if (gone < 0) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_IO, "rank %d has ended while rank %d waited%s in %s", gone,
                   transport->rank, nccl_is_member(w->comm, gone) ? " for it" : "", w->where);
}

static nd_status check_deadline(const nd_transport *transport, const waiting *w,
                                double host_seconds)
{
    const nccl_state *state = nccl_state_of(transport);
    int64_t since = w->from_ns > state->progress_ns ? w->from_ns : state->progress_ns;
    double seconds = (double)(nd_clock_ns() - since) * 1e-9;
    if (w->pending && w->from_ns && seconds > transport->timeout_seconds) {
        return nccl_report_hang(transport, w->comm, w->entry, w->where, seconds);
    }
    if (!w->from_ns && seconds > COMPUTE_SECONDS && host_seconds > COMPUTE_SECONDS &&
        host_seconds > transport->timeout_seconds) {
        return nd_fail(ND_ERR_HANG,
                       "rank %d waited %.0f s for its GPU, where no collective has begun",
                       transport->rank, host_seconds);
    }
    return ND_OK;
}

/* Shows the launcher, and ranks that wait for this one, the operation that runs, otherwise what
 * NCCL is polled for, otherwise the operation that ended last. No other code writes the slot. Under
 * `ring`. */
static void show(const nccl_state *state, nd_progress_slot *slot, const nccl_pending *oldest)
{
    int64_t since = oldest->begun_ns ? oldest->begun_ns : state->called_ns;
    const nccl_entry *e = oldest->begun_ns   ? &oldest->entry
                          : state->called_ns ? &state->called
                                             : &state->ended;
    int64_t bytes = e->count * (int64_t)nd_dtype_size(e->dtype);
    atomic_store_explicit(&slot->group, (int32_t)e->kind, memory_order_relaxed);
    atomic_store_explicit(&slot->op, (int32_t)e->op, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, e->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->bytes, bytes, memory_order_relaxed);
    atomic_store_explicit(&slot->since_ns, since, memory_order_relaxed);
}

/* Looks for faults of a pending operation, or of a call that is being settled. */
static nd_status look(nd_transport *transport, const waiting *settling, double host_seconds,
                      bool *asked)
{
    nccl_state *state = nccl_state_of(transport);
    nccl_pending oldest;
    waiting found = {0};
    pthread_mutex_lock(&state->ring);
    nccl_ring_advance(state, &oldest);
    if (settling) {
        state->called = *settling->entry;
        state->called_ns = settling->from_ns;
    }
    show(state, transport->progress, &oldest);
    if (oldest.comm) {
        found.comm = oldest.comm;
        found.entry = &oldest.entry;
        found.pending = true;
        found.from_ns = oldest.begun_ns;
        nccl_describe(oldest.comm, &oldest.entry, found.where, sizeof found.where);
    }
    const waiting *w = oldest.begun_ns || !settling ? &found : settling;
    /* At every look, also when this rank waits for nothing: otherwise the order in which peers
     * ended would be unknown later. */
    int64_t now = nd_clock_ns();
    for (int r = 0; r < transport->size; r++) {
        nccl_peer *peer = &state->peers[r];
        if (nccl_peer_gone(peer, now) && waits_for_peers(w) && !peer->missed_ns) {
            peer->missed_ns = now;
        }
    }
    nd_status status = check_errors(transport, w, asked);
    status = status == ND_OK ? check_peers(transport, w) : status;
    status = status == ND_OK ? check_deadline(transport, w, host_seconds) : status;
    pthread_mutex_unlock(&state->ring);
    return status;
}

nd_status nccl_look(nd_transport *transport, bool *asked)
{
    return look(transport, NULL, 0, asked);
}

/* The driving thread looks. */
static nd_status attend(nd_transport *transport, const waiting *settling, double host_seconds)
{
    nccl_state *state = nccl_state_of(transport);
    int64_t now = nd_clock_ns();
    if (state->failed) {
        return nccl_again(state);
    }
    if (now - state->watched_ns < WATCH_NS) {
        return ND_OK;
    }
    state->watched_ns = now;
    atomic_store(&state->attended_ns, now);
    bool asked;
    nd_status status = look(transport, settling, host_seconds, &asked);
    return status == ND_OK ? ND_OK : nccl_give_up(transport);
}

nd_status nccl_watch(void *context, double seconds)
{
    return attend(context, NULL, seconds);
}

/* A split is a call of all ranks, so the world is asked for its state. */
static nd_status settle(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                        ncclResult_t first, const char *what, bool ends)
{
    nccl_state *state = nccl_state_of(transport);
    ncclResult_t result = first;
    const nccl_entry setup = {.kind = nc ? nc->comm->kind : ND_GROUP_WORLD, .op = ND_COMM_SETUP};
    waiting w = {.comm = nc && native != state->world ? nc->comm : NULL,
                 .entry = nc && nc->entry ? nc->entry : &setup,
                 .pending = true,
                 .ends = ends,
                 .from_ns = nd_clock_ns()};
    for (bool asked = false; result == ncclInProgress; asked = true) {
        if (asked) {
            pause_since(w.from_ns);
        }
        pthread_mutex_lock(&state->calls);
        ncclResult_t answer = state->library.async_error(native, &result);
        pthread_mutex_unlock(&state->calls);
        result = answer == ncclSuccess ? result : answer;
        bool due = state->failed || nd_clock_ns() - state->watched_ns >= WATCH_NS;
        if (result == ncclInProgress && due) {
            char where[160];
            nccl_describe(nc ? nc->comm : NULL, nc ? nc->entry : NULL, where, sizeof where);
            snprintf(w.where, sizeof w.where, "%s of %s", what, where);
            ND_TRY(attend(transport, &w, 0));
        }
    }
    if (state->called_ns) {
        pthread_mutex_lock(&state->ring);
        state->called_ns = 0;
        pthread_mutex_unlock(&state->ring);
    }
    return result == ncclSuccess ? ND_OK : call_failed(transport, nc, native, result, what);
}

nd_status nccl_settle(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                      ncclResult_t first, const char *what)
{
    return settle(transport, nc, native, first, what, false);
}

nd_status nccl_settle_end(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                          ncclResult_t first)
{
    return settle(transport, nc, native, first, "ncclCommFinalize", true);
}
