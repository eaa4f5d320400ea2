// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_NCCL_STATE_H
#define ND_COMM_NCCL_STATE_H
/*
 * Communication over NCCL. One world communicator, and one split of it per group.
 *
 * An operation with an event runs on its communicator's own stream: that stream first waits for
 * what the caller's stream holds at that moment, so later work of the caller overlaps with it. An
 * operation without one runs on the caller's stream itself, after what the communicator has
 * pending; nothing waits on the host. A small all-reduce of host memory goes through a pinned
 * buffer and does wait.
 *
 * NCCL is non-blocking: every call that may take long is polled with the transport's deadline.
 * While the host waits for a stream, the device calls nccl_watch, which looks at every
 * communicator's asynchronous error, at the processes of this host's peers, and at the deadline. A
 * fault aborts all communicators: kernels that wait for a lost peer end.
 */
#include <cuda_runtime_api.h>
#include <nccl.h>

#include "runtime/comm/comm.h"

enum {
    NCCL_EVENTS = 16,       /* a communicator's ring of events: more than may be pending */
    NCCL_STAGE_BYTES = 4096 /* most host memory of one all-reduce */
};

typedef struct nccl_library {
    ncclResult_t (*version)(int *);
    ncclResult_t (*unique_id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*split)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*destroy)(ncclComm_t);
    ncclResult_t (*abort)(ncclComm_t);
    ncclResult_t (*all_reduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
                               ncclComm_t, cudaStream_t);
    ncclResult_t (*all_gather)(const void *, void *, size_t, ncclDataType_t, ncclComm_t,
                               cudaStream_t);
    ncclResult_t (*reduce_scatter)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t,
                                   ncclComm_t, cudaStream_t);
    ncclResult_t (*broadcast)(const void *, void *, size_t, ncclDataType_t, int, ncclComm_t,
                              cudaStream_t);
    ncclResult_t (*send)(const void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*recv)(void *, size_t, ncclDataType_t, int, ncclComm_t, cudaStream_t);
    ncclResult_t (*group_start)(void);
    ncclResult_t (*group_end)(void);
    const char *(*error_string)(ncclResult_t);
    const char *(*last_error)(ncclComm_t);
} nccl_library;

/* Of one group. */
typedef struct nccl_comm {
    nd_comm *comm;
    ncclComm_t native;
    nd_stream stream; /* its own, for operations with an event */
    cudaEvent_t events[NCCL_EVENTS];
    int next_event;
    cudaEvent_t last;   /* of the latest operation; NULL: none yet */
    bool on_own_stream; /* it runs there, and the caller's stream has not waited for it */
    bool grouped;       /* between group_begin and group_end: `last` is the event of them all */
    ncclResult_t group_result;
    nd_comm_op op; /* the latest, for messages */
    int64_t sequence, count;
    nd_dtype dtype;
    struct nccl_comm *next;
} nccl_comm;

typedef struct nccl_peer {
    int pidfd; /* -1: not of this host */
} nccl_peer;

typedef struct nccl_state {
    nd_device *device;
    nccl_library library;
    ncclComm_t world;
    nccl_comm *comms;
    nccl_peer *peers; /* [size] */
    nd_stream stream; /* of barriers and host memory */
    void *stage;      /* NCCL_STAGE_BYTES on the device */
    void *pinned;     /* the same on the host */
    int64_t watched_ns;
    nd_status failed; /* first fault; everything later repeats it */
    char message[ND_ERROR_MESSAGE_MAX];
} nccl_state;

static inline nccl_state *nccl_state_of(const nd_transport *transport)
{
    return transport->native;
}

nd_status nccl_library_open(nccl_library *out);
extern const nd_comm_backend nd_nccl_backend;

/* nccl_watch.c: all remember the fault, abort every communicator, and return it. */
nd_status nccl_failed(nd_transport *transport, const nccl_comm *nc, ncclResult_t result,
                      const char *call);
/* Polls until the communicator is no longer in progress. `what` for the message. */
nd_status nccl_settle(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                      ncclResult_t first, const char *what);
nd_status nccl_watch(void *transport, double seconds);
nd_status nccl_again(nccl_state *state); /* the remembered fault */

#endif
