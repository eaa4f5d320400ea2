// SPDX-License-Identifier: Apache-2.0
/*
 * Faults: how they are seen, told and ended.
 *
 * The driving thread looks for them while it waits. Another one looks all the time, since the
 * driving thread may be inside NCCL, or inside CUDA, which accepts no more work while a collective
 * does not end. It calls cudaSetDevice and cudaEventQuery, which any thread may call. If the driver
 * makes the query wait for the driving thread, a limit on the call ends the process.
 */
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/base/clock.h"
#include "runtime/base/log.h"
#include "runtime/comm/nccl/nccl.h"
#include "runtime/device/cuda.h"

enum { WATCH_NS = 20000000, OTHER_THREADS_END_SECONDS = 60, SHOWN = 6 };

/* The limit for work of the GPU while no operation runs. */
static const double COMPUTE_SECONDS = 3600;

/* All ranks of a job that ends in good order end within this time. */
static const int64_t COMMON_END_NS = 300000000;

static const double INTERVAL_SECONDS = 0.1;
static const int64_t ABSENT_NS =
    2000000000; /* without a look of the driving thread: it counts as stuck */

/* Operations that are enqueued and have not ended. */

/* Removes the operations that have ended. An error of the device counts as pending: the next call
 * of the driving thread reports it with a better sentence. */
static void drop_ended(nccl_state *state, nccl_ring *ring)
{
    int64_t before = ring->tail;
    while (ring->tail < ring->head &&
           cudaEventQuery(ring->entries[ring->tail % NCCL_RING].end) == cudaSuccess) {
        ring->tail++;
        ring->begun_ns = 0;
    }
    if (ring->tail > before) {
        state->progress_ns = nd_clock_ns();
        state->ended = ring->entries[(ring->tail - 1) % NCCL_RING];
    }
}

/* The operation for which this rank waits, as a look at the rings finds it. */
typedef struct waiting {
    const nd_comm *comm; /* NULL: all ranks */
    nccl_entry entry;
    char where[200];
    bool pending;    /* otherwise for nothing of its peers */
    bool ends;       /* a communicator, in good order: peers may have ended theirs, and be gone */
    int64_t from_ns; /* 0: it has not begun */
} waiting;

/* Removes the operations that have ended from the rings, and finds the one that has run longest, or
 * otherwise one that is pending. Under `ring`. */
static void advance_rings(nccl_state *state, waiting *oldest)
{
    int64_t now = nd_clock_ns();
    *oldest = (waiting){0};
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        nccl_ring *ring = &nc->ring;
        drop_ended(state, ring);
        if (ring->tail == ring->head) {
            continue;
        }
        const nccl_entry *first = &ring->entries[ring->tail % NCCL_RING];
        if (!ring->begun_ns && cudaEventQuery(first->begin) == cudaSuccess) {
            ring->begun_ns = now;
        }
        if (!oldest->pending ||
            (ring->begun_ns && (!oldest->from_ns || ring->begun_ns < oldest->from_ns))) {
            *oldest = (waiting){
                .comm = nc->comm, .entry = *first, .pending = true, .from_ns = ring->begun_ns};
        }
    }
}

/* Sentences, under `ring`: about an operation that does not end and the ranks that it waits for. */

/* `comm` is NULL: all ranks are. */
static bool is_member(const nd_comm *comm, int rank)
{
    for (int i = 0; comm && i < comm->size; i++) {
        if (comm->ranks[i] == rank) {
            return true;
        }
    }
    return !comm;
}

static void describe(const nd_comm *comm, const nccl_entry *entry, char *text, size_t size)
{
    if (!comm || !entry) {
        snprintf(text, size, "%s", comm ? nd_group_name(comm->kind) : "the world");
        return;
    }
    snprintf(text, size, "%s of %s, operation %lld (%lld x %s)", nd_comm_op_name(entry->op),
             nd_group_name(comm->kind), (long long)entry->sequence, (long long)entry->count,
             nd_dtype_name(entry->dtype));
}

/* Notes when that is first seen. */
static bool is_gone(nccl_peer *peer, int64_t now)
{
    struct pollfd ended = {.fd = peer->pidfd, .events = POLLIN};
    if (!peer->gone_ns && peer->pidfd >= 0 && poll(&ended, 1, 0) > 0) {
        peer->gone_ns = now;
    }
    return peer->gone_ns != 0;
}

typedef enum peer_is { IN_IT_TOO, ABSENT, NOT_RUNNING } peer_is;

