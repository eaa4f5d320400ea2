// SPDX-License-Identifier: Apache-2.0
#include "runtime/comm/p2p.h"

#include "runtime/comm/backend.h"

/*
 * Which ranks are missing. A peer that has not sent its own contribution is named before a peer
 * that only owes a result, because the second may itself wait for the first.
 */
static bool is_open(const nd_p2p_request *request)
{
    int state = atomic_load_explicit(&request->state, memory_order_acquire);
    return state == ND_REQUEST_POSTED || state == ND_REQUEST_FAILED;
}

enum { MISSING_SHOWN = 6 };

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

static void describe_rank(const nd_p2p_op *op, int rank, nd_report *to)
{
    const nd_transport *transport = op->comm->transport;
    char process[128] = "";
    nd_p2p_transport *native = transport->native;
    native->p2p->describe((nd_transport *)transport, rank, process, sizeof process);
    nd_report_rank(transport, rank, "has not entered it", process, to);
}

nd_status nd_p2p_report_hang(const nd_p2p_op *op, double seconds)
{
    int ranks[MISSING_SHOWN];
    int count = missing_ranks(op, ranks);
    nd_report who = {0}, what = {0};
    for (int i = 0; i < count && i < MISSING_SHOWN; i++) {
        nd_report_add(&who, "%s%d", i ? ", " : "", ranks[i]);
        describe_rank(op, ranks[i], &what);
    }
    if (count > MISSING_SHOWN) {
        nd_report_add(&who, " and %d more", count - MISSING_SHOWN);
    }
    return nd_fail(
        ND_ERR_HANG,
        "rank %d waited %.1f s in %s of %s, operation %lld (%lld x %s), for rank%s %s%s; "
        "the deadline is launch.comm_timeout_seconds",
        op->comm->transport->rank, seconds, nd_comm_op_name(op->kind),
        nd_group_name(op->comm->kind), (long long)op->sequence, (long long)op->count,
        nd_dtype_name(op->dtype), count == 1 ? "" : "s", count ? who.text : "(none)", what.text);
}

nd_status nd_p2p_check_gone(const nd_p2p_op *op)
{
    const nd_transport *transport = op->comm->transport;
    nd_p2p_transport *native = transport->native;
    for (int lane = 0; lane < ND_LANE_COUNT; lane++) {
        for (int i = 0; i < ND_P2P_WINDOW; i++) {
            const nd_p2p_request *request = &op->lanes[lane].requests[i];
            if (is_open(request) && native->p2p->gone((nd_transport *)transport, request->peer)) {
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
                   mine->comm->transport->rank, nd_comm_op_name(mine->kind), (long long)mine->count,
                   nd_dtype_name(mine->dtype), rank, op_name, dtype_name, bytes);
}

nd_status nd_p2p_check_mismatch(const nd_p2p_op *op)
{
    nd_transport *transport = op->comm->transport;
    nd_p2p_transport *native = transport->native;
    const nd_tag hash_bits = ((UINT64_C(1) << ND_TAG_SEQUENCE_AT) - 1) & ~UINT64_C(1);
    const nd_tag whole = ~UINT64_C(0) << ND_TAG_RANK_AT; /* communicator and sender */
    for (int k = 1; k < op->comm->size; k++) {
        int rank = op->comm->ranks[(op->comm->index + k) % op->comm->size];
        nd_tag wanted = (nd_tag)op->comm->id << ND_TAG_COMM_AT | (nd_tag)rank << ND_TAG_RANK_AT;
        nd_tag found;
        size_t bytes;
        if (!native->p2p->peek(transport, wanted, whole, &found, &bytes)) {
            continue;
        }
        const nd_p2p_op *mine = recent_op(op, ND_TAG_FIELD(found, SEQUENCE));
        if (mine && ((mine->tag ^ found) & hash_bits) != 0) {
            return report_mismatch(mine, rank, found, bytes);
        }
    }
    return ND_OK;
}
