// SPDX-License-Identifier: Apache-2.0
#ifndef ND_COMM_P2P_H
#define ND_COMM_P2P_H
/*
 * Collectives in host memory, written once over a small point-to-point interface (nd_p2p) that the
 * local and the ucx transport implement: both run the same schedule and give the same bits.
 *
 * An operation is up to four lanes of messages (two of receives, two of sends). A plan says what
 * message m of a lane is, when it may be posted and what follows its arrival; the engine posts up
 * to ND_P2P_WINDOW messages of a lane at a time and calls the plan until every lane is done. All
 * pending operations of a transport are advanced while it waits for one of them. One thread drives
 * a transport.
 *
 * Requests live in the operations and operations in their communicator: a running operation
 * allocates nothing, except between hosts (net/) when more messages than ever wait there.
 */
#include <stdatomic.h>
#include <stdbool.h>

#include "runtime/comm/backend.h"

enum {
    ND_P2P_PENDING = 8, /* operations of one communicator that may be pending */
    ND_P2P_WINDOW = 16, /* messages of one lane in flight */
};

/* A tag: communicator (8 bits), sender's world rank (20), sequence (10), operation (3), dtype (4),
 * hash of the remaining arguments (18), phase (1). Members that call different operations therefore
 * never match, and the engine can name what the other one called. */