/* A rank that waits in the same operation is not missing. */
static peer_is look_at(const nd_transport *transport, const nccl_entry *entry, int rank)
{
    nccl_peer *peer = &nccl_state_of(transport)->peers[rank];
    const nd_progress_slot *slot = nd_report_slot(transport, rank);
    char process[128];
    if (is_gone(peer, nd_clock_ns()) ||
        (peer->pid > 0 && nd_report_process(peer->pid, process, sizeof process))) {
        return NOT_RUNNING;
    }
    bool same = slot && entry && atomic_load(&slot->since_ns) > 0 &&
                atomic_load(&slot->group) == (int)entry->kind &&
                atomic_load(&slot->op) == (int)entry->op &&
                atomic_load(&slot->sequence) == entry->sequence;
    return same ? IN_IT_TOO : ABSENT;
}

static void describe_rank(const nd_transport *transport, int rank, nd_report *to)
{
    const nccl_peer *peer = &nccl_state_of(transport)->peers[rank];
    char process[128] = "";
    if (peer->pid > 0) {
        nd_report_process(peer->pid, process, sizeof process);
    }
    nd_report_rank(transport, rank, "waits in no operation", process, to);
}

/* Members of the group (all ranks where `comm` is NULL) that are in at least this state. */
static int list_members(const nd_transport *transport, const nd_comm *comm, const nccl_entry *entry,
                        peer_is least, nd_report *who, nd_report *what)
{
    int count = 0, size = comm ? comm->size : transport->size;
    for (int i = 0; i < size; i++) {
        int rank = comm ? comm->ranks[i] : i;
        if (rank == transport->rank || look_at(transport, entry, rank) < least) {
            continue;
        }
        if (count++ < SHOWN) {
            nd_report_add(who, "%s%d", count > 1 ? ", " : "", rank);
            describe_rank(transport, rank, what);
        }
    }
    if (count > SHOWN) {
        nd_report_add(who, " and %d more", count - SHOWN);
    }
    return count;
}

static nd_status report_hang(const nd_transport *transport, const nd_comm *comm,
                             const nccl_entry *entry, const char *where, double seconds)
{
    nd_report who = {0}, what = {0};
    int count = 0;
    for (int least = NOT_RUNNING; count == 0 && least >= IN_IT_TOO; least--) {
        count = list_members(transport, comm, entry, (peer_is)least, &who, &what);
    }
    int others = 0;
    for (int rank = 0; rank < transport->size && others < SHOWN; rank++) {
        if (rank != transport->rank && !is_member(comm, rank) &&
            look_at(transport, NULL, rank) == NOT_RUNNING) {
            describe_rank(transport, rank, &what);
            others++;
        }
    }
    return nd_fail(ND_ERR_HANG,
                   "rank %d waited %.1f s in %s, for rank%s %s%s; the deadline is "
                   "launch.comm_timeout_seconds",
                   transport->rank, seconds, where, count == 1 ? "" : "s", who.text, what.text);
}

/* The end. */

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

static void abort_one(void *context)
{
    nccl_comm *nc = context;
    nccl_state *state = nccl_state_of(nc->comm->transport);
    cudaSetDevice(state->device->ordinal);
    state->library.abort(nc->native);
    nc->native = NULL;
}

/* Each abort runs in a thread of its own: it frees memory, which may wait for a kernel of another
 * communicator that is not aborted yet. A group call does not help: the end of a group of
 * non-blocking communicators may return before the aborts do, and then nothing can be asked for
 * their state. */
static void abort_groups(nccl_state *state)
{
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        if (nc->native) {
            nc->aborter.runs_library = true;
            nd_thread_start(&nc->aborter, &state->watching, "a thread that ends operations",
                            abort_one, nc);
        }
    }
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        if (!nc->aborter.started && nc->native) {
            abort_one(nc);
        }
    }
    for (nccl_comm *nc = state->comms; nc; nc = nc->next) {
        nd_thread_join(&nc->aborter, INFINITY);
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
    ND_TRY(nccl_failure(state));
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
    return nccl_failure(state);
}

/* Under `calls`. */
static nd_status fail(const nd_transport *transport, ncclComm_t native, const char *where,
                      ncclResult_t result, const char *call)
{
    const nccl_state *state = nccl_state_of(transport);
    const char *more = state->library.last_error(native);
    bool memory = more && strstr(more, "out of memory");
    nd_report who = {0}, peers = {0}; /* of this host that have ended or are stopped */
    list_members(transport, NULL, NULL, NOT_RUNNING, &who, &peers);
    nd_status status = memory                                                   ? ND_ERR_RESOURCE
                       : result == ncclRemoteError || result == ncclSystemError ? ND_ERR_IO
                       : result == ncclInvalidUsage                             ? ND_ERR_CONFIG
                                                                                : ND_ERR_INTERNAL;
    return nd_fail(status, "rank %d: NCCL error %d (%s) from %s, %s%s%.300s%s%.599s",
                   transport->rank, (int)result, state->library.error_string(result), call, where,
                   more && more[0] ? ": " : "", more ? more : "",
                   memory
                       ? "; NCCL found no memory outside the plan: use recompute, a smaller micro "
                         "batch, a shorter sequence or more shards"
                       : "",
                   peers.text);
}

