// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_COMM_H
#define ND_COMM_COMM_H
/*
 * Communicators: collective operations among the ranks of one group.
 *
 * A transport is this rank's end of the world (self, ucx, nccl). A communicator is
 * one group on it. A group of size 1 uses `self`, which copies nothing where send and receive
 * buffer are the same, so callers never ask for the size of an axis. Where the transport's `alone`
 * is set, a group of size 1 uses the transport's own backend too: so NCCL runs on one GPU.
 *
 * Every operation is enqueued on `stream` and completes `done`; the buffers are lent until then.
 * With done == NULL the call returns when the operation is complete (nccl: when it is enqueued on
 * `stream` itself). All members must enter the operations of a group in the same order with the
 * same counts; operations of different groups may be pending together. Each communicator allows 8
 * pending operations; one more first completes the oldest. An event must be waited for, by the
 * stream that it was given with, before its storage is reused or goes away. Pending operations
 * advance whenever this rank enqueues or waits on any communicator of the transport.
 *
 * Reductions: the order is fixed (each slice reduced once, ascending by rank, accumulated in F32
 * for BF16, in the type itself otherwise, then gathered), so all members get the same bits and a
 * repeated run gets the same bits.
 *
 * Faults: a deadline (seconds) bounds every operation. ND_ERR_HANG names group, op, sequence number
 * and the ranks that are not there; ND_ERR_IO a peer that died; ND_ERR_INTERNAL members that called
 * different operations. After a fault the transport is unusable and the worker exits.
 */
#include <stdbool.h>
#include <stdint.h>

#include "runtime/base/progress.h"
#include "runtime/device/device.h"
#include "runtime/mesh/mesh.h"
#include "runtime/rdzv/address.h"
#include "runtime/rdzv/tls.h"
#include "runtime/tensor/dtype.h"

typedef enum nd_redop { ND_REDOP_SUM = 0, ND_REDOP_MAX } nd_redop;

typedef enum nd_comm_op {
    ND_COMM_ALL_REDUCE = 0,
    ND_COMM_ALL_GATHER,
    ND_COMM_REDUCE_SCATTER,
    ND_COMM_BROADCAST,
    ND_COMM_EXCHANGE,
    ND_COMM_ALL_TO_ALL,
    ND_COMM_BARRIER,
    ND_COMM_OP_COUNT,
    ND_COMM_SETUP = ND_COMM_OP_COUNT /* in progress slots: a communicator is made or ended */
} nd_comm_op;

const char *nd_comm_op_name(nd_comm_op op); /* "all_reduce" */

typedef struct nd_transport nd_transport;
typedef struct nd_comm nd_comm;

typedef struct nd_comm_stats { /* since creation, for metrics and tests */
    int64_t calls[ND_COMM_OP_COUNT];
    int64_t bytes_sent[ND_COMM_OP_COUNT]; /* payload this rank put on the wire (0 for self) */
} nd_comm_stats;

/* The arguments of an operation; a field that it does not use is 0. */
typedef struct nd_comm_args {
    const void *send;
    void *recv;
    int64_t count; /* elements: see each operation */
    nd_dtype dtype;
    nd_redop redop; /* all_reduce, reduce_scatter */
    int root;       /* broadcast: a member */
    int to, from;   /* exchange: members */
    /* all_to_all: (size) elements for each member and from each; both NULL: `count`. Lent until the
     * event. */
    const int64_t *sends, *receives;
} nd_comm_args;

/* Returns how many elements the members before `member` have in total, or all members where it is
 * the group's size. Each has `count` elements where `counts` is NULL. */
static inline int64_t nd_comm_elements_before(const int64_t *counts, int64_t count, int member)
{
    int64_t sum = counts ? 0 : count * member;
    for (int i = 0; counts && i < member; i++) {
        sum += counts[i];
    }
    return sum;
}

typedef nd_status nd_comm_call(nd_comm *, nd_stream *, const nd_comm_args *, nd_event *done);

/* One backend. The public functions below check arguments, count, and publish progress before they
 * call it. */
