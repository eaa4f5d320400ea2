// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/p2p.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "runtime/base/clock.h"
#include "runtime/comm/backend.h"

static const double SLICE_SECONDS = 0.1; /* the longest sleep without a look at the peers */

static int request_state(const nd_p2p_request *request)
{
    return atomic_load_explicit(&request->state, memory_order_acquire);
}

/*
 * Faults of a waiting operation. Where ranks are missing, a peer that has not sent its own
 * contribution is named before a peer that only owes a result, because the second may itself wait
 * for the first.
 */

enum { MISSING_SHOWN = 6 };

static bool is_open(const nd_p2p_request *request)
{
    int state = request_state(request);
    return state == ND_REQUEST_POSTED || state == ND_REQUEST_FAILED;
}

/* World ranks of the first lane that has open requests, each once; returns how many there are in
 * all. */
static int missing_ranks(const nd_p2p_op *op, int ranks[MISSING_SHOWN])
{
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        int found = 0;
        for (int i = 0; i < ND_P2P_WINDOW; i++) {
            const nd_p2p_request *request = &op->lanes[lane].requests[i];
            bool known = false;
            for (int k = 0; k < found && k < MISSING_SHOWN; k++) {
                known = known || ranks[k] == request->peer;
            }
            if (is_open(request) && !known) {
                if (found < MISSING_SHOWN) {
                    ranks[found] = request->peer;
                }
                found++;
            }
        }
        if (found > 0) {
            return found;
        }
    }
    return 0;
}

static nd_status report_hang(const nd_p2p_op *op, double seconds)
{
    nd_transport *transport = op->comm->transport;
    int ranks[MISSING_SHOWN];
    int count = missing_ranks(op, ranks);
    nd_report who = {0}, what = {0};
    for (int i = 0; i < count && i < MISSING_SHOWN; i++) {
        char process[128] = "";
        nd_report_add(&who, "%s%d", i ? ", " : "", ranks[i]);
        nd_p2p_of(op->comm)->p2p->describe(transport, ranks[i], process, sizeof process);
        nd_report_rank(transport, ranks[i], "has not entered it", process, &what);
    }
    if (count > MISSING_SHOWN) {
        nd_report_add(&who, " and %d more", count - MISSING_SHOWN);
    }
    return nd_fail(
        ND_ERR_HANG,
        "rank %d waited %.1f s in %s of %s, operation %lld (%lld x %s), for rank%s %s%s; "
        "the deadline is launch.comm_timeout_seconds",
        transport->rank, seconds, nd_comm_op_name(op->kind), nd_group_name(op->comm->kind),
        (long long)op->sequence, (long long)op->args.count, nd_dtype_name(op->args.dtype),
        count == 1 ? "" : "s", count ? who.text : "(none)", what.text);
}

static nd_status check_gone(const nd_p2p_op *op)
{
    nd_transport *transport = op->comm->transport;
    const nd_p2p *p2p = nd_p2p_of(op->comm)->p2p;
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        for (int i = 0; i < ND_P2P_WINDOW; i++) {
            const nd_p2p_request *request = &op->lanes[lane].requests[i];
            if (is_open(request) && p2p->gone(transport, request->peer)) {
                return nd_fail(ND_ERR_IO,
                               "rank %d has ended while rank %d waited for it in %s of %s, "
                               "operation %lld",
                               request->peer, transport->rank, nd_comm_op_name(op->kind),
                               nd_group_name(op->comm->kind), (long long)op->sequence);
            }
        }
    }
    return ND_OK;
}

/* The operation of this communicator with the low bits of `sequence`, complete or not; NULL when
 * forgotten. */
static const nd_p2p_op *recent_op(const nd_p2p_op *op, uint64_t sequence)
{
    const nd_p2p_comm *pc = op->comm->native;
    const uint64_t mask = (1u << ND_TAG_SEQUENCE_BITS) - 1;
    for (int i = 0; i < ND_P2P_PENDING; i++) {
        const nd_p2p_op *other = &pc->ops[i];
        if (other->plan && ((uint64_t)other->sequence & mask) == sequence) {
            return other;
        }
    }
    return NULL;
}

