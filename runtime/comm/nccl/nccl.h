// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_NCCL_NCCL_H
#define ND_COMM_NCCL_NCCL_H
/*
 * Communication over NCCL. One world communicator, and one split of it per group; a group of small
 * operations uses that of another group with the same members.
 *
 * An operation with an event runs on its communicator's own stream: that stream first waits for
 * what the caller's stream holds at that moment, so later work of the caller overlaps with it. An
 * operation without one runs on the caller's stream itself, after what the communicator has
 * pending; nothing waits on the host. A small all-reduce of host memory goes through a pinned
 * buffer and does wait.
 *
 * NCCL is non-blocking: every call that may take long is polled with the transport's deadline.
 *
 * Each communicator has a ring of its pending operations, with an event before and one after each.
 * The deadline counts for an operation that has begun and not ended; it restarts whenever an
 * operation of any communicator ends. A look (nccl_watch.c) compares that with the clock, asks
 * every communicator for asynchronous errors, and looks at the processes of this host's peers. The
 * driving thread looks while it waits; another one looks all the time, and ends the process when
 * the driving thread no longer looks, because it is inside CUDA, whose queues are full, or inside
 * NCCL. A fault is first written where the launcher finds it; then all communicators are aborted,
 * which must return within seconds.
 *
 * Two locks. `calls` is held during calls of NCCL, which allows one thread at a time. `ring` is
 * held to read and write the rings and the state of peers, never across a call that may wait. A
 * thread that needs both locks `ring` first; the watching thread only tries `calls`.
 */
#include <cuda_runtime_api.h>
#include <nccl.h>
#include <pthread.h>

#include "runtime/base/thread.h"
#include "runtime/comm/backend.h"
#include "runtime/base/call_limit.h"

enum {
    NCCL_RING = 512,           /* pending operations: more than CUDA's queue of a stream holds */
    NCCL_STAGING_BYTES = 4096, /* most host memory of one all-reduce */
    NCCL_ABORT_SECONDS = 5     /* for the abort of all communicators */
};

typedef struct nccl_library {
    ncclResult_t (*version)(int *);
    ncclResult_t (*unique_id)(ncclUniqueId *);
    ncclResult_t (*init)(ncclComm_t *, int, ncclUniqueId, int, ncclConfig_t *);
    ncclResult_t (*split)(ncclComm_t, int, int, ncclComm_t *, ncclConfig_t *);
    ncclResult_t (*async_error)(ncclComm_t, ncclResult_t *);
    ncclResult_t (*finalize)(ncclComm_t);
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

typedef struct nccl_entry {
    cudaEvent_t begin; /* in the caller's stream: what the operation waits for has run */
    cudaEvent_t end;
    nd_group_kind kind;
    nd_comm_op op;
    nd_dtype dtype;
    int64_t sequence, count;
} nccl_entry;

/* Operations in the order of their communicator, in which they also run. */
typedef struct nccl_ring {
    nccl_entry entries[NCCL_RING];
    int64_t head, tail; /* entered, ended: numbers of entries */
    int64_t begun_ns;   /* when the oldest was first seen running; 0: it was not */
} nccl_ring;

/* A communicator of NCCL, of one group or of several with the same members (nd_comm.shares). */
typedef struct nccl_comm {
    nd_comm group;       /* a copy of the one that it was made for, which may end before others */
    const nd_comm *comm; /* &group */
    int users;           /* groups that use it */
    ncclComm_t native;
    nd_stream stream; /* its own, for operations with an event */
    nccl_ring ring;
    cudaEvent_t last;         /* of the latest operation; NULL: none yet */
    cudaStream_t last_stream; /* where that ran */
    bool grouped; /* between group_begin and group_end: one entry of the ring for them all */
    ncclResult_t group_result;
    nccl_entry *entry; /* being entered */
    nd_thread aborter;
    struct nccl_comm *next;
} nccl_comm;

typedef struct nccl_peer {
    int pid;           /* 0: not of this host, or this process itself */
    int pidfd;         /* -1: none */
    int64_t gone_ns;   /* when its end was first seen; 0: it was not */
    int64_t missed_ns; /* when a look first found it gone and peers waited for; 0: none did */
} nccl_peer;

typedef struct nccl_state {
    nd_device *device;
    int max_blocks; /* of nd_transport_options */
    nccl_library library;
    ncclComm_t world;
    nccl_comm *comms;  /* complete ones; changes under both locks */
    nccl_comm *making; /* of the driving thread, and not in the list: a thread of NCCL writes its
                          `native`, until the world has settled or is aborted */
    nccl_peer *peers;  /* [size] */
    nd_stream stream;  /* of barriers and host memory */
    void *staging;     /* NCCL_STAGING_BYTES on the device */
    void *pinned;      /* the same on the host */
    void (*on_fault)(void *context, nd_status status, const char *sentence, bool ends);
    void *fault_context;
    pthread_mutex_t calls, ring;
    nccl_comm *grouping;  /* whose group is open; `calls` is held meanwhile */
    int64_t progress_ns;  /* when an operation was last seen to have ended; under `ring` */
    nccl_entry called;    /* what the driving thread polls NCCL for: it connects, or is set up */
    int64_t called_ns;    /* since when; 0: nothing. Both stay set after a fault; under `ring` */
    nccl_entry ended;     /* the operation that did; its sequence is 0: none yet. Under `ring` */
    int64_t watched_ns;   /* of the driving thread's looks */
    nd_call_limit *limit; /* on calls of NCCL and CUDA that may not return */
    nd_thread watch;
    nd_monitor watching;         /* of the ends of the watch and the aborters */
    _Atomic int64_t attended_ns; /* when the driving thread looked last */
    atomic_bool taken;           /* a fault is: the other thread leaves it */
    nd_status failed;            /* first fault; everything later repeats it */
    char message[ND_ERROR_MESSAGE_MAX];
} nccl_state;

static inline nccl_state *nccl_state_of(const nd_transport *transport)
{
    return transport->native;
}

static inline nccl_comm *nccl_comm_of(const nd_comm *comm)
{
    return comm->native;
}

/* The remembered fault; ND_OK: none. */
static inline nd_status nccl_failure(const nccl_state *state)
{
    return state->failed ? nd_fail(state->failed, "%s", state->message) : ND_OK;
}

/* nccl_watch.c. Those that return a fault have remembered it and aborted every communicator. */
/* Polls until the communicator is no longer in progress. `what` for the message; `ends` of
 * ncclCommFinalize, where a peer that has ended is no fault. */
nd_status nccl_settle(nd_transport *transport, const nccl_comm *nc, ncclComm_t native,
                      ncclResult_t first, const char *what, bool ends);
/* nc->entry becomes the next of the ring, for the driving thread; waits while it is full. */
nd_status nccl_claim_entry(nd_transport *transport, nccl_comm *nc);
void nccl_group_close(nccl_state *state); /* a group that a failure left open; else nothing */
/* Takes the thread's error record for the fault; returns it. */
nd_status nccl_give_up(nd_transport *transport);
nd_status nccl_watch_start(nd_transport *transport); /* from now on faults are looked for */
void nccl_watch_stop(nd_transport *transport);

#endif