static nd_status call_failed(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                             ncclResult_t result, const char *call)
{
    nccl_state *state = nccl_state_of(transport);
    char where[160];
    describe(nc ? nc->comm : NULL, nc ? nc->entry : NULL, where, sizeof where);
    pthread_mutex_lock(&state->ring);
    pthread_mutex_lock(&state->calls);
    fail(transport, native, where, result, call);
    pthread_mutex_unlock(&state->calls);
    pthread_mutex_unlock(&state->ring);
    return nccl_give_up(transport);
}

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
            describe(nc->comm, NULL, group, sizeof group);
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

/* A peer that has ended has done its part of what is pending here, or never will. One that ended
 * later may have ended because of the first. */
static nd_status check_peers(const nd_transport *transport, const waiting *w)
{
    const nccl_state *state = nccl_state_of(transport);
    int64_t now = nd_clock_ns(), first = INT64_MAX;
    int gone = -1;
    for (int r = 0; r < transport->size && waits_for_peers(w); r++) {
        const nccl_peer *p = &state->peers[r];
        bool as_early = p->gone_ns == first && is_member(w->comm, r) && !is_member(w->comm, gone);
        if (p->missed_ns && now - p->missed_ns > COMMON_END_NS &&
            (p->gone_ns < first || as_early)) {
            gone = r;
            first = p->gone_ns;
        }
    }
    if (gone < 0) {
        return ND_OK;
    }
    return nd_fail(ND_ERR_IO, "rank %d has ended while rank %d waited%s in %s", gone,
                   transport->rank, is_member(w->comm, gone) ? " for it" : "", w->where);
}