static nd_status report_mismatch(const nd_p2p_op *mine, int rank, nd_tag found, size_t bytes)
{
    unsigned kind = (unsigned)ND_TAG_FIELD(found, OP), dtype = (unsigned)ND_TAG_FIELD(found, DTYPE);
    const char *op_name = kind < ND_COMM_OP_COUNT ? nd_comm_op_name((nd_comm_op)kind) : "unknown";
    const char *dtype_name = dtype < ND_DTYPE_COUNT ? nd_dtype_name((nd_dtype)dtype) : "unknown";
    return nd_fail(ND_ERR_INTERNAL,
                   "the members of %s called different operations as number %lld: rank %d called "
                   "%s of %lld x %s, rank %d called %s of %s with another count, reduction or root "
                   "(a message of %zu bytes arrived)",
                   nd_group_name(mine->comm->kind), (long long)mine->sequence,
                   mine->comm->transport->rank, nd_comm_op_name(mine->kind),
                   (long long)mine->args.count, nd_dtype_name(mine->args.dtype), rank, op_name,
                   dtype_name, bytes);
}

static nd_status check_mismatch(const nd_p2p_op *op)
{
    nd_transport *transport = op->comm->transport;
    const nd_p2p *p2p = nd_p2p_of(op->comm)->p2p;
    const nd_tag hash_bits = ((UINT64_C(1) << ND_TAG_SEQUENCE_AT) - 1) & ~UINT64_C(1);
    const nd_tag whole = ~UINT64_C(0) << ND_TAG_RANK_AT; /* communicator and sender */
    for (int k = 1; k < op->comm->size; k++) {
        int rank = op->comm->ranks[(op->comm->index + k) % op->comm->size];
        nd_tag wanted = (nd_tag)op->comm->id << ND_TAG_COMM_AT | (nd_tag)rank << ND_TAG_RANK_AT;
        nd_tag found;
        size_t bytes;
        if (!p2p->peek(transport, wanted, whole, &found, &bytes)) {
            continue;
        }
        const nd_p2p_op *mine = recent_op(op, ND_TAG_FIELD(found, SEQUENCE));
        if (mine && ((mine->tag ^ found) & hash_bits) != 0) {
            return report_mismatch(mine, rank, found, bytes);
        }
    }
    return ND_OK;
}

static void abandon_op(nd_comm *comm, nd_p2p_op *op)
{
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        for (int i = 0; i < ND_P2P_WINDOW; i++) {
            nd_p2p_request *request = &op->lanes[lane].requests[i];
            if (request_state(request) != ND_REQUEST_IDLE) {
                nd_p2p_of(comm)->p2p->cancel(comm->transport, request);
                atomic_store(&request->state, ND_REQUEST_IDLE);
            }
        }
    }
    op->active = false;
}

/* Cancels every request of every operation. */
static void abandon(nd_p2p_transport *native)
{
    for (nd_p2p_comm *pc = native->comms; pc; pc = pc->next) {
        for (int i = 0; i < ND_P2P_PENDING; i++) {
            if (pc->ops[i].active) {
                abandon_op(pc->comm, &pc->ops[i]);
            }
        }
        pc->active = 0;
    }
    native->active = 0;
}

/* Keeps the thread's error as the fault of the transport. */
static nd_status raise_failure(nd_p2p_transport *native, nd_status status)
{
    if (native->failed == ND_OK) {
        native->failed = status;
        snprintf(native->message, sizeof native->message, "%s", nd_error_last()->message);
        abandon(native);
    }
    return nd_fail(native->failed, "%s", native->message);
}

/* Posting. */

static nd_status post(nd_p2p_op *op, int lane, nd_p2p_request *request)
{
    nd_comm *comm = op->comm;
    const nd_p2p *p2p = nd_p2p_of(comm)->p2p;
    bool sends = lane == ND_LANE_SEND || lane == ND_LANE_SEND_RESULT;
    bool result = lane == ND_LANE_RECV_RESULT || lane == ND_LANE_SEND_RESULT;
    nd_message message;
    request->message = op->lanes[lane].next;
    op->plan->message(op, lane, request->message, &message);
    request->peer = comm->ranks[message.member];
    request->buffer = message.buffer;
    request->bytes = message.bytes;
    nd_tag sender = (nd_tag)(sends ? comm->transport->rank : request->peer);
    nd_tag sender_mask = ((UINT64_C(1) << ND_TAG_RANK_BITS) - 1) << ND_TAG_RANK_AT;
    request->tag = (op->tag & ~sender_mask) | sender << ND_TAG_RANK_AT | (result ? 1 : 0);
    atomic_store_explicit(&request->state, ND_REQUEST_POSTED, memory_order_relaxed);
    op->lanes[lane].next++;
    if (sends) {
        comm->stats.bytes_sent[op->kind] += (int64_t)request->bytes;
        return p2p->send(comm->transport, request);
    }
    return p2p->recv(comm->transport, request);
}