typedef struct nd_comm_backend {
    const char *name;                                            /* "self", "ucx", "nccl" */
    nd_status (*create)(nd_transport *transport, nd_comm *comm); /* NULL: nothing is to be made */
    void (*destroy)(nd_comm *comm);                              /* NULL: nothing is to be ended */
    /* Every operation, of one element at least, and a barrier, of none and without an event. */
    nd_status (*run)(nd_comm *, nd_stream *, nd_comm_op, const nd_comm_args *, nd_event *done);
    nd_status (*group_begin)(nd_comm *); /* both NULL: operations go out one by one */
    nd_status (*group_end)(nd_comm *);
    bool shows; /* the backend writes the progress slot; otherwise comm.c does */
    void (*abandon)(nd_transport *transport); /* NULL: nothing waits for a peer at the end */
    void (*close)(nd_transport *transport);   /* NULL: nothing is to be closed */
} nd_comm_backend;

struct nd_transport {
    const nd_comm_backend *backend;
    int rank, size;             /* world */
    bool alone;                 /* groups of size 1 use this backend, not `self` */
    double timeout_seconds;     /* deadline of every operation; > 0 */
    size_t staging_bytes;       /* 0; tests: of a group, in place of nd_comm_staging_bytes */
    nd_progress_slot *progress; /* this rank's slot, never NULL */
    const nd_progress *page;    /* slots of all workers of this host, or NULL */
    int (*slot_of_rank)(void *context,
                        int rank); /* slot on this host's page, -1 elsewhere; may be NULL */
    void *slot_context;
    void *native;
};

struct nd_comm {
    nd_transport *transport;
    const nd_comm_backend *backend; /* self when size is 1, unless the transport is `alone` */
    nd_group_kind kind;
    nd_group_kind shares; /* nd_comm_shared_group */
    int id;               /* the same on all members, distinct among the groups of one rank */
    int size, index;      /* this rank is member `index` */
    int *ranks;           /* [size] world ranks, owned */
    int64_t sequence;     /* operations entered */
    nd_comm_stats stats;
    void *native;
};

/*
 * The group of `kind` that `transport->rank` belongs to. Collective over the world: every rank
 * creates the same kinds in the same order. `duplicate` distinguishes several communicators of one
 * kind (weights gathered and gradients reduced at the same time must not serialise): 0, 1, ...
 */
nd_status nd_comm_create(nd_transport *transport, const nd_mesh *mesh, nd_group_kind kind,
                         int duplicate, nd_comm **out);
void nd_comm_destroy(nd_comm *comm);
void nd_transport_close(nd_transport *transport); /* NULL is legal */
/*
 * For a rank that fails, with the fault in the thread's error record, which stays as it is:
 * destroying its groups and closing the transport then wait for no peer. A rank that waits for this
 * one notices it when the connections break; over NCCL a rank of the same host notices it only when
 * this process has ended, or at its own deadline. A second call does nothing. NULL is legal.
 */
void nd_transport_abandon(nd_transport *transport);

/* buffer (count): every member ends with the reduction over members. In place. */
nd_status nd_comm_all_reduce(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                             nd_dtype dtype, nd_redop op, nd_event *done);
/* send (count) of each member -> recv (size x count) in member order. In place when send == recv +
 * index x count. */
nd_comm_call nd_comm_all_gather;
/* send (size x count) -> recv (count): slice `index` of the reduction. In place when recv == send +
 * index x count; `send` is otherwise left as it was. */
nd_comm_call nd_comm_reduce_scatter;
/* buffer (count) of member `root` -> all. */
nd_status nd_comm_broadcast(nd_comm *comm, nd_stream *stream, void *buffer, int64_t count,
                            nd_dtype dtype, int root, nd_event *done);
/* send (count) to member `to` while recv (count) arrives from member `from`: one hop of a ring. */
nd_comm_call nd_comm_exchange;
/* send (size x count), slice j to member j -> recv (size x count), slice i from member i. Not in
 * place. With `sends` and `receives`, which the members fill alike, slices of these lengths one
 * after the other, among two members or more; count is then any number that is the same on all
 * members: 0 where nobody sends. */
nd_comm_call nd_comm_all_to_all;
nd_status nd_comm_barrier(nd_comm *comm);

/*
 * All-gathers and reduce-scatters of `comm` between these two go out together: in one launch where
 * the backend can do that (nccl), otherwise one by one as they are entered. They have events, which
 * may be waited for after the end, and the same stream; what they read is enqueued before the
 * begin.
 */
nd_status nd_comm_group_begin(nd_comm *comm);
nd_status nd_comm_group_end(nd_comm *comm);