static nd_status check_deadline(const nd_transport *transport, const waiting *w,
                                double host_seconds)
{
    const nccl_state *state = nccl_state_of(transport);
    int64_t since = w->from_ns > state->progress_ns ? w->from_ns : state->progress_ns;
    double seconds = (double)(nd_clock_ns() - since) * 1e-9;
    if (w->pending && w->from_ns && seconds > transport->timeout_seconds) {
        return report_hang(transport, w->comm, &w->entry, w->where, seconds);
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
static void show_progress(const nccl_state *state, nd_progress_slot *slot, const waiting *oldest)
{
    int64_t since = oldest->from_ns ? oldest->from_ns : state->called_ns;
    const nccl_entry *e = oldest->from_ns    ? &oldest->entry
                          : state->called_ns ? &state->called
                                             : &state->ended;
    int64_t bytes = e->count * (int64_t)nd_dtype_size(e->dtype);
    atomic_store_explicit(&slot->group, (int32_t)e->kind, memory_order_relaxed);
    atomic_store_explicit(&slot->op, (int32_t)e->op, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, e->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->bytes, bytes, memory_order_relaxed);
    atomic_store_explicit(&slot->since_ns, since, memory_order_relaxed);
}

/* Looks for faults of a pending operation, or of a call that is being settled, from any thread.
 * `asked` is false when another thread was inside NCCL, so that NCCL could not be asked for errors:
 * ND_OK then does not mean that there are none. */
static nd_status look(nd_transport *transport, const waiting *settling, double host_seconds,
                      bool *asked)
{
    nccl_state *state = nccl_state_of(transport);
    waiting found;
    pthread_mutex_lock(&state->ring);
    advance_rings(state, &found);
    if (settling) {
        state->called = settling->entry;
        state->called_ns = settling->from_ns;
    }
    show_progress(state, transport->progress, &found);
    if (found.pending) {
        describe(found.comm, &found.entry, found.where, sizeof found.where);
    }
    const waiting *w = found.from_ns || !settling ? &found : settling;
    /* At every look, also when this rank waits for nothing: otherwise the order in which peers
     * ended would be unknown later. */
    int64_t now = nd_clock_ns();
    for (int r = 0; r < transport->size; r++) {
        nccl_peer *peer = &state->peers[r];
        if (is_gone(peer, now) && waits_for_peers(w) && !peer->missed_ns) {
            peer->missed_ns = now;
        }
    }
    nd_status status = check_errors(transport, w, asked);
    status = status == ND_OK ? check_peers(transport, w) : status;
    status = status == ND_OK ? check_deadline(transport, w, host_seconds) : status;
    pthread_mutex_unlock(&state->ring);
    return status;
}

/* The driving thread looks. */
static nd_status attend(nd_transport *transport, const waiting *settling, double host_seconds)
{
    nccl_state *state = nccl_state_of(transport);
    int64_t now = nd_clock_ns();
    ND_TRY(nccl_failure(state));
    if (now - state->watched_ns < WATCH_NS) {
        return ND_OK;
    }
    state->watched_ns = now;
    atomic_store(&state->attended_ns, now);
    bool asked;
    nd_status status = look(transport, settling, host_seconds, &asked);
    return status == ND_OK ? ND_OK : nccl_give_up(transport);
}

/* nd_device.while_waiting */
static nd_status nccl_watch(void *context, double seconds)
{
    return attend(context, NULL, seconds);
}

nd_status nccl_claim_entry(nd_transport *transport, nccl_comm *nc)
{
    nccl_state *state = nccl_state_of(transport);
    nccl_ring *ring = &nc->ring;
    int64_t begin = nd_clock_ns();
    for (;;) {
        pthread_mutex_lock(&state->ring);
        if (ring->head - ring->tail == NCCL_RING) {
            drop_ended(state, ring);
        }
        bool room = ring->head - ring->tail < NCCL_RING;
        pthread_mutex_unlock(&state->ring);
        if (room) {
            nc->entry = &ring->entries[ring->head % NCCL_RING]; /* this thread moves the head */
            return ND_OK;
        }
        ND_TRY(attend(transport, NULL, (double)(nd_clock_ns() - begin) * 1e-9));
        nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}

/* A split is a call of all ranks, so the world is asked for its state. */
nd_status nccl_settle(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                      ncclResult_t first, const char *what, bool ends)
{
    nccl_state *state = nccl_state_of(transport);
    ncclResult_t result = first;
    const nccl_entry setup = {.kind = nc ? nc->comm->kind : ND_GROUP_WORLD, .op = ND_COMM_SETUP};
    waiting w = {.comm = nc && native != state->world ? nc->comm : NULL,
                 .entry = nc && nc->entry ? *nc->entry : setup,
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
            describe(nc ? nc->comm : NULL, nc ? nc->entry : NULL, where, sizeof where);
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

/* The other thread. */

static _Noreturn void end_process(nccl_state *state, nd_status status, double seconds)
{
    nd_fail_context(status,
                    "the host had not looked for %.1f s: it is inside CUDA or "
                    "NCCL, or busy",
                    seconds);
    const char *sentence = nd_error_last()->message;
    if (state->on_fault) {
        state->on_fault(state->fault_context, status, sentence, true);
    } else {
        nd_log_error("%s", sentence);
    }
    _exit((int)status); /* the driver ends what runs on the GPU; exit() could wait for it */
}

/* Sleeps; false when the thread is to end. */
static bool go_on(nccl_state *state, double seconds)
{
    const int64_t until = nd_clock_after(seconds);
    nd_monitor_lock(&state->watching);
    while (!state->watch.stop && nd_monitor_wait(&state->watching, until)) {
    }
    nd_monitor_unlock(&state->watching);
    return !state->watch.stop;
}

static void watch(void *argument)
{
    nd_transport *transport = argument;
    nccl_state *state = nccl_state_of(transport);
    double interval = transport->timeout_seconds / 5;
    int64_t noticed = 0; /* 0: no fault */
    nd_status fault = ND_OK;
    interval = interval < INTERVAL_SECONDS ? interval : INTERVAL_SECONDS;
    cudaSetDevice(state->device->ordinal);
    while (go_on(state, interval)) {
        if (atomic_load(&state->taken)) {
            continue;
        }
        int call = nd_call_limit_begin(state->limit, "a query of the GPU by its watch",
                                       10 + 2 * transport->timeout_seconds,
                                       "the driver does not answer", ND_ERR_HANG);
        bool asked = false;
        nd_status status = look(transport, NULL, 0, &asked);
        nd_call_limit_end(state->limit, call);
        int64_t now = nd_clock_ns(), attended = atomic_load(&state->attended_ns);
        if (status != ND_OK) {
            noticed = noticed ? noticed : now;
            fault = status; /* its sentence stays in the error record of this thread */
        } else if (asked) {
            noticed = 0;
        }
        if (noticed && now - noticed > ABSENT_NS && now - attended > ABSENT_NS &&
            !atomic_exchange(&state->taken, true)) {
            end_process(state, fault, (double)(now - attended) * 1e-9);
        }
    }
}

nd_status nccl_watch_start(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    state->device->while_waiting = nccl_watch;
    state->device->waiting_context = transport;
    return nd_thread_start(&state->watch, &state->watching, "the thread that watches NCCL", watch,
                           transport);
}

void nccl_watch_stop(nd_transport *transport)
{
    nccl_state *state = nccl_state_of(transport);
    nd_thread_join(&state->watch, INFINITY);
    if (state->device->waiting_context == transport) {
        state->device->while_waiting = NULL;
        state->device->waiting_context = NULL;
    }
}
