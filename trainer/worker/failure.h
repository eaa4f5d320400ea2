// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_FAILURE_H
#define ND_WORKER_FAILURE_H
/*
 * The end of a worker that fails: which of the ranks that fail together reports, where no ndlaunch
 * collects their errors, and how the job ends.
 *
 * The store decides, by the order in which failures arrive there (runtime/rdzv/failure_record.h),
 * and sends the first one to all ranks at once. A rank with a reason of its own claims at once; one
 * whose reason may be another rank's (a lost peer, a deadline, nd_fail_elsewhere) first asks for a
 * better one. Under PMIx one rank reports and ends the job. Ranks of a torchrun-like start have
 * separate outputs: all of them report, and name the first failure. docs/comm.md has the cases.
 */
#include <stdatomic.h>
#include <stdbool.h>

#include "runtime/base/thread.h"
#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"

typedef struct nd_failure {
    const nd_identity *identity;
    nd_store *store;     /* NULL: it cannot be asked */
    int held;            /* descriptor of nd_failure_claim_host, or -1 */
    bool first;          /* the store has it as the job's first failure */
    bool ended;          /* reported, or found that another rank reports */
    double kill_seconds; /* for the end of the job to reach this process */
    nd_gate gate;        /* closed: a thread ends this process; first, held and ended are its own */
    atomic_bool
        silent; /* a thread has left the report to another rank, and waits for the job's end */
} nd_failure;

#define ND_FAILURE_INIT                                                                            \
    {                                                                                              \
        .held = -1, .kill_seconds = 30, .gate = ND_GATE_INIT                                       \
    }

/*
 * Prints the error, or is silent when another rank reports, and under PMIx ends the job. From any
 * thread; does nothing when another one has done it, for which it waits up to kill_seconds. Where
 * nothing ends this process it returns after about 80 s at most: about 10 s for the store,
 * kill_seconds in silence, 10 s for PMIx to take the end and kill_seconds for that to reach this
 * process.
 */
void nd_failure_end(nd_failure *failure, const nd_error *error);

/*
 * The same for a rank that was lost (nd_store_lost); then it ends this process with ND_ERR_IO,
 * under PMIx after 70 s at most. Returns true when there is nothing to do: another thread has
 * reported, or under PMIx another rank does. False: another thread decides at this moment; ask
 * again. Does not ask the store: its thread may be the caller.
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
/*
 * Waits so long, or until a signal ends this process. Meanwhile processes that ask who holds the
 * claim are answered: where more of them fail at once than the system keeps connections in a queue,
 * the rest waits in nd_failure_claim_host. A `held` of -1 is legal.
 */
void nd_failure_keep_host(int held, double seconds);

#endif