/* Host memory that a communicator of `size` members keeps for reductions (0 for 1); untouched
 * unless it reduces. */
size_t nd_comm_staging_bytes(int size);

/* Transports. */

/* The only rank of a world of one. */
nd_status nd_transport_open_self(nd_progress_slot *progress, nd_transport **out);

typedef struct nd_comm_network {
    nd_address address; /* its port does not count */
    nd_tls_context *client, *server;
} nd_comm_network;

/* With what ranks of a world open their ends of it. */
typedef struct nd_transport_options {
    int rank, size;
    double timeout_seconds;
    nd_progress_slot *progress;
    const nd_progress *page; /* as those of nd_transport */
    int (*slot_of_rank)(void *context, int rank);
    void *slot_context;
    /* The allgather of the rendezvous store: every rank gives `bytes` bytes and gets those of all
     * ranks (recv: size x bytes), with the store's own deadline. */
    nd_status (*exchange)(void *context, const void *send, void *recv, size_t bytes);
    void *exchange_context;

    /* UCX. Asked for where there are several hosts: the address at which this rank can be reached,
     * and the contexts of both sides with the job's key, which the transport takes. */
    nd_status (*network)(void *context, nd_comm_network *out);
    bool apart; /* for tests: as if every rank had a host of its own */

    /* NCCL. */
    nd_device *device; /* open and current */
    bool alone;        /* groups of size 1 use NCCL too, where its collectives are at most a copy */
    int max_blocks; /* most thread blocks (maxCTAs) of a collective of a group that gathers weights
                       and reduces gradients beside products; 0: NCCL chooses */
    /* Reports a fault before any call that may not return; may be NULL. With `ends` the caller is a
     * thread of the transport, because the driving thread is stuck: the process ends with `status`
     * when on_fault returns. */
    void (*on_fault)(void *context, nd_status status, const char *sentence, bool ends);
    void *fault_context;
} nd_transport_options;

/* UCX. Ranks of one host share memory and open no port; between hosts messages go over TLS (net/).
 */
nd_status nd_transport_open_ucx(const nd_transport_options *options, nd_transport **out);
/*
 * Before a start: whether /dev/shm has room for UCX's shared memory of so many workers of this
 * host, once what killed workers left there is removed. ND_ERR_RESOURCE with both numbers.
 */
nd_status nd_transport_check_ucx_room(int64_t local_workers);
/* The version of UCX in this process: "none" in a build without it. Where no transport has opened
 * it, this opens it with `open` ("not installed" when that fails), and says "not used" without. */
const char *nd_transport_ucx_version(bool open);

/*
 * NCCL, for device cuda. Buffers are device memory; an all-reduce without an event may also be of
 * host memory (4096 bytes at most), and then waits. Otherwise no call waits on the host: with done
 * == NULL later work of `stream` sees the result. Sums are NCCL's: BF16 is rounded at each hop, and
 * all members get the same bits.
 */
nd_status nd_transport_open_nccl(const nd_transport_options *options, nd_transport **out);

/*
 * The first group with the same members in the same order, whose communicator serves this one too
 * where that saves memory (nccl); `kind` itself where there is none, and for groups with large
 * operations, which must not wait for each other. The answer is the same on all ranks.
 */
nd_group_kind nd_comm_shared_group(const nd_mesh *mesh, nd_group_kind kind);

/*
 * An estimate of the device memory that NCCL uses for the groups of a mesh: it depends on GPUs,
 * links and NCCL's own environment. Each group with collectives and several ranks that shares none
 * has a communicator that connects at its first use, over 24 channels (16 to 32 on NVLink). A
 * channel has a buffer for what it receives, 4 MiB of protocol Simple and those of LL and LL128, 10
 * MiB in granules of 2 MiB, and a granule for what it sends (sources: NVIDIA/nccl, issues 285 and
 * 1685).
 */
size_t nd_comm_nccl_bytes(const nd_mesh *mesh);

/* All communicators of one rank. mesh.def has their number for each group; the others are NULL. */
typedef struct nd_groups {
    nd_comm *by_kind[ND_GROUP_COUNT];
    nd_comm *second[ND_GROUP_COUNT]; /* dp_shard_cp: the reduce-scatters of gradients */
} nd_groups;
nd_status nd_groups_create(nd_transport *transport, const nd_mesh *mesh, nd_groups *out);
void nd_groups_destroy(nd_groups *groups);

#endif
