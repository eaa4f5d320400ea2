// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_UCX_UCX_H
#define ND_COMM_UCX_UCX_H
/*
 * Messages over UCX: tagged, of one UCP worker per rank. Endpoints are made when a peer is first
 * needed.
 *
 * UCX does not notice the end of a peer that shares memory with us, so ranks of this host are also
 * watched through a pidfd, which joins the descriptors that a sleeping rank polls.
 */
#include <poll.h>
#include <ucp/api/ucp.h>

#include "runtime/comm/p2p.h"

/* What a rank publishes about itself besides its UCX address. */
typedef struct ucx_card {
    uint64_t host; /* hash of boot id and pid namespace: equal where pids mean the same */
    int32_t pid;
    uint32_t address_bytes;
} ucx_card;

typedef struct ucx_peer {
    ucp_ep_h endpoint; /* NULL until needed */
    ucx_card card;
    int pidfd; /* -1: another host, or not connected */
    bool gone;
} ucx_peer;

typedef struct ucx_state {
    ucp_context_h context;
    ucp_worker_h worker;
    int rank, size;
    uint64_t host;
    char *addresses; /* [size] of address_stride bytes */
    size_t address_stride;
    ucx_peer *peers;       /* [size] */
    struct pollfd *polled; /* [1 + size]: the worker, then the pidfds */
    int *polled_rank;      /* [1 + size] */
    int polled_count;
    nd_p2p_request farewell[2];
} ucx_state;

#define ND_UCX(call) nd_ucx_check((call), #call)
nd_status nd_ucx_check(ucs_status_t code, const char *call);

/* ucx_p2p.c */
extern const nd_p2p nd_ucx_p2p;

static inline ucx_state *ucx_state_of(const nd_transport *transport)
{
    return ((nd_p2p_transport *)transport->native)->state;
}

#endif
