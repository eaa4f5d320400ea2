// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_FAILURE_H
#define ND_WORKER_FAILURE_H
/*
 * The end of a worker that fails. Each rank prints its own error. Under PMIx it also ends the job,
 * which kills the other ranks: so a rank whose reason may be another one's (a lost peer,
 * nd_fail_elsewhere) leaves that one some seconds to do so, and is killed before it prints
 * anything. At a deadline every rank prints at once which others it waits for, and the job ends
 * some seconds later.
 */
#include <stdbool.h>

#include "runtime/base/thread.h"
#include "runtime/rdzv/identity.h"

typedef struct nd_failure {
    const nd_identity *identity;
    double kill_seconds; /* for the end of the job to reach this process */
    nd_gate gate;        /* closed: a thread reports */
    bool ended;          /* it has reported */
} nd_failure;

#define ND_FAILURE_INIT                                                                            \
    {                                                                                              \
        .kill_seconds = 30, .gate = ND_GATE_INIT                                                   \
    }

/*
 * Prints the error and under PMIx ends the job. From any thread; does nothing when another one has
 * done it, for which it waits up to kill_seconds. Where nothing ends this process it returns after
 * about 45 s at most: 4 s for another rank, 10 s for PMIx to take the end and kill_seconds for that
 * to reach this process.
 */
void nd_failure_end(nd_failure *failure, const nd_error *error);

/* The same for a rank that was lost (nd_store_watch); then it ends this process with ND_ERR_IO.
 * Returns when another thread has reported. */
void nd_failure_end_lost(nd_failure *failure, const char *message);

#endif
