// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_UCX_UCX_H
#define ND_COMM_UCX_UCX_H
/*
 * Messages over UCX within a host, tagged, of one UCP worker per rank, and over net/ between hosts.
 * Endpoints are made when a peer is first needed.
 *
 * UCX does not notice the end of a peer that shares memory with us, so ranks of this host are also
 * watched through a pidfd, which joins the descriptors that a sleeping rank polls.
 */
#include <poll.h>
#include <ucp/api/ucp.h>
#include <ucs/debug/log_def.h>

#include "runtime/comm/net/net.h"
#include "runtime/comm/p2p.h"

/* Where a rank runs. */
typedef struct ucx_place {
    uint64_t host; /* equal where ranks share memory and pids mean the same */
    int32_t pid;
    int32_t unused;
} ucx_place;

typedef struct ucx_peer {
    ucp_ep_h endpoint; /* NULL until needed */
    ucx_place place;
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
    nd_net *net;           /* to the ranks of other hosts; NULL: there are none */
    struct pollfd *polled; /* [2 + size]: the worker, the net, then the pidfds */
    int *polled_rank;      /* [2 + size] */
    int polled_count;
    bool broken; /* UCX has aborted: it must not be called again */
    nd_p2p_request farewell[2];
} ucx_state;

/* The functions of libucp that are used. It is opened with the first transport (ucx_library.c), for
 * two reasons: commands without other workers need none of it, and it reads a file of the working
 * directory when it is loaded. Only --version opens it without a transport. */
#define ND_UCX_FUNCTIONS(X)                                                                        \
    X(ucp_get_version_string)                                                                      \
    X(ucp_config_read)                                                                             \
    X(ucp_config_modify)                                                                           \
    X(ucp_config_release)                                                                          \
    X(ucp_init_version)                                                                            \
    X(ucp_cleanup)                                                                                 \
    X(ucp_worker_create)                                                                           \
    X(ucp_worker_destroy)                                                                          \
    X(ucp_worker_get_efd)                                                                          \
    X(ucp_worker_get_address)                                                                      \
    X(ucp_worker_release_address)                                                                  \
    X(ucp_worker_progress)                                                                         \
    X(ucp_worker_arm)                                                                              \
    X(ucp_ep_create)                                                                               \
    X(ucp_tag_send_nbx)                                                                            \
    X(ucp_tag_send_sync_nbx)                                                                       \
    X(ucp_tag_recv_nbx)                                                                            \
    X(ucp_tag_probe_nb)                                                                            \
    X(ucp_request_cancel)                                                                          \
    X(ucp_request_free)                                                                            \
    X(ucs_log_push_handler)                                                                        \
    X(ucs_status_string)

typedef struct ucx_library {
#define ND_UCX_MEMBER(name) __typeof__(&name) name;
    ND_UCX_FUNCTIONS(ND_UCX_MEMBER)
#undef ND_UCX_MEMBER
} ucx_library;
extern ucx_library nd_ucx;
/* Repeated calls are cheap. `warn`: of variables that the program overrides. */
nd_status nd_ucx_load(bool warn);

#define ND_UCX(call) nd_ucx_check(nd_ucx.call, #call) /* of a function of the library */
nd_status nd_ucx_check(ucs_status_t code, const char *call);

/* ucx_p2p.c */
extern const nd_p2p nd_ucx_p2p;

static inline bool ucx_is_remote(const ucx_state *state, int rank)
{
    return state->peers[rank].place.host != state->host;
}

static inline ucx_state *ucx_state_of(const nd_transport *transport)
{
    return ((nd_p2p_transport *)transport->native)->state;
}

#endif