/* Says why a message of the operation has failed. That a process has ended may be seen a moment
 * after its messages fail, so that is waited for, if only for a second. */
static nd_status explain_failed(const nd_p2p_op *op, const nd_p2p_request *request)
{
    enum { SLEEPS = 1 << 20 }; /* as if this rank had been idle for long */
    nd_transport *transport = op->comm->transport;
    const nd_p2p *p2p = nd_p2p_of(op->comm)->p2p;
    const double until = nd_clock_seconds() + 1;
    ND_TRY(check_mismatch(op));
    ND_TRY(check_gone(op));
    while (nd_clock_seconds() < until) {
        ND_TRY(p2p->progress(transport));
        ND_TRY(p2p->wait(transport, SLEEPS, 0.05));
        ND_TRY(check_gone(op));
    }
    return nd_fail(ND_ERR_IO,
                   "a message of %zu bytes with rank %d failed in %s of %s, operation %lld",
                   request->bytes, request->peer, nd_comm_op_name(op->kind),
                   nd_group_name(op->comm->kind), (long long)op->sequence);
}

/* Collects what is done in a lane and posts what may follow. */
static nd_status advance_lane(nd_p2p_op *op, int lane, bool *moved)
{
    nd_lane *l = &op->lanes[lane];
    if (l->done == l->total) {
        return ND_OK;
    }
    for (int i = 0; i < ND_P2P_WINDOW; i++) {
        nd_p2p_request *request = &l->requests[i];
        int state = request_state(request);
        if (state == ND_REQUEST_FAILED) {
            return explain_failed(op, request);
        }
        if (state == ND_REQUEST_DONE) {
            atomic_store_explicit(&request->state, ND_REQUEST_IDLE, memory_order_relaxed);
            l->done++;
            *moved = true;
            if (op->plan->arrived) {
                op->plan->arrived(op, lane, request->message);
            }
            state = ND_REQUEST_IDLE;
        }
        if (state == ND_REQUEST_IDLE && l->next < l->total &&
            (!op->plan->ready || op->plan->ready(op, lane, l->next))) {
            *moved = true;
            ND_TRY(post(op, lane, request));
        }
    }
    return ND_OK;
}

static nd_status advance_op(nd_p2p_transport *native, nd_p2p_comm *pc, nd_p2p_op *op, bool *moved)
{
    for (int i = 0; !op->begun && op->plan->needs_staging && i < ND_P2P_PENDING; i++) {
        const nd_p2p_op *other = &pc->ops[i];
        if (other->active && other->plan->needs_staging && other->sequence < op->sequence) {
            return ND_OK; /* it has the staging */
        }
    }
    if (!op->begun) {
        op->plan->begin(op);
        op->begun = true;
    }
    bool done = true;
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        ND_TRY(advance_lane(op, lane, moved));
        done = done && op->lanes[lane].done == op->lanes[lane].total;
    }
    if (done) {
        op->active = false;
        pc->active--;
        native->active--;
        *moved = true;
    }
    return ND_OK;
}

static nd_status advance_all(nd_transport *transport, bool *moved)
{
    nd_p2p_transport *native = transport->native;
    *moved = false;
    ND_TRY(native->p2p->progress(transport));
    for (nd_p2p_comm *pc = native->comms; pc && native->active > 0; pc = pc->next) {
        /* Oldest first within a communicator: a later operation may wait for the staging of an
         * earlier one. */
        for (int i = 1; pc->active > 0 && i <= ND_P2P_PENDING; i++) {
            nd_p2p_op *op = &pc->ops[(pc->comm->sequence + i) % ND_P2P_PENDING];
            if (op->active) {
                ND_TRY(advance_op(native, pc, op, moved));
            }
        }
    }
    return ND_OK;
}

/* Waiting. */

static void publish_wait(const nd_p2p_op *op, int64_t since_ns)
{
    nd_progress_slot *slot = op->comm->transport->progress;
    atomic_store_explicit(&slot->group, (int32_t)op->comm->kind, memory_order_relaxed);
    atomic_store_explicit(&slot->op, (int32_t)op->kind, memory_order_relaxed);
    atomic_store_explicit(&slot->sequence, op->sequence, memory_order_relaxed);
    atomic_store_explicit(&slot->since_ns, since_ns, memory_order_relaxed);
    atomic_store_explicit(&slot->heartbeat_ns, nd_clock_ns(), memory_order_relaxed);
}

/* An operation that has not begun waits for an earlier one of its communicator: that is the one to
 * report. */
