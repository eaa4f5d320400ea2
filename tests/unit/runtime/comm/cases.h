// SPDX-License-Identifier: Apache-2.0
#ifndef TESTS_UNIT_RUNTIME_COMM_CASES_H
#define TESTS_UNIT_RUNTIME_COMM_CASES_H
/* Bodies for nd_ranks that both transports must pass. Contexts lie in memory that forked ranks
 * share. */
#include "tests/support/ranks.h"

/* Every operation, type, reduction and form on the world group: the same bits as a serial model. */
typedef struct case_collectives {
    int64_t counts[8]; /* ends with -1 */
    double large;      /* one more count: this share of a round of the staging, 0 for none */
    size_t staging;    /* nd_transport.staging_bytes */
} case_collectives;
nd_status case_collectives_body(nd_transport *transport, void *context);

/* Shared memory for a context; lives until the test process ends. */
void *case_shared(size_t bytes);

/* The world group of a transport (mesh: dp_shard = size). */
nd_status case_world(nd_transport *transport, nd_comm **out);

/* Operations pending together: four on one communicator, others on three more, waited for in
 * another order. */
nd_status case_pending_body(nd_transport *transport, void *context);
/* A sum whose slices fill whole rounds of the staging, but for one that has an element more. */
nd_status case_uneven_body(nd_transport *transport, void *context);
/* Two ranks: an event that was not waited for is complete once its operation's place is used again,
 * and does not wait for the operation that is there now. */
typedef struct case_stale {
    _Atomic int waited; /* rank 0 has waited for its stale event */
} case_stale;
nd_status case_stale_body(nd_transport *transport, void *context);
/* All groups of a 2 x 2 x 1 x 2 mesh (8 ranks): each sums its members' ranks. */
nd_status case_groups_body(nd_transport *transport, void *context);
/* MAX and SUM with NaN in one member's contribution: all members get the same bits. */
nd_status case_nan_body(nd_transport *transport, void *context);

/* Faults. The context names the rank that misbehaves; the others report what they saw by their
 * status. */
typedef enum case_fault {
    CASE_SKIP,        /* waits for the others to end instead of entering operation 3 */
    CASE_LEAVE,       /* returns instead of entering operation 3 */
    CASE_OTHER_OP,    /* calls `other` */
    CASE_OTHER_COUNT, /* another count */
    CASE_OTHER_TYPE,  /* another type of the same size */
    CASE_OTHER_ROOT,  /* another root, of a broadcast */
    CASE_OTHER_SUM,   /* another reduction */
    CASE_STOP,        /* raises SIGSTOP (processes only) */
    CASE_KILL,        /* raises SIGKILL (processes only) */
} case_fault;
typedef struct case_faulty {
    case_fault fault;
    int rank;
    int64_t count; /* F32 elements of the operations */
    nd_comm_op op, other;
    _Atomic int ended; /* of the other ranks */
} case_faulty;
nd_status case_fault_body(nd_transport *transport, void *context);

/*
 * The reports that four ranks must give of a fault of rank 2. The rank that notices first must fail
 * with `status` and a sentence that holds each of `words`; another one may instead notice that
 * one's end, as in a real job. A fault that is no hang must be seen before the deadline.
 */
typedef struct case_expected {
    case_fault fault;
    int64_t count;
    nd_status status;
    const char *const *words; /* end with NULL */
    bool apart;               /* nd_ranks */
} case_expected;
nd_status case_check_fault(const case_expected *expected, nd_status (*run)(nd_ranks *));

#endif
