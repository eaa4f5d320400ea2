// SPDX-License-Identifier: Apache-2.0
#ifndef ND_WORKER_FAILURE_H
#define ND_WORKER_FAILURE_H
/*
 * Which of the ranks that fail together reports, where no ndlaunch collects their errors.
 *
 * The store decides, by the order in which failures arrive there (runtime/rdzv/failure_page.h). A
 * rank with its own reason claims at once. A lost peer, a deadline that passed, and an error that
 * names another rank (nd_fail_elsewhere) are mostly consequences: such a rank first waits for a
 * better reason, which the store answers as soon as it is there.
 *
 * Ranks that wait for each other all reach their deadlines. Each records so in the store; the one
 * that recorded nothing is the one that is stuck.
 *
 * Under PMIx one rank reports and ends the job, which kills the others. A rank that cannot ask the
 * store claims its host instead, by a name that only one process of the host can have: the other
 * ranks there are silent, and several hosts may each report. Ranks of a torchrun-like start have
 * separate outputs: all of them report, and name the first failure.
 */
#include <stdbool.h>

#include "runtime/rdzv/identity.h"
#include "runtime/rdzv/store.h"

typedef struct nd_failure {
    const nd_identity *identity;
    nd_store *store; /* NULL: the ranks have not met */
    int *held;       /* gets the descriptor of nd_failure_claim_host */
} nd_failure;

/*
 * True when this rank is to report `error`. `suffix` then gets what the store adds to the message,
 * or "". Takes up to patience_seconds for a rank whose reason may lie elsewhere, or a few seconds
 * when the store does not answer. Called once, by the main thread, which alone uses the store.
 */
bool nd_failure_claim(const nd_failure *failure, const nd_error *error, double patience_seconds,
                      char *suffix, size_t capacity);

/*
 * True for the first process of this user and host that calls it for this job, at once and from any
 * thread. *held is the descriptor that holds the claim until it is closed or the process ends, or
 * -1. Also true when the system cannot decide: two reports are better than none.
 */
bool nd_failure_claim_host(const nd_identity *identity, int *held);

/* Waits until this process is killed because the job ends, or so long, or until a signal. Then no
 * other rank had a better reason, or none that could end the job. */
void nd_failure_wait_end(double seconds);

#endif