static const nd_p2p_op *blocking_op(const nd_p2p_op *op)
{
    const nd_p2p_comm *pc = op->comm->native;
    const nd_p2p_op *first = op;
    for (int i = 0; !op->begun && i < ND_P2P_PENDING; i++) {
        if (pc->ops[i].active && pc->ops[i].begun && pc->ops[i].sequence < first->sequence) {
            first = &pc->ops[i];
        }
    }
    return first;
}

/* Nothing arrived for a while: is there a reason? */
static nd_status look_around(const nd_p2p_op *op, double started)
{
    const nd_transport *transport = op->comm->transport;
    double now = nd_clock_seconds();
    const nd_p2p_op *blocker = blocking_op(op);
    atomic_store_explicit(&transport->progress->heartbeat_ns, nd_clock_ns(), memory_order_relaxed);
    ND_TRY(check_mismatch(
        blocker)); /* checked first: a peer that called another operation ends soon */
    ND_TRY(check_gone(blocker));
    if (now - started >= transport->timeout_seconds) {
        return report_hang(blocker, now - started);
    }
    return ND_OK;
}

static nd_status wait_until_done(nd_p2p_op *op)
{
    nd_transport *transport = op->comm->transport;
    nd_p2p_transport *native = transport->native;
    double started = nd_clock_seconds();
    double looked = started;
    for (int idle = 0; op->active; idle++) {
        bool moved;
        ND_TRY(advance_all(transport, &moved));
        if (moved) {
            idle = -1;
            continue;
        }
        double now = nd_clock_seconds();
        double left = started + transport->timeout_seconds - now;
        if (now - looked >= SLICE_SECONDS / 2 || left <= 0) {
            ND_TRY(look_around(op, started));
            looked = now;
        }
        double seconds = left < SLICE_SECONDS ? left : SLICE_SECONDS;
        ND_TRY(native->p2p->wait(transport, idle, seconds > 0 ? seconds : 0));
    }
    return ND_OK;
}

static nd_status wait_op(nd_p2p_op *op)
{
    nd_p2p_transport *native = nd_p2p_of(op->comm);
    if (native->failed != ND_OK) {
        return raise_failure(native, native->failed);
    }
    if (!op->active) {
        return ND_OK;
    }
    publish_wait(op, nd_clock_ns());
    nd_status status = wait_until_done(op);
    if (status != ND_OK) { /* the slot keeps showing where this rank was stuck */
        return raise_failure(native, status);
    }
    publish_wait(op, 0);
    return ND_OK;
}

/* nd_event.finish */
static nd_status finish_event(void *operation)
{
    nd_p2p_op *op = operation;
    op->event = NULL;
    return wait_op(op);
}

static nd_tag op_tag(const nd_p2p_op *op)
{
    uint64_t h = (uint64_t)op->args.count * UINT64_C(0x9e3779b97f4a7c15);
    h = (h ^ (uint64_t)op->args.redop << 32 ^ (uint64_t)op->args.root) *
        UINT64_C(0xd6e8feb86659fd93);
    h >>= 64 - ND_TAG_HASH_BITS;
    uint64_t sequence = (uint64_t)op->sequence & ((1u << ND_TAG_SEQUENCE_BITS) - 1);
    return (nd_tag)op->comm->id << ND_TAG_COMM_AT |
           (nd_tag)op->comm->transport->rank << ND_TAG_RANK_AT | sequence << ND_TAG_SEQUENCE_AT |
           (nd_tag)op->kind << ND_TAG_OP_AT | (nd_tag)op->args.dtype << ND_TAG_DTYPE_AT |
           h << ND_TAG_HASH_AT;
}

/*
 * The plan of an operation. The choice depends only on what all members know (count, type, size),
 * so that all of them choose alike. Bounds measured with nd_bench_comm, eight ranks on two cores.
 */
enum {
    DIRECT_MAX = 8,             /* members; with more, short operations need log2 n steps */
    SHORT_REDUCE_BYTES = 32768, /* all-reduce: total received when everything is gathered at once */
    SHORT_GATHER_BYTES = 4096,  /* all-gather of many: one block */
};

