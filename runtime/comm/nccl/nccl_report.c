// SPDX-License-Identifier: Apache-2.0
/* Sentences about an operation that does not end and about the ranks that it waits for. */
#include <poll.h>
#include <stdio.h>

#include "runtime/base/clock.h"
#include "runtime/comm/backend.h"
#include "runtime/comm/nccl/nccl.h"

enum { SHOWN = 6 };

bool nccl_is_member(const nd_comm *comm, int rank)
{
    for (int i = 0; comm && i < comm->size; i++) {
        if (comm->ranks[i] == rank) {
            return true;
        }
    }
    return !comm;
}

void nccl_describe(const nd_comm *comm, const nccl_entry *entry, char *text, size_t size)
{
    if (!comm || !entry) {
        snprintf(text, size, "%s", comm ? nd_group_name(comm->kind) : "the world");
        return;
    }
    snprintf(text, size, "%s of %s, operation %lld (%lld x %s)", nd_comm_op_name(entry->op),
             nd_group_name(comm->kind), (long long)entry->sequence, (long long)entry->count,
             nd_dtype_name(entry->dtype));
}

bool nccl_peer_gone(nccl_peer *peer, int64_t now)
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
    if (nccl_peer_gone(peer, nd_clock_ns()) || (peer->pid > 0 && nd_report_is_stopped(peer->pid))) {
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

void nccl_report_peers(const nd_transport *transport, char *text, size_t size)
{
    nd_report who = {0}, what = {0};
    list_members(transport, NULL, NULL, NOT_RUNNING, &who, &what);
    snprintf(text, size, "%s", what.text);
}

nd_status nccl_report_hang(const nd_transport *transport, const nd_comm *comm,
                           const nccl_entry *entry, const char *where, double seconds)
{
    nd_report who = {0}, what = {0};
    int count = 0;
    for (int least = NOT_RUNNING; count == 0 && least >= IN_IT_TOO; least--) {
        count = list_members(transport, comm, entry, (peer_is)least, &who, &what);
    }
    int others = 0;
    for (int rank = 0; rank < transport->size && others < SHOWN; rank++) {
        if (rank != transport->rank && !nccl_is_member(comm, rank) &&
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
