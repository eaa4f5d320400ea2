// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_FAILURE_H
#define ND_WORKER_FAILURE_H
/*
 * The end of a worker that fails: which of the ranks that fail together reports, where no ndlaunch
 * collects their errors, and how the job ends.
 *
 * The store decides, by the order in which failures arrive there (runtime/rdzv/failure_page.h), and
 * tells all ranks at once. A rank with its own reason claims at once. A lost peer, a deadline that
 * passed, and an error that names another rank (nd_fail_elsewhere) are mostly consequences: such a
 * rank first asks for a better reason, and the store answers as soon as there is one, or at a
 * deadline.
 *
 * Ranks that wait for each other all reach their deadlines. Each records so in the store; the one
 * that recorded nothing is the one that is stuck.
 *
 * Under PMIx one rank reports and ends the job, which kills the others. Where rank 0, which hosts
 * the store, is lost, the others know from what the store had told them whether a rank reports. If
 * none does, the first process of each host that takes a name reports, which only one process of
 * the host can have. Ranks of a torchrun-like start have separate outputs: all of them report, and
 * name the first failure.
 */
#include <pthread.h>
#include <stdbool.h>

#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"

typedef struct nd_failure {
    const nd_identity *identity;
    nd_store *store;      /* NULL: it cannot be asked */
    int held;             /* descriptor of nd_failure_claim_host, or -1 */
    bool first;           /* the store has it as the job's first failure */
    bool ended;           /* reported, or found that another rank reports */
    pthread_mutex_t lock; /* of the thread that ends this process */
} nd_failure;

#define ND_FAILURE_INIT                                                                            \
    {                                                                                              \
        .held = -1, .lock = PTHREAD_MUTEX_INITIALIZER                                              \
    }

/*
 * Prints the error, or is silent when another rank reports, and under PMIx ends the job. From any
 * thread; does nothing when another one has done it, for which it waits. Bounded: 30 s where the
 * end of the job does not reach this process, a few seconds where the store does not answer.
 */
void nd_failure_end(nd_failure *failure, const nd_error *error);

/*
 * The same for a rank that was lost (nd_store_lost). True when this process has to end now, with
 * ND_ERR_IO. False when another thread is ending it, or when under PMIx another rank reports and
 * ends the job. Does not ask the store: its thread may be the caller.
 */
bool nd_failure_end_lost(nd_failure *failure, const char *message, bool first);

/*
 * True when this rank is to report `error`. `suffix` then gets what the store adds to the message,
 * or "". Waits up to patience_seconds for the better reason of another rank.
 */
bool nd_failure_claim(nd_failure *failure, const nd_error *error, double patience_seconds,
                      char *suffix, size_t capacity);

/*
 * True for the first process of this user and host that calls it for this job, at once and from any
 * thread. *held is the descriptor that holds the claim until it is closed or the process ends, or
 * -1. Also true when the system cannot decide: two reports are better than none.
 */
bool nd_failure_claim_host(const nd_identity *identity, int *held);

#endif