typedef uint64_t nd_tag;
enum {
    ND_TAG_PHASE_BITS = 1,
    ND_TAG_HASH_BITS = 18,
    ND_TAG_DTYPE_BITS = 4,
    ND_TAG_OP_BITS = 3,
    ND_TAG_SEQUENCE_BITS = 10,
    ND_TAG_RANK_BITS = 20,
    ND_TAG_HASH_AT = ND_TAG_PHASE_BITS,
    ND_TAG_DTYPE_AT = ND_TAG_HASH_AT + ND_TAG_HASH_BITS,
    ND_TAG_OP_AT = ND_TAG_DTYPE_AT + ND_TAG_DTYPE_BITS,
    ND_TAG_SEQUENCE_AT = ND_TAG_OP_AT + ND_TAG_OP_BITS,
    ND_TAG_RANK_AT = ND_TAG_SEQUENCE_AT + ND_TAG_SEQUENCE_BITS,
    ND_TAG_COMM_AT = ND_TAG_RANK_AT + ND_TAG_RANK_BITS,
};
#define ND_TAG_FIELD(tag, name)                                                                    \
    ((tag) >> ND_TAG_##name##_AT & ((UINT64_C(1) << ND_TAG_##name##_BITS) - 1))

enum {
    ND_REQUEST_IDLE = 0,
    ND_REQUEST_POSTED,
    ND_REQUEST_BUSY,
    ND_REQUEST_DONE,
    ND_REQUEST_FAILED
};

/* One message in flight. The engine fills it, the transport moves `state` from POSTED to DONE or
 * FAILED. */
typedef struct nd_p2p_request {
    _Atomic int state;
    int peer;        /* world rank */
    int64_t message; /* index within its lane */
    nd_tag tag;
    void *buffer;
    size_t bytes;
    void *native; /* the transport's own */
    struct nd_p2p_request *next;
} nd_p2p_request;

typedef struct nd_p2p {
    nd_status (*connect)(nd_transport *transport, int rank); /* repeated calls are cheap */
    nd_status (*send)(nd_transport *transport, nd_p2p_request *request);
    nd_status (*recv)(nd_transport *transport, nd_p2p_request *request);
    void (*cancel)(nd_transport *transport, nd_p2p_request *request);
    nd_status (*progress)(nd_transport *transport);
    /* Sleeps until something may have arrived, `seconds` at most. `idle` counts calls without an
     * arrival between. */
    nd_status (*wait)(nd_transport *transport, int idle, double seconds);
    /* A message that arrived without being wanted: its tag where (tag & mask) == (wanted &
     * mask). */
    bool (*peek)(nd_transport *transport, nd_tag wanted, nd_tag mask, nd_tag *found, size_t *bytes);
    bool (*gone)(nd_transport *transport, int rank); /* its process or thread has ended */
    /* One clause about the process of `rank` (" (process 71 is stopped)"), or "". */
    void (*describe)(nd_transport *transport, int rank, char *text, size_t size);
    void (*close)(nd_transport *transport, bool failed);
} nd_p2p;

enum { ND_LANE_RECV = 0, ND_LANE_RECV_RESULT, ND_LANE_SEND, ND_LANE_SEND_RESULT, ND_LANE_COUNT };

typedef struct nd_p2p_op nd_p2p_op;

/* A plan's description of one message. */
typedef struct nd_message {
    int member; /* index within the group */
    void *buffer;
    size_t bytes;
} nd_message;

typedef struct nd_p2p_plan {
    bool needs_staging;           /* runs only while no earlier operation uses the staging buffer */
    void (*begin)(nd_p2p_op *op); /* sets the lanes' totals and copies this rank's own part */
    void (*message)(nd_p2p_op *op, int lane, int64_t index, nd_message *out);
    bool (*ready)(const nd_p2p_op *op, int lane, int64_t index); /* NULL: always */
    void (*arrived)(nd_p2p_op *op, int lane, int64_t index);     /* NULL: nothing follows */
} nd_p2p_plan;

typedef struct nd_lane {
    int64_t total, next, done;
    nd_p2p_request requests[ND_P2P_WINDOW];
} nd_lane;

struct nd_p2p_op {
    nd_comm *comm;
    const nd_p2p_plan *plan;
    nd_event *event; /* the caller's, until it is waited for */
    bool active, begun;
    nd_comm_op kind;
    nd_comm_args args;
    int64_t sequence;
    nd_tag tag;     /* with this rank as sender, phase 0 */
    size_t element; /* bytes */
    size_t block;   /* bytes of one member's part, for plans that use it */
    nd_lane lanes[ND_LANE_COUNT];
    /* Plans with rounds (reduce.c's order needs all of a round before it computes). */
    int64_t chunk;       /* elements of one round */
    int64_t waiting[2];  /* receives missing in the round that holds this half of the staging */
    int64_t reduced[2];  /* rounds computed in this half */
    uint64_t steps_done; /* bit m: receive m of a stepwise plan has arrived */
};

typedef struct nd_p2p_comm {
    nd_comm *comm;
    struct nd_p2p_comm *next;
    int active;
    char *staging;
    size_t staging_bytes;
    const void **sources; /* [size], for nd_reduce */
    nd_p2p_op ops[ND_P2P_PENDING];
} nd_p2p_comm;

/* transport->native of both transports over nd_p2p. */
typedef struct nd_p2p_transport {
    const nd_p2p *p2p;
    void *state; /* of the transport */
    nd_p2p_comm *comms;
    int active;
    nd_status failed; /* first fault; everything later repeats it */
    char message[ND_ERROR_MESSAGE_MAX];
} nd_p2p_transport;

/* `state` gets state_bytes zero bytes, which are freed after p2p->close. */
nd_status nd_p2p_transport_create(const nd_p2p *p2p, const nd_transport_options *options,
                                  size_t state_bytes, nd_transport **out);

/* p2p_plans.c */
extern const nd_p2p_plan nd_plan_direct; /* all-gather, all-to-all, exchange, barrier of few */
extern const nd_p2p_plan nd_plan_gather; /* small all-reduce: gather everything, reduce here */
extern const nd_p2p_plan nd_plan_bruck;  /* the same of many, in log2 n steps; barrier, gather */
extern const nd_p2p_plan nd_plan_tree;   /* broadcast */
extern const nd_p2p_plan nd_plan_reduce; /* reduce-scatter, large all-reduce */

static inline nd_p2p_transport *nd_p2p_of(const nd_comm *comm)
{
    return comm->transport->native;
}

#endif