static const nd_p2p_plan *plan_of(const nd_p2p_comm *pc, nd_comm_op kind, size_t block)
{
    const size_t gathered = block * (size_t)pc->comm->size;
    const bool few = pc->comm->size <= DIRECT_MAX, fits = gathered <= pc->staging_bytes;
    switch (kind) {
    case ND_COMM_ALL_REDUCE:
        if (gathered - block <= SHORT_REDUCE_BYTES && fits) {
            return few ? &nd_plan_gather : &nd_plan_bruck;
        }
        return &nd_plan_reduce;
    case ND_COMM_REDUCE_SCATTER:
        return &nd_plan_reduce;
    case ND_COMM_ALL_GATHER:
        return !few && fits && block <= SHORT_GATHER_BYTES ? &nd_plan_bruck : &nd_plan_direct;
    case ND_COMM_BROADCAST:
        return &nd_plan_tree;
    case ND_COMM_BARRIER:
        return few ? &nd_plan_direct : &nd_plan_bruck;
    default:
        return &nd_plan_direct;
    }
}

static nd_status p2p_run(nd_comm *comm, nd_stream *stream, nd_comm_op kind,
                         const nd_comm_args *args, nd_event *done)
{
    nd_p2p_comm *pc = comm->native;
    nd_p2p_transport *native = nd_p2p_of(comm);
    nd_p2p_op *op = &pc->ops[comm->sequence % ND_P2P_PENDING];
    ND_TRY(wait_op(op)); /* the one that had this place */
    if (op->event && op->event->operation == op) {
        /* Where that was not waited for, it must not finish the new one. */
        op->event->finish = NULL;
    }
    op->kind = kind;
    op->args = *args;
    op->element = nd_dtype_size(args->dtype);
    op->block = (size_t)args->count * op->element;
    op->plan = plan_of(pc, kind, op->block);
    op->sequence = comm->sequence;
    op->tag = op_tag(op);
    op->begun = false;
    op->reduced[0] = op->reduced[1] = 0;
    op->steps_done = 0;
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        op->lanes[lane].total = op->lanes[lane].next = op->lanes[lane].done = 0;
    }
    op->active = true;
    pc->active++;
    native->active++;
    op->event = done;
    bool moved;
    nd_status status = advance_all(comm->transport, &moved); /* the first messages leave now */
    if (status != ND_OK) {
        return raise_failure(native, status);
    }
    if (!done) {
        return wait_op(op);
    }
    done->finish = finish_event;
    done->operation = op;
    return ND_OK;
}

/* Communicators. */

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
        abandon(native);
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
    const nd_comm_args nothing = {.dtype = ND_DTYPE_U8};
    nd_p2p_transport *native = transport->native;
    nd_p2p_comm *pc = NULL;
    nd_status status;
    ND_TRY(ND_ALLOC(1, &pc));
    comm->native = pc;
    pc->comm = comm;
    pc->next = native->comms;
    native->comms = pc;
    for (int i = 0; i < ND_P2P_PENDING; i++) {
        pc->ops[i].comm = comm;
    }
    ND_TRY_OUT(ND_ALLOC(comm->size, &pc->sources));
    pc->staging_bytes =
        transport->staging_bytes > 0 ? transport->staging_bytes : nd_comm_staging_bytes(comm->size);
    /* Untouched pages cost nothing: only communicators that reduce use theirs. */
    pc->staging =
        mmap(NULL, pc->staging_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pc->staging == MAP_FAILED) {
        pc->staging = NULL;
        status = nd_fail_memory("the staging buffer of a group (%zu bytes)", pc->staging_bytes);
        goto out;
    }
    status = ND_OK;
    for (int k = 1; status == ND_OK && k < comm->size && comm->size <= DIRECT_MAX * 2; k++) {
        status = native->p2p->connect(transport, comm->ranks[(comm->index + k) % comm->size]);
    }
    status = status == ND_OK ? p2p_run(comm, NULL, ND_COMM_BARRIER, &nothing, NULL) : status;
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

static void p2p_close(nd_transport *transport)
{
    nd_p2p_transport *native = transport->native;
    ND_ASSERT(native->comms == NULL); /* communicators are destroyed before their transport */
    native->p2p->close(transport, native->failed != ND_OK);
    free(native->state);
}

nd_status nd_p2p_transport_create(const nd_p2p *p2p, const nd_transport_options *options,
                                  size_t state_bytes, nd_transport **out)
{
    static const nd_comm_backend backend = {.name = "ucx",
                                            .create = p2p_create,
                                            .destroy = p2p_destroy,
                                            .run = p2p_run,
                                            .close = p2p_close};
    void *state;
    ND_TRY(nd_alloc(state_bytes, 1, &state));
    nd_status status = nd_transport_create(&backend, options, sizeof(nd_p2p_transport), out);
    if (status != ND_OK) {
        free(state);
        return status;
    }
    *(nd_p2p_transport *)(*out)->native = (nd_p2p_transport){.p2p = p2p, .state = state};
    return ND_OK;
}
